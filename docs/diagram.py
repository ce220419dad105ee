"""docs/images/packages.svg: the data's way, and the packages with their imports as they are.

    python docs/diagram.py

The levels are LAYERS of tests/test_layers.py, the arrows the imports of the code. An import that
follows from others is not drawn (a -> c where a -> b -> c). A test fails when the picture is out of
date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/images/packages.svg"

SHOWN = {  # package: column of its box, and what it is for
    "common": (2, "errors, rng, config, atomic writes"),
    "text": (0, "tokenizers, words, sentences"),
    "model": (2, "encoder, kernels, heads"),
    "runtime": (4, "processes, optimizer, checkpoints"),
    "corpus": (0, "raw files to a corpus"),
    "weights": (3, "formats, conversion, download"),
    "engine": (4, "the only door to DeepSpeed"),
    "data": (1, "corpus or table to rows"),
    "pretrain": (0.5, "one file per pretraining task"),
    "tasks": (1.5, "one file per fine-tuning task"),
    "train": (2.5, "recipe, loop, export, report"),
    "inference": (2.5, "prediction, embeddings, search"),
    "api": (2, "Trainer, Backbone"),
    "serve": (3.5, "HTTP: many clients, one pass"),
    "cli": (3, "the command palm-ds"),
}
WAY = (  # what there is, and what makes the next thing of it: (name, note), (command, packages)
    (("raw text", "jsonl, txt, parquet"), ("prepare", "text, corpus")),
    (("corpus", "tokens, annotations"), ("pretrain", "data, pretrain")),
    (("packed rows", "examples, labels"), ("a step", "model, engine")),
    (("checkpoint", "resume from it"), ("at the end", "train, weights")),
    (("weights/, hf/", "model and tokenizer"), ("predict", "inference")),
    (("predictions", "and their scores"), None),
)
NOTE = (
    "Each package imports only packages below it. Pretraining tasks are found by their file names."
)
WIDTH, BOX, COLUMN, HIGH, LEVEL = 1180, 200, 230, 50, 84
INK, PALE, LINE, BLUE, FILL = "#1f2933", "#52606d", "#9aa5b1", "#1a56a8", "#eef3fa"


def levels() -> dict[str, int]:
    """Package -> its layer, from below."""
    tree = ast.parse((ROOT / "tests/test_layers.py").read_text(encoding="utf-8"))
    (layers,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    named = {name: level for level, names in enumerate(layers) for name in names}
    shown = {name for name in named if (ROOT / "palm_ds" / name).is_dir()} | {"engine"}
    return {name: level for name, level in named.items() if name in shown}


def imports() -> dict[str, set[str]]:
    """Package -> the packages below that any of its modules imports, annotations included."""
    level = levels()
    return {
        name: {other for other in _imported(name) if level.get(other, 99) < level[name]}
        for name in level
    }


def _imported(package: str) -> Iterator[str]:
    folder = ROOT / "palm_ds" / package
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            parts = [module.split(".") for module in modules]
            yield from (p[1] for p in parts if p[0] == "palm_ds" and len(p) > 1)


def drawn(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others (the graph's transitive reduction)."""

    def below(name: str) -> set[str]:
        return graph[name].union(*(below(each) for each in graph[name]))

    return sorted(
        (name, each)
        for name, direct in graph.items()
        for each in direct
        if not any(each in below(other) for other in direct - {each})
    )


def text(x: float, y: float, words: str, size: int = 13, color: str = INK, more: str = "") -> str:
    style = f'font-size="{size}" fill="{color}" text-anchor="middle" {more}'.strip()
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, title: str, note: str, fill: str = FILL) -> Iterator[str]:
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HIGH}" rx="6" fill="{fill}" '
        f'stroke="{BLUE}"/>'
    )
    yield text(x + width / 2, y + 21, title, 14, INK, 'font-weight="600"')
    yield text(x + width / 2, y + 39, note, 11, PALE)


def way(top: float) -> Iterator[str]:
    """The data's way, from left to right."""
    width, between = 128, (WIDTH - 40 - 128 * len(WAY)) / (len(WAY) - 1)
    for number, ((title, note), making) in enumerate(WAY):
        x = 20 + number * (width + between)
        yield from box(x, top, width, title, note, "#fff")
        if making:
            start, end, y = x + width + 3, x + width + between - 4, top + HIGH / 2
            yield arrow(start, y, end, y, BLUE, 2)
            yield text((start + end) / 2, y - 7, making[0], 11, INK)
            yield text((start + end) / 2, y + 16, making[1], 10, BLUE)


def arrow(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.2) -> str:
    bend = (y2 - y1) / 2
    path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    head = "way" if color == BLUE else "import"
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width:g}" '
        f'marker-end="url(#{head})"/>'
    )


def places(top: float) -> dict[str, tuple[float, float]]:
    """The upper left corner of every package's box; the highest level is at the top."""
    level_of = levels()
    highest = max(level_of.values())
    return {
        name: (30 + SHOWN[name][0] * COLUMN, top + (highest - level) * LEVEL)
        for name, level in level_of.items()
    }


def house(graph: Mapping[str, set[str]], top: float) -> Iterator[str]:
    """The packages, each above what it imports."""
    where = places(top)
    for name, other in drawn(graph):
        (x1, y1), (x2, y2) = where[name], where[other]
        yield arrow(x1 + BOX / 2, y1 + HIGH, x2 + BOX / 2, y2 - 5, LINE)
    for name, (x, y) in where.items():
        title = f"{name}.py" if name == "engine" else f"{name}/"
        yield from box(x, y, BOX, title, SHOWN[name][1])


def picture() -> str:
    graph = imports()
    missing = sorted(set(graph) - set(SHOWN))
    if missing:
        raise SystemExit(f"error: docs/diagram.py: no place for {', '.join(missing)}")
    height = 110 + (max(levels().values()) + 1) * LEVEL
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="{size}" '
        f'markerHeight="{size}" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for name, color, size in (("way", BLUE, 5), ("import", LINE, 7))
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>The way of the data, and the packages of palm_ds with their imports</title>",
        f"<defs>{heads}</defs>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fff"/>',
        *way(20),
        text(WIDTH / 2, 108, NOTE, 12, PALE),
        *house(graph, 124),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture(), encoding="utf-8")
    print(TARGET.relative_to(ROOT))


if __name__ == "__main__":
    main()
