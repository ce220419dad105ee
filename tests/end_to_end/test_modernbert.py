"""Somebody's ModernBERT on somebody's text: pretrained further, fine-tuned, opened everywhere."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import palm_ds as palm
from palm_ds.cli.main import main
from palm_ds.common.config import read_json
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import training_flops
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.train.plan.memory import activation_bytes
from palm_ds.weights.convert.convert import convert
from tests.helpers.modernbert import folder_with_tokenizer, mmbert_tokenizer
from tests.helpers.serving import local, opened
from tests.train.plan.test_memory import LABELS, build, kept_bytes, make_batch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
MACHINE = Path(__file__).resolve().parents[2] / "ds_configs" / "cpu.json"
WORDS = ["river", "night", "morning", "road", "water", "letters", "group", "bread", "lamp", "song"]
NASTY = [
    "  two  spaces ",
    "naïve café ﬁ ①",
    "日本語 text",
    "🙂🙃",
    "tab\tnew\nline",
    "Don't @x.y 3.14",
]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "local_attention": 16,
    "classifier_pooling": "mean",
}


def documents() -> list[str]:
    rng = random.Random(0)
    return [
        " ".join(
            f"The {' '.join(rng.choices(WORDS, k=rng.randint(3, 9)))}."
            for _ in range(rng.randint(4, 9))
        )
        for _ in range(120)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a ModernBERT's folder; `corpus`, prepared with its tokenizer; tables of two
    classes."""
    folder = tmp_path_factory.mktemp("modernbert")
    folder_with_tokenizer(folder / "base", documents() + NASTY, **SIZES)
    (folder / "texts.txt").write_text("\n\n".join(documents()))
    words = [str(folder / "corpus"), str(folder / "texts.txt"), "--language", "en"]
    assert main(["prepare", *words, "--tokenizer", str(folder / "base")]) == 0
    for name in ("train", "dev"):
        rows = [f"{'no' if n % 2 else 'yes'}\tthe {WORDS[n % 2]} {WORDS[n % 7]}" for n in range(40)]
        (folder / f"{name}.tsv").write_text("\n".join(["label\ttext_a", *rows]) + "\n")
    return folder


def pretrain(place: Path, run: Path, machine: Any = None, **changes: Any) -> int:
    recipe = {
        "init_from": str(place / "base"),
        "backbone": {"task_types": 16, "dropout": 0.1, "attention_dropout": 0.1},
        "length": 128,
        "batch": "8 rows",
        "sources": {"text": {"corpus": str(place / "corpus")}},
        "held_out": 0.1,
        "tasks": {
            "knowledge_masking": {"source": "text", "units": ["word"]},
            "sentence_distance": {"source": "text"},
            "sentence_reordering": {"source": "text", "most": 3},
        },
        "stages": [
            {
                "knowledge_masking": "6 steps",
                "sentence_distance": "3 steps",
                "sentence_reordering": "3 steps",
            }
        ],
        "evaluate": {"examples": 20},
        "log": {"every": 1},
        "export_onnx": [],
        **changes,
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "mine.yaml").write_text(yaml.safe_dump(recipe))
    (run / "machine.json").write_text(
        json.dumps({**json.loads(MACHINE.read_text()), **(machine or {})})
    )
    words = [str(run / "mine.yaml"), "--deepspeed_config", str(run / "machine.json")]
    return main(["pretrain", *words, "--run_dir", str(run / "run")])


def curve(run: Path) -> np.ndarray:
    lines = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()]
    losses = [each["loss"] for each in lines if isinstance(each.get("loss"), dict)]
    return np.array([x for each in losses for x in each.values()])


@pytest.fixture(scope="module")
def pretrained(place: Path) -> Path:
    assert pretrain(place, place / "first") == 0
    return place / "first" / "run"


@pytest.mark.parametrize("family", ["modernbert", "mmbert"])
def test_the_tokenizer_has_the_ids_of_transformers(
    family: str, place: Path, tmp_path: Path
) -> None:
    folder = place / "base"
    if family == "mmbert":
        mmbert_tokenizer(documents()).save_pretrained(folder := tmp_path)
    mine, its = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text, (ids, _) in zip(NASTY, mine.encode_texts(NASTY), strict=True):
        assert list(ids) == its(text, add_special_tokens=False)["input_ids"], text
    known = mine.vocabulary
    assert (known.cls, known.sep, known.pad) == (
        its.cls_token_id,
        its.sep_token_id,
        its.pad_token_id,
    )


def test_a_run_is_that_family_again(pretrained: Path) -> None:
    about = read_json(pretrained / "hf/config.json")
    assert about["model_type"] == "modernbert" and about["classifier_pooling"] == "mean"
    for name in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
        opened_class = getattr(transformers, f"AutoModelFor{name}")
        _, loading = opened_class.from_pretrained(pretrained / "hf", output_loading_info=True)
        missing = {"classifier.weight", "classifier.bias"} if name != "MaskedLM" else set()
        assert set(loading["missing_keys"]) == missing and not loading["mismatched_keys"]
    assert main(["verify", str(pretrained / "weights"), str(pretrained / "hf")]) == 0


def test_other_formats_take_it_or_say_why_not(
    place: Path, pretrained: Path, tmp_path: Path
) -> None:
    """As a graph, one layer that sees the whole text and one that sees a window of it."""
    two = {**SIZES, "num_hidden_layers": 2}
    folder_with_tokenizer(tmp_path / "two", documents() + NASTY, **two)
    finetune(place, tmp_path / "two", tmp_path / "run", epochs=1).train()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "onnx"), "--to", "onnx"]) == 0
    with pytest.raises(UserError, match="PaddleNLP has no modernbert encoder"):
        convert(pretrained, tmp_path / "paddle", "paddle")
    assert main(["resize", str(pretrained), str(tmp_path / "long"), "--positions", "512"]) == 0
    assert read_json(tmp_path / "long/weights.json")["backbone"]["max_positions"] == 512


def test_transformers_and_sentence_transformers_compute_the_same(pretrained: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["the river rose", "the bread was under the lamp at night"]
    mine: Any = palm.Backbone.from_pretrained(pretrained / "hf")
    its = SentenceTransformer(str(pretrained / "hf"), device="cpu").encode(texts)
    np.testing.assert_allclose(mine(texts, pooling="mean").numpy(), its, atol=1e-5)


@pytest.mark.exhaustive  # tests/distributed/test_causal.py has two processes under ZeRO 3
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_zero_stage_has_the_same_curve(place: Path, pretrained: Path, stage: int) -> None:
    """With dropout, in one process."""
    machine = {"zero_optimization": {"stage": stage}}
    assert pretrain(place, place / f"stage{stage}", machine) == 0
    np.testing.assert_allclose(
        curve(place / f"stage{stage}"), curve(pretrained.parent), atol=1e-6, rtol=1e-6
    )


def test_recomputed_layers_have_the_same_weights(place: Path, pretrained: Path) -> None:
    machine = {"palm_ds": {"activation_checkpointing": True}}
    assert pretrain(place, place / "recomputed", machine) == 0
    found, whole = (
        load_file(run / "weights/weights.safetensors")
        for run in (place / "recomputed/run", pretrained)
    )
    assert all(torch.equal(found[x], whole[x]) for x in whole)


@pytest.mark.exhaustive  # test_encoders.py has Muon
@pytest.mark.parametrize("kind", ["muon", "lamb"])
def test_other_optimizers_and_layer_decay_take_it(place: Path, kind: str) -> None:
    optimizer = {"kind": kind, "lr": 1e-3, "layer_decay": 0.9}
    assert pretrain(place, place / kind, optimizer=optimizer) == 0
    assert np.isfinite(curve(place / kind)).all()


def finetune(place: Path, start: Any, folder: Path, **more: Any) -> Any:
    task = palm.tasks.Classification.on(train=place / "train.tsv", dev=place / "dev.tsv")
    values: dict[str, Any] = {"batch": 8, "epochs": 6, "lr": 3e-3, "length": 32, **more}
    values["recipe"] = {"export_onnx": [], **values.get("recipe", {})}
    return palm.Trainer(
        task,
        backbone=palm.Backbone.from_pretrained(start),
        folder=folder,
        deepspeed_config={"zero_optimization": {"stage": 0}},
        **values,
    )


@pytest.fixture(scope="module")
def classifier(place: Path, pretrained: Path) -> Path:
    made = finetune(place, pretrained / "hf", place / "classifier")
    assert made.train()["classification"]["accuracy"] > 0.9
    return place / "classifier"


def test_a_classifier_is_one_in_transformers_and_served(classifier: Path) -> None:
    texts = ["the river group", "the night group"]
    labels = [row["label"] for row in palm.load(classifier)(texts)]
    assert labels == ["yes", "no"]
    its = transformers.pipeline("text-classification", str(classifier / "hf"), device="cpu")
    assert [row["label"] for row in its(texts)] == labels
    assert [row["label"] for row in palm.load(classifier / "hf")(texts)] == labels
    with local(*opened(mine=classifier)) as server:
        asked = {"inputs": [{"text_a": text} for text in texts]}
        said = server.answer("/predict/classification", asked)
        assert [row["label"] for row in said["predictions"]] == labels
        said = server.answer("/embed", {"texts": texts, "pooling": "mean"})
        mine: Any = palm.Backbone.from_pretrained(classifier)
        found = torch.tensor(said["embeddings"])
        torch.testing.assert_close(found, mine(texts, pooling="mean"), atol=1e-5, rtol=1e-4)


@pytest.mark.exhaustive  # tests/api has it for BERT
def test_it_resumes_bit_for_bit(place: Path, pretrained: Path, classifier: Path) -> None:
    def interrupt(event: Any) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id == 4:
            os.kill(os.getpid(), signal.SIGINT)

    run = place / "interrupted"
    with pytest.raises(KeyboardInterrupt, match=r"^step \d+ of \d+ is saved"):
        finetune(place, pretrained / "hf", run).train(interrupt)
    finetune(place, pretrained / "hf", run).train()
    found, whole = (load_file(x / "weights/weights.safetensors") for x in (run, classifier))
    assert found.keys() == whole.keys() and all(torch.equal(found[x], whole[x]) for x in whole)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("targets", "stabilized"),
    [
        ("all", True),
        (["query", "value", "output"], False),
        pytest.param("all", False, marks=pytest.mark.exhaustive),
        pytest.param(["query", "value", "output"], True, marks=pytest.mark.exhaustive),
    ],
)
def test_lora_is_an_adapter_of_peft(
    place: Path, classifier: Path, targets: Any, stabilized: bool
) -> None:
    """Also where several of its matrices are one in transformers."""
    import peft

    folder = place / f"lora-{targets == 'all'}-{stabilized}"
    lora = {"rank": 2, "alpha": 3, "targets": targets, "rank_stabilized": stabilized}
    finetune(place, classifier / "hf", folder, recipe={"lora": lora}, epochs=2).train()
    read: Any = transformers.AutoModelForSequenceClassification.from_pretrained
    ids = torch.arange(12).view(2, 6) + 20
    merged = read(folder / "hf").eval()(ids).logits
    opened_again = peft.PeftModel.from_pretrained(read(classifier / "hf"), folder / "adapter")
    torch.testing.assert_close(opened_again.eval()(ids).logits, merged, atol=1e-5, rtol=0)
    assert not torch.allclose(read(classifier / "hf").eval()(ids).logits, merged, atol=1e-3)


def test_lora_teachers_and_fewer_layers(place: Path, classifier: Path) -> None:
    lora = {"lora": {"rank": 2, "targets": "all"}}
    finetune(place, classifier, place / "lora", recipe=lora, epochs=1).train()
    before, after = (
        load_file(x / "weights/weights.safetensors") for x in (classifier, place / "lora")
    )
    changed = {x.rsplit(".", 2)[1] for x in before if not torch.equal(before[x], after[x])}
    assert {"qkv", "project", "expand", "contract"} < changed and "word" not in changed
    taught = {"path": str(classifier), "logits": {}, "hidden_states": {}, "relations": {}}
    finetune(place, place / "base", place / "taught", recipe={"teacher": taught}, epochs=1).train()
    fewer = {"init_layers": [0, 1], "init_from": str(classifier), "backbone": {"dropout": 0.0}}
    made = finetune(place, classifier, place / "fewer", recipe=fewer, epochs=1)
    assert made.recipe.backbone_config.num_layers == 2
    with pytest.raises(UserError, match="init_layers: layer 3 of .* does not compute what layer 1"):
        wrong = {**fewer, "init_layers": [0, 3]}
        finetune(place, classifier, place / "wrong", recipe=wrong, epochs=1).train()


CONFIG = EncoderConfig.from_dict(
    {
        "kind": "modernbert",
        "vocab_size": 600,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 96,
        "max_positions": 64,
    }
)


def test_its_flops_are_those_that_torch_counts() -> None:
    batch = make_batch(2, 64)
    with FlopCounterMode(display=False) as counter:
        build_encoder(CONFIG)(batch).sum().backward()
    counted = float(training_flops(CONFIG, batch, []))
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-9)


def test_its_memory_is_as_predicted() -> None:
    batch, mask = make_batch(8, 64), 8 * 64 * 64
    predicted = activation_bytes(CONFIG, 4, tokens=8 * 64, labels=8 * LABELS)
    assert kept_bytes(build(CONFIG), batch) - mask == pytest.approx(predicted, rel=0.12)
