"""Filters on metadata, as SQL with parameters.

    {"lang": "en"}                      the value is en, or is a list with en
    {"tag": ["a", "b"]}                 a or b
    {"year": {">=": 2020, "<": 2024}}   compared: numbers with numbers, texts by their code points
    {"lang": {"!=": "en"}}              also where there is no lang
    {"lang": None}                      there is no lang, or it is null

All of a filter's conditions must hold. No part of a filter becomes part of the SQL's text.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from palm_ds.common.errors import UserError, suggest
from palm_ds.inference.search.texts import check_unicode

Filter = Mapping[str, Any]
"""{name: a scalar, a list of scalars, or {operator: scalar}}"""
OPERATORS = ("==", "!=", ">", ">=", "<", "<=")
_MAX_CONDITIONS = 64
_MAX_INTEGER = 1 << 63
Clause = tuple[str, list[Any]]
"""SQL and its parameters."""
_ANY = (
    "EXISTS (SELECT 1 FROM json_each(texts.metadata) AS m WHERE m.key = ? AND ({one} OR EXISTS "
    "(SELECT 1 FROM json_each(CASE m.type WHEN 'array' THEN m.value ELSE '[]' END) AS e "
    "WHERE {each})))"
)


def clause_of(filter: Filter) -> Clause:
    """The condition on a row of the table `texts`; that of an empty filter is true. Raises
    UserError."""
    if not isinstance(filter, Mapping):
        raise UserError(f'filter: expected an object such as {{"lang": "en"}}, got {filter!r:.60}')
    clauses: list[Clause] = [("1", [])]
    for key, wanted in filter.items():
        if not isinstance(key, str):
            raise UserError(f"filter: {key!r:.60}: expected a name")
        check_unicode(key, "filter")
        clauses.append(_condition(key, wanted))
    if sum(max(len(parameters), 1) for _, parameters in clauses) > _MAX_CONDITIONS * 3:
        raise UserError(f"filter: more than {_MAX_CONDITIONS} values")
    return " AND ".join(sql for sql, _ in clauses), [x for _, each in clauses for x in each]


def check_keys(connection: sqlite3.Connection, filter: Filter, *, all_known: bool = False) -> None:
    """Raises UserError if a condition cannot hold because no text has its key; `all_known`: also
    if it would hold for every text, as `!=` and null."""
    metadata = "FROM texts, json_each(texts.metadata) AS m"
    for key in sorted(filter):
        if connection.execute(f"SELECT 1 {metadata} WHERE m.key = ? LIMIT 1", [key]).fetchone():
            continue
        sql, parameters = clause_of({key: filter[key]})
        without_any = f"SELECT {sql} FROM (SELECT '{{}}' AS metadata) AS texts"
        if all_known or not connection.execute(without_any, parameters).fetchone()[0]:
            known = {name for (name,) in connection.execute(f"SELECT DISTINCT m.key {metadata}")}
            raise UserError(f"filter: no text has {key!r:.60}{suggest(key, known)}")


def _condition(key: str, wanted: object) -> Clause:
    if isinstance(wanted, Mapping):
        if not wanted:
            raise UserError(f"filter: {key}: no operator; expected one of {', '.join(OPERATORS)}")
        return _joined([_compared(key, sign, value) for sign, value in wanted.items()], " AND ")
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _one_of(key, wanted)
    return _one_of(key, [wanted])


def _joined(clauses: Sequence[Clause], word: str) -> Clause:
    """Several conditions, at least one, as one."""
    sql = word.join(sql for sql, _ in clauses)
    return f"({sql})", [value for _, parameters in clauses for value in parameters]


def _compared(key: str, sign: object, value: object) -> Clause:
    if sign not in OPERATORS:
        raise UserError(
            f"filter: {key}: {sign!r:.40} is not an operator{suggest(str(sign), OPERATORS)}"
        )
    if sign in ("==", "!="):
        sql, parameters = _one_of(key, [value])
        return (f"NOT {sql}" if sign == "!=" else sql), parameters
    if value is None or isinstance(value, bool):
        raise UserError(f"filter: {key}: {sign} compares numbers or texts, got {value!r}")
    _check(key, value)
    return _any(key, lambda name: (f"({_kind(name, value)} AND {name}.value {sign} ?)", [value]))


def _one_of(key: str, values: Sequence[object]) -> Clause:
    """The value is one of these."""
    for value in values:
        _check(key, value)
    clauses = [("0", [])]  # none of no values
    if None in values:
        missing = "NOT EXISTS (SELECT 1 FROM json_each(texts.metadata) AS m WHERE m.key = ? AND "
        clauses.append((f"{missing}m.type <> 'null')", [key]))
    groups = [
        [value for value in values if isinstance(value, str)],
        [value for value in values if isinstance(value, int | float) and not _is_truth(value)],
    ]
    for group in groups:
        if group:
            clauses.append(_any(key, partial(_in, group)))
    if truths := ["true" if value else "false" for value in values if _is_truth(value)]:
        marks = _marks(truths)
        clauses.append(_any(key, lambda name: (f"{name}.type IN ({marks})", truths)))
    return _joined(clauses, " OR ")


def _in(group: Sequence[object], name: str) -> Clause:
    return f"({_kind(name, group[0])} AND {name}.value IN ({_marks(group)}))", [*group]


def _any(key: str, matching: Callable[[str], Clause]) -> Clause:
    """The value of a key, or a member of its list, matches."""
    (one, parameters), (each, again) = matching("m"), matching("e")
    return _ANY.format(one=one, each=each), [key, *parameters, *again]


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _kind(name: str, like: object) -> str:
    """The condition that a row of json_each is a text, or a number, as a value is."""
    return (
        f"{name}.type = 'text'" if isinstance(like, str) else f"{name}.type IN ('integer','real')"
    )


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _check(key: str, value: object) -> None:
    """Raises UserError for what JSON lacks, or SQLite does not compare."""
    if not (value is None or isinstance(value, str | int | float)):
        raise UserError(
            f"filter: {key}: expected a text, a number, true, false or null, got {value!r:.60}"
        )
    if isinstance(value, str):
        check_unicode(value, f"filter: {key}")
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        raise UserError(f"filter: {key}: an integer of more than 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"filter: {key}: {value} is not a number in JSON")
