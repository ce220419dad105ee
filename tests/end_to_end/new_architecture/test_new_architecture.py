"""An architecture written in one file (throwaway.py) does what BERT does, without a line elsewhere.

It trains, resumes, predicts, embeds, is served, becomes an ONNX graph, takes LoRA, is a teacher and
a student, and has right FLOPs and a memory estimate.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import palm_ds as palm
from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.check_custom_encoder import check_custom_encoder
from palm_ds.model.encoder.encoder import build_encoder, encoder_class
from palm_ds.model.encoder.flops import training_flops
from palm_ds.train.plan.memory import activation_bytes
from palm_ds.train.plan.work import size_of, work_of
from palm_ds.weights.convert.to_onnx import convert_to_onnx
from palm_ds.weights.formats.huggingface import families
from palm_ds.weights.formats.huggingface.architecture import Architecture
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_for
from tests.end_to_end.new_architecture.throwaway import Throwaway
from tests.end_to_end.new_architecture.throwaway_hf import ThrowawayArchitecture
from tests.helpers import warm_python
from tests.helpers.sampling import only
from tests.helpers.serving import local, opened
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_tables import write_tables
from tests.train.plan.test_memory import LABELS, build, kept_bytes, make_batch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
MACHINE = Path(__file__).resolve().parents[3] / "ds_configs" / "cpu.json"
KIND = f"{Throwaway.__module__}.Throwaway"
ENCODER = {
    "kind": KIND,
    "options": {"rotary_base": 1000.0},
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 96,
    "max_positions": 64,
    "token_types": 1,
    "task_types": 0,
}
CONFIG = EncoderConfig(**ENCODER, vocab_size=600, dropout=0.0, attention_dropout=0.0)  # type: ignore[arg-type]
ADAMW, MUON = {"kind": "adamw", "lr": 1e-2}, {"kind": "muon", "lr": 3e-3}
TEXTS = ["w1 w2 w3", "w30 w31", "w35"]


class Mistaken(Throwaway):
    """Names an architecture that is none."""


class Taken(ThrowawayArchitecture):
    families = {"bert": FAMILIES["bert"]}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(autouse=True)
def shipped_families() -> Iterator[None]:
    """Other tests compare all families with transformers, which has not this one."""
    registries: Any = (families.ARCHITECTURES, families.FAMILIES, families._BY_FAMILY)
    before = [dict(each) for each in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def trainer(tables: Path, start: Any = None, recipe: Any = None, **values: Any) -> Any:
    task = palm.tasks.Classification.on(train=tables / "train.tsv", dev=tables / "dev.tsv")
    start = start or palm.Backbone.from_config(ENCODER, tokenizer=tables / "vocab.txt")
    settings: dict[str, Any] = {"batch": 8, "epochs": 4, "lr": 2e-3, "length": 32}
    settings |= {"deepspeed_config": {"zero_optimization": {"stage": 0}}}
    settings |= {"recipe": {"export_onnx": [], **(recipe or {})}}
    return palm.Trainer(task, backbone=start, **{**settings, **values})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights/weights.safetensors")


def losses_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    return [each["loss"] for each in said if isinstance(each.get("loss"), dict)]


@pytest.fixture(scope="module")
def trained(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = trainer(tables, folder=tmp_path_factory.mktemp("runs") / "trained")
    assert made.train()["classification"]["accuracy"] > 0.9
    yield made


def test_it_has_no_biases_and_no_positions(trained: Any) -> None:
    names = {name for name in weights_of(trained.folder) if name.startswith("backbone.")}
    assert {name for name in names if name.endswith("bias")} == {"backbone.pooler.dense.bias"}
    assert "backbone.final_norm.weight" in names and "backbone.position.weight" not in names
    assert not (trained.folder / "hf").exists(), "Hugging Face has no encoder like it"


def test_its_class_can_name_an_architecture_of_hugging_face(tables: Path, tmp_path: Path) -> None:
    """In a second file of one's own: hf/ is written and read, also by a program that knows no more
    than the folder."""
    encoder = {**ENCODER, "kind": KIND.replace("Throwaway", "Published")}
    start = palm.Backbone.from_config(encoder, tokenizer=tables / "vocab.txt")
    run = trainer(tables, start, folder=tmp_path / "run", epochs=1)
    run.train()
    about = json.loads((run.folder / "hf/config.json").read_text())
    assert about["architectures"] == ["ThrowawayForSequenceClassification"]
    written, own = load_file(run.folder / "hf/model.safetensors"), weights_of(run.folder)
    query = own["backbone.layers.0.qkv.weight"].chunk(3)[0]
    assert torch.equal(written["model.blocks.0.attn.q.weight"], query)
    command = ["-m", "palm_ds", "convert", run.folder / "hf", tmp_path / "back"]
    converted = warm_python.run(command)
    assert converted.returncode == 0, converted.stderr
    back = load_file(tmp_path / "back/weights.safetensors")
    shared = [name for name in own if name.startswith("backbone.")]
    assert shared and all(torch.equal(back[name], own[name]) for name in shared)
    again = palm.Backbone.from_pretrained(run.folder / "hf")
    torch.testing.assert_close(again(TEXTS), palm.Backbone.from_pretrained(run.folder)(TEXTS))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.Mine", "Mistaken.hf: cannot import 'nowhere'"),
        (f"{KIND}", "Mistaken.hf: .* is not a subclass of .*Architecture"),
        (f"{Architecture.__module__}.Architecture", "does not define config_json, names, read_con"),
        (f"{__name__}.Taken", "Taken: bert is a model type of BertArchitecture"),
    ],
)
def test_a_mistake_in_that_name_is_one_line(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mistaken, "hf", name)
    with pytest.raises(UserError, match=said):
        architecture_for(replace(CONFIG, kind=f"{__name__}.Mistaken"))


def test_the_contract_holds_also_for_tasks_that_hide_tokens() -> None:
    check_custom_encoder(CONFIG, ["titles"])


def test_a_run_resumes(tables: Path, trained: Any, tmp_path: Path) -> None:
    def interrupt(event: Any) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"^step \d+ of \d+ is saved"):
        trainer(tables, folder=tmp_path / "run").train(interrupt)
    trainer(tables, folder=tmp_path / "run").train()
    found, whole = weights_of(tmp_path / "run"), weights_of(trained.folder)
    assert found.keys() == whole.keys() and all(torch.equal(found[x], whole[x]) for x in whole)


def test_predictions_and_vectors_are_also_served(trained: Any) -> None:
    model = palm.load(trained.folder)
    backbone: Any = palm.Backbone.from_pretrained(trained.folder)
    labels = [row["label"] for row in model(TEXTS)]
    assert labels == ["no", "yes", "yes"]
    vectors = backbone(TEXTS, pooling="mean")
    alone = torch.cat([backbone([text], pooling="mean") for text in TEXTS])
    torch.testing.assert_close(vectors, alone)
    last = torch.cat([backbone([text], pooling="mean", layers=2) for text in TEXTS])
    torch.testing.assert_close(last, alone)  # the last layer's is the encoder's output
    with local(*opened(mine=trained.folder)) as server:
        asked = {"inputs": [{"text_a": text} for text in TEXTS]}
        said = server.answer("/predict/classification", asked)
        assert [row["label"] for row in said["predictions"]] == labels
        said = server.answer("/embed", {"texts": TEXTS, "pooling": "mean"})
        torch.testing.assert_close(torch.tensor(said["embeddings"]), vectors, atol=1e-5, rtol=1e-4)


@pytest.mark.exhaustive  # tests/weights/convert/test_to_onnx.py has a custom encoder
def test_it_becomes_an_onnx_graph(trained: Any, tmp_path: Path) -> None:
    """Compared with the encoder, on texts of several lengths and with padding."""
    done = convert_to_onnx(trained.folder / "weights", tmp_path / "onnx")
    assert done.files[0].parity and "classification" in done.description.heads


def test_it_takes_lora(tables: Path, trained: Any, tmp_path: Path) -> None:
    recipe = {"lora": {"rank": 2, "targets": "all", "dropout": 0.1}}
    start = palm.Backbone.from_pretrained(trained.folder)
    made = trainer(tables, start, recipe, folder=tmp_path / "lora", epochs=1)
    made.train()
    before, after = weights_of(trained.folder), weights_of(made.folder)
    assert before.keys() == after.keys()
    changed = {
        name.rsplit(".", 2)[1] for name in before if not torch.equal(before[name], after[name])
    }
    assert {"qkv", "project", "expand", "contract"} < changed
    assert "word" not in changed and "attention_norm" not in changed


@pytest.mark.parametrize("student", only(["bert"], [KIND, "bert"]))
def test_it_teaches_and_learns(student: str, tables: Path, trained: Any, tmp_path: Path) -> None:
    """Scores, hidden states, relations and attention."""
    sizes = {**ENCODER, "kind": student, "num_layers": 1, "hidden_size": 32}
    start = palm.Backbone.from_config(
        sizes if student == KIND else {**sizes, "options": {}}, tokenizer=tables / "vocab.txt"
    )
    taught = {
        "path": str(trained.folder),
        "logits": {},
        "hidden_states": {"layers": {1: 2}},
        "attention": {"layers": {1: 2}},
        "relations": {"layers": {1: 2}, "heads": 8},
        "embeddings": {},
    }
    made = trainer(
        tables,
        start,
        {"teacher": taught, "log": {"every": 1}},
        folder=tmp_path / "student",
        epochs=6,
    )
    assert made.train()["classification"]["accuracy"] > 0.9
    losses = losses_of(made.folder)
    for part in ("classification", "hidden_states", "attention", "relations", "embeddings"):
        first, last = (each[f"teacher.{part}"] for each in (losses[0], losses[-1]))
        assert last < first, part


def test_it_learns_from_bert(tables: Path, tmp_path: Path) -> None:
    bert = {**ENCODER, "kind": "bert", "options": {}}
    teacher = trainer(
        tables,
        palm.Backbone.from_config(bert, tokenizer=tables / "vocab.txt"),
        folder=tmp_path / "bert",
    )
    teacher.train()
    taught = {"path": str(teacher.folder), "logits": {}, "relations": {}, "hidden_states": {}}
    made = trainer(tables, recipe={"teacher": taught}, folder=tmp_path / "student")
    assert made.train()["classification"]["accuracy"] > 0.9


def test_one_of_its_layers_starts_a_smaller_one(tables: Path, trained: Any, tmp_path: Path) -> None:
    recipe = {"init_layers": [1], "init_from": str(trained.folder)}
    smaller = palm.Backbone.from_config(
        {**ENCODER, "num_layers": 1}, tokenizer=tables / "vocab.txt"
    )
    made = trainer(tables, smaller, recipe, folder=tmp_path / "less", epochs=1, lr=1e-12)
    made.train()
    found, whole = weights_of(made.folder), weights_of(trained.folder)
    name = "expand.weight"
    torch.testing.assert_close(
        found[f"backbone.layers.0.{name}"], whole[f"backbone.layers.1.{name}"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", only([3], [0, 3]))
def test_it_is_pretrained(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With layer decay, its layers recomputed, by Muon too; its plan is printed before."""
    write_small_corpus(tmp_path / "corpus", words=20)
    recipe = {
        "backbone": ENCODER,
        "batch": "4 rows",
        "length": 64,
        "sources": {"text": {"corpus": str(tmp_path / "corpus")}},
        "tasks": {"words": {"kind": "knowledge_masking", "source": "text"}},
        "stages": [{"words": 40 if stage else 150}],
        "schedule": {"kind": "linear", "warmup": 0},
        "optimizer": (ADAMW if stage else MUON) | {"layer_decay": 0.9},
        "log": {"every": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    machine = json.loads(MACHINE.read_text())
    machine |= {
        "zero_optimization": {"stage": stage},
        "palm_ds": {"activation_checkpointing": True},
    }
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    words = [str(tmp_path / "recipe.yaml"), "--deepspeed_config", str(tmp_path / "machine.json")]
    run = ["--run_dir", str(tmp_path / "run")]
    assert main(["pretrain", *words, *run, "--plan", "8 x A100 40GB"]) == 0
    assert "GB" in capsys.readouterr().out
    assert main(["pretrain", *words, *run]) == 0
    losses = [each["words"] for each in losses_of(tmp_path / "run")]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3


def test_its_flops_are_those_that_torch_counts() -> None:
    batch = make_batch(2, 64)
    with FlopCounterMode(display=False) as counter:
        build_encoder(CONFIG)(batch).sum().backward()
    counted = float(training_flops(CONFIG, batch, []))
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-9)
    work = work_of(build(CONFIG), [batch], rows=2)
    assert work.flops(CONFIG) == float(training_flops(CONFIG, batch, ["words"]))


@pytest.mark.parametrize("layers", [2, 6])
def test_its_memory_is_as_predicted(layers: int) -> None:
    """As in tests/train/plan/test_memory.py."""
    config, batch = replace(CONFIG, num_layers=layers), make_batch(8, 64)
    mask = 8 * 64 * 64
    predicted = activation_bytes(config, 4, tokens=8 * 64, labels=8 * LABELS)
    assert kept_bytes(build(config), batch) - mask == pytest.approx(predicted, rel=0.12)
    most = sum(p.numel() for p in build_encoder(config).parameters())
    least = encoder_class(config).least_parameters(config, 600)
    pooler = 64 * 65
    assert least == pytest.approx(most - pooler, rel=0.02) and least <= most
    assert size_of(build(config)).largest_layer == 4 * 64**2 + 3 * 64 * 96 + 2 * 64


def test_a_mistake_in_its_options_is_one_line(tables: Path) -> None:
    wrong = {**ENCODER, "options": {"rotary_bsae": 10.0}}
    with pytest.raises(UserError, match='options.rotary_bsae: .*did you mean "rotary_base"'):
        trainer(tables, palm.Backbone.from_config(wrong, tokenizer=tables / "vocab.txt")).train()
    text = {**ENCODER, "options": {"rotary_base": "much"}}
    with pytest.raises(UserError, match="options.rotary_base: expected a number"):
        trainer(tables, palm.Backbone.from_config(text, tokenizer=tables / "vocab.txt")).train()
