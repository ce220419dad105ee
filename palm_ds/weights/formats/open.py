"""Opens a checkpoint of any format: the table of formats, and models in others that are not
supported.

open_checkpoint("any/checkpoint") ──> CheckpointContents
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError, suggest, suggest_path
from palm_ds.common.files import check_right_file
from palm_ds.common.messages import printable
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.deepspeed.read import FORMAT as DEEPSPEED
from palm_ds.weights.formats.format import Format
from palm_ds.weights.formats.huggingface.read import CONFIG
from palm_ds.weights.formats.huggingface.write import FORMAT as HUGGINGFACE
from palm_ds.weights.formats.paddle.write import FORMAT as PADDLE
from palm_ds.weights.formats.tensor_files import read_json
from palm_ds.weights.formats.tensorflow.read import FORMAT as TENSORFLOW
from palm_ds.weights.formats.torch_files import SAVE_WEIGHTS

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


_ADAPTER = "adapter_config.json"
_MAX_FILES = 100
_VARIANT = re.compile(r"(model|pytorch_model)\.(\w+)(?:-\d+-of-\d+)?\.(safetensors|bin)")
_DISTRIBUTED = ".distcp"
_CHECKPOINT = ".ckpt"
_ENDS = {
    ".h5": "Keras weights",
    ".keras": "Keras weights",
    ".msgpack": "Flax weights",
    ".onnx": "an ONNX program",
    ".gguf": "GGUF weights",
    ".ot": "Rust weights",
    ".mlmodel": "a Core ML program",
    ".tflite": "a TensorFlow Lite program",
}


def check_not_other(path: Path) -> None:
    """Raises UserError for a PEFT adapter, a corpus, and a folder with only another library's
    weights. Call it if no format recognizes the path."""
    if path.is_file():
        check_right_file(path)
        _check_ends(path, [path.name])
        return
    if (path / _ADAPTER).is_file():
        base = read_json(path / _ADAPTER).get("base_model_name_or_path")
        of = f" of {printable(base)[:200]}" if isinstance(base, str) and base else ""
        raise UserError(
            f"{path}: a PEFT adapter{of}, not a model; merge it into its model first "
            "(merge_and_unload) and give the merged folder"
        )
    if (path / "manifest.json").is_file() and (path / "dataset_info.json").is_file():
        raise UserError(f"{path}: a corpus, not a model; `palm-ds corpus inspect` shows it")
    if path.is_dir():
        for file in sorted(path.iterdir())[:_MAX_FILES]:
            check_right_file(file)
        names = sorted(file.name for file in path.iterdir())
        parts = [f"onnx/{file.name}" for file in sorted((path / "onnx").glob("*.onnx"))]
        _check_ends(path, [*names, *parts[:1]])


def _check_ends(path: Path, names: Iterable[str]) -> None:
    for name in names:
        shown = printable(name)[:200]
        if variant := _VARIANT.fullmatch(name):
            raise UserError(
                f"{path}: has only the variant {variant[2]} of its weights ({shown}); save the "
                f"model without variant=, or rename a single file to {variant[1]}.{variant[3]}"
            )
        if name.endswith(_DISTRIBUTED):
            raise UserError(
                f"{path}: has shards of torch.distributed.checkpoint ({shown}), which are not "
                "read; convert them: python -m torch.distributed.checkpoint.format_utils "
                "dcp_to_torch FOLDER pytorch_model.bin"
            )
        if name.endswith(_CHECKPOINT):
            raise UserError(f"{path}: has a training checkpoint ({shown}); {SAVE_WEIGHTS}")
        if what := _ENDS.get(Path(name).suffix.lower()):
            raise UserError(
                f"{path}: has {what} ({shown}), a format that is not read; save the "
                "model for PyTorch, as model.safetensors"
            )
