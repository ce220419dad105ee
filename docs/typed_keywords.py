"""Python files that give editors the keywords of constructors, from the dataclasses that read them:
palm_ds/api/keywords.py and palm_ds/tasks/__init__.pyi. docs/generate.py writes them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping

from palm_ds import tasks
from palm_ds.api.train_settings import TrainSettings
from palm_ds.common.keywords import descriptions
from palm_ds.data.tasks.task import Task
from palm_ds.data.tasks.task_with_data import PADDLEPALM
from palm_ds.inference.embedder import EmbeddingSettings

_HERE = "Made by docs/generate.py from the dataclasses; do not edit."
_KEYWORDS: Mapping[str, tuple[type, str]] = {
    "TrainKeywords": (TrainSettings, "Keywords of palm.Trainer and palm.MultiHeadTrainer."),
    "EmbeddingKeywords": (EmbeddingSettings, "Keywords of palm.Backbone, called on texts."),
}
_WIDER = {"layers": "int | Sequence[int]", "generate": "Mapping[str, Any]"}
"""Types of arguments that are converted."""
_IMPORTS = """from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict
"""
_STUB_IMPORTS = """# pyright: reportIncompatibleMethodOverride=false
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from palm_ds.data.sources.row_inputs import Rows, Splits
from palm_ds.data.tasks.task_with_data import TaskWithData
"""


def keywords_module() -> str:
    """A TypedDict for each set of keywords."""
    parts = [f'"""Typed keywords of the Python API. {_HERE}"""\n\n{_IMPORTS}']
    for name, (cls, about) in _KEYWORDS.items():
        lines = [f"class {name}(TypedDict, total=False):", f'    """{about}"""', ""]
        for field in dataclasses.fields(cls):
            lines.append(f"    {field.name}: {_type(field)}")
            lines += _docstring(descriptions(cls)[field.name])
        parts.append("\n".join(lines) + "\n")
    return "\n\n".join(parts)


def tasks_stub() -> str:
    """The task classes, each with an `on` that has the task's keys."""
    found = {name: getattr(tasks, name) for name in dir(tasks)}
    imports = [f"from {cls.__module__} import {name} as _{name}" for name, cls in found.items()]
    parts = [f'"""The fine-tuning tasks. {_HERE}"""\n\n{_STUB_IMPORTS}']
    parts[0] += "\n".join(sorted(imports, key=_module_of)) + "\n"
    return "\n".join([*parts, *("\n".join(_class(name, cls)) for name, cls in found.items())])


def _module_of(line: str) -> str:
    return line.split()[1]


def _class(name: str, cls: type[Task]) -> Iterator[str]:
    signature = inspect.signature(cls.on)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    yield f"class {name}(_{name}):"
    yield from _docstring(inspect.getdoc(cls) or "")
    yield "    @classmethod"
    yield "    def on(\n        cls,\n        *,"
    for key, parameter in signature.parameters.items():
        field = fields.get(PADDLEPALM.get(key, key)) if key != "name" else None
        kind = _type(field) if field else str(parameter.annotation)
        yield f"        {key}: {kind} = {_default(parameter.default)},"
    yield "    ) -> TaskWithData:"
    yield from _docstring(cls.on.__doc__ or "", indent=8)
    yield ""


def _type(field: dataclasses.Field) -> str:
    """As an argument: any sequence for a tuple, any mapping for a dict."""
    if field.name in _WIDER:
        return _WIDER[field.name]
    kind = re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", str(field.type))
    return kind.replace("dict[", "Mapping[").replace("'", '"')


def _default(value: object) -> str:
    """A default as far as it has a short form."""
    plain = isinstance(value, str | int | float | bool) or value in (None, ())
    return repr(value).replace("'", '"') if plain else "..."


def _docstring(text: str, indent: int = 4) -> list[str]:
    """A docstring; a text of one line is wrapped."""
    space = " " * indent
    lines = text if "\n" in text else textwrap.fill(text, 96 - indent)
    body = textwrap.indent(lines, space).strip()
    end = f"\n{space}" if "\n" in body else ""
    return [f'{space}"""{body}{end}"""']


PAGES = {
    "../palm_ds/api/keywords.py": keywords_module,
    "../palm_ds/tasks/__init__.pyi": tasks_stub,
}
