"""What only a GPU can show, in one command: whether it is right, how fast it is, what it waits for.

    python benchmarks/gpu.py                                   all sections, at most 9 minutes
    python benchmarks/gpu.py --only goals forms --minutes 4 --out runs/gpu
    python benchmarks/gpu.py --toy                             on a CPU, at toy sizes

Needs this repository and installed packages, no network and no data. Every section is a process of
its own with a limit of its own; the most important come first, and what one does not use is left
for the others. Results are written to OUT.json and OUT.md after every measurement, so a run that is
killed keeps what it has. A section that fails, and what there was no time for, are lines in them.

Without DeepSpeed, transformers, accelerate or a compiler, what needs them is named and left out.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESERVE = 3.0
"""Seconds for ending processes and writing."""
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "accelerate", "liger-kernel")


@dataclass(frozen=True)
class Section:
    """A part of the benchmark: its function, and the seconds it may take."""

    name: str
    limit: float
    function: str
    about: str


SECTIONS = (
    Section("ceilings", 20, "speed:ceilings", "what the card does at most"),
    Section("kernels", 110, "correctness:kernels", "kernels against the plain ones"),
    Section("windows", 90, "correctness:windows", "attention with windows and rotary positions"),
    Section("goals", 150, "speed:goals", "pretraining, packed rows of 512, dropout 0.1"),
    Section("losses", 110, "correctness:losses", "the loss of 50 steps, compared with fp32"),
    Section("trainer", 130, "trainer:pretraining", "the same with transformers.Trainer"),
    Section("modern", 70, "speed:modern", "ModernBERT-base at 1,024 and 8,192"),
    Section("forms", 110, "speed:forms", "pretraining, form by form"),
    Section("resume", 80, "correctness:resume", "a resumed run, bit for bit"),
    Section("checkpoints", 30, "checkpoints:checkpoints", "the time of a checkpoint"),
    Section("lengths", 80, "speed:lengths", "pretraining by length"),
    Section("finetuning", 60, "runs:finetuning", "fine-tuning and prediction"),
    Section("optimizers", 40, "speed:optimizers", "the time of the optimizer"),
    Section("real_text", 60, "runs:real_text", "a whole run on real text"),
    Section("attention", 90, "attention:alone", "attention by itself, and blocks of our kernel"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SECTION", help=", ".join(names)
    )
    parser.add_argument("--minutes", type=float, default=8.8, help="for everything")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="without .json or .md")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---- a section, in a process of its own ----


def child(name: str, results: Path, toy: bool) -> None:
    """Import what the section needs, wait for its deadline on standard input, and run it."""
    section = next(each for each in SECTIONS if each.name == name)
    module, function = section.function.split(":")
    loaded = import_module(f"benchmarks.gpu_parts.{module}")
    with suppress(ImportError):
        import_module("deepspeed")
    deadline = float(sys.stdin.readline() or 0)
    if deadline:
        seconds = deadline - time.monotonic()
        faulthandler.dump_traceback_later(max(seconds - 0.5, 0.1))  # says where it was stopped
        run_section(getattr(loaded, function), results, seconds, toy)


def run_section(function: Callable[[Any], None], results: Path, seconds: float, toy: bool) -> None:
    from benchmarks.gpu_parts.context import Context

    logging.getLogger("palm_ds").setLevel(logging.INFO)  # rows keep these lines
    function(Context(results=results, seconds=seconds, toy=toy))


# ---- the whole ----


@dataclass
class Report:
    """What is known so far, and its two files."""

    out: Path
    facts: dict[str, Any]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, name: str, status: str, seconds: float, rows: list[Any]) -> None:
        self.sections[name] = {"status": status, "seconds": round(seconds, 1), "rows": rows}
        self.write()

    def write(self) -> None:
        from benchmarks.gpu_parts.tables import markdown

        self.out.parent.mkdir(parents=True, exist_ok=True)
        whole = {**self.facts, "sections": self.sections}
        for suffix, text in ((".json", json.dumps(whole, indent=1)), (".md", markdown(whole))):
            part = self.out.with_name(f".{self.out.name}{suffix}")
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(self.out.with_name(self.out.name + suffix))


def facts(command: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "command": " ".join(["python", "benchmarks/gpu.py", *command]),
        "card": _card(),
        "python": platform.python_version(),
        "packages": found,
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _card() -> str:
    """The GPU's name, asked for without a CUDA context in this process."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else "none"


@dataclass
class Child:
    """The process of a section. It imports while the one before it still runs."""

    section: Section
    results: Path
    toy: bool

    @property
    def command(self) -> list[str]:
        words = [sys.executable, str(Path(__file__).resolve()), "--child", self.section.name]
        return [*words, "--out", str(self.results), *(["--toy"] if self.toy else [])]

    def __post_init__(self) -> None:
        self.log = self.results.with_suffix(".log")
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.results.parent / "inductor"))
        if self.toy:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def begin(self, seconds: float) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it may have ended already: its log says why
            self.process.stdin.write(f"{time.monotonic() + seconds}\n".encode())
            self.process.stdin.close()

    def rows(self) -> list[Any]:
        if not self.results.exists():
            return []
        lines = self.results.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def status(self) -> str:
        """How it ended; the last line of its output if it failed."""
        code = self.process.returncode
        if code == 0:
            return "done"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"failed with exit code {code}: {lines[-1][:300] if lines else 'no output'}"

    def place(self) -> str:
        """The innermost line of the main thread when its time was over."""
        log = self.log.read_text(encoding="utf-8", errors="replace")
        _, _, main = log.rpartition("\nThread 0x")
        frame = re.search(r'File "(.*)", line (\d+)', main)
        return f" at {frame[1]}:{frame[2]}" if frame else ""

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()


def run_all(args: argparse.Namespace, command: Sequence[str]) -> Report:
    began = time.monotonic()
    report = Report(args.out, facts(command))
    sections = [section for section in SECTIONS if section.name in args.only]
    total = 60 * args.minutes - RESERVE
    with tempfile.TemporaryDirectory() as folder:
        make = lambda s: Child(s, Path(folder) / f"{s.name}.jsonl", args.toy)  # noqa: E731
        now = make(sections[0])
        try:
            for number, section in enumerate(sections):
                left = total - (time.monotonic() - began)
                after = make(sections[number + 1]) if number + 1 < len(sections) else None
                try:
                    _follow(now, section, min(section.limit, left), report)
                finally:
                    now.end()
                    now = after or now
        finally:
            now.end()
    return report


def _follow(now: Child, section: Section, seconds: float, report: Report) -> None:
    """Run a section to its end or its limit; write each row as it comes."""
    if seconds <= 1:
        report.put(section.name, "not run: no time left", 0.0, [])
        return
    began = time.monotonic()
    print(f"{section.name}: {section.about} (at most {seconds:.0f} s)", flush=True)
    now.begin(seconds)
    seen = -1
    status = ""
    while not status:
        with suppress(subprocess.TimeoutExpired):
            now.process.wait(timeout=0.5)
        passed, rows = time.monotonic() - began, now.rows()
        if now.process.poll() is not None:
            status = now.status()
        elif passed > seconds:
            status = f"stopped after {passed:.0f} s{now.place()}"
        if status or len(rows) != seen:
            seen = len(rows)
            report.put(section.name, status or "running", passed, rows)
    print(f"  {status}, {seen} rows, {time.monotonic() - began:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.child:
        child(args.child, args.out, args.toy)
        return
    report = run_all(args, sys.argv[1:] if arguments is None else arguments)
    print(Path(f"{report.out}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the sections, keeps the files
    main()
