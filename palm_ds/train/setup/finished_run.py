"""Finds the weights that a run has written at its end."""

from __future__ import annotations

from pathlib import Path

from palm_ds.common.config import read_yaml
from palm_ds.common.errors import UserError
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.train.report.metrics_file import FILE, read_metrics


def weights_of(folder: Path) -> Path:
    """The folder itself, or the weights/ of a run folder. Raises UserError for a run that has none
    yet."""
    if (folder / "weights").is_dir():
        return folder / "weights"
    if not any((folder / name).is_file() for name in ("recipe.yaml", FILE)):
        return folder
    steps = read_metrics(folder / FILE).steps if (folder / FILE).is_file() else []
    done = f"{steps[-1]['step']:,}{_of_all(folder)} steps done" if steps else "no step logged"
    raise UserError(
        f"{folder}: this run is not finished ({done}) and has no weights/ yet; the same "
        "palm-ds pretrain command resumes it"
    )


def _of_all(folder: Path) -> str:
    """` of 1,680` if the run folder has the number of steps."""
    try:
        recipe = read_yaml(folder / "recipe.yaml")
        return f" of {read_stages(recipe.get('stages'), list(recipe.get('tasks') or {})).steps:,}"
    except UserError:
        return ""
