"""Writes models as Hugging Face folders, and pushes them to the hub."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.train.export import FinalWeights, info_of, write_hf, write_onnx, write_weights
from palm_ds.train.train import TrainingRun
from palm_ds.weights import hub
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.onnx.description import DESCRIPTION
from palm_ds.weights.formats.onnx.description import FOLDER as ONNX

log = logging.getLogger(__name__)


def save_pretrained(source: Path, folder: str | Path, *, head: str = "", task: str = "") -> Path:
    """Write a checkpoint as a folder that transformers' Auto classes open, with one head or none.
    `task`: whose task embedding it gets. Files of the same names are replaced. Raises UserError."""
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"{folder}: is a file; give a folder")
    options = ConversionOptions(head=head, task=task, verify=False)
    with tempfile.TemporaryDirectory(prefix="palm_ds_") as temporary:
        written = Path(temporary) / "hf"
        convert(source, written, "huggingface", options)
        copy_model(written, folder)
    return folder


def copy_model(written: Path, folder: Path) -> None:
    """Copy a written model into a folder. Files of the same names are replaced; an onnx/ that is
    there is of other weights, and is removed."""
    if (folder / DESCRIPTION).is_file():
        (folder / DESCRIPTION).unlink()
        shutil.rmtree(folder / ONNX, ignore_errors=True)
    shutil.copytree(written, folder, dirs_exist_ok=True)


def push_saved(
    save: Callable[[Path], object],
    name: str,
    *,
    private: bool,
    token: str | None,
    revision: str,
    first_process: bool = True,
) -> str:
    """Push what `save` writes to the repository `name` of the hub; returns its address. All
    processes call `save`, the first one pushes. Raises UserError or TemporaryError."""
    with tempfile.TemporaryDirectory(prefix="palm_ds_") as folder:
        save(Path(folder))
        if not first_process:
            return hub.address(name, revision)
        return hub.push_folder(folder, name, private=private, token=token, revision=revision)


def save_current(opened: TrainingRun, folder: Path, steps: int, *, huggingface: bool) -> None:
    """Write the weights of a run in training after `steps` steps, with `optimizer.ema` the averaged
    ones, or its folder for Hugging Face. Collective; the first process writes."""
    engine = opened.loop.engine
    with engine.ema_weights():
        state = engine.full_state_dict()
    if engine.rank != 0:
        return
    recipe = opened.run.recipe
    final = FinalWeights.of(state, recipe, steps)
    if not huggingface:
        write_weights(folder, recipe, opened.model, final, opened.data)
        return
    info = info_of(recipe, opened.model, steps=steps)
    write_hf(folder, recipe, info, final.state, opened.data, steps=steps)
    for line in write_onnx(folder, recipe):
        log.info("%s", line)
