"""Any user mistake ends a command with one line and exit code 2.

The tests of recipes, DeepSpeed files and tokenizers compare the message of every case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sampling import every
from tests.runtime.deepspeed.test_ds_config import BAD as BAD_MACHINES
from tests.text.test_tokenizer import BAD as BAD_TOKENIZERS
from tests.train.recipe.test_recipe import GOOD, write
from tests.train.recipe.test_recipe import WRONG as WRONG_RECIPES


def assert_one_line(code: int, out: str, err: str, named: Path) -> None:
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert str(named) in err and "Traceback" not in err


# --print_config: a mistake that is not seen prints a plan, and trains nothing.


@pytest.mark.parametrize("case", every(9, WRONG_RECIPES))
def test_a_wrong_recipe(case: str, tmp_path: Path, root: Path, enter) -> None:
    recipe = write(tmp_path, WRONG_RECIPES[case][0])
    ds_config = ("--deepspeed_config", root / "ds_configs/cpu.json", "--print_config")
    said = enter("pretrain", recipe, *ds_config)
    assert_one_line(said.code, said.out, said.err, recipe)


@pytest.mark.parametrize("case", every(9, BAD_MACHINES))
def test_a_wrong_deepspeed_file(case: str, tmp_path: Path, enter) -> None:
    recipe, ds_config = write(tmp_path, GOOD), tmp_path / "m.json"
    ds_config.write_text(BAD_MACHINES[case][0])
    said = enter("pretrain", recipe, "--deepspeed_config", ds_config, "--print_config")
    assert_one_line(said.code, said.out, said.err, ds_config)


@pytest.mark.parametrize("case", BAD_TOKENIZERS)
def test_a_wrong_tokenizer(case: str, tmp_path: Path, enter) -> None:
    name, content, _ = BAD_TOKENIZERS[case]
    file, text = tmp_path / name, tmp_path / "a.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    text.write_text("A text.\n")
    said = enter("prepare", tmp_path / "out", text, "--tokenizer", file)
    assert_one_line(said.code, said.out, said.err, named=file)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "a.txt"])


@pytest.mark.parametrize(
    "arguments",
    [("nowhere.yaml",), ("RECIPE", "optimizer.lr"), ("RECIPE", "optimizer.rate=3")],
    ids=["no such file", "no value", "no such key"],
)
def test_a_wrong_command_line(
    arguments: tuple[str, ...], tmp_path: Path, root: Path, enter
) -> None:
    recipe = write(tmp_path, GOOD)
    named = [recipe if a == "RECIPE" else a for a in arguments]
    ds_config = ("--deepspeed_config", root / "ds_configs/cpu.json", "--print_config")
    said = enter("pretrain", *named, *ds_config)
    assert said.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


def test_a_valid_recipe_passes(tmp_path: Path, root: Path, enter) -> None:
    """So that the tests above fail for the reason they give."""
    ds_config = ("--deepspeed_config", root / "ds_configs/cpu.json", "--print_config")
    said = enter("pretrain", write(tmp_path, GOOD), *ds_config)
    assert said.code == 0 and "stage 1" in said.out and said.err == ""
