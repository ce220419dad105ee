"""Location of a user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's folder for what can be fetched or computed again."""
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PALM_DS_CACHE") or Path(above) / "palm_ds")
