"""Shards written by some processes and read by others. ZeRO engines are tested in
distributed/test_engine.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.runtime.checkpoint import shard_files, sharded_state
from palm_ds.runtime.checkpoint.shard_files import (
    AVERAGE,
    ParamShard,
    ResizedTable,
    ShardReader,
    write_shards,
)
from palm_ds.runtime.checkpoint.sharded_state import LocalShards
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import param_groups
from palm_ds.runtime.optimizer.wrappers import EMA

KINDS = ("weight", "exp_avg", "exp_avg_sq")


class AveragingAdamW(EMA, torch.optim.AdamW):
    """AdamW with averages, as in a run."""


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(step, step + 3) % 7).square().sum().backward()
        optimizer.step()
    return model, optimizer


def local_shards(
    model: nn.Module, base: torch.optim.AdamW, rank: int = 0, world: int = 1
) -> LocalShards:
    names = dict(model.named_parameters())
    return LocalShards(parameters=names, base=base, zero=None, stage=0, rank=rank, world=world)


def store(folder: Path, world: int, model: nn.Module, base: torch.optim.AdamW) -> ShardReader:
    files: list[Path] = []
    folder.mkdir(exist_ok=True)

    def write(name: str, make: Callable[[Path], None]) -> None:
        make(folder / name)
        files.append(folder / name)

    for rank in range(world):
        shards = local_shards(model, base, rank, world).shards_to_write()
        write_shards(shards, f"process_{rank}", write)
    return ShardReader(files)


def state(model: nn.Module, base: torch.optim.AdamW) -> list[torch.Tensor]:
    everything = []
    for parameter in model.parameters():
        entry = base.state[parameter]
        everything += [parameter.detach(), entry["exp_avg"], entry["exp_avg_sq"], entry["step"]]
    return [each.clone() for each in everything]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_written_shards_are_restored(world: int, tmp_path: Path) -> None:
    model, base = trained(0, steps=4)
    stored = store(tmp_path, world, model, base)
    steps = local_shards(model, base).update_counts()
    assert steps == dict.fromkeys(dict(model.named_parameters()), 4)
    other, fresh = trained(1, steps=0)
    sharded_state.restore(local_shards(other, fresh), stored, steps)
    for restored, original in zip(state(other, fresh), state(model, base), strict=True):
        assert torch.equal(restored, original)


def test_each_value_is_written_once(tmp_path: Path) -> None:
    model, base = trained(0, steps=1)
    store(tmp_path, 3, model, base)
    keys = []
    for file in sorted(tmp_path.iterdir()):
        with safe_open(file, framework="pt") as opened:
            keys += list(opened.keys())
    expected = {f"{kind}/0/{name}" for kind in KINDS for name, _ in model.named_parameters()}
    assert sorted(keys) == sorted(expected)


def test_shards_are_joined_wherever_they_were_cut(tmp_path: Path) -> None:
    values = {kind: torch.randn(100) for kind in KINDS}
    files: list[Path] = []

    def write(name: str, make: Callable[[Path], None]) -> None:
        make(tmp_path / name)
        files.append(tmp_path / name)

    for rank, (start, end) in enumerate([(0, 37), (37, 38), (38, 100)]):
        part = {kind: tensor[start:end] for kind, tensor in values.items()}
        write_shards([ParamShard("w/x", start, part, {})], f"process_{rank}", write)
    stored = ShardReader(files)
    assert "w/x" in stored and "x" not in stored and stored.size("w/x") == 100
    for kind in KINDS:
        for start, end in [(0, 100), (36, 39), (37, 38), (5, 5), (99, 100)]:
            found = stored.read("w/x", kind, start, end)
            assert torch.equal(found, values[kind][start:end])


def test_large_shards_are_written_to_several_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shard_files, "_FILE_BYTES", 100)
    model, base = trained(0, steps=2)
    stored = store(tmp_path, 1, model, base)
    assert len(list(tmp_path.iterdir())) > 2
    whole = dict(model.named_parameters())["1.weight"]
    assert torch.equal(stored.read("1.weight", "weight", 0, 15), whole.detach().view(-1))


def test_files_are_closed_and_reopened(tmp_path: Path, monkeypatch) -> None:
    """So the mapped pages of a checkpoint do not fill the memory."""
    monkeypatch.setattr(shard_files, "_MAPPED_BYTES", 60)
    model, base = trained(0, steps=2)
    stored = store(tmp_path, 2, model, base)
    open_ever: set[int] = set()
    for name, parameter in model.named_parameters():
        for kind, values in (("weight", parameter.data), *base.state[parameter].items()):
            if kind != "step":
                found = stored.read(name, kind, 0, parameter.numel())
                assert torch.equal(found, values.flatten())
                open_ever.add(len(stored._open))
    assert open_ever == {1, 2}
    (tmp_path / "process_1_000.safetensors").unlink()
    with pytest.raises(UserError, match="process_1_000.safetensors: was deleted while"):
        for _ in range(3):
            stored.read("1.weight", "weight", 0, 15)


def test_resized_tables(tmp_path: Path) -> None:
    """Old rows move with their moments; new rows have initial values and no moments."""
    model, base = trained(0, steps=5)
    stored = store(tmp_path, 1, model, base)
    first = torch.full((9, 3), 0.5)
    rows = (2, -1, 0, 1, 3, 4, 5, 6, -1)
    resized = ResizedTable(rows=rows, first=first)
    old = dict(model.named_parameters())["0.weight"]
    moments = base.state[old]
    for kind, before, new in (
        ("weight", old.detach(), 0.5),
        ("exp_avg", moments["exp_avg"], 0.0),
        ("exp_avg_sq", moments["exp_avg_sq"], 0.0),
    ):
        table = resized.read(stored, "0.weight", kind, 0, 27).view(9, 3)
        for row, source in enumerate(rows):
            expected = torch.full((3,), new) if source < 0 else before[source]
            assert torch.equal(table[row], expected), (kind, row)
        part = resized.read(stored, "0.weight", kind, 4, 11)
        assert torch.equal(part, table.view(-1)[4:11])


def test_fresh_parameters_stay_and_missing_ones_are_errors(tmp_path: Path) -> None:
    model, base = trained(0, steps=3)
    stored = store(tmp_path, 1, model, base)
    bigger = nn.ModuleDict({"0": model, "head": nn.Linear(2, 2)})  # other names
    optimizer = torch.optim.AdamW(bigger.parameters(), lr=0.1)
    steps = local_shards(model, base).update_counts()
    with pytest.raises(UserError, match=r"no parameter '0\.0\.weight'"):
        sharded_state.restore(local_shards(bigger, optimizer), stored, steps)
    other, fresh = trained(1, steps=0)
    before = dict(other.named_parameters())["2.bias"].detach().clone()
    sharded_state.restore(local_shards(other, fresh), stored, steps, fresh=["2.bias"])
    named = dict(other.named_parameters())
    assert torch.equal(named["2.bias"], before)
    assert int(fresh.state[named["2.weight"]]["step"]) == 3
    assert named["2.bias"] not in fresh.state


def test_frozen_parameters_have_weights_only(tmp_path: Path) -> None:
    """Each process writes its part in fp32, although the model computes with rounded weights."""
    model, base = trained(0, steps=2)
    model[1].requires_grad_(False)  # type: ignore[index]
    names = dict(model.named_parameters())
    exact = {n: p.detach().clone() for n, p in names.items() if not p.requires_grad}
    assert len(exact) == 2
    files: list[Path] = []

    def write(name: str, make: Callable[[Path], None]) -> None:
        make(tmp_path / name)
        files.append(tmp_path / name)

    frozen = [sharded_state.frozen_shards(model, rank, 4) for rank in range(4)]
    for name in exact:  # as the engine's precision does
        names[name].data.copy_(names[name].data.bfloat16())
    for rank in range(4):
        here = dataclasses.replace(local_shards(model, base, rank, 4), frozen=frozen[rank])
        write_shards(here.shards_to_write(), f"process_{rank}", write)
    stored = ShardReader(files)
    assert stored.names() == sorted(names)
    for name, value in exact.items():
        assert torch.equal(stored.read(name, "weight", 0, value.numel()), value.view(-1))
        assert not stored.moments(name)
    keys = [key for file in files for key in safe_open(file, framework="pt").keys()]  # noqa: SIM118
    assert not [k for k in keys if not k.startswith("weight/") and k.split("/")[2] in exact]

    other, fresh = trained(1, steps=0)
    other[1].requires_grad_(False)  # type: ignore[index]
    there = dataclasses.replace(
        local_shards(other, fresh), frozen=sharded_state.frozen_shards(other, 0, 1)
    )
    sharded_state.restore(there, stored, dict.fromkeys(names, 2))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, exact.get(name, names[name])), name
    for name, value in exact.items():
        assert torch.equal(there.full_frozen(name, torch.device("cpu")), value)
    assert there.update_counts() == {n: 0 if n in exact else 2 for n in names}


def custom(model: nn.Module, **options: object) -> Any:
    config = OptimizerConfig(kind="torch.optim.SGD", lr=0.1, options=options)
    return build_optimizer(model, config, zero_stage=0, checked=True)


def test_custom_optimizers(tmp_path: Path) -> None:
    """Their moments and update counts; no moments before the first update."""
    model, _ = trained(0, steps=1)
    base = custom(model, momentum=0.9, dampening=0.5)
    parts = local_shards(model, base)
    early = store(tmp_path / "early", 2, model, base)
    assert parts.update_counts() == dict.fromkeys(early.names(), 0)
    assert not any(early.moments(name) for name in early.names())
    for step in range(3):
        model(torch.arange(step, step + 3)).square().sum().backward()
        base.step()
    stored, steps = store(tmp_path, 2, model, base), parts.update_counts()
    assert set(steps.values()) == {3} and stored.moments("1.weight") == {"momentum_buffer"}

    other, _ = trained(1, steps=1)
    fresh = custom(other, momentum=0.9, dampening=0.5)
    sharded_state.restore(local_shards(other, fresh), stored, steps)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and fresh.state[b]["step"] == 3
        assert torch.equal(base.state[a]["momentum_buffer"], fresh.state[b]["momentum_buffer"])
    sharded_state.restore(local_shards(other, fresh), early, dict.fromkeys(steps, 0))
    assert not fresh.state
    resized = {"0.weight": ResizedTable(rows=(0, -1), first=torch.zeros(2, 3))}
    with pytest.raises(UserError, match="extend: 0.weight has other rows .* does not start at 0"):
        sharded_state.restore(local_shards(other, fresh), stored, steps, resized=resized)
    _, adam = trained(1, steps=0)
    with pytest.raises(UserError, match="no 'exp_avg' of 0.weight: another optimizer trained it"):
        sharded_state.restore(local_shards(other, adam), stored, steps)


def test_missing_averages_start_as_the_weights(tmp_path: Path) -> None:
    model, base = trained(0, steps=3)
    stored = store(tmp_path, 2, model, base)
    other, _ = trained(1, steps=0)
    averaging = AveragingAdamW(param_groups(other, 0.0), lr=0.1, ema=0.9)
    there = local_shards(other, averaging)  # type: ignore[arg-type]
    sharded_state.restore(there, stored, local_shards(model, base).update_counts())
    for restored, original in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(averaging.ema_of(restored), original)
        averaging.ema_of(restored).add_(1)
    average = ResizedTable(rows=(1, -1), first=torch.full((2, 3), 0.5))
    table = average.read(stored, "0.weight", AVERAGE, 0, 6).view(2, 3)
    assert torch.equal(table[1], average.first[1])
    assert torch.equal(table[0], dict(model.named_parameters())["0.weight"][1])

    before = [p.detach().clone() for p in other.parameters()]
    with there.ema_swapped():
        for value, p in zip(before, other.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), value + 1)
    assert all(torch.equal(p, value) for value, p in zip(before, other.parameters(), strict=True))
