"""What local attention saves in long rows: an encoder with windows and the same one without.

    python benchmarks/windows.py                    # one text of 2,048 tokens, ModernBERT's windows
    python benchmarks/windows.py --lengths 512 2048 8192

ModernBERT's architecture (4 layers of width 256, every third of them global, 64 tokens on each
side), fp32, the attention that a run would choose here. The two take turns; the figures are medians
of processor time, which other programs on the machine disturb less, and of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import nn

from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import choose_kernels

WORDS = 30_522
MODES = ("training", "prediction")


def build(window: int, length: int) -> nn.Module:
    """The same weights whatever the window, which has none."""
    config = EncoderConfig(
        kind="modernbert",
        vocab_size=WORDS,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        intermediate_size=384,
        max_positions=length,
        token_types=1,
        options={"window": window},
    )
    torch.manual_seed(0)
    kernels, _ = choose_kernels({}, device="cpu", dtype=torch.float32, config=config)
    return build_encoder(config, kernels)


def one_text(length: int) -> Batch:
    ids = np.random.default_rng(length).integers(5, WORDS, length)
    nothing = np.zeros(length, np.int64)
    example = Example(
        input_ids=ids, token_type_ids=nothing, source_offsets=np.arange(length), annotations={}
    )
    return collate([[(example, 0)]], length=length, pad=0)


def seconds(encoder: nn.Module, batch: Batch, mode: str) -> float:
    """Processor time of a forward pass, with the backward pass in training."""
    encoder.train(mode == "training")
    started = time.process_time()
    with torch.set_grad_enabled(mode == "training"):
        vectors = encoder(batch)
        if mode == "training":
            vectors.square().mean().backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'tokens':>8}  {'':10}  {'windows ms':>10}  {'without ms':>10}  times")
    for length in args.lengths:
        encoders, batch = [build(window, length) for window in (64, length)], one_text(length)
        for mode in MODES:
            for encoder in encoders:
                seconds(encoder, batch, mode)  # warms up
            pairs = [[seconds(e, batch, mode) for e in encoders] for _ in range(args.rounds)]
            local, whole = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(f"{length:8,}  {mode:10}  {local:10.0f}  {whole:10.0f}  {ratio:5.2f}")


if __name__ == "__main__":
    main()
