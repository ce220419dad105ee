"""Imports DeepSpeed: quietly, and without what palm_ds never uses of it.

Where MLflow is installed, DeepSpeed imports it for its autotuner, and its first step imports all of
torch's compiler for a Muon of its own. That would be a third of the CPU time in which a process
starts, and 125 MB of its memory.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from palm_ds.common.errors import UserError, first_line

_MUON = "deepspeed.runtime.zero.muon.original_muon"


def import_deepspeed() -> None:
    """Call this before anything is imported from deepspeed; more than once is harmless. It limits
    DeepSpeed's log to errors, and warnings on rank 0. Raises UserError if DS_ACCELERATOR names none
    that DeepSpeed can use, and without DeepSpeed."""
    _quieten()
    if _MUON in sys.modules:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("training needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed")
    try:
        with _without("mlflow"):
            from deepspeed.runtime import compiler
    except ValueError as error:
        if not (name := os.environ.get("DS_ACCELERATOR")):
            raise
        raise UserError(f"DS_ACCELERATOR={name}: {first_line(error)}") from None
    compiled = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        with suppress(ImportError):  # where another version keeps it, it is only slower
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = compiled


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Within the context, `package` seems not to be installed, unless it is already imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # an import of it is an ImportError
    try:
        yield
    finally:
        del sys.modules[package]


def _quieten() -> None:
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(known, _Quiet) for known in logger.filters):
        logger.addFilter(_Quiet())
    for module in (r"deepspeed\.", r"torch\.distributed\."):  # their own calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)


class _Quiet(logging.Filter):
    """Passes errors, and warnings on rank 0, except for two harmless ones: that there is no GPU,
    and that the optimizer is untested."""

    _KNOWN = (
        "Setting accelerator to CPU",
        "**** You are using ZeRO with an untested optimizer",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        first = os.environ.get("RANK", "0") == "0"
        return (
            first
            and record.levelno >= logging.WARNING
            and not record.getMessage().startswith(self._KNOWN)
        )
