"""Joint fine-tuning runs of tasks of many kinds: whole, killed, moved to other processes, and by
hand. Writes what each left.

The processes are forked from one that has imported everything, so that a start costs little.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft  # noqa: F401  # for seconds, so before the processes are forked
import torch
from safetensors.torch import load_file

from palm_ds.common import errors
from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.rng import derive_key
from palm_ds.data.stream.example_stream import ExampleStream
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.processes import start
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import open_data
from palm_ds.train.teachers.distillation_plan import resolve_teachers
from palm_ds.train.teachers.teachers import attach_teachers, build_teachers
from palm_ds.train.train import TrainingRun, setup_run, train
from tests.helpers.warm_python import free_port

WORDS = [f"w{i}" for i in range(30)]
KILLED, STOPPED = 8, 6
"""The step in which a run is killed, and the one after which another is asked to stop."""


# Data and recipes ------------------------------------------------------------------------------


def write_data(folder: Path) -> None:
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    rng = np.random.default_rng(3)

    def text(most: int = 12) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(2, most))))

    def class_of(words: str) -> str:
        return "xyz"[WORDS.index(words.split()[0]) % 3]

    def tagged() -> dict[str, Any]:
        words = text().split()
        return {"tokens": words, "tags": ["B-N" if w < "w2" else "O" for w in words]}

    def asked() -> dict[str, Any]:
        words = text(30).split()
        answer = words[len(words) // 2]
        start = len(" ".join(words[: len(words) // 2])) + (len(words) > 1)
        row = {"question": text(5), "context": " ".join(words), "id": str(rng.integers(2**40))}
        return row | {"answers": [{"text": answer, "start": start}]}

    makers = {
        "first": lambda: (lambda t: {"text_a": t, "label": class_of(t)})(text()),
        "second": lambda: (lambda t: {"text_a": t, "label": class_of(t)})(text(6)),
        "number": lambda: {"text_a": text(), "text_b": text(), "label": float(rng.random())},
        "better": lambda: {"text_a": text(), "text_b": text(), "text_b_neg": text()},
        "tags": tagged,
        "reading": asked,
        "found": lambda: {"query": text(5), "positive": text(), "negatives": [text(6)]},
        "titles": lambda: {"source": text(9), "target": text(4)},
        "alike": lambda: {"text_a": text(8), "text_b": text(8), "label": float(rng.random())},
    }
    for name, make in makers.items():
        for part, rows in (("train", 40), ("dev", 6)):
            lines = [json.dumps(make()) + "\n" for _ in range(rows)]
            (folder / f"{name}_{part}.jsonl").write_text("".join(lines))


TASKS: dict[str, dict[str, Any]] = {
    "first": {"kind": "classification"},
    "second": {"kind": "classification", "share": "first", "batch": 3, "weight": 0.5},
    "number": {"kind": "regression"},
    "better": {"kind": "matching", "strategy": "pairwise", "batch": 2},
    "tags": {"kind": "tagging", "crf": True},
    "reading": {"kind": "reading", "stride": 8},
    "found": {"kind": "retrieval", "max_length": 14, "batch": 3},
    "alike": {"kind": "similarity", "pooling": "cls"},
    "titles": {"kind": "generation", "max_target": 6, "word_weight": 0.6, "smoothing": 0.1},
    "words": {"kind": "masked_words", "source": "first", "auxiliary": True},
}


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    tasks = {name: {"source": name, **values} for name, values in TASKS.items()}
    files = {
        name: {
            "table": str(folder / f"{name}_train.jsonl"),
            "validation": str(folder / f"{name}_dev.jsonl"),
            "tokenizer": str(folder / "vocab.txt"),
        }
        for name in TASKS
        if name != "words"
    }
    values = {
        "backbone": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 48,
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        "length": 48,
        "batch": "4 examples",
        "optimizer": {"lr": 3.0e-3, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "warmup": 2},
        "sources": files,
        "tasks": tasks,
        "stages": [
            {name: 1 for name in TASKS},
            {"first": 1, "reading": 1, "titles": 1, "words": 1, "mix": "step"},
        ],
        "evaluate": {"every": 6, "best": "first.accuracy"},
        "save": {"every": 3},
        "log": {"every": 1},
        "export_onnx": [],
        **changes,
    }
    return make_recipe(values, "recipe")


def machine_of(stage: int) -> Any:
    return make_ds_config(
        {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
    )


# Processes -------------------------------------------------------------------------------------


def attempt(job: Mapping[str, Any], world: int, base: Path) -> list[int]:
    """Exit codes of the processes of a job (negative: the signal)."""
    port = free_port()
    pids = [_start(job, rank, world, port, base) for rank in range(world)]
    codes: dict[int, int] = {}
    while len(codes) < world:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] not in (0, errors.STOPPED):
            for other in set(pids) - set(codes):  # a launcher ends the others
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _start(job: Mapping[str, Any], rank: int, world: int, port: int, base: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(base / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        os._exit(work(job, base))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def work(job: Mapping[str, Any], base: Path) -> int:
    changes = taught_changes(base, **job["taught"]) if "taught" in job else job.get("changes", {})
    recipe = recipe_of(base, **changes)
    run = RunSpec(recipe=recipe, ds_config=machine_of(job["stage"]), folder=base / job["folder"])
    if job.get("watch"):
        return watched(run, base)

    def handler(name: str, facts: Mapping[str, Any]) -> None:
        if name == "step" and facts["step"] == job.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "next" and facts["step"] + 1 == job.get("stop"):
            os.kill(os.getpid(), signal.SIGTERM)

    return train(run, handler)


# Rates, rests and averages through a recipe ----------------------------------------------------

WATCHED = {
    "optimizer": {"lr": 3.0e-3, "layer_decay": 0.5, "ema": 0.9, "freeze": ["backbone.word.*"]},
    "stages": [{"first": 4, "number": 3, "mix": "step"}],
    "evaluate": {},
    "schedule": {"kind": "constant"},
}
RESTS = "backbone.layers.0.*"


def watched(run: RunSpec, base: Path) -> int:
    """The tasks of each step, the parameters that it moved, and averages computed separately."""
    opened = setup_run(run)
    assert isinstance(opened, TrainingRun)
    loop, engine = opened.loop, opened.loop.engine
    loop.begin(0)
    steps = range(run.recipe.curriculum_spec.resolve().steps)
    now = engine.full_state_dict()
    average = {name: tensor.clone() for name, tensor in now.items()}
    seen = []
    for step, batches in zip(steps, loop.batches(steps), strict=True):
        before = now
        restored = loop.train_step(step, batches)
        assert restored is None
        now = engine.full_state_dict()
        for name, tensor in now.items():
            average[name] = 0.9 * average[name] + 0.1 * tensor
        moved = [name for name in now if not torch.equal(before[name], now[name])]
        change = {n: (now[n] - before[n]).abs().max().item() for n in now}
        tasks = sorted({task for batch in batches for task in batch.labels})
        seen.append({"tasks": tasks, "moved": moved, "change": change})
    opened.finish()
    left = load_file(run.folder / "weights" / "weights.safetensors")
    far = max((left[n] - average[n]).abs().max().item() for n in left)
    (base / "watched.json").write_text(json.dumps({"steps": seen, "far": far}))
    opened.close()
    return 0


# LoRA ------------------------------------------------------------------------------------------

LORA = {
    "lora": {"rank": 2, "dropout": 0.1, "targets": "all"},
    "optimizer": {"lr": 3.0e-2, "weight_decay": 0.01},
    "stages": [{name: 1 for name in TASKS}],
    "evaluate": {},
    "save": {"every": 3, "background": False},
}
LORA_KILLED = 5


def lora_jobs(base: Path, *, every: bool) -> list[tuple[str, dict[str, Any], int]]:
    """One run in several layouts, from the weights of another; and one that is killed."""
    changes = {**LORA, "init_from": str(base / "whole" / "weights")}
    layouts = [(0, 1), (2, 2), (3, 2)] if every else [(0, 1)]
    jobs = []
    for stage, world in layouts:
        name = f"lora, ZeRO {stage}, {world}"
        jobs.append((name, {"stage": stage, "folder": name, "changes": changes}, world))
    killed = {"stage": 3 if every else 2, "folder": "lora killed", "changes": changes}
    again = (killed, 2) if every else ({**killed, "stage": 0}, 1)
    return [
        *jobs,
        ("lora killed", {**killed, "kill": LORA_KILLED}, 2),
        ("lora resumed", *again),
    ]


# Distillation ----------------------------------------------------------------------------------

TAUGHT_KILLED = 5


def taught_changes(base: Path, *, shard: bool) -> dict[str, Any]:
    """A smaller student of a whole run, of whose texts some have no label."""
    lines = [json.loads(line) for line in (base / "first_train.jsonl").read_text().splitlines()]
    some = [row | ({"label": None} if n % 3 == 0 else {}) for n, row in enumerate(lines)]
    file = base / "first_partly.jsonl"
    write_file_atomically(file, "".join(json.dumps(row) + "\n" for row in some))
    before = recipe_of(base)
    sources = {name: {"table": x.table} for name, x in before.sources.items()}
    for name, source in before.sources.items():
        sources[name] |= {"validation": source.validation, "tokenizer": source.tokenizer}
    sources["first"] |= {"table": str(file), "read": {"missing_labels": "keep"}}
    return {
        "backbone": {**before.backbone, "hidden_size": 16, "num_layers": 1},
        "sources": sources,
        "stages": [{name: 1 for name in TASKS}],
        "evaluate": {},
        "save": {"every": 3, "background": False},
        "teacher": {
            "path": str(base / "whole"),
            "shard": shard,
            "logits": {"weight": 0.5, "temperature": 2.0},
            "hidden_states": {"weight": 0.1},
            "attention": {},
            "relations": {"heads": 4},
            "embeddings": {"loss": "cosine"},
        },
    }


def taught_jobs(*, every: bool) -> list[tuple[str, dict[str, Any], int]]:
    """One run in several layouts, and one that is killed."""
    jobs = []
    for stage, world, shard in [(0, 1, False), (2, 2, False), (3, 2, True)] if every else []:
        name = f"taught, ZeRO {stage}, {world}"
        jobs.append((name, {"stage": stage, "folder": name, "taught": {"shard": shard}}, world))
    killed = {"stage": 3, "folder": "taught killed", "taught": {"shard": True}}
    return [
        *jobs,
        ("taught killed", {**killed, "kill": TAUGHT_KILLED}, 2),
        ("taught resumed", killed, 2 if every else 1),
    ]


# By hand ---------------------------------------------------------------------------------------


def by_hand(recipe: Recipe) -> list[dict[str, float]]:
    """The losses of each step in plain torch: one process, one batch per step."""
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    plan = resolve_teachers(recipe, data)
    stream = build_stream(recipe, data, soft=plan.soft_tasks)
    assert isinstance(stream, ExampleStream)
    model = build_model(recipe, machine_of(0), data.vocabulary, device=torch.device("cpu"))
    attach_teachers(plan, model, seed=recipe.seed)
    run = RunSpec(recipe=recipe, ds_config=machine_of(0), folder=Path())
    teacher = build_teachers(plan, model, run, data, start(run.ds_config))
    weights = {name: task.weight for name, task in recipe.built_tasks.items()}
    weights |= model.teacher_weights
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        plain = not name.startswith("heads.") and parameter.ndim == 2
        (decayed if plain else kept).append(parameter)
    settings = recipe.optimizer
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    losses = []
    for step in range(recipe.curriculum.steps):
        key = derive_key(recipe.seed, "dropout", step) >> 1
        batch = replace(stream.build(step, stream.step_rows(step)), dropout_key=key)
        batch = teacher(batch, step) if teacher else batch
        optimizer.zero_grad()
        total, mean = torch.zeros(()), {}
        for task, output in model(batch).items():
            count = batch.real_tokens if model.losses[task] else batch.count(task)
            loss = output.loss_sum / max(count, 1)
            if task in ("found", "alike") and batch.count(task):
                head: Any = model.heads[task]
                targets = batch.labels[task][1], batch.groups[task]
                loss = head.step_losses(output.scores, *targets)[0].mean()
            total = total + loss * weights[task]
            if count:
                mean[task] = loss.item()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * recipe.lr_scale(recipe.curriculum.at(step, recipe.seed))
        optimizer.step()
        losses.append(mean)
    return losses


def left(folder: Path) -> dict[str, Any]:
    """Results of a run: losses, evaluations, the best one, weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(folder / "weights" / "weights.safetensors")
    return {
        "losses": [line["loss"] for line in lines if line["kind"] == "step"],
        "evaluations": [[x["step"], x["scores"]] for x in lines if x["kind"] == "evaluation"],
        "events": [x["event"] for x in lines if x["kind"] == "event"],
        "chosen": [x["of_step"] for x in lines if x.get("event") == "chosen"],
        "heads": sorted({name.split(".")[1] for name in weights if name.startswith("heads.")}),
        "weights": {name: tensor.double().sum().item() for name, tensor in weights.items()},
        "bytes": (folder / "weights" / "weights.safetensors").read_bytes().hex()[-4000:],
    }


def joint_runs(folder: str, *, every: bool) -> dict[str, Any]:
    """`every`: killed too, and in more layouts."""
    base = Path(folder)
    write_data(base)
    jobs: list[tuple[str, dict[str, Any], int]] = [
        ("whole", {"stage": 2, "folder": "whole"}, 2),
        ("stopped", {"stage": 2, "folder": "moved", "stop": STOPPED}, 2),
        ("resumed", {"stage": 2, "folder": "resumed"}, 2),
        ("moved", {"stage": 0, "folder": "moved"}, 1),
        ("watched", {"stage": 2, "folder": "watched", "watch": True}, 1),
        *lora_jobs(base, every=every),
        *taught_jobs(every=every),
    ]
    if every:
        killed = {"stage": 2, "folder": "killed"}
        jobs += [("killed", {**killed, "kill": KILLED}, 2), ("killed, resumed", killed, 2)]
    results: dict[str, Any] = {"codes": {}, "seconds": {}}
    for name, job, world in jobs:
        if name == "watched":
            tasks = recipe_of(base).tasks
            tasks["number"] = {**tasks["number"], "freeze": [RESTS]}
            tasks["first"] = {**tasks["first"], "head_lr": 3.0e-2}
            job["changes"] = WATCHED | {"tasks": tasks}
        begun = time.monotonic()
        if name == "resumed":
            shutil.copytree(base / "moved", base / "resumed")
        results["codes"][name] = attempt(job, world, base)
        results["seconds"][name] = round(time.monotonic() - begun, 1)
    runs = dict.fromkeys(job["folder"] for _, job, _ in jobs if "watch" not in job)
    for name in runs:
        folder = base / name
        results[name] = left(folder) if (folder / "weights").exists() else None
    watched_file = base / "watched.json"
    results["watched"] = json.loads(watched_file.read_text()) if watched_file.exists() else None
    results["by hand"] = by_hand(recipe_of(base))
    taught = recipe_of(base, **taught_changes(base, shard=False))
    results["taught by hand"] = by_hand(taught)
    results["log"] = (base / "log0.txt").read_text()
    return results
