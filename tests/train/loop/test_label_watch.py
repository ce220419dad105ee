"""A task without labels is reported once, after its own first steps or at the end."""

from __future__ import annotations

from typing import Any

from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.train.loop.label_watch import FIRST_STEPS, LabelWatch

TASKS = ["words", "order", "never"]


def reported(stages: list[dict[str, Any]], labelled: set[str], *, first: int = 0) -> dict:
    """{task: the number of steps done when it is reported}."""
    curriculum, found = read_stages(stages, TASKS), {}
    watch = LabelWatch(curriculum)
    for step in range(first, curriculum.steps):
        at = curriculum.at(step, seed=1)
        trained = {task for group in at.task_groups for task in TASKS if task in group}
        counts = {task: 8 * (task in labelled & trained) for task in TASKS}
        for task in watch.add(at, counts):
            assert task not in found, "reported twice"
            found[task] = step + 1
    return found


def test_after_the_first_steps_of_its_own() -> None:
    stages = [{"words": 5}, {"words + never": 200}]
    assert reported(stages, {"words"}) == {"never": 5 + FIRST_STEPS}
    assert reported(stages, {"words"}, first=50) == {"never": 50 + FIRST_STEPS}


def test_a_small_share_of_every_step_takes_longer() -> None:
    """A task group with a tenth of each step may have no example in the first ones."""
    assert reported([{"words": 900, "never": 100}], {"words"}) == {"never": 10 * FIRST_STEPS - 5}
    assert reported([{"words": 900, "order": 100}], {"words", "order"}) == {}


def test_at_the_end_of_a_short_run() -> None:
    assert reported([{"words + never": 3}], {"words"}) == {"never": 3}
    assert reported([{"words": 3, "order": 2, "mix": "step"}], {"words", "order"}) == {}
