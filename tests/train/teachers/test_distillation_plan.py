"""Which head of a teacher teaches which task, and teachers that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.processes import start
from palm_ds.text.tokenizer import wordpiece
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec, check_folder, write_folder
from palm_ds.train.setup.sources import Data, check_tables, open_data
from palm_ds.train.teachers.distillation_plan import DistillationPlan, resolve_teachers
from palm_ds.train.teachers.teachers import attach_teachers, build_teachers
from tests.helpers.saved_model import recipe_of, save_model, texts, write_rows
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.text_tables import SPECIALS, WORDS


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A run of a class, several classes, a number and masked words."""
    folder = tmp_path_factory.mktemp("teacher")
    tasks = {
        "mood": {"kind": "classification", "source": "texts"},
        "topic": {"kind": "multi_label", "source": "texts", "label_column": "label_topic"},
        "words": {"kind": "masked_words", "source": "texts"},
    }
    return save_model(folder, stages=tuple(tasks), tasks=tasks)


def student(teacher: Path, settings: dict[str, Any], **changes: Any) -> tuple[Recipe, Data]:
    values = recipe_of(teacher).resolved() | {"teacher": {"path": str(teacher), **settings}}
    values["backbone"] |= {"hidden_size": 8, "num_layers": 1}
    recipe = make_recipe(values | changes)
    return recipe, open_data(recipe)


def test_heads_of_the_same_name_or_the_only_one_that_fits(teacher) -> None:
    recipe, data = student(teacher, {})
    plan = resolve_teachers(recipe, data)
    assert plan.folders[0].head_of == {"mood": "mood", "topic": "topic", "words": "words"}
    assert plan.weights == {"mood": 1.0, "topic": 1.0, "words": 1.0}
    tasks = {
        "feeling": {"kind": "classification", "source": "texts"},
        "masks": {"kind": "masked_words", "source": "texts"},
        "size": {"kind": "regression", "source": "texts", "label_column": "label_size"},
    }
    labels = {"labels": ["bad", "fair", "good"]}
    tasks["feeling"] |= labels
    stages = [dict.fromkeys(tasks, 1)]
    settings = {"heads": {"feeling": "mood"}, "logits": {"weight": 0.5}}
    plan = resolve_teachers(*student(teacher, settings, tasks=tasks, stages=stages))
    assert plan.folders[0].head_of == {"feeling": "mood", "masks": "words"}
    assert plan.soft_tasks.keys() == {"feeling", "masks"}
    assert "teaches feeling, masks" in plan.lines()[0]


@pytest.mark.parametrize("precision", ["", "bf16"])
def test_the_plan_knows_its_size(teacher, precision) -> None:
    """The encoder with its pooler, and the heads that teach."""
    settings = {"precision": precision, "logits": {"tasks": {"mood": 1}}}
    recipe, data = student(teacher, settings)
    (found,) = resolve_teachers(recipe, data).sizes("fp32")
    weights = load_file(teacher / "weights" / "weights.safetensors")
    used = [x for n, x in weights.items() if not n.startswith(("heads.topic.", "heads.words."))]
    assert found.parameters == sum(x.numel() for x in used)
    assert found.bytes(2) == found.parameters * (2 if precision else 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "none/such"}, "no such file or folder"),
        ({"logits": {"tasks": {"mod": 1}}}, "no task 'mod'; did you mean"),
        ({"heads": {"mood": "modo"}}, "has no head 'modo'; did you mean"),
        ({"states_of": "x"}, "no 'x' in `models`"),
    ],
)
def test_wrong_references(teacher, settings, message) -> None:
    with pytest.raises(UserError, match=message):
        resolve_teachers(*student(teacher, settings))


@pytest.mark.parametrize("kind", ["replaced_token_detection", "back_translation_masked_lm"])
def test_a_teacher_reads_what_the_student_reads(teacher, kind: str, tmp_path) -> None:
    write_small_corpus(tmp_path / "corpus", documents=8)
    changes = {
        "sources": {"text": {"corpus": str(tmp_path / "corpus")}},
        "tasks": {"made": {"kind": kind, "source": "text"}},
        "stages": [{"made": 1}],
    }
    message = "teacher: tasks.made lets the encoder read n-grams, or tokens that a model fills in"
    with pytest.raises(UserError, match=message):
        resolve_teachers(*student(teacher, {"hidden_states": {}}, **changes))


def test_another_vocabulary_is_for_palm_ds_teach(teacher, tmp_path) -> None:
    words = [*SPECIALS, *reversed(WORDS)]
    other = save_model(tmp_path / "other", stages=("mood",), tokenizer=wordpiece(words, lower=True))
    with pytest.raises(UserError, match="another vocabulary.*palm-ds teach"):
        resolve_teachers(*student(teacher, {"path": str(other)}))


def test_a_teacher_must_have_the_classes_and_the_length(teacher, tmp_path) -> None:
    recipe, data = student(teacher, {}, length=60)
    assert resolve_teachers(recipe, data)
    recipe, data = student(teacher, {}, length=64)
    short = save_model(
        tmp_path / "short",
        stages=("mood",),
        backbone={"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 32},
    )
    recipe, data = student(teacher, {"path": str(short)}, length=64)
    with pytest.raises(UserError, match="reads up to 32 tokens; rows have up to 64"):
        resolve_teachers(recipe, data)
    tasks = {"mood": {"kind": "classification", "source": "texts", "label_column": "label_topic"}}
    tasks["mood"]["labels"] = ["x", "y"]  # type: ignore[assignment]
    recipe, data = student(teacher, {}, tasks=tasks, stages=[{"mood": 1}])
    with pytest.raises(UserError, match="has no head for the task 'mood'; its heads: mood, topic"):
        resolve_teachers(recipe, data)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (
            {"labels": ["good", "bad", "fair"]},
            {},
            r"another order; give tasks.mood.labels: \[bad, f",
        ),
        ({"labels": ["a", "b", "c"]}, {"heads": {"mood": "words"}}, "'words' cannot teach 'mood'"),
        ({"labels": ["a", "b"]}, {"heads": {"mood": "mood"}}, "'mood' cannot teach 'mood'"),
        ({"labels": ["art", "sport"]}, {}, "has no head for the task 'mood'"),
    ],
    ids=["another order", "another kind", "other classes", "several classes a text"],
)
def test_heads_that_cannot_teach_a_task(teacher, task, settings, message) -> None:
    changed = {"mood": {"kind": "classification", "source": "texts", **task}}
    recipe, data = student(teacher, settings, tasks=changed, stages=[{"mood": 1}])
    with pytest.raises(UserError, match=message):
        resolve_teachers(recipe, data)


def test_tags_of_a_crf_are_those_of_a_crf(tmp_path) -> None:
    crf = {"names": {"kind": "tagging", "source": "words", "crf": True}}
    folder = save_model(tmp_path / "crf", stages=("names",), tasks=crf)
    recipe, data = student(folder, {})
    assert resolve_teachers(recipe, data).soft_tasks.keys() == {"names"}
    plain = {"names": {"kind": "tagging", "source": "words"}}
    recipe, data = student(folder, {}, tasks=plain)
    with pytest.raises(UserError, match="has no head for the task 'names'"):
        resolve_teachers(resolve(recipe, data), data)


def learning(recipe: Recipe, data: Data) -> tuple[DistillationPlan, Any, Any]:
    """What a model learns, its batch of the first step, and the loss of each part."""
    ds_config = make_ds_config({"train_micro_batch_size_per_gpu": 1})
    plan = resolve_teachers(recipe, data)
    model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
    attach_teachers(plan, model, seed=1)
    run = RunSpec(recipe=recipe, ds_config=ds_config, folder=Path("none"))
    teachers = build_teachers(plan, model, run, data, start(ds_config))
    assert teachers is not None
    stream = build_stream(recipe, data, soft=plan.soft_tasks)
    batch = teachers(stream.build(0, stream.step_rows(0)), 0)
    return plan, batch, model.eval()(batch)


def test_several_teachers_are_averaged_by_weight(teacher, tmp_path) -> None:
    """A teacher that counts three times among two is one of the same weight."""
    other = save_model(tmp_path / "b", stages=("mood",), seed=5)
    found = {}
    for name, weights in {"one": (1, 0), "other": (0, 1), "both": (3, 1)}.items():
        paths = zip("ab", (teacher, other), weights, strict=True)
        models = {key: {"path": str(path), "weight": w} for key, path, w in paths if w}
        settings = {"path": "", "models": models, "logits": {"tasks": {"mood": 1}}}
        _, batch, _ = learning(*student(teacher, settings))
        found[name] = batch.labels["teacher.mood"][1]
    torch.testing.assert_close(found["both"], 0.75 * found["one"] + 0.25 * found["other"])


@pytest.mark.parametrize("read", ["mean", "pooler"])
def test_a_teachers_head_reads_what_it_was_trained_on(read: str, tmp_path) -> None:
    """Whatever the student's reads, which by default depends on what the student starts from."""
    mood = {"kind": "classification", "source": "texts", "pooling": read}
    folder = save_model(tmp_path / "teacher", stages=("mood",), tasks={"mood": mood})
    found = []
    for own in ("mean", "pooler"):
        for heads in ({}, {"mood": "mood"}):
            tasks = {"mood": {**mood, "pooling": own, "labels": ["bad", "fair", "good"]}}
            made = student(folder, {"heads": heads}, tasks=tasks)
            plan, batch, _ = learning(*made)
            assert plan.folders[0].head_of == {"mood": "mood"}
            found.append(batch.labels["teacher.mood"][1])
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_one_head_may_teach_several_tasks(teacher) -> None:
    tasks: dict[str, Any] = {
        name: {"kind": "classification", "source": "texts", "labels": ["bad", "fair", "good"]}
        for name in "ab"
    }
    changes = {"tasks": tasks, "stages": [{"a": 1, "b": 1}], "batch": "12 examples"}
    plan, batch, _ = learning(*student(teacher, {}, **changes))
    assert plan.folders[0].head_of == {"a": "mood", "b": "mood"}
    found = [batch.labels[f"teacher.{name}"][1] for name in "ab"]
    rows = [{tuple(row) for row in each.round(decimals=3).tolist()} for each in found]
    assert rows[0] & rows[1]  # of texts that both have


def test_each_task_is_read_with_its_own_task_embedding(tmp_path) -> None:
    """A student without one has the same row for all tasks."""
    tasks: dict[str, Any] = {
        "mood": {"kind": "classification", "source": "texts", "task_id": 1},
        "topic": {"kind": "multi_label", "source": "texts", "label_column": "label_topic"},
    }
    tasks["topic"] |= {"task_id": 2, "labels": ["art", "sport"]}
    tasks["mood"]["labels"] = ["bad", "fair", "good"]
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}
    backbone = {**sizes, "token_types": 2, "task_types": 4}
    folder = save_model(tmp_path / "run", stages=tuple(tasks), tasks=tasks, backbone=backbone)
    learning(*student(folder, {}))
    here = {name: {**task, "task_id": -1} for name, task in tasks.items()}
    plain = {"backbone": {**backbone, "task_types": 0}, "tasks": here}
    with pytest.raises(UserError, match="'topic' and of another task with different task embed"):
        learning(*student(folder, {}, **plain))
    models = {name: {"path": str(folder), "tasks": [name]} for name in tasks}
    _, _, outputs = learning(*student(folder, {"path": "", "models": models}, **plain))
    assert {"teacher.mood", "teacher.topic"} <= set(outputs)


def test_rows_without_labels_have_soft_labels_alone(teacher, tmp_path) -> None:
    rows = texts(8)
    for row in rows[::2]:
        row["label"] = None
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    recipe, data = student(teacher, {})
    values = recipe.resolved()
    values["sources"]["texts"] |= {"table": file, "validation": file}
    values["tasks"] = {"mood": values["tasks"]["mood"]}
    values |= {"stages": [{"mood": 1}], "batch": "8 examples"}
    with pytest.raises(UserError, match="label is null"):
        open_data(make_recipe(values))
    values["sources"]["texts"]["read"]["missing_labels"] = "keep"
    values["sources"]["texts"]["validation"] = ""
    values["held_out"] = 0.0
    recipe = make_recipe(values)
    data = open_data(recipe)
    with pytest.raises(UserError, match="label is empty: no teacher labels the rows of tasks.mood"):
        check_tables(recipe, data)
    check_tables(recipe, data, taught=["mood"])
    held = make_recipe(values | {"held_out": 0.6})
    with pytest.raises(UserError, match="need labels; give sources.texts.validation, or `held_ou"):
        check_tables(held, open_data(held), taught=["mood"])
    _, batch, outputs = learning(recipe, data)
    assert len(batch.labels["mood"][0]) == 4 and len(batch.labels["teacher.mood"][0]) == 8
    assert set(outputs) == {"mood", "teacher.mood"} and outputs["teacher.mood"].loss_sum > 0


def test_more_tokens_than_there_are(teacher) -> None:
    tasks = {"words": {"kind": "masked_words", "source": "texts", "rate": 0.5}}
    found = []
    for top_k in (0, 1000):
        settings = {"logits": {"top_k": top_k}}
        recipe, data = student(teacher, settings, tasks=tasks, stages=[{"words": 1}])
        found.append(learning(recipe, data))
    (_, _, every), (_, batch, best) = found
    assert batch.teacher.words["words"].ids.shape[1] == data.vocabulary.size
    torch.testing.assert_close(best["teacher.words"].loss_sum, every["teacher.words"].loss_sum)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_teacher_of_half_precision_teaches_nearly_the_same(teacher, precision) -> None:
    """Scores of classes and masked words, and every kind of state."""
    inside: dict[str, Any] = {"hidden_states": {}, "relations": {"heads": 2}, "embeddings": {}}
    found = {}
    for each in ("fp32", precision):
        settings = {**inside, "logits": {}, "precision": each}
        _, _, outputs = learning(*student(teacher, settings))
        found[each] = {name: float(x.loss_sum.detach()) for name, x in outputs.items()}
    taught = {name for name in found["fp32"] if name.startswith("teacher.")}
    assert {"teacher.mood", "teacher.words", "teacher.relations"} < taught
    assert found[precision] == pytest.approx(found["fp32"], rel=0.03, abs=1e-3)
    assert any(found[precision][name] != found["fp32"][name] for name in taught)


def test_a_changed_teacher_is_refused_on_resume(teacher, tmp_path) -> None:
    own = save_model(tmp_path / "own", stages=("mood",))
    recipe, data = student(teacher, {"path": str(own)})
    run = RunSpec(recipe=recipe, ds_config=make_ds_config({}), folder=tmp_path / "run")
    write_folder(run, {}, data)
    assert check_folder(run, open_data(recipe)) == []
    save_model(tmp_path / "own", stages=("mood",), seed=2)
    with pytest.raises(UserError, match="a different recipe: the contents of .*own"):
        check_folder(run, open_data(recipe))


def test_a_teacher_reads_the_rows_of_every_stage(teacher) -> None:
    """Not only rows of the recipe's own length: it would fail when the longer ones come."""
    stages = [{"mood": 1}, {"mood": 1, "length": 128}]
    changes = {"length": 64, "batch": "4 rows", "stages": stages}
    recipe, _ = student(teacher, {})
    changes["backbone"] = recipe.resolved()["backbone"] | {"max_positions": 128}
    with pytest.raises(UserError, match="reads up to 64 tokens; rows have up to 128"):
        resolve_teachers(*student(teacher, {}, **changes))
