"""The lines of a plan: memory and time on each number of GPUs; tokens, FLOPs and hours of each
stage.

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
from palm_ds.train.plan.memory import MemoryPlan, plan_memory
from palm_ds.train.plan.step_time import TimePlan, plan_step_time
from palm_ds.train.plan.work import ModelSize, StepWork, work_of

_GB = 1e9
COLUMNS = (
    "GPUs",
    "rows",
    "states",
    "buffers",
    "activations",
    "GB of a GPU",
    "step",
    "products",
    "exposed",
    "tokens/s",
    "MFU",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The prediction for one cluster."""

    cluster: Cluster
    micro_rows: int
    micro_steps: int
    memory: MemoryPlan
    time: TimePlan
    tokens_per_second: float
    mfu: float

    @property
    def fits(self) -> bool:
        return self.memory.total < self.cluster.card.memory * _GB

    def cells(self) -> list[str]:
        memory, time = self.memory, self.time
        kept = memory.activations + memory.working
        over = "" if self.fits else " TOO MUCH"
        return [
            f"{self.cluster.gpus:,}",
            f"{self.micro_rows} x {self.micro_steps}",
            *(f"{size / _GB:.2f}" for size in (memory.states, memory.buffers, kept)),
            f"{memory.total / _GB:.1f} of {self.cluster.card.memory:g}{over}",
            _seconds(time.total),
            _seconds(time.products),
            _seconds(time.exposed),
            f"{self.tokens_per_second:,.0f}",
            f"{100 * self.mfu:.0f} %",
        ]


def make_plan(model: ModelSize, work: StepWork, config: DSConfig, cluster: Cluster) -> Plan:
    """Raises UserError if the rows of a step cannot be divided among these GPUs."""
    micro_rows, micro_steps = config.micro_batching(work.rows, cluster.gpus)
    time = plan_step_time(model, work, config, cluster, micro_steps=micro_steps)
    peak = (cluster.card.peak(config.precision) or 0) * cluster.gpus
    return Plan(
        cluster=cluster,
        micro_rows=micro_rows,
        micro_steps=micro_steps,
        memory=plan_memory(model, work, config, world=cluster.gpus),
        time=time,
        tokens_per_second=work.tokens / time.total,
        mfu=work.of_model(model) / time.total / peak,
    )


def plan_lines(
    model: ModelSize, work: StepWork, config: DSConfig, clusters: Sequence[Cluster]
) -> list[str]:
    """Two lines of what is assumed, a Markdown table, and a line for each cluster among which the
    rows cannot be divided."""
    if not clusters:
        return []
    first, last = clusters[0], clusters[-1]
    several = f"{first.gpus:,} to " if len(clusters) > 1 else ""
    taught = sum(teacher.parameters for teacher in model.teachers) / 1e6
    lines = [
        f"plan for {several}{last}: PREDICTED, not measured; assumes {100 * last.efficiency:g} % "
        "of peak in the matrix products",
        f"ZeRO {config.stage}, {config.precision}, {model.parameters / 1e6:,.0f} M parameters, "
        + (f"teachers of {taught:,.0f} M in `states` and `products`, " if taught else "")
        + f"{work.tokens:,.0f} tokens a step; memory in GB; `exposed`: communication that nothing "
        "hides",
    ]
    rows, problems = [], []
    for cluster in clusters:
        try:
            rows.append(make_plan(model, work, config, cluster).cells())
        except UserError as error:
            problems.append(f"{cluster.gpus:,} GPUs: {error}")
    return [*lines, *(table_lines(rows) if rows else []), *problems]


def table_lines(rows: Sequence[Sequence[str]], heads: Sequence[str] = COLUMNS) -> list[str]:
    """A Markdown table of the cells of plans, or of others with other `heads`."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    line = lambda cells: f"| {' | '.join(map(str.rjust, cells, widths))} |"  # noqa: E731
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return [line(heads), rule, *(line(cells) for cells in rows)]


def _seconds(value: float) -> str:
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


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
