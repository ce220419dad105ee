"""The pages: every one is in the site's menu, and none has the words that we do not write.

The links inside are checked by tests/test_project.py and, with their anchors, by `make site`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

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
