"""What a student learns of a teacher's scores, against transformers and plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812
from transformers import BertConfig, BertForSequenceClassification

from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.processes import start
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import open_data
from palm_ds.train.teachers.distillation_plan import resolve_teachers
from palm_ds.train.teachers.teachers import attach_teachers, build_teachers
from tests.helpers.hf_names import from_names
from tests.helpers.saved_model import FURTHER, texts, write_rows
from tests.helpers.text_tables import small_tokenizer

LABELS = ["bad", "fair", "good"]
TEMPERATURE, LABEL_WEIGHT, SOFT_WEIGHT = 3.0, 0.25, 0.5


def bert(layers: int, seed: int) -> BertForSequenceClassification:
    """With scores that differ from text to text."""
    torch.manual_seed(seed)
    sizes = dict(num_hidden_layers=layers, hidden_size=16, num_attention_heads=2)
    longest = dict(intermediate_size=64, max_position_embeddings=32)
    config = BertConfig(vocab_size=small_tokenizer().size, num_labels=3, **sizes, **longest)
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def student_of(folder: Path, rows: list[dict]) -> Recipe:
    small_tokenizer().save(folder / "vocabulary")
    source = {
        "table": str(write_rows(folder / "rows.jsonl", rows)),
        "tokenizer": str(folder / "vocabulary"),
        "read": {"missing_labels": "keep", "columns": FURTHER},
    }
    task = {"kind": "classification", "source": "texts", "labels": LABELS, "weight": LABEL_WEIGHT}
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 32}
    logits = {"temperature": TEMPERATURE, "weight": SOFT_WEIGHT}
    return make_recipe(
        {
            "backbone": {**sizes, "token_types": 2, "task_types": 0},
            "length": 32,
            "batch": f"{len(rows)} examples",
            "sources": {"texts": source},
            "tasks": {"mood": task},
            "stages": [{"mood": 1}],
            "held_out": 0.0,
            "teacher": {
                "path": str(folder / "teacher"),
                "heads": {"mood": "classifier"},
                "logits": logits,
            },
        }
    )


def test_gradients_are_those_of_a_plain_loop_over_texts(tmp_path) -> None:
    """Labels: the mean over the rows that have one; scores: T^2 KL, the mean over all rows."""
    rows = [row | ({"label": None} if n % 3 == 0 else {}) for n, row in enumerate(texts(10))]
    teacher, student = bert(2, seed=1), bert(1, seed=2)
    teacher.save_pretrained(tmp_path / "teacher")
    wanted = by_hand(student, teacher, rows)
    found = gradients(student_of(tmp_path, rows), student)
    pairs = {
        "heads.mood.out.weight": "classifier.weight",
        "backbone.pooler.dense.weight": "bert.pooler.dense.weight",
        "backbone.word.weight": "bert.embeddings.word_embeddings.weight",
    }
    for ours, theirs in pairs.items():
        torch.testing.assert_close(found[ours], wanted[theirs], rtol=1e-4, atol=1e-6)


def by_hand(
    student: BertForSequenceClassification, teacher: BertForSequenceClassification, rows: list[dict]
) -> dict[str, torch.Tensor]:
    hard, soft = [], []
    tokenizer = small_tokenizer()
    for row in rows:
        ((inner, _),) = tokenizer.encode_texts([row["text_a"]])
        ids = torch.tensor([[tokenizer.vocabulary.cls, *inner.tolist(), tokenizer.vocabulary.sep]])
        mine = student(input_ids=ids).logits
        with torch.no_grad():
            its = teacher(input_ids=ids).logits
        logs = (x.div(TEMPERATURE).log_softmax(-1) for x in (mine, its))
        soft.append(F.kl_div(*logs, reduction="sum", log_target=True) * TEMPERATURE**2)
        if row["label"]:
            hard.append(F.cross_entropy(mine, torch.tensor([LABELS.index(row["label"])])))
    assert 0 < len(hard) < len(soft)
    losses = LABEL_WEIGHT * torch.stack(hard).mean() + SOFT_WEIGHT * torch.stack(soft).mean()
    losses.backward()
    return {n: p.grad for n, p in student.named_parameters() if p.grad is not None}


def gradients(recipe: Recipe, student: BertForSequenceClassification) -> dict[str, torch.Tensor]:
    """Those of the first step of a recipe."""
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    run = RunSpec(recipe=recipe, ds_config=make_ds_config({}), folder=Path("none"))
    plan = resolve_teachers(recipe, data)
    model = build_model(recipe, run.ds_config, data.vocabulary, device=torch.device("cpu"))
    attach_teachers(plan, model, seed=1)
    state = from_names(student.state_dict(), "bert")[0]
    state = {name.replace("heads.classifier", "heads.mood"): x for name, x in state.items()}
    missing, extra = model.load_state_dict(state, strict=False)
    assert not missing and not extra
    teachers = build_teachers(plan, model, run, data, start(run.ds_config))
    assert teachers is not None
    stream = build_stream(recipe, data, soft=plan.soft_tasks)
    batch = teachers(stream.build(0, stream.step_rows(0)), 0)
    weights = {"mood": LABEL_WEIGHT} | model.teacher_weights
    outputs = model.eval()(batch)
    losses = [weights[name] * x.loss_sum / batch.count(name) for name, x in outputs.items()]
    torch.stack(losses).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
