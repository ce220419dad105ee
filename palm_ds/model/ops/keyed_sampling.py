"""Tokens drawn from a softmax by keys: a function of the scores and of each row's key alone.

    argmax over v of  scores[v] / temperature + g[v],    g[v] = -log(-log u[v])    (Gumbel-max)

u[v] is a hash of the row's key and v, so processes, micro-batches and their order do not matter.
Scores that two layouts round differently then give another token only where the two best differ by
as little: about once in a million draws. Inverting the cumulated probabilities instead would move
every boundary between two tokens of the vocabulary by such an error.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.ops.dropout import GOLDEN_64, element_bits, mix_bits, odd_bits

_CHUNK, _CHUNK_ON_CPU = 1 << 24, 1 << 18  # scores that exist at the same time; some fit a cache
_HALF, _UNIT = 2.0**31 + 0.5, 2.0**-32  # int32 to the open interval from 0 to 1


def gumbel_noise(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """(n, columns) fp32: a number of the standard Gumbel distribution for each of the `keys` (n,)
    int64 and each column."""
    numbers = torch.arange(1, columns + 1, device=keys.device) * GOLDEN_64
    bits = element_bits(odd_bits(mix_bits(keys)), odd_bits(mix_bits(numbers)))
    # With u = 1 - v, large values, which decide, are those of a small v: fp32 has room for these.
    v = bits.double().add_(_HALF).mul_(_UNIT).float()
    return v.neg_().log1p_().neg_().log_().neg_()


@torch.no_grad()
def keyed_samples(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    keys: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """(n,) int64: a token for each of the `rows` (n, width), whose scores are their products with
    the output `embeddings` (vocabulary, width) plus the `bias` (vocabulary,). With a `temperature`
    of 0: the best one, whatever the key."""
    chunk = _CHUNK_ON_CPU if rows.device.type == "cpu" else _CHUNK
    size = max(chunk // len(embeddings), 1)
    samples = []
    for some, own in zip(rows.split(size), keys.split(size), strict=True):
        scores = F.linear(some, embeddings, bias.to(some.dtype)).float()
        if temperature:
            scores = gumbel_noise(own, len(embeddings)).add_(scores / temperature)
        samples.append(scores.argmax(-1))
    return torch.cat(samples)
