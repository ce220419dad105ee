"""More words for a tokenizer that exists.

    file       a token a line; after a tab, if you like, words whose mean it shall begin as
    ids        [unused1], [unused2], ... where asked for, then on from the last id
    a word     of a WordPiece vocabulary goes into it, `##piece` too
    several    ("New York", a Chinese word), and words of other vocabularies, are found in the text
               before it is cut up
    [X], <X>   special tokens: no text has them

What the tokenizer did before it does still, wherever no new token stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from palm_ds.common.errors import UserError
from palm_ds.text.tokenizer import CHINESE, Tokenizer

_SPECIAL = re.compile(r"\[[^\s\[\]]+\]|<[^\s<>]+>")
_UNUSED = re.compile(r"\[unused\d+\]")
_CHINESE = re.compile(f"[{CHINESE}]")


@dataclass(frozen=True, kw_only=True)
class Added:
    """A tokenizer with more tokens."""

    tokenizer: Tokenizer
    ids: Mapping[str, int]
    """Of the new tokens."""
    known: tuple[str, ...]
    """Tokens that were there already."""


def read_tokens(file: Path) -> dict[str, str]:
    """{token: words to begin as, or nothing} of a file. Raises UserError with the line."""
    try:
        lines = Path(file).read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text: {error}") from None
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        token, _, like = (part.strip() for part in line.partition("\t"))
        if not token and like:
            raise UserError(f"{file}: line {number}: no token before the tab")
        if token in tokens:
            raise UserError(f"{file}: line {number}: {token!r} stands there twice")
        if token:
            tokens[token] = like
    if not tokens:
        raise UserError(f"{file}: empty; one token a line")
    return tokens


def add_tokens(
    tokenizer: Tokenizer, tokens: Mapping[str, str], *, reuse_unused: bool = False
) -> Added:
    """A tokenizer with these tokens too; `reuse_unused`: first in the places of [unused1] and so
    on, of a WordPiece vocabulary. Raises UserError for a token that no text could ever have."""
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    new = [token for token in tokens if token not in known]
    already = tuple(token for token in tokens if token in known)
    for token in new:
        if not token or not token.isprintable() or token != token.strip():
            raise UserError(f"{tokenizer.origin}: {token!r} is no token")
    free = _unused(tokenizer, known) if reuse_unused else []
    numbers = [*free, *range(tokenizer.size, tokenizer.size + len(new))]
    ids = dict(zip(new, numbers, strict=False))
    backend = _with_vocabulary(tokenizer, ids) if tokenizer.kind == "wordpiece" else None
    backend = backend or Backend.from_str(tokenizer.backend.to_str())
    added = Tokenizer(backend, origin=tokenizer.origin)
    for token, i in ids.items():
        _make_found(added, token, i)
    return Added(tokenizer=Tokenizer(backend, origin=tokenizer.origin), ids=ids, known=already)


def pieces(tokenizer: Tokenizer, token: str, like: str = "") -> list[int]:
    """The ids of what a new token was before, or of the words it shall be like; none where they
    are not known, and for special tokens."""
    if not like and _SPECIAL.fullmatch(token):
        return []
    text = like or token.removeprefix("##")
    ids = tokenizer.encode_words([text])[0]
    return [] if tokenizer.vocabulary.unk in ids else ids


def _unused(tokenizer: Tokenizer, known: Mapping[str, int]) -> list[int]:
    if tokenizer.kind != "wordpiece":
        raise UserError(
            f"{tokenizer.origin}: a {tokenizer.kind} vocabulary; only WordPiece has [unused1] ..."
        )
    return sorted(i for token, i in known.items() if _UNUSED.fullmatch(token))


def _with_vocabulary(tokenizer: Tokenizer, ids: Mapping[str, int]) -> Backend:
    """The same tokenizer with these words in its vocabulary, in the place of any of those ids."""
    state = json.loads(tokenizer.backend.to_str())
    taken = set(ids.values())
    vocabulary = {t: i for t, i in state["model"]["vocab"].items() if i not in taken}
    state["model"]["vocab"] = vocabulary | dict(ids)
    state["added_tokens"] = [found for found in state["added_tokens"] if found["id"] not in taken]
    return Backend.from_str(json.dumps(state))


def _make_found(tokenizer: Tokenizer, token: str, i: int) -> None:
    """See to it that a text's token gets its id."""
    if _SPECIAL.fullmatch(token):
        tokenizer.backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    elif not _found(tokenizer, token, i):
        _find_before_cutting(tokenizer, token)
        if not _found(tokenizer, token, i):
            raise UserError(f"{tokenizer.origin}: no text would ever have {token!r}")
    if tokenizer.backend.token_to_id(token) != i:
        raise UserError(f"{tokenizer.origin}: {token!r} cannot have id {i}: its ids have gaps")


def _find_before_cutting(tokenizer: Tokenizer, token: str) -> None:
    """Have the token found in the text as a whole; in lower case, too, where texts are lowered."""
    chinese = bool(_CHINESE.search(token))  # has no spaces between words, and gets some
    normalizer = tokenizer.backend.normalizer
    plain = token if chinese or normalizer is None else normalizer.normalize_str(token)
    if plain != token:
        raise UserError(
            f"{tokenizer.origin}: no text would ever have {token!r}: it is made {plain!r} first; "
            "add that"
        )
    added = AddedToken(token, single_word=not chinese, normalized=not chinese)
    tokenizer.backend.add_tokens([added])


def _found(tokenizer: Tokenizer, token: str, i: int) -> bool:
    if token.startswith("##") and tokenizer.kind == "wordpiece":
        return True
    encoding = tokenizer.backend.encode(token, add_special_tokens=False)
    return encoding.ids == [i]
