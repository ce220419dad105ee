"""The benchmark of optimizers, at a toy size."""

from __future__ import annotations

import pytest

from benchmarks import optimizers


def test_every_kind_is_measured(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    sizes = "--layers 1 --width 64 --words 50 --rounds 1 --threads 1 --device cpu"
    monkeypatch.setattr("sys.argv", ["optimizers.py", *sizes.split()])
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    optimizers.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == list(optimizers.KINDS)
    assert all(float(number) > 0 for line in lines for number in line[1:])
