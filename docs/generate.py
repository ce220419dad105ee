"""docs/recipe.md and docs/ds_configs.md, from the dataclasses that read those files;
docs/scaling.md and the tables of docs/speed.md, from the planner and the table of cards; and the
typed keywords of the Python API (docs/typed_keywords.py).

    python docs/generate.py

A field's description is the string that stands under it in the source. A test fails when a page
is not what this makes of the source, or when a field has no description.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs import roofline, scaling, typed_keywords  # noqa: E402
from palm_ds.data.reader import TableSettings  # noqa: E402
from palm_ds.data.sources.folds import FoldSettings  # noqa: E402
from palm_ds.data.stream.curriculum_spec import parse_stages  # noqa: E402
from palm_ds.data.stream.windows import DocumentSettings  # noqa: E402
from palm_ds.data.tasks.task import Task, known_kinds  # noqa: E402
from palm_ds.model.config.config import PRESETS, EncoderConfig  # noqa: E402
from palm_ds.model.heads.replaced_tokens import GeneratorSettings  # noqa: E402
from palm_ds.model.lora import LoraSettings  # noqa: E402
from palm_ds.pretrain.shared.unit_masking import SpanSettings  # noqa: E402
from palm_ds.runtime.deepspeed.ds_config import Comms, PalmSection  # noqa: E402
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig  # noqa: E402
from palm_ds.runtime.optimizer.step_settings import TaskOptimizerSettings  # noqa: E402
from palm_ds.train.recipe.lr_schedule import LRSchedule  # noqa: E402
from palm_ds.train.recipe.recipe import Recipe  # noqa: E402
from palm_ds.train.recipe.sections import (  # noqa: E402
    EvaluateSettings,
    LogSettings,
    SaveSettings,
    SourceSettings,
    SpikeSettings,
)
from palm_ds.train.recipe.stage_settings import StageSettings  # noqa: E402
from palm_ds.train.report.trackers import (  # noqa: E402
    MlflowSettings,
    TrackioSettings,
    WandbSettings,
)

SECTIONS = {
    "backbone": EncoderConfig,
    "documents": DocumentSettings,
    "optimizer": OptimizerConfig,
    "lora": LoraSettings,
    "schedule": LRSchedule,
    "stages.N": StageSettings,
    "sources.NAME": SourceSettings,
    "sources.NAME.folds": FoldSettings,
    "sources.NAME.read": TableSettings,
    "evaluate": EvaluateSettings,
    "save": SaveSettings,
    "log": LogSettings,
    "track.wandb": WandbSettings,
    "track.mlflow": MlflowSettings,
    "track.trackio": TrackioSettings,
    "loss_spike": SpikeSettings,
    "tasks.NAME.optimizer": TaskOptimizerSettings,
    "tasks.NAME.generator": GeneratorSettings,
    "tasks.NAME.spans": SpanSettings,
}
NOT_WRITTEN = {
    "Task": ("name",),
}
"""Fields that come from elsewhere than a key of the same name."""
REQUIRED = {"Task": ("source",)}
"""Keys that a recipe must have, although a program may leave the field out."""
_HERE = "Made by docs/generate.py from the source; do not edit."


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    name: str
    type: str
    default: str | None
    """As written in the source; None: it must be given."""
    text: str


def keys(cls: type, *, inherited: bool = True) -> list[Key]:
    """The fields of a dataclass in their order, those of its bases first."""
    classes = [c for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)]
    found: dict[str, Key] = {}
    for each in classes if inherited else [cls]:
        found |= {key.name: key for key in _own_keys(each)}
    return list(found.values())


def _own_keys(cls: type) -> Iterator[Key]:
    names = {field.name for field in dataclasses.fields(cls)}
    names -= set(NOT_WRITTEN.get(cls.__name__, ()))
    source = textwrap.dedent(inspect.getsource(cls))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    following = [*definition.body[1:], None]
    for node, after in zip(definition.body, following, strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id in names:
            text = _string(after) or _about_type(cls, node.annotation)
            if text is None:
                where = f"{inspect.getsourcefile(cls)}: {cls.__name__}.{node.target.id}"
                raise SystemExit(f"error: {where}: no description; put a string under the field")
            required = node.target.id in REQUIRED.get(cls.__name__, ())
            written = None if required else node.value
            default = ast.get_source_segment(source, written) if written else None
            yield Key(node.target.id, _type(cls, node.annotation), _default(cls, default), text)


def _string(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return _one_line(node.value.value) if isinstance(node.value.value, str) else None
    return None


def _about_type(cls: type, annotation: ast.expr) -> str | None:
    """A field that is itself a set of keys may leave its description to its class."""
    value = vars(sys.modules[cls.__module__]).get(ast.unparse(annotation))
    return _about(value) if dataclasses.is_dataclass(value) else None


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _type(cls: type, annotation: ast.expr) -> str:
    """The type in words, as for YAML."""
    text = re.sub(r"\bAnnotated\[(.+), \w+\(.*\)\]", r"\1", ast.unparse(annotation))
    text = re.sub(r"\bSeveral\[(.+)\]", r"tuple[\1, ...]", text)
    for name, alias in vars(sys.modules[cls.__module__]).items():
        if get_origin(alias) is Literal:
            text = re.sub(rf"\b{name}\b", str(alias).removeprefix("typing."), text)
    literal = re.fullmatch(r"(?:tuple\[)?Literal\[(.*?)\](?:, \.\.\.\])?( \| None)?", text)
    if literal:
        several, none = text.startswith("tuple"), ", or null" if literal[2] else ""
        named = [part.strip().strip("'") for part in literal[1].split(",")]
        choices = ", ".join([*filter(None, named), *["or empty"] * ("" in named)])
        return (f"list of: {choices}" if several else f"one of: {choices}") + none
    words = {
        r"\b[A-Z]\w+(Settings|Config|Set|Growth)\b|\bLRSchedule\b|\bComms\b": "keys",
        r"\bLiteral\['(\w+)'\]": r"`\1`",
        r"\b(dict|Mapping)\[str, dict\[str, (\w+)\]\]": r"{name: {name: \2}}",
        r"\b(dict|Mapping)\[str, (.+)\]": r"{name: \2}",
        r"\bdict\[([^\[\],]+), ([^\[\],]+)\]": r"{\1: \2}",
        r"\btuple\[(\w+), \.\.\.\]": r"list of \1",
        r"\btuple\[(.+)\]": r"[\1]",
        r"\bdict\[str, Any\]": "keys",
        r"\bbool\b": "true or false",
        r"\bstr\b": "text",
        r"\bPositiveInt\b": "whole number above 0",
        r"\bPositiveFloat\b": "number above 0",
        r"\bRate\b": "number from 0 to below 1",
        r"\bShare\b": "number from 0 to 1",
        r"\bPositiveShare\b": "number above 0 and up to 1",
        r"\bInnerShare\b": "number between 0 and 1",
        r"\b(int|NonNegativeInt)\b": "whole number",
        r"\b(float|NonNegativeFloat|FiniteFloat|RotaryBase)\b": "number",
        r" \| None": ", or null",
        r" \| ": " or ",
        r"\blist\[(\w+)\]": r"list of \1",
        r"\blist\[(whole number)\]": r"list of \1",
        r"\blist\[([^\[\]]+)\]": r"list of (\1)",
        r"\bAny\b": "value",
    }
    for pattern, word in words.items():
        text = re.sub(pattern, word, text)
    return re.sub(r"\blist of (text|number|whole number)\b", r"list of \1s", text)


def _default(cls: type, text: str | None) -> str | None:
    if text is None:
        return None
    if "default_factory" in text:
        return "[]" if "list" in text else "{}"
    for name, value in vars(sys.modules[cls.__module__]).items():
        if name.isupper() and isinstance(value, str):
            text = re.sub(rf"\b{name}\b", json.dumps(value).replace("\\", r"\\"), text)
    if re.fullmatch(r"[A-Z]\w+\(\)", text):
        return "as below"
    words = {"True": "true", "False": "false", "None": "null"}
    text = words.get(text, text).replace('"', "")
    return re.sub(r"^\((.*?),?\)$", r"[\1]", text)


def table(rows: Sequence[Key]) -> str:
    lines = ["| key | is | default | |", "|---|---|---|---|"]
    for key in rows:
        default = "**must be given**" if key.default is None else _code(key.default)
        lines.append(f"| `{key.name}` | {key.type} | {default} | {_cell(key.text)} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    return text if text in ("", "as below") else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _about(owner: object) -> str:
    return _one_line((inspect.getdoc(owner) or "").split("\n\n")[0])


def _prose(text: str) -> str:
    """The paragraphs of a module's docstring; indented ones, such as drawings, are code."""
    return "\n\n".join(
        f"```\n{textwrap.dedent(part)}\n```" if part.startswith(" ") else _one_line(part)
        for part in text.strip("\n").split("\n\n")
    )


def recipe_page() -> str:
    parts = [
        f"<!-- {_HERE} -->",
        "# The recipe, key by key",
        _about(Recipe),
        "Any key can be given on the command line too: `optimizer.lr=1e-4`. An unknown key is an "
        "error. `--print_config` shows the whole recipe with every default filled in. The default "
        "`null` stands for no value. A file may also have `sizes: {large: {optimizer.lr: 1.0e-5, "
        "...}}`: named sets of overrides, of which `size=large` applies one.",
        table(keys(Recipe)),
    ]
    for name, cls in SECTIONS.items():
        parts += [f"## {name}", _about(cls)]
        parts += [_presets()] if name == "backbone" else []
        parts.append(table(keys(cls)))
    parts += ["## stages", "```\n" + inspect.cleandoc(parse_stages.__doc__ or "") + "\n```"]
    return _page([*parts, *_task_parts()])


def _presets() -> str:
    names = ", ".join(f"`{name}`" for name in PRESETS)
    return f"`preset` is one of {names}; the other keys change single numbers of it."


def _task_parts() -> Iterator[str]:
    yield "## tasks.NAME"
    yield "Every task has these keys, and those of its `kind`, which is by default its name."
    yield table(keys(Task))
    for kind, module_name in sorted(known_kinds().items()):
        module = importlib.import_module(module_name)
        (cls,) = [c for c in vars(module).values() if _is_task(c, module_name)]
        shared = {key.name for key in keys(Task)}
        own = [key for key in keys(cls) if key.name not in shared]
        yield f"### {kind}"
        yield _prose(module.__doc__ or "")
        yield table(own) if own else "It has no keys of its own."


def _is_task(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value.__module__ == module


def machine_page() -> str:
    files = sorted((ROOT / "ds_configs").glob("*.json"))
    lines = [
        f"| `{path.name}` | {_cell(json.loads(path.read_text())['_about'])} |" for path in files
    ]
    parts = [
        f"<!-- {_HERE} -->",
        "# The DeepSpeed files",
        "How the machine computes: ZeRO stage, precision, offload, rows of a micro-batch. The keys "
        "are DeepSpeed's own, without those that belong to the recipe (batch, optimizer, schedule, "
        'clipping); `"auto"` is resolved for every key that may hold it.',
        "| file in ds_configs | for |\n|---|---|\n" + "\n".join(lines),
        "On one GPU take `zero1_bf16.json`. Stage 0 with fp16 or bf16 runs as stage 1, and the log "
        "says so: the losses are the same, and [DeepSpeed's own stage 0](engine.md"
        "#the-deepspeed-file) computes them wrongly. [How exact it is](engine.md#how-exact-it-is) "
        "says how far losses differ between precisions and stages. ZeRO 3 can also keep the "
        "optimizer state [in files](engine.md#optimizer-state-in-files).",
        '## The section "palm_ds"',
        "What DeepSpeed has no key for.",
        table(keys(PalmSection)),
        "### comms",
        _about(Comms),
        table(keys(Comms)),
    ]
    return _page(parts)


def _page(parts: Sequence[str]) -> str:
    """Parts with empty lines between them; prose is wrapped."""
    blocks = "\n\n".join(parts).split("\n\n")
    return "\n\n".join(_wrapped(block) for block in blocks) + "\n"


def _wrapped(block: str) -> str:
    if block.startswith(("#", "|", "<", "```", " ", "{")) or "\n" in block:
        return block
    return textwrap.fill(block, 100, break_long_words=False, break_on_hyphens=False)


def scaling_page() -> str:
    return _page([f"<!-- {_HERE} -->", *scaling.parts()])


def speed_page() -> str:
    """The page as it is, with the tables between its marks computed again."""
    text = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    for name, lines in roofline.tables().items():
        begin, end = f"<!-- {name}: made by docs/generate.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{lines}\n\n{end}{rest.partition(end)[2]}"
    return text


PAGES = {
    "recipe.md": recipe_page,
    "ds_configs.md": machine_page,
    "scaling.md": scaling_page,
    "speed.md": speed_page,
    **typed_keywords.PAGES,
}


def main() -> None:
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make(), encoding="utf-8")
        print((ROOT / "docs" / name).resolve().relative_to(ROOT))


if __name__ == "__main__":
    main()
