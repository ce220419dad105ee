"""Runs in the process of a test write reports whose curves are empty, as programs of warm_python.py
do: to draw them would take half a second of each. A conftest.py imports the fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Before the runs of a module's own fixtures."""
    from palm_ds.train.report import charts

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(charts, "_svg", lambda *_: "<svg></svg>")
        yield
