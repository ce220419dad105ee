"""Streams the elements of a JSON array in a file; memory is bounded by the largest element."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from palm_ds.common.errors import UserError

_READ = 1 << 20  # bytes per read


def elements(handle: BinaryIO, path: str, longest: int) -> Iterator[tuple[Any, int]]:
    """Yields (element, its length in characters). A syntax error raises UserError for the whole
    file, since the next element cannot be found."""
    text = _Text(handle, path, longest)
    if text.next_sign() != "[":
        raise text.wrong("no [ at the beginning")
    text.drop(1)
    if text.next_sign() == "]":
        text.drop(1)
    else:
        while True:
            yield text.element()
            sign = text.next_sign()
            text.drop(1)
            if sign == "]":
                break
            if sign != ",":
                raise text.wrong(f"{sign!r}, expected , or ]" if sign else "unexpected end of file")
    if text.next_sign():
        raise text.wrong("extra data after the array")


class _Text:
    """The part of the file in memory, without the consumed beginning."""

    def __init__(self, handle: BinaryIO, path: str, longest: int) -> None:
        self.source, self.letters = handle, codecs.getincrementaldecoder("utf-8-sig")()
        self.path, self.longest = path, longest
        self.buffer, self.at, self.dropped, self.ended = "", 0, 0, False
        self.decode = json.JSONDecoder().raw_decode

    def wrong(self, what: str) -> UserError:
        at = self.dropped + self.at + 1
        return UserError(f"input {self.path}: not a JSON array: {what}, at character {at}")

    def more(self) -> bool:
        """Reads more; False at the end of the file. Doubles the buffer each time, so that a long
        element is not parsed too often."""
        if self.ended:
            return False
        self.buffer, self.dropped, self.at = self.buffer[self.at :], self.dropped + self.at, 0
        if len(self.buffer) > self.longest:
            raise self.wrong(f"element longer than {self.longest} characters")
        try:
            data = self.source.read(max(_READ, len(self.buffer)))
            self.buffer += self.letters.decode(data, final=not data)
        except UnicodeDecodeError:
            raise self.wrong("invalid UTF-8 soon after") from None
        self.ended = not data
        return bool(data)

    def next_sign(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        while True:
            rest = len(self.buffer)
            while self.at < rest and self.buffer[self.at] in " \t\r\n":
                self.at += 1
            if self.at < rest:
                return self.buffer[self.at]
            if not self.more():
                return ""

    def drop(self, characters: int) -> None:
        self.at += characters

    def element(self) -> tuple[Any, int]:
        self.next_sign()
        while True:
            try:
                value, end = self.decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if not self.more():
                    raise self.wrong(error.msg) from None
                continue
            except RecursionError:
                raise self.wrong("nested too deeply") from None
            size, self.at = end - self.at, end
            return value, size
