"""Minimal pairs scored by a masked language model, which should prefer the good sentence.

    unmasked   the mean loss of all tokens, [CLS] and [SEP] too, that the model reads as they are:
               one pass a sentence (holistic scoring; Huebner et al. 2021, BabyBERTa and Zorro)
    masked     the summed loss of the tokens, each masked in an input of its own: the negative
               pseudo-log-likelihood (Salazar et al. 2020)

A head that predicts a token at the place before it is read there, of tokens alone, as it knows no
special ones. One that reads from left to right has a loss of its own for a sentence, unmasked: the
sum, the negative log-likelihood.

    sentences ──inputs──> packed rows ──logits──> loss of each input ──sum──> loss of each sentence

Sentences of the same tokens are read once, so that a pair of them is a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.data.reader.minimal_pairs import MinimalPair, Paradigm
from palm_ds.data.stream.packing import micro_batches, pack
from palm_ds.data.tasks.example import Example, build_input, collate
from palm_ds.model.heads.outputs import Reading
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import causal
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.text.tokens import SpecialTokens, TokenSpan

PairScore: TypeAlias = Literal["unmasked", "masked"]
Logits: TypeAlias = Callable[[Batch], torch.Tensor | None]
"""The logits (labels, vocabulary) of a batch; None if it has no labels."""
MOST_LOGITS = 1 << 28
"""Of a batch: a gigabyte in fp32."""


def pair_accuracy(good: np.ndarray, bad: np.ndarray) -> float:
    """Fraction of the pairs whose good sentence has the lower loss, given (pairs,) losses. A tie
    counts half; NaN if a loss is."""
    right = np.where(good == bad, 0.5, good < bad)
    return float(np.where(np.isnan(good) | np.isnan(bad), np.nan, right).mean())


class ParadigmScore(NamedTuple):
    """The accuracy on the pairs of a paradigm."""

    pairs: int
    accuracy: float


@dataclass(frozen=True)
class PairScores:
    """Accuracies of a model on minimal pairs."""

    paradigms: Mapping[str, ParadigmScore]
    loss: float
    """Mean loss of the good sentences."""

    @property
    def mean(self) -> float:
        """The mean accuracy over paradigms."""
        return float(np.mean([paradigm.accuracy for paradigm in self.paradigms.values()]))

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return sum(paradigm.pairs for paradigm in self.paradigms.values())

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        paradigms = {name: paradigm._asdict() for name, paradigm in self.paradigms.items()}
        return {"mean": self.mean, "pairs": self.pairs, "paradigms": paradigms}


@dataclass(frozen=True, kw_only=True)
class PairSet:
    """Minimal pairs as inputs of a model."""

    task: str
    """The task whose masked-LM head predicts, and its row of the task embedding."""
    task_id: int
    paradigms: Mapping[str, np.ndarray]
    """{name: (pairs, 2) numbers of the good and the bad sentence}"""
    sentences: Sequence[np.ndarray]
    """The token ids of each different sentence, without special tokens."""
    vocabulary: SpecialTokens
    score: PairScore = "unmasked"
    reading: Reading = "masked"
    """Where the head predicts a token."""

    @property
    def longest(self) -> int:
        """Tokens of the longest input."""
        return int(self._lengths.max())

    @cached_property
    def _lengths(self) -> np.ndarray:
        """(sentences,) with special tokens."""
        tokens = np.array([len(ids) for ids in self.sentences])
        return tokens + self.vocabulary.around(1)

    @cached_property
    def _inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """(inputs,) the sentence of each and the position of its mask, 0 if there is none."""
        numbers = np.arange(len(self.sentences))
        if self.score == "unmasked":
            return numbers, np.zeros_like(numbers)
        tokens = [len(ids) for ids in self.sentences]
        return np.repeat(numbers, tokens), np.concatenate([np.arange(n) + 1 for n in tokens])

    def losses(
        self,
        logits: Logits,
        *,
        length: int,
        rows: int,
        rank: int = 0,
        world: int = 1,
        done: Callable[[int, int], None] = lambda inputs, of: None,
    ) -> np.ndarray:
        """(inputs,) losses of this process's share of the inputs, 0 of the others: `rows` packed
        rows of `length` tokens in each call of `logits`, of which all processes make equally many.
        `done` gets the number of inputs so far, and of all."""
        sums, count = np.zeros(len(self._inputs[0])), 0
        for numbers, batch in self._batches(length, rows, rank, world):
            scores = logits(batch)
            if numbers and scores is not None:
                counts = self._labels(numbers)
                means = _means(scores, batch.labels[self.task][1], counts)
                sums[numbers] = means * counts if self.reading == "causal" else means
            count += len(numbers)
            done(count, len(sums))
        return sums

    def scores(self, losses: np.ndarray) -> PairScores:
        """The accuracies, given the (inputs,) losses of all processes."""
        count = len(self.sentences)
        of_sentence = np.bincount(self._inputs[0], weights=losses, minlength=count)
        pairs = {name: of_sentence[numbers] for name, numbers in self.paradigms.items()}
        return PairScores(
            {
                name: ParadigmScore(len(pair), pair_accuracy(pair[:, 0], pair[:, 1]))
                for name, pair in pairs.items()
            },
            float(np.concatenate([pair[:, 0] for pair in pairs.values()]).mean()),
        )

    def _labels(self, numbers: Sequence[int]) -> np.ndarray:
        """(len(numbers),) the labels of these inputs."""
        lengths = self._lengths[self._inputs[0][numbers]]
        if self.score == "masked":
            return np.ones_like(lengths)
        return lengths if self.reading == "masked" else lengths - self.vocabulary.around(1)

    def _batches(
        self, length: int, rows: int, rank: int, world: int
    ) -> Iterator[tuple[list[int], Batch]]:
        """This process's batches and the inputs in them, in order. All processes get equally many;
        the last ones may have empty rows."""
        packed = pack(self._lengths[self._inputs[0]], length)
        for part in micro_batches(packed, size=rows, rank=rank, world=world):
            built = [[(self._example(n), self.task_id) for n in row] for row in part]
            batch = collate(built, length=length, pad=self.vocabulary.pad)
            yield [n for row in part for n in row], batch

    def _example(self, number: int) -> Example:
        sentence, mask = (side[number] for side in self._inputs)
        example = build_input([TokenSpan(0, self.sentences[sentence])], self.vocabulary)
        words = np.flatnonzero(example.source_offsets >= 0)
        whole = np.arange(len(example)) if self.reading == "masked" else words
        at = np.array([mask]) if mask else whole
        example.labels[self.task] = at - (self.reading != "masked"), example.unmasked_ids[at]
        if self.reading == "causal":
            example.visibility = causal(len(example))
        if mask:
            example.input_ids[mask] = self.vocabulary.mask
        return example


def _means(scores: torch.Tensor, targets: torch.Tensor, counts: np.ndarray) -> np.ndarray:
    """(inputs,) the mean loss of each input, given logits (labels, vocabulary), targets (labels,)
    and the number of labels of each input."""
    losses = F.cross_entropy(scores.float(), targets.to(scores.device), reduction="none")
    return np.add.reduceat(losses.double().cpu().numpy(), np.cumsum(counts) - counts) / counts


def rows_within_memory(rows: int, length: int, vocabulary: int) -> int:
    """At most `rows` rows of `length` tokens, fewer where the logits would take much memory."""
    return max(1, min(rows, MOST_LOGITS // (length * vocabulary)))


def pair_set(
    paradigms: Sequence[Paradigm],
    tokenizer: Tokenizer,
    *,
    task: str,
    task_id: int,
    most: int,
    score: PairScore = "unmasked",
    reading: Reading = "masked",
) -> PairSet:
    """The pairs as tokens. Raises UserError for a sentence of more than `most` tokens, special ones
    included."""
    if (score, reading) == ("masked", "causal"):
        raise UserError(
            f"{task} reads from left to right, so no token is masked; score pairs unmasked"
        )
    numbers: dict[bytes, int] = {}
    sentences: list[np.ndarray] = []
    scores: dict[str, np.ndarray] = {}
    room = most - tokenizer.vocabulary.around(1)
    for paradigm in paradigms:
        texts = [text for pair in paradigm.pairs for text in (pair.good, pair.bad)]
        own = []
        for place, (ids, _) in enumerate(tokenizer.encode_texts(texts)):
            _check_length(paradigm.pairs[place // 2], len(ids), room)
            number = numbers.setdefault(ids.tobytes(), len(sentences))
            if number == len(sentences):
                sentences.append(ids)
            own.append(number)
        scores[paradigm.name] = np.array(own).reshape(-1, 2)
    return PairSet(
        task=task,
        task_id=task_id,
        paradigms=scores,
        sentences=sentences,
        vocabulary=tokenizer.vocabulary,
        score=score,
        reading=reading,
    )


def _check_length(pair: MinimalPair, tokens: int, room: int) -> None:
    if not tokens:
        raise UserError(f"{pair.place}: a sentence without any token of the vocabulary")
    if tokens > room:
        raise UserError(
            f"{pair.place}: a sentence of {tokens} tokens; the model reads at most {room} here, "
            "without [CLS] and [SEP]"
        )
