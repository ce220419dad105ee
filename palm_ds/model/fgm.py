"""Training on texts whose word vectors were changed for the worse (FGM: Miyato et al. 2017).

A micro-batch is run twice. The first time as it is, and the gradient of its loss with respect to
the word vectors is kept; the second time each text's vectors are moved by `epsilon` along its own
gradient. The gradients of both losses add up.

What is moved are the vectors of the texts and not the table they come from: a table may be cut
over processes, and a word would be moved alike in all texts of the batch. As each text is moved by
the same length whatever its loss is multiplied with, what is learned depends neither on how texts
are shared out nor on the loss scale of fp16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from palm_ds.model.batch import Batch

_SMALL = 1e-30


class FGM:
    """Watches a model's word table: `begin(batch)`, forward, backward; `attack()`, forward,
    backward; `restore()`. Outside of that it does nothing."""

    def __init__(self, embedding: nn.Module, epsilon: float):
        self.epsilon = epsilon
        self._batch: Batch | None = None
        self._gradient: torch.Tensor | None = None
        self._change: torch.Tensor | None = None
        embedding.register_forward_hook(self._vectors)

    def begin(self, batch: Batch) -> None:
        self._batch, self._gradient, self._change = batch, None, None

    def attack(self) -> None:
        assert self._batch is not None and self._gradient is not None
        self._change = perturbation(self._gradient, self._batch.starts, self.epsilon)

    def restore(self) -> None:
        self._batch = self._gradient = self._change = None

    def _vectors(self, _module: nn.Module, _inputs: Any, vectors: torch.Tensor) -> torch.Tensor:
        """The word vectors that the model goes on with."""
        if self._change is not None:
            return vectors + self._change.to(vectors.dtype)
        if self._batch is not None:
            if not vectors.requires_grad:  # a frozen table
                vectors.requires_grad_()
            vectors.register_hook(self._keep)
        return vectors

    def _keep(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient.detach()


def perturbation(gradient: torch.Tensor, cu_seqlens: torch.Tensor, epsilon: float) -> torch.Tensor:
    """(rows, tokens, hidden) fp32: the gradient of each text (`cu_seqlens`), scaled to the norm
    `epsilon`; 0 for a text that has no part in the loss."""
    flat = gradient.float().flatten(0, 1)  # (rows * tokens, hidden)
    sizes = cu_seqlens.diff().long()
    text = torch.repeat_interleave(torch.arange(len(sizes), device=flat.device), sizes)
    flat = flat / flat.abs().amax().clamp_min(_SMALL)  # so that squares neither vanish nor overflow
    squares = flat.new_zeros(len(sizes)).index_add(0, text, flat.square().sum(1))
    norms = squares.sqrt().clamp_min(_SMALL)
    return (flat * (epsilon / norms)[text, None]).view_as(gradient)
