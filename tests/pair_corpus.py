"""Small corpora of real text, written by hand: sentences, headings, pairs with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from palm_ds.corpus.manifest import read_manifest, write_manifest
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.source import Source, split
from palm_ds.tokenizer import Tokenizer, wordpiece

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tokenizer_of(*texts: str, lower: bool = True) -> Tokenizer:
    """A vocabulary of whole words and single Chinese characters: all those of these texts."""
    cut = wordpiece(SPECIALS, lower=lower).backend
    words = [
        word
        for text in texts
        for word, _ in cut.pre_tokenizer.pre_tokenize_str(cut.normalizer.normalize_str(text))
    ]
    return wordpiece(list(dict.fromkeys([*SPECIALS, *words])), lower=lower)


def write_sentences(
    folder: Path,
    documents: Sequence[tuple[str, Sequence[str]]],
    tokenizer: Tokenizer,
    labels: Sequence[str] = (),
    label_of: Sequence[int] = (),
) -> Corpus:
    """A corpus of (id, sentences). White space separates words; a sentence that begins with "# "
    is a heading. `label_of`: the label of each document, a number of `labels`."""
    extra = ("label",) if len(labels) else ("heading",)
    rows = []
    for number, (name, sentences) in enumerate(documents):
        parts = [_marked(text, tokenizer) for text in sentences]
        ids = np.concatenate([ids for ids, _ in parts])
        columns = {key: np.concatenate([marks[key] for _, marks in parts]) for key in parts[0][1]}
        if len(labels):
            columns["label"] = np.full(len(ids), label_of[number], np.uint8)
        rows.append((name, ids, {key: columns[key] for key in ("sentence", "word", *extra)}))
    write_corpus(folder, rows, tokenizer, marks=("sentence", "word", *extra))
    if len(labels):
        write_manifest(folder, replace(read_manifest(folder), options={"labels": list(labels)}))
    return open_corpus(folder)


def _marked(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    heading = text.startswith("# ")
    words = tokenizer.encode_words(text.removeprefix("# ").split())
    ids = np.concatenate([np.array(word, np.int64) for word in words])
    starts = np.cumsum([0, *map(len, words[:-1])])
    marks = {name: np.zeros(len(ids), np.uint8) for name in ("sentence", "word", "heading")}
    marks["sentence"][0] = 1
    marks["word"][starts] = 1
    if heading:
        marks["heading"][:] = 2
        marks["heading"][0] = 1
    return ids, marks


def whole(corpus: Corpus, marks: Sequence[str] = ("word",)) -> Source:
    """All documents of a corpus."""
    return split(corpus, 0.0, marks)[0]
