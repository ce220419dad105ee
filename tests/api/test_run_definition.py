"""A run is defined, and trains, apart from the trainer that a user sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import palm_ds as palm
from palm_ds.api.base_trainer import BaseTrainer
from palm_ds.api.run_definition import RunDefinition, TaskMixture
from palm_ds.api.training import TrainingSession
from palm_ds.data.tasks.task_with_data import TaskWithData


def task(name: str, ratio: float = 1.0) -> TaskWithData:
    rows: list[Any] = [{"text_a": "w1 w2", "label": "a"}, {"text_a": "w3", "label": "b"}]
    return palm.tasks.Classification.on(name=name, train=rows, mix_ratio=ratio)


def test_the_steps_of_one_task_and_of_a_mixture() -> None:
    one, other, third = task("one"), task("other", 0.5), task("third")
    assert TaskMixture(groups=[[one]]).stages(2.0) == [{"one": "2 epochs"}]
    several = TaskMixture(groups=[[one, other], [third]], mix="step", reference="third")
    assert [each.name for each in several.tasks] == ["one", "other", "third"]
    assert several.stages(3.0) == {
        "joint": ["one + other", "third"],
        "mix": "step",
        "sampler": {
            "mix_ratio": {"one + other": 1.0, "third": 1.0},
            "reference": "third",
            "epochs": 3.0,
        },
    }
    other_first = TaskMixture(groups=[[third], [other, one]], mix="batch")
    assert other_first.stages(1.0)["sampler"] == {
        "mix_ratio": {"third": 1.0, "other + one": 0.5},
        "reference": "third",
        "epochs": 1.0,
    }


def test_a_trainer_has_its_parts(tmp_path: Path) -> None:
    """It inherits from one abstract class, and shows its definition and where training is."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nw1\nw2\nw3\n")
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 16}
    start = palm.Backbone.from_config(sizes, tokenizer=tmp_path / "vocab.txt")
    several = palm.MultiHeadTrainer(
        [task("one"), task("other")], backbone=start, reference="other", folder=tmp_path / "run"
    )
    assert type(several).__mro__[1] is BaseTrainer
    assert isinstance(several.definition, RunDefinition)
    assert isinstance(several.session, TrainingSession)
    assert several.session.definition is several.definition
    assert several.reference == "other"
    several.session.opened_at = 3
    assert several.cur_train_step == 3
    before = several.recipe
    assert several.recipe is before is several.definition.recipe
    several.session.invalidate()
    assert several.recipe is not before
