"""Small corpora of texts written by hand or drawn: sentences, headings, pairs with labels; and a
slow reading of discourse markers to compare with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from palm_ds.corpus.manifest import read_manifest, write_manifest
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.pretrain.shared.discourse_markers import Marker
from palm_ds.text.tokenizer import Tokenizer, wordpiece

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tokenizer_of(*texts: str, lower: bool = True) -> Tokenizer:
    """A vocabulary of all words and single Chinese characters of these texts."""
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
        columns = {
            key: np.concatenate([annotations[key] for _, annotations in parts])
            for key in parts[0][1]
        }
        if len(labels):
            columns["label"] = np.full(len(ids), label_of[number], np.uint8)
        rows.append((name, ids, {key: columns[key] for key in ("sentence", "word", *extra)}))
    write_corpus(folder, rows, tokenizer, annotations=("sentence", "word", *extra))
    if len(labels):
        write_manifest(folder, replace(read_manifest(folder), options={"labels": list(labels)}))
    return open_corpus(folder)


def write_translations(folder: Path, *, pairs: int = 40, words: int = 30, seed: int = 0) -> Corpus:
    """Pairs of 4 to 12 words of one language, and their translation word by word, w3 to v3."""
    rng = np.random.default_rng(seed)
    vocabulary = [[f"{letter}{number}" for number in range(words)] for letter in "wv"]
    tokenizer = wordpiece([*SPECIALS, *vocabulary[0], *vocabulary[1]], lower=False)
    documents = []
    for number in range(pairs):
        drawn = rng.integers(0, words, rng.integers(4, 13))
        texts = [" ".join(names[word] for word in drawn) for names in vocabulary]
        documents.append((f"pair{number}", texts))
    return write_sentences(folder, documents, tokenizer, labels=[""], label_of=[0] * pairs)


def _marked(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    heading = text.startswith("# ")
    words = tokenizer.encode_words(text.removeprefix("# ").split())
    ids = np.concatenate([np.array(word, np.int64) for word in words])
    starts = np.cumsum([0, *map(len, words[:-1])])
    annotations = {name: np.zeros(len(ids), np.uint8) for name in ("sentence", "word", "heading")}
    annotations["sentence"][0] = 1
    annotations["word"][starts] = 1
    if heading:
        annotations["heading"][:] = 2
        annotations["heading"][0] = 1
    return ids, annotations


def whole(corpus: Corpus, annotations: Sequence[str] = ("word",)) -> CorpusSource:
    """All documents of a corpus."""
    return split_corpus(corpus, 0.0, annotations)[0]


# A slow reading of markers ---------------------------------------------------------------------

COMMAS, JOINED = (",", "，", ":", "："), ("-", "'", "’", "‐", "‑")


def list_file(folder: Path, text: str) -> str:
    """A new file of markers."""
    file = folder / f"markers{len(list(folder.iterdir()))}.txt"
    file.write_text(text, "utf-8")
    return str(file)


def slow_pairs(
    corpus: Corpus, classes: list[list[Marker]], shortest: int
) -> list[tuple[int, int, int, int, int]]:
    """Word by word, from the tokens' text: no ids, no trie."""
    phrases = {}
    for label, line in enumerate(classes):
        for marker in line:
            phrases[tuple(re.findall(r"\w+|[^\w\s]", marker.text))] = label, marker.comma
    longest = max(map(len, phrases))
    tokenizer, out = corpus.tokenizer(), []
    for number in range(len(corpus)):
        _, piece = corpus.document(number)
        text = tokenizer.tokens(piece.ids)
        starts = [*np.flatnonzero(piece.annotations["sentence"]).tolist(), len(piece)]
        for before, start, end in zip(starts, starts[1:], starts[2:], strict=False):
            if start - before < shortest or end - start < shortest:
                continue
            heads = piece.annotations.get("heading", np.zeros(len(piece)))
            if heads[before] or heads[start]:
                continue
            words, at = [], []
            for k in range(start, min(end, start + 40)):
                if piece.annotations["word"][k] or k == start:
                    words.append("")
                    at.append(k)
                words[-1] += text[k].removeprefix("##").lower()
            for size in range(min(longest, len(words) - 1), 0, -1):
                if tuple(words[:size]) not in phrases:
                    continue
                label, needs_comma = phrases[tuple(words[:size])]
                comma = words[size] in COMMAS
                if not comma and (needs_comma or words[size][0] in JOINED):
                    continue
                second = at[size] + comma
                if end - second >= shortest:
                    out.append(tuple(piece.start + x for x in (before, start, second, end))
                               + (label,))  # fmt: skip
                break
    return out


def chatter(seed: int, documents: int = 60) -> list[tuple[str, list[str]]]:
    """Random sentences of marker words and others."""
    rng = np.random.default_rng(seed)
    openings = ["But", "But ,", "And", "In fact ,", "In fact", "In", "In other words", "In other",
                "However ,", "However", "So", "So -", "Still ,", "As a result ,", "As a", "Then",
                "", "", "", ""]  # fmt: skip
    words = [
        "the",
        "rain",
        "sun",
        "dog",
        "sat",
        "far",
        "fact",
        "result",
        "as",
        "in",
        "but",
        ",",
        "-",
    ]
    out = []
    for number in range(documents):
        texts = []
        for _ in range(rng.integers(1, 12)):
            opening = openings[rng.integers(len(openings))]
            rest = rng.choice(words, rng.integers(2, 12))
            texts.append(" ".join([opening, *rest, "."]).strip())
        out.append((f"d{number}", texts))
    return out


def write_jumble(folder: Path) -> Corpus:
    """These sentences as a corpus."""
    documents = chatter(0)
    tokenizer = tokenizer_of(*(text for _, texts in documents for text in texts))
    return write_sentences(folder, documents, tokenizer)
