"""Sizes of files as text."""

from __future__ import annotations

import re

from palm_ds.common.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(size: str, key: str) -> int:
    """2GB -> 2000000000. `key` names the setting in messages. Raises UserError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) *([KMGT]B)?", size.strip().upper())
    if found is None:
        raise UserError(f"{key}: {size!r} is not a size; give one such as 2GB or 500MB")
    if (count := int(float(found[1]) * _UNITS[found[2] or ""])) < 1:
        raise UserError(f"{key}: {size!r} is less than a byte; give one such as 2GB or 500MB")
    return count
