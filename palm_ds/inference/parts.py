"""An output that is computed in parts: an interrupted run keeps those it has finished.

OUTPUT                              complete or absent
.OUTPUT.parts/lock                  locked by the command that makes the output
             /key.json              what the parts follow from
             /part_000000000000.X   each complete or absent
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from palm_ds.common.atomic import move_into_place, naming
from palm_ds.common.errors import UserError
from palm_ds.common.files import hash_of_text, locked
from palm_ds.common.json_files import write_json
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup

_KEY = "key.json"
_LOCK = "lock"


@dataclass(frozen=True)
class OutputParts:
    """The parts of an output, in a folder next to it."""

    folder: Path
    suffix: str
    """Of each part's file."""

    @classmethod
    @contextmanager
    def opened(
        cls,
        output: Path,
        suffix: str,
        follows_from: object,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> Iterator[OutputParts]:
        """The parts of an output while it is made; all processes call it. At the end they are
        deleted; after an error they stay for the next run, which keeps those that follow from the
        same values, of JSON. Raises UserError if another command is writing the output."""
        parts = cls(output.with_name(f".{output.name}.parts"), suffix)
        with naming(output), ExitStack() as stack:
            problem = ""
            if group.rank == 0:
                try:
                    stack.enter_context(parts._claimed(output, follows_from))
                except UserError as error:
                    problem = str(error)
            if problem := group.gather(problem)[0]:  # no process writes before rank 0 is ready
                raise UserError(problem)
            yield parts

    @contextmanager
    def _claimed(self, output: Path, follows_from: object) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{output}: cannot be written: {error.strerror}") from None
        busy = f"{output}: another command is writing it"
        try:
            with locked(self.folder / _LOCK, busy=busy):
                self._keep_those_of(hash_of_text(json.dumps(follows_from)))
                try:
                    yield
                except UserError:
                    if any(self.folder.glob("part_*")):
                        raise
                    self._delete_all()
                    raise
                self._delete_all()
        finally:
            self._delete_if_empty()

    def _keep_those_of(self, key: str) -> None:
        file = self.folder / _KEY
        if not file.is_file() or json.loads(file.read_text("utf-8")) != {"key": key}:
            self._delete_all()
            write_json(file, {"key": key})

    def _delete_all(self) -> None:
        """But for the lock: on NFS a folder with an open file cannot be deleted."""
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def _delete_if_empty(self) -> None:
        with suppress(OSError):  # another command uses it
            if [path.name for path in self.folder.iterdir()] == [_LOCK]:
                (self.folder / _LOCK).unlink()
                self.folder.rmdir()

    def path(self, number: int) -> Path:
        return self.folder / f"part_{number:012}{self.suffix}"

    def write(self, number: int, write: Callable[[Path], object]) -> None:
        """Have `write` write a part to the path it is called with."""
        part = self.path(number)
        temporary = part.with_name(f"tmp_{part.name}")
        write(temporary)
        move_into_place(temporary, part)

    def join(self, files: Iterable[Path], output: Path) -> None:
        """Write some parts one after another as the output."""
        joined = self.folder / "joined"
        with joined.open("wb") as out:
            for file in files:
                out.write(file.read_bytes())
        move_into_place(joined, output)


def model_files(model: Path) -> list[tuple[str, int, int]]:
    """(path, size, time) of each file of a model, for a key. The output may be in the model's
    folder: hidden files, such as its parts, do not count."""
    if model.is_file():
        files = [model]
    else:
        paths = sorted(model.rglob("[!.]*"))
        files = [x for x in paths if "/." not in f"/{x.relative_to(model)}"]
    return [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in files if x.is_file()]
