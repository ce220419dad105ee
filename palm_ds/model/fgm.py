"""Adversarial training on perturbed token embeddings (FGM: Miyato et al. 2017).

Each micro-batch runs twice. The first pass is ordinary and keeps the gradient of the loss with
respect to the embedded tokens; in the second, each text's embeddings are moved by `epsilon` along
their own gradient. The gradients of both losses add up.

The perturbation applies to the embedded texts, not to the embedding matrix: a matrix may be
partitioned over processes, and a token would be moved alike in all texts of the batch. Each text is
moved by the same distance whatever factor its loss is scaled by, so the result depends neither on
the distribution of texts over processes nor on fp16's loss scale.
"""

from __future__ import annotations

import torch
from torch import nn

from palm_ds.model.inputs.batch import Batch

_EPS = 1e-30


class FGM:
    """Hooks into a token embedding. Call `begin(batch)`, forward, backward; `attack()`, forward,
    backward; `restore()`. Outside this sequence it does nothing."""

    def __init__(self, embedding: nn.Module, epsilon: float):
        self.epsilon = epsilon
        self._batch: Batch | None = None
        self._gradient: torch.Tensor | None = None
        self._perturbation: torch.Tensor | None = None
        embedding.register_forward_hook(self._on_forward)

    def begin(self, batch: Batch) -> None:
        self._batch, self._gradient, self._perturbation = batch, None, None

    def attack(self) -> None:
        assert self._batch is not None and self._gradient is not None
        self._perturbation = perturbation(self._gradient, self._batch.cu_seqlens, self.epsilon)

    def restore(self) -> None:
        self._batch = self._gradient = self._perturbation = None

    def _on_forward(
        self, _module: nn.Module, _inputs: object, embedded: torch.Tensor
    ) -> torch.Tensor:
        """Returns the embeddings that replace the module's output."""
        if self._perturbation is not None:
            return embedded + self._perturbation.to(embedded.dtype)
        if self._batch is not None:
            if not embedded.requires_grad:  # the embedding is frozen
                embedded.requires_grad_()
            embedded.register_hook(self._keep_gradient)
        return embedded

    def _keep_gradient(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient.detach()


def perturbation(gradient: torch.Tensor, cu_seqlens: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The gradient of each text (`cu_seqlens`) scaled to the norm `epsilon`, (rows, tokens, hidden)
    fp32; 0 for a text that does not contribute to the loss."""
    flat = gradient.float().flatten(0, 1)  # (rows * tokens, hidden)
    sizes = cu_seqlens.diff().long()
    numbers = torch.arange(len(sizes), device=flat.device)
    text = numbers.repeat_interleave(sizes, output_size=len(flat))  # given: nothing waits for it
    flat = flat / flat.abs().amax().clamp_min(_EPS)  # squares neither underflow nor overflow
    squares = flat.new_zeros(len(sizes)).index_add(0, text, flat.square().sum(1))
    norms = squares.sqrt().clamp_min(_EPS)
    return (flat * (epsilon / norms)[text, None]).view_as(gradient)
