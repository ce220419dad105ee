"""Packages that only some commands need, installed as an extra of palm_ds."""

from __future__ import annotations

import importlib.util

from palm_ds.common.errors import UserError


def need_extra(what: str, extra: str, *packages: str) -> None:
    """Raises UserError, which begins with `what` needs them, if a package is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise UserError(f"{what} needs {names}: pip install 'palm_ds[{extra}]'")
