"""Lines of files, and the text or JSON object in each.

for number, offset, line, size in Lines(handle, 0, -1):
    json_row(line)          # or BadRecordError with the reason
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TypeAlias

_UTF16 = "maybe UTF-16: iconv -f UTF-16 -t UTF-8 converts it"
_EXPORT = "export the sheet as CSV in UTF-8"
_UNPACK = "unpack the file, or compress it with gzip or zstd"
_NOT_TEXT = {
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"\x1f\x8b": "compressed by gzip: the name of the file must end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: the name of the file must end in .zst",
    b"BZh": f"compressed by bzip2: {_UNPACK}",
    b"\xfd7zXZ\0": f"compressed by xz: {_UNPACK}",
    b"PK\x03\x04": f"a zip file, as spreadsheets are: unpack it, or {_EXPORT}",
    b"\xd0\xcf\x11\xe0": f"maybe an Excel file: {_EXPORT}",
    b"PAR1": "a parquet file",
}
"""What a file is, by its first bytes."""
LONGEST = 64 << 20  # bytes of one document; bounds memory
NumberedLines: TypeAlias = Iterable[tuple[int, int, bytes, int]]
"""(number, offset, line without line end, bytes with line end)"""


class BadRecordError(Exception):
    """The reason why a line, row or record cannot be read."""


class Lines:
    """Iterates over the lines of a span; `count` is the number of lines so far."""

    def __init__(self, handle: BinaryIO, start: int, end: int) -> None:
        self.handle, self.at, self.end = handle, start, end
        self.count = 0
        if start:
            handle.seek(start)

    def __iter__(self) -> Iterator[tuple[int, int, bytes, int]]:
        """Yields (number, offset, line without line end, bytes with line end). Lines over LONGEST
        bytes are truncated."""
        while (self.end < 0 or self.at < self.end) and (line := self.handle.readline(LONGEST + 1)):
            size = len(line)
            while size > LONGEST and not line.endswith(b"\n"):
                rest = self.handle.readline(LONGEST)
                size += len(rest)
                if not rest or rest.endswith(b"\n"):
                    break
            self.count += 1
            start, self.at = self.at, self.at + size
            if start == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield self.count, start, line.removesuffix(b"\n").removesuffix(b"\r"), size


def decoded(data: bytes) -> str:
    """Decodes a line or a document."""
    if len(data) > LONGEST:
        raise BadRecordError(f"longer than {LONGEST} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)
        where = f"; line {line + 1} of the document" if line else ""
        raise BadRecordError(f"{not_utf8(error)}{where}") from None


def not_utf8(error: UnicodeDecodeError, of: str = "") -> str:
    """The place where something is not UTF-8, and what it is if its first bytes say so."""
    data = error.object
    hint = next((hint for start, hint in _NOT_TEXT.items() if data.startswith(start)), "")
    hint = hint or _other_encoding(data)
    return f"invalid UTF-8 at byte {error.start + 1}{of}{hint and f' ({hint})'}"


def _other_encoding(data: bytes) -> str:
    """What spreadsheets write where they do not write UTF-8; empty if most of it is UTF-8."""
    above, right = (_above_ascii(x) for x in (data, data.decode("utf-8", "ignore").encode()))
    if 2 * right > above:
        return ""
    chinese = sum(map(len, re.findall(rb"(?:[\xa1-\xfe]{2}){2,}", data)))  # in words of two or more
    name = "GB18030" if 2 * chinese > above else "WINDOWS-1252"
    return f"maybe {name}: iconv -f {name} -t UTF-8 converts it"


def _above_ascii(data: bytes) -> int:
    return sum(byte > 127 for byte in data)


def json_row(line: bytes, *, unique: bool = False) -> dict:
    """Parses the JSON object in a line. `unique`: a key must not be given twice."""
    if len(line) > LONGEST:
        raise BadRecordError(f"longer than {LONGEST} bytes")
    if not line.strip():
        raise BadRecordError("empty line")
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except UnicodeDecodeError as error:
        raise BadRecordError(not_utf8(error, " of the line")) from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not JSON: {error.msg} at character {error.colno}") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadRecordError(f"not JSON: {error}") from None
    except RecursionError:
        raise BadRecordError("not JSON: nested too deeply") from None
    return json_object(row)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRecordError(f"the key `{twice}` is given twice")
    return values


def json_object(row: object) -> dict:
    """A JSON value as an object. Raises BadRecordError for any other."""
    if not isinstance(row, dict):
        raise BadRecordError(f"a JSON {type_name(row)}, expected an object")
    return row


def check_text(text: object, what: str, empty: str = "empty text") -> str:
    """Returns the text; raises BadRecordError if it is not text, empty, or not encodable."""
    if not isinstance(text, str):
        raise BadRecordError(f"{what} is {type_name(text)}, not text")
    if not text.strip():
        raise BadRecordError(empty)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = f"lone surrogate at character {error.start + 1}"
            raise BadRecordError(f"{what}: {where}") from None
    return text


def type_name(value: object) -> str:
    """The type of a value, for messages."""
    return "null" if value is None else type(value).__name__
