"""Prediction of segments of text, n-grams of a lexicon and single tokens (ERNIE-Gram: Xiao et al.
2021, arXiv 2010.12148, sections 3.2 to 3.4).

    the [M] sat on [M]        one place for each segment; what it was is one of tokens and n-grams
    [M1] [M2] [M1]            queries: each token of a segment, from a mask symbol of its own

In ids and in targets the n-gram k is -1 - k; after the n-grams of a lexicon come the mask symbols.
Their embeddings are rows of one table, which stands beside the token embeddings. That table, its
biases and the generator belong to pretraining alone: weights are written without them, and the head
is then one that predicts masked words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import (
    Head,
    HeadOutput,
    MaskedLMHead,
    further_loss,
    save_tied_words_once,
)
from palm_ds.model.heads.replaced_tokens import (
    KEY,
    TOKEN,
    Generator,
    ReplacedTokenHead,
    Sampled,
    SamplingHead,
    write_samples,
)
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.ops.keyed_sampling import keyed_samples
from palm_ds.model.ops.masked_lm_loss import masked_lm_loss

Numbers = TypeVar("Numbers", int, np.ndarray)
FINE, REPLACED = "fine", "replaced"
"""What further losses are about: the tokens of segments, and which segments were sampled."""


def ngram_id(number: Numbers) -> Numbers:
    """The id of an n-gram or mask symbol in a text, of its number: its own inverse."""
    return -1 - number


class NgramEmbedding(nn.Embedding):
    """Token embeddings with a table for n-grams and mask symbols, whose ids are below 0."""

    def __init__(self, words: nn.Embedding, rows: int):
        super().__init__(words.num_embeddings, words.embedding_dim, _weight=words.weight.detach())
        self.weight = words.weight
        self.ngrams = nn.Parameter(torch.empty(rows, words.embedding_dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., width) of ids (...,)."""
        words = F.embedding(input.clamp(min=0), self.weight)
        ngrams = F.embedding((-1 - input).clamp(min=0), self.ngrams)
        return torch.where(input.unsqueeze(-1) < 0, ngrams, words)


class NgramHead(MaskedLMHead):
    """Predicts the segment at a masked place, a token or an n-gram: -log p over both joined.

    Its further losses are those of the tokens of segments, at queries (`fine`), and, with a
    generator, of whether each token or n-gram of a text is the original one (`replaced`)."""

    def __init__(
        self, backbone: Encoder, *, ngrams: int, symbols: int, relation: NgramGenerator | None
    ):
        """`symbols`: mask symbols, of which there is one for each token of the longest segment; 0
        where there are no queries."""
        super().__init__(backbone)
        _add_ngrams(self, backbone, ngrams)
        self.generator = relation
        further: dict[str, Head] = {FINE: TokenView(self)} if symbols else {}
        if relation is not None:
            self.replaced = ReplacedTokenHead(backbone)
            further[REPLACED] = self.replaced
        self.further = further

    def forward(
        self,
        rows: torch.Tensor,
        targets: torch.Tensor,
        words_only: bool = False,
        *,
        temperature: float | None = None,
    ) -> Any:
        """`targets` (n,) int64; `words_only`: tokens, among tokens."""
        if words_only or temperature is not None:
            return super().forward(rows, targets, temperature=temperature)
        return HeadOutput(*_joined_loss(self, rows, targets))

    def replace_tokens(
        self, batch: Batch, tasks: Sequence[str]
    ) -> tuple[Batch, dict[str, HeadOutput]]:
        """The batch with sampled segments at masked places; see `write_samples`."""
        assert self.generator is not None
        names = {task: further_loss(task, REPLACED) for task in tasks}
        return write_samples(self.generator, batch, names)


class TokenView(Head):
    """An NgramHead that predicts tokens among tokens, without parameters of its own."""

    predicts_tokens = True

    def __init__(self, head: NgramHead):
        super().__init__()
        self._head = (head,)  # in a tuple, or it would become a submodule

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        return self._head[0](rows, targets, words_only=True)


class NgramSamplingHead(SamplingHead):
    """Predicts and samples segments, in the same call."""

    def __init__(self, encoder: Encoder, temperature: float, ngrams: int):
        super().__init__(encoder, temperature)
        _add_ngrams(self, encoder, ngrams)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> Any:
        """Returns a `Sampled`. `targets` (n, 2) int64."""
        loss = _joined_loss(self, rows, targets[:, TOKEN])
        embeddings, bias = _joined(self)
        drawn = keyed_samples(
            self.transform(rows), embeddings, bias, targets[:, KEY], self.temperature
        )
        ids = torch.where(drawn < self.classes, drawn, self.classes - 1 - drawn)
        return Sampled(*loss, ids)


class NgramGenerator(Generator):
    """Fills in segments. It shares the embeddings, those of n-grams included, and is not among the
    weights of a finished run."""

    written = False

    def __init__(
        self, config: EncoderConfig, backbone: Encoder, *, ngrams: int, temperature: float
    ):
        self.ngrams = ngrams
        super().__init__(config, backbone, temperature=temperature)

    def sampling_head(self, temperature: float) -> SamplingHead:
        return NgramSamplingHead(self.encoder, temperature, self.ngrams)


def extend_embeddings(backbone: Encoder, rows: int, where: str) -> None:
    """Give an encoder embeddings of `rows` n-grams and mask symbols, in place. Raises UserError,
    with `where`, if its token embeddings are not its own."""
    if type(backbone.word) is not nn.Embedding:
        raise UserError(
            f"{where}: another task has changed the token embeddings already, by n-grams of its "
            "own or embedding_sharing: gradient_disentangled; leave one of them out"
        )
    backbone.word = NgramEmbedding(backbone.word, rows)
    deviation = backbone.config.init_range
    nn.init.trunc_normal_(backbone.word.ngrams, std=deviation, a=-2 * deviation, b=2 * deviation)


def _add_ngrams(head: MaskedLMHead, encoder: Encoder, ngrams: int) -> None:
    """Register the table of an encoder's n-grams in a head, so that ZeRO 3 gathers it there too,
    and a bias for each."""
    assert isinstance(encoder.word, NgramEmbedding), "extend_embeddings comes first"
    head.tied_ngrams = encoder.word.ngrams
    head.ngram_bias = nn.Parameter(torch.zeros(ngrams))
    save_tied_words_once(head)


def _joined(head: MaskedLMHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Output embeddings and biases of tokens, then of n-grams."""
    own = head.get_parameter("ngram_bias")
    ngrams = head.get_parameter("tied_ngrams")[: len(own)]
    return torch.cat([head.output_embeddings, ngrams]), torch.cat([head.output_bias, own])


def _joined_loss(
    head: MaskedLMHead, rows: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    embeddings, bias = _joined(head)
    places = torch.where(targets < 0, head.classes - 1 - targets, targets)
    rows = head.transform(rows)
    return masked_lm_loss(rows, embeddings, bias, places, head.loss_kernel, head.compiled)


# ---- weights ----

_TABLE = "backbone.word.ngrams"
_HEAD = re.compile(r"heads\.([^.]+)\.ngram_bias")
_OWN = re.compile(r"heads\.([^.]+)\.(ngram_bias$|replaced\.|generator\.)")


def without_ngrams(names: Mapping[str, Any]) -> dict[str, Any]:
    """A model's parameters without those that belong to the pretraining with n-grams."""
    heads = {match[1] for name in names if (match := _HEAD.fullmatch(name))}
    return {
        name: value
        for name, value in names.items()
        if name != _TABLE and not ((match := _OWN.match(name)) and match[1] in heads)
    }
