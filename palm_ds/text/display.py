"""Formats tokens for display, whatever the kind of vocabulary.

wordpiece       "paris"   "##ened"   "[MASK]"
sentencepiece   "▁paris"  "ened"     "<mask>"
byte-level BPE  "Ġparis"  "ened"     "<mask>"
displayed         paris    ##ened     unchanged
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import decoders

from palm_ds.text.tokenizer import CHINESE, Tokenizer

LETTER = re.compile(rf"[^\W_{CHINESE}]")
"""A character of words that can have several characters (not Chinese, not punctuation)."""
_WIDE = f"{CHINESE}\u3001-\u303f\uff01-\uff60"
_BESIDE_CHINESE = re.compile(f"(?<=[{_WIDE}]) | (?=[{_WIDE}])")
"""Spaces next to a Chinese character or a punctuation mark of Chinese."""


def token_texts(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[tuple[str, bool]]:
    """The text of each id, and whether it continues the previous word."""
    specials = set(tokenizer.roles.values())
    return [
        (token, False) if token in specials else _surface(tokenizer, token)
        for token in tokenizer.tokens(ids)
    ]


def display_tokens(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id, with ## in front if it continues a word."""
    return ["##" * continues + text for text, continues in token_texts(tokenizer, ids)]


def _surface(tokenizer: Tokenizer, token: str) -> tuple[str, bool]:
    if tokenizer.kind == "wordpiece" and not token.startswith("▁"):
        continues = token.startswith("##") and len(token) > 2
        return (token[2:] if continues else token), continues
    decoder = tokenizer.backend.decoder
    if "▁" not in token and decoder is not None:
        token = decoder.decode([token]).replace(" ", "▁")  # byte-level characters to text
    if token.startswith("▁"):
        return token[1:] or "▁", False
    # A token without a word-start sign may still start a word: punctuation, a Chinese character.
    return token, bool(LETTER.match(token))


def detokenize(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """The text that tokens spell: by the tokenizer's own decoder, without the spaces that WordPiece
    has around Chinese characters and punctuation."""
    backend = tokenizer.backend
    if tokenizer.kind == "wordpiece" and backend.decoder is None:
        text = decoders.WordPiece().decode(tokenizer.tokens(ids))
    else:
        text = tokenizer.decode(ids)
    if tokenizer.kind != "wordpiece":
        return text.strip()
    return _BESIDE_CHINESE.sub("", text).strip().removeprefix("##")
