"""The elements of a JSON array in a file, one at a time: memory is bounded by one of them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from palm_ds.common.errors import UserError

_READ = 1 << 20  # bytes at once


def elements(handle: BinaryIO, path: str, longest: int) -> Iterator[tuple[Any, int]]:
    """(element, characters it took) of the array; a file that is no array from end to end is a
    mistake as a whole, since nobody could say where the next element begins."""
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
                raise text.wrong(f"{sign!r} where , or ] is due" if sign else "it ends too early")
    if text.next_sign():
        raise text.wrong("something follows the array")


class _Text:
    """The part of the file that is in memory, without what has been dropped from its beginning."""

    def __init__(self, handle: BinaryIO, path: str, longest: int) -> None:
        self.source, self.letters = handle, codecs.getincrementaldecoder("utf-8-sig")()
        self.path, self.longest = path, longest
        self.held, self.at, self.dropped, self.ended = "", 0, 0, False
        self.decode = json.JSONDecoder().raw_decode

    def wrong(self, what: str) -> UserError:
        at = self.dropped + self.at + 1
        return UserError(f"input {self.path}: not a JSON array: {what}, at character {at}")

    def more(self) -> bool:
        """Reads on; False at the end of the file. More each time, so that a long element is not
        tried too often."""
        if self.ended:
            return False
        self.held, self.dropped, self.at = self.held[self.at :], self.dropped + self.at, 0
        if len(self.held) > self.longest:
            raise self.wrong(f"an element longer than {self.longest} characters")
        try:
            data = self.source.read(max(_READ, len(self.held)))
            self.held += self.letters.decode(data, final=not data)
        except UnicodeDecodeError:
            raise self.wrong("invalid UTF-8 after this") from None
        self.ended = not data
        return bool(data)

    def next_sign(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        while True:
            rest = len(self.held)
            while self.at < rest and self.held[self.at] in " \t\r\n":
                self.at += 1
            if self.at < rest:
                return self.held[self.at]
            if not self.more():
                return ""

    def drop(self, characters: int) -> None:
        self.at += characters

    def element(self) -> tuple[Any, int]:
        self.next_sign()
        while True:
            try:
                value, end = self.decode(self.held, self.at)
            except json.JSONDecodeError as error:
                if not self.more():
                    raise self.wrong(error.msg) from None
                continue
            except RecursionError:
                raise self.wrong("nested too deep") from None
            size, self.at = end - self.at, end
            return value, size
