"""Conversion: every tensor is named, outputs are equal, and failures leave nothing."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.outputs import PROBLEM_TYPES, HeadOutputs
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.next_sentence_prediction import NextSentencePrediction
from palm_ds.text.tokenizer import SPECIALS, load_tokenizer, wordpiece
from palm_ds.weights.convert import convert
from palm_ds.weights.convert import mapping_report as account
from palm_ds.weights.convert.convert import ConversionOptions
from palm_ds.weights.convert.resize import ResizeOptions, resize_checkpoint
from palm_ds.weights.formats.contents import BUFFER, NEXT_SENTENCE_CLASSES, OPTIMIZER
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.paddle import write as paddle_writer
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import WeightsInfo, load_weights, save_weights
from tests.helpers.ernie_tiny import write_release
from tests.helpers.noisy_model import noisy_model
from tests.helpers.reseal import reseal
from tests.helpers.small_configs import SMALL, letters
from tests.text.test_tokenizer_settings import ROLES, folder_of, ids
from tests.weights.formats import hf_models
from tests.weights.formats.hf_models import make
from tests.weights.formats.hf_models import save as save_hf

CONFIG = SMALL
WORDS = letters("t")
ORACLE = {
    "hf_ernie": "",
    "hf_bert": "",
    "hf_roberta": "",
    "tf_bert": "",
    "fluid_ernie1": "persistables",
    "fluid_ernie2": "params",
    "fluid_fp16": "params",
    "dygraph185_py37": "",
    "dygraph185_py27": "",
    "develop262": "saved_weights.pdparams",
    "paddlenlp_ernie": "",
    "paddlenlp_ernie_mlm": "",
    "paddlenlp_bert": "",
    "paddlenlp_roberta": "",
    "palm202": "ckpt.step1",
    "deepspeed_z1_bf16_wrap_frozen": "",
    "deepspeed_z3_fp32": "",
}
OTHER_EPS = (
    "fluid_ernie2",
    "palm202",
    "hf_ernie",
    "deepspeed_z1_bf16_wrap_frozen",
    "deepspeed_z3_fp32",
)
"""Ernie models with an eps that PaddleNLP's Ernie does not compute with."""
ACCEPTED: dict[str, dict[str, Any]] = {"paddle": {"eps": 1e-12}}
"""Further options by target, for CONFIG's eps of 1e-5."""


def model(config: EncoderConfig = CONFIG) -> Model:
    return noisy_model(config, "masking", {"order": (6, True), "tags": (4, False)})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    info = WeightsInfo(
        backbone=CONFIG,
        task_ids={"masking": 0, "order": 2},
        head_of={name: name for name in ("masking", "order", "tags")},
        export_task="order",
        token_heads=("tags",),
    )
    save_weights(model(), tmp_path / "source", info, tokenizer=WORDS)
    return tmp_path / "source"


def left_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def sentencepiece_model(file: Path, *, size: int) -> list[str]:
    """Trains a unigram model; returns the texts that it was trained on."""
    import sentencepiece as spm

    texts = ["a list of names", "open the file", "return the list of open files", "read a name"]
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 5),
        model_writer=made,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    file.write_bytes(made.getvalue())
    return texts


# ---- what works ----


@pytest.mark.parametrize("to", convert.TO)
@pytest.mark.parametrize("case", ORACLE)
def test_every_checkpoint_converts_with_equal_outputs(
    case: str, to: str, shared: Path, tmp_path: Path
) -> None:
    folder = shared / "oracle" / case
    opening: dict[str, Any] = {"config": folder / "cfg"} if (folder / "cfg").is_dir() else {}
    if to == "paddle" and case in OTHER_EPS:
        opening["eps"] = 1e-12
    done = convert.convert(folder / ORACLE[case], tmp_path / "out", to, **opening)
    assert done.parity and done.parity.passed and done.parity.worst.largest <= 1e-5
    contents = convert.opened(folder / ORACLE[case], **opening)
    there = {name for entry in contents.entries.values() for name in entry.source_names}
    named = {name for each in done.report.mapped for name in each.source_names}
    assert there <= named | set(done.report.skipped), "nothing is dropped without being named"
    assert left_of(tmp_path) == ["out"]


CLASSES = (
    "XLMRobertaForSequenceClassification",
    "CamembertForMaskedLM",
    "ErnieForMultipleChoice",
    "RobertaForMaskedLM",
    "BertForScoresOfMyOwn",
)


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("to", ["palm_ds", "huggingface"])
def test_less_usual_classes_are_run_on_both_sides(
    architecture: str, to: str, tmp_path: Path
) -> None:
    kind = next(x for x, y in hf_models.FAMILY.items() if architecture.startswith(f"{y}For"))
    own = "OfMyOwn" in architecture
    ending = "ForMaskedLM" if own else architecture.removeprefix(hf_models.FAMILY[kind])
    hf = hf_models.make(kind, ending, hidden_act="relu")  # Roberta's head has gelu all the same
    hf.save_pretrained(tmp_path / "hf")
    if own:
        hf.config.architectures = [architecture]
        hf.config.save_pretrained(tmp_path / "hf")
    done = convert.convert(tmp_path / "hf", tmp_path / "out", to)
    assert done.parity and done.parity.worst.largest <= 1e-6 and not done.report.lost
    assert (f"transformers' {architecture}" in str(done.parity)) is not own
    assert any(each.name.startswith("head ") for each in done.parity.differences)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_untied_head_is_kept_in_every_direction(kind: str, tmp_path: Path) -> None:
    """Its own output embeddings, with the decoder's own bias, which transformers adds."""
    hf = hf_models.make(kind, "ForMaskedLM", tie_word_embeddings=False)
    with torch.no_grad():
        hf.get_output_embeddings().bias.normal_()
    hf.save_pretrained(tmp_path / "hf")
    ours = convert.convert(tmp_path / "hf", tmp_path / "ours")
    opened = convert.opened(tmp_path / "ours")
    assert not opened.config.tie_word_embeddings and "heads.masked_words.decoder" in opened.entries
    back = convert.convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    for done in (ours, back):
        assert done.parity and done.parity.worst.largest <= 1e-6
        assert "head masked_words" in [each.name for each in done.parity.differences]
    theirs = type(hf).from_pretrained(tmp_path / "back")
    assert theirs.config.tie_word_embeddings is False
    own, again = hf.state_dict(), theirs.state_dict()
    decoder = next(name for name in own if name.endswith("decoder.weight"))
    assert all(torch.equal(again[name], own[name]) for name in (decoder, decoder[:-6] + "bias"))
    assert not torch.equal(own[decoder], hf.get_input_embeddings().weight)


WRAPPED = {
    "torch.compile": "_orig_mod.{}",
    "Lightning": "model.{}",
    "Lightning, compiled": "model._orig_mod.{}",
    "DistributedDataParallel": "module.{}",
}


@pytest.mark.parametrize(
    ("to", "by"),
    [
        pytest.param(to, by, marks=[] if few else pytest.mark.exhaustive)
        for number, by in enumerate(WRAPPED)
        for at, to in enumerate(convert.TO)
        for few in [at == number % len(convert.TO)]
    ],
)
def test_names_of_a_wrapped_model_are_read(by: str, to: str, tmp_path: Path) -> None:
    source = save_hf(make("bert", "ForPreTraining"), tmp_path / "hf")
    state = load_file(source / "model.safetensors")
    plain = convert.convert(source, tmp_path / "plain", "palm_ds")
    wrapped = {WRAPPED[by].format(name): x for name, x in state.items()}
    save_file(wrapped, source / "model.safetensors", {"format": "pt"})
    done = convert.convert(source, tmp_path / "out", to, ConversionOptions(strict=True))
    assert done.parity and done.parity.passed and "transformers' Bert" in str(done.parity)
    read = convert.open_checkpoint(source)
    assert plain.report.mapped and set(read.entries) == {x.name for x in plain.report.mapped}
    assert convert.verify_only(tmp_path / "plain", tmp_path / "out").passed


@pytest.mark.parametrize("kind", ["xlm-roberta", "camembert"])
def test_a_tokenizer_that_paddlenlp_lacks_is_skipped(kind: str, tmp_path: Path) -> None:
    source = save_hf(make(kind, "ForMaskedLM", vocab_size=60), tmp_path / "hf")
    words = sentencepiece_model(tmp_path / "hf/sentencepiece.bpe.model", size=40)
    done = convert.convert(source, tmp_path / "paddle", "paddle")
    assert "this one is unigram" in done.report.lost["tokenizer"]
    with pytest.raises(UserError, match="strict: .*tokenizer would be skipped: PaddleNLP reads"):
        convert.convert(source, tmp_path / "strict", "paddle", ConversionOptions(strict=True))
    again = convert.convert(tmp_path / "paddle", tmp_path / "again", "huggingface")
    assert again.parity and again.parity.passed
    one, other = (AutoTokenizer.from_pretrained(x) for x in (source, tmp_path / "again"))
    for text in words:
        assert one(text)["input_ids"] == other(text)["input_ids"]


def test_paddlenlps_multiple_choice_states_a_number(tmp_path: Path) -> None:
    source = save_hf(make("bert", "ForMultipleChoice"), tmp_path / "hf")
    done = convert.convert(source, tmp_path / "paddle", "paddle")
    assert json.loads((tmp_path / "paddle/config.json").read_text())["num_choices"] == 2
    assert "from_pretrained(..., num_choices=N)" in done.report.created["num_choices"]


def test_paddlenlp_has_no_place_for_an_untied_head(tmp_path: Path) -> None:
    hf = hf_models.make("bert", "ForMaskedLM", tie_word_embeddings=False)
    hf.save_pretrained(tmp_path / "hf")
    done = convert.convert(tmp_path / "hf", tmp_path / "paddle", "paddle")
    assert done.parity and done.parity.worst.largest <= 1e-6
    own = {name for name, why in done.report.lost.items() if "this one has its own" in why}
    assert "cls.predictions.decoder.weight" in own and len(own) == 6
    with pytest.raises(UserError, match="strict: .* would be skipped"):
        convert.convert(
            tmp_path / "hf", tmp_path / "x", "paddle", options=ConversionOptions(strict=True)
        )


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_untied_head_is_left_out_on_request(kind: str, tmp_path: Path) -> None:
    hf = hf_models.make(kind, "ForMaskedLM", tie_word_embeddings=False)
    hf.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="untied_head: no 'skp'; did you mean \"skip\""):
        convert.convert(tmp_path / "hf", tmp_path / "out", untied_head="skp")
    done = convert.convert(tmp_path / "hf", tmp_path / "out", untied_head="skip")
    assert done.parity and done.parity.worst.largest <= 1e-6
    assert "transformers' " in str(done.parity)
    assert convert.opened(tmp_path / "out").heads == {}
    lost = {name for name, why in done.report.lost.items() if "untied output embeddings" in why}
    assert any("decoder.weight" in name for name in lost) and len(lost) == 7
    with pytest.raises(UserError, match="strict: .* would be skipped: of a masked-LM head"):
        strict = ConversionOptions(strict=True)
        convert.convert(tmp_path / "hf", tmp_path / "more", options=strict, untied_head="skip")


def test_to_hugging_face_and_back(source: Path, tmp_path: Path) -> None:
    options = ConversionOptions(family="ernie")
    out = convert.convert(source, tmp_path / "hf", "huggingface", options)
    assert out.parity and {each.kind for each in out.parity.differences} == {"random", "real"}
    assert set(out.report.lost) == {
        f"heads.{head}.out.{end}" for head in ("order", "tags") for end in ("weight", "bias")
    }
    back = convert.convert(tmp_path / "hf", tmp_path / "back", "palm_ds")
    assert back.parity and back.parity.passed and not back.report.lost
    before, after = (load_file(x / "weights.safetensors") for x in (source, tmp_path / "back"))
    for name, tensor in after.items():
        if name == "backbone.task.weight":  # the exported task comes first
            tensor = tensor[[2, 1, 0]]
        assert torch.equal(tensor, before[name.replace("masked_words", "masking")]), name
    text = (tmp_path / "hf/README.md").read_text()
    assert "largest difference" in text and str(tmp_path) not in text
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("a b")["input_ids"] == [1, 5, 6, 2]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_task_is_folded_in(family: str, source: Path, tmp_path: Path) -> None:
    options = ConversionOptions(family=family, task="masking")
    out = convert.convert(source, tmp_path / "hf", "huggingface", options)
    assert out.parity and out.parity.passed
    other = convert.verify_only(source, tmp_path / "hf")  # the usual task is another
    assert not other.passed


@pytest.mark.parametrize("case", ["fluid_ernie2", "palm202"])
@pytest.mark.parametrize("to", ["huggingface", "paddle"])
def test_rows_of_the_task_embedding_are_not_lost_silently(
    case: str, to: str, shared: Path, tmp_path: Path
) -> None:
    path, eps = shared / "oracle" / case / ORACLE[case], 1e-12 if to == "paddle" else None
    done = convert.convert(path, tmp_path / "bert", to, ConversionOptions(family="bert"), eps=eps)
    rows = "its rows other than 0, of 16: a Bert has no task embedding; --family ernie keeps all"
    assert done.report.lost["task_embedding"] == rows
    strict = ConversionOptions(family="bert", strict=True)
    with pytest.raises(UserError, match="strict: .*would be skipped"):
        convert.convert(path, tmp_path / "strict", to, strict, eps=eps)
    whole = ConversionOptions(family="ernie")
    done = convert.convert(path, tmp_path / "ernie", to, whole, eps=eps)
    assert "task_embedding" not in done.report.skipped
    own, written = open_checkpoint(path, eps=eps), open_checkpoint(tmp_path / "ernie")
    name = "backbone.task.weight"
    assert torch.equal(own.entries[name].read(), written.entries[name].read())


def test_by_default_an_ernie_becomes_a_bert_and_says_so(shared: Path, tmp_path: Path) -> None:
    path = shared / "oracle/fluid_ernie2/params"
    done = convert.convert(path, tmp_path / "hf", "huggingface")
    assert "task_embedding" in done.report.lost
    assert "its rows other than 0, of 16" in (tmp_path / "hf/README.md").read_text()


def test_a_classification_head_is_exported_alone(source: Path, tmp_path: Path) -> None:
    out = convert.convert(source, tmp_path / "hf", "huggingface", ConversionOptions(head="tags"))
    names = {each.name for each in out.parity.differences} if out.parity else set()
    assert "head tags" in names and "head masking" not in names
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "hf").num_labels == 4


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
@pytest.mark.parametrize("to", convert.TO)
def test_half_precision(dtype: str, to: str, source: Path, tmp_path: Path) -> None:
    options = ConversionOptions(dtype=dtype)
    out = convert.convert(source, tmp_path / "out", to, options, **ACCEPTED.get(to, {}))
    assert out.parity and out.parity.passed and out.parity.tolerance > 1e-5
    found = open_checkpoint(tmp_path / "out").entries["backbone.norm.weight"].read().dtype
    assert found == (torch.bfloat16 if dtype == "bf16" else torch.float16)


def test_shards_have_the_requested_size(source: Path, tmp_path: Path) -> None:
    out = convert.convert(
        source, tmp_path / "hf", "huggingface", ConversionOptions(shard_size="4KB")
    )
    assert out.parity and out.parity.passed
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3


def test_a_model_starts_from_any_format(source: Path, tmp_path: Path) -> None:
    for to in convert.TO:
        family = "ernie" if to == "huggingface" else ""
        options = ConversionOptions(family=family, task="masking")
        convert.convert(source, tmp_path / to, to, options, **ACCEPTED.get(to, {}))
    wanted = model().state_dict()
    for to in convert.TO:
        net = model()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        if to == "paddle":  # PaddleNLP's Ernie computes with an eps of its own
            with pytest.raises(UserError, match=r"backbone\.layer_norm_eps"):
                load_weights(open_model(tmp_path / to), net)
            continue
        loaded = load_weights(open_model(tmp_path / to), net)
        assert "backbone.word.weight" in loaded.loaded
        for name in loaded.loaded:
            assert torch.equal(net.state_dict()[name], wanted[name]), (to, name)


def test_verify_only(source: Path, tmp_path: Path) -> None:
    convert.convert(source, tmp_path / "hf", "huggingface")
    found = convert.verify_only(source, tmp_path / "hf")
    assert found.passed
    assert {each.name for each in found.differences} >= {"layer 2", "pooled", "head masking"}
    state = load_file(tmp_path / "hf/model.safetensors")
    state["cls.predictions.bias"] += 0.01
    save_file(state, tmp_path / "hf/model.safetensors", {"format": "pt"})
    found = convert.verify_only(source, tmp_path / "hf")
    assert not found.passed and found.worst.name == "head masking"


def test_a_given_eps_is_used(source: Path, tmp_path: Path) -> None:
    convert.convert(source, tmp_path / "hf", "huggingface")
    done = convert.convert(tmp_path / "hf", tmp_path / "out", "huggingface", eps=1e-3)
    assert done.parity and "palm_ds's encoder" in done.parity.sides[0]
    assert json.loads((tmp_path / "out/config.json").read_text())["layer_norm_eps"] == 1e-3


def test_paddlenlp_computes_with_its_own_eps(source: Path, tmp_path: Path) -> None:
    """Its output must be compared with that eps, never with the model's."""
    with pytest.raises(UserError, match="--eps 1e-12"):
        convert.convert(source, tmp_path / "paddle", "paddle")
    done = convert.convert(source, tmp_path / "paddle", "paddle", eps=1e-12)
    assert done.parity and done.parity.passed
    assert "LayerNorm eps 1e-12, as requested; the checkpoint itself has 1e-05" in done.notes
    (change,) = (note for note in done.notes if "own LayerNorm eps, 1e-05" in note)
    assert 1e-7 < float(change.split("up to ")[1].split()[0]) < 1e-2
    found = convert.verify_only(source, tmp_path / "paddle")
    assert not found.passed, "the source itself still has its eps"
    options = ConversionOptions(family="bert", task="masking")
    done = convert.convert(source, tmp_path / "bert", "paddle", options)
    assert done.parity and done.parity.passed
    assert open_checkpoint(tmp_path / "bert").config.layer_norm_eps == CONFIG.layer_norm_eps


def test_verification_uses_paddlenlps_eps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle_writer, "_check_eps", lambda plan: None)
    with pytest.raises(UserError, match="the converted model's outputs differ, so it was deleted"):
        convert.convert(source, tmp_path / "paddle", "paddle")
    assert left_of(tmp_path) == ["source"]


# ---- what the scores mean ----


@pytest.mark.parametrize("to", convert.TO)
@pytest.mark.parametrize("problem", PROBLEM_TYPES)
def test_the_problem_type_is_kept(problem: str, to: str, tmp_path: Path) -> None:
    """It decides whether `pipeline` returns logits, probabilities or numbers."""
    classes = 1 if problem == "regression" else 3
    theirs = make("bert", "ForSequenceClassification", num_labels=classes, problem_type=problem)
    source = save_hf(theirs, tmp_path / "hf")
    convert.convert(source, tmp_path / "out", to)
    convert.convert(tmp_path / "out", tmp_path / "back", "huggingface")
    config = AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.problem_type, config.num_labels) == (problem, classes)
    assert config.architectures == ["BertForSequenceClassification"]


def test_multiple_choice_is_kept(tmp_path: Path) -> None:
    source = save_hf(make("bert", "ForMultipleChoice"), tmp_path / "hf")
    convert.convert(source, tmp_path / "ours")
    for name in ("hf", "ours"):
        convert.convert(tmp_path / name, tmp_path / f"of {name}", "huggingface")
        config = AutoConfig.from_pretrained(tmp_path / f"of {name}")
        assert config.architectures == ["BertForMultipleChoice"]


def test_a_next_sentence_head_is_exported_in_berts_order(tmp_path: Path) -> None:
    """1 means the next sentence in palm_ds's task, 0 does in BERT's head."""
    info = WeightsInfo(
        backbone=CONFIG,
        task_ids={"next_sentence": 0},
        head_of={"next_sentence": "next_sentence"},
        heads={"next_sentence": HeadOutputs(labels=NEXT_SENTENCE_CLASSES)},
    )
    net = noisy_model(CONFIG, "masking", {"next_sentence": (2, True)})
    save_weights(net, tmp_path / "source", info)
    assert NextSentencePrediction.labels == NEXT_SENTENCE_CLASSES
    ours = net.state_dict()["heads.next_sentence.out.weight"]
    for to in ("huggingface", "paddle"):
        options = ConversionOptions(family="bert")
        done = convert.convert(tmp_path / "source", tmp_path / to, to, options)
        assert done.parity and done.parity.passed
        entry = open_checkpoint(tmp_path / to).entries["heads.next_sentence.out.weight"]
        assert torch.equal(entry.read(), ours.flip(0))
        back = convert.convert(tmp_path / to, tmp_path / f"{to} again", "huggingface")
        assert back.parity and back.parity.passed
    options = ConversionOptions(head="next_sentence", head_class="ForSequenceClassification")
    convert.convert(tmp_path / "source", tmp_path / "one", "huggingface", options)
    config = AutoConfig.from_pretrained(tmp_path / "one")
    assert config.id2label == {0: "the next", 1: "another text"}


# ---- the tokenizer ----


@pytest.mark.parametrize("family", ["bert", "ernie"])
@pytest.mark.parametrize("config", [{}, {"strip_accents": False, "tokenize_chinese_chars": False}])
def test_the_same_ids_after_each_conversion(
    config: dict[str, Any], family: str, tmp_path: Path
) -> None:
    source = save_hf(make(family, "Model", vocab_size=80, layer_norm_eps=1e-12), tmp_path / "hf")
    about = json.loads((source / "config.json").read_text())
    given = {**config, **ROLES, "padding_side": "left", "model_max_length": 9}
    folder_of(source, given, **about)
    wanted, opened = ids(source), AutoTokenizer.from_pretrained(source)
    steps = [("hf", "again", "huggingface"), ("hf", "ours", "palm_ds"), ("hf", "paddle", "paddle")]
    steps += [("ours", "of ours", "huggingface"), ("paddle", "of paddle", "huggingface")]
    for before, after, to in steps:
        convert.convert(tmp_path / before, tmp_path / after, to)
        if to != "huggingface":
            continue
        assert ids(tmp_path / after) == wanted
        found = AutoTokenizer.from_pretrained(tmp_path / after)
        assert (found.model_max_length, found.padding_side) == (9, "left")
        assert found.pad_token_id == opened.pad_token_id != 0
    named = json.loads((tmp_path / "paddle/tokenizer_config.json").read_text())
    assert named["tokenizer_class"] == (
        "ErnieTokenizer" if not config and family == "ernie" else "BertTokenizer"
    )


def test_a_text_is_cut_where_the_positions_end(tmp_path: Path) -> None:
    source = save_hf(make("bert", "Model", vocab_size=80), tmp_path / "hf")
    about = json.loads((source / "config.json").read_text())
    folder_of(source, {"model_max_length": 10**30}, **about)
    convert.convert(source, tmp_path / "out", "huggingface")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 20
    resize_checkpoint(tmp_path / "out", tmp_path / "longer", ResizeOptions(positions=30))
    assert AutoTokenizer.from_pretrained(tmp_path / "longer").model_max_length == 30


def test_resizing_a_mixture_of_dtypes_rounds_nothing(tmp_path: Path) -> None:
    source = save_hf(make("bert", "Model"), tmp_path / "hf")
    state = load_file(source / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    state[name] = state[name].half()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    resize_checkpoint(source, tmp_path / "out", ResizeOptions(positions=30))
    written = load_file(tmp_path / "out/model.safetensors")
    same = [x for x in state if "position" not in x]
    assert all(torch.equal(written[x], state[x].float()) for x in same)


def test_words_that_other_programs_do_not_split_are_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_release(tmp_path / "tiny"))
    config = replace(CONFIG, vocab_size=tokenizer.size)
    info = WeightsInfo(backbone=config)
    save_weights(
        Model(build_encoder(config), {}, {}), tmp_path / "source", info, tokenizer=tokenizer
    )
    for to in ("huggingface", "palm_ds"):
        done = convert.convert(tmp_path / "source", tmp_path / to, to)
        said = any("do not split texts into words first" in note for note in done.notes)
        assert said == (to == "huggingface")


def test_inputs_other_than_here_are_named_and_exports_of_our_weights_have_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save_hf(make("bert", "Model"), tmp_path / "hf")
    tokenizer = wordpiece([*SPECIALS, "a"], lower=True)
    tokenizer.backend.post_processor = processors.ByteLevel()
    tokenizer.save(source)
    made = {"out": source, "weights": source, "again": tmp_path / "weights"}
    for name, start in made.items():
        to = "palm_ds" if name == "weights" else "huggingface"
        done = convert.convert(start, tmp_path / name, to)
        said = [note for note in done.notes if 'makes "A" of a text' in note]
        assert bool(said) == (start == source)
    for name, wanted in (("out", [5]), ("again", [2, 5, 3])):
        assert AutoTokenizer.from_pretrained(tmp_path / name)("a")["input_ids"] == wanted
    with caplog.at_level("WARNING", "palm_ds"):
        _ = TrainedModel.open(source).text_tokenizer
    assert 'makes "A" of a text' in caplog.text


# ---- messages ----


def test_the_report_on_a_terminal_in_a_pipe_and_in_json(source: Path, tmp_path: Path) -> None:
    done = convert.convert(source, tmp_path / "hf", "huggingface")
    rows = done.report.rows()
    assert any("layers.*" in row[1] and "2 layers" in row[3] for row in rows)
    assert any(row[0] == "skipped" and "heads.order.out.weight" in row[1] for row in rows)
    terminal = Console(force_terminal=True, width=200)
    with terminal.capture() as shown:
        account.show(rows, terminal)
    assert "source" in shown.get()
    narrow = Console(force_terminal=True, width=70)
    with narrow.capture() as shown:
        account.show(rows, narrow)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.get())
    one_line = " ".join(text.split())
    assert "mapped backbone.norm.weight -> bert.embeddings.LayerNorm.weight mapped" in one_line
    assert "(2 layers)" in one_line
    assert re.search(r"skipped \S.*heads\.order\.out\.weight.* \(no place in ", one_line)
    assert "\u2026" not in shown.get()  # names go on in the next line
    with narrow.capture() as shown:
        account.show([("mapped", "backbone.norm.bias", "backbone.norm.bias", "")], narrow)
    assert shown.get().split() == ["mapped", "backbone.norm.bias"]
    pipe = io.StringIO()
    account.show(rows, Console(file=pipe))
    assert pipe.getvalue().startswith("mapped\tbackbone.word.weight\tbert.embeddings.word_emb")
    record = json.loads(json.dumps(done.record()))
    assert record["parity"]["passed"] and len(record["mapped"]) > len(rows) / 2
    assert set(record["skipped"]) == set(done.report.skipped)


def test_lossless_skips_do_not_count_as_lost() -> None:
    skipped = {"m": OPTIMIZER, "ids": BUFFER, "twin": "a copy of w", "head": "no place"}
    assert account.ConversionReport(mapped=(), skipped=skipped).lost == {"head": "no place"}


# ---- mistakes, and what must not be left of them ----


def strange(path: Path) -> Path:
    (path / "notes.txt").write_text("nothing")
    return path


def nan(path: Path) -> None:
    state = load_file(path / "weights.safetensors")
    state["backbone.layers.1.expand.bias"][3] = np.nan
    save_file(state, path / "weights.safetensors")
    reseal(path)


def gelu_new(path: Path) -> None:
    about = json.loads((path / "weights.json").read_text())
    about["backbone"]["activation"] = "gelu_new"
    (path / "weights.json").write_text(json.dumps(about))
    reseal(path)


def too_large(path: Path) -> None:
    state = load_file(path / "weights.safetensors")
    state["backbone.word.weight"][3] = 1e6
    save_file(state, path / "weights.safetensors")
    reseal(path)


def other_tokenizer(path: Path) -> None:
    many = [*WORDS.tokens(range(WORDS.size)), *(f"w{i}" for i in range(20))]
    wordpiece(many, lower=True).save(path / "tokenizer")
    reseal(path)


def no_vocabulary(path: Path) -> None:
    for file in (path / "tokenizer").iterdir():
        file.unlink()
    reseal(path)


Breaks = Callable[[Path], object]
MISTAKES: dict[str, tuple[Breaks, str, dict[str, Any], str]] = {
    "NaN": (nan, "huggingface", {}, "source: .*intermediate.dense.bias: .*NaN"),
    "NaN to ours": (nan, "palm_ds", {}, "expand.*NaN"),
    "NaN to paddle": (nan, "paddle", {"family": "bert"}, "linear1.bias: .*NaN"),
    "gelu_new": (gelu_new, "paddle", {"family": "bert"}, "activation: PaddleNLP has no gelu_new"),
    "eps": (strange, "paddle", {}, "eps: PaddleNLP's Ernie .* --eps 1e-12"),
    "too large for half": (too_large, "huggingface", {"dtype": "fp16"}, "too large"),
    "another tokenizer": (other_tokenizer, "palm_ds", {}, "it belongs to another model"),
    "no vocabulary": (no_vocabulary, "huggingface", {}, "contains no tokenizer.json"),
    "no such format": (strange, "onnx", {}, 'to: no format "onnx"; known: huggingface'),
    "no such family": (strange, "huggingface", {"family": "gpt"}, 'family: no "gpt"'),
    "no such head": (strange, "huggingface", {"head": "tag"}, 'did you mean "tags"'),
    "no such task": (strange, "huggingface", {"task": "ordr"}, 'did you mean "order"'),
    "no such row": (
        strange,
        "huggingface",
        {"task": "9"},
        "no row 9; the task embedding has rows 0 to 2",
    ),
    "no such type": (strange, "huggingface", {"dtype": "int8"}, "dtype"),
    "no such type of ours": (strange, "palm_ds", {"dtype": "int8"}, "dtype"),
    "no size": (strange, "huggingface", {"shard_size": "big"}, "such as 2GB"),
    "strict": (strange, "huggingface", {"strict": True}, "strict: heads.order.*and 4 more"),
    "for another target": (strange, "palm_ds", {"family": "bert"}, "does not apply"),
    "no texts": (strange, "palm_ds", {"texts": ()}, "texts: empty"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(name: str, source: Path, tmp_path: Path) -> None:
    breaks, to, options, message = MISTAKES[name]
    breaks(source)
    with pytest.raises(UserError, match=message) as raised:
        convert.convert(source, tmp_path / "out", to, ConversionOptions(**options))
    assert "\n" not in str(raised.value)
    assert left_of(tmp_path) == ["source"]


def test_the_target_is_a_new_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already exists"):
        convert.convert(source, source)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="already exists"):
        convert.convert(source, tmp_path / "file")
    with pytest.raises(UserError, match="file is not a folder"):
        convert.convert(source, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    assert convert.convert(source, tmp_path / "empty").parity


@pytest.mark.parametrize("to", convert.TO)
def test_a_conversion_with_different_outputs_is_removed(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buggy writer: its files look right."""
    right = convert.open_checkpoint

    def wrong(path: Path, **options: Any) -> Any:
        found = right(path, **options)
        if path == source:
            return found
        return replace(found, config=replace(found.config, activation="relu"))

    monkeypatch.setattr(convert, "open_checkpoint", wrong)
    format_of = convert.format_of
    monkeypatch.setattr(convert, "format_of", lambda path: replace(format_of(path), run=None))
    with pytest.raises(
        UserError, match="the converted model's outputs differ, so it was deleted: largest"
    ):
        convert.convert(source, tmp_path / "out", to, **ACCEPTED.get(to, {}))
    assert left_of(tmp_path) == ["source"]


def test_an_unverified_conversion_is_labeled(source: Path, tmp_path: Path) -> None:
    done = convert.convert(source, tmp_path / "hf", "huggingface", ConversionOptions(verify=False))
    assert done.parity is None
    assert "were not compared" in (tmp_path / "hf/README.md").read_text()


# ---- the door ----


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="looked for: DeepSpeed: .*palm_ds: .*Paddle: .*Hugging Face"
    ):
        open_checkpoint(strange(tmp_path))
    with pytest.raises(UserError, match="gone: no such file or folder"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(UserError, match="no such file or folder"):
        open_checkpoint(tmp_path / "gone" / "further")
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match='mien: no such file or folder; did you mean ".*mine"'):
        open_checkpoint(tmp_path / "mien")


def test_options_are_those_of_the_format(source: Path) -> None:
    assert open_checkpoint(source, prefix=None).config == CONFIG
    assert open_checkpoint(source, eps=1e-3).config == replace(CONFIG, layer_norm_eps=1e-3)
    with pytest.raises(UserError, match="no option 'prefix'"):
        open_checkpoint(source, prefix="ernie.")
