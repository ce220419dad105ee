"""The weights that a path stands for: one rule for all that ask.

    RUN                 its weights/, else best/, else its newest good checkpoint
    RUN/checkpoints     the newest good one
    anything else       itself: weights/, best/, step_N, a Hugging Face folder, any other format

`open_model(path)` opens them, `encoder_config(path)` reads the encoder's config alone. Opening a
checkpoint hashes its files, so what is opened is passed on instead of opened again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palm_ds.common.config import read_yaml
from palm_ds.common.errors import UserError
from palm_ds.common.files import sha256_of_file
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.weights.formats import native, weights_info
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.open import FORMATS, check_options, open_checkpoint
from palm_ds.weights.formats.weights_info import INFO

_RECIPE, _METRICS, _CHECKPOINTS = "recipe.yaml", "metrics.jsonl", "checkpoints"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The weights that a path stands for."""

    path: Path
    """A folder or file that a format recognizes."""
    checkpoint: checkpoint.VerifiedCheckpoint | None = None
    """The verified checkpoint, if it was chosen among those of a run."""
    notes: tuple[str, ...] = ()
    """Which weights of a run were taken, unless they are its final ones; checkpoints not used."""

    @classmethod
    def find(cls, path: str | Path) -> ModelFolder:
        """The weights for a path. Raises UserError if a run has none yet, or no good ones; that a
        path does not exist is found when it is opened."""
        path = Path(path)
        if not os.path.exists(path):  # unlike Path.exists, also of a name that is too long
            return cls(path=path)
        place = _place(path)
        if not checkpoint.steps_in(place):
            return cls(path=place, notes=_note(path, place))
        said: list[str] = []
        newest = checkpoint.latest_good(place, group=SINGLE_PROCESS, warn=said.append)
        assert newest is not None, "there was a checkpoint a moment ago"
        # Leftovers of an interrupted save do not matter here; a bad checkpoint does.
        bad = [line for line in said if checkpoint.PARTIAL not in line]
        return cls(path=newest.path, checkpoint=newest, notes=(*_note(path, newest.path), *bad))

    def open(self, **options: Any) -> CheckpointContents:
        """Open the weights; `options` as of `open_checkpoint`. Raises UserError."""
        if self.checkpoint is None:
            contents = open_checkpoint(self.path, **options)
        else:
            given = check_options(native.FORMAT, options, self.path)
            contents = native.open_verified(self.checkpoint, **given)
        return replace(contents, folder_notes=self.notes)


def open_model(path: str | Path, **options: Any) -> CheckpointContents:
    """Open the weights that a path stands for. Raises UserError."""
    return ModelFolder.find(path).open(**options)


def fingerprint_of(contents: CheckpointContents) -> str:
    """A short hash of the files of a model. Those whose hashes it states are compared with these
    when they are read, so they are not hashed here."""
    path = contents.path
    if path.is_file():
        return sha256_of_file(path)[:16]
    digest = hashlib.sha256()
    for file in sorted(x for x in path.rglob("*") if x.is_file()):
        name = file.relative_to(path).as_posix()
        digest.update(f"{name} {contents.hashes.get(name) or sha256_of_file(file)}\n".encode())
    return digest.hexdigest()[:16]


def encoder_config(path: str | Path) -> EncoderConfig:
    """The config of the encoder that a path stands for. All weights of a run share it, so no
    tensor is read or hashed. Raises UserError."""
    if not os.path.exists(path):
        return open_checkpoint(path).config
    place = _place(Path(path))
    if (place / INFO).is_file():
        return weights_info.read_info(place / INFO).backbone
    if native.is_checkpoint(place):
        return native.encoder_in(checkpoint.open_published(place, hashes=False))
    if steps := checkpoint.steps_in(place):
        return native.encoder_in(_newest_manifest(place, steps))
    return open_checkpoint(place).config


def _newest_manifest(folder: Path, steps: Sequence[int]) -> checkpoint.VerifiedCheckpoint:
    """The newest checkpoint with a sound manifest; its files are not verified."""
    errors: list[UserError] = []
    for step in steps:
        try:
            return checkpoint.open_published(folder / checkpoint.folder_name(step), hashes=False)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _place(path: Path) -> Path:
    """The path itself, or the part of a run folder to look in. Raises UserError for a run that has
    nothing yet."""
    if (path / INFO).is_file():
        return path
    is_run = any((path / name).is_file() for name in (_RECIPE, _METRICS))
    for folder in (path / "weights", path / "best"):
        if (folder / INFO).is_file() or (is_run and folder.is_dir()):  # opening a damaged one fails
            return folder
    if checkpoint.steps_in(path / _CHECKPOINTS):
        return path / _CHECKPOINTS
    if is_run and not any(form.recognizes(path) for form in FORMATS):
        raise UserError(
            f"{path}: this run is not finished ({_progress(path)}) and has no model yet: no "
            "weights/, no best/ and no checkpoint in checkpoints/; the command that started it "
            "resumes it"
        )
    return path


def _note(asked: Path, taken: Path) -> tuple[str, ...]:
    """A line about weights of a run that are not its final ones."""
    if taken in (asked, asked / "weights"):
        return ()
    which = "its best weights so far" if taken.name == "best" else "its newest good checkpoint"
    why = "" if taken.parent == asked and taken.name != "best" else "has no weights/ yet; "
    return (f"{asked}: {why}using {taken.relative_to(asked)}, {which}",)


def _progress(run: Path) -> str:
    """`3 of 1,680 steps done`, as far as the files of a run tell."""
    steps = [step for line in _lines(run / _METRICS) if (step := _step_of(line))]
    if not steps:
        return "no step logged"
    try:
        recipe = read_yaml(run / _RECIPE)
        counts = [
            steps
            for stage in recipe["stages"]
            for group, steps in stage.items()
            if group.partition("+")[0].strip() in recipe["tasks"]
        ]
        return f"{steps[-1]:,} of {sum(counts):,} steps done"
    except (UserError, TypeError, AttributeError, KeyError):
        return f"{steps[-1]:,} steps done"


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.is_file() else []


def _step_of(line: bytes) -> int:
    """The step of a line of metrics.jsonl; 0 for other lines and broken ones."""
    try:
        record = json.loads(line)
        return int(record["step"]) if record["kind"] == "step" else 0
    except (ValueError, KeyError, TypeError):
        return 0
