#!/usr/bin/env python3
"""Runs the Dockerfile's steps in a folder that holds a system, where there is no container engine.

    debootstrap --variant=minbase bookworm ROOT
    .ci/image.py ROOT [NAME=VALUE ...]        # as root; NAME=VALUE as with --build-arg

ROOT stands for the base image: FROM and CMD are passed over, the other instructions carried out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, arguments) of each, without comments, lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(*line.split(maxsplit=1), "")[:2] for line in joined.splitlines() if line.strip()]


def main() -> int:
    root, given = Path(sys.argv[1]), dict(pair.split("=", 1) for pair in sys.argv[2:])
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    shell, folder = ["/bin/sh", "-c"], "/"
    for keyword, text in instructions((PROJECT / "Dockerfile").read_text()):
        if keyword == "ARG":
            name, _, default = text.partition("=")
            env[name] = given.get(name, default)
        elif keyword == "ENV":
            pairs = (pair.partition("=") for pair in shlex.split(text))
            env |= {name: string.Template(value).safe_substitute(env) for name, _, value in pairs}
        elif keyword == "SHELL":
            shell = json.loads(text)
        elif keyword == "WORKDIR":
            folder = text
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif keyword == "COPY":
            *sources, target = text.split()
            place = root / folder.lstrip("/") / target
            for source in map(PROJECT.joinpath, sources):
                if source.is_dir():
                    shutil.copytree(source, place, dirs_exist_ok=True)
                else:
                    shutil.copy(source, place)
        elif keyword == "RUN":
            print(f"RUN {text}", flush=True)
            inside = f"cd {shlex.quote(folder)} && {text}"
            carried = {key: value for key, value in os.environ.items() if key.endswith("_proxy")}
            command = ["chroot", str(root), *shell, inside]
            if code := subprocess.run(command, env=carried | env).returncode:
                return code
        elif keyword not in ("FROM", "CMD"):
            sys.exit(f"error: {keyword} is not known here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
