"""Seconds of a step on many GPUs: a small analytical model.

    products        FLOPs of the step / (GPUs x peak x efficiency); a third more with recomputation;
                    a third of a teacher's, which has no backward pass
    optimizer       its bytes / the memory's bandwidth: a GPU updates its own shard
    communication   ring collectives (Thakur and others 2005): a GPU sends 2 (n-1)/n of the
                    gradients' bytes in an all-reduce, (n-1)/n of the weights' in an all-gather

                        ZeRO 0, 1   gradients once per step; 1: then the new weights
                        ZeRO 2      gradients in every micro-batch, then the new weights
                        ZeRO 3      weights twice and gradients in every micro-batch

With `overlap_comm`, communication hides behind half of the backward passes that it goes with. The
shares below are assumptions. Frozen parameters have no gradients and no update. Data, evaluation
and saving take no time here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.plan.cluster import Cluster
from palm_ds.train.plan.work import ModelSize, StepWork

LINK_SHARE, MEMORY_SHARE = 0.7, 0.7
"""Of the bandwidth of a network and of a memory that is reached."""
HIDDEN = 0.5
"""Share of the backward passes behind which communication hides."""
LATENCY = 20e-6
"""Seconds of a collective for each doubling of the GPUs."""
OPTIMIZER_BYTES = 30
"""Read and written for each parameter: gradient, master weight, moments, new weight."""


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """Seconds of one step."""

    products: float
    optimizer: float
    communication: float
    """All of it, hidden or not."""
    exposed: float
    """The part that nothing hides."""

    @property
    def total(self) -> float:
        return self.products + self.optimizer + self.exposed


def plan_step_time(
    model: ModelSize, work: StepWork, config: DSConfig, cluster: Cluster, *, micro_steps: int
) -> TimePlan:
    """Raises UserError if the card has no fast products in the run's precision."""
    peak = cluster.card.peak(config.precision)
    if peak is None:
        raise UserError(f"plan: {cluster.card.name} has no matrix products in {config.precision}")
    repeated = 4 / 3 if config.activation_checkpointing else 1.0
    flops = repeated * work.of_model(model)
    read = sum(work.flops(teacher.config) / 3 for teacher in model.teachers)
    products, reading = (x / cluster.gpus / (peak * cluster.efficiency) for x in (flops, read))
    shard = model.trained / (cluster.gpus if config.stage else 1)
    optimizer = OPTIMIZER_BYTES * shard / (cluster.card.bandwidth * 1e9 * MEMORY_SHARE)
    during, after = _communication(model, config, cluster, micro_steps)
    covered = products * 2 / 3 * HIDDEN if _overlaps(config) else 0.0
    covered /= micro_steps if config.stage < 2 else 1  # only the last micro-batch communicates
    return TimePlan(
        products=products + reading,
        optimizer=optimizer,
        communication=during + after,
        exposed=max(during - covered, 0.0) + after,
    )


def _overlaps(config: DSConfig) -> bool:
    zero = config.sections.get("zero_optimization", {})
    return bool(config.stage and zero.get("overlap_comm", config.stage == 3))


def _communication(
    model: ModelSize, config: DSConfig, cluster: Cluster, micro_steps: int
) -> tuple[float, float]:
    """Seconds of what goes with the backward passes, and of what follows the optimizer."""
    if cluster.gpus == 1:
        return 0.0, 0.0
    size = 4 if config.precision == "fp32" else 2
    part = (cluster.gpus - 1) / cluster.gpus * size
    weights, gradients = part * model.parameters, part * model.trained
    times = 1 if config.stage < 2 else micro_steps
    sent = (2 * weights + gradients if config.stage == 3 else 2 * gradients) * times
    gathered = gradients if config.stage in (1, 2) else 0.0  # the new weights, of as many bytes
    collectives = times * (3 * model.config.num_layers if config.stage == 3 else 1)
    wait = LATENCY * math.log2(cluster.gpus)
    rate = cluster.rate * LINK_SHARE
    after = gathered / rate + wait if gathered else 0.0
    return sent / rate + collectives * wait, after
