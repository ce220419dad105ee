"""Opens a checkpoint of any format: the table of formats.

open_checkpoint("any/checkpoint") ──> CheckpointContents
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError, suggest, suggest_path
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.deepspeed.read import FORMAT as DEEPSPEED
from palm_ds.weights.formats.format import Format
from palm_ds.weights.formats.huggingface.read import CONFIG
from palm_ds.weights.formats.huggingface.write import FORMAT as HUGGINGFACE
from palm_ds.weights.formats.paddle.write import FORMAT as PADDLE
from palm_ds.weights.formats.tensorflow.read import FORMAT as TENSORFLOW
from palm_ds.weights.formats.unsupported_formats import check_not_other

FORMATS: tuple[Format, ...] = (DEEPSPEED, native.FORMAT, PADDLE, HUGGINGFACE, TENSORFLOW)
"""In the order in which they are tried: a folder of DeepSpeed shards may have a weights.json."""


def open_checkpoint(path: str | Path, **options: Any) -> CheckpointContents:
    """Open a checkpoint of any format, itself: `weights.model_folder.open_model` also opens runs.

    `options` depend on the format (`eps`, `config`, `tokenizer`, ...); None means not given.
    Raises UserError if no format recognizes the path, or an option is not one of its format's.
    """
    path = Path(path)
    form = format_of(path)
    return form.open(path, **check_options(form, options, path))


def format_of(path: Path) -> Format:
    """The format of a checkpoint. Raises UserError if no format recognizes it."""
    try:
        if not path.exists() and not path.parent.is_dir():
            raise UserError(f"{path}: no such file or folder{suggest_path(path)}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    for known in FORMATS:
        if known.recognizes(path):
            return known
    check_not_other(path)
    if (path / CONFIG).is_file():
        return HUGGINGFACE  # its reader explains what is wrong with the folder
    if not path.exists():
        raise UserError(f"{path}: no such file or folder{suggest_path(path)}")
    if inside := _model_inside(path):
        raise UserError(f'{path}: not a checkpoint of a known format; did you mean "{inside}"?')
    wanted = "; ".join(known.looks_for for known in FORMATS)
    raise UserError(f"{path}: not a checkpoint of a known format; looked for: {wanted}")


def _model_inside(folder: Path) -> Path | None:
    """The first folder in this one that a format recognizes, such as a run in `runs`."""
    children = sorted(folder.iterdir())[:100] if folder.is_dir() else []
    for child in filter(Path.is_dir, children):
        if any(known.recognizes(at) for at in (child, child / "weights") for known in FORMATS):
            return child
    return None


def check_options(format_: Format, options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options that are given. Raises UserError if one is not an option of the format."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in format_.options:
            near = suggest(name, format_.options) if format_.options else "; it has no options"
            raise UserError(f"{path}: {format_.name}: no option {name!r}{near}")
    eps = given.get("eps", 1.0)
    if not 0 < eps <= 1:
        raise UserError(f"eps: expected a number above 0 and at most 1, got {eps}")
    return given
