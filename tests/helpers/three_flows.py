"""The three flows of ERNIE-GEN as the equations of its paper have them: separate passes, each with
attention written out, one query at a time (section 3.2, equations 4 to 6; figure 3).

It shares the weights of an encoder with the library, and no code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.encoder.encoder import Encoder


@dataclass
class Text:
    """Tokens, positions and segments, (tokens,) int64 each."""

    ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor


def embed(encoder: Any, text: Text) -> torch.Tensor:
    summed = encoder.word.weight[text.ids] + encoder.position.weight[text.positions]
    summed = summed + encoder.segment.weight[text.segments]
    return _norm(encoder.norm, summed)


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def attention(layer: Any, query: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """MH-Attn(Q = query (1, hidden), KV = context (n, hidden)), after the output projection."""
    size = query.shape[-1]
    weight, bias = layer.qkv.weight.split(size), layer.qkv.bias.split(size)
    heads = lambda x: x.view(len(x), layer.num_heads, -1).transpose(0, 1)  # noqa: E731
    q = heads(F.linear(query, weight[0], bias[0]))
    k, v = (heads(F.linear(context, weight[i], bias[i])) for i in (1, 2))
    weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1)
    return layer.project((weights @ v).transpose(0, 1).reshape(len(query), -1))


def layer_output(layer: Any, query: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    x = _norm(layer.attention_norm, query + attention(layer, query, context))
    inner = F.gelu(F.linear(x, layer.expand.weight, layer.expand.bias))
    return _norm(layer.output_norm, x + F.linear(inner, layer.contract.weight, layer.contract.bias))


def context_states(encoder: Encoder, source: Text, target: Text) -> list[torch.Tensor]:
    """The input of each layer, and the output, at source and target: the source in both directions,
    then the contextual flow, one target token after the other (equation 4)."""
    x = torch.cat([embed(encoder, source), embed(encoder, target)])
    states, size = [x], len(source.ids)
    for layer in encoder.layers:
        rows = [layer_output(layer, x[i : i + 1], x[: max(size, i + 1)]) for i in range(len(x))]
        x = torch.cat(rows)
        states.append(x)
    return states


def query_output(
    encoder: Encoder, query: Text, states: list[torch.Tensor], seen: int
) -> torch.Tensor:
    """The last state (1, hidden) of one [ATTN] that attends to the first `seen` states of source
    and target, and to itself (equations 5 and 6)."""
    x = embed(encoder, query)
    for layer, context in zip(encoder.layers, states, strict=False):
        x = layer_output(layer, x, torch.cat([context[:seen], x]))
    return x


def losses(
    encoder: Encoder,
    head: Any,
    source: Text,
    context: Text,
    original: torch.Tensor,
    spans: list[int],
    attn: int,
) -> tuple[float, float]:
    """The mean loss of the word-by-word and of the span-by-span flow. `context` is the target as
    its flow sees it, noise included, from [CLS] on; `original` (n,) what follows [CLS] in truth;
    `spans` the sizes of its spans."""
    with torch.no_grad():
        states = context_states(encoder, source, context)
        begins = [sum(spans[:k]) for k, size in enumerate(spans) for _ in range(size)]
        sums = [0.0, 0.0]
        for t, token in enumerate(original.tolist()):
            query = Text(
                torch.tensor([attn]), context.positions[t + 1 :][:1], context.segments[t + 1 :][:1]
            )
            for flow, before in enumerate((t, begins[t])):
                row = query_output(encoder, query, states, len(source.ids) + 1 + before)
                row = _norm(head.norm, F.gelu(head.dense(row)))
                logits = F.linear(row, encoder.word.weight, head.bias)
                sums[flow] += float(F.cross_entropy(logits, torch.tensor([token])))
    return sums[0] / len(original), sums[1] / len(original)
