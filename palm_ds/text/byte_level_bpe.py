"""RoBERTa's vocab.json and merges.txt: byte-level BPE, as fairseq and GPT-2 wrote it.

    as_tokenizer_json(folder / "vocab.json", settings) ──> the text of a tokenizer.json
    write_byte_level_bpe(backend, folder)              ──> vocab.json, merges.txt

transformers builds RobertaTokenizer from the two files if there is no tokenizer.json; PaddleNLP's
RobertaBPETokenizer reads nothing else.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from palm_ds.common.config import unique_keys
from palm_ds.common.errors import UserError
from palm_ds.text.tokenizer_settings import ROBERTA_ROLES, TokenizerSettings
from palm_ds.text.vocabulary_file import read_text

VOCABULARY, MERGES = "vocab.json", "merges.txt"


def as_tokenizer_json(file: Path, settings: TokenizerSettings) -> str:
    """The text of the tokenizer.json that says the same as a vocab.json, the merges.txt next to it
    and the folder's settings. Raises UserError."""
    if settings.unknown or settings.family == "bert":
        named = settings.unknown or "WordPiece tokenizer"
        raise UserError(
            f"tokenizer {file}: is of a {named}, whose rules are not known here; save a "
            "tokenizer.json next to it"
        )
    vocabulary = _vocabulary(file)
    roles = {**ROBERTA_ROLES, **settings.roles}
    if lacking := [role for role in ("cls", "sep", "mask") if roles[role] not in vocabulary]:
        raise UserError(
            f"tokenizer {file}: has no {roles[lacking[0]]!r}, RoBERTa's {lacking[0]}_token, and no "
            "setting names another; save a tokenizer.json next to it"
        )
    space = settings.add_prefix_space
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {token: vocabulary[token] for token in roles.values() if token in vocabulary}
    trim = {"add_prefix_space": space, "trim_offsets": True}
    state = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, **options, "special": True}
            for token, number in sorted(added.items(), key=lambda each: each[1])
        ],
        "pre_tokenizer": {"type": "ByteLevel", **trim, "use_regex": True},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": [roles["sep"], vocabulary[roles["sep"]]],
            "cls": [roles["cls"], vocabulary[roles["cls"]]],
            **trim,
        },
        "decoder": {"type": "ByteLevel", **trim, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": _merges(file.with_name(MERGES))},
    }
    return json.dumps(state, ensure_ascii=False)


def _vocabulary(file: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(read_text(file), object_pairs_hook=partial(unique_keys, str(file)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"tokenizer {file}: not JSON: {error}") from None
    if not isinstance(vocabulary, dict) or not all(
        type(x) is int and x >= 0 for x in vocabulary.values()
    ):
        raise UserError(f"tokenizer {file}: expected an object of tokens and their ids")
    return vocabulary


def _merges(file: Path) -> list[list[str]]:
    if not file.is_file():
        raise UserError(f"tokenizer {file}: is missing; {VOCABULARY} alone does not split a text")
    merges = []
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if line.startswith("#version") or not line.strip():
            continue
        pieces = line.rstrip("\r").split(" ")
        if len(pieces) != 2 or not all(pieces):
            raise UserError(f"tokenizer {file}: line {number}: expected two pieces, got {line!r}")
        merges.append(pieces)
    return merges


def is_roberta_bpe(backend: Backend) -> bool:
    """Whether RoBERTa's two files say all that determines the ids."""
    split = backend.pre_tokenizer
    return (
        isinstance(backend.model, models.BPE)
        and isinstance(split, pre_tokenizers.ByteLevel)
        and split.use_regex
        and backend.normalizer is None
        and isinstance(backend.post_processor, processors.RobertaProcessing)
        and not (backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix)
    )


def write_byte_level_bpe(backend: Backend, folder: Path) -> None:
    """Write the two files of a tokenizer that `is_roberta_bpe`. Added tokens that its model lacks
    are part of vocab.json, as in fairseq's."""
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    vocabulary = {**backend.get_vocab(with_added_tokens=True), **model["vocab"]}
    ordered = dict(sorted(vocabulary.items(), key=lambda each: each[1]))
    merges = [x if isinstance(x, str) else " ".join(x) for x in model["merges"]]
    text = json.dumps(ordered, ensure_ascii=False)
    (folder / VOCABULARY).write_text(text, encoding="utf-8")
    lines = "".join(f"{line}\n" for line in ["#version: 0.2", *merges])
    (folder / MERGES).write_text(lines, encoding="utf-8")
