"""Compares every file of a corpus, a run, a checkpoint or weights with its stated size and hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.remote_files import is_url
from palm_ds.corpus.corpus_folder import open_folder
from palm_ds.corpus.manifest import NAME, file_problem, read_manifest
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.weights.formats.weights_info import INFO, damaged_files, read_info


@dataclass(frozen=True, kw_only=True)
class VerifiedFolder:
    """A corpus, a checkpoint or weights: the number of its files, and one line for each damaged
    one."""

    folder: Path | str
    files: int = 0
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.problems:
            return "DAMAGED"
        if not self.files:
            return "has no hashes (written by an earlier version)"
        return f"undamaged ({self.files} file{'s' if self.files != 1 else ''})"


def verify_folder(name: str | Path) -> list[VerifiedFolder]:
    """Verifies the weights and checkpoints of a run, one of these, or one corpus, also behind a
    URL. Raises UserError for other folders."""
    if is_url(name):
        return [_remote_corpus(str(name))]
    path = Path(name)
    if not path.exists():
        raise UserError(f"{path}: no such folder{suggest_path(path)}")
    places = (path, path / "weights", path / "best")
    verdicts = [_weights(folder) for folder in places if (folder / INFO).is_file()]
    for folder in (path / "checkpoints", path):
        if steps := checkpoint.steps_in(folder):
            verdicts += [_checkpoint(folder / checkpoint.folder_name(step)) for step in steps]
            break
    if verdicts:
        return verdicts
    if checkpoint.is_published(path):
        return [_checkpoint(path)]
    if (path / NAME).is_file():
        return [_corpus(path)]
    raise UserError(
        f"{path}: neither a corpus nor a run; it has no {NAME}, no {INFO} and no checkpoints/"
    )


def _weights(folder: Path) -> VerifiedFolder:
    try:
        info = read_info(folder / INFO)
    except UserError as error:
        return VerifiedFolder(folder=folder, problems=(str(error),))
    many = len(info.files) + 1 if info.files else 0
    return VerifiedFolder(folder=folder, files=many, problems=tuple(damaged_files(folder, info)))


def _checkpoint(folder: Path) -> VerifiedFolder:
    files, problems = checkpoint.verify(folder)
    return VerifiedFolder(folder=folder, files=files, problems=tuple(problems))


def _remote_corpus(url: str) -> VerifiedFolder:
    """Files behind a URL are compared as they are fetched; the first damaged one ends that."""
    corpus = open_folder(url)
    try:
        corpus.verify()
    except UserError as error:
        return VerifiedFolder(folder=url, problems=(str(error),))
    return VerifiedFolder(folder=url, files=len(corpus.manifest.files))


def _corpus(folder: Path) -> VerifiedFolder:
    try:
        stated = read_manifest(folder).files
    except UserError as error:
        return VerifiedFolder(folder=folder, problems=(str(error),))
    problems = (file_problem(folder / name, entry, hashes=True) for name, entry in stated.items())
    wrong = tuple(f"{name}: {what}" for name, what in zip(stated, problems, strict=True) if what)
    return VerifiedFolder(folder=folder, files=len(stated), problems=wrong)
