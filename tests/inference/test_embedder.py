"""Vectors of texts equal Hugging Face's, whatever the folder, the pooling and the batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers
from torch.nn import functional as F  # noqa: N812

import palm_ds as palm
from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import SPECIALS, wordpiece
from palm_ds.weights.formats.huggingface.sentence_transformers import read_modules
from palm_ds.weights.weights_folder import WeightsInfo, export_hf, save_weights

WORDS = ["the", "cat", "sat", "on", "a", "mat", "query", ":", "##s"]
TOKENIZER = wordpiece([*SPECIALS, *WORDS], lower=True)
CONFIG = EncoderConfig(
    vocab_size=TOKENIZER.size,
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    max_positions=150,
    task_types=3,
)
RNG = np.random.default_rng(5)
TEXTS = ["", "cat", *(" ".join(RNG.choice(WORDS[:6], n)) for n in RNG.integers(1, 160, 60))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """weights/ and hf/ of a run with the tasks a (row 0) and b (row 1)."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(1)
    model = Model(build_encoder(CONFIG), {}, {}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    info = WeightsInfo(backbone=CONFIG, task_ids={"a": 0, "b": 1}, head_of={}, export_task="b")
    save_weights(model, folder / "weights", info, tokenizer=TOKENIZER)
    export_hf(model, folder / "hf", config=CONFIG, tokenizer=TOKENIZER, task_id=1)
    return folder


@pytest.fixture(scope="module")
def reference(run: Path) -> list[dict[str, Any]]:
    """What transformers computes of each text."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    model = AutoModel.from_pretrained(run / "hf").eval()
    found = []
    for text in TEXTS:
        batch = tokenizer(text, truncation=True, max_length=150, return_tensors="pt")
        with torch.no_grad():
            out = model(**batch, output_hidden_states=True)
        layers = [layer[0] for layer in out.hidden_states]
        found.append({"layers": layers, "pooler": out.pooler_output[0]})
    return found


def pooled(found: dict[str, Any], pooling: str, layers: tuple[int, ...] = (-1,)) -> torch.Tensor:
    tokens = torch.stack([found["layers"][n] for n in layers]).mean(0)
    return {
        "mean": lambda: tokens.mean(0),
        "cls": lambda: tokens[0],
        "max": lambda: tokens.max(0).values,
        "pooler": lambda: found["pooler"],
    }[pooling]()


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "pooler"])
@pytest.mark.parametrize("place", ["", "weights", "hf"])
def test_vectors_equal_those_of_transformers(run, reference, pooling: str, place: str) -> None:
    embedder = TrainedModel.open(run / place, batch_tokens=300).embedder(
        EmbeddingSettings(pooling=pooling)
    )
    wanted = torch.stack([pooled(found, pooling) for found in reference])
    assert np.abs(embedder.embed(TEXTS) - wanted.numpy()).max() < 1e-5


@pytest.mark.parametrize("batch_tokens", [1, 100, 5000])
def test_batches_do_not_change_vectors(run, reference, batch_tokens: int) -> None:
    wanted = torch.stack([pooled(found, "mean") for found in reference]).numpy()
    found = TrainedModel.open(run, batch_tokens=batch_tokens).embedder().embed(TEXTS)
    assert np.abs(found - wanted).max() < 1e-5


def test_layers_one_after_another(run, reference) -> None:
    settings = EmbeddingSettings(layers=(0, -1, 2), concat=True)
    found = TrainedModel.open(run).embedder(settings)
    assert found.size == 3 * 16
    for own, other in zip(found.embed(TEXTS), reference, strict=True):
        parts = [pooled(other, "mean", (layer,)) for layer in settings.layers]
        assert np.abs(own - torch.cat(parts).numpy()).max() < 1e-5


def test_layers_dimensions_and_length(run, reference) -> None:
    settings = EmbeddingSettings(layers=(0, 1, -1), dimensions=5, normalize=True)
    embedder = TrainedModel.open(run).embedder(settings)
    assert embedder.size == 5
    wanted = torch.stack([pooled(found, "mean", (0, 1, -1))[:5] for found in reference])
    assert np.abs(embedder.embed(TEXTS) - F.normalize(wanted).numpy()).max() < 1e-5
    short = TrainedModel.open(run).embedder(EmbeddingSettings(max_length=3))
    assert [len(each.input_ids) for each in short.encode(["", "cat sat"])] == [2, 3]
    before = TrainedModel.open(run).embedder(EmbeddingSettings(prompt="query: "))
    assert np.array_equal(
        before.embed(["cat"]), TrainedModel.open(run).embedder().embed(["query: cat"])
    )


def test_one_vector_for_each_token(run, reference) -> None:
    embedder = TrainedModel.open(run, batch_tokens=300).embedder(EmbeddingSettings(tokens=True))
    found = embedder.embed_tokens(embedder.encode(TEXTS))
    for own, other in zip(found, reference, strict=True):
        assert np.abs(own - other["layers"][-1].numpy()).max() < 1e-5


def test_pairs_equal_those_of_transformers(run) -> None:
    """Token types, the length of both together, and pairs next to texts."""
    from transformers import AutoModel, AutoTokenizer

    pairs = [("cat", "the mat"), ("", "cat"), (TEXTS[5] * 3, TEXTS[6] * 3)]
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    model = AutoModel.from_pretrained(run / "hf").eval()
    embedder = TrainedModel.open(run).embedder()
    found = embedder.embed([*pairs, "cat"])
    assert np.abs(found[-1] - embedder.embed(["cat"])[0]).max() < 1e-5
    for (one, other), own in zip(pairs, found, strict=False):
        batch = tokenizer(one, other, truncation=True, max_length=150, return_tensors="pt")
        with torch.no_grad():
            wanted = model(**batch).last_hidden_state[0].mean(0)
        assert np.abs(own - wanted.numpy()).max() < 1e-5
    backbone, model = palm.Backbone.from_pretrained(run), embedder.embed(pairs)
    assert np.array_equal(backbone(pairs), model)
    assert np.array_equal(backbone([list(pair) for pair in pairs]), model)
    with pytest.raises(UserError, match=r"text 1: expected a text like the others, got \('a', 5\)"):
        backbone(["cat", ("a", 5)])  # type: ignore[list-item]
    with pytest.raises(UserError, match="texts: expected a text or a list of texts, got 5"):
        backbone(5)  # type: ignore[arg-type]


def test_a_task_has_its_own_embedding(run) -> None:
    vectors = [
        TrainedModel.open(run).embedder(EmbeddingSettings(task=task)).embed(["cat"])
        for task in "ab"
    ]
    assert not np.allclose(*vectors)
    assert np.array_equal(vectors[1], TrainedModel.open(run).embedder().embed(["cat"]))


@pytest.fixture
def sentence_folder(run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(run / "hf", folder)
    modules = ["Transformer", "Pooling", "Normalize"]
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"{KIND}{name}"}
        for n, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(
        '{"word_embedding_dimension": 16, "pooling_mode_max_tokens": true}'
    )
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    return folder


KIND = "sentence_transformers.models."


def test_files_of_sentence_transformers_are_the_default(sentence_folder, reference) -> None:
    embedder = TrainedModel.open(sentence_folder).embedder()
    settings = embedder.settings
    assert (settings.pooling, settings.normalize, settings.max_length) == ("max", True, 20)
    wanted = F.normalize(pooled(reference[1], "max"), dim=0)
    assert np.abs(embedder.embed([TEXTS[1]]) - wanted.numpy()).max() < 1e-5
    (sentence_folder / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    assert TrainedModel.open(sentence_folder).embedder().settings.pooling == "cls"
    (sentence_folder / "1_Pooling/config.json").write_text('{"embedding_dimension": 16}')
    settings = TrainedModel.open(sentence_folder).embedder().settings
    assert (settings.pooling, settings.normalize) == ("mean", True)
    own = EmbeddingSettings(pooling="mean", normalize=False, max_length=150)
    wanted = torch.stack([pooled(found, "mean") for found in reference])
    assert (
        np.abs(TrainedModel.open(sentence_folder).embedder(own).embed(TEXTS) - wanted.numpy()).max()
        < 1e-5
    )


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config_sentence_transformers.json", {"truncate_dim": 5}),
        (
            "config_sentence_transformers.json",
            {"prompts": {"q": "sat "}, "default_prompt_name": "q"},
        ),
        ("sentence_bert_config.json", {"max_seq_length": 9}),
        ("sentence_bert_config.json", {"max_seq_length": None}),
        ("tokenizer_config.json", {"model_max_length": 12}),
    ],
)
def test_whatever_the_files_say_is_as_in_sentence_transformers(
    sentence_folder: Path, file: str, change: dict[str, Any]
) -> None:
    from sentence_transformers import SentenceTransformer

    if file == "tokenizer_config.json":
        (sentence_folder / "sentence_bert_config.json").unlink()
    path = sentence_folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    wanted = SentenceTransformer(str(sentence_folder), device="cpu").encode(TEXTS)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)  # truncated before it is normalized
    assert np.abs(TrainedModel.open(sentence_folder).embedder().embed(TEXTS) - wanted).max() < 1e-5


def test_lower_casing_that_the_tokenizer_does_not(sentence_folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    file = sentence_folder / "tokenizer.json"
    state = json.loads(file.read_text())
    state["normalizer"] = {"type": "NFC"}
    file.write_text(json.dumps(state))
    (sentence_folder / "tokenizer_config.json").unlink()
    texts = ["CAT Sat", "cat"]
    before = TrainedModel.open(sentence_folder).embedder().embed(texts)
    settings = {"max_seq_length": 20, "do_lower_case": True}
    (sentence_folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    wanted = SentenceTransformer(str(sentence_folder), device="cpu").encode(texts)
    found = TrainedModel.open(sentence_folder).embedder().embed(texts)
    assert np.abs(found - wanted).max() < 1e-5
    assert not np.allclose(found, before)


def test_prompts_that_are_not_pooled_are_refused(sentence_folder: Path) -> None:
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    (sentence_folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    assert TrainedModel.open(sentence_folder).embedder().embed(["cat"]).shape == (1, 16)
    with pytest.raises(UserError, match="prompt: the pooling .*leaves out the tokens of 'q: '"):
        TrainedModel.open(sentence_folder).embedder(EmbeddingSettings(prompt="q: ")).embed(["cat"])


def test_texts_are_prepared_as_before_training(run: Path, tmp_path: Path) -> None:
    """A run whose corpora were simplified gives hf/ and weights/ a tokenizer that does it."""
    shutil.copytree(run / "weights", tmp_path / "weights")
    backend = Backend.from_str(TOKENIZER.backend.to_str())
    own = [backend.normalizer] if backend.normalizer else []
    backend.normalizer = normalizers.Sequence([normalizers.Replace("貓", "cat"), *own])
    TOKENIZER.changed(backend).save(tmp_path / "weights/text_tokenizer")
    plain = TrainedModel.open(run).embedder().embed(["cat sat"])
    assert not np.allclose(TrainedModel.open(run).embedder().embed(["貓 sat"]), plain)
    for folder in (
        tmp_path,
        palm.Backbone.from_pretrained(tmp_path).save_pretrained(tmp_path / "h"),
    ):
        assert np.abs(TrainedModel.open(folder).embedder().embed(["貓 sat"]) - plain).max() < 1e-5


def test_a_pooling_of_another_kind_is_refused(sentence_folder) -> None:
    (sentence_folder / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    with pytest.raises(UserError, match="depend on Pooling lasttoken .*choose a pooling"):
        TrainedModel.open(sentence_folder).embedder()
    assert (
        TrainedModel.open(sentence_folder)
        .embedder(EmbeddingSettings(pooling="cls"))
        .settings.normalize
    )
    file = sentence_folder / "modules.json"
    modules = json.loads(file.read_text())
    modules[2]["type"] = f"{KIND}LayerNorm"
    file.write_text(json.dumps(modules))
    assert read_modules(
        {"modules.json": file, "1_Pooling/config.json": file.parent / "1_Pooling/config.json"}
    ).other


@pytest.mark.parametrize("kind", [f"{KIND}LSTM", "my_code.Whitening"])
def test_vectors_of_a_module_that_cannot_be_kept_are_refused(sentence_folder, kind: str) -> None:
    """They would be those of the encoder alone, without a word about it."""
    file = sentence_folder / "modules.json"
    file.write_text(file.read_text().replace(f"{KIND}Normalize", kind))
    with pytest.raises(UserError, match="depend on modules.json .its module .* is not supported"):
        TrainedModel.open(sentence_folder).embedder()
    mean = EmbeddingSettings(pooling="mean")
    assert not TrainedModel.open(sentence_folder).embedder(mean).settings.normalize


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "means"}, "pooling: no .means.; did you mean .mean."),
        ({"pooling": "mean", "tokens": True}, "tokens are not pooled"),
        ({"pooling": "pooler", "layers": (1,)}, "the pooler reads the last layer"),
        ({"layers": ()}, "layers: empty"),
        ({"layers": (1, 2), "concat": True, "dimensions": 3}, "dimensions, concat: exclude"),
        ({"layers": (4,)}, "layers: 4: .* has layers 1 to 3"),
        ({"layers": (-5,)}, "layers: -5: .* has layers 1 to 3"),
        ({"max_length": 2}, "max_length: 2: .* from 3 to 150"),
        ({"max_length": 151}, "max_length: 151: .* from 3 to 150"),
        ({"dimensions": 17}, "dimensions: 17: .* have only 16"),
        ({"dimensions": -1}, "dimensions: expected 0 or more, got -1"),
        ({"task": "c"}, "task: 'c': no such task"),
    ],
)
def test_wrong_settings_are_named(run, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainedModel.open(run).embedder(EmbeddingSettings(**settings))


def test_a_folder_without_a_pooler_has_no_pooled_vectors(run, tmp_path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(run / "hf", add_pooling_layer=False)
    model.save_pretrained(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(run / "hf" / name, tmp_path / "bare" / name)
    with pytest.raises(UserError, match="no trained pooler"):
        TrainedModel.open(tmp_path / "bare").embedder(EmbeddingSettings(pooling="pooler"))
    assert TrainedModel.open(tmp_path / "bare").embedder().embed(["cat"]).shape == (1, 16)
