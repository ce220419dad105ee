"""Log lines on a run's settings and data before it starts."""

from __future__ import annotations

from palm_ds.runtime.device.torch_settings import describe_tf32
from palm_ds.runtime.processes.processes import Processes, crowded_hosts
from palm_ds.runtime.zero.swap_folder import describe_swapping
from palm_ds.train.recipe.checks import idle_tasks
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import (
    Data,
    corpus_summaries,
    evaluation_notes,
    small_held_out_warnings,
    trained_on_warnings,
)
from palm_ds.train.teachers.distillation_plan import DistillationPlan


def startup_notes(
    run: RunSpec, data: Data, plan: DistillationPlan, processes: Processes
) -> list[str]:
    """Hosts with fewer cores than processes, settings carried out otherwise than written, the size
    of the corpora, tasks that do not train, and held-out sets too small to judge by, or trained on.
    Collective."""
    recipe, tf32 = run.recipe, describe_tf32(run.ds_config, processes.device)
    return [
        *crowded_hosts(processes),
        *run.ds_config.notes,
        *describe_swapping(run.ds_config),
        *corpus_summaries(data),
        *recipe.schedule_in_steps.warnings(recipe.curriculum),
        *idle_tasks(recipe.built_tasks, recipe.curriculum.task_groups, plan.soft_tasks),
        *plan.lines(),
        *([tf32] if tf32 else []),
        *small_held_out_warnings(recipe, data),
        *trained_on_warnings(recipe, data),
        *evaluation_notes(recipe, data),
    ]
