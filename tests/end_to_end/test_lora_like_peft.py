"""LoRA compared step by step with peft on the transformers model: from the same weights, the same A
and B and with the same rows, both learn the same; and what a run leaves opens in both."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.data.stream.example_stream import ExampleStream
from palm_ds.model.lora import add_lora
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.report.metrics_file import read_metrics
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import open_data
from palm_ds.train.train import train
from palm_ds.weights.formats.native import open_contents
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.peft_adapter import write_adapter
from palm_ds.weights.weights_folder import export_hf, load_weights
from tests.helpers.sampling import only
from tests.helpers.small_tables import rows, write_tables

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of DeepSpeed's
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of peft's
]
STEPS, BATCH, LR, EPS, DECAY = 20, 4, 1e-3, 1e-6, 0.01
DS_CONFIG = make_ds_config({"zero_optimization": {"stage": 0}})
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
ENCODER = {"preset": "tiny", "max_positions": 64, "task_types": 0, "token_types": 2, **STILL}


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "backbone": ENCODER,
        "length": 64,
        "batch": f"{BATCH} examples",
        "optimizer": {"lr": LR, "weight_decay": DECAY, "clip": 0, "eps": EPS},
        "schedule": {"kind": "constant"},
        "sources": {
            "rows": {
                "table": str(folder / "train.tsv"),
                "validation": str(folder / "dev.tsv"),
                "tokenizer": str(folder / "vocab.txt"),
            }
        },
        "tasks": {"task": {"kind": "classification", "source": "rows", "dropout": 0.0}},
        "stages": [{"task": STEPS}],
        "save": {"every": 0},
        "log": {"every": 1},
        "export_onnx": [],
        **changes,
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables, and the weights to start from as a Hugging Face folder."""
    folder = write_tables(tmp_path_factory.mktemp("lora"), train=100)
    recipe = make_recipe(values_of(folder))
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    model = build_model(recipe, DS_CONFIG, data.vocabulary, device=torch.device("cpu"))
    config, head = model.backbone.config, recipe.built_tasks["task"].hf_export()
    export_hf(model, folder / "start", config=config, tokenizer=data.tokenizer, head=head)
    return folder


def recipe_of(folder: Path, lora: dict[str, Any], **changes: Any) -> Recipe:
    more = {"init_from": str(folder / "start"), "lora": lora, **changes}
    recipe = make_recipe(values_of(folder, **more))
    return resolve(recipe, open_data(recipe))


def in_peft(recipe: Recipe, folder: Path) -> tuple[Any, list[list[int]]]:
    """The model that the recipe starts with, by transformers and peft, and the rows of each
    step."""
    data = open_data(recipe)
    model = build_model(recipe, DS_CONFIG, data.vocabulary, device=torch.device("cpu"))
    load_weights(open_model(Path(recipe.init_from)), model)
    assert recipe.lora is not None
    add_lora(model, recipe.lora, seed=recipe.seed)
    named = {name: x for name, x in model.state_dict().items() if ".lora_" in name}
    hf = Path(recipe.init_from)
    write_adapter(folder, named, recipe.lora, hf, base=str(hf))
    stream = build_stream(recipe, data)
    assert isinstance(stream, ExampleStream)
    (dataset,) = stream.datasets
    numbers = [
        [dataset.example(ref.number, ref.layout).item for row in packed for ref in row]
        for packed in map(stream.step_rows, range(STEPS))
    ]
    return opened(hf, folder, is_trainable=True), numbers


def opened(base: Path, adapter: Path, **how: Any) -> Any:
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    return peft.PeftModel.from_pretrained(plain, adapter, **how)


def losses_in_peft(
    model: Any, tokenizer: Any, table: Sequence[Any], steps: Sequence[Any]
) -> Iterator[float]:
    """The loss of each step of a plain loop. palm_ds does not decay heads."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if p.ndim == 2 and "classifier" not in name]
    kept = [p for name, p in trained if p.ndim != 2 or "classifier" in name]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    for numbers in steps:
        texts = [table[number]["text_a"] for number in numbers]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = torch.tensor([("no", "yes").index(table[n]["label"]) for n in numbers])
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


CASES = {
    "query and value": {"rank": 4, "alpha": 8},
    "all, rank-stabilized": {"rank": 2, "alpha": 4, "targets": "all", "rank_stabilized": True},
    "magnitudes too": {"rank": 4, "alpha": 8, "targets": ["query", "output"], "dora": True},
    "feed-forward": {"rank": 3, "targets": ["output", "intermediate"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", only(list(CASES)[1:3], CASES))
def test_twenty_steps_equal_those_of_peft(case: str, start: Path, tmp_path: Path) -> None:
    recipe = recipe_of(start, CASES[case])
    model, steps = in_peft(recipe, tmp_path / "first")
    tokenizer = AutoTokenizer.from_pretrained(start / "start")
    table = rows(random.Random(0), 100)
    expected = list(losses_in_peft(model.train(), tokenizer, table, steps))

    assert train(RunSpec(recipe=recipe, ds_config=DS_CONFIG, folder=tmp_path / "run")) == 0
    records = read_metrics(tmp_path / "run/metrics.jsonl").steps
    found = [record["loss"]["task"] for record in records]
    assert found == pytest.approx(expected, rel=1e-5)
    checkpoint = open_contents(tmp_path / f"run/checkpoints/step_{STEPS:08}")  # before merging
    weights = load_file(tmp_path / "run/weights/weights.safetensors")
    assert checkpoint.entries.keys() == weights.keys()
    for name, entry in checkpoint.entries.items():
        torch.testing.assert_close(entry.read(), weights[name], rtol=0, atol=0, msg=name)

    batch = tokenizer(["w1 w2 w30", "w39 w38 w4 w7"], padding=True, return_tensors="pt")
    outputs = {
        "peft's own model": model.eval(),
        "merged": AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/hf"),
        "adapter": opened(start / "start", tmp_path / "run/adapter"),
    }
    with torch.no_grad():
        logits = {name: each.eval()(**batch).logits for name, each in outputs.items()}
        before = AutoModelForSequenceClassification.from_pretrained(start / "start")(**batch).logits
    for name, each in logits.items():
        torch.testing.assert_close(each, logits["peft's own model"], atol=2e-5, rtol=0, msg=name)
    torch.testing.assert_close(logits["merged"], logits["adapter"], atol=1e-5, rtol=0)
    assert (before - logits["merged"]).abs().max() > 0.1


def test_magnitudes_need_whole_matrices(start: Path, tmp_path: Path) -> None:
    recipe = recipe_of(start, CASES["magnitudes too"])
    sharded = make_ds_config({"zero_optimization": {"stage": 3}})
    with pytest.raises(UserError, match="lora.dora: needs whole matrices .*; use ZeRO 0 to 2"):
        train(RunSpec(recipe=recipe, ds_config=sharded, folder=tmp_path / "run"))
