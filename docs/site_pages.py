"""Assembles the pages of the documentation site; `make docs` then builds it (mkdocs.yml).

docs/ ───────────────────────────────links rewritten──> runs/site-pages/
README.md, launch/README.md, ... ──links rewritten──>   index.md, commands.md, ...
the public classes, where they are defined now ──────>   reference/*.md, for mkdocstrings
"""

from __future__ import annotations

import importlib
import posixpath
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PAGES = ROOT / "runs/site-pages"
COPIED = {
    "README.md": "index.md",
    "launch/README.md": "commands.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = r"(!?)\[([^]\[]*)\]\(([^)#\s]*)(#[^)\s]*)?\)"
LIBRARY = {
    "Data": ["palm_ds.corpus.store", "palm_ds.data.tasks.task"],
    "Engine": ["palm_ds.engine"],
    "Weights": ["palm_ds.weights.weights_folder"],
}


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (PAGES / "reference").mkdir()
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    for source in sorted(pages | COPIED.keys()):
        text = (ROOT / source).read_text(encoding="utf-8")
        (PAGES / name_in_site(source)).write_text(with_site_links(text, source), encoding="utf-8")
    for name, text in reference_pages():
        (PAGES / name).write_text(text, encoding="utf-8")


def name_in_site(path: str) -> str:
    """The page of a file of the repository, or the file in docs/; empty if the site has none."""
    return COPIED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")


def with_site_links(text: str, source: str) -> str:
    """Links to pages of the site lead there; those to other files of the repository become text.
    Code stays as it is."""

    def replace(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        if not target or "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (page := name_in_site(path)):
            return label
        link = posixpath.relpath(page, posixpath.dirname(name_in_site(source)) or ".")
        return f"{image}[{label}]({link}{anchor or ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(LINK, replace, part) for part in parts[::2]]
    return "".join(parts)


def reference_pages() -> Iterator[tuple[str, str]]:
    import palm_ds.api as api
    from palm_ds.data.tasks.task import known_kinds

    classes = [getattr(api, name) for name in api.__all__ if name not in ("event",)]
    used = [cls for cls in classes if cls.__module__.startswith("palm_ds.api.")]
    own = [cls for cls in classes if cls not in used]
    groups = {"To use": dotted(used), "To subclass": dotted(own), "Events": [api.event.__name__]}
    yield "reference/api.md", page("Python API", groups)
    tasks: dict[str, list[str]] = {"Pretraining": [], "Fine-tuning": []}
    for module in known_kinds().values():
        group = "Pretraining" if ".pretrain." in module else "Fine-tuning"
        tasks[group] += dotted(classes_of(module))
    yield "reference/tasks.md", page("Tasks", tasks)
    yield "reference/library.md", page("Library", LIBRARY)


def dotted(classes: Iterable[type]) -> list[str]:
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in classes]


def classes_of(module: str) -> Iterator[type]:
    for value in vars(importlib.import_module(module)).values():
        if (
            isinstance(value, type)
            and value.__module__ == module
            and not value.__name__.startswith("_")
        ):
            yield value


def page(title: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Headings with what mkdocstrings shows under them."""
    parts = [f"# {title}"]
    for group, names in groups.items():
        parts += [f"## {group}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
