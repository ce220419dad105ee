"""palm_ds/api/keywords.py, which gives editors the keywords of constructors, from the dataclasses
that read them. docs/generate.py writes it."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping

from palm_ds.api.train_settings import TrainSettings
from palm_ds.common.keywords import descriptions
from palm_ds.inference.embedder import EmbeddingSettings

_HERE = "Made by docs/generate.py from the dataclasses; do not edit."
_KEYWORDS: Mapping[str, tuple[type, str]] = {
    "TrainKeywords": (TrainSettings, "Keywords of palm.Trainer and palm.MultiHeadTrainer."),
    "EmbeddingKeywords": (EmbeddingSettings, "Keywords of palm.Backbone, called on texts."),
}
_WIDER = {"layers": "int | Sequence[int]"}
"""Types of arguments that are converted."""
_IMPORTS = """from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict
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


def _type(field: dataclasses.Field) -> str:
    """As an argument: any sequence for a tuple, any mapping for a dict."""
    if field.name in _WIDER:
        return _WIDER[field.name]
    kind = re.sub(r"\bAnnotated\[(.+), \w+\(.*\)\]", r"\1", str(field.type))
    kind = re.sub(r"\b(Positive|NonNegative)Int\b", "int", kind)
    kind = re.sub(r"\b((Positive|NonNegative)Float|Rate|(Positive|Inner)?Share)\b", "float", kind)
    kind = re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", kind)
    return kind.replace("dict[", "Mapping[").replace("'", '"')


def _docstring(text: str) -> list[str]:
    space = " " * 4
    lines = textwrap.fill(text, 92)
    body = textwrap.indent(lines, space).strip()
    end = f"\n{space}" if "\n" in body else ""
    return [f'{space}"""{body}{end}"""']


PAGES = {"../palm_ds/api/keywords.py": keywords_module}
