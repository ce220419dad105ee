"""Assigns columns to roles: by the settings, by the role's own name, or by an alias."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.rows.cells import other_separator
from palm_ds.common.rows.lines import BadRecordError
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.options import ONLY_NAMED, ROLES, ColumnKey, TableSettings, is_label
from palm_ds.data.reader.regions import unimo_line

TEXTS = (
    ("sentence",),
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("s1", "s2"),
    ("sentence_A", "sentence_B"),
    ("sentence_0", "sentence_1"),
    ("query", "title"),
)
"""Columns that serve as text_a, or as text_a and text_b, if there is no text_a. A pair is used only
as a whole."""
_OTHER_TEXTS = (("text_a",), ("question",), ("tokens",), ("positive",))
ALIASES = {
    "label": ("label_desc", "gold_label", "labels"),
    "id": ("idx",),
    "qid": ("query_id",),
    "tags": ("ner_tags",),
    "choices": ("options",),
    "impossible": ("is_impossible",),
    "source": ("src",),
    "target": ("tgt",),
    "query": ("anchor",),
    "negatives": ("negative",),
}
"""Columns that take a role if none has the role's own name."""
_PLACES = (("start", "end"), ("start_offset", "end_offset"))
"""What tools call the first character of a span and the one after its last."""
_NUMBERED_NEGATIVE = re.compile(r"negative_\d+")
_NUMBERED = ("tsv", "csv", "conll")
_NUMBERED_WIDTH = 8
"""Columns of CoNLL from which on the first may be a number: CoNLL-X, CoNLL-2009, CoNLL-U."""
OPEN = ("jsonl", "json", "memory")
"""Formats whose rows may differ in their columns; the columns of any row count."""


def pick(
    names: Sequence[str | int], first: Mapping[Any, Any], settings: TableSettings, file: File
) -> dict[str, ColumnKey]:
    """The column or columns of each role, given the columns of a file with a sample value each."""
    picked: dict[str, ColumnKey] = {
        role: _named(key, names, f"{file.path}: columns.{role}", file.format)
        for role, key in settings.columns.items()
        if key != ""
    }
    used = [x for key in picked.values() for x in (key if isinstance(key, list) else [key])]
    free = [name for name in names if name not in used]
    if file.format == "conll":
        if not settings.columns:
            _check_not_numbered(names, first, file.path)
            picked = {"tokens": 0, "tags": names[-1]} if len(names) > 1 else {"tokens": 0}
    else:
        taken = settings.columns.keys() | set(ONLY_NAMED)
        taken = taken | _something_else({*map(str, free), *taken})
        picked |= {role: role for role in ROLES if role in free and role not in taken}
        picked |= _by_alias(free, picked.keys() | taken, file.path)
    if isinstance(picked.get("label"), str) and _are_spans(first.get(picked["label"])):
        picked["spans"] = picked.pop("label")  # of CLUENER, Doccano, Label Studio
    no_spans = "text_a" in picked and not {"spans", "tokens"} & {*picked, *settings.columns}
    if no_spans and "entities" in free and _have_places(first.get("entities")):
        picked["spans"] = "entities"  # of Doccano, with relations
    if not picked:
        raise UserError(_nothing(names, file, settings))
    return {role: picked[role] for role in dict.fromkeys([*ROLES, *picked]) if role in picked}


def _are_spans(label: object) -> bool:
    """Whether a label is an object, but not one of numbers, which says what classes are worth; or a
    list of objects or lists."""
    if isinstance(label, list):
        return bool(label) and isinstance(label[0], list | dict)
    return isinstance(label, dict) and not (
        label and all(isinstance(worth, int | float | None) for worth in label.values())
    )


def _have_places(entities: object) -> bool:
    """Whether they are a list whose items say where they begin and end."""
    if not isinstance(entities, list) or not entities:
        return False
    one = entities[0]
    if isinstance(one, dict):
        return any({start, end} <= one.keys() for start, end in _PLACES)
    return isinstance(one, list) and [*map(type, one)] == [int, int, str]


def _check_not_numbered(names: Sequence[str | int], first: Mapping[Any, Any], path: str) -> None:
    """Raises UserError if the first of many columns of CoNLL numbers the tokens, as in CoNLL-U."""
    numbers = [str(number) for number, _ in enumerate(first[0], 1)]
    if len(names) >= _NUMBERED_WIDTH and first[0] == numbers:
        raise UserError(
            f"{path}: the first of {len(names)} columns numbers the tokens; say which to read, of "
            "CoNLL-U words and parts of speech: columns: {tokens: 1, tags: 3}"
        )


def _something_else(names: Collection[str]) -> set[str]:
    """Roles that columns of their names do not mean, given the table's other columns: `query` may
    be a text of a pair, `source` where a text is from, `target` a class, `turns` a number."""
    source, target = ({role, *ALIASES[role]}.intersection(names) for role in ("source", "target"))
    texts = any(all(name in names for name in some) for some in (*_OTHER_TEXTS, *TEXTS))
    lacking = set() if "positive" in names else {"query"}
    lacking |= {"turns"} if texts else set()
    lacking |= set() if source or {"turns"} & (set(names) - lacking) else {"target"}
    return lacking | ({"source", "source_b", "source_c"} if texts and not target else set())


def without_role(names: Sequence[str | int], keys: Iterable[ColumnKey]) -> list[str]:
    """The columns that no key refers to."""
    used = {x for key in keys for x in (key if isinstance(key, list) else [key])}
    used |= {x.split(".")[0] for x in used if isinstance(x, str)}
    return [str(name) for name in names if name not in used]


def _named(key: ColumnKey, names: Sequence[str | int], where: str, format: str) -> ColumnKey:
    """The key itself if such a column exists; a number becomes the column's name."""
    if isinstance(key, list):
        return [_one(column, names, where, format) for column in key]
    return _one(key, names, where, format)


def _one(key: str | int, names: Sequence[str | int], where: str, format: str) -> str | int:
    has = _shown(names)
    if isinstance(key, int):
        if format not in _NUMBERED:
            raise UserError(f"{where}: {key}: the columns of {format} have names: {has}")
        if not -len(names) <= key < len(names):
            raise UserError(f"{where}: no column {key}; there are {len(names)}, counted from 0")
        return names[key]
    if key in names or key.split(".")[0] in names or format in OPEN:
        return key
    if names and isinstance(names[0], int):
        raise UserError(
            f"{where}: `{key}`: no column has a name; give a number, 0 to {len(names) - 1}"
        )
    if unimo := next(filter(None, map(unimo_line, map(str, names))), ""):
        raise UserError(f"{where}: no column `{key}`; it has {unimo}")
    raise UserError(f"{where}: no column `{key}`; it has {has}")


def _by_alias(free: Sequence[str | int], taken: Collection[str], path: str) -> dict[str, ColumnKey]:
    chosen: dict[str, ColumnKey] = {}
    for role, aliases in ALIASES.items():
        present = [name for name in aliases if name in free]
        if present and role not in taken:
            chosen[role] = _only(present, role, path)
    several = [name for name in free if _NUMBERED_NEGATIVE.fullmatch(str(name))]
    if several and not {"negatives"} & {*taken, *chosen}:
        chosen["negatives"] = several if len(several) > 1 else several[0]
    pairs = [some for some in TEXTS if all(name in free for name in some)]
    if pairs and "text_a" not in taken:
        _only([" and ".join(some) for some in pairs], "text_a", path)
        chosen |= {
            role: name
            for role, name in zip(("text_a", "text_b"), pairs[0], strict=False)
            if role not in taken
        }
    if "text_b" in {*chosen, *taken} and "score" in free and "label" not in {*chosen, *taken}:
        chosen["label"] = "score"  # of the similarity of a pair, as sentence-transformers calls it
    return chosen


def _only(names: list[str], role: str, path: str) -> str:
    if len(names) > 1:
        raise UserError(
            f"{path}: {role} may be {' or '.join(f'`{name}`' for name in names)}; "
            f"choose one with columns: {{{role}: NAME}}{_as_option(role)}"
        )
    return names[0]


def _nothing(names: Sequence[str | int], file: File, settings: TableSettings) -> str:
    if file.format in ("tsv", "csv") and any(map(_is_tag, names)):
        return f"{file.path}: `{names[-1]}` is a tag, no name; format: conll reads a token a line"
    if file.format in ("tsv", "csv") and not settings.header:
        return (
            f"{file.path}: {len(names)} columns without names; assign them, as in "
            "columns: {text_a: 0, label: 1}"
        )
    if file.format in ("tsv", "csv") and (hint := other_separator(names)):
        return f"{file.path}: no known column among {_shown(names)}{hint}"
    hint = "; header: false if it has no header line" if file.format in ("tsv", "csv") else ""
    role, more = ("source", "") if {"target", "tgt"} & set(names) else ("text_a", ", label: NAME")
    option = "" if file.format == "memory" else _as_option(role)
    if alike := _alike(names):
        given = ", ".join(f"{role}: {name}" for role, name in alike.items())
        return (
            f"{file.path}: no known column among {_shown(names)}; columns: {{{given}}} assigns them"
        )
    return (
        f"{file.path}: no known column among {_shown(names)}; assign them, as in "
        f"columns: {{{role}: NAME{more}}}{option}{hint}"
    )


def _is_tag(name: str | int) -> bool:
    """Whether a line of CoNLL rather has it than a header."""
    return bool(re.fullmatch(r"O|[BIES]-\S+", str(name)))


def _alike(names: Sequence[str | int]) -> dict[str, str]:
    """{role: column} of columns that differ from known ones in their capitals alone, with a text
    among them."""
    small = {str(name).strip().lower(): str(name) for name in names}
    texts = next((some for some in (("text_a",), *TEXTS) if all(x in small for x in some)), ())
    if not texts:
        return {}
    found = dict(zip(("text_a", "text_b"), (small[name] for name in texts), strict=False))
    label = next((small[x] for x in ("label", *ALIASES["label"]) if x in small), "")
    return {**found, **({"label": label} if label else {})}


def _as_option(role: str) -> str:
    """The option of a command that does what `columns` does in a recipe."""
    of_embed = " (embed: --column NAME)" if role == "text_a" else ""
    return f", or --columns {role}=NAME{of_embed}"


def value_of(values: Mapping[Any, Any], key: ColumnKey) -> Any:
    """The value at a name, or at a dotted path of names."""
    if isinstance(key, list):
        return [value_of(values, column) for column in key]
    if key in values:
        return values[key]
    inside: object = values
    for name in str(key).split("."):
        if not isinstance(inside, Mapping) or name not in inside:
            has = _shown(list(values)) or "none"
            raise BadRecordError(f"no field `{key}`; it has {has}")
        inside = inside[name]
    return inside


def cell_of(values: Mapping[Any, Any], role: str, key: ColumnKey) -> Any:
    """The value of a role: of columns of 0 and 1 the names of those that are 1, None if all are
    empty."""
    value = value_of(values, key)
    if not isinstance(key, list) or not is_label(role):
        return value
    if all(cell in (None, "") for cell in value):
        return None
    return [str(name) for name, cell in zip(key, value, strict=True) if _is_one(cell, name)]


_ZERO_OR_ONE = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def _is_one(cell: object, name: str | int) -> bool:
    if (text := str(cell).strip().lower()) not in _ZERO_OR_ONE:
        got = "empty" if cell in (None, "") else repr(cell)
        raise BadRecordError(f"{name} is {got}, not 0 or 1, as a column of a class is")
    return _ZERO_OR_ONE[text]


def _shown(names: Sequence[str | int]) -> str:
    """The first names, in one line."""
    return ", ".join(f"`{' '.join(str(name).split())}`" for name in names[:12])
