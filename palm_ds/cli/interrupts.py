"""Signals that end a program, and imports. What a handler raises while a module is imported may be
lost in somebody's `except`, or abort the program in a C++ initializer. So the program ends
immediately if a command imports what it needs before its work, and otherwise after the import or
with a second signal. Finalizers and callbacks of weak references are waited for, too: Python prints
what they raise and continues. Where it does so elsewhere, in C code that cannot raise, the signal
is sent again."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
_COMMAND_LINE = ("__main__", "palm_ds.__main__", "palm_ds.cli.")
_IMPORTLIB = "<frozen importlib._bootstrap>"
_WEAKREF_FILES = (weakref.__file__, sys.modules[weakref.WeakSet.__module__].__file__)
_PAUSE_SECONDS = 0.01


def between_imports(handle: Handler) -> Handler:
    """A handler that calls `handle`, which raises, as soon as no module is being imported and no
    finalizer runs."""
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _send_again_or_print
    return _Deferring(handle)


def raise_again() -> None:
    """Raise once more what a handler of `between_imports` has raised; nothing if none has. C++ code
    in which a signal arrives may end with an error of its own instead."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if isinstance(handler, _Deferring) and handler.has_raised:
            handler.handle(number, None)


class _Deferring:
    """The handler of one signal."""

    def __init__(self, handle: Handler) -> None:
        self.handle, self.has_raised = handle, False
        self._program, self._main_thread = os.getpid(), _thread.get_ident()
        self._waits = self._retries = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self._retries = self._waits and not self._retries, False
        importer = _importer(frame)
        if os.getpid() != self._program or not (importer or _is_in_finalizer(frame)):
            self._waits, self.has_raised = False, True
            self.handle(number, frame)
        elif again or importer.startswith(_COMMAND_LINE):
            with suppress(OSError):  # nobody may read it any more
                print(line_of(number), file=sys.stderr, flush=True)
            os._exit(128 + number)
        else:
            self._waits = True
            _send_later(self._main_thread, number, self._note_retry)

    def _note_retry(self) -> None:
        self._retries = True


def _send_again_or_print(unraisable: sys.UnraisableHookArgs) -> None:
    """Send a signal again if this is what its handler raised."""
    traceback = unraisable.exc_traceback
    while traceback:
        frame = traceback.tb_frame
        if frame.f_code is _Deferring.__call__.__code__:
            _send_later(_thread.get_ident(), frame.f_locals["number"])
            return
        traceback = traceback.tb_next
    sys.__unraisablehook__(unraisable)


def _send_later(thread: int, number: int, before: Callable[[], object] = lambda: None) -> None:
    """Send a signal to a thread again after a moment; calls `before` immediately before it."""

    def send() -> None:
        time.sleep(_PAUSE_SECONDS)
        before()
        signal.pthread_kill(thread, number)  # also ends its wait for something

    _thread.start_new_thread(send, ())


def interrupt_between_imports() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as before, but between imports; nothing where it is
    ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, between_imports(signal.default_int_handler))


def line_of(number: int) -> str:
    """The line of a program that a signal has ended."""
    interrupt = number == signal.SIGINT
    return "interrupted" if interrupt else f"ended by {signal.Signals(number).name}"


def _importer(frame: FrameType | None) -> str:
    """The module that started the import in progress; empty: there is none."""
    name = ""
    while frame and (above := frame.f_back):
        if frame.f_code.co_filename == _IMPORTLIB or _name(frame) == "importlib":
            name = _name(above)
        frame = above
    return name


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame:
        code = frame.f_code
        if code.co_name == "__del__":
            return True
        if code.co_name in ("remove", "_remove") and code.co_filename in _WEAKREF_FILES:
            return True
        frame = frame.f_back
    return False


def _name(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
