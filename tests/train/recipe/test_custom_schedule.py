"""Learning-rate schedules of the user's own, in the recipe and in a stage."""

from __future__ import annotations

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.train.recipe.lr_schedule import LRSchedule
from palm_ds.train.recipe.stage_settings import StageSettings

OWN = "tests.helpers.own_schedule"
STAIRS = {"kind": f"{OWN}.Stairs", "options": {"drops": [0.5, 0.75]}}


def factors(schedule: LRSchedule, *steps: int) -> list[float]:
    stages = [{name: number} for name, number in zip("ab", steps, strict=False)]
    curriculum = read_stages(stages, ["a", "b"])
    at = [curriculum.at(step, seed=1) for step in range(curriculum.steps)]
    return [schedule.scale(each, curriculum.steps) for each in at]


def test_a_class_decides_after_the_warm_up() -> None:
    stairs = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert factors(LRSchedule(**STAIRS), 8) == stairs
    assert factors(LRSchedule(**STAIRS, warmup=2), 8) == [0.5, *stairs[1:]]
    assert factors(LRSchedule(**STAIRS, restart="stage"), 8, 8) == stairs * 2
    jump = factors(LRSchedule(kind=f"{OWN}.Triangle", warmup=0.4), 10)
    assert jump[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6])


def test_a_stage_has_one_of_its_own() -> None:
    own = StageSettings.read({"schedule": STAIRS}, "stages[0]", length=8, batch="8 rows")
    curriculum = read_stages([{"a": 4}, {"b": 8}], ["a", "b"])
    found = [
        own.schedule_scale(curriculum.at(step, seed=1), schedule=LRSchedule(), steps=12)
        for step in range(4, 12)
    ]
    assert found == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "lineal"}, r'schedule.kind: no "lineal"; did you mean "linear"\? \(or module'),
        ({"options": {"a": 1}}, "schedule.options: only for a schedule of your own"),
        ({"kind": f"{OWN}.Missing"}, "own_schedule has no 'Missing'"),
        ({"kind": f"{OWN}.Stair"}, "own_schedule has no 'Stair'; did you mean \"Stairs\"?"),
        ({"kind": f"{OWN}.NOT_A_SCHEDULE"}, "is not a subclass of .*custom_schedule.Schedule"),
        ({"kind": f"{OWN}.Stairs"}, "schedule.options.drops: missing"),
        ({**STAIRS, "options": {"drop": 1}}, "schedule.options.drop: unknown key"),
        ({"kind": f"{OWN}.Triangle", "options": {"a": 1}}, "the class takes no options"),
        ({"kind": f"{OWN}.Counting"}, "asked in another order, .*; compute it from the step alone"),
        ({"kind": f"{OWN}.Negative"}, "at step 333 of 1,000 is -2.33; expected 0 or more"),
        ({"kind": f"{OWN}.Broken"}, "fails in a trial: ZeroDivisionError"),
        ({**STAIRS, "end": 0.1}, "schedule.end: .* has no end"),
    ],
)
def test_refused(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LRSchedule(**values)
