"""Finds the source of a conversion: a path, or a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.weights.download.downloader import hub_snapshot, is_hub_name


def locate(source: Path, revision: str = "") -> tuple[Path, str]:
    """(path, origin): origin is empty for a path; a repository of the hub is downloaded, pinned to
    a commit, which origin names. Raises UserError if there is neither."""
    name = source.as_posix()
    if _is_there(source) or not is_hub_name(name):
        if revision:
            raise UserError(f"revision: {source} has none; repositories of the hub have")
        return source, ""
    try:
        found = hub_snapshot(name, revision or None)
    except UserError as error:
        why = str(error).removeprefix(f"{name}: ")
        missing = f"no such file or folder{suggest_path(source)}"
        raise UserError(f"{name}: {missing}, and not from the Hugging Face hub: {why}") from None
    return found.folder, f"{name} on the Hugging Face hub, revision {found.revision}"


def _is_there(source: Path) -> bool:
    """Also of TensorFlow's and Paddle's checkpoints, which are named without their suffixes."""
    return source.exists() or any(source.parent.glob(f"{source.name}.*"))
