"""Generates texts: greedy or beam search, or sampling, for a batch of prompts.

    decoder ──scores of the next token──> candidates ──beams──> hypotheses ──> the best per prompt
       ^                                                 |
       └──── the tokens chosen, and which to continue ───┘

Beam search is that of ERNIE-GEN's code: hypotheses of a prompt are ranked by
log p / ((5 + tokens) / 6)^alpha (Wu et al. 2016, 7), where the end token counts; finished ones keep
their place among the beams. Greedy search is a single beam.

A sampled token is a function of the seed, the prompt's number and the step: other prompts of the
batch do not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_uniform
from palm_ds.common.settings import PositiveShare, Settings


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(Settings):
    """Settings for generating texts."""

    max_tokens: NonNegativeInt = 0
    """Maximum tokens of a text, the end token included; 0: as many as the task's targets have."""
    min_tokens: NonNegativeInt = 0
    """Minimum tokens of a text, the end token not included."""
    beams: PositiveInt = 1
    """Hypotheses of beam search; 1: greedy."""
    length_penalty: float = 1.0
    """Exponent of ((5 + tokens) / 6), by which the log-probability of a hypothesis is divided; 0
    prefers short texts."""
    no_repeat_ngram: NonNegativeInt = 0
    """No n tokens occur twice in a text; 0: they may."""
    temperature: NonNegativeFloat = 0.0
    """Above 0: draw tokens, from probabilities to the power of 1 / temperature. 0: search."""
    top_k: NonNegativeInt = 0
    """When drawing: only from the k most probable tokens; 0: from all."""
    top_p: PositiveShare = 1.0
    """When drawing: only from the fewest tokens that have this probability together."""
    seed: int = 0
    """What the drawn tokens follow from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_tokens <= self.min_tokens:
            raise UserError(
                f"min_tokens: {self.min_tokens} must be below max_tokens, {self.max_tokens}"
            )
        if self.temperature and self.beams > 1:
            raise UserError(
                f"beams: {self.beams} with a temperature of {self.temperature}; tokens are either "
                "searched or drawn: set one of them"
            )
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise UserError("top_k and top_p: only with a temperature above 0, such as 1.0")


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Rules for the tokens that may follow."""

    end: int
    """The token that ends a text."""
    blocked: tuple[int, ...] = ()
    """Tokens that are never generated."""


class Generated(NamedTuple):
    """A generated text."""

    tokens: tuple[int, ...]
    """Without the end token."""
    score: float
    """Its log-probability, divided by the length penalty."""


class Decoder(Protocol):
    """Gives a search the scores of the next token (model/generation/cached_decoder.py)."""

    def widen(self, hypotheses: int) -> None:
        """Give each prompt that many hypotheses; before the first step."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores (hypotheses, vocabulary) of the token after `tokens` (hypotheses,)."""
        ...

    def select(self, hypotheses: torch.Tensor, prompts: torch.Tensor | None = None) -> None:
        """Continue with these hypotheses (n,) of these prompts (k,), by default of all."""


@dataclass
class _Beams:
    """The hypotheses of the prompts that are not done, (prompts, beams, ...)."""

    prompts: torch.Tensor  # (prompts,) their indices
    tokens: torch.Tensor  # (prompts, beams, steps)
    total: torch.Tensor  # (prompts, beams): the log-probability
    score: torch.Tensor  # (prompts, beams): the same, divided by the length penalty
    finished: torch.Tensor  # (prompts, beams) bool

    def take(self, index: torch.Tensor) -> _Beams:
        """Those of some prompts."""
        return _Beams(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@torch.inference_mode()
def generate(
    decoder: Decoder,
    begin: int,
    limits: Sequence[int],
    settings: DecodingSettings,
    rules: TokenRules,
    *,
    numbers: Sequence[int] = (),
    lockstep: bool = False,
    device: torch.device | str = "cpu",
) -> list[Generated]:
    """The best text for each prompt. `begin`: the token before a text; `limits`: most tokens of
    each; `numbers`: those of the prompts, for draws, by default their indices. `lockstep`: with as
    many steps, whatever the texts, as other processes with as many prompts (ZeRO 3)."""
    prompts, width, longest = len(limits), settings.beams, settings.max_tokens
    assert longest > 0, "the task says how many"
    most = torch.tensor(limits, device=device).clamp(max=longest)
    draws = _draws(settings, numbers or range(prompts), device)
    beams = _first(prompts, width, device)
    decoder.widen(width)
    last = torch.full((prompts * width,), begin, device=device)
    finished: dict[int, Generated] = {}
    for count in range(1, (longest if lockstep else int(most.max())) + 1):
        logits = decoder.step(last).float()
        allowed = _allowed(torch.log_softmax(logits, -1), beams, settings, rules)
        if settings.temperature:
            token = draw(allowed, settings, draws[beams.prompts, count - 1])
            parent = torch.zeros_like(token)[:, None]
            beams = _drawn(beams, allowed, token[:, None], count, settings, rules)
        else:
            parent, beams = _best(beams, allowed, count, settings, rules)
        done = _done(beams, count, limit := most[beams.prompts], settings)
        for place in done.nonzero().flatten().tolist():
            result = _result(beams, place, rules, cut=count >= int(limit[place]))
            finished.setdefault(int(beams.prompts[place]), result)
        if lockstep:
            done = torch.zeros_like(done)
        if done.all():
            break
        kept = (~done).nonzero().flatten()
        if width > 1 or len(kept) < len(done):
            hypotheses = (parent + width * torch.arange(len(done), device=device)[:, None])[kept]
            decoder.select(hypotheses.flatten(), kept if len(kept) < len(done) else None)
        beams = beams.take(kept)
        last = beams.tokens[:, :, -1].flatten()
    return [finished[prompt] for prompt in range(prompts)]


def _first(prompts: int, width: int, device: torch.device | str) -> _Beams:
    """One empty hypothesis for each prompt; the other beams are impossible until they are used."""
    total = torch.full((prompts, width), -torch.inf, device=device)
    total[:, 0] = 0.0
    return _Beams(
        prompts=torch.arange(prompts, device=device),
        tokens=torch.empty(prompts, width, 0, dtype=torch.int64, device=device),
        total=total,
        score=total.clone(),
        finished=torch.zeros_like(total, dtype=torch.bool),
    )


def length_penalty(tokens: int | torch.Tensor, alpha: float) -> float | torch.Tensor:
    """((5 + tokens) / 6)^alpha (Wu et al. 2016, equation 14)."""
    return ((5 + tokens) / 6) ** alpha


# ---- which tokens may follow ----


def _allowed(
    log_probs: torch.Tensor, beams: _Beams, settings: DecodingSettings, rules: TokenRules
) -> torch.Tensor:
    """(prompts, beams, vocabulary): the log-probabilities, -inf where a token must not follow."""
    scores = log_probs.view(*beams.total.shape, -1)
    steps = beams.tokens.shape[-1]
    if rules.blocked:
        scores[..., list(rules.blocked)] = -torch.inf
    if settings.no_repeat_ngram and steps >= settings.no_repeat_ngram:
        scores.masked_fill_(repeating(beams.tokens, settings.no_repeat_ngram, scores), -torch.inf)
    if steps < settings.min_tokens:
        scores[..., rules.end] = -torch.inf
    stuck = scores.amax(-1) == -torch.inf
    scores[..., rules.end] = torch.where(stuck, 0.0, scores[..., rules.end])
    return scores


def repeating(tokens: torch.Tensor, n: int, scores: torch.Tensor) -> torch.Tensor:
    """(..., vocabulary) bool, shaped as `scores`: the tokens with which the last n tokens would be
    a repetition, after tokens (..., steps)."""
    grams = tokens.unfold(-1, n, 1)  # (..., steps - n + 1, n)
    last = tokens[..., None, tokens.shape[-1] - n + 1 :]
    again = (grams[..., :-1] == last).all(-1)
    banned = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, device=scores.device)
    banned.scatter_(-1, torch.where(again, grams[..., -1], scores.shape[-1]), 1.0)
    return banned[..., :-1] > 0


# ---- search ----


def _best(
    beams: _Beams,
    log_probs: torch.Tensor,
    count: int,
    settings: DecodingSettings,
    rules: TokenRules,
) -> tuple[torch.Tensor, _Beams]:
    """The best continuations, and (prompts, beams) which beam each of them continues."""
    prompts, width, vocabulary = log_probs.shape
    total = beams.total[..., None] + log_probs
    score = total / length_penalty(count, settings.length_penalty)
    over = beams.finished[..., None]
    score = score.masked_fill(over, -torch.inf)
    score[..., rules.end] = torch.where(beams.finished, beams.score, score[..., rules.end])
    best, index = score.flatten(1).topk(width)
    parent, token = index // vocabulary, index % vocabulary
    was_finished = beams.finished.gather(1, parent)
    new_total = total.flatten(1).gather(1, index)
    return parent, _Beams(
        prompts=beams.prompts,
        tokens=_extended(beams.tokens, parent, token),
        total=torch.where(was_finished, beams.total.gather(1, parent), new_total),
        score=best,
        finished=was_finished | (token == rules.end) | (best == -torch.inf),
    )


def _extended(tokens: torch.Tensor, parent: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """(prompts, beams, steps + 1)"""
    before = tokens.gather(1, parent[..., None].expand(*parent.shape, tokens.shape[-1]))
    return torch.cat([before, token[..., None]], -1)


def _done(
    beams: _Beams, count: int, limits: torch.Tensor, settings: DecodingSettings
) -> torch.Tensor:
    """(prompts,) bool: prompts at their limit, and those whose best text is finished and cannot be
    overtaken: a hypothesis gets no more probable, and at most as long as the limit."""
    alpha = settings.length_penalty
    longest = limits if alpha > 0 else torch.full_like(limits, count + 1)
    reachable = beams.total / torch.as_tensor(length_penalty(longest, alpha))[:, None]
    open_best = reachable.masked_fill(beams.finished, -torch.inf).amax(1)
    finished_best = beams.score.masked_fill(~beams.finished, -torch.inf).amax(1)
    return (count >= limits) | (finished_best >= open_best)


def _result(beams: _Beams, place: int, rules: TokenRules, *, cut: bool) -> Generated:
    """The best text of a prompt; `cut`: also one without its end, at the limit. A length penalty
    below 0 gives an open text a higher score than it will have at its end."""
    over = beams.finished[place] | cut
    best = int(beams.score[place].masked_fill(~over, -torch.inf).argmax())
    tokens = beams.tokens[place, best].tolist()
    end = tokens.index(rules.end) if rules.end in tokens else len(tokens)
    return Generated(tuple(tokens[:end]), float(beams.score[place, best]))


# ---- drawing ----


def _draws(
    settings: DecodingSettings, numbers: Sequence[int], device: torch.device | str
) -> torch.Tensor:
    """(prompts, steps) float64 in [0, 1)."""
    if not settings.temperature:
        return torch.empty(0)
    key = derive_key("generate", settings.seed)
    return torch.from_numpy(
        keyed_uniform(key, np.asarray(numbers, np.int64), settings.max_tokens)
    ).to(device)


def draw(
    log_probs: torch.Tensor, settings: DecodingSettings, uniform: torch.Tensor
) -> torch.Tensor:
    """(prompts,) a token for each, drawn from log_probs (prompts, 1, vocabulary) with the uniform
    number (prompts,) of each."""
    probs, order = kept_probabilities(log_probs[:, 0], settings)
    summed = probs.cumsum(-1)
    place = (summed <= uniform[:, None] * summed[:, -1:]).sum(-1, keepdim=True)
    last = (probs > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(place, last)).flatten()


def kept_probabilities(
    log_probs: torch.Tensor, settings: DecodingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(prompts, vocabulary) float64, in descending order: the probabilities to draw from, 0 beyond
    `top_k` and `top_p`; and the tokens they belong to."""
    scaled = log_probs.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / settings.temperature
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if settings.top_k:
        ordered[:, settings.top_k :] = -torch.inf
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    return probs.masked_fill(before >= settings.top_p, 0.0), order


def _drawn(
    beams: _Beams,
    log_probs: torch.Tensor,
    token: torch.Tensor,
    count: int,
    settings: DecodingSettings,
    rules: TokenRules,
) -> _Beams:
    """Continued by the drawn tokens (prompts, 1)."""
    total = beams.total + log_probs.gather(-1, token[..., None])[..., 0]
    return _Beams(
        prompts=beams.prompts,
        tokens=torch.cat([beams.tokens, token[..., None]], -1),
        total=total,
        score=total / length_penalty(count, settings.length_penalty),
        finished=token == rules.end,
    )
