"""The pages: every one is in the site's menu, none has the words that we do not write, and their
commands, recipes and Python examples are those of today's program.

The links inside are checked by tests/test_project.py and, with their anchors, by `make site`. The
examples of docs/api.md and docs/coming_from_paddlepalm.md are run by tests/api/test_trainer.py.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from palm_ds.cli.main import find

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md")]
    + [ROOT / "tools/README.md", *(ROOT / "docs").glob("*.md")]
)
SETTINGS = sorted([*ROOT.glob("launch/recipes/**/*.yaml"), *ROOT.glob("ds_configs/*.json")])
GENERATED = {"recipe.md", "ds_configs.md"}  # their English is that of the docstrings

# Literal translations from German and Latin, each with what an engineer would write. They are easy
# to understand one by one; a page of them is not.
FOREIGN = {
    "goes on|going on|go on from": "continues, resumes",
    "begun|begin anew|anew|begins afresh": "started, newly initialised",
    "of one's own|ones own|a class of one's own": "your own, user-defined, custom",
    "stands there|stands in|stand in": "is, appears; to stand in for: replace",
    "is due|are due|as it is due": "is expected",
    "knowing nothing": "the baseline",
    "theirs|of theirs": "name what it belongs to",
    "left behind": "skipped",
    "is said|was said|said of|said otherwise|what of": "name who does it, or: is given by, set by",
    "told": "is called, is distinguished",
    "a person": "the user, you",
    "in its place": "instead",
    "never mind": "ignore, leave out",
    "at once": "together, at the same time, immediately",
    "so many": "a number: N, that many",
    "parts a word": "splits a word",
    "is left alone": "stays unchanged",
    "it is there already|is there already": "already exists",
}
MOST_COLUMNS = 125


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def menu(entries: list[object]) -> list[str]:
    found = []
    for entry in entries:
        (value,) = entry.values() if isinstance(entry, dict) else (entry,)
        found += menu(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_menu_of_the_site_once() -> None:
    site = load("site_pages")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(site.COPIED.values())
    pages |= {name for name, _ in site.reference_pages()}
    named = menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(named) == sorted(pages)


def test_the_picture_of_the_packages_shows_their_imports() -> None:
    diagram = load("diagram")
    assert diagram.TARGET.read_text(encoding="utf-8") == diagram.picture(), "run `make docs`"


def test_links_to_files_outside_the_site_become_text() -> None:
    change = load("site_pages").with_site_links
    assert change("[a](docs/tasks.md#rows)", "README.md") == "[a](tasks.md#rows)"
    assert change("[a](../docs/tasks.md)", "launch/README.md") == "[a](tasks.md)"
    assert change("[a](launch/README.md)", "README.md") == "[a](commands.md)"
    assert change("![a](docs/images/a.svg)", "README.md") == "![a](images/a.svg)"
    assert change("[the license](LICENSE)", "README.md") == "the license"
    assert (
        change("[a](https://a.b/c) [b](#figures)", "README.md")
        == "[a](https://a.b/c) [b](#figures)"
    )


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_files_that_pages_name_exist(path: Path) -> None:
    """As `palm_ds/data/task.py`, or from the package: `data/task.py`; folders end with a slash."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:palm_ds|[a-z_]+)/(?:[a-z_0-9]+/)*(?:[a-z_0-9]+\.py)?)`", text)
    ours = [n for n in named if n.startswith("palm_ds/") or n.endswith(".py")]
    missing = {n for n in ours if not any((base / n).exists() for base in (ROOT, ROOT / "palm_ds"))}
    assert missing == set()


@pytest.mark.parametrize("path", [*PAGES, *SETTINGS], ids=name_of)
def test_pages_are_in_plain_english(path: Path) -> None:
    if path.name in GENERATED:
        pytest.skip("made from docstrings")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for words, better in FOREIGN.items():
            hit = re.search(rf"(?<![\w-])(?:{words})(?![\w-])", line, re.IGNORECASE)
            found += [f"{name_of(path)}:{number}: {hit[0]!r}; write: {better}"] if hit else []
    assert found == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_lines_of_pages_are_wrapped(path: Path) -> None:
    """Tables, links and code apart, which cannot be."""
    if path.name in GENERATED:
        pytest.skip("made from docstrings")
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    wide = [n for n, line in lines if len(line) > MOST_COLUMNS and "|" not in line]
    assert wide == []


# Commands --------------------------------------------------------------------------------------

LAUNCHERS = ("palm-ds", "deepspeed", "torchrun", "python", "mpirun")
INNER = re.compile(r"(?:launch/|palm_ds\.cli\.)(\w+)(?:\.py)?")
"""The program that a launcher starts: a script of launch/, or a module."""
PLACEHOLDER = re.compile(r" \[[^\]\"']*\.\.\.\]| \[options\]")
OPTIONAL = re.compile(r"\[(--[^\]]*)\]")


def blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages; "": without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    return [text for language, text in fenced if language in languages]


def inline_code(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def fenced_commands(path: Path) -> Iterator[str]:
    """The command lines of a page, each on one line."""
    for block in blocks(path, "", "bash"):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for line in lines:
            line = re.sub(r"\s#\s.*", "", line.removeprefix("$ "))
            if not line.startswith(LAUNCHERS):
                continue
            while line.count("'") % 2:  # a text over several lines
                line += " " + next(lines).strip()
            yield line


def words_of(line: str) -> list[str]:
    """The sub-command and its arguments; empty: not one of ours."""
    words = shlex.split(OPTIONAL.sub(r"\1", PLACEHOLDER.sub("", line)))
    if words[0] == "palm-ds":
        return words[1:]
    for at, word in enumerate(words):
        if inner := INNER.fullmatch(word):
            name = {"inspect_stream": "inspect"}.get(inner[1], inner[1])
            return [name.replace("_", "-"), *words[at + 1 :]]
    return []


def unknown_options(words: list[str]) -> list[str]:
    """The options that the sub-command does not have. Raises UserError if there is none of that
    name."""
    command, rest = find(words)
    known = command.parser()._option_string_actions
    return [word for word in rest if word.startswith("--") and word not in known]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_commands_of_pages_are_right(path: Path) -> None:
    """Those in blocks parse; with `...`, and in the text, at least their options exist."""
    for line in fenced_commands(path):
        if not (words := words_of(line)):
            continue
        if "..." in words:
            assert unknown_options(words) == [], line
        else:
            command, rest = find(words)
            assert command.parser().parse_intermixed_args(rest), line
    for line in inline_code(path):
        if re.match("palm-ds [a-z]", line):
            assert unknown_options(words_of(line)) == [], line


# Recipes ---------------------------------------------------------------------------------------

FILLED_IN = {"finetuning.md": ("classification", {"table": "rows.tsv"})}
"""What parts of recipes on a page are completed with: the kind of tasks, and their source."""
SECTION_KEY = re.compile(r"(backbone|optimizer|schedule|evaluate|save|log)\.([a-z_]+)(?![\w.])")


def completed(values: Mapping[str, object], page: str) -> dict[str, object]:
    """A part of a recipe as a whole one. Its encoder is a preset instead of that of `init_from`."""
    from palm_ds.data.curriculum_spec import parse_stages
    from palm_ds.data.stages import tasks_of
    from palm_ds.data.task import known_kinds

    kind, source = FILLED_IN.get(page, ("knowledge_masking", {"corpus": "corpus"}))
    whole = {"length": 128, "batch": "32 examples", **values}
    whole.pop("init_from", None)
    whole.setdefault("backbone", {"preset": "tiny"})
    if "tasks" not in whole:
        names = {"any"}
        if "stages" in whole:
            given = re.findall(r"\w+", yaml.safe_dump(whole["stages"]))
            with_tasks = parse_stages(whole["stages"], given)
            names = {task for blend in with_tasks.blends for task in tasks_of(blend)}
        whole["tasks"] = {
            name: {"kind": name if name in known_kinds() else kind, "source": "filled"}
            for name in names
        }
    named = {task["source"] for task in whole["tasks"].values()}
    whole["sources"] = {name: source for name in named} | dict(whole.get("sources", {}))
    whole.setdefault("stages", {"joint": list(whole["tasks"]), "steps": 10})
    return whole


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "yaml")], ids=name_of)
def test_the_recipes_of_pages_are_right(path: Path, tmp_path: Path) -> None:
    from palm_ds.train.recipe import make_recipe
    from palm_ds.train.sweeps.suite import read_suite

    for text in blocks(path, "yaml"):
        values = yaml.safe_load(text)
        if "seeds" in values or "sets" in values:
            for name in values.get("only", []):
                (tmp_path / name).mkdir()
                (tmp_path / name / "train.tsv").touch()
                (tmp_path / name / "dev.tsv").touch()
            (tmp_path / "suite.yaml").write_text(re.sub("data: /.*", f"data: {tmp_path}", text))
            assert read_suite(tmp_path / "suite.yaml")
        else:
            assert make_recipe(completed(values, path.name), text)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_keys_that_pages_name_exist(path: Path) -> None:
    """As in `evaluate.best`."""
    from palm_ds.model.config import EncoderConfig
    from palm_ds.train.recipe import Recipe

    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)}
    for code in inline_code(path):
        if named := SECTION_KEY.match(code):
            section, key = named.groups()
            assert hasattr(EncoderConfig() if section == "backbone" else defaults[section], key)


# Python ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name_of)
def test_the_names_in_python_examples_exist(path: Path) -> None:
    for text in blocks(path, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("palm_ds"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), text
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("palm."):
                names = ast.unparse(node).split("(")[0].split(".")[1:]
                assert reduce(getattr, names, importlib.import_module("palm_ds")), text
