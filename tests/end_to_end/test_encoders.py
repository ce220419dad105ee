"""Somebody's encoder on somebody's text, for families other than ModernBERT: pretrained further,
fine-tuned, opened in transformers, peft and ONNX Runtime.

The default run has one whose tokenizer is byte-level and that transformers has, and one of neither.
What each family computes is compared in tests/weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import palm_ds as palm
from palm_ds.cli.main import main
from palm_ds.text.tokenizer import load_tokenizer
from tests.end_to_end.test_modernbert import NASTY, WORDS, curve, documents, finetune, pretrain
from tests.helpers.hf_architectures import TOKENIZERS, folder_with_tokenizer
from tests.helpers.sampling import only

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's


@pytest.fixture(scope="module", params=only(["eurobert", "neobert"], TOKENIZERS))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a folder of the family; `corpus`, prepared with its tokenizer; tables of two
    classes."""
    folder = tmp_path_factory.mktemp(request.param)
    folder_with_tokenizer(request.param, folder / "base", documents() + NASTY)
    (folder / "texts.txt").write_text("\n\n".join(documents()))
    words = [str(folder / "corpus"), str(folder / "texts.txt"), "--language", "en"]
    assert main(["prepare", *words, "--tokenizer", str(folder / "base")]) == 0
    for name in ("train", "dev"):
        rows = [f"{'no' if n % 2 else 'yes'}\tthe {WORDS[n % 2]} {WORDS[n % 7]}" for n in range(40)]
        (folder / f"{name}.tsv").write_text("\n".join(["label\ttext_a", *rows]) + "\n")
    return folder


def in_transformers(folder: Path) -> bool:
    """Whether transformers has the class of a folder."""
    return hasattr(
        transformers, json.loads((folder / "config.json").read_text())["architectures"][0]
    )


@pytest.fixture(scope="module")
def pretrained(place: Path) -> Path:
    """With Muon, layer decay and a task embedding."""
    optimizer = {"kind": "muon", "lr": 1e-3, "layer_decay": 0.9}
    backbone = {"task_types": 16, "dropout": 0.1, "attention_dropout": 0.1}
    about = json.loads((place / "base/config.json").read_text())
    more = {"token_types": 3} if about.get("type_vocab_size") else {}  # for texts of three parts
    changes: Any = {"optimizer": optimizer, "backbone": backbone | more}
    assert pretrain(place, place / "first", **changes) == 0
    return place / "first" / "run"


@pytest.fixture(scope="module")
def classifier(place: Path, pretrained: Path) -> Path:
    made = finetune(place, pretrained / "hf", place / "classifier", epochs=12, lr=1e-3)
    assert made.train()["classification"]["accuracy"] > 0.9
    return place / "classifier"


def test_the_tokenizer_has_the_ids_of_transformers(place: Path, pretrained: Path) -> None:
    for folder in (place / "base", pretrained / "hf"):
        mine, its = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        for text, (ids, _) in zip(NASTY, mine.encode_texts(NASTY), strict=True):
            assert list(ids) == its(text, add_special_tokens=False)["input_ids"], text
        known = mine.vocabulary
        assert its("a b")["input_ids"][:: len(its("a b")["input_ids"]) - 1] == [
            known.cls,
            known.sep,
        ]
        assert (known.pad, known.mask) == (its.pad_token_id, its.mask_token_id)


def test_padding_ends_ids_also_where_it_is_the_end_of_a_text(place: Path) -> None:
    its = transformers.AutoTokenizer.from_pretrained(place / "base")
    ids = its("the river")["input_ids"]
    backbone: Any = palm.Backbone.from_pretrained(place / "base")
    found = backbone([ids, [*ids, *[its.pad_token_id] * 3]])
    torch.testing.assert_close(found, backbone(["the river", "the river"]), atol=1e-5, rtol=1e-5)


def test_a_pretrained_run_is_that_family_again(place: Path, pretrained: Path) -> None:
    assert np.isfinite(curve(place / "first")).all()
    before, after = (
        json.loads((x / "config.json").read_text()) for x in (place / "base", pretrained / "hf")
    )
    same = ("model_type", "architectures", "rope_parameters", "vocab_size", "hidden_act")
    assert [before.get(x) for x in same] == [after.get(x) for x in same]
    names = [load_file(x / "model.safetensors").keys() for x in (place / "base", pretrained / "hf")]
    assert names[0] == names[1]
    if not in_transformers(pretrained / "hf"):
        return
    opened: Any = transformers.AutoModelForMaskedLM
    _, loading = opened.from_pretrained(pretrained / "hf", output_loading_info=True)
    assert not any(loading.values())


def test_a_classifier_is_one_in_transformers(classifier: Path) -> None:
    texts = ["the river group", "the night group"]
    labels = [row["label"] for row in palm.load(classifier)(texts)]
    assert labels == ["yes", "no"]
    if in_transformers(classifier / "hf"):
        its = transformers.pipeline("text-classification", str(classifier / "hf"), device="cpu")
        assert [row["label"] for row in its(texts)] == labels
    assert [row["label"] for row in palm.load(classifier / "hf")(texts)] == labels


@pytest.mark.exhaustive  # one of the other families is a graph in the default run
@pytest.mark.parametrize("place", TOKENIZERS, indirect=True)
def test_a_classifier_is_one_in_onnx_runtime(place: Path, classifier: Path) -> None:
    words = [str(classifier / "hf"), str(classifier / "onnx"), "--to", "onnx"]
    assert main(["convert", *words]) == 0  # compares their outputs


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
def test_lora_is_an_adapter_of_peft(place: Path, classifier: Path) -> None:
    import peft

    lora = {"rank": 2, "alpha": 3, "targets": "all"}
    finetune(place, classifier / "hf", place / "lora", recipe={"lora": lora}, epochs=2).train()
    read: Any = transformers.AutoModelForSequenceClassification.from_pretrained
    ids = torch.arange(12).view(2, 6) + 20
    assert (place / "lora/adapter").is_dir() == in_transformers(place / "lora/hf")
    if in_transformers(place / "lora/hf"):
        merged = read(place / "lora/hf").eval()(ids).logits
        assert not torch.allclose(read(classifier / "hf").eval()(ids).logits, merged, atol=1e-3)
        opened = peft.PeftModel.from_pretrained(read(classifier / "hf"), place / "lora/adapter")
        torch.testing.assert_close(opened.eval()(ids).logits, merged, atol=1e-5, rtol=0)
    before, after = (
        load_file(x / "weights/weights.safetensors") for x in (classifier, place / "lora")
    )
    changed = {x.rsplit(".", 2)[1] for x in before if not torch.equal(before[x], after[x])}
    assert {"qkv", "project", "expand", "contract"} < changed and "word" not in changed
