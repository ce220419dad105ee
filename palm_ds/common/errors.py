"""User errors as one clear line: the file, line or key, what is wrong, what would be right."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from palm_ds.common.messages import plain_messages
from palm_ds.common.printable import printable


class UserError(ValueError):
    """A mistake the user can fix. Its message is one self-contained line."""


def suggest(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` with the nearest known name, or `; known: ...` with all of them."""
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(wrong), names, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(names)}"


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Wraps every command: prints log messages and turns a UserError into `error: ...` and exit
    code 2."""
    try:
        with plain_messages():
            yield
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        sys.exit(2)
