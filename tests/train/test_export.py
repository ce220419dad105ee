"""Which head goes along to Hugging Face, and that transformers opens it with its labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from palm_ds.inference.predictor import open_predictor
from palm_ds.train.export import head_taken
from palm_ds.weights import weights_folder as weights
from palm_ds.weights.formats.huggingface.target import ExportedHead
from tests.helpers.saved_model import TASKS, recipe_of, save_model

KINDS: dict[str, tuple[dict[str, Any], str, int]] = {  # task: (its keys, the class, its outputs)
    "mood": ({}, "AutoModelForSequenceClassification", 3),
    "topic": ({}, "AutoModelForSequenceClassification", 2),
    "size": ({}, "AutoModelForSequenceClassification", 1),
    "pair": ({"strategy": "pointwise"}, "AutoModelForSequenceClassification", 2),
    "answer": ({}, "AutoModelForQuestionAnswering", 2),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_only_task_s_head_goes_along(tmp_path: Path, name: str) -> None:
    more, opener, outputs = KINDS[name]
    run = save_model(tmp_path / "run", [name], tasks={name: {**TASKS[name], **more}})
    asked = open_predictor(run)
    taken = head_taken(recipe_of(run), asked.model.state_dict())
    assert isinstance(taken, ExportedHead)
    config = asked.model.backbone.config
    weights.export_hf(asked.model, tmp_path / "hf", config=config, head=taken)
    theirs = getattr(transformers, opener).from_pretrained(tmp_path / "hf")
    labels = getattr(asked.tasks[name], "labels", ())
    if labels:
        assert tuple(theirs.config.id2label.values()) == labels
    many = name == "topic"
    assert theirs.config.problem_type == ("multi_label_classification" if many else None)
    out = theirs.qa_outputs if name == "answer" else theirs.classifier
    assert out.out_features == outputs
    ours = asked.model.state_dict()[f"heads.{name}.out.weight"]
    torch.testing.assert_close(out.weight.detach(), ours, atol=0, rtol=0)


def test_of_several_tasks_or_of_numbers_on_a_scale_none_goes(tmp_path: Path) -> None:
    both = save_model(tmp_path / "both", ["mood", "topic"])
    assert head_taken(recipe_of(both), open_predictor(both).model.state_dict()) is None
    tasks = {"mood": dict(TASKS["mood"]), "topic": {**TASKS["topic"], "auxiliary": True}}
    one = save_model(tmp_path / "one", ["mood", "topic"], tasks=tasks)
    taken = head_taken(recipe_of(one), open_predictor(one).model.state_dict())
    assert taken is not None and taken.name == "mood"
    scaled = save_model(tmp_path / "s", ["size"], tasks={"size": {**TASKS["size"], "scale": True}})
    assert head_taken(recipe_of(scaled), open_predictor(scaled).model.state_dict()) is None
