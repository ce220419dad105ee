"""Whole runs of the program: pretraining on text that is here, (c) fine-tuning and prediction at
MiniLM's size, compared with transformers.Trainer."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.context import Context, Row, seconds_of
from benchmarks.gpu_parts.models import SHAPES, WORDS
from benchmarks.gpu_parts.trainer import Clock, bert_config, make_trainer, missing, outside_a_run

LENGTH, BATCH = 128, 32


def real_text(context: Context) -> None:
    """`palm-ds pretrain` on the English text that ships with Python: what its log says, data and
    all, with the base shape and rows of 512."""
    if importlib.util.find_spec("deepspeed") is None:
        context.add(skipped="DeepSpeed is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        context.measure(lambda: _prepared(Path(folder), context), part="prepare the corpus")
        context.measure(lambda: _pretrained(Path(folder), context), needs=15, part="pretrain")


def _prepared(folder: Path, context: Context) -> Row:
    from palm_ds.corpus.options import TextOptions
    from palm_ds.corpus.prepare import PrepareOptions, prepare

    text = TextOptions(language="en", lower=True)
    options = PrepareOptions(text=text, train="wordpiece", vocab_size=200 if context.toy else 8000)
    source = "embedded"
    if context.toy:
        source = str(folder / "text.jsonl")
        words = [f"Word {n} is here. It is followed by word {n + 1}." for n in range(400)]
        lines = [json.dumps({"text": " ".join(words[n : n + 9])}) for n in range(0, 400, 9)]
        Path(source).write_text("\n".join(lines) + "\n")
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(folder / "corpus", [source], options)
    return {}


def _pretrained(folder: Path, context: Context) -> Row:
    shape, length, rows, steps = ("toy", 64, 4, 4) if context.toy else ("base", 512, 128, 120)
    recipe = {
        "seed": 1,
        "backbone": {**_sizes(shape), "max_positions": length, "vocab_size": 30_528},
        "length": length,
        "batch": f"{rows * length} tokens",
        "optimizer": {"lr": 1e-4, "clip": 1.0},
        "schedule": {"kind": "linear", "warmup": 10},
        "sources": {"text": {"corpus": str(folder / "corpus")}},
        "tasks": {
            "knowledge_masking": {"source": "text", "units": ["word"]},
            "sentence_reordering": {"source": "text", "most": 3},
        },
        "stages": [{"sentence_reordering + knowledge_masking": steps}],
        "evaluate": {"examples": 0},
        "save": {"every": 0},
        "log": {"every": max(steps // 4, 1)},
    }
    _train(recipe, folder / "run", context, micro_rows=rows)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = [record for record in records if record["kind"] == "step"][-1]
    names = ("tokens_per_second", "flops_per_second", "mfu", "data_wait", "memory_allocated")
    return {name: found[name] for name in (*names, "compiled") if name in found}


def _sizes(shape: str) -> dict[str, Any]:
    width, layers, heads = SHAPES[shape]
    return {"hidden_size": width, "num_layers": layers, "num_heads": heads, "task_types": 0}


def _train(
    recipe: Mapping[str, Any],
    folder: Path,
    context: Context,
    *,
    micro_rows: int | None = None,
    on_event: Any = None,
) -> None:
    from palm_ds.runtime.deepspeed.ds_config import make_ds_config
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    on_gpu = context.device.type == "cuda"
    values: dict[str, Any] = {"zero_optimization": {"stage": 1 if on_gpu else 0}}
    values["palm_ds"] = {"data_workers": 4 if on_gpu else 0}
    values |= {context.precision: {"enabled": True}} if on_gpu else {}
    values |= {"train_micro_batch_size_per_gpu": micro_rows} if micro_rows else {}
    spec = RunSpec(
        recipe=make_recipe(dict(recipe)), ds_config=make_ds_config(values), folder=folder
    )
    with contextlib.redirect_stdout(io.StringIO()):
        code = train(spec, on_event)
    assert code == 0, f"training ended with exit code {code}"


def finetuning(context: Context) -> None:
    """Classification with a randomly initialized encoder of MiniLM's shape (6 layers of 384): rows
    of 8 to 120 words, batches of 32 examples, and predictions for them."""
    if reason := missing():
        context.add(skipped=reason)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), 96 if context.toy else 8000
        _write_inputs(folder, count, "toy" if context.toy else "minilm")
        if importlib.util.find_spec("deepspeed"):
            context.measure(lambda: _palm_ds(folder, context), program="palm_ds")
        else:
            context.add(program="palm_ds", skipped="DeepSpeed is not installed")
        context.measure(lambda: _transformers(folder, context), program="transformers")


def _write_inputs(folder: Path, count: int, shape: str) -> None:
    """A checkpoint with a vocabulary of whole words, and rows of them with a label."""
    from transformers import BertForSequenceClassification, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{number}" for number in range(WORDS - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    torch.manual_seed(1)
    config = bert_config(shape, LENGTH, 0.1)
    BertForSequenceClassification(config).save_pretrained(folder / "encoder")
    tokenizer = BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder / "encoder")
    (folder / "encoder/vocab.txt").write_text((folder / "vocab.txt").read_text())
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(count):
            text = rng.zipf(1.2, int(rng.integers(8, 121))) % (WORDS - 5)
            row = {"text_a": " ".join(f"w{n}" for n in text), "label": str(int(text[0]) % 2)}
            file.write(json.dumps(row) + "\n")


def _palm_ds(folder: Path, context: Context) -> Row:
    marks: dict[str, float] = {}
    tokens = [0, 0]

    def on_event(event: str, facts: Any) -> None:
        if event == "step" and facts["step"] == 10:
            torch.cuda.synchronize() if context.device.type == "cuda" else None
            marks["begin"] = time.perf_counter()
        elif event == "step" and "begin" in marks:
            tokens[0] += facts["result"].tokens
            tokens[1] += 1
            marks["end"] = time.perf_counter()

    recipe = {
        "seed": 1,
        "init_from": str(folder / "encoder"),
        "length": LENGTH,
        "batch": f"{8 if context.toy else BATCH} examples",
        "optimizer": {"lr": 5e-5, "weight_decay": 0.01, "clip": 1.0},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {"rows": {"table": str(folder / "rows.jsonl")}},
        "held_out": 0.02,
        "tasks": {"task": {"kind": "classification", "source": "rows"}},
        "stages": [{"task": "2 epochs"}],
        "save": {"every": 0},
        "log": {"every": 1_000_000},
    }
    _train(recipe, folder / "run", context, on_event=on_event)
    seconds = marks["end"] - marks["begin"]
    found: Row = {"tokens_per_s": round(tokens[0] / seconds)}
    found["steps_per_s"] = round(tokens[1] / seconds, 1)
    return found | {"predicted_rows_per_s": round(_predict_rate(folder, context))}


def _predict_rate(folder: Path, context: Context) -> float:
    from palm_ds.data.reader import open_table
    from palm_ds.inference.trained_model import TrainedModel

    predictor = TrainedModel.open(folder / "run", device=str(context.device)).predictor()
    [each] = predictor.passes
    table = open_table(str(folder / "rows.jsonl"), each.read)
    rows = 0

    def predict() -> None:
        nonlocal rows
        rows = sum(len(chunk.predictions["task"]) for chunk in predictor.predict(each, source))

    source = predictor.source(table)
    predict()
    source = predictor.source(table)  # texts are tokenized again
    return len(table) / seconds_of(predict, context.device)


@outside_a_run()
def _transformers(folder: Path, context: Context) -> Row:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder / "encoder")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    texts = [row["text_a"] for row in rows]
    began = time.perf_counter()
    encoded = tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
    tokenizing = time.perf_counter() - began
    pairs = zip(encoded, rows, strict=True)
    features = [{"input_ids": ids, "labels": int(row["label"])} for ids, row in pairs]
    warm, batch = (2, 8) if context.toy else (10, BATCH)
    clock = Clock(warm, context.device)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "encoder", attn_implementation="sdpa"
    )
    trainer = make_trainer(
        model,
        features,
        context,
        clock,
        collate=DataCollatorWithPadding(tokenizer),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=4 * batch,
        num_train_epochs=2,
        learning_rate=5e-5,
        weight_decay=0.01,
    )
    trainer.train()
    steps = trainer.state.global_step - warm
    tokens = steps * batch * float(np.mean([len(ids) for ids in encoded]))
    found: Row = {"tokens_per_s": round(tokens / clock.seconds)}
    found["steps_per_s"] = round(steps / clock.seconds, 1)
    ordered = sorted(features, key=lambda row: len(row["input_ids"]))
    passed = seconds_of(lambda: trainer.predict(ordered), context.device)
    return found | {"predicted_rows_per_s": round(len(features) / (passed + tokenizing))}
