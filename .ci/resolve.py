#!/usr/bin/env python3
"""Resolves what README and the Makefile install against the package index, for every Python.

    .ci/resolve.py [CONSTRAINTS]

Nothing is downloaded but metadata, for Linux on x86-64 and macOS on arm64, whatever this machine is
(uv). Local wheels and indexes are ignored: a stranger has none. Exit code 1 if an installation does
not resolve; a machine that reaches no index says so and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11.0", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-apple-darwin")
TARGETS = ("pretrain", "test", "lint", "site")
LOCAL = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL")
UNREACHABLE = re.compile("error sending request|dns error|Failed to fetch|timed out|Network")


def installations() -> list[tuple[str, ...]]:
    """Arguments of every `pip install` in README's commands and the Makefile's targets."""
    made = subprocess.run(
        ["make", "-n", "-B", *TARGETS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    readme = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [*made.stdout.splitlines(), *"".join(readme).splitlines()]
    found = [line.split("pip install", 1)[1] for line in lines if "pip install" in line]
    return list(dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in found))


def uv_arguments(installation: tuple[str, ...], constraints: str) -> tuple[list[str], str]:
    """The same for `uv pip compile`, and the requirements it reads from its standard input."""
    parser = argparse.ArgumentParser(prog=shlex.join(["pip", "install", *installation]))
    parser.add_argument("-c", required=True)
    parser.add_argument("--no-build-isolation", action="store_true")
    parser.add_argument("--no-deps", action="store_true")
    parser.add_argument("-e", dest="editable", action="append", default=[])
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(installation)
    arguments, names = ["-c", constraints], []
    for name in [*given.editable, *given.names]:
        if local := re.fullmatch(r"\.(?:\[(.*)\])?", name):
            extras = [f"--extra={extra}" for extra in (local[1] or "").split(",") if extra]
            arguments += ["pyproject.toml", *extras]
        else:
            names.append(name)
    arguments += ["-"] if names else []
    arguments += ["--no-deps"] if given.no_deps else []
    return arguments, "\n".join(names)


def resolved(
    installation: tuple[str, ...], python: str, constraints: str, platform: str = PLATFORMS[0]
) -> subprocess.CompletedProcess[str]:
    """uv's answer for one installation; its exit code is not 0 if that does not resolve."""
    arguments, names = uv_arguments(installation, constraints)
    options = (f"--python-version={python}", f"--python-platform={platform}")
    return compiled(arguments, names, *options)


def unreachable() -> str | None:
    """Why no package index answers; None if one does."""
    probe = compiled(["-"], "wheel", "--no-cache")
    failed = probe.returncode and UNREACHABLE.search(probe.stderr)
    return probe.stderr.strip().splitlines()[-1] if failed else None


def compiled(arguments: list[str], names: str, *options: str) -> subprocess.CompletedProcess[str]:
    uv = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "-q", "--no-header"]
    environment = {key: value for key, value in os.environ.items() if key not in LOCAL}
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    environment["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # the oldest that torch has wheels for
    return subprocess.run(
        [*uv, "--python", sys.executable, *options, *arguments],
        cwd=ROOT,
        env=environment,
        input=names,
        capture_output=True,
        text=True,
    )


def main() -> int:
    constraints = sys.argv[1] if sys.argv[1:] else "constraints.txt"
    if why := unreachable():
        print(f"resolve: skipped, no package index answers: {why}")
        return 0
    asked = [
        (installation, python, platform)
        for installation in installations()
        for platform in PLATFORMS
        for python in PYTHONS
    ]
    failures = 0
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda one: resolved(one[0], one[1], constraints, one[2]), asked)
        for (installation, python, platform), result in zip(asked, done, strict=True):
            if result.returncode:
                failures += 1
                print(f"pip install {shlex.join(installation)}: Python {python}, {platform}")
                print(result.stderr.rstrip())
    print(f"resolve: {len(asked) - failures} of {len(asked)} installations resolve")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
