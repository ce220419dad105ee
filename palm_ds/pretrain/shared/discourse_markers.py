"""Sentences that begin with a discourse marker: lists of markers, and finding them in a corpus.

    classes = read_markers("en", "tasks.discourse_relation.markers")
    finder = Finder.of(classes, corpus)
    for table in mine(corpus, finder, shortest=5, unmarked=-1): ...

Markers are matched as token ids, so that a whole corpus is searched without decoding it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.common.rng import derive_key, keyed_bits
from palm_ds.corpus.store import Corpus
from palm_ds.text.display import token_texts
from palm_ds.text.tokenizer import Tokenizer

OWN_LISTS = ("en", "zh")
_REMOVED = (",", "，", ":", "：")  # along with the marker before them
_JOINED = ("-", "‐", "‑", "'", "’")  # after a word that continues: so-called, that's
_CHUNK = 1 << 20  # sentences processed together


@dataclass(frozen=True)
class Marker:
    """One or more words at the start of a sentence."""

    text: str
    comma: bool
    """Counts only if a comma (or colon) follows."""


def plain_name(name: str) -> str:
    """The normalized form of a marker in a list or label: `As_a_result,` is `as a result`."""
    return " ".join(name.replace("_", " ").rstrip(",， ").lower().split())


def read_markers(name: str, where: str) -> list[list[Marker]]:
    """The classes of a list: one per line, variants separated by `|`; `#` starts a comment; a comma
    at the end of a marker means that one must follow in the text; `_` is a space.

    `name` is `en`, `zh`, or a file. Raises UserError for a missing file, fewer than two classes, or
    a duplicate marker."""
    if name in OWN_LISTS:
        text = (resources.files("palm_ds.pretrain") / f"markers/{name}.txt").read_text("utf-8")
    else:
        text = _read(Path(name), where)
    classes: list[list[Marker]] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not (content := line.partition("#")[0].strip()):
            continue
        classes.append([])
        for variant in content.split("|"):
            plain = plain_name(variant)
            if not plain:
                raise UserError(f"{where}: {name}: line {number}: a marker is empty")
            if plain in seen:
                first = seen[plain]
                raise UserError(
                    f"{where}: {name}: line {number}: {plain!r} is already on line {first}"
                )
            seen[plain] = number
            classes[-1].append(Marker(plain, variant.strip()[-1] in ",，"))
    if len(classes) < 2:
        raise UserError(
            f"{where}: {name}: {counted(len(classes), 'marker')}; expected at least 2, one per line"
        )
    return classes


def _read(file: Path, where: str) -> str:
    try:
        return file.read_text("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{where}: {file}: {error.strerror}; use en, zh, labels or a file "
            "with one marker per line"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: {file}: not UTF-8 text") from None


# Finding them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finder:
    """A trie of markers as token ids, walked for many sentences in parallel.

    A state is a node; `edges` (sorted) are `state * size + id` and lead to `targets`."""

    size: int  # of the vocabulary
    edges: np.ndarray  # (edges,) int64
    targets: np.ndarray  # (edges,) int64
    label: np.ndarray  # (states,) int64: the class of the marker that ends here; -1: none
    comma: np.ndarray  # (states,) bool: whether that marker needs a comma
    removed: np.ndarray  # ids of commas and colons
    joined: np.ndarray  # ids that make the marker part of a longer word

    @classmethod
    def of(cls, classes: list[list[Marker]], corpus: Corpus) -> Finder:
        """Encodes each marker as the corpus's tokenizer does at the start of a sentence. Markers it
        cannot encode are skipped."""
        tokenizer = corpus.tokenizer()
        ends: dict[tuple[int, ...], tuple[int, bool]] = {}
        for label, line in enumerate(classes):
            for marker in line:
                for ids in spellings(marker.text, tokenizer):
                    ends.setdefault(ids, (label, marker.comma))
        states: dict[tuple[int, ...], int] = {(): 0}
        for ids in ends:
            for length in range(1, len(ids) + 1):
                states.setdefault(ids[:length], len(states))
        size = tokenizer.size
        edges = {states[ids[:-1]] * size + ids[-1]: at for ids, at in states.items() if ids}
        answers = [ends.get(ids, (-1, False)) for ids in states]
        return cls(
            size,
            np.array(sorted(edges), np.int64),
            np.array([edges[edge] for edge in sorted(edges)], np.int64),
            np.array([label for label, _ in answers], np.int64),
            np.array([comma for _, comma in answers], bool),
            _ids_of(_REMOVED, tokenizer),
            _ids_of(_JOINED, tokenizer),
        )

    def step(self, state: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The states after one more token; -1: no marker continues this way."""
        if not len(self.edges):
            return np.full(len(state), -1)
        key = state * self.size + ids.astype(np.int64)
        at = np.minimum(np.searchsorted(self.edges, key), len(self.edges) - 1)
        return np.where(self.edges[at] == key, self.targets[at], -1)

    def find(
        self, corpus: Corpus, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """For texts [start, end): the class of the longest marker at the start of each (-1: none),
        and its number of tokens, including a comma or colon after it."""
        label, cut = np.full(len(starts), -1), np.zeros(len(starts), np.int64)
        text, state, length = np.arange(len(starts)), np.zeros(len(starts), np.int64), 0
        while len(text):
            state = self.step(state, corpus.take(starts[text] + length))
            length += 1
            going = (state >= 0) & (starts[text] + length < ends[text])
            text, state = text[going], state[going]
            whole = self.label[state] >= 0
            ended, at = text[whole], state[whole]
            after = corpus.take(starts[ended] + length)
            comma = np.isin(after, self.removed)
            plain = corpus.take(starts[ended] + length, "word") == 1
            plain &= ~np.isin(after, self.joined) & ~self.comma[at]
            marked = comma | plain
            label[ended[marked]] = self.label[at[marked]]
            cut[ended[marked]] = length + comma[marked]
        return label, cut


def spellings(marker: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The ids of a marker at the start of a sentence: with and without a capital, at the start of a
    text, after a space, right after a Chinese full stop. Encodings with [UNK] are skipped."""
    spelled: dict[tuple[int, ...], None] = {}
    unknown = tokenizer.vocabulary.unk
    for text in (marker, marker[0].upper() + marker[1:]):
        for before in ("", ". ", "。"):
            ((ids, at),) = tokenizer.encode_texts([before + text])
            own = at >= len(before.strip())
            # A first token inside the marker: its beginning went into an earlier token.
            whole = own.any() and at[own][0] <= len(before)
            if whole and unknown not in ids[own]:
                spelled[tuple(ids[own].tolist())] = None
    return list(spelled)


def _ids_of(texts: tuple[str, ...], tokenizer: Tokenizer) -> np.ndarray:
    every = token_texts(tokenizer, range(tokenizer.size))
    found = [i for i, (text, continues) in enumerate(every) if text in texts and not continues]
    return np.array(found, np.int64)


def mine(
    corpus: Corpus,
    finder: Finder,
    sentences: range | None = None,
    *,
    shortest: int,
    unmarked: int,
) -> Iterator[np.ndarray]:
    """Mines adjacent sentences of a document, in corpus order, both of at least `shortest` tokens
    and neither a heading. `sentences`: those of some
    whole documents, by default of all. Yields (pairs, 5) int64: start
    and end of the first, start of the second without its marker, its end, class.

    unmarked: the class of pairs without a marker; a random sample of them is kept, as many as there
    are pairs with one. -1: none are kept."""
    offsets = corpus.sentence_starts
    sentences = range(corpus.manifest.sentences) if sentences is None else sentences
    for first in sentences[::_CHUNK]:
        sentence = np.arange(first, min(first + _CHUNK, sentences.stop))
        opening = np.searchsorted(corpus.first_sentence, sentence)
        sentence = sentence[np.asarray(corpus.first_sentence)[opening] != sentence]
        before, start, end = offsets[sentence - 1], offsets[sentence], offsets[sentence + 1]
        fit = (start - before >= shortest) & (end - start >= shortest)
        if "heading" in corpus.annotations:
            fit &= (corpus.take(before, "heading") == 0) & (corpus.take(start, "heading") == 0)
        before, start, end = before[fit], start[fit], end[fit]
        label, cut = finder.find(corpus, start, end)
        kept = (label >= 0) & (end - start - cut >= shortest)
        if unmarked >= 0:
            free = np.flatnonzero(label < 0)
            lot = np.argsort(keyed_bits(derive_key("unmarked"), start[free]), kind="stable")
            chosen = free[lot[: kept.sum()]]
            label[chosen], kept[chosen] = unmarked, True
        table = np.column_stack([before, start, start + cut, end, label])
        yield table[kept]
