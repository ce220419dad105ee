"""Numbers of tensors and their differences, against torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palm_ds.cli.show import COMMAND
from palm_ds.weights.convert.tensor_report import numbers_of, shown
from palm_ds.weights.formats.contents import CheckpointContents, TensorEntry
from palm_ds.weights.model_folder import open_model
from tests.helpers.reseal import reseal
from tests.helpers.saved_model import save_model


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one of which a single value is different and a head is not there."""
    one, other = (
        save_model(tmp_path_factory.mktemp("tensors") / name, stages)
        for name, stages in (("one", ("mood", "topic")), ("other", ("mood",)))
    )
    file = next((other / "weights").glob("*.safetensors"))
    tensors = load_file(file)
    first = load_file(next((one / "weights").glob("*.safetensors")))
    tensors = {name: first[name].clone() for name in tensors}
    tensors["backbone.norm.weight"][3] += 0.5
    save_file(tensors, file)
    reseal(other / "weights")
    return one, other


def test_numbers_are_those_of_torch(two: tuple[Path, Path]) -> None:
    contents = open_model(two[0])
    tensors = load_file(next((two[0] / "weights").glob("*.safetensors")))
    every = {each.name: each for each in numbers_of(contents)}
    assert set(every) == set(tensors)
    for name, tensor in tensors.items():
        found = every[name]
        assert (found.shape, found.dtype, found.not_finite) == (tuple(tensor.shape), "float32", 0)
        assert found.norm == pytest.approx(float(tensor.norm()), rel=1e-5)
        assert (found.least, found.most) == (float(tensor.min()), float(tensor.max()))


def test_differences(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    every = {x.name: x for x in numbers_of(open_model(two[0]), open_model(two[1]))}
    moved = every["backbone.norm.weight"]
    assert moved.difference == pytest.approx(0.5, abs=1e-6)
    assert moved.relative == pytest.approx(0.5 / moved.norm, rel=1e-5)
    assert every["heads.topic.out.weight"].remark == "only here"
    assert COMMAND.main([str(two[0]), "--tensors", "--other", str(two[1])]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"(\d+) of (\d+) tensors have equal values; the largest difference is 0.5, in "
        r"backbone.norm.weight; 2 cannot be compared",
        last,
    )
    assert COMMAND.main([str(two[1]), "--tensors", "--other", str(two[0]), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["tensors"]
    assert [x["remark"] for x in listed if x["name"].startswith("heads.topic")] == [
        "only there"
    ] * 2


def contents(**tensors: torch.Tensor) -> CheckpointContents:
    entries = {
        name: TensorEntry(source_names=(name,), shape=tuple(tensor.shape), read=lambda x=tensor: x)
        for name, tensor in tensors.items()
    }
    return CheckpointContents(path=Path(), format="", config=None, entries=entries)  # type: ignore[arg-type]


def test_odd_values_and_shapes() -> None:
    values = torch.tensor([1.0, float("nan"), -3.0, float("inf")])
    (odd,) = numbers_of(contents(a=values))
    assert (odd.not_finite, odd.least, odd.most) == (2, -3.0, 1.0)
    (other,) = numbers_of(contents(a=values), contents(a=values[:2]))
    assert other.remark == "other shape: 2"
    (*_, line) = shown([other], compared=True, terminal=False)
    assert line == "no tensor has the same name and shape in both"


def test_values_are_compared_and_not_their_types() -> None:
    values = torch.tensor([0.5, 0.0])
    every = numbers_of(contents(a=values), contents(a=-values.bfloat16().neg()))
    (*_, line) = shown(list(every), compared=True, terminal=False)
    assert line == "1 of 1 tensors have equal values"


def test_nan_is_the_largest_difference() -> None:
    one, other = torch.zeros(2), torch.tensor([0.0, float("nan")])
    every = numbers_of(contents(a=one, b=one, c=one), contents(a=one + 1, b=other, c=one + 2))
    (*_, line) = shown(list(every), compared=True, terminal=False)
    assert str(line).endswith("the largest difference is nan, in b")


def test_other_alone_is_refused(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        COMMAND.main([str(two[0]), "--other", str(two[1])])
    assert "--other: needs --tensors" in capsys.readouterr().err
