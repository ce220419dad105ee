"""Tokens, FLOPs and hours of the stages of a run, as a plan predicts them.

stream ──some rows of a step of each stage──> StepWork ──times its steps──> StageWork ──> hours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palm_ds.common.errors import UserError
from palm_ds.data.stream.document_stream import DocumentStream
from palm_ds.data.stream.example_stream import ExampleStream
from palm_ds.data.stream.packed_stream import PackedStream
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.plan.cluster import Cluster
from palm_ds.train.plan.step_time import plan_step_time
from palm_ds.train.plan.table import table_lines
from palm_ds.train.plan.work import ModelSize, StepWork, work_of

_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class StageWork:
    """The work of all steps of a stage."""

    parts: tuple[tuple[StepWork, float], ...]
    """A step, and how many steps of the stage are like it."""

    @property
    def steps(self) -> int:
        return round(sum(steps for _, steps in self.parts))

    @property
    def tokens(self) -> float:
        """Without padding."""
        return sum(work.tokens * steps for work, steps in self.parts)

    def flops(self, model: ModelSize) -> float:
        """Forward and backward, nothing counted twice, those of a generator included."""
        return sum(work.of_model(model) * steps for work, steps in self.parts)

    def hours(self, model: ModelSize, config: DSConfig, cluster: Cluster) -> float:
        """Raises UserError if the rows of a step cannot be divided among these GPUs."""
        seconds = 0.0
        for work, steps in self.parts:
            _, micro_steps = config.micro_batching(work.rows, cluster.gpus)
            time = plan_step_time(model, work, config, cluster, micro_steps=micro_steps)
            seconds += time.total * steps
        return seconds / 3600


def stage_work(
    stream: PackedStream | ExampleStream | DocumentStream, model: Model
) -> list[StageWork]:
    """The work of each stage, from some rows of a step, or with `mix: step` of a step of each task
    group."""
    stages = []
    for number, stage in enumerate(stream.curriculum.stages):
        parts: list[tuple[StepWork, float]] = []
        if isinstance(stream, ExampleStream):
            for batch, steps in stream.sampled_steps(number):
                one = work_of(model, [batch], len(batch.input_ids))
                parts.append((replace(one, rows=stream.rows), steps))  # some of them empty
        else:
            sizes = stream.steps_by_rows(number).items()
            for batch, steps in stream.sampled_steps(number, _SAMPLED_ROWS):
                one = work_of(model, [batch], len(batch.input_ids))
                parts += [(one.of_rows(rows), many * steps / stage.steps) for rows, many in sizes]
        stages.append(StageWork(tuple(parts)))
    return stages


def stage_lines(
    model: ModelSize, stages: Sequence[StageWork], config: DSConfig, clusters: Sequence[Cluster]
) -> list[str]:
    """A Markdown table: the tokens and FLOPs of each stage and of all, and the hours that they take
    on each cluster; `-` where the rows of a step cannot be divided."""
    if not clusters:
        return []
    every = StageWork(tuple(part for stage in stages for part in stage.parts))
    named = {str(number): stage for number, stage in enumerate(stages, 1)} | {"all": every}
    rows = [
        [
            name,
            f"{stage.steps:,}",
            f"{stage.tokens:,.0f}",
            f"{stage.flops(model):.2e}",
            *(_hours(stage, model, config, cluster) for cluster in clusters),
        ]
        for name, stage in named.items()
    ]
    heads = ["stage", "steps", "tokens", "FLOPs"]
    return table_lines(rows, [*heads, *(f"hours, {cluster.gpus:,} GPUs" for cluster in clusters)])


def _hours(stage: StageWork, model: ModelSize, config: DSConfig, cluster: Cluster) -> str:
    try:
        return f"{stage.hours(model, config, cluster):,.2f}"
    except UserError:  # which the plan's own table has said
        return "-"
