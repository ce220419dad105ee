"""The pages of docs/promises: each row of their tables has something to type, or the reason why it
cannot be had.

A command parses, its recipe opens with its overrides, and its DeepSpeed file, models and data sets
are known by name; a part of a recipe opens within a whole one; names and keywords of Python exist.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.cli.main import find
from palm_ds.cli.shipped import find_ds_config, find_recipe, recipes
from palm_ds.common.errors import UserError
from palm_ds.train.plan.cluster import parse_clusters
from tests.helpers.pages import LAUNCHERS, completed, words_of

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs/promises").glob("*.md"))
HEADER = ["promised", "to type", "remarks"]
NOTHING = "—"
"""In the place of something to type."""
OWN_RECIPES = {"mine.yaml", "sweep.yaml", "suite.yaml"}
"""Recipes of the reader."""
VARIABLES = {
    "trainer": "Trainer",
    "both": "MultiHeadTrainer",
    "model": "LoadedModel",
    "backbone": "Backbone",
}
"""What names without a definition are in Python examples: classes of `palm`."""
PRESETS = {
    "ernie-gram-en": "ernie-gram-base",
    "ernie-gen-base-en": "ernie-gen-base",
    "ernie-gen-large-en": "ernie-gen-large",
}
"""Sizes of published weights whose name is no preset's; all others are opened as ERNIE 2.0 base."""


# Rows ------------------------------------------------------------------------------------------


def rows_of(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of all tables of a page. Raises AssertionError for a table of another form."""
    lines = ["", *text.splitlines()]
    for number, line in enumerate(lines):
        if not line.startswith("|") or set(line) <= set("|-"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if lines[number - 1].startswith("|"):
            yield number, cells
        else:
            assert cells == HEADER, f"line {number}: {cells}"


def check_row(cells: Sequence[str]) -> None:
    """Raises AssertionError, UserError, AttributeError or SyntaxError for a row that is wrong."""
    promised, typed, remarks = cells
    assert promised, "what was promised?"
    codes = re.findall(r"`([^`]+)`", typed)
    if not codes:
        assert typed == NOTHING, f"neither a command nor {NOTHING}: {typed}"
        assert len(remarks.split()) >= 3, f"{promised}: nothing to type, and no reason"
    for code in codes:
        check_code(code)
    for code in re.findall(r"`(?:launch/recipes/)?([\w/]+\.yaml)`", remarks):
        assert code in OWN_RECIPES or code in recipes(), code


def check_code(code: str) -> None:
    line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", code)
    if line.startswith(LAUNCHERS):
        check_command(line)
    elif line.startswith("make "):
        assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.M), code
    elif line.startswith("pip install "):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"\.\[(\w+)\]", line)
        assert set(extras) <= project["optional-dependencies"].keys(), code
    elif line.startswith("cmake -S "):
        assert (ROOT / line.split()[2] / "CMakeLists.txt").exists(), code
    elif re.fullmatch(r"[\w/]+\.yaml( \S+=\S+)*", line):
        open_named(*line.split())
    elif re.match(r"\{?\w+: ", line):
        open_recipe(yaml.safe_load(line), line)
    else:
        check_python(code)


# Commands and recipes --------------------------------------------------------------------------


def check_command(line: str) -> None:
    words = words_of(line)
    if not words:  # a program of tools/ or benchmarks/
        (program,) = [word for word in line.split() if word.endswith(".py")]
        assert (ROOT / program).exists(), line
        return
    command, rest = find(words)
    args = command.parse(rest)
    if command.name == "download":
        for name in args.names:
            check_published(name)
    if command.wraps:
        check_command(" ".join(args.command))
    if getattr(args, "plan", None):
        parse_clusters(args.plan)
    if command.name == "submit" and args.kubernetes:
        assert args.image, f"{line}: needs --image"
    if hasattr(args, "deepspeed_config") and not getattr(args, "print_config", False):
        assert args.deepspeed_config, f"{line}: needs --deepspeed_config"
        find_ds_config(args.deepspeed_config)
    if isinstance(recipe := getattr(args, "recipe", None), str):
        start = [f"init_from={args.init_from}"] if getattr(args, "init_from", None) else []
        open_named(recipe, *args.overrides, *start)


def open_named(name: str, *overrides: str) -> None:
    """Open a shipped recipe with overrides; of a reader's own, the part that these are."""
    from palm_ds.train.recipe.recipe import read_values

    own = name in OWN_RECIPES
    open_recipe(override(overrides) if own else read_values(find_recipe(name), overrides), name)


def override(pairs: Sequence[str]) -> dict[str, Any]:
    """The keys that overrides set, as a part of a recipe."""
    from palm_ds.common.config import override as set_key
    from palm_ds.common.config import parse_override

    values: dict[str, Any] = {}
    for key, value in map(parse_override, pairs):
        set_key(values, key, value)
    return values


def open_recipe(values: dict[str, Any], where: str) -> None:
    """Open a recipe or a part of one, with an encoder of the size that `init_from` names."""
    from palm_ds.model.config.presets import PRESETS as KNOWN
    from palm_ds.train.recipe.recipe import make_recipe

    values = dict(values)
    if start := str(values.pop("init_from", "")):
        folder, _, name = start.rpartition("/")
        if folder.endswith("/pretrain"):
            check_published(name)
        preset = PRESETS.get(name, name if name in KNOWN else "ernie-2.0-base")
        values["backbone"] = {"preset": preset, **values.get("backbone", {})}
        values.pop("init_layers", None)  # of weights that are not there
    make_recipe(completed(values, where), where)


def check_published(name: str) -> None:
    """Raises AssertionError for a name that `palm-ds download` does not know, or does not open."""
    from palm_ds.weights.download.catalogue import DATA, MODELS

    if name != "ls" and "/" not in name:
        assert name in {**MODELS, **DATA}, f"{name}: not in `palm-ds download ls`"
        assert not {**MODELS, **DATA}[name].not_yet, f"{name}: cannot be opened"


# Python ----------------------------------------------------------------------------------------


def check_python(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            named(node)
        elif isinstance(node, ast.Call) and (called := named(node.func)) is not None:
            known = inspect.signature(called).parameters
            given = {keyword.arg for keyword in node.keywords}
            any_more = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in known.values())
            assert any_more or given <= known.keys(), f"{code}: {given - known.keys()}"
            if called.__name__ == "from_pretrained":
                check_published(ast.literal_eval(node.args[0]))
            for keyword in node.keywords:
                if keyword.arg == "recipe":
                    open_recipe(ast.literal_eval(keyword.value), code)


def named(node: ast.expr) -> Any:
    """The function, class or other thing that a dotted name stands for; None: not one of ours.
    Raises AttributeError."""
    if isinstance(node, ast.Name):  # called itself
        return getattr(palm(), VARIABLES[node.id]).__call__ if node.id in VARIABLES else None
    if not isinstance(node, ast.Attribute):
        return None
    first, *names = ast.unparse(node).split(".")
    if first in VARIABLES:
        return reduce(getattr, [VARIABLES[first], *names], palm())
    if first == "client":
        return reduce(getattr, names, importlib.import_module("palm_ds.serve.client").ServingClient)
    return reduce(getattr, names, palm()) if first == "palm" and "(" not in "".join(names) else None


def palm() -> Any:
    return importlib.import_module("palm_ds")


# Tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_row_has_what_to_type_or_a_reason(path: Path) -> None:
    rows = list(rows_of(path.read_text("utf-8")))
    wrong = []
    for number, cells in rows:
        try:
            check_row(cells)
        except Exception as error:
            wrong.append(f"{path.name}:{number}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(rows) > 20


FINETUNE = "palm-ds finetune finetune/rte.yaml --deepspeed_config cpu.json"


@pytest.mark.parametrize(
    ("typed", "remarks", "message"),
    [
        ("`palm-ds finetun mine.yaml`", "", "no such command"),
        (f"`{FINETUNE} --run_folder runs/x`", "", "unrecognized arguments: --run_folder"),
        ("`palm-ds finetune finetune/rte.yaml`", "", "--deepspeed_config"),
        (f"`{FINETUNE.replace('rte', 'rtf')}`", "", "finetune/rtf.yaml: no such file"),
        (f"`{FINETUNE.replace('cpu', 'cp')}`", "", "cp.json: no such file"),
        (f"`{FINETUNE} optimizer.rate=1e-4`", "", "optimizer.rate: unknown key"),
        (f"`{FINETUNE} size=huge`", "", "size=huge: no such size"),
        (f"`{FINETUNE} init_from=models/pretrain/ernie-9`", "", "not in `palm-ds download ls`"),
        (f"`palm-ds run -- {FINETUNE} lenght=1`", "", "lenght"),
        (f"`deepspeed --module palm_ds.cli.{FINETUNE[8:]} --chek`", "", "--chek"),
        (f"`palm-ds submit --kubernetes {FINETUNE[17:]} --run_dir x`", "", "--image"),
        ("`palm-ds download ernie-9`", "", "not in `palm-ds download ls`"),
        ("`palm-ds download XLNet-cased-base`", "", "cannot be opened"),
        ("`backbone: {preset: ernie-9}`", "", 'no "ernie-9"'),
        ("`stages: {continual: [a, b]}`", "", "steps"),
        ("`palm.Traner()`", "", "Traner"),
        ("`palm.tasks.Tagging(cfr=True)`", "", "cfr"),
        ("`trainer.trian()`", "", "trian"),
        (
            "`palm.Trainer(task, recipe={'optimizer': {'rate': 1}})`",
            "",
            "optimizer.rate: unknown key",
        ),
        ("`make bread`", "", "make bread"),
        ("`pip install '.[bread]'`", "", "bread"),
        ("`python tools/onnx/walk.py`", "", "walk"),
        ("soon", "we will see about it", "neither a command"),
        (NOTHING, "", "no reason"),
        ("`palm-ds recipes`", "see `finetune/rtf.yaml`", "rtf"),
    ],
)
def test_a_row_that_is_wrong_is_noticed(typed: str, remarks: str, message: str) -> None:
    with pytest.raises((AssertionError, UserError, AttributeError), match=re.escape(message)):
        check_row(["something", typed, remarks])


def test_a_table_of_another_form_is_noticed() -> None:
    with pytest.raises(AssertionError, match="line 1"):
        list(rows_of("| promised | here |\n|---|---|\n| a | b |"))
    assert list(rows_of("| promised | to type | remarks |\n|---|---|---|\n| a | — | b |")) == [
        (3, ["a", NOTHING, "b"])
    ]
