"""Checkpoints that are complete or absent.

    checkpoints/
      step_00001000/            published: manifest.json has the size and hash of every file, and
                                its own
      step_00002000.partial/    unfinished, or left by a run that crashed; never loaded

All processes write their files into the .partial folder and hash them (writer.py). When
all are done, rank 0 writes the manifest, syncs, and renames the folder, which publishes the
checkpoint. Before loading, sizes and hashes are compared, since no reader notices a flipped bit; an
invalid checkpoint is skipped with a line that names the problem, and the next older one is tried.

The caller decides on the content of the files (runtime/checkpoint/sharded_state.py: weights and
moments by name), which does not depend on the number of processes that wrote them. All processes
call every function here together.

`torch.distributed.checkpoint` and DeepSpeed's universal checkpoints were considered: they store no
hashes, so they would load a damaged file, and they pickle metadata.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from palm_ds.common.atomic import move_into_place, sync
from palm_ds.common.errors import TemporaryError, UserError, first_line
from palm_ds.common.files import sha256_of_file
from palm_ds.common.json_files import seal_problem, write_sealed_json
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup

T = TypeVar("T")
FORMAT = 3
MANIFEST = "manifest.json"
PARTIAL = ".partial"
_OLD_SUFFIX = ".old" + PARTIAL  # being deleted
_UNREADABLE = "cannot be read"
_NAME = re.compile(r"step_(\d{8,})")


class SaveError(UserError):
    """A checkpoint could not be written. Training can continue; older checkpoints are untouched."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of the run that saved it; with the same layout a resumed run is bit-identical."""

    world: int
    stage: int
    precision: str

    def __str__(self) -> str:
        processes = "process" if self.world == 1 else "processes"
        return f"{self.world} {processes}, ZeRO {self.stage}, {self.precision}"


@dataclass
class FileManifest:
    """The files one process wrote, with size and hash, and the first error."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""

    def write(self, path: str | Path, make: Callable[[Path], None]) -> None:
        """Create a file with `make(path)`, sync it to disk and hash it. A failure is recorded, not
        raised: processes must stay in step until all know of it."""
        if self.error:
            return
        path = Path(path)
        try:
            make(path)
            sync(path)
            self.files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of_file(path)}
        except (OSError, SafetensorError) as error:
            self.error = f"{path.name}: {_reason(error)}"


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the published checkpoints, newest first."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(m[1]) for m in map(_NAME.fullmatch, names) if m), reverse=True)


# ---- saving ----


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Checkpoints that stay when one is published."""

    newest: int = 2
    """Number of the newest ones, the published one included."""
    every: int = 0
    """The first one of each such number of steps stays for good; 0: none does."""
    margin: int = 0
    """Without those that are fewer steps older than the published one, the number stays as well."""
    protected: int = -1
    """All up to this step stay, too."""
    best: int = 0
    """Number of those with the highest `values` that stay as well; of equal ones the older."""
    values: Mapping[int, float] = field(default_factory=dict)
    """{step: how good its weights are}, of checkpoints that were evaluated."""

    def superseded(self, steps: Sequence[int]) -> list[int]:
        """Those of the steps, newest first, whose checkpoints do not stay."""
        older = [step for step in steps if step <= steps[0] - self.margin]
        first = {step // self.every: step for step in steps if 0 < self.every <= step}
        best = best_of(steps, self.values)[: self.best]
        kept = {*steps[: max(self.newest, 1)], *older[: self.newest - 1], *first.values(), *best}
        return [step for step in steps if step not in kept and step > self.protected]


def best_of(steps: Sequence[int], values: Mapping[int, float]) -> list[int]:
    """Those of the steps that have a value, the best (highest) first; of equal ones the older."""
    return sorted((step for step in steps if step in values), key=lambda x: (-values[x], x))


TWO_NEWEST = Retention()


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Contents of a checkpoint in addition to its files, and the rule for keeping older ones."""

    folder: Path
    step: int
    layout: Layout
    parameters: Mapping[str, int]
    """Update counts of the parameters on this process."""
    engine: Mapping[str, Any]  # JSON, as the state
    state: Mapping[str, Any]
    keep: Retention
    invalid: Sequence[int] = ()
    """Steps of checkpoints that are deleted after publishing, whatever `keep` says."""

    @property
    def published(self) -> Path:
        return self.folder / folder_name(self.step)

    @property
    def partial(self) -> Path:
        return self.folder / (folder_name(self.step) + PARTIAL)


def begin(request: SaveRequest, group: ProcessGroup) -> None:
    """Make the folder that all processes write to, after removing what crashed runs left."""
    partial = request.partial
    _agree(group, _at_rank0(group, lambda: _make_room(request.folder, partial)), request.published)


def publish(request: SaveRequest, written: FileManifest, group: ProcessGroup) -> Path:
    """Publish what all processes have written; older checkpoints are left to `delete_set_aside`.
    Raises SaveError on all processes if one could not write; nothing remains then."""
    published, partial = request.published, request.partial
    parts = group.gather((written.files, written.error, dict(request.parameters)))
    failed = [f"process {rank}: {error}" for rank, (_, error, _) in enumerate(parts) if error]
    if failed:
        _at_rank0(group, lambda: shutil.rmtree(partial, ignore_errors=True))
        raise _failed(published, failed[0])
    manifest = {
        "format": FORMAT,
        "step": request.step,
        "layout": vars(request.layout),
        "engine": dict(request.engine),
        "state": dict(request.state),
        "parameters": {name: n for _, _, steps in parts for name, n in steps.items()},
        "files": {name: entry for files, _, _ in parts for name, entry in files.items()},
    }
    error = _at_rank0(group, lambda: _publish(partial, published, manifest))
    if error:
        _at_rank0(group, lambda: shutil.rmtree(partial, ignore_errors=True))
    _agree(group, error, published)
    keep, invalid = request.keep, request.invalid
    _at_rank0(group, lambda: prune(request.folder, request.step, keep=keep, invalid=invalid))
    return published


def _make_room(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    for entry in folder.glob("*" + PARTIAL):  # NFS keeps what somebody still reads
        shutil.rmtree(entry, ignore_errors=True)
    partial.mkdir()


def _publish(partial: Path, published: Path, manifest: Mapping[str, Any]) -> None:
    write_sealed_json(partial / MANIFEST, manifest)
    # An existing one of the same step is invalid or identical; `prune` deletes it.
    move_into_place(partial, published, aside=published.with_name(published.name + _OLD_SUFFIX))


def prune(folder: Path, newest: int, *, keep: Retention, invalid: Sequence[int] = ()) -> None:
    """Set aside invalid checkpoints, and those up to step `newest` that are not to be kept."""
    good = [step for step in steps_in(folder) if step <= newest and step not in invalid]
    _set_aside(folder, [*keep.superseded(good), *(s for s in invalid if s != newest)])


def discard(folder: Path, steps: Iterable[int]) -> None:
    """Delete checkpoints."""
    _set_aside(folder, steps)
    delete_set_aside(folder)


def delete_set_aside(folder: Path) -> None:
    """Delete what was set aside; that may take as long as many steps of training."""
    for entry in folder.glob("*" + _OLD_SUFFIX):
        shutil.rmtree(entry, ignore_errors=True)


def _set_aside(folder: Path, steps: Iterable[int]) -> None:
    """Rename checkpoints, so that a half-deleted one is never taken for published."""
    for path in [folder / folder_name(step) for step in steps]:
        if path.exists():
            os.replace(path, path.with_name(path.name + _OLD_SUFFIX))


def _at_rank0(group: ProcessGroup, action: Callable[[], None]) -> str:
    """Run on rank 0 only. Returns the error, or nothing."""
    if group.rank == 0:
        try:
            action()
        except OSError as error:
            return _reason(error)
    return ""


def _from_rank0(group: ProcessGroup, make: Callable[[], T]) -> T:
    """Make a value on rank 0 and return it on every rank."""
    value = group.gather(make() if group.rank == 0 else None)[0]
    assert value is not None
    return value


def _agree(group: ProcessGroup, error: str, published: Path) -> None:
    for rank, one in enumerate(group.gather(error)):
        if one:
            raise _failed(published, f"process {rank}: {one}")


def _failed(published: Path, why: str) -> SaveError:
    try:
        steps = steps_in(published.parent)
    except OSError as error:  # a file server that is away
        return SaveError(f"{published}: cannot be saved: {why}; {_reason(error)}")
    older = [step for step in steps if folder_name(step) != published.name]
    last = f"the last one is {folder_name(older[0])}" if older else "there is no older one"
    return SaveError(f"{published}: cannot be saved: {why}; {last}")


# ---- loading ----


@dataclass(frozen=True, kw_only=True)
class VerifiedCheckpoint:
    """A verified checkpoint. `invalid`: the steps of newer ones that failed verification."""

    path: Path
    step: int
    state: dict[str, Any]
    engine: dict[str, Any]
    parameters: dict[str, int]
    """Update count of each parameter."""
    layout: Layout
    files: tuple[Path, ...]
    hashes: Mapping[str, str]
    """{name: SHA-256} of its files."""
    invalid: tuple[int, ...] = ()


def latest_good(
    folder: Path,
    *,
    group: ProcessGroup,
    warn: Callable[[str], None],
    at_most: int | None = None,
    valid: int | None = None,
) -> VerifiedCheckpoint | None:
    """The newest good checkpoint; None if there are no checkpoints.

    Invalid ones are skipped and reported through `warn` (on rank 0). Raises UserError if there are
    checkpoints but no good one, TemporaryError if one of them could not be read. `at_most`: those
    of later steps are ignored, and None is returned if there are no others; those later than
    `valid` (default: `at_most`) count as invalid.
    """
    if group.rank == 0:
        for entry in sorted(folder.glob("*" + PARTIAL)):
            what = "deletion" if entry.name.endswith(_OLD_SUFFIX) else "save"
            warn(f"{entry}: unfinished {what}; not used")
    # Rank 0 decides for all: file systems may show other ranks a different state.
    steps = _from_rank0(group, lambda: steps_in(folder))
    last = steps[0] if at_most is None and steps else at_most or 0
    invalid = [step for step in steps if step > max(last, valid or 0)]
    steps = [step for step in steps if step <= last]
    reasons: list[str] = []
    for step in steps:
        path = folder / folder_name(step)
        manifest, problem = _from_rank0(group, partial(_manifest, path))
        if not problem:
            problem = _verify(path, manifest["files"], group)
        if not problem:
            return _found(path, manifest, tuple(invalid))
        invalid.append(step)
        reasons.append(f"{path.name}: {problem}")
        if group.rank == 0:
            warn(f"{path}: not used: {problem}")
    if reasons:
        text = f"{folder}: no good checkpoint among {len(reasons)} ({'; '.join(reasons)}); "
        if any(_UNREADABLE in reason for reason in reasons):  # a file server that is away
            raise TemporaryError(f"{text}the same command tries again")
        raise UserError(f"{text}restore one, or choose another run folder to start again")
    return None


def open_published(path: Path, *, hashes: bool = True) -> VerifiedCheckpoint:
    """Opens one checkpoint after verifying it; without `hashes` its manifest alone, to read nothing
    but that. Raises UserError if it is invalid."""
    manifest, problem = _manifest(path)
    if hashes:
        problem = problem or _verify(path, manifest["files"], SINGLE_PROCESS)
    if problem:
        raise UserError(f"{path}: {problem}")
    return _found(path, manifest, ())


def is_published(path: Path) -> bool:
    """Whether a folder is one checkpoint, as far as its name tells."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def verify(path: Path) -> tuple[int, list[str]]:
    """The number of files of a checkpoint, and a line for each damaged one."""
    manifest, problem = _manifest(path)
    if problem:
        return 0, [problem]
    problems = (check_file(path / name, entry) for name, entry in sorted(manifest["files"].items()))
    return len(manifest["files"]), [problem for problem in problems if problem]


def _found(path: Path, manifest: Mapping[str, Any], invalid: tuple[int, ...]) -> VerifiedCheckpoint:
    return VerifiedCheckpoint(
        path=path,
        step=manifest["step"],
        state=manifest["state"],
        engine=manifest["engine"],
        parameters=manifest["parameters"],
        layout=Layout(**manifest["layout"]),
        files=tuple(path / name for name in sorted(manifest["files"])),
        hashes={name: entry["sha256"] for name, entry in manifest["files"].items()},
        invalid=invalid,
    )


def _manifest(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = (path / MANIFEST).read_bytes().decode("utf-8")
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return {}, (
                f"{MANIFEST} has format {manifest['format']!r}, this version reads {FORMAT}"
            )
        if problem := seal_problem(text, manifest):
            return {}, f"{MANIFEST} {problem}"
        _check_contents(manifest)
    except FileNotFoundError:
        return {}, f"{MANIFEST} is missing"
    except OSError as error:
        return {}, f"{MANIFEST} {_UNREADABLE}: {_reason(error)}"
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return {}, f"{MANIFEST} is damaged"
    return manifest, ""


def _check_contents(manifest: Mapping[str, Any]) -> None:
    for name, entry in manifest["files"].items():
        assert entry["size"] >= 0 and len(entry["sha256"]) == 64 and "/" not in name
    assert all(isinstance(n, int) for n in manifest["parameters"].values())
    assert isinstance(manifest["state"], dict) and isinstance(manifest["engine"], dict)
    Layout(**manifest["layout"])


def _verify(path: Path, files: Mapping[str, Mapping[str, Any]], group: ProcessGroup) -> str:
    """The first problem with the files, or nothing. Processes share the work."""
    mine = sorted(files)[group.rank :: group.world]
    problems = [check_file(path / name, files[name]) for name in mine]
    all_problems = [problem for part in group.gather(problems) for problem in part if problem]
    return all_problems[0] if all_problems else ""


def check_file(path: Path, entry: Mapping[str, Any]) -> str:
    """The difference of a file from its size and hash in the manifest, or nothing."""
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{path.name} has {size} bytes instead of {entry['size']}"
        digest = sha256_of_file(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} {_UNREADABLE}: {_reason(error)}"
    if digest != entry["sha256"]:
        return f"{path.name} has changed since it was written (checksum mismatch)"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
