"""Adds tokens to an existing tokenizer.

    file       one token per line; optionally a tab and words whose mean embedding initializes it
    ids        [unused1], [unused2], ... if requested, then from the vocabulary's size upwards
    a word     is added to a WordPiece vocabulary, and so is a `##piece`
    others     phrases ("New York"), Chinese words, and words of other kinds of vocabulary are
               matched in the text before it is tokenized
    [X], <X>   special tokens: never matched in a text

Text without any of the new tokens is tokenized as before.
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
class ExtendedTokenizer:
    """A tokenizer with added tokens."""

    tokenizer: Tokenizer
    ids: Mapping[str, int]
    """New token -> id."""
    already_known: tuple[str, ...]
    """Requested tokens that the vocabulary already had."""


def read_token_file(file: Path) -> dict[str, str]:
    """Reads {token: words to initialize it from, or ""}. Errors name the line."""
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
            raise UserError(f"{file}: line {number}: duplicate token {token!r}")
        if token:
            tokens[token] = like
    if not tokens:
        raise UserError(f"{file}: empty; give one token per line")
    return tokens


def add_tokens(
    tokenizer: Tokenizer, tokens: Mapping[str, str], *, reuse_unused: bool = False
) -> ExtendedTokenizer:
    """Returns a tokenizer with these tokens added.

    `reuse_unused` first takes the ids of [unused1] and so on (WordPiece only). Raises UserError for
    a token that could never occur in a text.
    """
    if tokenizer.splitter:
        raise UserError(
            f"{tokenizer.origin}: its texts are split by {tokenizer.splitter.kind}; add the tokens "
            "to its vocab.txt instead"
        )
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    new = [token for token in tokens if token not in known]
    already = tuple(token for token in tokens if token in known)
    for token in new:
        if not token or not token.isprintable() or token != token.strip():
            raise UserError(f"{tokenizer.origin}: {token!r} is not a valid token")
    free = _unused(tokenizer, known) if reuse_unused else []
    numbers = [*free, *range(tokenizer.size, tokenizer.size + len(new))]
    ids = dict(zip(new, numbers, strict=False))
    backend = _with_vocabulary(tokenizer, ids) if tokenizer.kind == "wordpiece" else None
    backend = backend or Backend.from_str(tokenizer.backend.to_str())
    added = _like(tokenizer, backend)
    for token, i in ids.items():
        _make_found(added, token, i)
    return ExtendedTokenizer(tokenizer=_like(tokenizer, backend), ids=ids, already_known=already)


def _like(tokenizer: Tokenizer, backend: Backend) -> Tokenizer:
    """Another vocabulary with the same special tokens and settings."""
    return tokenizer.changed(backend)


def initializing_ids(tokenizer: Tokenizer, token: str, like: str = "") -> list[int]:
    """The ids whose mean embedding initializes a new token: those it was split into, or those of
    the words it should be `like`. Empty for special tokens and if [UNK] is among the ids."""
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
    """The same tokenizer with these words in its vocabulary, replacing tokens of the same ids. So
    are tokens that were added before: outside of it they would be numbered after the new ones."""
    state = json.loads(tokenizer.backend.to_str())
    taken = set(ids.values())
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    vocabulary = {t: i for t, i in known.items() if i not in taken}
    state["model"]["vocab"] = vocabulary | dict(ids)
    state["added_tokens"] = [entry for entry in state["added_tokens"] if entry["id"] not in taken]
    return Backend.from_str(json.dumps(state))


def _make_found(tokenizer: Tokenizer, token: str, i: int) -> None:
    """Ensures that the token, when it occurs in a text, gets its id."""
    if _SPECIAL.fullmatch(token):
        tokenizer.backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    elif not _found(tokenizer, token, i):
        _find_before_cutting(tokenizer, token)
        if not _found(tokenizer, token, i):
            text = _prepared(tokenizer, token)
            why = f": its words are {text!r}" if text != token else ""
            raise UserError(f"{tokenizer.origin}: {token!r} would never be found in a text{why}")
    if tokenizer.backend.token_to_id(token) != i:
        raise UserError(
            f"{tokenizer.origin}: {token!r} cannot have id {i}: the vocabulary's ids have gaps"
        )


def _find_before_cutting(tokenizer: Tokenizer, token: str) -> None:
    """Matches the token in the raw text, or in the normalized text if it is not Chinese."""
    chinese = bool(_CHINESE.search(token))  # the normalizer puts spaces around each character
    normalizer = tokenizer.backend.normalizer
    plain = token if chinese or normalizer is None else normalizer.normalize_str(token)
    if plain != token:
        raise UserError(
            f"{tokenizer.origin}: {token!r} would never be found in a text: the normalizer turns "
            f"it into {plain!r}; add that"
        )
    added = AddedToken(token, single_word=not chinese, normalized=not chinese)
    tokenizer.backend.add_tokens([added])


def _found(tokenizer: Tokenizer, token: str, i: int) -> bool:
    if token.startswith("##") and tokenizer.kind == "wordpiece":
        return True
    encoding = tokenizer.backend.encode(_prepared(tokenizer, token), add_special_tokens=False)
    return encoding.ids == [i]


def _prepared(tokenizer: Tokenizer, text: str) -> str:
    """With spaces between words if it splits texts into them first."""
    return tokenizer.segmenter.prepare(text)[0] if tokenizer.segmenter else text
