"""Head that trains sparse vectors of texts by a masked-LM head (SPLADE): the InfoNCE and the
distillations of dense vectors, and a FLOPS loss that makes most of their numbers 0.

flops             the sum of squares of the mean vector (Paria et al. 2020, section 3.2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import QUERY, ROLE, ContrastiveHead, StepLosses
from palm_ds.model.heads.heads import MaskedLMHead


def flops(vectors: torch.Tensor) -> torch.Tensor:
    """The FLOPS loss of vectors (texts, vocabulary): about how many products a comparison takes."""
    return vectors.mean(0).square().sum()


@dataclass(frozen=True, kw_only=True)
class FlopsRegularizer:
    """Weights of the FLOPS losses of queries, and of the texts that they search."""

    queries: float
    documents: float
    warmup: float = 0.0
    """Share of a run over which both rise with the square of the steps (Formal et al. 2021)."""

    def loss(self, vectors: torch.Tensor, asks: torch.Tensor, progress: float) -> torch.Tensor:
        """Of the vectors of a step, where (texts,) `asks` are queries, after that share of the
        run."""
        scale = min(progress / self.warmup, 1.0) ** 2 if self.warmup else 1.0
        own = self.queries * flops(vectors[asks]) + self.documents * flops(vectors[~asks])
        return scale * own


class SpladeHead(MaskedLMHead):
    """A masked-LM head that is read as a vector of a text; its losses are over whole steps.

    Targets and groups are those of a ContrastiveHead. Each example's loss has the FLOPS losses
    added, so that their mean over the step does."""

    global_batch = True
    reads_texts = True
    sparse = True
    predicts_tokens = False
    soft = ""

    def __init__(
        self,
        backbone: Encoder,
        ranking: ContrastiveHead,
        regularizer: FlopsRegularizer,
        *,
        initial_bias: float = 0.0,
    ):
        super().__init__(backbone)
        self.ranking, self.regularizer, self.initial_bias = ranking, regularizer, initial_bias

    def shift_bias(self) -> None:
        """Add `initial_bias` to the bias of all words, once its initial weights are loaded."""
        if self.bias is not None:
            with torch.no_grad():
                self.bias += self.initial_bias

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return self.ranking.dummy_target(device)

    def forward(self, rows: torch.Tensor, targets, *, temperature=None) -> torch.Tensor:
        """The vectors (texts, vocabulary) fp32 of texts of these lengths (`targets`), given rows
        (tokens, hidden): a loss is computed from those of a whole step."""
        return self.text_vectors(rows, cast("Sequence[int]", targets))

    def logits(self, rows: torch.Tensor, lengths: Sequence[int] = ()) -> torch.Tensor:
        """The vectors."""
        return self(rows, lengths)

    def step_losses(
        self,
        vectors: torch.Tensor,
        targets: torch.Tensor,
        groups: torch.Tensor,
        progress: float | None = None,
    ) -> StepLosses:
        """As of a ContrastiveHead; without `progress` no FLOPS losses."""
        losses, correct = self.ranking.step_losses(vectors, targets, groups)
        if progress is not None:
            asks = targets[:, ROLE] == QUERY
            losses = losses + self.regularizer.loss(vectors, asks, progress)
        return StepLosses(losses, correct)
