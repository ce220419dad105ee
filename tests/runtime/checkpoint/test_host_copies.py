"""Copies that stay as they are while the shards change, in memory that is allocated once."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.runtime.checkpoint import host_copies
from palm_ds.runtime.checkpoint.host_copies import HostCopies, bytes_of
from palm_ds.runtime.checkpoint.shard_files import WEIGHT, ParamShard, write_shards

CPU = torch.device("cpu")


def shards(*sizes: int, moments: bool = True) -> list[ParamShard]:
    """Views of one flat tensor, as ZeRO has them."""
    flat, out, start = torch.randn(3, sum(sizes)), [], 0
    for number, size in enumerate(sizes):
        rows = flat[:, start : start + size]
        kinds = (WEIGHT, "exp_avg", "exp_avg_sq") if moments else (WEIGHT,)
        out.append(ParamShard(f"layer{number}", 7, dict(zip(kinds, rows, strict=False)), {}))
        start += size
    return out


def values(found: list[ParamShard]) -> list[torch.Tensor]:
    return [tensor.clone() for shard in found for tensor in shard.tensors.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


def test_copies_keep_the_values_of_their_moment() -> None:
    copies, mine = HostCopies(CPU), shards(5, 1, 30)
    before, made = values(mine), copies.copy(mine)
    copies.wait()
    for shard in mine:
        for tensor in shard.tensors.values():
            tensor.add_(1)
    assert same(values(made), before) and not same(values(mine), before)
    assert [(s.name, s.start, list(s.tensors)) for s in made] == [
        (s.name, s.start, list(s.tensors)) for s in mine
    ]
    assert bytes_of(mine) == 4 * 3 * 36


def test_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when there are moments, after the first update."""
    monkeypatch.setattr(host_copies, "_CHUNK_VALUES", 40)
    copies = HostCopies(CPU)
    copies.copy(shards(5, 1, 30, moments=False))
    mine = shards(5, 1, 30)
    addresses = [t.data_ptr() for s in copies.copy(mine) for t in s.tensors.values()]
    again = copies.copy(mine)
    assert [t.data_ptr() for s in again for t in s.tensors.values()] == addresses
    assert same(values(again), values(mine))


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([40], [[40]]),
        ([41, 1], [[41], [1]]),
        ([20, 20, 1, 100, 3], [[20, 20], [1], [100], [3]]),
    ],
)
def test_chunks(sizes, groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_CHUNK_VALUES", 40)
    assert list(host_copies._groups(sizes)) == groups


def test_half_precision_is_copied_as_fp32() -> None:
    weight = torch.randn(9).bfloat16()
    (made,) = HostCopies(CPU).copy([ParamShard("x", 0, {WEIGHT: weight}, {})])
    assert made.tensors[WEIGHT].dtype == torch.float32
    assert torch.equal(made.tensors[WEIGHT], weight.float())


def test_files_of_copies_are_those_of_the_shards_byte_for_byte(tmp_path) -> None:
    mine = shards(5, 1, 30)
    for name, found in (("direct", mine), ("copied", HostCopies(CPU).copy(mine))):
        (tmp_path / name).mkdir()
        write_shards(found, "p", lambda file, make, n=name: make(tmp_path / n / file))
    names = [path.name for path in (tmp_path / "direct").iterdir()]
    assert names == ["p_000.safetensors"]
    direct, copied = (tmp_path / name / names[0] for name in ("direct", "copied"))
    assert direct.read_bytes() == copied.read_bytes()
    assert torch.equal(load_file(copied)["exp_avg/7/layer2"], mine[2].tensors["exp_avg"])
