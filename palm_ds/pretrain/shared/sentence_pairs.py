"""Pairs of texts with a class: what the tasks share that read them ready-made or mine them.

    corpus of pairs ──ready_made──> (pairs, 4) ──balance──> items ──pick──> a pair
                                                    lay_out, arrange_pair: [CLS] a [SEP] b [SEP]

A corpus of pairs (`palm-ds prepare --format pairs`) holds one document a pair, two sentences
each, and the number of the pair's label in the column `label`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.data.corpus_source import Source
from palm_ds.data.example import Example, arrange
from palm_ds.data.layout import layouts

_MOST_ITEMS = 1 << 22


def is_ready_made(source: Source) -> bool:
    """Whether the corpus holds pairs with labels, not running text."""
    return "label" in source.corpus.annotations


def ready_made(source: Source) -> np.ndarray:
    """(documents, 4) int64: where the first text starts, where the second does, where it ends, and
    the number of the pair's label.

    UserError where the corpus has no column `label`, a document is not two sentences, or a label
    has no name."""
    path = source.corpus.path
    if not is_ready_made(source):
        raise UserError(
            f"{path}: the corpus has no column label; make one of pairs with palm-ds prepare "
            f"--format pairs"
        )
    sentences = source.last_sentences - source.first_sentences
    if (wrong := np.flatnonzero(sentences != 2)).size:
        number = int(source.documents[wrong[0]])
        raise UserError(
            f"{path}: document {number} ({source.corpus.document(number, ())[0]}) has "
            f"{sentences[wrong[0]]} sentences, a pair has two; make the corpus with "
            f"palm-ds prepare --format pairs"
        )
    label = source.corpus.take(source.starts, "label").astype(np.int64)
    if len(label) and label.max() >= len(label_names(source)):
        raise UserError(
            f"{path}: label {label.max()} has no name: the manifest lists "
            f"{len(label_names(source))}; prepare the corpus again"
        )
    second = np.asarray(source.corpus.sentence_starts)[source.first_sentences + 1]
    return np.column_stack([source.starts, second, source.ends, label])


def label_names(source: Source) -> list[str]:
    """The names of a corpus's labels, in the order of their numbers."""
    names = source.corpus.manifest.options.get("labels")
    if not names:
        raise UserError(
            f"{source.corpus.path}: the manifest names no labels; make the corpus with "
            f"palm-ds prepare --format pairs"
        )
    return [str(name) for name in names]


def classes_of_labels(source: Source, numbers: Mapping[str, int], where: str) -> np.ndarray:
    """(labels,) int64: the class of every label of the corpus, by its name.

    `numbers` are the classes by name; `where` is what a message begins with. UserError names the
    labels that are none of them."""
    names = label_names(source)
    strange = [name for name in names if name not in numbers]
    if strange:
        raise UserError(
            f"{where}: {source.corpus.path} has {len(strange)} of {len(names)} labels that are no "
            f"class ({_some(strange)}); known: {_some(list(numbers))}"
        )
    return np.array([numbers[name] for name in names], np.int64)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def fit(
    first: np.ndarray, second: np.ndarray, most: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Token counts of two texts, the longer one cut until both have at most `most` tokens together;
    of two equally long ones the second (BERT's truncation, one token at a time, vectorised).

    >>> fit(np.array([3, 9]), np.array([9, 9]), 11)
    (array([3, 6]), array([8, 5]))
    """
    together = first + second
    half = -(-np.asarray(most) // 2)
    kept = np.where(together > most, np.minimum(first, np.maximum(most - second, half)), first)
    return kept, np.minimum(second, most - kept)


def lay_out(pairs: np.ndarray, room: int) -> np.ndarray:
    """(n, 7) int64 layouts of ready-made pairs `(start, start of the second, end, class)`: length,
    0 (a pair cannot grow), first text's start and tokens, second's start and tokens, class.

    Pairs too long for the room lose the ends of their texts, the longer text first."""
    start, second, end, label = pairs.T
    first_tokens, second_tokens = fit(second - start, end - second, room - 3)
    length = first_tokens + second_tokens + 3
    return layouts(
        length,
        first=start,
        first_tokens=first_tokens,
        second=second,
        second_tokens=second_tokens,
        label=label,
    )


def arrange_pair(layout: np.void, source: Source, *, swap: bool = False) -> Example:
    """[CLS] first [SEP] second [SEP] of a layout whose columns are `length, more, start of the
    first, its tokens, start of the second, its most tokens, ...` (`lay_out`; or of running text,
    where a pair that was given more room goes on in the second, then begins earlier in the
    first)."""
    length, start, tokens = (int(layout[x]) for x in ("length", "first", "first_tokens"))
    second, most = int(layout["second"]), int(layout["second_tokens"])
    second_tokens = min(length - 3 - tokens, most)
    earlier = length - 3 - tokens - second_tokens
    pieces = [
        source.read(start - earlier, start + tokens),
        source.read(second, second + second_tokens),
    ]
    return arrange(pieces[::-1] if swap else pieces, source.vocabulary)


def anchors(source: Source) -> np.ndarray:
    """(sentences, 3) int64: every sentence, and the sentences [first, last) of its document."""
    count = source.last_sentences - source.first_sentences
    first = np.repeat(source.first_sentences, count)
    last = np.repeat(source.last_sentences, count)
    anchor = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first
    return np.column_stack([anchor, first, last])


def elsewhere(
    own: np.ndarray, eligible: np.ndarray, draw: np.ndarray, source: Source
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) a sentence of any document but one's own, all of them as likely, and its document.

    own: (n,) documents of the source; eligible: (documents,) how many sentences from a document's
    first may be drawn; draw: (n,) in [0, 1). Some other document must have one."""
    upto = np.cumsum(eligible)
    skipped = upto[own] - eligible[own]
    pick = (draw * (upto[-1] - eligible[own])).astype(np.int64)
    pick = np.where(pick < skipped, pick, pick + eligible[own])
    document = np.searchsorted(upto, pick, side="right")
    within = pick - (upto[document] - eligible[document])
    return source.first_sentences[document] + within, document


def balance(classes: np.ndarray, repeat: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """An epoch with as many items of every class: an order of the pairs, and (items, 2) low, high:
    an item stands for order[low:high], one of which `pick` draws.

    classes: (pairs,) int64. Every class that occurs gets as many items as the commonest has pairs,
    but at most `repeat` times as many as the rarest has. A pair of a rare class is met that many
    times an epoch; the pairs of a common one are dealt out over its items, so that none is met
    twice in an epoch and all of them are over the epochs. Items take turns through the classes:
    the first so many are balanced too."""
    order = np.lexsort([keyed.bits(key, np.arange(len(classes))), classes])
    counts = np.bincount(classes)
    offset = (np.cumsum(counts) - counts)[counts > 0]
    counts = counts[counts > 0]
    items = min(counts.max(), repeat * counts.min()) if len(counts) else 0
    items = min(items, _MOST_ITEMS // max(len(counts), 1))  # an epoch need not be all of a corpus
    turn = np.arange(items)[:, None]  # (items of a class, classes)
    low = np.where(counts >= items, turn * counts // max(items, 1), turn % counts)
    high = np.where(counts >= items, (turn + 1) * counts // max(items, 1), low + 1)
    return order, np.column_stack([(offset + low).ravel(), (offset + high).ravel()])


def pick(items: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """(n,) places in the order of `balance`, one drawn for each item by a number in [0, 1)."""
    low, high = items[:, 0], items[:, 1]
    return low + (uniform * (high - low)).astype(np.int64)
