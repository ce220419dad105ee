"""The benchmark for GPUs at toy sizes on a CPU, and its handling of time and failures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts.tables import markdown
from tests.helpers.warm_python import Program

ROOT = Path(__file__).resolve().parents[2]
Rows = list[dict[str, Any]]
EVERY_SECTION = pytest.param(
    tuple(x.name for x in gpu.SECTIONS), id="all sections", marks=pytest.mark.exhaustive
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(("kernels", "losses", "resume"), id="three sections"), EVERY_SECTION],
)
def rows_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Rows]:
    """The rows of sections at toy sizes, all in one process."""
    folder = tmp_path_factory.mktemp("gpu")
    code = (
        "import sys; from pathlib import Path; from importlib import import_module\n"
        "from benchmarks import gpu\n"
        "for section in (x for x in gpu.SECTIONS if x.name in sys.argv[2:]):\n"
        "    module, function = section.function.split(':')\n"
        "    called = getattr(import_module(f'benchmarks.gpu_parts.{module}'), function)\n"
        "    file = Path(sys.argv[1]) / f'{section.name}.jsonl'\n"
        "    gpu.run_section(called, file, 300, True)\n"
    )
    environment = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    program = Program(["-c", code, str(folder), *request.param], env=environment, cwd=ROOT)
    output, _ = program.communicate(timeout=300)
    assert program.returncode == 0, output
    found = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }
    assert found.keys() == set(request.param)
    return found


def test_every_section_measures_something(rows_of: dict[str, Rows]) -> None:
    for name, rows in rows_of.items():
        assert [row for row in rows if "skipped" not in row and "error" not in row], name


def test_nothing_fails_but_what_cannot_run(rows_of: dict[str, Rows]) -> None:
    errors = [row["error"] for rows in rows_of.values() for row in rows if "error" in row]
    assert [each for each in errors if not each.startswith("UserError")] == []
    assert not any("left_out" in row for rows in rows_of.values() for row in rows)


def test_every_implementation_is_compared_or_named(rows_of: dict[str, Rows]) -> None:
    kernels = import_module("palm_ds.model.kernels")
    found = {(row["operation"], row["form"]) for row in rows_of["kernels"]}
    for operation, choices in kernels.IMPLEMENTATIONS.items():
        if operation != "compile":  # too slow for a test
            assert {(operation, each.name) for each in choices[:-1]} <= found


def test_kernels_losses_and_resumed_runs_are_right(rows_of: dict[str, Rows]) -> None:
    for name in ("kernels", "losses", "resume"):
        judged = [row for row in rows_of[name] if "right" in row]
        assert judged and all(row["right"] for row in judged), judged


@pytest.mark.parametrize("rows_of", [EVERY_SECTION], indirect=True)
def test_speed_comes_with_its_profile(rows_of: dict[str, Rows]) -> None:
    assert rows_of["goals"]
    for row in rows_of["goals"]:
        assert row["tokens_per_s"] > 0 and row["kernels"]["attention"]
        assert row["profile"]["kernels"][0]["ms_per_step"] > 0
        assert "share_of_peak" not in row  # of a CPU


# ---- time and failures ----


def fake_section(name: str, code: str, limit: float = 20.0) -> gpu.Section:
    return gpu.Section(name, limit, code, f"a fake called {name}")


@pytest.fixture
def run_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs sections whose function is a program text; `put(**row)` writes a row."""

    def command_of(self: gpu.Child) -> list[str]:
        begin = (
            "import sys, json, time\n"
            "def put(**row):\n"
            f"    open({str(self.results)!r}, 'a').write(json.dumps(row) + '\\n')\n"
            "if not sys.stdin.readline(): sys.exit()\n"
        )
        return [sys.executable, "-c", begin + self.section.function]

    def run(*sections: gpu.Section, minutes: float = 1.0) -> dict[str, Any]:
        monkeypatch.setattr(gpu, "SECTIONS", sections)
        monkeypatch.setattr(gpu.Child, "command", property(command_of))
        gpu.main(["--minutes", str(minutes), "--out", str(tmp_path / "gpu")])
        return json.loads((tmp_path / "gpu.json").read_text())["sections"]

    return run


def test_a_failing_section_is_a_line_and_the_next_one_runs(run_fakes) -> None:
    found = run_fakes(
        fake_section("bad", "put(a=1); raise ValueError('no such card')"),
        fake_section("good", "put(b=2)"),
    )
    assert found["bad"]["status"] == "failed with exit code 1: ValueError: no such card"
    assert found["bad"]["rows"] == [{"a": 1}]
    assert found["good"]["status"] == "done" and found["good"]["rows"] == [{"b": 2}]


def test_a_section_beyond_its_limit_is_stopped_and_keeps_its_rows(run_fakes) -> None:
    began = time.monotonic()
    dump = "import faulthandler; faulthandler.dump_traceback_later(0.1)"
    found = run_fakes(
        fake_section("long", f"put(a=1); {dump}; time.sleep(60)", limit=1.5),
        fake_section("next", "put(b=2)"),
    )
    assert found["long"]["status"] == "stopped after 2 s at <string>:5"
    assert found["long"]["rows"] == [{"a": 1}]
    assert found["next"]["status"] == "done"
    assert time.monotonic() - began < 30


def test_what_there_is_no_time_for_is_named(run_fakes) -> None:
    found = run_fakes(
        fake_section("first", "put(a=1); time.sleep(60)"),
        fake_section("second", "put(b=2)"),
        minutes=(gpu.RESERVE + 2) / 60,
    )
    assert found["first"]["rows"] == [{"a": 1}]
    assert found["second"] == {"status": "not run: no time left", "seconds": 0.0, "rows": []}


def test_goals_that_are_not_met_come_with_what_the_time_goes_to() -> None:
    kernels = [{"kernel": "gemm", "ms_per_step": 1.5, "share": 0.6, "calls_per_step": 9.0}]
    row = {"shape": "base", "loop": "engine", "share_of_peak": 0.31, "goal": 0.45, "met": False}
    row["profile"] = {"idle_share": 0.25, "kernels": kernels}
    section = {"status": "done", "seconds": 1.0, "rows": [row]}
    whole = {"packages": {}, "time": "", "card": "", "python": "", "command": ""}
    text = markdown({**whole, "sections": {"goals": section}})
    assert "Goal 45 % NOT MET: base, engine: 31.0 % of peak" in text
    assert "Idle 25 % of the step; kernels:" in text and "| gemm | 1.5 | 0.6 |" in text
