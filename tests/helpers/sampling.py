"""Parameters of which the default run takes a few, and an exhaustive one all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def only(chosen: Iterable[Any], cases: Iterable[Any]) -> list[ParameterSet]:
    """All cases; those that are not chosen are exhaustive."""
    wanted, known = list(chosen), list(cases)
    assert all(case in known for case in wanted), "no such case"
    marks = pytest.mark.exhaustive
    return [pytest.param(x, marks=[] if x in wanted else [marks]) for x in known]


def every(step: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """All cases; those between the first and each `step`-th after it are exhaustive."""
    known = list(cases)
    return only(known[::step], known)
