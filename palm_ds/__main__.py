"""The console script `palm-ds`, and `python -m palm_ds`. Ctrl-C ends it with one line from here on,
also while modules are imported."""

from __future__ import annotations

import os
import signal
import sys


def start() -> None:
    """Run the command line, or answer the shell that completes one; ends this process."""
    try:
        if "_ARGCOMPLETE" in os.environ:
            from palm_ds.cli.completion import answer

            answer()
        from palm_ds.cli.interrupts import interrupt_between_imports

        interrupt_between_imports()
        from palm_ds.cli import main

        main.start()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would show in Python's own end
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    start()
