"""An output that is computed in parts: an interrupted run keeps those it has finished.

OUTPUT                              complete or absent
.OUTPUT.parts/key.json              what the parts follow from
             /part_000000000000.X   each complete or absent
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palm_ds.common.atomic import move_into_place
from palm_ds.common.files import hash_of_text
from palm_ds.common.json_files import write_json

_KEY = "key.json"


@dataclass(frozen=True)
class OutputParts:
    """The parts of an output, in a folder next to it."""

    folder: Path
    suffix: str
    """Of each part's file."""

    @classmethod
    def of(cls, output: Path, suffix: str) -> OutputParts:
        return cls(output.with_name(f".{output.name}.parts"), suffix)

    def prepare(self, follows_from: object) -> None:
        """Keep the parts of an interrupted run that follow from the same values, of JSON, and
        delete any others."""
        key, file = hash_of_text(json.dumps(follows_from)), self.folder / _KEY
        if not file.is_file() or json.loads(file.read_text("utf-8")) != {"key": key}:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            write_json(file, {"key": key})

    def path(self, number: int) -> Path:
        return self.folder / f"part_{number:012}{self.suffix}"

    def write(self, number: int, write: Callable[[Path], object]) -> None:
        """Have `write` write a part to the path it is called with."""
        part = self.path(number)
        temporary = part.with_name(f"tmp_{part.name}")
        write(temporary)
        move_into_place(temporary, part)

    def delete(self) -> None:
        shutil.rmtree(self.folder)

    def delete_if_none(self) -> None:
        """Delete the folder if no part was written."""
        if not any(self.folder.glob("part_*")):
            shutil.rmtree(self.folder, ignore_errors=True)


def model_files(model: Path) -> list[tuple[str, int, int]]:
    """(path, size, time) of each file of a model, for a key. The output may be in the model's
    folder: hidden files, such as its parts, do not count."""
    paths = [model] if model.is_file() else sorted(model.rglob("[!.]*"))
    files = [x for x in paths if x.is_file() and "/." not in f"/{x.relative_to(model)}"]
    return [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in files]
