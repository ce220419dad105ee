"""Strict configuration: files, dotted overrides, dataclasses, differences.

    read_yaml("recipe.yaml")                   {"optimizer": {"lr": 1e-4}, ...}; read_json likewise
    override(values, "optimizer.lr", 2e-4)     in place; parse_override reads `optimizer.lr=2e-4`
    parse(Recipe, values, "recipe.yaml")       a frozen dataclass, or a one-line error
    differences(old, new)                      ["optimizer.lr: 0.0001 -> 0.0002"]

Duplicate keys are errors, and so are unknown keys, with the nearest known name; a wrong type is
reported with the expected one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from palm_ds.common.errors import UserError, first_line, suggest, suggest_path
from palm_ds.common.messages import counted, printable

T = TypeVar("T")

if TYPE_CHECKING:
    Several: TypeAlias = Sequence[T]
else:
    Several = tuple[T, ...]
"""A field that programs may give as any sequence, and `parse` makes a tuple."""

# ---- files ----


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file."""
    try:
        values = load_yaml(_read_text(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    return _mapping(values, path)


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads the mapping in a JSON file."""
    try:
        values = json.loads(_read_text(path), object_pairs_hook=partial(unique_keys, path))
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(f"{place}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise UserError(f"{path}: not valid JSON: {error}") from None
    return _mapping(values, path)


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # editors of Windows add a mark
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; expected a file") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{suggest_path(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None


def _mapping(values: object, path: str | Path) -> dict[str, Any]:
    if values is None:
        raise UserError(f"{path}: is empty; expected keys and values")
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys and values, got {shorten(values)}")
    return values


def unique_keys(path: str | Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json's `object_pairs_hook`. Raises UserError for a key that is given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UserError(f'{path}: duplicate key "{printable(duplicate[:80])}"')
    return values


def load_yaml(text: str) -> Any:
    """The value that a text is, without what makes yaml.safe_load a risk. Raises YAMLError."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


_INT, _MERGE = "tag:yaml.org,2002:int", "tag:yaml.org,2002:merge"
_MAX_VALUES = 1_000_000
"""Of a file, with those that aliases repeat: a few lines of aliases of aliases may stand for more
than fit into memory."""


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys, and reads 010 as 10 and 1:30 as text, as YAML 1.2
    does: to YAML 1.1 they are 8 and 90."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | str:
        digits = node.value.replace("_", "")
        if digits.lstrip("+-").isdecimal():
            return int(digits)
        return node.value if ":" in digits else self.construct_yaml_int(node)

    yaml_constructors = {**yaml.SafeLoader.yaml_constructors, _INT: construct_number}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            ArithmeticError,
            LookupError,
            TypeError,
            AttributeError,
        ):  # yaml's own
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{shorten(node.value)} cannot be read as {kind}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # `<<: *name`; the keys beside it replace those of the name
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'duplicate key "{key}"', key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """The values in a node, those that aliases repeat included; `counts`: those known. Raises
    ConstructorError for too many, and for a node that is within itself."""
    if node not in counts:
        counts[node] = 0  # while it is being counted
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
        counts[node] = 1 + sum(_count_values(each, counts) for each in nodes)
    if not 0 < counts[node] <= _MAX_VALUES:
        problem = f"aliases stand for more than {_MAX_VALUES:,} values, or for themselves"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return counts[node]


# ---- overrides ----


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `a.b=c` into a dotted key and a value parsed as YAML."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {text!r}: expected key=value, such as optimizer.lr=1e-4")
    try:
        return key.strip(), load_yaml(written)
    except yaml.YAMLError:
        raise UserError(f"override {_cut(text)!r}: {_cut(written)!r} is not valid YAML") from None


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def override(values: dict[str, Any], key: str, value: object) -> None:
    """Sets a dotted key in place and creates missing sections. Another section that is the same by
    an alias of YAML stays as it is."""
    *parents, last = key.split(".")
    at: object = values
    for parent in parents:
        inner = at.get(parent) if isinstance(at, dict) else ""
        if isinstance(at, dict) and (inner is None or isinstance(inner, dict)):
            at[parent] = inner = dict(inner or {})
        at = inner
    if not isinstance(at, dict):
        raise UserError(f"override of {key!r}: `{'.'.join(parents)}` is not a section")
    at[last] = value


# ---- differences ----


def differences(old: object, new: object, where: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs."""
    if old == new:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        changes = [differences(old.get(k), new.get(k), f"{where}.{k}".lstrip(".")) for k in keys]
        return [line for lines in changes for line in lines]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) > 0:
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [f"{where}: {_shown(old)} -> {_shown(new)}"]


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= 200 or not isinstance(value, list | Mapping):
        return text
    return counted(len(value), "item" if isinstance(value, list) else "key")


# ---- dataclasses ----

CHECKS = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True, allow_inf_nan=False)
"""pydantic's behavior for all settings."""


def parse(cls: type[T], values: object, where: str, *, strict: bool = False) -> T:
    """Builds a dataclass from nested mappings; `where` is the key they belong to, for errors.

    `strict` is for JSON, where `1` is not `true` and `"1"` is not a number. YAML needs the lenient
    mode, since it reads `1e-4` as text.

    >>> parse(Schedule, {"kind": "noam", "warmup": 4000}, "schedule")
    """
    mapping = _check_keys(cls, values, where)
    adapter = _adapter(cls)
    try:
        if strict:
            return adapter.validate_json(json.dumps(mapping, default=str), strict=True)
        return adapter.validate_python(dict(mapping))
    except ValidationError as error:
        raise UserError(one_line(error, where)) from None
    except UserError as error:
        raise UserError(f"{where}: {error}" if where not in str(error) else str(error)) from None


@cache
def _adapter(cls: type[T]) -> TypeAdapter[T]:
    """Built once: for all classes of a recipe it takes a fifth of a second."""
    if not hasattr(cls, "__pydantic_config__"):  # of both modes: `strict` coerces nothing
        with_config(CHECKS)(cls)
    return TypeAdapter(cls)


def check_keys(values: object, known: Iterable[str], where: str) -> Mapping[str, Any]:
    """Returns the values if they are a mapping without unknown keys, else raises UserError."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected keys and values, got {shorten(values)}")
    for key in values:
        if key not in known:
            raise UserError(f"{where}.{key}: unknown key{suggest(key, known)}".lstrip("."))
    return values


def _check_keys(
    cls: type, values: object, where: str, outer: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, Any]:
    """`check_keys` for a dataclass and the dataclasses nested in its fields. `outer`: {key: its
    place} of the outermost one."""
    hints = _hints(cls)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    _refuse_outer_keys(outer, fields, values, where)
    _check_sections(hints, values, where)
    mapping = check_keys(values, fields, where)
    outer = outer or {name: f"{where}.{name}".lstrip(".") for name in fields}
    for key, value in mapping.items():
        hint, inner = hints.get(key), {f"{where}.{key}": value}
        if get_origin(hint) is dict and isinstance(value, Mapping):  # {name: dataclass}
            hint = get_args(hint)[1]
            inner = {f"{where}.{key}.{name}": item for name, item in value.items()}
        _refuse_true_as_number(hint, inner)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            for place, each in inner.items():
                if isinstance(each, Mapping):
                    _check_keys(hint, each, place.lstrip("."), outer)
    return mapping


def _refuse_outer_keys(
    outer: Mapping[str, str], known: Sequence[str], values: object, where: str
) -> None:
    """Raises UserError for a key that belongs beside the sections: `held_out` of a source."""
    for key in values if isinstance(values, Mapping) else ():
        if key in outer and key not in known:
            raise UserError(f'{where}.{key}: unknown key; did you mean "{outer[key]}"?')


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, without None: they take as long as the checks."""
    return {name: _not_none(hint) for name, hint in get_type_hints(cls).items()}


def _refuse_true_as_number(hint: object, values: Mapping[str, object]) -> None:
    """pydantic would take `yes`, which YAML reads as true, for 1."""
    for place, value in values.items():
        if isinstance(value, bool) and hint in (int, float):
            expected = "a whole number" if hint is int else "a number"
            raise UserError(f"{place.lstrip('.')}: expected {expected}, got {shorten(value)}")


def _not_none(hint: object) -> Any:
    """The type without an alternative None."""
    others = [each for each in get_args(hint) if each is not type(None)]
    return others[0] if len(others) == 1 and type(None) in get_args(hint) else hint


def _check_sections(hints: Mapping[str, Any], values: object, where: str) -> None:
    """Raises UserError for a key that belongs into one of the sections: `lr` of `optimizer`."""
    for key in values if isinstance(values, Mapping) else ():
        if key in hints:
            continue
        inside = [
            f"{name}.{key}"
            for name, hint in hints.items()
            if dataclasses.is_dataclass(hint) and key in {f.name for f in dataclasses.fields(hint)}
        ]
        if len(inside) == 1:
            wrong, right = (f"{where}.{name}".lstrip(".") for name in (key, inside[0]))
            raise UserError(f'{wrong}: unknown key; did you mean "{right}"?')


_FILES = (".json", ".yaml", ".yml")
_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "dict": "keys and values",
    "dataclass": "keys and values",
    "list": "a list",
    "tuple": "a list",
}
"""The expected type in words, by the first word of pydantic's error type."""
_YAML_WORDS = {
    bool: """; YAML reads yes, no, on and off so unless they are quoted, as in ['no', 'yes']""",
    date: "; YAML reads it as a date unless it is quoted",
}
"""What a text may be that is none."""


def one_line(error: ValidationError, where: str) -> str:
    """The first of pydantic's errors, for the key `where`: what was wrong and what is right."""
    first = error.errors()[0]
    keys = [str(part) for part in first["loc"] if "[" not in str(part)]  # "dict[...]": of a union
    where = f"{where}: " if keys and where.endswith(_FILES) else f"{where}."
    path = (where + ".".join(keys)).strip(".")
    kind, context = first["type"], first.get("ctx") or {}
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{path}: missing; it must be given"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if isinstance(context.get("error"), UserError):
        return message if path in message else f"{path}: {message}"
    if kind.endswith(("_type", "_parsing", "_from_float")) and kind.split("_")[0] in _EXPECTED:
        message = f"expected {_EXPECTED[kind.split('_')[0]]}"
    elif kind == "finite_number":
        message = "expected a finite number"
    elif kind == "greater_than_equal":
        message = f"expected {_plain(context['ge'])} or more"
    elif kind == "greater_than":
        message = f"expected a number above {_plain(context['gt'])}"
    elif kind == "less_than":
        message = f"expected a number below {_plain(context['lt'])}"
    elif kind == "less_than_equal":
        message = f"expected at most {_plain(context['le'])}"
    elif kind == "too_short":
        message = f"expected {context['min_length']} or more values"
    elif kind == "too_long":
        message = f"expected {context['max_length']} values"
    given = first.get("input")
    hint = _YAML_WORDS.get(type(given), "") if kind == "string_type" else ""
    return f"{path}: {message}, got {shorten(given)}{hint}"


def _plain(bound: float) -> str:
    """0 of 0.0, and 10,000,000."""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def shorten(value: object) -> str:
    """A value as JSON, cut to 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
