"""Options for turning input files into documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings, one_of

STRUCTURES = ("pairs", "dialogues", "ernie")  # formats of records rather than of files
FORMATS = ("auto", "jsonl", "text", "parquet", "arrow", *STRUCTURES)
DOCUMENTS = ("blank_line", "file", "line")


@dataclass(frozen=True, kw_only=True)
class InputOptions(Settings, option="--"):
    """Settings for reading files as documents."""

    format: Annotated[str, one_of(FORMATS)] = "auto"
    """auto, jsonl, text, parquet, arrow, pairs, dialogues or ernie. auto: each file by its name."""
    text_field: str = "text"
    """Field with the text. Of jsonl, parquet and Arrow rows."""
    id_field: str | None = None
    """Field with the id (id, else file and place)."""
    title_field: str | None = None
    """Field with a title, which becomes a heading of the text."""
    pair_fields: tuple[str, ...] = ("text_a", "text_b", "label")
    """Fields of a pair. Two names: no label."""
    turns_field: str | None = None
    """Field with the turns of a dialogue (turns, else messages)."""
    text_documents: Annotated[str, one_of(DOCUMENTS)] = "blank_line"
    """In text files: a document per blank_line, line or file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = " ".join(self.pair_fields)
        if len(self.pair_fields) not in (2, 3):
            raise UserError(
                f"--pair_fields {given}: give three names, two texts and the label (or two with "
                "--no_label), after OUT and INPUT"
            )
        if len(set(self.pair_fields)) < len(self.pair_fields):
            raise UserError(f"--pair_fields {given}: duplicate field")
        if self.title_field and self.structure != "documents":
            raise UserError(f"--title_field: --format {self.format} has no titles")

    @property
    def structure(self) -> str:
        """Structure of a record: documents, pairs, dialogues or ernie."""
        return self.format if self.format in STRUCTURES else "documents"


def input_options(state: Mapping[str, Any]) -> InputOptions:
    """Restores options from JSON."""
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in state.items()
    }
    return InputOptions(**values)
