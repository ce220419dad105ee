"""Shows documents of a corpus, with sentences, words, phrases and entities in color."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.text.tokens import TokenSpan

_STYLES = {"phrase": "bold cyan", "entity": "bold magenta", "both": "bold yellow"}
_HEADING, _LABEL, _SPEAKERS = "bold underline", "bold green", ("blue", "green", "red", "magenta")


def open_documents(
    path: str | Path, *, documents: int, first: int = 0
) -> tuple[Corpus, Iterator[tuple[str, TokenSpan]]]:
    """The corpus, and ids and contents of `documents` documents from number `first` on. Raises
    UserError."""
    corpus = open_corpus(path)
    if not 0 <= first < len(corpus):
        raise UserError(f"--first {first}: the corpus has documents 0 to {len(corpus) - 1}")
    if documents < 1:
        raise UserError(f"--documents {documents}: must be at least 1")
    numbers = range(first, min(first + documents, len(corpus)))
    return corpus, (corpus.document(number) for number in numbers)


def as_text(name: str, piece: TokenSpan, corpus: Corpus, tokenizer: Tokenizer) -> Text:
    """A document in color, after an empty line."""
    lines = sentence_lines(piece, tokenizer)
    return Text("\n").join([Text(), _title(name, piece, corpus), *lines])


def as_record(name: str, piece: TokenSpan, tokenizer: Tokenizer) -> dict[str, Any]:
    """A document as plain values: its id, its tokens, and each annotation's value for each."""
    values = {annotation: numbers.tolist() for annotation, numbers in piece.annotations.items()}
    return {"id": name, "tokens": list(tokenizer.tokens(piece.ids)), "annotations": values}


def _title(name: str, piece: TokenSpan, corpus: Corpus) -> Text:
    """The document's id, size, and document-level annotations."""
    title = Text(f"{name}  ({counted(len(piece), 'token')})", style="bold")
    names = corpus.manifest.options.get("labels", [])
    if "label" in piece.annotations and names != [""]:
        number = int(piece.annotations["label"][0])
        known = names[number] if number < len(names) else str(number)
        title.append(f"  label {known}", _LABEL)
        title.append("" if known == str(number) else f" ({number})", "not bold")
    if "mask_word" in piece.annotations:
        percent = int(piece.annotations["mask_word"][0])
        title.append(f"  words masked whole: {percent} %", "not bold")
    return title


def heading(corpus: Corpus) -> Text:
    manifest = corpus.manifest
    legend = Text(
        f"{corpus.path}: {counted(len(corpus), 'document')}, "
        f"{counted(manifest.sentences, 'sentence')}, {counted(manifest.tokens, 'token')}, "
        f"{manifest.tokenizer['size']:,} {manifest.tokenizer['kind']} "
        f"tokens, annotations {', '.join(corpus.annotations)}\n"
    )
    if languages := manifest.languages:
        legend.append(f"languages {', '.join(languages)}\n")
    legend.append("phrase", _STYLES["phrase"])
    legend.append("  ")
    legend.append("entity", _STYLES["entity"])
    legend.append("  ")
    legend.append("phrase and entity", _STYLES["both"])
    legend.append("  words apart, ")
    legend.append("·", "dim")
    legend.append(" between the tokens of a word; [ ] around a phrase, { } around an entity")
    if "heading" in corpus.annotations:
        legend.append("; # ")
        legend.append("heading", _HEADING)
    if "role" in corpus.annotations:
        legend.append("; before a turn its speaker's number")
    if labels := corpus.manifest.options.get("labels"):
        some = ", ".join(labels[:12]) + (" ..." if len(labels) > 12 else "")
        legend.append(
            f"\n{len(labels)} labels: {some}" if labels != [""] else "\npairs without label"
        )
    return legend


def sentence_lines(piece: TokenSpan, tokenizer: Tokenizer) -> list[Text]:
    """One line a sentence, its number before it."""
    starts = np.flatnonzero(_annotation(piece, "sentence")).tolist() or [0]
    tokens = [_surface(token) for token in tokenizer.tokens(piece.ids)]
    lines = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(piece)], strict=True)):
        line = Text(f"{number:4d}  ", style="dim")
        line.append_text(_before(piece, start))
        line.append_text(_sentence(piece, tokens, start, end))
        lines.append(line)
    return lines


def _before(piece: TokenSpan, start: int) -> Text:
    """The prefix of a sentence: its speaker, or a sign that it is a heading."""
    if "role" in piece.annotations:
        speaker = int(piece.annotations["role"][start])
        return Text(f"{speaker}: ", style=f"not dim {_SPEAKERS[speaker % len(_SPEAKERS)]}")
    return Text("# ", "not dim bold") if _annotation(piece, "heading")[start] else Text()


def _sentence(piece: TokenSpan, tokens: list[str], start: int, end: int) -> Text:
    phrase, entity, word = (_annotation(piece, name) for name in ("phrase", "entity", "word"))
    capital = _annotation(piece, "capital")
    heading = _HEADING if _annotation(piece, "heading")[start] else ""
    line = Text(style=f"default not dim {heading}".strip())
    for i in range(start, end):
        if i > start:
            line.append(" " if word[i] else "·", "" if word[i] else "dim")
        inside = (bool(phrase[i]), bool(entity[i]))
        style = {(True, True): "both", (True, False): "phrase", (False, True): "entity"}.get(inside)
        token = tokens[i]
        if capital[i] and word[i]:
            token = token[:1].upper() + token[1:]
        before = "[" * int(phrase[i] == 1) + "{" * int(entity[i] == 1)
        after = "}" * _ends(entity, i, end) + "]" * _ends(phrase, i, end)
        line.append(before + token + after, _STYLES[style] if style else "")
    return line


def _ends(values: np.ndarray, i: int, end: int) -> bool:
    """Whether a span ends with token i."""
    return bool(values[i]) and bool(i + 1 == end or values[i + 1] != 2)


def _annotation(piece: TokenSpan, name: str) -> np.ndarray:
    return piece.annotations.get(name, np.zeros(len(piece), np.uint8))


def _surface(token: str) -> str:
    """A token without the sign for the start or continuation of a word."""
    bare = token.removeprefix("##") if len(token) > 2 else token
    return bare.replace("▁", "").replace("Ġ", "") or "_"
