"""Is this dialogue real, or was one of its turns replaced? (ERNIE 1.0, section 3.3)

    [CLS] How old are you? [SEP] Eight. [SEP] And your home? [SEP]      real: 1, fake: 0
      0     0   0   0  0     0     1      1     0   0    0      0       roles in place of segments

An example is a window of consecutive turns of a dialogue; the speakers' roles (query 0, response 1)
come from the data, so that windows are QRQ, QRR, QQR and so on. In half of them a random turn is
replaced by a turn of the same role from another dialogue. The task group
`dialogue_language_model + knowledge_masking` also masks words, predicted from the whole dialogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.pretrain.shared.predictions import ClassPrediction

FAKE, REAL = range(2)


@dataclass(frozen=True, kw_only=True)
class DialogueLanguageModel(ClassPrediction):
    turns: Annotated[int, Field(ge=2)] = 3
    """Number of consecutive turns in an example; a shorter dialogue of at least two is used
    whole."""
    roles: PositiveInt = 2
    """Number of distinct roles (the backbone needs as many token types); further speakers of a
    dialogue get the last role."""

    labels = ("fake", "real")
    num_uniforms = 3

    def annotations(self) -> tuple[str, ...]:
        return ("role",)

    def check(self, source: CorpusSource, max_length: int) -> None:
        if max_length < (needed := source.vocabulary.around(self.turns) + self.turns):
            raise UserError(
                f"{self.where}.turns: {self.turns} turns need rows of {needed} "
                f"tokens or more, not {max_length}"
            )
        if (source.last_sentences - source.first_sentences >= 2).sum() < 2:
            raise UserError(
                f"{self.where}: {source.corpus.path} has fewer than two dialogues of two "
                f"turns or more in this split; add dialogues or lower `held_out`"
            )

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(windows, 4): turns [begin, end) out of a dialogue's turns [first, last)."""
        many = source.last_sentences - source.first_sentences
        windows = np.where(many >= 2, np.maximum(many - self.turns + 1, 1), 0)
        number = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
        first, last = (
            np.repeat(each, windows) for each in (source.first_sentences, source.last_sentences)
        )
        begin = first + number
        return np.column_stack([begin, np.minimum(begin + self.turns, last), first, last])

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        """`label`, and per turn (turns,) its `starts`, `tokens` (0: no such turn) and `roles`.
        Windows have no spare tokens."""
        begin, end, _, _ = items.T
        turn = begin[:, None] + np.arange(self.turns)
        exists = turn < end[:, None]
        turn = np.where(exists, turn, begin[:, None])
        roles = self._roles(turn, source)
        label = np.where(uniform[:, 0] < 0.5, FAKE, REAL)
        fake = np.flatnonzero(label == FAKE)
        at = (uniform[fake, 1] * (end - begin)[fake]).astype(np.int64)
        turn[fake, at] = self._from_elsewhere(
            items[fake, 2:], roles[fake, at], uniform[fake, 2], source
        )
        starts = source.corpus.sentence_starts
        tokens = np.where(exists, starts[turn + 1] - starts[turn], 0)
        special = source.vocabulary.around(exists.sum(1))
        tokens = cut_longest(tokens, max_length - special)
        length = special + tokens.sum(1)
        return layouts(length, label=label, starts=starts[turn], tokens=tokens, roles=roles)

    def _roles(self, turns: np.ndarray, source: CorpusSource) -> np.ndarray:
        """The role of each turn, the same shape."""
        roles = source.corpus.take(source.corpus.sentence_starts[turns], "role")
        return np.minimum(roles.astype(np.int64), self.roles - 1)

    def _from_elsewhere(
        self, own: np.ndarray, roles: np.ndarray, draw: np.ndarray, source: CorpusSource
    ) -> np.ndarray:
        """(n,) random turns outside the own dialogue [first, last), uniform over those with the
        role; over all turns if no other dialogue has the role."""
        every, by_role = source.cached(
            f"turns of {self.roles} roles", lambda: self._by_role(source)
        )
        drawn = _draw_outside(every, own, draw)
        for role, turns in enumerate(by_role):
            here = np.flatnonzero(roles == role)
            outside = _draw_outside(turns, own[here], draw[here])
            drawn[here] = np.where(outside >= 0, outside, drawn[here])
        return drawn

    def _by_role(self, source: CorpusSource) -> tuple[np.ndarray, list[np.ndarray]]:
        """All turns of the source, and the turns of each role, ascending."""
        bounds = zip(source.first_sentences, source.last_sentences, strict=True)
        every = np.concatenate([np.arange(first, last) for first, last in bounds])
        roles = self._roles(every, source)
        return every, [every[roles == role] for role in range(self.roles)]

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        starts, tokens, roles = layout["starts"], layout["tokens"], layout["roles"]
        present = np.flatnonzero(tokens)
        pieces = [source.read(starts[i], starts[i] + tokens[i]) for i in present]
        example = build_input(pieces, source.vocabulary, roles[present].tolist())
        example.labels[self.name] = np.array([0]), np.array([layout["label"]])
        return example

    @property
    def segments(self) -> int:  # type: ignore[override]
        return self.roles


def _draw_outside(values: np.ndarray, own: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """(n,) a random one of the ascending `values` outside [first, last) of each row of `own`; -1:
    there is none."""
    low, high = np.searchsorted(values, own).T
    others = len(values) - (high - low)
    pick = (draw * others).astype(np.int64)
    pick = np.where(pick < low, pick, pick + high - low)
    padded = np.append(values, -1)
    return padded[np.where(others > 0, pick, len(values))]


def cut_longest(tokens: np.ndarray, most: np.ndarray) -> np.ndarray:
    """(n, turns) token counts after truncating each row to `most` (n,) tokens: the longest turn is
    cut first, the later of equally long ones. No turn is cut to 0 while `most` allows one each."""
    low, high = np.zeros(len(tokens), np.int64), np.full(len(tokens), tokens.max(initial=0))
    while (low < high).any():  # the largest cap under which the row fits
        middle = (low + high + 1) // 2
        fits = np.minimum(tokens, middle[:, None]).sum(1) <= most
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    kept = np.minimum(tokens, low[:, None])
    longer = tokens > kept
    return kept + (longer & (np.cumsum(longer, 1) <= (most - kept.sum(1))[:, None]))
