"""The lines of a plan: memory and time on each number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.plan.cluster import Cluster
from palm_ds.train.plan.memory import MemoryPlan, plan_memory
from palm_ds.train.plan.step_time import TimePlan, plan_step_time
from palm_ds.train.plan.work import ModelSize, StepWork

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
