"""How long forward and backward take with torch.compile and without, in turns.

    python benchmarks/compile_layers.py --shape small --length 128 --rounds 5

Prints the median seconds of both, their ratio, and what compiling took.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import PRESETS, EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import choose_kernels
from palm_ds.model.multi_task_model import Model

_VOCAB_SIZE = 30_522


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="small", choices=sorted(PRESETS))
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    batch = _batch(given.rows, given.length).to(given.device)
    changes = {"num_layers": given.layers} if given.layers else {}
    models = {way: _model(given.shape, way, given.device, changes) for way in ("off", "on")}
    first = {way: _seconds(model, batch) for way, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in models}
    for _ in range(given.rounds):
        for way, model in models.items():
            seconds[way].append(_seconds(model, batch))
    off, on = (statistics.median(seconds[way]) for way in ("off", "on"))
    print(
        f"{given.shape}, {given.rows} rows of {given.length}: {off:.3f} s eager, {on:.3f} compiled"
    )
    print(f"ratio {on / off:.2f}; the first compiled step took {first['on']:.0f} s")


def _model(shape: str, way: str, device: str, changes: dict[str, int]) -> Model:
    settings = {**PRESETS[shape], "vocab_size": _VOCAB_SIZE, **changes}
    config = EncoderConfig.from_dict(settings)
    requested = {"compile": way}
    kernels, _ = choose_kernels(requested, device=device, dtype=torch.float32, config=config)
    torch.manual_seed(1)
    backbone = build_encoder(config, kernels)
    return Model(backbone, {"words": MaskedLMHead(backbone)}, {"words": "words"}).to(device)


def _batch(rows: int, length: int) -> Batch:
    """Texts of all lengths, every seventh token masked."""
    rng = np.random.default_rng(1)
    packed = []
    for _ in range(rows):
        cuts = np.sort(rng.choice(np.arange(8, length - 8), max(length // 100, 1), replace=False))
        sizes = np.diff([0, *cuts, length])
        packed.append([(_text(int(size), rng), 0) for size in sizes])
    return collate(packed, length=length, pad=0)


def _text(size: int, rng: np.random.Generator) -> Example:
    at = np.arange(3, size, 7)
    return Example(
        input_ids=rng.integers(5, _VOCAB_SIZE, size),
        token_type_ids=np.zeros(size, np.int64),
        source_offsets=np.arange(size),
        annotations={},
        labels={"words": (at, rng.integers(5, _VOCAB_SIZE, len(at)))},
    )


def _seconds(model: Model, batch: Batch) -> float:
    began = time.perf_counter()
    model.zero_grad()
    model(batch)["words"].loss_sum.backward()
    if batch.input_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
