"""Folders for PaddleNLP: the names, shapes and orientation that PaddleNLP writes itself."""

from __future__ import annotations

import importlib
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.formats.contents import COPY, HeadInfo
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.paddle import read as paddle
from palm_ds.weights.formats.paddle.pdparams import NAME_TABLE, read_pickle
from palm_ds.weights.formats.paddle.write import WEIGHTS, why_no_tokenizer
from tests.helpers.byte_level_bpe import TEXTS, bpe_folder
from tests.helpers.paddle_folder import write_paddle
from tests.helpers.small_configs import TINY, letters

CONFIG = replace(TINY, layer_norm_eps=1e-12)
BERT = replace(CONFIG, task_types=0, layer_norm_eps=1e-7)
ROBERTA = replace(BERT, max_positions=12, position_offset=2, pad=1)
WORDS = letters("f")


def state_of(config: EncoderConfig, **heads: int) -> dict[str, torch.Tensor]:
    """An encoder and heads with these numbers of classes; 0 means a masked-LM head."""
    torch.manual_seed(1)
    backbone = build_encoder(config)
    modules = {
        name: ClassHead(config.hidden_size, count) if count else MaskedLMHead(backbone)
        for name, count in heads.items()
    }
    both = torch.nn.ModuleDict({"backbone": backbone, "heads": torch.nn.ModuleDict(modules)})
    for parameter in both.parameters():
        torch.nn.init.normal_(parameter)
    return {name: tensor.detach() for name, tensor in both.state_dict().items()}


def read_back(folder: Path, state: Mapping[str, torch.Tensor], eps: float) -> Any:
    """The contents of a written folder, every tensor of `state` bit for bit."""
    contents = paddle.open_contents(folder, eps=eps)
    assert contents.entries.keys() == state.keys()
    for name, entry in contents.entries.items():
        assert torch.equal(entry.read(), state[name]), name
    assert all(why.startswith(COPY) for why in contents.skipped.values())
    return contents


@pytest.mark.parametrize("config", [CONFIG, BERT, ROBERTA], ids=["ernie", "bert", "roberta"])
@pytest.mark.parametrize(
    "heads", [{}, {"masked_words": 0}, {"masked_words": 0, "next_sentence": 2}]
)
def test_weights_come_back(tmp_path: Path, config: EncoderConfig, heads: dict[str, int]) -> None:
    if config is ROBERTA:
        heads = {name: count for name, count in heads.items() if name != "next_sentence"}
    state = state_of(config, **heads)
    plan = write_paddle(state, tmp_path / "out", config)
    contents = read_back(tmp_path / "out", state, config.layer_norm_eps)
    assert contents.config == config
    assert contents.heads.keys() == heads.keys()
    assert plan.skipped == plan.created == {}
    ending = {0: "Model", 1: "ForMaskedLM", 2: "ForPretraining"}[len(heads)]
    assert plan.architecture.endswith(ending)
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["config.json", WEIGHTS]
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


def test_pickle_itself_reads_it_as_numpy_arrays(tmp_path: Path) -> None:
    """As Paddle does: pickle.load(file, encoding="latin1"); numpy is enough."""

    class Numpy(pickle.Unpickler):
        def import_class(self, module: str, name: str) -> Any:
            assert (module, name) in {
                ("numpy.core.multiarray", "_reconstruct"),
                ("numpy", "ndarray"),
                ("numpy", "dtype"),
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return getattr(importlib.import_module(module), name)

    write_paddle(state_of(CONFIG, masked_words=0), tmp_path / "out", CONFIG)
    with (tmp_path / "out" / WEIGHTS).open("rb") as file:
        found = Numpy(file, encoding="latin1").load()
    table = found.pop(NAME_TABLE)
    assert table.keys() == found.keys()
    assert all(type(array) is np.ndarray for array in found.values())
    words = found["ernie.embeddings.word_embeddings.weight"]
    assert words is found["cls.predictions.decoder.weight"]  # tied, and written once
    assert found["ernie.encoder.layers.0.linear1.weight"].shape == (8, 12)
    for name, stored in read_pickle(tmp_path / "out" / WEIGHTS).tensors.items():
        assert np.array_equal(stored.read().numpy(), found[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    state = state_of(CONFIG, masked_words=0)
    write_paddle(state, tmp_path / "out", CONFIG, target=ExportOptions(dtype=dtype))
    half = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    read_back(tmp_path / "out", half, CONFIG.layer_norm_eps)
    kinds = {x.dtype for x in read_pickle(tmp_path / "out" / WEIGHTS).tensors.values()}
    assert kinds == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("config", "head", "name", "architecture"),
    [
        (
            CONFIG,
            HeadInfo(kind="classes", classes=3),
            "classifier",
            "ErnieForSequenceClassification",
        ),
        (BERT, HeadInfo(kind="classes", classes=3), "classifier", "BertForSequenceClassification"),
        (
            ROBERTA,
            HeadInfo(kind="classes", classes=3),
            "classifier",
            "RobertaForSequenceClassification",
        ),
        (
            ROBERTA,
            HeadInfo(kind="classes", classes=3, pooled=False),
            "classifier",
            "RobertaForTokenClassification",
        ),
        (
            BERT,
            HeadInfo(kind="classes", classes=3, pooled=False),
            "classifier",
            "BertForTokenClassification",
        ),
        (
            CONFIG,
            HeadInfo(kind="classes", classes=2, pooled=False),
            "qa_outputs",
            "ErnieForQuestionAnswering",
        ),
    ],
)
def test_fine_tuned_heads(
    tmp_path: Path, config: EncoderConfig, head: HeadInfo, name: str, architecture: str
) -> None:
    state = state_of(config, **{name: head.classes})
    plan = write_paddle(state, tmp_path / "out", config, heads={name: head})
    assert plan.architecture == architecture
    contents = read_back(tmp_path / "out", state, config.layer_norm_eps)
    assert contents.heads == {name: head}
    names = read_pickle(tmp_path / "out" / WEIGHTS).tensors
    out = "classifier.out_proj" if architecture.startswith("RobertaForSeq") else "classifier"
    assert names[f"{out}.weight"].shape == (8, head.classes)


def test_the_names_of_the_classes(tmp_path: Path) -> None:
    state = state_of(BERT, classifier=2)
    head = HeadInfo(kind="classes", classes=2, outputs=HeadOutputs(labels=("no", "yes")))
    write_paddle(state, tmp_path / "out", BERT, heads={"classifier": head})
    assert paddle.open_contents(tmp_path / "out").heads == {"classifier": head}


def test_one_of_several_heads_is_exported(tmp_path: Path) -> None:
    state = state_of(CONFIG, masking=0, senti=3, order=4)
    plan = write_paddle(state, tmp_path / "all", CONFIG)
    assert plan.architecture == "ErnieForMaskedLM"
    assert plan.skipped == {
        f"heads.{name}.out.{end}": "no place in ErnieForMaskedLM"
        for name in ("senti", "order")
        for end in ("weight", "bias")
    }
    plan = write_paddle(state, tmp_path / "one", CONFIG, target=ExportOptions(head="order"))
    assert plan.architecture == "ErnieForSequenceClassification"
    contents = paddle.open_contents(tmp_path / "one")
    assert torch.equal(
        contents.entries["heads.classifier.out.weight"].read(), state["heads.order.out.weight"]
    )


def test_a_next_sentence_head_alone_is_skipped(tmp_path: Path) -> None:
    state = state_of(CONFIG, next_sentence=2)
    plan = write_paddle(state, tmp_path / "out", CONFIG)
    assert plan.architecture == "ErnieModel"
    assert len(plan.skipped) == 2
    with pytest.raises(UserError, match="PaddleNLP has no ForNextSentencePrediction"):
        write_paddle(
            state,
            tmp_path / "no",
            CONFIG,
            target=ExportOptions(head_class="ForNextSentencePrediction"),
        )


def test_a_task_folded_into_a_bert(tmp_path: Path) -> None:
    state = state_of(CONFIG)
    target = ExportOptions(family="bert", task_id=2)
    plan = write_paddle(state, tmp_path / "out", CONFIG, target=target)
    contents = paddle.open_contents(tmp_path / "out")
    folded = state["backbone.segment.weight"] + state["backbone.task.weight"][2]
    assert torch.equal(contents.entries["backbone.segment.weight"].read(), folded)
    assert (plan.architecture, contents.config.task_types) == ("BertModel", 0)


def test_an_eps_that_paddlenlp_would_not_compute_with_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, layer_norm_eps=1e-5)
    with pytest.raises(UserError, match=r"PaddleNLP's Ernie .* 1e-12, .* this model has 1e-05"):
        write_paddle(state_of(config), tmp_path / "out", config)
    assert not any(tmp_path.iterdir())
    for kept in (CONFIG, BERT):
        write_paddle(state_of(kept), tmp_path / "out", kept)
        about = json.loads((tmp_path / "out/config.json").read_text())
        assert about["layer_norm_eps"] == kept.layer_norm_eps
    write_paddle(state_of(config), tmp_path / "out", config, target=ExportOptions(family="bert"))
    assert paddle.open_contents(tmp_path / "out").config.layer_norm_eps == 1e-5


@pytest.mark.parametrize(("config", "named"), [(CONFIG, "Ernie"), (BERT, "Bert")])
def test_the_vocabulary_is_written_too(tmp_path: Path, config: EncoderConfig, named: str) -> None:
    write_paddle(state_of(config), tmp_path / "out", config, tokenizer=WORDS)
    assert (tmp_path / "out/vocab.txt").read_text().splitlines() == WORDS.tokens(range(11))
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == f"{named}Tokenizer"
    assert (about["do_lower_case"], about["model_max_length"]) == (True, 10)
    contents = paddle.open_contents(tmp_path / "out")
    assert contents.tokenizer == tmp_path / "out"  # where tokenizer_config.json tells the case
    assert load_tokenizer(tmp_path / "out").fingerprint == WORDS.fingerprint


def test_a_line_break_as_a_token_has_no_place_in_vocab_txt(tmp_path: Path) -> None:
    assert not why_no_tokenizer(WORDS, "bert")
    backend = Backend.from_str(WORDS.backend.to_str())
    backend.add_tokens([AddedToken("\n", normalized=False), "dog"])
    words = WORDS.changed(backend)
    assert "a line break, which vocab.txt cannot hold" in why_no_tokenizer(words, "bert")
    config = replace(BERT, vocab_size=words.size)
    write_paddle(state_of(config), tmp_path / "out", config, tokenizer=words)
    assert not (tmp_path / "out/vocab.txt").exists()
    assert load_tokenizer(tmp_path / "out").fingerprint == words.fingerprint


def test_the_files_of_robertas_tokenizer_are_written(tmp_path: Path) -> None:
    """PaddleNLP 2.8.1's RobertaBPETokenizer reads them, with the ids of transformers."""
    source = bpe_folder(tmp_path / "bpe", {"tokenizer_class": "RobertaTokenizer"})
    words = load_tokenizer(source)
    config = replace(ROBERTA, vocab_size=words.size)
    write_paddle(state_of(config), tmp_path / "out", config, tokenizer=words)
    about = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "RobertaBPETokenizer"
    assert (tmp_path / "out/merges.txt").read_bytes() == (source / "merges.txt").read_bytes()
    (tmp_path / "out/tokenizer.json").unlink()  # which PaddleNLP does not read
    contents = paddle.open_contents(tmp_path / "out")
    assert contents.tokenizer == tmp_path / "out"
    assert load_tokenizer(tmp_path / "out").fingerprint == words.fingerprint
    theirs = AutoTokenizer.from_pretrained(source)
    found = load_tokenizer(tmp_path / "out").encode_texts(TEXTS[:2])
    for text, (ids, _) in zip(TEXTS[:2], found, strict=True):
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        (float("nan"), ExportOptions(), "values that are not finite"),
        (float("inf"), ExportOptions(dtype="bfloat16"), "values that are not finite"),
        (7e4, ExportOptions(dtype="float16"), r"too large for torch\.float16"),
    ],
)
def test_a_failed_export_leaves_nothing(
    tmp_path: Path, change: float, target: ExportOptions, message: str
) -> None:
    good = state_of(CONFIG)
    write_paddle(good, tmp_path / "out", CONFIG)
    state = {name: tensor.clone() for name, tensor in good.items()}
    state["backbone.layers.1.qkv.weight"][9, 3] = change
    for name in ("out", "new"):
        with pytest.raises(UserError, match=rf"layers\.1\.self_attn\.k_proj\.weight: .*{message}"):
            write_paddle(state, tmp_path / name, CONFIG, target=target)
    read_back(tmp_path / "out", good, CONFIG.layer_norm_eps)
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "case", ["paddlenlp_ernie", "paddlenlp_ernie_mlm", "paddlenlp_bert", "paddlenlp_roberta"]
)
def test_the_files_that_paddlenlp_writes(shared: Path, tmp_path: Path, case: str) -> None:
    """Read one of PaddleNLP's, write it again: the same names, shapes and numbers in the file, and
    a config that says the same."""
    folder = shared / "oracle" / case
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    contents = paddle.open_contents(folder)
    state = {name: entry.read() for name, entry in contents.entries.items()}
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    write_paddle(
        state,
        tmp_path / "out",
        contents.config,
        heads=contents.heads,
        target=ExportOptions(family=kind),
    )
    theirs, ours = (read_pickle(x / WEIGHTS) for x in (folder, tmp_path / "out"))
    assert theirs.tensors.keys() == ours.tensors.keys() == ours.parameter_names.keys()
    for name, stored in theirs.tensors.items():
        assert torch.equal(stored.read(), ours.tensors[name].read()), name
    wanted, written = (
        json.loads((x / "config.json").read_text()) for x in (folder, tmp_path / "out")
    )
    same = wanted.keys() & written.keys() - {"task_type_vocab_size"}
    assert {key: wanted[key] for key in same} == {key: written[key] for key in same}
    assert {"hidden_size", "architectures", "layer_norm_eps", "pad_token_id"} <= same
