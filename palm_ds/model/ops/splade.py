"""SPLADE's vectors of texts (Formal et al. 2021, arXiv 2109.10086, equation 4): of each word of the
vocabulary log(1 + relu(logit)), the largest over the tokens of a text.

Both functions rise, so only the largest logit of a word counts: what is kept of a text is one logit
and one token for each word, instead of a logit for each word and token, and the backward pass reads
the words alone whose weight is not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

_ENTRIES = 1 << 16  # of vectors whose gradients are computed at a time


def splade_vectors(
    rows: torch.Tensor, lengths: Sequence[int], embeddings: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """(texts, vocabulary) fp32. rows: (tokens, width) of texts of these `lengths`, one after the
    other, special tokens included; embeddings: (vocabulary, width); bias: (vocabulary,)."""
    largest = cast("torch.Tensor", _LargestLogits.apply(rows, embeddings, bias, tuple(lengths)))
    return largest.float().relu().log1p()


def largest(vectors: torch.Tensor, most: int) -> torch.Tensor:
    """Vectors (n, size) with all but the `most` largest numbers set to 0."""
    if most >= vectors.shape[1]:
        return vectors
    values, at = vectors.topk(most, dim=1)
    return torch.zeros_like(vectors).scatter_(1, at, values)


class _LargestLogits(torch.autograd.Function):
    """(texts, vocabulary) the largest of a text's logits rows @ embeddings.T + bias."""

    @staticmethod
    def forward(ctx, rows, embeddings, bias, lengths):
        largest = rows.new_empty(len(lengths), len(embeddings))
        at = torch.empty(largest.shape, dtype=torch.int32, device=rows.device)
        first = 0
        for text, length in enumerate(lengths):
            logits = torch.addmm(bias, rows[first : first + length], embeddings.t())
            largest[text], token = logits.max(0)
            at[text] = token + first
            first += length
        ctx.save_for_backward(rows, embeddings, at)
        ctx.bias_dtype = bias.dtype
        return largest

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        rows, embeddings, at = ctx.saved_tensors
        wide = torch.promote_types(rows.dtype, torch.float32)
        of_rows, of_embeddings = (torch.zeros_like(x, dtype=wide) for x in (rows, embeddings))
        text, word = grad.nonzero(as_tuple=True)
        values, token = grad[text, word].to(wide)[:, None], at[text, word].long()
        for first in range(0, len(word), _ENTRIES):
            part = slice(first, first + _ENTRIES)
            own = embeddings[word[part]] * values[part]
            of_rows.index_add_(0, token[part], own)
            of_embeddings.index_add_(0, word[part], rows[token[part]] * values[part])
        of_bias = grad.to(wide).sum(0).to(ctx.bias_dtype)
        return of_rows.to(rows.dtype), of_embeddings.to(embeddings.dtype), of_bias, None
