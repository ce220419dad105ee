"""A folder of each family, pretrained further with ERNIE's tasks, is that family again; and what a
step costs is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import palm_ds as palm
from palm_ds.cli.main import main
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.flops import training_flops
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.formats.huggingface.read import open_contents
from tests.end_to_end.test_modernbert import WORDS, curve, documents, finetune, pretrain
from tests.helpers.hf_families import HF_FAMILIES, HfFamily
from tests.helpers.sampling import only
from tests.train.plan.test_memory import make_batch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
EVERY = pytest.mark.parametrize("family", list(HF_FAMILIES.values()), ids=lambda x: x.name)


def usual(*names: str) -> pytest.MarkDecorator:
    """Every family; the default run has those of these names."""
    chosen = only((HF_FAMILIES[name] for name in names), HF_FAMILIES.values())
    return pytest.mark.parametrize("family", chosen, ids=lambda x: x.name)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus`, and `words`: its tokenizer, whose first tokens are <s>, <pad> and others."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "texts.txt").write_text("\n\n".join(documents()))
    found = sorted({word for text in documents() for word in text.lower().split()})
    specials = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    letters = [f"{start}{x}" for x in "abcdefghijklmnopqrstuvwxyz.:," for start in ("", "##")]
    words = dict.fromkeys([*specials, *letters, *(x.strip(".") for x in found)])
    (folder / "words").mkdir()
    (folder / "words" / "vocab.txt").write_text("\n".join(words) + "\n")
    given = [str(folder / "corpus"), str(folder / "texts.txt"), "--language", "en"]
    assert main(["prepare", *given, "--tokenizer", str(folder / "words")]) == 0
    return folder


def place_of(texts: Path, family: HfFamily, folder: Path) -> Path:
    """`base`, a masked-LM folder with the tokenizer, beside the corpus."""
    size = load_tokenizer(texts / "words").size
    family.save(folder / "base", "ForMaskedLM", vocab_size=size, pad_token_id=1)
    shutil.copy(texts / "words" / "vocab.txt", folder / "base")
    (folder / "corpus").symlink_to(texts / "corpus")
    return folder


@usual("DebertaV2", "Albert")  # distances in every layer; layers that share weights, two texts
def test_a_run_is_that_family_again(texts: Path, family: HfFamily, tmp_path: Path) -> None:
    """With dropout, recomputed or not: the same curve and weights."""
    place = place_of(texts, family, tmp_path)
    stages = [{"knowledge_masking": "4 steps", "sentence_distance": "2 steps"}]
    tasks = {
        "knowledge_masking": {"source": "text", "units": ["word"]},
        "sentence_distance": {"source": "text"},
    }
    recomputed = {"palm_ds": {"activation_checkpointing": True}}
    runs = {"plain": {}, "recomputed": recomputed}
    for name, machine in runs.items():
        assert pretrain(place, tmp_path / name, machine, stages=stages, tasks=tasks) == 0
    curves = [curve(tmp_path / name) for name in runs]
    assert np.isfinite(curves[0]).all() and len(curves[0]) >= 6
    np.testing.assert_allclose(curves[1], curves[0], atol=1e-6, rtol=0)
    hf = tmp_path / "plain" / "run" / "hf"
    about = json.loads((hf / "config.json").read_text())
    assert about["architectures"] == [f"{family.name}ForMaskedLM"]
    model: Any = transformers.AutoModelForMaskedLM
    _, loading = model.from_pretrained(hf, output_loading_info=True)
    before = load_file(place / "base" / "model.safetensors")
    after = load_file(hf / "model.safetensors")
    more = {x for x in after if family.keeps_pooler and x.startswith("albert.pooler.")}
    assert after.keys() - before.keys() == more and before.keys() <= after.keys()
    assert set(loading.pop("unexpected_keys")) == more and not any(loading.values())
    layer = next(x for x in after if x.endswith(f"{family.query}.weight"))
    assert not torch.equal(before[layer], after[layer])


@usual("Electra", "DistilBert", "MPNet")
def test_a_classifier_with_lora_is_one_in_transformers(
    texts: Path, family: HfFamily, tmp_path: Path
) -> None:
    """With dropout in LoRA's matrices, and layers that learn at rates of their own."""
    place = place_of(texts, family, tmp_path)
    for name in ("train", "dev"):
        rows = [f"{'no' if n % 2 else 'yes'}\tthe {WORDS[n % 2]} {WORDS[n % 7]}" for n in range(40)]
        (place / f"{name}.tsv").write_text("\n".join(["label\ttext_a", *rows]) + "\n")
    lora = {"rank": 2, "targets": "all", "dropout": 0.1}
    recipe = {"lora": lora, "optimizer": {"layer_decay": 0.9}}
    finetune(place, place / "base", place / "run", recipe=recipe, epochs=1).train()
    asked = ["the river group", "the night group"]
    mine = palm.load(place / "run")(asked)
    its = transformers.pipeline("text-classification", str(place / "run" / "hf"), device="cpu")
    for one, other in zip(mine, its(asked), strict=True):
        assert one["label"] == other["label"]
        assert max(one["probs"]) == pytest.approx(other["score"], abs=1e-5)
    assert (place / "run" / "adapter" / "adapter_config.json").is_file()


@EVERY
def test_its_flops_are_those_that_torch_counts(family: HfFamily, tmp_path: Path) -> None:
    """But for the map of DeBERTa's table of distances, which is computed once for all texts."""
    config = open_contents(family.save(tmp_path)).config
    batch = make_batch(2, 64)
    batch.input_ids.clamp_(max=63)
    encoder = build_encoder(config)
    with FlopCounterMode(display=False) as counter:
        encoder(batch).sum().backward()
    counted = float(training_flops(config, batch, []))
    distances: Any = getattr(encoder, "distance", None)
    mapped = 0 if distances is None else 6 * 3 * distances.weight.numel() * 3 * 48
    assert counter.get_total_flops() - mapped == pytest.approx(counted, rel=1e-9)
