"""The other models that a run reads, its teachers and `init_from`: by their fingerprints a run
knows those that it began with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.files import sha256_of_file
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.model_folder import open_model


def open_teachers(
    settings: TeacherSettings | None,
) -> tuple[Mapping[str, CheckpointContents], Mapping[str, str]]:
    """({name: opened teacher model}, {path as in the recipe: a short hash of the files that a run
    reads}). Raises UserError."""
    if settings is None:
        return {}, {}
    try:
        if settings.file:
            return {}, {settings.file: sha256_of_file(_existing(settings.file))[:16]}
        paths = {name: each.path for name, each in settings.all_models.items()}
        opened = {path: open_model(_existing(path)) for path in dict.fromkeys(paths.values())}
    except UserError as error:
        raise UserError(f"teacher: {error}") from None
    prints = {path: fingerprint_of(contents) for path, contents in opened.items()}
    return {name: opened[path] for name, path in paths.items()}, prints


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


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise UserError(f"{path}: no such file or folder{suggest_path(Path(path))}")
    return Path(path)
