r"""Makes text from files safe for terminals and reports by escaping control characters.

printable("w\x1b[2J")            "w\\x1b[2J"
json_line({"w": "\x9b2J"})       '{"w": "\\u009b2J"}'
"""

from __future__ import annotations

import json
import re

_SUSPECT = re.compile(r"[^\x20-\x7e]")


def printable(text: str, *, keep: str = "") -> str:
    """The text with every unprintable character escaped, except those in `keep`."""

    def escaped(match: re.Match[str]) -> str:
        char = match[0]
        if char.isprintable() or char in keep:
            return char
        return char.encode("unicode_escape").decode("ascii")

    return _SUSPECT.sub(escaped, text)


def json_line(value: object) -> str:
    """JSON on one line; text stays readable, unprintable characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _SUSPECT.sub(lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)
