"""The pages: every one is in the site's menu, and their commands, recipes and Python examples are
those of today's program.

`make site` checks the anchors of the site. The examples of docs/api.md and
docs/coming_from_paddlepalm.md are run by tests/api/test_trainer.py, the pages of docs/howto by
tests/end_to_end/test_howto.py, notebooks by tests/api/test_notebook.py; tests/docs/test_promises.py
checks the rows of docs/promises.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from palm_ds.cli.command import Command, CommandGroup
from palm_ds.cli.main import SECTIONS, find
from palm_ds.cli.main import load as load_command
from tests.helpers.pages import (
    blocks,
    completed,
    fenced_commands,
    inline_code,
    unknown_options,
    words_of,
)
from tests.helpers.pair_corpus import tokenizer_of, whole, write_sentences
from tests.helpers.prose import python_prose

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md")]
    + [ROOT / "tools/README.md", *(ROOT / "docs").rglob("*.md")]
)
SETTINGS = sorted([*ROOT.glob("launch/recipes/**/*.yaml"), *ROOT.glob("ds_configs/*.json")])
GENERATED = {"recipe.md", "ds_configs.md"}  # their English is that of the docstrings

SOURCES = sorted(
    path
    for folder in ("palm_ds", "launch", "tools", "benchmarks", "docs", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
FILES_OF_OTHERS = {"pretraining.py", "batching.py", "run_squad.py", "run_classifier.py"}
"""Files of ERNIE and BERT that docstrings cite."""
MOST_COLUMNS = 125


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(name: str) -> ModuleType:
    """A script of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def every_command() -> Iterator[Command]:
    for word in (word for words in SECTIONS.values() for word in words):
        found = load_command(word)
        if isinstance(found, CommandGroup):
            yield from found.commands.values()
            yield from [found.default] if found.default else []
        else:
            yield found


def menu(entries: list[object]) -> list[str]:
    found = []
    for entry in entries:
        (value,) = entry.values() if isinstance(entry, dict) else (entry,)
        found += menu(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_menu_of_the_site_once() -> None:
    site = load("site_pages")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages |= set(site.COPIED.values())
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
    assert change("[a](../launch/recipes) [b](tasks.md)", "docs/api.md") == "a [b](tasks.md)"
    assert change("[a](../tasks.md) [b](b.md)", "docs/howto/a.md") == "[a](../tasks.md) [b](b.md)"
    code = "```\nshown[_](at)\n```\n"
    assert change(code, "docs/tour.md") == code


def test_no_link_of_the_site_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and headings; the build notices pages of the site only."""
    site = load("site_pages")
    monkeypatch.setattr(site, "PAGES", tmp_path / "pages")
    site.main()
    pages = {path: path.read_text("utf-8") for path in site.PAGES.rglob("*.md")}
    dead = [
        f"{page.relative_to(site.PAGES)}: {target}"
        for page, text in pages.items()
        for target in targets(text)
        if not leads_somewhere(page, target)
    ]
    assert len(pages) > 30 and dead == []


def test_no_anchor_of_a_page_is_dead() -> None:
    """As GitHub shows the pages, and the notebooks."""
    notebooks = {path: markdown_of(path) for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    texts = {path: path.read_text("utf-8") for path in PAGES} | notebooks
    dead = [
        f"{name_of(page)}: {target}"
        for page, text in texts.items()
        for target in targets(text)
        if not leads_somewhere(page, target)
    ]
    assert notebooks and dead == []


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def targets(text: str) -> list[str]:
    """The links of a page to other files, or into itself."""
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return [link for link in links if "://" not in link]


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    if not file.exists():
        return False
    return not anchor or file.suffix != ".md" or anchor in anchors(file.read_text("utf-8"))


def anchors(text: str) -> set[str]:
    """Of the headings: lower case, without punctuation, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.M)
    labels = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w -]", "", label).strip().lower().replace(" ", "-") for label in labels}


def markdown_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_files_that_pages_name_exist(path: Path) -> None:
    """As `palm_ds/common/rng.py`, or from the package: `common/rng.py`; folders end with `/`."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:palm_ds|[a-z_]+)/(?:[a-z_0-9]+/)*(?:[a-z_0-9]+\.py)?)`", text)
    ours = [n for n in named if n.startswith("palm_ds/") or n.endswith(".py")]
    missing = {n for n in ours if not any((base / n).exists() for base in (ROOT, ROOT / "palm_ds"))}
    assert missing == set()


def test_the_messages_that_troubleshooting_quotes_are_the_programs() -> None:
    """Bold, in backquotes; `...` stands for what differs."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    bold = re.findall(r"^\*\*(.+?)\*\*", page, re.MULTILINE)
    quoted = [text for line in bold for text in re.findall(r"`([^`]+)`", line)]
    parts = [part.strip() for text in quoted for part in text.split("...") if part.strip()]
    assert len(parts) > 20
    missing = set(parts) - OF_OTHERS
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "palm_ds").rglob("*.py")}
    likely = {path for path, text in texts.items() if any(x[:12] in text for x in missing)}
    for path in sorted(texts, key=lambda path: path not in likely):
        if missing:  # the last of them end the search: parsing takes long
            known = "\n".join(messages(texts[path]))
            missing = {part for part in missing if part not in known}
    assert missing == set()


OF_OTHERS = {"ResolutionImpossible", "/usr/bin/ld: cannot find -laio", "Address already in use"}
"""Messages of pip, the linker and torch."""


def messages(source: str) -> Iterator[str]:
    """The texts in a module; what is put into them is left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value for part in node.values if isinstance(part, ast.Constant))
            yield "\n".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_files_that_docstrings_name_exist() -> None:
    known = {path.name for path in SOURCES} | FILES_OF_OTHERS
    named = re.compile(r"\b[a-z_]+\.py\b")
    for path in (ROOT / "palm_ds").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if set(named.findall(source)) <= known:  # nearly all: parsing takes long
            continue
        for number, text in python_prose(source):
            missing = set(named.findall(text)) - known
            assert missing == set(), f"{name_of(path)}:{number}"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_lines_of_pages_are_wrapped(path: Path) -> None:
    """Except tables, links and code."""
    if path.name in GENERATED:
        pytest.skip("made from docstrings")
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    wide = [n for n, line in lines if len(line) > MOST_COLUMNS and "|" not in line]
    assert wide == []


# Commands --------------------------------------------------------------------------------------


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
            assert command.parse(rest), line
    for line in inline_code(path):
        if re.match("palm-ds [a-z]", line):
            assert unknown_options(words_of(line)) == [], line


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_formats_that_pages_convert_to_exist(path: Path) -> None:
    from palm_ds.weights.convert.convert import TO

    named = re.findall(r"--to ([a-z_]+)", path.read_text(encoding="utf-8"))
    assert set(named) <= {*TO, "onnx"}


def test_the_page_of_the_server_has_every_status_of_an_error() -> None:
    from palm_ds.serve.limits import TYPES

    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:[45]\d\d(?:, )?)+) \|", page, re.MULTILINE)
    assert {int(status) for row in rows for status in row.split(", ")} == TYPES.keys()


# Recipes ---------------------------------------------------------------------------------------

SECTION_KEY = re.compile(r"(backbone|optimizer|schedule|evaluate|save|log)\.([a-z_]+)(?![\w.])")


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "yaml")], ids=name_of)
def test_the_recipes_of_pages_are_right(path: Path, tmp_path: Path) -> None:
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.sweeps.search_space import read_sweep
    from palm_ds.train.sweeps.suite import read_suite

    for text in blocks(path, "yaml"):
        values = yaml.safe_load(text)
        if "space" in values:
            (tmp_path / "sweep.yaml").write_text(text)
            assert read_sweep(tmp_path / "sweep.yaml")
        elif "seeds" in values or "sets" in values:
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
    from palm_ds.model.config.config import EncoderConfig
    from palm_ds.train.recipe.recipe import Recipe

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


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_dotted_names_in_pages_exist(path: Path) -> None:
    """As `palm_ds.engine`, `palm_ds.corpus.store.open_corpus` and `palm.tasks.Tagging.on`."""
    for code in inline_code(path):
        if named := re.match(r"palm(?:_ds)?((?:\.[A-Za-z_]\w*)+)(?!\.)", code):
            first, *rest = ["palm_ds", *named[1].split(".")[1:]]
            found = importlib.import_module(first)
            for at, name in enumerate(rest, 1):
                if not hasattr(found, name):
                    importlib.import_module(".".join([first, *rest[:at]]))
                found = getattr(found, name)


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The examples of docs/tasks.md, as one module."""
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    for example in blocks(ROOT / "docs/tasks.md", "python"):
        exec(compile(example, "docs/tasks.md", "exec"), vars(page))
    return page


def test_the_example_of_a_task_that_builds_examples(own_tasks: ModuleType, tmp_path: Path) -> None:
    from palm_ds.data.stream.task_group_dataset import TaskGroupDataset

    tokenizer = tokenizer_of("a b c d e")
    documents = [("one", ["a b", "c d e"]), ("too long", ["a b c d e"] * 9), ("one token", ["a"])]
    source = whole(write_sentences(tmp_path / "c", documents, tokenizer))
    task = own_tasks.SwappedHalves(name="halves", source="text")
    dataset = TaskGroupDataset(
        name="halves", tasks=(task,), task_id=0, source=source, seed=5, max_length=32
    )
    found = set()
    for n, layout in enumerate(dataset.layouts(np.arange(20))):
        example = dataset.example(n, layout)
        (at,), (label,) = example.labels["halves"]
        found.add((" ".join(tokenizer.tokens(example.input_ids)), at, task.labels[label]))
    assert found == {
        ("[CLS] a b [SEP] c d e [SEP]", 0, "in order"),
        ("[CLS] c d e [SEP] a b [SEP]", 0, "swapped"),
    }


def test_the_example_of_a_task_overrides_what_tasks_have(own_tasks: ModuleType) -> None:
    from palm_ds.data.tasks.task import CorpusTask

    page = own_tasks
    task = page.WordStarts(name="starts", source="text", every=2)
    methods = {name for name in vars(page.WordStarts) if callable(getattr(task, name))}
    assert {name for name in methods if name[0] != "_"} <= set(dir(CorpusTask))
    assert task.annotations() == ("word",)
