"""Fine-tuning compared step by step with plain transformers and torch: without dropout, from the
same weights and with the same rows in every step, both learn the same.

The other side shares with palm_ds the initial weights and which rows a step has: its texts are
tokenized, padded, labeled and their losses computed by transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from palm_ds.data.stream.example_stream import ExampleStream
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.report.metrics_file import read_metrics
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import open_data
from palm_ds.train.train import train
from palm_ds.weights.weights_folder import export_hf
from tests.helpers.text_tables import small_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
STEPS, BATCH, WARMUP, LR, CLIP, DECAY, EPS = 16, 4, 4, 1e-3, 1.0, 0.01, 1e-6
DS_CONFIG = make_ds_config({"zero_optimization": {"stage": 0}})
Row = Mapping[str, Any]


# Rows ------------------------------------------------------------------------------------------


def words(rng: random.Random, fewest: int = 2, most: int = 9) -> list[str]:
    """Words of one to three tokens."""
    stems, ends = ("good", "bad", "so", "very", "x"), ("", "", "s", "ly")
    return [rng.choice(stems) + rng.choice(ends) for _ in range(rng.randint(fewest, most))]


def class_row(rng: random.Random) -> Row:
    text = " ".join(words(rng))
    return {"text_a": text, "text_b": " ".join(words(rng)), "label": text.split()[0][0]}


def number_row(rng: random.Random) -> Row:
    text = words(rng)
    return {"text_a": " ".join(text), "label": len(text) / 2}


def tags_row(rng: random.Random) -> Row:
    tokens = words(rng)
    return {"tokens": tokens, "tags": ["B-N" if word.endswith("s") else "O" for word in tokens]}


def question_row(rng: random.Random) -> Row:
    context = words(rng, 6, 12)
    at = rng.randrange(len(context))
    start = len(" ".join(context[:at])) + (at > 0)
    answer = {"text": context[at], "start": start}
    return {"question": "good ?", "context": " ".join(context), "answers": [answer]}


# The other side --------------------------------------------------------------------------------


def class_batch(tokenizer: Any, rows: Sequence[Row], labels: Sequence[str]) -> dict[str, Any]:
    firsts, seconds = ([row[column] for row in rows] for column in ("text_a", "text_b"))
    encoded = tokenizer(firsts, seconds, padding=True, return_tensors="pt")
    return {**encoded, "labels": torch.tensor([labels.index(row["label"]) for row in rows])}


def number_batch(tokenizer: Any, rows: Sequence[Row], labels: Sequence[str]) -> dict[str, Any]:
    encoded = tokenizer([row["text_a"] for row in rows], padding=True, return_tensors="pt")
    return {**encoded, "labels": torch.tensor([[row["label"]] for row in rows])}


def tags_batch(tokenizer: Any, rows: Sequence[Row], labels: Sequence[str]) -> dict[str, Any]:
    """The first token of a word has its tag; other tokens have no label."""
    texts = [row["tokens"] for row in rows]
    encoded = tokenizer(texts, is_split_into_words=True, padding=True, return_tensors="pt")
    targets = torch.full(encoded["input_ids"].shape, -100)
    for number, row in enumerate(rows):
        previous = None
        for place, word in enumerate(encoded.word_ids(number)):
            if word is not None and word != previous:
                targets[number, place] = labels.index(row["tags"][word])
            previous = word
    return {**encoded, "labels": targets}


def question_batch(tokenizer: Any, rows: Sequence[Row], labels: Sequence[str]) -> dict[str, Any]:
    questions, contexts = ([row[column] for row in rows] for column in ("question", "context"))
    encoded = tokenizer(questions, contexts, padding=True, return_tensors="pt")
    places = []
    for number, row in enumerate(rows):
        answer = row["answers"][0]
        last = answer["start"] + len(answer["text"]) - 1
        places.append([encoded.char_to_token(number, c, 1) for c in (answer["start"], last)])
    starts, ends = torch.tensor(places).unbind(1)
    return {**encoded, "start_positions": starts, "end_positions": ends}


@dataclass(frozen=True)
class Case:
    row: Callable[[random.Random], Row]
    batch: Callable[[Any, Sequence[Row], Sequence[str]], dict[str, Any]]
    auto: Any
    settings: Mapping[str, Any]


CASES = {
    "classification": Case(
        class_row, class_batch, AutoModelForSequenceClassification, {"dropout": 0.0}
    ),
    "regression": Case(
        number_row,
        number_batch,
        AutoModelForSequenceClassification,
        {"dropout": 0.0, "scale": False},
    ),
    "tagging": Case(tags_row, tags_batch, AutoModelForTokenClassification, {"dropout": 0.0}),
    "reading": Case(question_row, question_batch, AutoModelForQuestionAnswering, {}),
}


def recipe_of(kind: str, folder: Path) -> Recipe:
    """A recipe of one task over new rows."""
    rng = random.Random(7)
    lines = [json.dumps(CASES[kind].row(rng)) + "\n" for _ in range(STEPS * BATCH // 2)]
    (folder / "rows.jsonl").write_text("".join(lines))
    small_tokenizer().save(folder / "tokenizer")
    still = {"dropout": 0.0, "attention_dropout": 0.0}
    values = {
        "backbone": {"preset": "tiny", "task_types": 0, "token_types": 2, **still},
        "length": 64,
        "batch": f"{BATCH} examples",
        "optimizer": {"lr": LR, "weight_decay": DECAY, "clip": CLIP, "eps": EPS},
        "schedule": {"kind": "linear", "warmup": WARMUP},
        "held_out": 0,
        "sources": {
            "rows": {"table": str(folder / "rows.jsonl"), "tokenizer": str(folder / "tokenizer")}
        },
        "tasks": {"task": {"kind": kind, "source": "rows", **CASES[kind].settings}},
        "stages": [{"task": STEPS}],
        "save": {"every": 0},
        "log": {"every": 1},
        "export_onnx": [],
    }
    return make_recipe(values, "recipe")


def same_start(recipe: Recipe, auto: Any, folder: Path) -> tuple[Any, list[list[Row]]]:
    """The initial model of a run of the recipe, in transformers, and the rows of each step."""
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    model = build_model(recipe, DS_CONFIG, data.vocabulary, device=torch.device("cpu"))
    export_hf(
        model,
        folder,
        config=model.backbone.config,
        tokenizer=data.tokenizer,
        head=recipe.built_tasks["task"].hf_export(),
    )
    stream = build_stream(recipe, data)
    assert isinstance(stream, ExampleStream)
    (dataset,) = stream.datasets
    lines = (folder.parent / "rows.jsonl").read_text().splitlines()
    table = [json.loads(line) for line in lines]
    steps = [
        [table[dataset.example(ref.number, ref.layout).item] for row in packed for ref in row]
        for packed in map(stream.step_rows, range(STEPS))
    ]
    return auto.from_pretrained(folder).train(), steps


def loss_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """transformers' loss; of spans, without its scores of padding, which would depend on what else
    is in a batch."""
    outputs = model(**batch)
    if "start_positions" not in batch:
        return outputs.loss
    padding = batch["attention_mask"] == 0
    pairs = (
        (outputs.start_logits, batch["start_positions"]),
        (outputs.end_logits, batch["end_positions"]),
    )
    losses = [F.cross_entropy(x.masked_fill(padding, -torch.inf), at) for x, at in pairs]
    return torch.stack(losses).mean()


def groups_of(model: Any) -> list[dict[str, Any]]:
    """transformers applies weight decay to heads, palm_ds does not."""
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.ndim == 2 and name.startswith("bert.")]
    kept = [p for name, p in named if p.ndim != 2 or not name.startswith("bert.")]
    return [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}]


def plain_losses(model: Any, batches: Sequence[Mapping[str, Any]]) -> list[float]:
    """The loss of each step of a plain loop."""
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR, eps=EPS)
    losses = []
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(step / WARMUP, (STEPS - step + 1) / (STEPS - WARMUP))
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_sixteen_steps_equal_those_of_transformers_and_torch(kind: str, tmp_path: Path) -> None:
    case, recipe = CASES[kind], recipe_of(kind, tmp_path)
    model, steps = same_start(recipe, case.auto, tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    labels = list(model.config.label2id)
    expected = plain_losses(model, [case.batch(tokenizer, rows, labels) for rows in steps])

    assert train(RunSpec(recipe=recipe, ds_config=DS_CONFIG, folder=tmp_path / "run")) == 0
    records = read_metrics(tmp_path / "run/metrics.jsonl").steps
    found = [record["loss"]["task"] for record in records]
    assert found == pytest.approx(expected, rel=1e-5)
    learned = case.auto.from_pretrained(tmp_path / "run/hf").state_dict()
    learned.pop("qa_outputs.bias", None)  # adds the same to all scores: has no gradient but noise
    expected_weights = model.state_dict()
    for name, weights in learned.items():
        torch.testing.assert_close(weights, expected_weights[name], rtol=0, atol=2e-5, msg=name)
