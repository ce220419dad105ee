"""Regions of images, as detectors leave them: boxes in pixels, and a vector of features of each.

    4 or 5 cells     width, height, boxes, features (, classes)          columns of a table
    an object        {width, height, boxes, features, classes}           JSON, columns of `datasets`
    NAME.npz         the same arrays, or bottom-up attention's names     beside the table
    a name           name, width, height, number, boxes, features (, classes)
                     a line of the files of `images`, as ERNIE-ViL and UNIMO read them

Arrays are nested lists, or base64 of little-endian float32 in rows. `classes` is the detector's
distribution over its classes for each box.
"""

from __future__ import annotations

import base64
import binascii
import glob
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.common.rows.lines import BadRecordError

_KEPT = 256
"""Images of files that stay in memory."""
_KEYS = {
    "width": ("width", "image_w", "image_width"),
    "height": ("height", "image_h", "image_height"),
    "boxes": ("boxes", "bbox"),
    "features": ("features", "x"),
    "classes": ("classes", "probs", "cls_prob"),
}
"""{value: its names}, the last ones those of bottom-up attention's files."""
_CELLS = (6, 7)
_PICKLES = (".mdb", ".lmdb", ".pkl", ".pickle")
_LINES = (
    "lines of name, width, height, number of boxes, boxes, features, and maybe classes, separated "
    "by tabs"
)
_UNIMO_FIELDS = 14
_BROKEN = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    MemoryError,  # for the size that a damaged header states
    RuntimeError,  # of zipfile: a damaged flag says that the file is encrypted
    TokenError,  # of an array's header
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class ImageRegions:
    """The regions of an image."""

    features: np.ndarray
    """(regions, features) float32"""
    locations: np.ndarray
    """(regions, 5) float32: x1, y1, x2, y2 and the area, as shares of the image's"""
    classes: np.ndarray | None = None
    """(regions, classes) float32: the detector's distribution over its classes"""
    size: tuple[float, float] = (1.0, 1.0)
    """Width and height of the image in pixels"""

    def __len__(self) -> int:
        return len(self.features)


def regions_of(
    width: object, height: object, boxes: object, features: object, classes: object = None
) -> ImageRegions:
    """Regions from the values of a row. Raises BadRecordError."""
    size = np.array([_size(width, "width"), _size(height, "height")], np.float32)
    corners = _array(boxes, "boxes").reshape(-1)
    if not len(corners) or len(corners) % 4:
        raise BadRecordError(f"boxes: {len(corners)} numbers; each box has 4, x1 y1 x2 y2")
    corners = corners.reshape(-1, 4) / np.concatenate([size, size])
    sides = corners[:, 2:] - corners[:, :2]
    if (sides < 0).any():
        number = int((sides < 0).any(1).argmax())
        raise BadRecordError(f"boxes: box {number + 1} ends before it begins; give x1 y1 x2 y2")
    return ImageRegions(
        features=_rows(features, "features", len(corners)),
        locations=np.concatenate([corners, sides.prod(1, keepdims=True)], 1),
        classes=None if classes is None else _distribution(classes, len(corners)),
        size=(float(size[0]), float(size[1])),
    )


def parse_image(value: object) -> ImageRegions | str | None:
    """The regions of a cell; the name of a file or an image as it is. Raises BadRecordError."""
    if isinstance(value, Mapping):
        return regions_of(**_named(value))
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) in (4, 5):
        return regions_of(*value)
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value).strip()
    if value is None:
        return None
    raise BadRecordError(
        "image: expected {width, height, boxes, features}, these as 4 columns, or 5 with classes, "
        "a .npz file or a name"
    )


def _named(values: Mapping[str, Any], keys: Sequence[str] = tuple(_KEYS)) -> dict[str, Any]:
    """The values of `keys` by our names. Raises BadRecordError for a missing one."""
    found = {
        key: next((values[name] for name in _KEYS[key] if name in values), None) for key in keys
    }
    for key, value in found.items():
        if value is None and key != "classes":
            has = ", ".join(map(str, values)) or "nothing"
            raise BadRecordError(f"image: no {' or '.join(_KEYS[key])}; it has {has}")
    return found


def _size(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number < np.inf:
        raise BadRecordError(f"image: {name}: {str(value)[:40]!r} is not a number of pixels")
    return number


def _array(value: object, name: str) -> np.ndarray:
    """float32 numbers of nested lists, an array, or base64."""
    try:
        if isinstance(value, str | bytes):
            array = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
        else:
            if isinstance(value, np.ndarray) and value.dtype.kind == "c":  # numpy would only warn
                raise TypeError
            with np.errstate(over="ignore"):  # infinite numbers are refused below
                array = np.asarray(value, np.float32)
    except (ValueError, TypeError, OverflowError, binascii.Error):
        raise BadRecordError(
            f"image: {name}: neither lists of numbers nor base64 of float32"
        ) from None
    if not np.isfinite(array).all():
        raise BadRecordError(f"image: {name}: has a NaN or an infinite number")
    return array


def _rows(value: object, name: str, regions: int) -> np.ndarray:
    """(regions, any)"""
    array = _array(value, name).reshape(-1)
    if not len(array) or len(array) % regions:
        raise BadRecordError(
            f"image: {name}: {len(array)} numbers, not a multiple of the {regions} boxes"
        )
    return array.reshape(regions, -1)


def _distribution(value: object, regions: int) -> np.ndarray:
    """Rows that add up to 1, which those of a detector that leaves the background out do not."""
    array = _rows(value, "classes", regions)
    total = array.sum(1, keepdims=True)
    if (array < 0).any() or (total <= 0).any():
        raise BadRecordError("image: classes: not a distribution: a number below 0, or all are 0")
    return array / total


# ---- files ----


class _ImageLine(NamedTuple):
    """An image in a file."""

    path: str
    start: int
    """The first byte of its line."""
    regions: int


@dataclass(frozen=True)
class RegionFiles:
    """Images that a table names: lines of files, or .npz files."""

    paths: tuple[str, ...] = ()

    def name_in(self, folder: Path, name: str) -> str:
        """What tells an image from others: its name in the files, or the path of an .npz file,
        which may be given relative to `folder`."""
        return str(folder / name) if name.endswith(".npz") and name not in self._index else name

    def regions(self, name: str) -> ImageRegions:
        """The regions of an image. Raises BadRecordError."""
        return self._kept.get(name, lambda: self._read(name))

    def count(self, name: str) -> int:
        """The number of regions of an image, without reading their features."""
        if name in self._index:
            return self._index[name].regions
        if name.endswith(".npz"):
            return _array(_stored(Path(name), ("boxes",))["boxes"], "boxes").size // 4
        return len(self.regions(name))

    def _read(self, name: str) -> ImageRegions:
        if line := self._index.get(name):
            return _of_line(line, name)
        if name.endswith(".npz"):
            return _npz(Path(name))
        if not self.paths:
            raise BadRecordError(f"image: no {name[:80]!r}: give the files with images as `images`")
        near = suggest(name, list(self._index)[:1000])
        raise BadRecordError(f"image: no {name[:80]!r} in {', '.join(self.paths)}{near}")

    @cached_property
    def _kept(self) -> RecentlyUsed[str, ImageRegions]:
        return RecentlyUsed(_KEPT)

    @cached_property
    def _index(self) -> dict[str, _ImageLine]:
        """By the name of the image. Raises UserError."""
        found: dict[str, _ImageLine] = {}
        for path in self._files():
            for number, start, line in _lines(path):
                name, count = _head(line, f"{path}:{number}")
                if name in found:
                    raise UserError(f"{path}:{number}: another image is called {name!r}")
                found[name] = _ImageLine(path, start, count)
        return found

    def _files(self) -> list[str]:
        files = []
        for pattern in self.paths:
            found = sorted(glob.glob(pattern)) or [pattern]
            for path in found:
                _check_file(Path(path), pattern)
            files += found
        return files


def _check_file(path: Path, pattern: str) -> None:
    """Raises UserError for anything but a file of lines."""
    if path.suffix in _PICKLES or (path / "data.mdb").is_file():
        raise UserError(
            f"images: {path}: its values are pickles, which can run any code when they are read, "
            f"so it is not opened; write {_LINES} instead (docs/images.md)"
        )
    if path.is_dir():
        raise UserError(f"images: {pattern}: a folder; name its files, such as {path}/*.tsv")
    if not path.is_file():
        raise UserError(f"images: {pattern}: no such file")


def unimo_line(line: str) -> str:
    """Says that a line, or the name of a column, is one of UNIMO's rows of token ids, which have an
    image in the same line; empty if it is not."""
    if line.count(";") != _UNIMO_FIELDS - 1:
        return ""
    return (
        "a line of UNIMO's, `image_id;data_id;label;token_ids;...`, whose ids only its own "
        "vocabulary explains; write a table of the texts with the names of their images, and the "
        "images in files of their own (docs/images.md)"
    )


def _lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    """(number, first byte, line) of each line that is not empty."""
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, start, line
            start += len(line)


def _of_line(line: _ImageLine, name: str) -> ImageRegions:
    """Raises BadRecordError."""
    with open(line.path, "rb") as file:
        file.seek(line.start)
        cells = _cells(file.readline())
    if cells[0].strip() != name or len(cells) not in _CELLS:
        raise BadRecordError(f"image: {line.path} has changed since its names were read")
    found = regions_of(*cells[1:3], *cells[4:])
    if len(found) != line.regions:
        raise BadRecordError(
            f"image: {name[:80]!r} in {line.path}: {line.regions} is its number of boxes, but "
            f"{len(found)} follow"
        )
    return found


def _cells(line: bytes) -> list[str]:
    return line.decode("utf-8", "replace").rstrip("\r\n").split("\t")


def _head(line: bytes, place: str) -> tuple[str, int]:
    """The name of a line's image, and how many regions it has."""
    cells = line.count(b"\t") + 1
    if cells not in _CELLS:
        found = unimo_line(line.decode("utf-8", "replace")) or f"{cells} cells"
        raise UserError(f"{place}: {found}; expected {_LINES}")
    name, _, _, number, *_ = line.split(b"\t", 4)
    if not number.strip().isdigit() or not int(number):
        raise UserError(
            f"{place}: {number[:40].decode('utf-8', 'replace')!r} is not a number of boxes"
        )
    return name.decode("utf-8", "replace").strip(), int(number)


def _npz(path: Path) -> ImageRegions:
    """Raises BadRecordError."""
    return regions_of(**_stored(path, tuple(_KEYS)))


def _stored(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Some values of an archive, others are None; pickled arrays are never opened. Raises
    BadRecordError."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise BadRecordError(f"image: {path}: not a .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                names = {name for key in keys for name in _KEYS[key]} & set(stored.files)
                values = {name: stored[name] for name in names}
    except _BROKEN as error:
        raise BadRecordError(f"image: {path}: cannot be read: {error}") from None
    return _named(values, keys)
