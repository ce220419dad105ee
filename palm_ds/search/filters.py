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
from collections.abc import Mapping, Sequence
from typing import Any

from palm_ds.common.errors import UserError, suggest

Scalar = str | int | float | bool | None
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
        clauses.append(_condition(key, wanted))
    if sum(len(parameters) for _, parameters in clauses) > _MAX_CONDITIONS * 3:
        raise UserError(f"filter: more than {_MAX_CONDITIONS} values")
    return " AND ".join(sql for sql, _ in clauses), [x for _, each in clauses for x in each]


def _condition(key: str, wanted: object) -> Clause:
    if isinstance(wanted, Mapping):
        if not wanted:
            raise UserError(f"filter: {key}: no operator; expected one of {', '.join(OPERATORS)}")
        return _joined([_compared(key, sign, value) for sign, value in wanted.items()], " AND ")
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not wanted:
            return "0", []  # none of no values
        return _joined([_compared(key, "==", value) for value in wanted], " OR ")
    return _compared(key, "==", wanted)


def _joined(clauses: Sequence[Clause], word: str) -> Clause:
    sql = word.join(sql for sql, _ in clauses)
    return f"({sql})", [value for _, parameters in clauses for value in parameters]


def _compared(key: str, sign: object, value: object) -> Clause:
    if sign not in OPERATORS:
        raise UserError(
            f"filter: {key}: {sign!r:.40} is no operator{suggest(str(sign), OPERATORS)}"
        )
    if sign == "!=":
        sql, parameters = _compared(key, "==", value)
        return f"NOT {sql}", parameters
    _check(key, str(sign), value)
    if value is None:
        missing = "NOT EXISTS (SELECT 1 FROM json_each(texts.metadata) AS m WHERE m.key = ? AND "
        return f"{missing}m.type <> 'null')", [key]
    one, parameters = _matching("m", str(sign), value)
    each, again = _matching("e", str(sign), value)
    return _ANY.format(one=one, each=each), [key, *parameters, *again]


def _check(key: str, sign: str, value: object) -> None:
    if not (value is None or isinstance(value, str | int | float)):
        raise UserError(
            f"filter: {key}: expected a text, a number, true, false or null, got {value!r:.60}"
        )
    if sign != "==" and (value is None or isinstance(value, bool)):
        raise UserError(f"filter: {key}: {sign} compares numbers or texts, got {value!r}")
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        raise UserError(f"filter: {key}: an integer of more than 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"filter: {key}: {value} is no number of JSON")


def _matching(name: str, sign: str, value: object) -> Clause:
    """The condition on one value of json_each. `sign` is one of OPERATORS."""
    if isinstance(value, bool):
        return f"{name}.type = ?", ["true" if value else "false"]
    kind = (
        f"{name}.type = 'text'" if isinstance(value, str) else f"{name}.type IN ('integer','real')"
    )
    return f"({kind} AND {name}.value {sign} ?)", [value]
