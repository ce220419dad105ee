"""One clear line for a person's mistake: file, line or key, what was wrong, what would be right."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from palm_ds.common.messages import plain_messages


class UserError(ValueError):
    """Something a person can put right. Its message is one line and stands for itself."""


def suggest(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for the nearest known name, else the names there are."""
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(wrong), names, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(names)}"


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """The door of every command: messages are shown, and a UserError becomes `error: ...` and exit
    code 2."""
    try:
        with plain_messages():
            yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
