"""Damaged foreign files are read, or refused in one line, within bounded memory and time."""

from __future__ import annotations

import pytest

from tests.helpers.sampling import only
from tests.helpers.warm_python import Program, clear_away


@pytest.mark.slow
@pytest.mark.parametrize("cases", only([240], [240, 1_000]))
def test_mutated_files_are_read_or_refused_in_one_line(cases: int) -> None:
    """Seeded mutations of configs, tokenizers, headers, tables and recipes (tests/helpers/fuzz). A
    failure shows the command that repeats the case."""
    each = min(cases, 500)
    words = ["-m", "tests.helpers.fuzz", "--count", each, "--first"]
    programs = [Program([*words, first], apart=True) for first in range(0, cases, each)]
    try:
        for program in programs:
            out, err = program.communicate(timeout=500)
            last = err.strip().splitlines()[-1:]
            assert program.returncode == 0, f"{out}\nthe last case: {last}"
            assert out.startswith("done: ") and "'read'" in out and "'refused'" in out, out
    finally:
        clear_away(programs)
