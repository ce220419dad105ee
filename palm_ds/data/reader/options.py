"""Settings for reading a table: its format, the roles of columns, the handling of bad rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Settings, one_of

ROLES = {
    "text_a": "the first or only text",
    "text_b": "the second text of a pair",
    "text_b_neg": "a text that matches text_a less well than text_b",
    "label": "a class, several classes (a list), or a number; always as text",
    "qid": "rows with the same value are ranked together",
    "id": "the name of the row",
    "tokens": "a list of words or characters",
    "tags": "a list of tags, one for each token",
    "spans": "a list of {start, end, type}: text_a[start:end] is of this type; in tsv and csv JSON",
    "choices": "a list of texts, of which one is right",
    "question": "a question about the context",
    "context": "a text that may contain the answer",
    "answers": "a list of {text, start}: its place in the context, or -1",
    "query": "what is searched for; none: the positive is only a text to search in",
    "positive": "a text that the query should find",
    "negatives": "a list of texts that the query should not find",
    "positives": "a list of texts that an image should find besides text_a (docs/images.md)",
    "teacher_scores": "a list of numbers: a teacher's score of the positive, and of each negative",
    "source": "a text from which the target is written",
    "source_b": "a further source, with a segment of its own",
    "source_c": "a third source",
    "turns": "a list of texts: the turns of a dialogue, of which the target is the next",
    "target": "the text to write",
    "impossible": "true: the context does not answer the question",
    "image": "the regions of an image (docs/images.md)",
    "object_tags": "a text: what a detector sees in the image",
    "box": "x1 y1 x2 y2 in pixels: the part of the image that text_a is about",
    "scene_graph": "the objects, attributes and relations that text_a names (docs/images.md)",
}
ONLY_NAMED = ("image", "object_tags", "box", "scene_graph", "positives")
"""Roles that a column of the same name has only if `columns` says so."""
FORMATS = ("auto", "tsv", "csv", "jsonl", "json", "text", "conll", "smart", "parquet", "arrow")
FURTHER_LABEL = "label_"
"""Prefix of roles for further labels, of other tasks on the same texts."""
LABELS = ("label", "tags", "spans", "answers", "impossible", "target")
"""Column roles that hold labels, besides those that begin with `label_`."""
TAG_DELIMITER = "\x02"
ColumnKey = str | int | list[str | int]
"""A column by its name or number, or a list of them."""
_JOINED = (
    *("choices", "text_a", "text_b", "text_b_neg", "negatives", "teacher_scores"),
    *("source", "source_b", "source_c", "image", "label"),
)
_SCALARS = (
    *("label", "id", "qid", "text_a", "text_b", "text_b_neg", "question", "context"),
    *("query", "positive", "source", "source_b", "source_c", "target"),
)


@dataclass(frozen=True, kw_only=True)
class TableSettings(Settings):
    """Settings for reading files as rows."""

    format: Annotated[str, one_of(FORMATS)] = "auto"
    """`auto` (by the file's suffix), tsv, csv, jsonl, json, text (a text on each line), conll,
    smart, parquet or arrow."""
    columns: Mapping[str, str | int | list[str | int]] = field(default_factory=dict)
    """{role: column}, where the names of columns differ from those of roles (docs/finetuning.md): a
    name (`a.b`: b inside a), a number from 0, or empty for no column; or a list of columns for
    choices, negatives and their scores, an image, texts to be joined, or a label: of columns of 0
    and 1, one for each class."""
    images: Several[str] = ()
    """Files of image regions, or patterns of such files, that contain the images which the column
    `image` names (docs/images.md)."""
    header: bool = True
    """Whether the first line of a tsv or csv file holds the column names."""
    delimiter: str = ""
    """Separator of cells. Empty: a tab; in csv a comma, in conll a tab or white space."""
    tag_delimiter: str = TAG_DELIMITER
    """Separator of tokens, tags, choices or turns within a cell that is no JSON list."""
    strip_spaces: bool = False
    """Remove all spaces from texts, for Chinese."""
    simplify: bool = False
    """Convert traditional Chinese characters of texts, tokens, choices and answers to simplified
    ones, one for one, so that positions in the text stay right."""
    drop: Mapping[str, list[str | int | float | bool | None]] = field(default_factory=dict)
    """{role: [value, ...]}: skip rows with these values, and report how many."""
    bad_rows: Annotated[str, one_of(("stop", "skip"))] = "stop"
    """`stop` at a bad row, or `skip` bad rows and report how many."""
    lost_answers: Annotated[str, one_of(("stop", "keep", "drop"))] = "stop"
    """Answers that are not in their context: `stop` at one, `keep` them (for scoring), or `drop`
    them."""
    missing_labels: Annotated[str, one_of(("stop", "keep"))] = "stop"
    """Rows whose label (a class, a number, tags, spans) is empty or null: `stop` at one, or `keep`
    them, for a teacher to label (docs/distillation.md)."""
    split: str = ""
    """The split of a Hugging Face DatasetDict folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, roles in (("columns", tuple(ROLES)), ("drop", _SCALARS)):
            for role in getattr(self, key):
                if role not in roles and not role.startswith(FURTHER_LABEL):
                    raise UserError(f"{key}.{role}: unknown role{suggest(role, roles)}")
        for role, column in self.columns.items():
            joined = role in _JOINED or role.startswith(FURTHER_LABEL)
            if isinstance(column, list) and (not joined or len(column) < 2):
                raise UserError(
                    f"columns.{role}: {column!r}: give one column; two or more are for "
                    f"{', '.join(_JOINED)}"
                )
        if not self.tag_delimiter:
            raise UserError("tag_delimiter: empty; give the separator of tokens within a cell")


def is_label(role: str) -> bool:
    """Whether columns of this role hold labels."""
    return role in LABELS or role.startswith(FURTHER_LABEL)


def without_labels(read: TableSettings, kept: Collection[str] = ()) -> TableSettings:
    """The same settings without label columns, except those in `kept`."""
    blank = {role: "" for role in (*LABELS, *read.columns) if is_label(role) and role not in kept}
    return replace(read, columns={**read.columns, **blank})


def columns_of(texts: Sequence[str]) -> dict[str, ColumnKey]:
    """{role: column} from `role=name` as typed on the command line; a column without a name by its
    number, `role=` for none. A role given again has a list of columns."""
    columns: dict[str, list[str | int]] = {}
    for text in texts:
        if "=" not in text:
            raise UserError(f"columns: {text!r}: expected ROLE=NAME, such as text_a=sentence")
        role, name = text.split("=", 1)
        number = name.lstrip("-").isdecimal()
        columns.setdefault(role, []).append(int(name) if number else name)
    return {role: names if len(names) > 1 else names[0] for role, names in columns.items()}


@dataclass(frozen=True, kw_only=True)
class WholeRows(TableSettings):
    """Settings for reading all columns of files, whatever their roles."""
