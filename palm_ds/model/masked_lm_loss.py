"""The masked-LM loss: a product with the token embeddings, then cross-entropy.

    plain                   all logits together; defines the result
    chunked                 some rows at a time, together with their gradient
    linear_cross_entropy    torch's own, from 2.13
    liger                   Liger-Kernel's, on CUDA

The last three compute the gradient in the forward pass, before fp16's loss is scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_CHUNK_ON_CPU = 128  # rows of logits at a time: they stay in the cache
_CHUNK = 4096


def masked_lm_loss(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    targets: torch.Tensor,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of rows @ embeddings.T + bias in fp32, and the number of correct
    predictions.

    rows (n, hidden), embeddings (vocabulary, hidden), bias (vocabulary,), targets (n,).
    """
    return _KERNELS[kernel](rows, embeddings, bias, targets)


def _plain(rows, embeddings, bias, targets):
    logits = F.linear(rows, embeddings, bias)  # (n, vocabulary)
    loss = F.cross_entropy(logits.float(), targets, reduction="sum")
    return loss, (logits.detach().argmax(-1) == targets).sum()


def _chunked(rows, embeddings, bias, targets):
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32
    chunk = _CHUNK_ON_CPU if on_cpu else _CHUNK
    return _ChunkedLoss.apply(rows, embeddings, bias, targets, chunk)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the logits of some rows, turns them into their gradient in place, multiplies, and
    frees them. backward() only scales."""

    @staticmethod
    def forward(ctx: Any, rows, embeddings, bias, targets, chunk):
        needs_grad = any(ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        correct = torch.zeros((), dtype=torch.int64, device=rows.device)
        grads = [torch.zeros_like(x) for x in (rows, embeddings, bias)] if needs_grad else []
        for start in range(0, len(rows), chunk):
            inside = slice(start, start + chunk)
            piece, target = rows[inside], targets[inside, None]
            logits = torch.addmm(bias, piece, embeddings.t()).float()
            best, predicted = logits.max(-1, keepdim=True)
            correct += (predicted == target).sum()
            loss += (best - logits.gather(1, target)).sum()
            total = logits.sub_(best).exp_().sum(-1, keepdim=True)
            loss += total.log().sum()
            if needs_grad:
                logits.div_(total).scatter_add_(1, target, -torch.ones_like(total))
                error = logits.to(rows.dtype)  # softmax - one-hot, (chunk, vocabulary)
                grads[0][inside] = error @ embeddings
                grads[1].addmm_(error.t(), piece)
                grads[2].add_(logits.sum(0))
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads):
        d_rows, d_embeddings, d_bias = (x * grads[0].to(x.dtype) for x in ctx.saved_tensors)
        return d_rows, d_embeddings, d_bias, None, None


def _linear_cross_entropy(rows, embeddings, bias, targets):
    loss = F.linear_cross_entropy(
        rows,
        embeddings,
        targets,
        linear_bias=bias,
        reduction="sum",
        options=nn.LinearCrossEntropyOptions(),
    )
    return loss.float(), _correct(rows, embeddings, bias, targets)


def _liger(rows, embeddings, bias, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    arguments = (None, -100, 0.0, 0.0, "sum")  # no class weights, no target ignored, no smoothing
    result = LigerFusedLinearCrossEntropyFunction.apply(rows, embeddings, targets, bias, *arguments)
    loss = result[0] if isinstance(result, tuple) else result
    return loss.float(), _correct(rows, embeddings, bias, targets)


@torch.no_grad()
def _correct(rows, embeddings, bias, targets):
    """The number of correct predictions, for kernels that do not return their logits: a second
    product, a chunk of rows at a time."""
    pairs = zip(rows.split(_CHUNK), targets.split(_CHUNK), strict=True)
    counts = [(F.linear(x, embeddings, bias).argmax(-1) == y).sum() for x, y in pairs]
    return torch.stack(counts).sum()


_KERNELS = {
    "plain": _plain,
    "chunked": _chunked,
    "linear_cross_entropy": _linear_cross_entropy,
    "liger": _liger,
}
