"""The one door: a checkpoint of any format, opened.

open_checkpoint("somebodys/weights") ──> Contents
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from palm_ds.common.errors import UserError, suggest
from palm_ds.weights.formats import native as own
from palm_ds.weights.formats.contents import Contents
from palm_ds.weights.formats.deepspeed import read as deepspeed
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.native import INFO, WeightsInfo
from palm_ds.weights.formats.paddle import read as paddle
from palm_ds.weights.formats.tensorflow import read as tensorflow

READERS: tuple[tuple[ModuleType, str], ...] = (
    (deepspeed, "DeepSpeed: latest, or *_model_states.pt"),  # a weights.json may be beside them
    (own, "palm_ds: a run, weights.json, or checkpoints/step_*/manifest.json"),
    (paddle, "Paddle: *.pdparams, params/, or a combined file, with ernie_config.json or another"),
    (huggingface, "Hugging Face: config.json with model.safetensors or pytorch_model.bin"),
    (tensorflow, "TensorFlow: *.ckpt.index with *.ckpt.data-*"),
)
"""The readers in the order in which they are asked, and what each looks for."""


def open_checkpoint(path: str | Path, **options: Any) -> Contents:
    """What a checkpoint holds, whoever wrote it.

    `options` are those of its format's `open_contents` (`eps`, `config`, `tokenizer`, ...); those
    that are None are as if not given. Raises UserError where nothing recognises the path, or an
    option means nothing for its format.
    """
    path = Path(path)
    reader = reader_of(path)
    given = {name: value for name, value in options.items() if value is not None}
    return reader.open_contents(path, **_fitting(reader, given, path))


def read_info(path: str | Path) -> WeightsInfo:
    """Encoder, tasks and origin of a checkpoint; foreign formats know only their encoder."""
    path = Path(path)
    if (path / INFO).is_file():
        return own.read_info(path / INFO)
    contents = open_checkpoint(path)
    return WeightsInfo(
        backbone=contents.config,
        task_ids=contents.task_ids,
        head_of=contents.head_of,
        export_task=contents.export_task,
    )


def reader_of(path: Path) -> ModuleType:
    """The module that reads it. Raises UserError where there is none."""
    if not path.exists() and not path.parent.is_dir():
        raise UserError(f"{path}: no such file or folder")
    for reader, _ in READERS:
        if reader.recognises(path):
            return reader
    if (path / huggingface.CONFIG).is_file():
        return huggingface  # it says what is wrong with the folder
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    wanted = "; ".join(what for _, what in READERS)
    raise UserError(f"{path}: no checkpoint of a kind that is known here; looked for: {wanted}")


def _fitting(reader: ModuleType, given: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    named = inspect.signature(reader.open_contents).parameters.values()
    known = [x.name for x in named if x.kind is x.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            kind = reader.__name__.rpartition(".")[2]
            near = suggest(name, known) if known else "; it has none"
            raise UserError(f"{path}: {kind}: no option {name!r}{near}")
    return given
