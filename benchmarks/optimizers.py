"""What a step of each optimizer costs, compared with torch's fused AdamW.

    python benchmarks/optimizers.py                       # base shape, 110 million parameters
    python benchmarks/optimizers.py --layers 3 --words 8192 --threads 1

One process and the flat fp32 tensors that ZeRO makes of the parameters, with random gradients. The
optimizers take turns, a step each, so that all meet the same machine; the figures are the median
time and the median of the ratios to AdamW's step of the same turn, also in the processor's time,
which other programs on the machine disturb less. New gradients come before each step, outside the
time. Runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.kernels import Kernels
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.state import FlatLayout, NeedsLayouts, Param, Piece

KINDS = ("adamw", "lamb", "stable_adamw", "muon")
WARM = 2  # first turns, not counted

Step = Callable[[], tuple[float, float]]


def flatten(optimizer: torch.optim.Optimizer, model: nn.Module, device: torch.device) -> None:
    """Replace the parameters of each group by one flat tensor, as ZeRO 1 does."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    layouts = {}
    for group in optimizer.param_groups:
        params, pieces, offset = group["params"], [], 0
        for number, parameter in enumerate(params):
            pieces.append(Piece(number, 0, slice(offset, offset + parameter.numel())))
            offset += parameter.numel()
        flat = nn.Parameter(torch.cat([p.detach().view(-1) for p in params]).to(device))
        listed = tuple(Param(names[p], p.shape) for p in params)
        layouts[flat] = FlatLayout(params=listed, pieces=tuple(pieces))
        group["params"] = [flat]
    if isinstance(optimizer, NeedsLayouts):
        optimizer.set_layouts(layouts, None)


def prepared_step(kind: str, model: nn.Module, device: torch.device) -> Step:
    """A step that returns its seconds and those of the processor."""
    config = OptimizerConfig(kind=kind, lr=1e-4)
    optimizer = build_optimizer(model, config, zero_stage=1, checked=False)
    flatten(optimizer, model, device)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [1e-3 * torch.randn_like(weight) for weight in weights]

    def step() -> tuple[float, float]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        _wait(device)
        started = time.perf_counter(), time.process_time()
        optimizer.step()
        _wait(device)
        return time.perf_counter() - started[0], time.process_time() - started[1]

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--words", type=int, default=30_522)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = {"num_layers": options.layers, "hidden_size": options.width}
    heads = options.width // 64
    config = EncoderConfig(vocab_size=options.words, num_heads=heads, **shape)
    model = nn.ModuleDict({"backbone": build_encoder(config, Kernels())})
    kinds = dict.fromkeys(["adamw", *options.kinds])
    steps = {kind: prepared_step(kind, model, torch.device(options.device)) for kind in kinds}
    turns = [{kind: step() for kind, step in steps.items()} for _ in range(WARM + options.rounds)][
        WARM:
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.1f} million parameters, {options.device}, {options.threads} threads")
    print(f"{'':14}{'ms':>9}{'times AdamW':>13}{'processor':>11}")
    for kind in kinds:
        milliseconds = 1e3 * statistics.median(turn[kind][0] for turn in turns)
        ratios = [
            statistics.median(turn[kind][clock] / turn["adamw"][clock] for turn in turns)
            for clock in (0, 1)
        ]
        print(f"{kind:14}{milliseconds:9.2f}{ratios[0]:13.2f}{ratios[1]:11.2f}")


if __name__ == "__main__":
    main()
