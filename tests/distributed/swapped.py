"""The same steps with the optimizer's state in memory and in files: losses, weights, averages,
skipped steps, checkpoints, and what stays on the disk."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from palm_ds.engine import Engine
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.zero.swap_folder import prepare_swapping
from tests.distributed.tiny import LENGTH, OPTIMIZER, ROWS, SEED, WORDS, train

KINDS = {
    "fp32": replace(OPTIMIZER, ema=0.9),
    "bf16": OPTIMIZER,
    "fp16": OPTIMIZER,
    "lamb": replace(OPTIMIZER, kind="lamb"),
    "stable": replace(OPTIMIZER, kind="stable_adamw"),
}
BEFORE, AFTER = range(2), range(2, 4)


def larger_model() -> Model:
    """Large enough for groups of a MB, which smaller ones stay in memory."""
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS,
        hidden_size=192,
        num_layers=4,
        num_heads=4,
        max_positions=LENGTH,
        dropout=0.1,
    )
    backbone = build_encoder(config, Kernels(attention="tiles", dropout="counter"))
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(192, 3, pooled=True)}
    return Model(backbone, heads, {name: name for name in heads})


def make_engine(kind: str, disk: Path | None) -> Engine:
    """Without `disk`, the state stays in memory: in the host's for bf16 and fp16, since DeepSpeed
    rounds the norm of gradients that it does not offload in another way."""
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 300_000}
    if disk:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(disk)}
    elif kind in ("bf16", "fp16"):
        zero["offload_optimizer"] = {"device": "cpu"}
    values: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4}
    if kind in ("bf16", "fp16"):
        values[kind] = {"enabled": True}
    if kind == "fp16":  # this CPU is slow in it, not wrong; the first scale overflows
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
        values[kind]["initial_scale_power"] = 16
    ds_config = make_ds_config(values)
    prepare_swapping(ds_config)
    optimizer = KINDS[kind]
    return Engine(larger_model(), ds_config=ds_config, optimizer=optimizer, rows=ROWS, seed=SEED)


def finish(engine: Engine, before: list[float]) -> dict[str, Any]:
    """The rest of the steps, and all that there is to compare."""
    losses = train(engine, AFTER)
    weights = {k: v.double().sum().item() for k, v in engine.full_state_dict().items()}
    with engine.ema_weights():
        averages = {k: v.double().sum().item() for k, v in engine.full_state_dict().items()}
    result = {"losses": before + losses, "weights": weights, "averages": averages}
    result |= {"skipped": engine.skipped_steps, "norm": engine.grad_norm}
    engine.release()
    return result


def whole(kind: str, folder: Path, disk: Path | None) -> tuple[dict[str, Any], list[float]]:
    engine = make_engine(kind, disk)
    before = train(engine, BEFORE)
    engine.start_save(folder, {"losses": before}, step=len(BEFORE))
    engine.finish_save()
    return finish(engine, before), before


def resumed(kind: str, folder: Path, disk: Path | None, *, killed: bool = False) -> dict[str, Any]:
    engine = make_engine(kind, disk)
    state = engine.load(folder)
    assert state is not None
    if killed:
        train(engine, AFTER)
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(engine, state["losses"])


def compared(folder: str, disk: str, kinds: list[str]) -> dict[str, Any]:
    """Whole runs, in memory and in files, and what continues from their checkpoints."""
    results = {}
    for kind in kinds:
        files, memory = Path(folder) / kind, Path(folder) / kind / "memory"
        in_memory, _ = whole(kind, memory, None)
        in_files, _ = whole(kind, files, Path(disk))
        results[kind] = {"memory": in_memory, "files": in_files}
        results[kind]["resumed"] = resumed(kind, files, Path(disk))
        if kind == "fp32":  # a checkpoint of one is a checkpoint of the other
            results[kind]["crossed"] = resumed(kind, memory, Path(disk))
            results[kind]["back"] = resumed(kind, files, None)
    return results


def continued(folder: str, disk: str, killed: bool = False) -> dict[str, Any]:
    """The run in fp32, from its checkpoint."""
    return resumed("fp32", Path(folder) / "fp32", Path(disk), killed=killed)
