"""Commands run in this process: separate processes would take seconds each."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.helpers.no_curves import no_curves  # noqa: F401


@dataclass(frozen=True)
class Said:
    """How a command ended, and its output."""

    code: int
    out: str
    err: str


@pytest.fixture
def enter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """enter("fill_mask", argument, ..., lines=b"the input"): launch/fill_mask.py's `main`."""

    def enter(command: str, *arguments: object, lines: bytes = b"") -> Said:
        main = importlib.import_module(f"launch.{command}").main
        monkeypatch.setattr(sys, "argv", [f"launch/{command}.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        capsys.readouterr()
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return Said(int(code or 0), *capsys.readouterr())

    return enter
