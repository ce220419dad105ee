"""Bytes of a GPU during training: the states of ZeRO, DeepSpeed's buffers, activations.

    states        gradients, and in fp32 master weights and two moments, divided by the number of
                  GPUs from ZeRO 1 on; weights, divided under ZeRO 3 (ZeRO, section 5); the weights
                  of teachers, divided if they are shared out
    buffers       buckets in which gradients are reduced: `reduce_bucket_size`, whatever the model's
                  size, twice with `overlap_comm`; ZeRO 3: also the weights that are gathered
    activations   what each layer keeps for its backward pass; attention keeps no scores
                  (FlashAttention, section 3), the vocabulary's logits exist a chunk at a time
    working       the largest temporary tensors of one layer, or of one chunk of logits

Fragmentation and what CUDA and NCCL take for themselves (1 to 2 GB) come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Activations, encoder_class
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.plan.work import ModelSize, StepWork

BUCKET, PREFETCH = 500_000_000, 50_000_000
"""DeepSpeed's defaults, in elements."""
LOGIT_ROWS = 4096
"""Rows of logits at a time (model/ops/masked_lm_loss.py)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU at the fullest moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    working: float
    teachers: float = 0.0
    """Their weights."""

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.teachers

    @property
    def total(self) -> float:
        return self.states + self.buffers + self.activations + self.working


def plan_memory(model: ModelSize, work: StepWork, config: DSConfig, *, world: int) -> MemoryPlan:
    """Raises UserError if the rows of a step cannot be divided among `world` GPUs."""
    rows, _ = config.micro_batching(work.rows, world)
    tokens, labels = rows * work.length, rows * work.labels / work.rows
    size = 4 if config.precision == "fp32" else 2
    encoders = [(model.config, labels)]
    if model.generator is not None:
        encoders.append((model.generator, rows * work.generated / work.rows))
    return MemoryPlan(
        **state_bytes(model.parameters, config, world, trained=model.trained),
        buffers=buffer_bytes(model, config, world),
        activations=sum(
            activation_bytes(
                encoder,
                size,
                tokens=tokens,
                labels=labels,
                recompute=config.activation_checkpointing,
            )
            for encoder, labels in encoders
        ),
        working=_working_bytes(model.config, size, tokens, labels),
        teachers=sum(teacher.bytes(world) for teacher in model.teachers),
    )


def state_bytes(
    parameters: int, config: DSConfig, world: int, *, trained: int | None = None
) -> dict[str, float]:
    """Bytes of weights, gradients and the optimizer's state in one process. `trained`: the
    parameters that are not frozen (default: all). DeepSpeed keeps the shard of the gradients alone
    under ZeRO 1 too, also over micro-batches (from 0.19)."""
    trained = parameters if trained is None else trained
    size = 4 if config.precision == "fp32" else 2
    master = 4 if config.stage or size == 2 else 0  # ZeRO keeps one in fp32 too
    shards = {stage: world if config.stage >= stage else 1 for stage in (1, 3)}
    on_gpu = {"optimizer": not config.offloads, "weights": not _offloads_weights(config)}
    return {
        "weights": size * parameters / shards[3] * on_gpu["weights"],
        "gradients": size * trained / shards[1] * (on_gpu["optimizer"] or not config.stage),
        "optimizer": (8 + master) * trained / shards[1] * on_gpu["optimizer"],
    }


def _zero(config: DSConfig) -> Mapping[str, Any]:
    return config.sections.get("zero_optimization", {})


def _offloads_weights(config: DSConfig) -> bool:
    return (_zero(config).get("offload_param") or {}).get("device", "none") != "none"


def buffer_bytes(model: ModelSize, config: DSConfig, world: int) -> float:
    """DeepSpeed's buckets, and the gathered weights of ZeRO 3."""
    size, zero = 4 if config.precision == "fp32" else 2, _zero(config)
    if config.stage == 0:
        return 4.0 * min(model.trained, BUCKET) if world > 1 else 0.0
    bucket = float(zero.get("reduce_bucket_size", BUCKET))
    if config.stage < 3:
        return bucket * size * (2 if zero.get("overlap_comm") else 1)
    ahead = float(zero.get("stage3_prefetch_bucket_size", PREFETCH))
    gathered = min(model.parameters, max(model.largest, model.largest_layer) + ahead)
    return (bucket + (gathered if world > 1 else 0)) * size


def activation_bytes(
    config: EncoderConfig, size: int, *, tokens: float, labels: float, recompute: bool = False
) -> float:
    """Bytes that one micro-batch keeps for the backward pass: `tokens` positions, `labels` of which
    go through the masked-LM head. The last layer keeps its second half for the labels only."""
    width, dropped, kept = config.hidden_size, config.dropout > 0, _kept(config)
    attention = kept.attention * size + 4 * kept.heads + width * dropped
    forward = kept.feed_forward * size + 16 + width * dropped
    layers = tokens * (config.num_layers * attention + (config.num_layers - 1) * forward)
    if recompute:
        layers = tokens * (config.num_layers * width * size + attention + forward)
    embedded = tokens * (2 * width * size + width * dropped)
    head = labels * (forward + 6 * width * size)
    gradients = 4.0 * (config.vocab_size or 0) * width if labels else 0.0
    return layers + embedded + head + gradients


def _kept(config: EncoderConfig) -> Activations:
    return encoder_class(config).activations(config)


def _working_bytes(config: EncoderConfig, size: int, tokens: float, labels: float) -> float:
    """The gradients of a layer's inner tensors, or a chunk of logits in fp32 and again in the
    model's type."""
    layer = tokens * size * _kept(config).widest
    logits = min(labels, LOGIT_ROWS) * (config.vocab_size or 0) * (4 + size)
    return max(layer, logits)
