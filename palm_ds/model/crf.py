"""A linear-chain conditional random field over the tags of a sentence, and the head that has one.

    score(tags) = start[tag 1] + the sum of emission[t, tag t]
                + the sum of step[tag t - 1, tag t] + end[tag T]

(Lafferty, McCallum & Pereira 2001.) `transitions` (tags + 2, tags) holds all that is not emission,
in Paddle's order: row 0 is start, row 1 is end, the others step from a tag to a tag.

Sentences of any length lie one after the other as rows, and `groups` says which row is of which:
0, 1, ..., ascending. They are laid side by side once; loops go over time, never over sentences.
All sums are in fp32. (How long the longest sentence is has to be known on the host: on a GPU that
waits for what was asked of it before, once a call.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.encoder import init_weights
from palm_ds.model.heads import Head, HeadOutput

_NEVER = -1e4  # the score of a transition that is not allowed


@dataclass(frozen=True)
class _Padded:
    """Where each row lies when sentences lie side by side, (time, sentence)."""

    time: torch.Tensor  # (n,)
    sentence: torch.Tensor  # (n,)
    lengths: torch.Tensor  # (sentences,)
    longest: int

    @property
    def there(self) -> torch.Tensor:
        """(longest, sentences, 1): whether there is a row."""
        times = torch.arange(self.longest, device=self.lengths.device)
        return (times[:, None] < self.lengths)[:, :, None]

    def side_by_side(self, rows: torch.Tensor) -> torch.Tensor:
        """(longest, sentences, any) of rows (n, any); 0 where there is none."""
        laid = rows.new_zeros(self.longest, len(self.lengths), rows.shape[1])
        return laid.index_put((self.time, self.sentence), rows)

    def reversed(self) -> _Padded:
        """The same sentences, their last rows first."""
        time = self.lengths[self.sentence] - 1 - self.time
        return _Padded(time, self.sentence, self.lengths, self.longest)


def _lying(groups: torch.Tensor) -> _Padded:
    lengths = torch.bincount(groups)
    firsts = lengths.cumsum(0) - lengths
    time = torch.arange(len(groups), device=groups.device) - firsts[groups]
    return _Padded(time, groups, lengths, int(lengths.max()))


def _sums(
    laid: torch.Tensor, start: torch.Tensor, step: torch.Tensor, there: torch.Tensor
) -> list[torch.Tensor]:
    """At each time (sentences, tags) the log of the sum, over all ways to get to a tag, of what
    they score; once a sentence is over, what it was at its end."""
    sums = [start + laid[0]]
    for now, real in zip(laid[1:], there[1:], strict=True):
        here = torch.logsumexp(sums[-1][:, :, None] + step, 1) + now
        sums.append(torch.where(real, here, sums[-1]))
    return sums


def crf_nll(
    emissions: torch.Tensor, transitions: torch.Tensor, tags: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """(sentences,) minus the log of the probability of each sentence's tags (n,), given emissions
    (n, tags)."""
    emissions, (start, end, step) = emissions.float(), _parts(transitions)
    lying = _lying(groups)
    sums = _sums(lying.side_by_side(emissions), start, step, lying.there)
    total = torch.logsumexp(sums[-1] + end, 1)
    first = lying.time == 0
    last = lying.time == lying.lengths[groups] - 1
    before = tags.roll(1)
    mine = emissions.gather(1, tags[:, None])[:, 0] + end[tags] * last
    mine = mine + torch.where(first, start[tags], step[before, tags])
    return total - torch.zeros_like(total).index_add(0, groups, mine)


@torch.no_grad()
def viterbi(
    emissions: torch.Tensor, transitions: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """(n,) the tags of the highest score of each sentence (Viterbi)."""
    start, end, step = _parts(transitions)
    lying = _lying(groups)
    laid, there = lying.side_by_side(emissions.float()), lying.there
    stay = torch.arange(laid.shape[2], device=laid.device)
    best, came = start + laid[0], []
    for now, real in zip(laid[1:], there[1:], strict=True):
        score, before = (best[:, :, None] + step).max(1)
        best = torch.where(real, score + now, best)
        came.append(torch.where(real, before, stay))
    tag = (best + end).argmax(1)  # (sentences,)
    path = [tag]
    for before in reversed(came):
        tag = before.gather(1, tag[:, None])[:, 0]
        path.append(tag)
    return torch.stack(path[::-1])[lying.time, groups]


@torch.no_grad()
def tag_log_probs(
    emissions: torch.Tensor, transitions: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """(n, tags) the log of each tag's probability at each row, whatever the others are."""
    emissions, (start, end, step) = emissions.float(), _parts(transitions)
    lying = _lying(groups)
    back = lying.reversed()
    sums = _sums(lying.side_by_side(emissions), start, step, lying.there)
    after = _sums(back.side_by_side(emissions), end, step.T, back.there)
    total = torch.logsumexp(sums[-1] + end, 1)
    ahead = torch.stack(sums)[lying.time, groups]
    return ahead + torch.stack(after)[back.time, groups] - emissions - total[groups, None]


def _parts(transitions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    start, end, step = transitions.float().split([1, 1, transitions.shape[1]])
    return start[0], end[0], step


class Crf(nn.Module):
    """The transitions; `allowed` (tags + 2, tags) says which of them the best tags may take. While
    learning, all count: what a scheme forbids is soon unlikely, and a sentence that was cut may
    begin with any tag."""

    allowed: torch.Tensor | None

    def __init__(self, tags: int, allowed: torch.Tensor | None = None):
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(tags + 2, tags))
        self.register_buffer("allowed", allowed, persistent=False)

    def forward(
        self, emissions: torch.Tensor, groups: torch.Tensor, tags: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tags (n,): losses and whether all of it was got right, each (sentences,). Of none: the
        best tags (n,) and the log of every tag's probability (n, tags).

        Both here, in one `forward`, since ZeRO 3 gathers parameters for that alone."""
        scores = self.transitions
        best = scores if self.allowed is None else scores.masked_fill(~self.allowed, _NEVER)
        found = viterbi(emissions, best, groups)
        if tags is None:
            return found, tag_log_probs(emissions, scores, groups)
        losses = crf_nll(emissions, scores, tags, groups)
        wrong = torch.zeros_like(losses).index_add(0, groups, (found != tags).float())
        return losses, wrong == 0


class CrfHead(Head):
    """Tags of a sentence together: a linear map, and a CRF over what it says. Counts sentences."""

    grouped = True

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
        self.classes, self.dropout = tags, dropout
        self.out = nn.Linear(hidden_size, tags)
        self.crf = Crf(tags, allowed)
        init_weights(self, init_range)

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        losses, right = self.crf(self.emissions(rows), groups, targets)
        return HeadOutput(losses.sum(), right.sum())

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """(n, 1 + tags): the number of the best tag, then the log of each tag's probability."""
        best, shares = self.crf(self.emissions(rows), groups)
        return torch.cat([best[:, None].float(), shares], 1)

    def emissions(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, tags)."""
        if self.dropout:
            rows = F.dropout(rows, self.dropout, self.training)
        return self.out(rows)
