"""PaddlePALM r0.3's YAML files as recipes: its three demos, and what is wrong in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.common.errors import UserError
from palm_ds.tasks.matching import Matching
from palm_ds.tasks.reading import Reading
from palm_ds.train.recipe.paddlepalm import ImportedConfig, import_config
from palm_ds.train.recipe.recipe import Recipe, make_recipe

DEMO = """\
task_instance: "mrqa, mlm4mrqa, match4mrqa"
target_tag: 1, 0, 0
mix_ratio: 1.0, 0.5, 0.25

save_path: "output_model/secondrun"

backbone: "ernie"
backbone_config_path: "pretrain/ernie/ernie_config.json"

vocab_path: "pretrain/ernie/vocab.txt"
do_lower_case: True
max_seq_len: 512

batch_size: 4
num_epochs: 2
optimizer: "adam"
learning_rate: 3e-5
warmup_proportion: 0.1
weight_decay: 0.1
"""
TASKS = {
    "mrqa": """\
train_file: data/mrqa/train.json
pred_file: data/mrqa/dev.json
reader: mrc
paradigm: mrc
doc_stride: 128
max_query_len: 64
max_answer_len: 30
n_best_size: 20
max_seq_len: 384
""",
    "mlm4mrqa": "train_file: data/mlm.tsv\nreader: mlm\nparadigm: mlm\n",
    "match4mrqa": "train_file: data/match.tsv\nreader: match4ernie\nparadigm: match\n",
}


def imported(
    folder: Path, config: str = DEMO, tasks: dict[str, str] = TASKS, **more: str
) -> ImportedConfig:
    (folder / "config.yaml").write_text(config)
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(text)
    return import_config(folder / "config.yaml", folder, **more)


def recipe_of(made: ImportedConfig) -> Recipe:
    values = yaml.safe_load(yaml.safe_dump(made.values))
    return make_recipe({**values, "init_from": "", "backbone": {"preset": "ernie-2.0-base"}})


def without(text: str, *keys: str) -> str:
    lines = [line for line in text.splitlines() if line.partition(":")[0] not in keys]
    return "\n".join(lines) + "\n"


def places(lines: tuple[str, ...]) -> list[str]:
    """`file:line: key` of each, without folders."""
    parts = [line.split(": ", 2) for line in lines]
    return [f"{Path(where).name}: {key}" for where, key, _ in parts]


def test_a_target_with_two_auxiliary_tasks(tmp_path: Path) -> None:
    made = imported(tmp_path)
    recipe = recipe_of(made)
    assert made.values["init_from"] == "pretrain/ernie" and made.save_path.endswith("secondrun")
    assert (recipe.length, recipe.examples, recipe.held_out) == (512, 4, 0)
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip) == (3e-5, 0.1, 1.0)
    assert (recipe.schedule.kind, recipe.schedule.warmup) == ("linear", 0.1)
    tasks = recipe.built_tasks
    assert {name: task.auxiliary for name, task in tasks.items()} == {
        **{"mrqa": False, "mlm4mrqa": True, "match4mrqa": True}
    }
    reading = tasks["mrqa"]
    assert isinstance(reading, Reading)
    assert (reading.stride, reading.max_query, reading.max_answer, reading.n_best) == (
        *(128, 64, 30, 20),
    )
    sampler = made.values["stages"]["sampler"]
    assert sampler == {
        "mix_ratio": {"mrqa": 1.0, "mlm4mrqa": 0.5, "match4mrqa": 0.25},
        "reference": "mrqa",
        "epochs": 2.0,
    }
    assert set(recipe.curriculum_spec.mix_of.values()) == {"step"}
    assert places(made.left_out) == ["config.yaml:11: do_lower_case", "mrqa.yaml:2: pred_file"]
    assert places(made.changed) == [
        *("mrqa.yaml:9: max_seq_len", "config.yaml:14: batch_size"),
        "config.yaml:18: warmup_proportion",
    ]
    assert "overruled by" in made.changed[0] and "config.yaml:12" in made.changed[0]


def test_six_targets_that_share_heads(tmp_path: Path) -> None:
    names = [f"cls{number}" for number in range(1, 7)]
    config = without(DEMO, "task_instance", "target_tag", "mix_ratio")
    config = f'task_instance: "{", ".join(names)}"\ntask_reuse_tag: 0,0,1,1,0,2\n{config}'
    task = "train_file: data/cls.tsv\nreader: cls\nparadigm: cls\nn_classes: 4\nfor_cn: true\n"
    made = imported(tmp_path, config, dict.fromkeys(names, task))
    recipe = recipe_of(made)
    shared = {name: task.share for name, task in recipe.built_tasks.items()}
    assert shared == dict(zip(names, ["", "cls1", "", "cls3", "cls1", ""], strict=True))
    assert made.values["tasks"]["cls6"]["labels"] == ["0", "1", "2", "3"]
    assert recipe.sources["cls2"].read.strip_spaces
    assert made.values["stages"]["sampler"]["mix_ratio"] == dict.fromkeys(names, 1.0)


def test_one_task_with_other_settings(tmp_path: Path) -> None:
    config = """\
task_instance: pairs
save_path: out
backbone: bert
pretrain_model_path: pretrain/bert/params
vocab_path: other/vocab.txt
batch_size: 8
num_epochs: 0.5
optimizer: adam
learning_rate: 1e-4
warmup_proportion: 0.2
lr_scheduler: noam_decay
use_ema: True
ema_decay: 0.999
random_seed: 7
print_every_n_steps: 20
save_every_n_steps: 300
save_infermodel_every_n_steps: 100
use_gpu: True
favourite_colour: blue
"""
    task = """\
train_file: pairs.tsv
reader: match
paradigm: match
learning_strategy: pairwise
margin: 0.3
max_seq_len: 64
shuffle: False
"""
    made = imported(tmp_path, config, {"pairs": task})
    recipe = recipe_of(made)
    assert made.values["init_from"] == "pretrain/bert"
    assert recipe.sources["pairs"].tokenizer == "other/vocab.txt"
    assert (recipe.seed, recipe.log.every, recipe.save.every) == (7, 20, 300)
    assert (recipe.schedule.kind, recipe.optimizer.ema) == ("noam", 0.999)
    pairs = recipe.built_tasks["pairs"]
    assert isinstance(pairs, Matching)
    assert (pairs.strategy, pairs.margin, pairs.max_length) == ("pairwise", 0.3, 64)
    assert recipe.length == 128, "two pairs share a row"
    assert made.values["stages"] == [{"pairs": "0.5 epochs"}]
    assert places(made.left_out) == [
        "config.yaml:17: save_infermodel_every_n_steps",
        "config.yaml:18: use_gpu",
        "config.yaml:19: favourite_colour",
        "pairs.yaml:7: shuffle",
    ]
    assert made.left_out[2].endswith("no key of PaddlePALM r0.3")


def test_without_warm_up_the_rate_is_constant(tmp_path: Path) -> None:
    config = DEMO.replace("warmup_proportion: 0.1", "lr_scheduler: noam_decay")
    made = imported(tmp_path, config, init_from="elsewhere")
    assert made.values["schedule"] == {"kind": "constant", "warmup": 0}
    assert made.values["init_from"] == "elsewhere"
    assert "config.yaml:18: lr_scheduler" in places(made.left_out)
    assert not any("vocab" in line or "backbone" in line for line in places(made.left_out))
    assert "tokenizer" not in made.values["sources"]["mrqa"]


def changed(key: str, value: object = None, *, task: str = "") -> dict[str, Any]:
    """The demo with another value of a key, or without it."""
    text = TASKS[task] if task else DEMO
    line = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
    new = text.replace(f"{line}\n", "" if value is None else f"{key}: {value}\n")
    return {"tasks": {**TASKS, task: new}} if task else {"config": new}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (changed("batch_size"), r"config.yaml: batch_size: missing"),
        (changed("task_instance", "a, a"), r"config.yaml:1: task_instance: expected different"),
        (changed("task_instance", "a"), r"a.yaml: no such file"),
        (changed("target_tag", "1, 0"), r"config.yaml:2: target_tag: 2 values for 3 of task_inst"),
        (changed("target_tag", "0, 0, 0"), r"target_tag: no task is a target"),
        (changed("mix_ratio", "1, b, 1"), r"config.yaml:3: mix_ratio: expected numbers"),
        (changed("learning_rate", "fast"), r"config.yaml:17: learning_rate: expected a number"),
        (changed("batch_size", "4.5"), r"config.yaml:14: batch_size: expected a whole number"),
        (changed("backbone_config_path"), r"names no weights .* by --init_from"),
        (changed("paradigm", "mine", task="mrqa"), r"mrqa.yaml:4: paradigm: 'mine' is none of cls"),
        (changed("reader", "cls", task="mrqa"), r"mrqa.yaml:3: reader: 'cls' with the paradigm"),
        (changed("train_file", task="mrqa"), r"mrqa.yaml: train_file: missing"),
        (changed("doc_stride", 0, task="mrqa"), r"tasks.mrqa.*stride"),
        ({"config": DEMO + "lr_scheduler: cosine\n"}, r"config.yaml:20: lr_scheduler: 'cosine'"),
        ({"config": DEMO + "use_ema: True\n"}, r"config.yaml: ema_decay: missing"),
    ],
)
def test_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        imported(tmp_path, **given)
