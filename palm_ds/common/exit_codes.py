"""Exit codes, for what started a command: a shell, a launcher, `palm-ds run`, Slurm, Kubernetes.

Only after STOPPED, WATCHDOG or any other code (a crash, a signal) is a restart of any use.
"""

from __future__ import annotations

FINISHED = 0
FAILED = 1
"""A crash, a process that was lost, a last checkpoint that could not be written."""
MISTAKE = 2
"""A mistake in the arguments, the recipe or the data: a restart would meet it again."""
NONFINITE = 3
"""A loss or gradient was not finite: a restart would meet it again."""
WATCHDOG = 42
"""No progress, or no sign of life from another process, for too long."""
STOPPED = 75
"""Stopped on request, with a good checkpoint; the same command resumes. (EX_TEMPFAIL)"""

FINAL = (FINISHED, MISTAKE, NONFINITE)
"""After these nothing is started again."""
