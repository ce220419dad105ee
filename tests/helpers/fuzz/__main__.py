"""Runs seeded cases: each must succeed, or raise UserError with one line, within its limits.

    python -m tests.helpers.fuzz --first 0 --count 2000

Prints how to repeat each failing case, and `done: ...` at the end. Where the process itself dies,
the last line of stderr says in which case.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import FrameType

from palm_ds.common.errors import UserError
from tests.helpers.fuzz.subjects import Subject, copy_of, templates

MORE_MEMORY = 1 << 30
"""Bytes of address space beyond what the program has at its start."""
SECONDS = 5.0
"""CPU time of a case."""
LONGEST_LINE = 2_000


class TooSlow(BaseException):
    """A case has used up its time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--only", default="", help="one subject")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        return run(folder, range(args.first, args.first + args.count), args.only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, seeds: range, only: str) -> int:
    subjects = templates(folder / "templates")
    for subject in subjects.values():  # nothing is wrong with what is not mutated
        subject.use(copy_of(subject.template, folder / "work" / "case"), Random(0))
        shutil.rmtree(folder / "work")
    limit_memory()
    signal.signal(signal.SIGPROF, _too_slow)
    outcomes: Counter[str] = Counter()
    spent = dict.fromkeys(subjects, 0.0)
    for seed in seeds:
        random = Random(f"fuzz/{seed}")
        name = only or random.choices([*subjects], [x.weight for x in subjects.values()])[0]
        print(f"case {seed} {name}", file=sys.stderr, flush=True)
        began = time.process_time()
        outcome = one(subjects, name, random, folder / "work")
        spent[name] += time.process_time() - began
        outcomes[outcome.split(":")[0]] += 1
        if os.environ.get("FUZZ_VERBOSE"):
            print(f"{seed} {name}: {outcome}")
        if outcome.startswith("FAILED"):
            print(f"seed {seed}, {name}: {outcome}", flush=True)
            again = f"--first {seed} --count 1" + (f" --only {only!r}" if only else "")
            print(f"  again: python -m tests.helpers.fuzz {again}", flush=True)
    slowest = sorted(spent, key=lambda name: spent[name], reverse=True)[:5]
    shown = {name: f"{spent[name]:.1f}" for name in slowest}
    print(f"done: {dict(outcomes)}; seconds: {sum(spent.values()):.1f}, of which {shown}")
    return int(outcomes["FAILED"] > 0)


def one(subjects: Mapping[str, Subject], name: str, random: Random, work: Path) -> str:
    """The outcome of a case: read, refused, or FAILED with the reason."""
    work.mkdir(parents=True)
    folder = copy_of(subjects[name].template, work / "case")
    subjects[name].spoil(folder, random)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        subjects[name].use(folder, random)
        outcome = "read"
    except UserError as error:
        outcome = _check_line(str(error))
    except BaseException as error:
        lines = traceback.format_exc().strip().splitlines()
        outcome = f"FAILED: {type(error).__name__}: {' | '.join(x.strip() for x in lines[-5:])}"
        if os.environ.get("FUZZ_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    left = sorted({x.name for x in work.iterdir()} - {"case", "out"})
    shutil.rmtree(work)
    return f"FAILED: leftovers: {left}" if left else outcome


def _check_line(line: str) -> str:
    if not line.isprintable() or len(line) > LONGEST_LINE or "weights_only" in line:
        return f"FAILED: not one clear line: {line[:300]!r}"
    return f"refused: {line}"


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} seconds")


if __name__ == "__main__":
    sys.exit(main())
