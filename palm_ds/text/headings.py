"""Finds headings by layout alone: short lines between paragraphs.

Blocks are separated by empty lines; in a text without empty lines every line is a block. A block
is a heading if it is a single line of at most 12 words (25 Chinese characters), begins with a
letter, a number or Markdown's #, does not end like a sentence or the introduction of a list, is
followed by prose, and is preceded by the end of a sentence, another heading, or nothing. Lines of
a list, a poem or a list of names do not qualify: precision matters more than recall.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import regex

from palm_ds.text.sentence_splitter import is_wrapped
from palm_ds.text.tokenizer import CHINESE

MOST_WORDS = 12
MOST_CHINESE = 25  # characters
MOST_CHARACTERS = 100
PROSE = 60  # least columns of the prose after a heading; a Chinese character takes two

_BLOCKS = re.compile(r"\S(?:[^\n]|\n(?![^\S\n]*\n))*")
_LINES = re.compile(r"\S[^\n]*")
_BLANK = re.compile(r"\n[^\S\n]*\n")
_HAN = re.compile(f"[{CHINESE}]")
_BEGINS = re.compile(r"(?:#{1,6} |§+ ?|[(（《【])?[^\W_]")
_ENDED = regex.compile(r"[\p{Sentence_Terminal}…⋯][\"'”’)\]}»›」』】）》〉]*$")
_LAST = regex.compile(r"[\w)\]>）》】」』]$")
_INNER = re.compile(r"\w{3}[.!?][\"'”’´)]*\s|[;$=\\@]|https?:|www\.")  # sentence end, code, URL
_CHINESE_INNER = re.compile("[，；：。！？$=@]")


def find_headings(text: str, start: int = 0) -> list[tuple[int, int]]:
    """(start, end) characters of each heading in text[start:], left to right."""
    blocks = list(_blocks(text, start))
    headings: list[tuple[int, int]] = []
    before_run = True  # whether the text before the block (or before its headings) is finished
    for i, (first, last) in enumerate(blocks[:-1]):
        block = text[first:last]
        follows = text[slice(*blocks[i + 1])]
        if before_run and _may_be(block):
            if _is_prose(follows):
                headings.append((first, last))
            elif _may_be(follows) and _is_prose(text[slice(*(blocks[i + 2 :] or [(0, 0)])[0])]):
                headings += [(first, last), blocks[i + 1]]  # a second heading with prose under it
            before_run = False
        else:
            before_run = bool(_ENDED.search(block))
    return headings


def _blocks(text: str, start: int) -> Iterator[tuple[int, int]]:
    body = text[start:]
    by_line = not _BLANK.search(body) and not is_wrapped(body)
    for match in (_LINES if by_line else _BLOCKS).finditer(text, start):
        yield match.start(), match.start() + len(match.group().rstrip())


def _may_be(block: str) -> bool:
    """Whether the block looks like a heading, ignoring its neighbors."""
    if len(block) > MOST_CHARACTERS or "\n" in block or block[0].islower():
        return False
    if not _BEGINS.match(block) or not _LAST.search(block) or _ENDED.search(block):
        return False
    if _HAN.search(block):
        return 2 <= len(block) <= MOST_CHINESE and not _CHINESE_INNER.search(block)
    return len(block.split()) <= MOST_WORDS and not _INNER.search(block)


def _is_prose(block: str) -> bool:
    """Whether the block is prose that can follow a heading."""
    columns = len(block) + len(_HAN.findall(block[:PROSE]))
    return columns >= PROSE and bool(_ENDED.search(block) or block.endswith((":", "：")))
