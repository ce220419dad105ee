"""Tasks that classify pairs of texts, built from running text or read ready-made.

    corpus of pairs ──labeled_pairs──> (pairs, 4) ──balance──> items ──pick──> a pair
                                                    lay_out, arrange_pair: [CLS] a [SEP] b [SEP]

In a corpus of pairs (`palm-ds prepare --format pairs`) each pair is a document of two sentences;
the annotation `label` is the number of its label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_bits, keyed_uniform
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.pretrain.shared.predictions import ClassPrediction

_MAX_ITEMS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PairTask(ClassPrediction):
    """A task that classifies pairs of texts: its layouts have the fields of `arrange_pair` and a
    `label`."""

    segments = 2

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        example = arrange_pair(layout, source)
        example.labels[self.name] = np.array([0]), np.array([layout["label"]])
        return example


def is_ready_made(source: CorpusSource) -> bool:
    """Whether the corpus consists of labeled pairs rather than running text."""
    return "label" in source.corpus.annotations


def ready_made(source: CorpusSource) -> np.ndarray:
    """(documents, 4) int64: start of the first text, start and end of the second, number of the
    label.

    Raises UserError if the corpus has no annotation `label`, a document does not have two
    sentences, or a label has no name."""
    path = source.corpus.path
    if not is_ready_made(source):
        raise UserError(
            f"{path}: the corpus has no annotation label; make a corpus of pairs with "
            "palm-ds prepare --format pairs"
        )
    sentences = source.last_sentences - source.first_sentences
    if (wrong := np.flatnonzero(sentences != 2)).size:
        number = int(source.documents[wrong[0]])
        raise UserError(
            f"{path}: document {number} ({source.corpus.document(number, ())[0]}) has "
            f"{sentences[wrong[0]]} sentences, but a pair has two; make the corpus with "
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


def labeled_pairs(source: CorpusSource, numbers: Mapping[str, int], where: str) -> np.ndarray:
    """`ready_made` pairs with classes in place of label numbers, given {label name: class}. Raises
    UserError, starting with `where`."""
    pairs = ready_made(source)
    pairs[:, 3] = classes_of_labels(source, numbers, where)[pairs[:, 3]]
    return pairs


def label_names(source: CorpusSource) -> list[str]:
    """The names of a corpus's labels, in the order of their numbers."""
    names = source.corpus.manifest.options.get("labels")
    if not names:
        raise UserError(
            f"{source.corpus.path}: the manifest has no label names; make the corpus with "
            f"palm-ds prepare --format pairs"
        )
    return [str(name) for name in names]


def classes_of_labels(source: CorpusSource, numbers: Mapping[str, int], where: str) -> np.ndarray:
    """(labels,) int64: the class of every label of the corpus, given {name: class}.

    Raises UserError, starting with `where`, for labels that are not in `numbers`."""
    names = label_names(source)
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise UserError(
            f"{where}: {source.corpus.path} has {len(unknown)} of {len(names)} labels that are not "
            f"classes ({_some(unknown)}); known: {_some(list(numbers))}"
        )
    return np.array([numbers[name] for name in names], np.int64)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def fit(
    first: np.ndarray, second: np.ndarray, most: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Token counts of two texts after truncation to `most` tokens together: the longer text is cut
    first, or the second if both are equally long (BERT's truncation, vectorized).

    >>> fit(np.array([3, 9]), np.array([9, 9]), 11)
    (array([3, 6]), array([8, 5]))
    """
    total = first + second
    half = -(-np.asarray(most) // 2)
    kept = np.where(total > most, np.minimum(first, np.maximum(most - second, half)), first)
    return kept, np.minimum(second, most - kept)


def lay_out(
    pairs: np.ndarray, source: CorpusSource, max_length: int, seconds: np.ndarray | None = None
) -> np.ndarray:
    """Layouts of ready-made pairs (n, 4) `(start, start of the second, end, class)`, with the
    fields of `arrange_pair` and the class as `label`. They have no spare tokens. `seconds` (n, 2):
    start and end of other second texts.

    Pairs too long for the room lose the ends of their texts, the longer text first."""
    start, second, end, label = pairs.T
    first_tokens = second - start
    second, end = (second, end) if seconds is None else seconds.T
    special = source.vocabulary.around(2)
    first_tokens, second_tokens = fit(first_tokens, end - second, max_length - special)
    length = first_tokens + second_tokens + special
    return layouts(
        length,
        first=start,
        first_tokens=first_tokens,
        second=second,
        second_tokens=second_tokens,
        label=label,
    )


def arrange_pair(layout: np.void, source: CorpusSource, *, swap: bool = False) -> Example:
    """[CLS] first [SEP] second [SEP] of a layout with the start of either text (`first`, `second`),
    the tokens of the first (`first_tokens`) and the most tokens of the second (`second_tokens`).

    With more room than that, the second text gets longer, then the first starts earlier."""
    length, start, tokens = (int(layout[x]) for x in ("length", "first", "first_tokens"))
    second, most = int(layout["second"]), int(layout["second_tokens"])
    room = length - source.vocabulary.around(2) - tokens
    second_tokens = min(room, most)
    earlier = room - second_tokens
    pieces = [
        source.read(start - earlier, start + tokens),
        source.read(second, second + second_tokens),
    ]
    return build_input(pieces[::-1] if swap else pieces, source.vocabulary, range(2))


def anchors(source: CorpusSource) -> np.ndarray:
    """(sentences, 3) int64: every sentence with the sentences [first, last) of its document."""
    count = source.last_sentences - source.first_sentences
    first = np.repeat(source.first_sentences, count)
    last = np.repeat(source.last_sentences, count)
    anchor = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first
    return np.column_stack([anchor, first, last])


def elsewhere(
    own: np.ndarray, eligible: np.ndarray, draw: np.ndarray, source: CorpusSource
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) a random sentence of any other document, all equally likely, and its document.

    own: (n,) documents to exclude; eligible: (documents,) number of leading sentences of each
    document that may be drawn; draw: (n,) in [0, 1). Some other document must have one."""
    upto = np.cumsum(eligible)
    skipped = upto[own] - eligible[own]
    pick = (draw * (upto[-1] - eligible[own])).astype(np.int64)
    pick = np.where(pick < skipped, pick, pick + eligible[own])
    document = np.searchsorted(upto, pick, side="right")
    within = pick - (upto[document] - eligible[document])
    return source.first_sentences[document] + within, document


def balance(classes: np.ndarray, repeat: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """A class-balanced epoch: an order of the pairs, and (items, 2) low, high: an item covers
    order[low:high], of which `pick` draws one pair.

    classes: (pairs,) int64. Every class that occurs gets as many items as the most common one has
    pairs, but at most `repeat` times as many as the rarest one has. A pair of a rare class occurs
    up to `repeat` times per epoch; the pairs of a common class are distributed over its items, so
    that none occurs twice in an epoch and all occur over the epochs. Items alternate between the
    classes, so that any prefix of the epoch is balanced too."""
    counts = np.bincount(classes)
    used = counts > 0
    items = _items_of_class(counts[used], repeat)
    items = min(items, _MAX_ITEMS // max(used.sum(), 1))  # an epoch need not cover the corpus
    return _distribute(classes, np.where(used, items, 0), key)


def _items_of_class(counts: np.ndarray, repeat: int) -> int:
    """The items of each class, given the pairs of each."""
    return min(counts.max(), repeat * counts.min()) if len(counts) else 0


def item_rates(counts: np.ndarray, repeat: int, least: int = 1) -> np.ndarray:
    """(classes,) items per pair in a large corpus, given a sample's (classes,) counts of pairs. 0
    for classes with fewer than `least`."""
    used = counts >= least
    return np.where(used, _items_of_class(counts[used], repeat) / np.maximum(counts, 1), 0.0)


def balance_blocks(
    classes: np.ndarray, blocks: np.ndarray, rates: np.ndarray, key: int
) -> tuple[np.ndarray, np.ndarray]:
    """`balance` for a window of a large corpus: the number of items of a class depends only on the
    pairs of each block, `blocks` (pairs,), and on the class's rate, rounded at random."""
    numbers, place = np.unique(blocks, return_inverse=True)
    pairs = np.zeros((len(numbers), len(rates)))
    np.add.at(pairs, (place, classes), 1)
    draw = keyed_uniform(derive_key(key, "blocks"), numbers, len(rates))
    wanted = (pairs * rates + draw).astype(np.int64).sum(0)
    return _distribute(classes, wanted, key)


def _distribute(classes: np.ndarray, wanted: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:
    """An order of the pairs, and the items: `wanted` (classes,) of each class, in turn."""
    order = np.lexsort([keyed_bits(key, np.arange(len(classes))), classes])
    counts = np.bincount(classes, minlength=len(wanted))
    label = np.repeat(np.arange(len(wanted)), wanted)
    turn = np.arange(len(label)) - (np.cumsum(wanted) - wanted)[label]
    pairs, items, offset = counts[label], wanted[label], (np.cumsum(counts) - counts)[label]
    low = np.where(pairs >= items, turn * pairs // items, turn % np.maximum(pairs, 1))
    high = np.where(pairs >= items, (turn + 1) * pairs // items, low + 1)
    table = np.column_stack([offset + low, offset + high])
    return order, table[np.argsort(turn, kind="stable")]


def pick(items: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """(n,) places in the order of `balance`: one per item, chosen by a number in [0, 1)."""
    low, high = items[:, 0], items[:, 1]
    return low + (uniform * (high - low)).astype(np.int64)
