"""The tables of docs/speed.md: what each operation of a layer computes and moves, and which of the
two takes longer on some cards. Computed from shapes and data sheets; nothing in it was measured.

    python docs/generate.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from palm_ds.model.config.config import PRESETS, EncoderConfig
from palm_ds.model.encoder.flops import attention_flops, head_flops, layer_flops
from palm_ds.runtime.device.gpu_specs import CARDS, Card, card_named

SHOWN = ("A100", "H100", "H200")
BYTES, SEQUENCE, MASKED = 2, 300, 0.15


@dataclass(frozen=True, kw_only=True)
class Operation:
    """FLOPs and values of a token in the forward and backward pass of one layer. Weights are read
    once for thousands of tokens and do not count."""

    name: str
    flops: float
    values: float
    """Read from or written to the card's memory."""

    def seconds(self, card: Card) -> float:
        return max(self.flops / (card.bf16 * 1e12), self.bytes / (card.bandwidth * 1e9))

    @property
    def bytes(self) -> float:
        return BYTES * self.values

    def bound(self, card: Card) -> str:
        by_memory = self.bytes / (card.bandwidth * 1e9) > self.flops / (card.bf16 * 1e12)
        return "memory" if by_memory else "products"


def operations(config: EncoderConfig, *, fused: bool) -> Iterator[Operation]:
    """A product reads its input and writes its output, and does so twice more in the backward pass.
    Fused, what stands between the products is one kernel in each direction."""
    h, f, n = config.hidden_size, config.feed_forward_size, SEQUENCE
    yield Operation(name="query, key, value", flops=6 * 3 * h * h, values=3 * 4 * h)
    yield Operation(name="attention", flops=12 * n * h, values=12 * h)
    yield Operation(name="output product", flops=6 * h * h, values=3 * 2 * h)
    joined = 8.5 * h if fused else 14.5 * h
    yield Operation(name="dropout, add, LayerNorm", flops=20 * h, values=joined)
    yield Operation(name="inner product", flops=6 * h * f, values=3 * (h + f))
    yield Operation(name="bias, GELU", flops=20 * f, values=5 * f if fused else 8 * f)
    yield Operation(name="outer product", flops=6 * h * f, values=3 * (h + f))
    yield Operation(name="dropout, add, LayerNorm", flops=20 * h, values=joined)


def ceiling(config: EncoderConfig, card: Card, *, fused: bool) -> float:
    """The share of peak that a layer can reach at most, if every operation ran at its limit."""
    every = list(operations(config, fused=fused))
    products = layer_flops(config) + attention_flops(config) * SEQUENCE
    time = config.num_layers * sum(each.seconds(card) for each in every)
    return products / (card.bf16 * 1e12) / time


def tables() -> dict[str, str]:
    """{mark in docs/speed.md: the table}"""
    return {
        "cards": cards(),
        "base": layer("ernie-2.0-base"),
        "large": layer("ernie-2.0-large"),
        "ceilings": ceilings(),
        "rates": rates(),
    }


def _config(preset: str) -> EncoderConfig:
    return EncoderConfig.from_dict({**PRESETS[preset], "vocab_size": 30_528})


def cards() -> str:
    lines = [
        "| card | fp16 | bf16 | TF32 | fp32 | memory, GB | GB/s | FLOP per byte, bf16 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for card in CARDS:
        ridge = f"{card.bf16 * 1e3 / card.bandwidth:.0f}" if card.bf16 else ""
        rates = [f"{rate:g}" if rate else "-" for rate in (card.fp16, card.bf16, card.tf32)]
        cells = [card.name, *rates, f"{card.fp32:g}", f"{card.memory:g}", f"{card.bandwidth:g}"]
        lines.append(f"| {' | '.join([*cells, ridge])} |")
    return "\n".join(lines)


def layer(preset: str) -> str:
    config, shown = _config(preset), [card_named(name, "docs") for name in SHOWN]
    heads = "".join(f" {card.name} |" for card in shown)
    lines = [
        f"| operation | FLOPs of a token | bytes | FLOP per byte |{heads}",
        "|---|---:|---:|---:|" + "---|" * len(shown),
    ]
    for each in operations(config, fused=True):
        cells = [each.name, f"{each.flops:,.0f}", f"{each.bytes:,.0f}"]
        cells += [f"{each.flops / each.bytes:.0f}", *(each.bound(card) for card in shown)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ceilings() -> str:
    lines = [
        "| shape | card | separate kernels | fused |",
        "|---|---|---:|---:|",
    ]
    for preset in ("ernie-2.0-base", "ernie-2.0-large"):
        for card in (card_named(name, "docs") for name in SHOWN):
            found = [ceiling(_config(preset), card, fused=fused) for fused in (False, True)]
            cells = [preset, card.name, *(f"{100 * each:.0f} %" for each in found)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rates() -> str:
    """Tokens per second of one H100 at some shares of its peak."""
    card = card_named("H100", "docs")
    lines = [
        "| shape | GFLOP of a token | 25 % | 30 % | 45 % | 50 % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for preset in ("ernie-2.0-base", "ernie-2.0-large"):
        config = _config(preset)
        flops = layer_flops(config) + attention_flops(config) * SEQUENCE
        flops += MASKED * head_flops(config)
        shares = [card.bf16 * 1e12 * share / flops for share in (0.25, 0.30, 0.45, 0.50)]
        cells = [preset, f"{flops / 1e9:.3f}", *(f"{rate:,.0f}" for rate in shares)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
