"""A linear-chain conditional random field over the tags of a sentence (Lafferty, McCallum & Pereira
2001), and its head.

    score(tags) = start[tag 1] + sum over t of emission[t, tag t]
                + sum over t of step[tag t - 1, tag t] + end[tag T]

`transitions` (tags + 2, tags) holds everything but the emissions, in Paddle's order: row 0 is
start, row 1 is end, the others step from one tag to another.

Sentences of any length are concatenated as rows; `groups` numbers the sentence of each row,
ascending from 0. They are padded to (time, sentence) once; loops go over time, never over
sentences. All sums are in fp32. The length of the longest sentence must be known on the host, which
on a GPU synchronizes once per call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from palm_ds.model.encoder.encoder import init_weights
from palm_ds.model.heads.heads import Head, HeadOutput

FORBIDDEN = -1e4  # score of a transition that is not allowed


@dataclass(frozen=True)
class _Padding:
    """The place (time, sentence) of each row when sentences are padded side by side."""

    time: torch.Tensor  # (n,)
    sentence: torch.Tensor  # (n,)
    lengths: torch.Tensor  # (sentences,)
    longest: int

    @property
    def mask(self) -> torch.Tensor:
        """(longest, sentences, 1) bool: False is padding."""
        times = torch.arange(self.longest, device=self.lengths.device)
        return (times[:, None] < self.lengths)[:, :, None]

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (n, any) as (longest, sentences, any), padded with 0."""
        padded = rows.new_zeros(self.longest, len(self.lengths), rows.shape[1])
        return padded.index_put((self.time, self.sentence), rows)

    def reversed(self) -> _Padding:
        """The same sentences with their rows in reverse order."""
        time = self.lengths[self.sentence] - 1 - self.time
        return _Padding(time, self.sentence, self.lengths, self.longest)


def _padding(groups: torch.Tensor) -> _Padding:
    lengths = torch.bincount(groups)
    firsts = lengths.cumsum(0) - lengths
    time = torch.arange(len(groups), device=groups.device) - firsts[groups]
    return _Padding(time, groups, lengths, int(lengths.max()))


def _forward_sums(
    padded: torch.Tensor, start: torch.Tensor, step: torch.Tensor, mask: torch.Tensor
) -> list[torch.Tensor]:
    """The forward algorithm: at each time, (sentences, tags), the log-sum-exp of the scores of all
    paths to a tag; after the end of a sentence, its last value."""
    sums = [start + padded[0]]
    for emissions, real in zip(padded[1:], mask[1:], strict=True):
        extended = torch.logsumexp(sums[-1][:, :, None] + step, 1) + emissions
        sums.append(torch.where(real, extended, sums[-1]))
    return sums


def crf_nll(
    emissions: torch.Tensor, transitions: torch.Tensor, tags: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """The negative log-likelihood (sentences,) of each sentence's tags (n,), given emissions
    (n, tags)."""
    emissions, (start, end, step) = emissions.float(), _parts(transitions)
    padding = _padding(groups)
    sums = _forward_sums(padding.pad(emissions), start, step, padding.mask)
    total = torch.logsumexp(sums[-1] + end, 1)
    first = padding.time == 0
    last = padding.time == padding.lengths[groups] - 1
    previous = tags.roll(1)
    score = emissions.gather(1, tags[:, None])[:, 0] + end[tags] * last
    score = score + torch.where(first, start[tags], step[previous, tags])
    return total - torch.zeros_like(total).index_add(0, groups, score)


@torch.no_grad()
def viterbi(
    emissions: torch.Tensor, transitions: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """The highest-scoring tags (n,) of each sentence (Viterbi)."""
    start, end, step = _parts(transitions)
    padding = _padding(groups)
    padded, mask = padding.pad(emissions.float()), padding.mask
    same = torch.arange(padded.shape[2], device=padded.device)
    best, pointers = start + padded[0], []
    for now, real in zip(padded[1:], mask[1:], strict=True):
        score, previous = (best[:, :, None] + step).max(1)
        best = torch.where(real, score + now, best)
        pointers.append(torch.where(real, previous, same))
    tag = (best + end).argmax(1)  # (sentences,)
    path = [tag]
    for previous in reversed(pointers):
        tag = previous.gather(1, tag[:, None])[:, 0]
        path.append(tag)
    return torch.stack(path[::-1])[padding.time, groups]


def tag_log_probs(
    emissions: torch.Tensor, transitions: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """The log of each tag's marginal probability at each row, (n, tags): the forward-backward
    algorithm."""
    emissions, (start, end, step) = emissions.float(), _parts(transitions)
    padding = _padding(groups)
    backward = padding.reversed()
    sums = _forward_sums(padding.pad(emissions), start, step, padding.mask)
    after = _forward_sums(backward.pad(emissions), end, step.T, backward.mask)
    total = torch.logsumexp(sums[-1] + end, 1)
    before = torch.stack(sums)[padding.time, groups]
    return before + torch.stack(after)[backward.time, groups] - emissions - total[groups, None]


def _parts(transitions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    start, end, step = transitions.float().split([1, 1, transitions.shape[1]])
    return start[0], end[0], step


class CRF(nn.Module):
    """The transitions. `allowed` (tags + 2, tags) restricts decoding only: training learns that
    forbidden transitions are unlikely, and a truncated sentence may begin with any tag."""

    allowed: torch.Tensor | None

    def __init__(self, tags: int, allowed: torch.Tensor | None = None):
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(tags + 2, tags))
        self.register_buffer("allowed", allowed, persistent=False)

    def forward(
        self, emissions: torch.Tensor, groups: torch.Tensor, tags: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With tags (n,): the loss of each sentence and whether it is entirely correct, each
        (sentences,). Without: the best tags (n,) and the log-probability of every tag (n, tags).

        Both are in one `forward`, because ZeRO 3 gathers parameters for `forward` only."""
        scores = self.transitions
        decoding = scores if self.allowed is None else scores.masked_fill(~self.allowed, FORBIDDEN)
        best = viterbi(emissions, decoding, groups)
        if tags is None:
            return best, tag_log_probs(emissions, scores, groups)
        losses = crf_nll(emissions, scores, tags, groups)
        errors = torch.zeros_like(losses).index_add(0, groups, (best != tags).float())
        return losses, errors == 0


class CRFHead(Head):
    """Tags a sentence: a linear map and a CRF over its output. Counts sentences."""

    grouped = True
    classifies = True
    soft = "classes"  # of the log-probability of each tag

    def __init__(
        self,
        hidden_size: int,
        tags: int,
        *,
        dropout: float = 0.0,
        allowed: torch.Tensor | None = None,
        init_range: float = 0.02,
    ):
        super().__init__()
        self.classes, self.input_dropout = tags, dropout
        self.out = nn.Linear(hidden_size, tags)
        self.crf = CRF(tags, allowed)
        init_weights(self, init_range, truncated=False)

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        losses, right = self.crf(self.emissions(rows), groups, targets)
        return HeadOutput(losses.sum(), right.sum())

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """(n, 1 + tags): the number of the best tag, then the log-probability of each tag."""
        best, log_probs = self.crf(self.emissions(rows), groups)
        return torch.cat([best[:, None].float(), log_probs], 1)

    def emissions(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, tags)"""
        return self.out(rows)
