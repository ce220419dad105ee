"""Checks callbacks and calls their methods on the events of a training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol

from palm_ds.api import events
from palm_ds.common.errors import UserError, suggest

_HOOK_OF: dict[type[events.Event], str] = {
    events.BeginTraining: "on_train_begin",
    events.BeginPass: "on_epoch_begin",
    events.BeginIteration: "on_step_begin",
    events.EndIteration: "on_step_end",
    events.Evaluation: "on_evaluate",
    events.Saved: "on_save",
    events.EndPass: "on_epoch_end",
    events.EndTraining: "on_train_end",
}
HOOKS = (*_HOOK_OF.values(), "on_log")
"""The names of the methods of palm.Callback."""


class _Settings(Protocol):
    @property
    def log_every(self) -> int: ...


class _Trainer(Protocol):
    """The part of a trainer used here."""

    @property
    def settings(self) -> _Settings: ...


def check_callbacks(callbacks: Sequence[object]) -> tuple[object, ...]:
    """The callbacks. Raises UserError for an object that is none."""
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks: expected a list of objects, got {callbacks!r:.60}")
    for number, each in enumerate(callbacks):
        where = f"callbacks[{number}]"
        if any(kind.__module__.startswith("transformers.") for kind in type(each).__mro__):
            raise UserError(
                f"{where}: {type(each).__name__} is a callback of transformers; derive it from "
                "palm.Callback, whose methods get (trainer, event)"
            )
        named = [x for x in dir(each) if x.startswith("on_")] if not isinstance(each, type) else []
        for name in named:
            if name not in HOOKS:
                raise UserError(f"{where}: no event {name!r}{suggest(name, HOOKS)}")
            if not _takes_two(getattr(each, name)):
                raise UserError(f"{where}: {name}: expected a method of (trainer, event)")
        if not named:
            raise UserError(f"{where}: expected an object with methods such as on_step_end")
    return tuple(callbacks)


def _takes_two(method: object) -> bool:
    try:
        inspect.signature(method).bind(None, None) if callable(method) else None
    except TypeError:
        return False
    except ValueError:  # a function of C, which has no signature
        return True
    return callable(method)


def caller(callbacks: Sequence[object], trainer: _Trainer) -> Callable[[events.Event], None]:
    """An event handler that calls the methods of callbacks, in their order."""
    log_every = trainer.settings.log_every

    def handle(event: events.Event) -> None:
        names = [_HOOK_OF[type(event)]]
        if isinstance(event, events.EndIteration) and (event.batch_id + 1) % log_every == 0:
            names.append("on_log")
        for name in names:
            for each in callbacks:
                if method := getattr(each, name, None):
                    method(trainer, event)

    return handle
