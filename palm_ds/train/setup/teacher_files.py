"""Fingerprints of teachers, by which a run knows those that it began with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.file_hash import sha256_of_file
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.train.setup.finished_run import weights_of


def teacher_fingerprints(settings: TeacherSettings | None) -> dict[str, str]:
    """{path as in the recipe: a short hash of the files that a run reads}."""
    if settings is None:
        return {}
    paths = [settings.file] if settings.file else [x.path for x in settings.all_models.values()]
    return {path: _hash_of(Path(path)) for path in paths}


def _hash_of(path: Path) -> str:
    if not path.exists():
        raise UserError(f"teacher: {path}: no such file or folder{suggest_path(path)}")
    if path.is_file():
        return sha256_of_file(path)[:16]
    folder = weights_of(path)
    digest = hashlib.sha256()
    for file in sorted(x for x in folder.rglob("*") if x.is_file()):
        digest.update(f"{file.relative_to(folder)} {sha256_of_file(file)}\n".encode())
    return digest.hexdigest()[:16]
