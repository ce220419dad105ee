"""The head of texts that are generated: the masked-LM head at [ATTN] queries.

Its parameters are those of a masked-LM head, so that a run which starts from an encoder with one
starts with its output layer, and weights are stored and exported as such.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import HeadOutput, MaskedLMHead
from palm_ds.model.ops.masked_lm_loss import TOKEN, smoothed_lm_loss


class GenerationHead(MaskedLMHead):
    """Predicts the token that each query stands for. Smoothing and the weights of flows apply to
    training only: in evaluation the loss is the log of the perplexity."""

    def __init__(self, backbone: Encoder, *, smoothing: float = 0.0, weights: Sequence[float] = ()):
        """`weights`: of the losses of each flow, on average 1; empty: all alike."""
        super().__init__(backbone)
        self.smoothing, self.weights = smoothing, tuple(weights)
        if self.weights and min(self.weights) == max(self.weights):
            self.weights = ()

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n,) tokens, or (n, 2) tokens and the number of their flow."""
        if not self.training or not (self.smoothing or self.weights):
            tokens = targets.view(len(rows), -1)[:, TOKEN]
            return super().forward(rows, tokens)
        loss = smoothed_lm_loss(
            self.transform(rows),
            self.output_embeddings,
            self.output_bias,
            targets,
            self.loss_kernel,
            smoothing=self.smoothing,
            weights=self.weights,
            compiled=self.compiled,
        )
        return HeadOutput(*loss)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=torch.int64, device=device)
