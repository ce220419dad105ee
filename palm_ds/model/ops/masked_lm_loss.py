"""The masked-LM loss: a product with the token embeddings, then cross-entropy.

    plain                   all logits together; defines the result
    chunked                 some rows at a time, together with their gradient
    linear_cross_entropy    torch's own, from 2.13
    liger                   Liger-Kernel's, on CUDA

`chunked` and `liger` compute the gradient in the forward pass, before fp16's loss is scaled.
`chunked` therefore keeps it in fp32, and enlarges the only fp16 tensor on the way, softmax -
one-hot: what is above 2e-12 there survives. In bf16, too, the chunks add up in fp32. Where the
model is compiled, what lies between the two products is too, for chunks of few sizes.

Tokens that are generated have label smoothing, and weights by flow: the kernels of other libraries
have no weights, so `chunked` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.ops.compiled import padded_rows

CrossEntropy: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
Score: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]

_CHUNK_ON_CPU = 128  # rows of logits at a time: they stay in the cache
_CHUNK = 4096
_VOCAB_MULTIPLE, _NEVER = 64, -3e4  # which fp16 can express
TOKEN, FLOW = range(2)
"""Columns of targets: the token, and the number of its flow."""
FP16_SCALE = 2.0**15  # of numbers from -1 to 1; fp16 ends at 65,504


def masked_lm_loss(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    targets: torch.Tensor,
    kernel: str,
    compiled: CrossEntropy | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of rows @ embeddings.T + bias in fp32, and the number of correct
    predictions.

    rows (n, hidden), embeddings (vocabulary, hidden), bias (vocabulary,), targets (n,).
    `compiled`: `smoothed_cross_entropy`, compiled, for `chunked`.
    """
    if kernel == "chunked" and rows.is_cuda:
        embeddings, bias = pad_vocabulary(embeddings, bias)
    if kernel == "chunked" and compiled:
        return _padded(rows, embeddings, bias, targets, compiled)
    return _KERNELS[kernel](rows, embeddings, bias, targets)


def pad_vocabulary(
    embeddings: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with further tokens, up to a multiple of 64, that no row is likely to be: tensor cores
    need vectors of 16 bytes, and BERT's 30,522 logits of a row end within one. On an H200 such
    products took three times as long."""
    missing = -len(embeddings) % _VOCAB_MULTIPLE
    if not missing:
        return embeddings, bias
    return F.pad(embeddings, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=_NEVER)


def smoothed_lm_loss(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    targets: torch.Tensor,
    kernel: str,
    *,
    smoothing: float,
    weights: Sequence[float] = (),
    compiled: CrossEntropy | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of rows @ embeddings.T + bias in fp32, and the number of correct
    predictions.

    rows (n, hidden), embeddings (vocabulary, hidden), bias (vocabulary,), targets (n,) or (n, 2).
    `smoothing` is the share of a target spread over the whole vocabulary (Szegedy et al. 2016,
    section 7); `weights` are those of the flows, all 1 if empty. `compiled`:
    `smoothed_cross_entropy`, compiled, for `chunked`.
    """
    if kernel == "plain":
        return _plain_smoothed(rows, embeddings, bias, targets, smoothing, weights)
    made = _padded if compiled else _token_loss
    function = compiled or smoothed_cross_entropy
    function = partial(function, smoothing=smoothing, weights=tuple(weights))
    return made(rows, embeddings, bias, targets, function)


def _plain(rows, embeddings, bias, targets):
    logits = F.linear(rows, embeddings, bias)  # (n, vocabulary)
    loss = F.cross_entropy(logits.float(), targets, reduction="sum")
    return loss, (logits.detach().argmax(-1) == targets).sum()


def _plain_smoothed(rows, embeddings, bias, targets, smoothing, weights):
    columns = targets.view(len(rows), -1)
    tokens, logits = columns[:, TOKEN], F.linear(rows, embeddings, bias)  # (n, vocabulary)
    each = F.cross_entropy(logits.float(), tokens, reduction="none", label_smoothing=smoothing)
    loss = (each * _weight(columns, weights)[:, 0]).sum()
    return loss, (logits.detach().argmax(-1) == tokens).sum()


def _chunked(rows, embeddings, bias, targets):
    return _token_loss(rows, embeddings, bias, targets, _cross_entropy)


def _padded(rows, embeddings, bias, targets, cross_entropy):
    """In chunks of few sizes; the targets (n,) or (n, k) of rows that fill them are -1."""
    chunk = padded_rows(len(rows))
    missing = -len(rows) % chunk
    rows, columns = F.pad(rows, (0, 0, 0, missing)), targets.view(len(rows), -1)
    targets = F.pad(columns, (0, 0, 0, missing), value=-1)
    return _token_loss(rows, embeddings, bias, targets, cross_entropy, chunk)


def _token_loss(rows, embeddings, bias, targets, cross_entropy, chunk=0):
    def score(logits: torch.Tensor, inside: slice, *more: object) -> tuple[torch.Tensor, ...]:
        return cross_entropy(logits, targets[inside].view(len(logits), -1), *more)

    return chunked_loss(rows, embeddings, bias, score, chunk=chunk)


def chunked_loss(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    score: Score,
    *,
    chunk: int = 0,
    fp16_scale: float = FP16_SCALE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss in fp32 and the hits of rows @ embeddings.T + bias, `chunk` rows at a time.

    `score(logits, inside, loss, scale, needs_grad)` returns `loss` with that of the rows `inside`
    added and their hits; with `needs_grad` also the gradient in the logits times `scale`, in their
    dtype (rows, vocabulary), and its sum over the rows in fp32."""
    chunk = chunk or chunk_size(rows.device, rows.dtype)
    scale = fp16_scale if rows.dtype == torch.float16 else 1.0
    result = _ChunkedLoss.apply(rows, embeddings, bias, score, chunk, scale)
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


def chunk_size(device: torch.device, dtype: torch.dtype) -> int:
    """Number of rows of logits that are computed together."""
    on_cpu = device.type == "cpu" and dtype == torch.float32
    return _CHUNK_ON_CPU if on_cpu else _CHUNK


class _ChunkedLoss(torch.autograd.Function):
    """Computes the logits of some rows, turns them into their gradient in place, multiplies, and
    frees them. backward() only scales, in fp32."""

    @staticmethod
    def forward(ctx: Any, rows, embeddings, bias, score, chunk, scale):
        needs_grad = any(ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        correct = torch.zeros((), dtype=torch.int64, device=rows.device)
        grads = _Gradients()
        for start in range(0, len(rows), chunk):
            inside = slice(start, start + chunk)
            logits = torch.addmm(bias, rows[inside], embeddings.t())
            loss, hits, *errors = score(logits, inside, loss, scale, needs_grad)
            correct += hits
            if needs_grad:
                grads.add(rows[inside], embeddings, *errors)
        ctx.save_for_backward(*grads.found(rows, embeddings, bias) if needs_grad else ())
        ctx.mark_non_differentiable(correct)
        ctx.scale, ctx.dtype = scale, rows.dtype
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads):
        incoming = grads[0] / ctx.scale  # a number, which products with bf16 do not round
        results = ((x * incoming).to(ctx.dtype) for x in ctx.saved_tensors)
        return (*results, None, None, None)


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, loss: torch.Tensor, scale: float, needs_grad: bool
) -> tuple[torch.Tensor, ...]:
    """`loss` with that of some rows added, and the number of correct predictions; with
    `needs_grad` also softmax - one-hot times `scale` in the dtype of the logits
    (rows, vocabulary), and its sum over the rows in fp32. `target` (rows, 1)."""
    dtype, logits = logits.dtype, logits.float()
    best, predicted = logits.max(-1, keepdim=True)
    loss = loss + (best - logits.gather(1, target)).sum()
    total = logits.sub_(best).exp_().sum(-1, keepdim=True)
    loss = loss + total.log().sum()
    hits = (predicted == target).sum()
    if not needs_grad:
        return loss, hits
    logits.div_(total).scatter_add_(1, target, -torch.ones_like(total))
    error = logits if scale == 1.0 else logits.mul_(scale)
    return loss, hits, error.to(dtype), error.sum(0)


def smoothed_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    loss: torch.Tensor,
    scale: float,
    needs_grad: bool,
    *,
    smoothing: float = 0.0,
    weights: Sequence[float] = (),
) -> tuple[torch.Tensor, ...]:
    """`loss` with that of some rows added, and the number of correct predictions; with `needs_grad`
    also its gradient in the logits times `scale`, in their dtype, and its sum over the rows in
    fp32. Nothing is written in place, for torch.compile. `target` (rows, 1 or 2); rows with token
    -1 do not count."""
    dtype, logits, token = logits.dtype, logits.float(), target[:, :1]
    weight = _weight(target, weights)
    best, predicted = logits.max(-1, keepdim=True)
    shifted = logits - best
    powers = shifted.exp()
    total = powers.sum(-1, keepdim=True)
    chosen = torch.arange(logits.shape[1], device=logits.device) == token
    of_target = torch.where(chosen, shifted, 0.0).sum(-1, keepdim=True)
    if smoothing:
        of_target = (1 - smoothing) * of_target + smoothing * shifted.mean(-1, keepdim=True)
    loss = loss + (weight * (total.log() - of_target)).sum()
    hits = ((predicted == token) & (token >= 0)).sum()
    if not needs_grad:
        return loss, hits
    error = powers / total
    if smoothing:
        error = error - smoothing / logits.shape[1]
    error = (error - (1 - smoothing) * chosen.float()) * (weight * scale)
    return loss, hits, error.to(dtype), error.sum(0)


def _weight(targets: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(n, 1) fp32 weight of each target (n, 1 or 2); 0 for padding, whose token is -1."""
    real = (targets[:, :1] >= 0).float()
    for flow, weight in enumerate(weights):
        real = torch.where(targets[:, FLOW:] == flow, real * weight, real)
    return real


class _Gradients:
    """Of rows, embeddings and bias, in fp32 at least where chunks add up. That of a single chunk
    stays as it was computed, since a vocabulary's gradient costs more to copy than to compute."""

    def __init__(self) -> None:
        self._of_rows: list[torch.Tensor] = []
        self._of_embeddings: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None

    def add(
        self,
        piece: torch.Tensor,
        embeddings: torch.Tensor,
        error: torch.Tensor,
        bias_grad: torch.Tensor,
    ) -> None:
        self._of_rows.append(_product(error, embeddings))
        if self._of_embeddings is None or self._of_bias is None:
            self._of_embeddings = _product(error.t(), piece)
            self._of_bias = bias_grad.to(_wide(error.dtype))
            return
        if error.dtype == self._of_embeddings.dtype == _wide(error.dtype):
            self._of_embeddings.addmm_(error.t(), piece)
        else:
            sums = self._of_embeddings.to(_wide(error.dtype))
            self._of_embeddings = sums.add_(_product(error.t(), piece))
        self._of_bias.add_(bias_grad)

    def found(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of the inputs: rows, embeddings and bias."""
        if self._of_embeddings is None or self._of_bias is None:
            return [torch.zeros_like(x) for x in inputs]
        return [torch.cat(self._of_rows), self._of_embeddings, self._of_bias]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32 at least: a sum over thousands of rows would overflow fp16, and loses
    digits in bf16. Only on CPUs the product of bf16 is bf16, rounded once, which is up to five
    times as fast."""
    wide = _wide(left.dtype)
    if left.device.type == "cuda" and left.dtype != wide:
        return torch.mm(left, right, out_dtype=wide)
    if left.dtype == torch.float16:
        return left.to(wide) @ right.to(wide)
    return left @ right


def _linear_cross_entropy(rows, embeddings, bias, targets):
    # Its own sum is in the dtype of the rows: half of it was lost in bf16 over 2,000 labels.
    losses = F.linear_cross_entropy(
        rows,
        embeddings,
        targets,
        linear_bias=bias,
        reduction="none",
        options=nn.LinearCrossEntropyOptions(),
    )
    return losses.float().sum(), _correct(rows, embeddings, bias, targets)


def _liger(rows, embeddings, bias, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # type: ignore[import-not-found]

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
