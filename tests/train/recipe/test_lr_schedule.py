import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.stages import Curriculum, Stage
from palm_ds.train.recipe.lr_schedule import LRSchedule
from palm_ds.train.recipe.stage_settings import StageSettings

TASKS = ["a", "b", "c", "d"]


def factors(schedule: LRSchedule, curriculum: Curriculum) -> list[float]:
    return [
        round(schedule.scale(curriculum.at(step, seed=1), curriculum.steps), 4)
        for step in range(curriculum.steps)
    ]


def test_schedules():
    curriculum = read_stages([{"a": 8}], TASKS)
    assert factors(LRSchedule(kind="linear", warmup=4), curriculum) == [
        *(0.25, 0.5, 0.75, 1.0),
        *(1.0, 0.75, 0.5, 0.25),
    ]
    noam = factors(LRSchedule(kind="noam", warmup=2), curriculum)
    assert noam[:2] == [0.5, 1.0]
    assert noam[7] == 0.5  # sqrt(2 / 8)
    wsd = factors(LRSchedule(kind="wsd", warmup=2, decay=4, end=0.2), curriculum)
    assert wsd == [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]
    assert factors(LRSchedule(kind="constant"), curriculum) == [1.0] * 8
    risen = factors(LRSchedule(kind="constant", warmup=4, start=0.2), curriculum)
    assert risen == [0.4, 0.6, 0.8, 1.0, *[1.0] * 4]
    with pytest.raises(UserError, match=r"schedule.start: needs `warmup`"):
        LRSchedule(kind="constant", start=0.2)


def test_warm_up_as_a_fraction_of_the_steps():
    curriculum = read_stages([{"a": 20}, {"b": 40}], TASKS)
    share, counted = LRSchedule(warmup=0.1), LRSchedule(warmup=6)
    assert factors(share, curriculum) == factors(counted, curriculum)
    restarted = LRSchedule(warmup=0.1, restart="stage")
    assert restarted.warmups(curriculum) == [2, 4]
    with pytest.raises(UserError, match="neither a number of steps nor a fraction"):
        LRSchedule(warmup=2.5)


def test_restart_at_each_stage():
    curriculum = read_stages([{"a": 4}, {"b": 4}], TASKS)
    schedule = LRSchedule(kind="noam", warmup=2, restart="stage")
    assert factors(schedule, curriculum)[:4] == factors(schedule, curriculum)[4:]
    once = LRSchedule(kind="noam", warmup=2)
    assert factors(once, curriculum)[4] < 1


@pytest.mark.parametrize(
    "stages",
    [
        {"continual": TASKS, "steps": 20},
        {"joint": TASKS, "steps": 20},
        {"alternate": TASKS, "steps": 20},
        {"sequential": TASKS, "steps": {"a": 20, "b": 7, "c": 12, "d": 9}},
        [{"a": 20}, {"b": 9, "c": 11, "mix": "step"}],
    ],
)
@pytest.mark.parametrize(
    "values",
    [
        {"kind": "linear", "warmup": 3},
        {"kind": "wsd", "warmup": 2, "decay": 4, "end": 0.1},
        {"kind": "noam", "warmup": 3},
        {"kind": "constant", "warmup": 5},
    ],
)
def test_a_restarted_stage_is_scheduled_like_a_separate_run(stages, values):
    curriculum = read_stages(stages, TASKS)
    schedule = LRSchedule(**values, restart="stage")
    whole = factors(schedule, curriculum)
    for number, stage in enumerate(curriculum.stages):
        alone = Curriculum((Stage(stage.steps_of, stage.mix, 0),))
        part = whole[stage.first : stage.first + stage.steps]
        assert part == factors(LRSchedule(**values), alone)
        assert part.index(1.0) == schedule.warmups(curriculum)[number] - 1
    assert LRSchedule(**values).warmups(curriculum)[1:] == [0] * (len(curriculum.stages) - 1)


def test_a_run_that_is_too_short_for_its_schedule():
    curriculum = read_stages([{"a": 4}, {"b": 16}], TASKS)
    assert LRSchedule(warmup=20).warnings(curriculum) == []
    assert LRSchedule(kind="wsd", warmup=4, decay=16).warnings(curriculum) == []
    assert LRSchedule(kind="wsd", warmup=10, decay=20).warnings(curriculum) == [
        "note: schedule: the run has 20 steps, too few for 10 of warm-up and 20 of decay"
    ]
    assert LRSchedule(warmup=8, restart="stage").warnings(curriculum) == [
        "note: schedule: stage 1 ends after 4 of 8 warm-up steps, at 50 % of `lr`"
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear", "decay": 5}, "schedule.decay: linear takes no decay steps"),
        ({"kind": "noam", "warmup": 5, "decay": 5}, "schedule.decay: noam takes no decay steps"),
        ({"kind": "constant", "end": 0.1}, "schedule.end: constant has no end"),
    ],
)
def test_a_key_that_the_kind_does_not_use_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        LRSchedule(**values)


OWN = "tests.helpers.own_schedule"
STAIRS = {"kind": f"{OWN}.Stairs", "options": {"drops": [0.5, 0.75]}}


def scales(schedule: LRSchedule, *steps: int) -> list[float]:
    stages = [{name: number} for name, number in zip("ab", steps, strict=False)]
    curriculum = read_stages(stages, ["a", "b"])
    at = [curriculum.at(step, seed=1) for step in range(curriculum.steps)]
    return [schedule.scale(each, curriculum.steps) for each in at]


def test_a_class_decides_after_the_warm_up() -> None:
    stairs = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert scales(LRSchedule(**STAIRS), 8) == stairs
    assert scales(LRSchedule(**STAIRS, warmup=2), 8) == [0.5, *stairs[1:]]
    assert scales(LRSchedule(**STAIRS, restart="stage"), 8, 8) == stairs * 2
    jump = scales(LRSchedule(kind=f"{OWN}.Triangle", warmup=0.4), 10)
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
        ({"kind": f"{OWN}.NOT_A_SCHEDULE"}, "is not a subclass of .*lr_schedule.Schedule"),
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
