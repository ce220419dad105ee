"""Identifies models in formats that are not supported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_right_file
from palm_ds.common.messages import printable
from palm_ds.weights.formats.tensor_files import read_json
from palm_ds.weights.formats.torch_files import SAVE_WEIGHTS

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
