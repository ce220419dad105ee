"""What every family must have: each class is read, computed and written as it came, with the
outputs and gradients of transformers, in packed rows too, in peft and in ONNX Runtime."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.lora import LoraSettings, adapter_of, add_lora, merged
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.optimizer.param_groups import param_lr_scales
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.convert.to_onnx import convert_to_onnx
from palm_ds.weights.formats.huggingface.architecture import CLASSIFIER
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds, load_encoder
from palm_ds.weights.peft_adapter import write_adapter
from palm_ds.weights.weights_folder import ExportedHead, export_hf
from tests.helpers.hf_families import HF_FAMILIES, HfFamily
from tests.model.encoder.test_transformer import padded, texts, weighted

EVERY = pytest.mark.parametrize("family", list(HF_FAMILIES.values()), ids=lambda x: x.name)


OWN_HEADS = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Those that each family computes its own way."""
OTHER_HEADS = ("Model", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def given(batch: Batch, family: HfFamily) -> dict[str, torch.Tensor]:
    """What transformers' model gets."""
    types = {"token_type_ids": batch.token_type_ids} if family.segments else {}
    return {
        "input_ids": batch.input_ids,
        "attention_mask": (batch.sequence_ids >= 0).long(),
        **types,
    }


def batch_of(family: HfFamily, pad: int) -> Batch:
    batch = padded()
    batch.input_ids.clamp_(min=pad + 1)  # no text has padding
    batch.input_ids[batch.sequence_ids < 0] = pad
    if family.segments:
        batch.token_type_ids.copy_(batch.input_ids % 2)
    return batch


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("Albert", {"classifier_dropout_prob": 0.3}),
        ("DistilBert", {"seq_classif_dropout": 0.3, "qa_dropout": 0.2}),
        ("Electra", {"summary_last_dropout": 0.3}),
        ("DebertaV2", {"pooler_dropout": 0.3}),
        ("MPNet", {"is_matryoshka": True, "matryoshka_dimensions": [12, 24]}),  # vLLM's
    ],
)
def test_what_other_programs_alone_read_is_kept(
    tmp_path: Path, name: str, setting: dict[str, Any]
) -> None:
    source = HF_FAMILIES[name].save(tmp_path / "in", **setting)
    convert(source, tmp_path / "out", "huggingface", ConversionOptions(verify=False))
    assert setting.items() <= json.loads((tmp_path / "out/config.json").read_text()).items()


@pytest.mark.parametrize(
    ("family", "ending"),
    [
        pytest.param(x, ending, id=f"{x.name}{ending}", marks=[] if few else pytest.mark.exhaustive)
        for number, x in enumerate(HF_FAMILIES.values())
        for ending in x.endings
        for few in [ending in (*OWN_HEADS, OTHER_HEADS[number % len(OTHER_HEADS)])]
    ],
)
def test_every_class_is_computed_and_written_as_it_was_read(
    tmp_path: Path, family: HfFamily, ending: str
) -> None:
    source, target = family.save(tmp_path / "in", ending), tmp_path / "out"
    contents = open_contents(source)
    report = compare(
        in_transformers(contents), in_palm_ds(contents), inputs_for(contents, contents, None)
    )
    assert report.passed and report.worst.largest < 1e-5
    compared = {each.name for each in report.differences}
    assert {"embeddings", "layer 1", "layer 3", *(f"head {x}" for x in contents.heads)} <= compared
    convert(source, target, "huggingface", ConversionOptions(strict=True))
    written, read = state_of(target), state_of(source)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[x], read[x]) for x in read)
    opened: Any = getattr(transformers, f"{family.name}{ending}")
    _, loading = opened.from_pretrained(target, output_loading_info=True)
    assert not any(loading.values())


def test_sizes_of_distilbert_may_have_the_names_of_bert(tmp_path: Path) -> None:
    """transformers reads both, BERT's first (`attribute_map`)."""
    family = HF_FAMILIES["DistilBert"]
    folder = family.save(tmp_path / "in")
    right = open_contents(folder).config
    about = json.loads((folder / "config.json").read_text())
    names = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
    }
    theirs = {names.get(key, key): value for key, value in about.items()}
    for values in (theirs, {**theirs, **dict.fromkeys(names, 2)}):
        (folder / "config.json").write_text(json.dumps(values))
        opened = transformers.AutoConfig.from_pretrained(folder)
        assert (opened.dim, opened.n_layers) == (right.hidden_size, right.num_layers)
        contents = open_contents(folder)
        assert contents.config == right
        inputs = inputs_for(contents, contents, None)
        assert compare(in_transformers(contents), in_palm_ds(contents), inputs).passed


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(
            pytest.param(x, shape, id=f"{x.name}-{number}")
            for x in HF_FAMILIES.values()
            for number, shape in enumerate(x.shapes)
        ),
        *(
            pytest.param(x, shape, id=f"{x.name}-wide-{number}", marks=pytest.mark.exhaustive)
            for x in HF_FAMILIES.values()
            for number, shape in enumerate(x.wide)
        ),
    ],
)
def test_published_shapes_have_transformers_outputs_and_gradients(
    tmp_path: Path, family: HfFamily, shape: dict[str, Any]
) -> None:
    """Texts of 300 tokens, padding in the batch, in each form of attention."""
    model = family.build(**shape)
    model.save_pretrained(tmp_path)
    contents = open_contents(tmp_path)
    batch = batch_of(family, contents.config.pad)
    real = batch.sequence_ids >= 0
    expected = model(**given(batch, family)).last_hidden_state[real]
    weighted(expected).backward()
    its = model.get_submodule(family.stem)
    words = model.get_input_embeddings().weight.grad
    for form in family.forms:
        encoder = load_encoder(contents, Kernels(attention=form))
        found = encoder(batch)[real]
        close = partial(torch.testing.assert_close, msg=lambda x, form=form: f"{form}: {x}")
        close(found, expected, atol=1e-5, rtol=1e-5)
        weighted(found).backward()
        layer: Any = encoder.layers[0]
        first: Any = encoder.word.weight.grad
        for mine, other in [
            (layer.qkv.weight.grad.chunk(3)[0], its.get_parameter(f"{family.query}.weight").grad),
            (layer.contract.weight.grad, its.get_parameter(f"{family.contract}.weight").grad),
            (first[contents.config.pad + 1 :], words[contents.config.pad + 1 :]),
        ]:
            close(mine, other, atol=1e-5 * float(other.abs().max()), rtol=0)


@EVERY
def test_a_text_is_the_same_in_a_packed_row(tmp_path: Path, family: HfFamily) -> None:
    contents, several = open_contents(family.save(tmp_path)), texts((30, 1, 9))
    for form in family.forms:
        encoder, start = load_encoder(contents, Kernels(attention=form)), 0
        packed = encoder(Batch.from_rows([several], length=48, pad=contents.config.pad))[0]
        for text in several:
            size = len(text.input_ids)
            alone = encoder(Batch.from_rows([[text]], length=size, pad=contents.config.pad))[0]
            torch.testing.assert_close(packed[start : start + size], alone, atol=1e-5, rtol=1e-5)
            start += size


@EVERY
def test_a_task_embedding_is_folded_and_changes_no_probability(
    tmp_path: Path, family: HfFamily
) -> None:
    config = replace(open_contents(family.save(tmp_path / "in")).config, task_types=3)
    encoder = build_encoder(config).eval()
    head: Any = MaskedLMHead(encoder).eval()
    with torch.no_grad():
        encoder.get_parameter("task.weight").normal_()
    state = {f"backbone.{name}": x for name, x in encoder.state_dict().items()}
    state |= {f"heads.words.{name}": x for name, x in head.state_dict().items()}
    export_hf(state, tmp_path / "hf", config=config, task_id=2)
    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    batch = batch_of(family, config.pad)
    batch.task_ids.fill_(2)
    real = batch.sequence_ids >= 0
    mine = head.logits(encoder(batch)[real]).log_softmax(-1)
    its = model(**given(batch, family)).logits[real].log_softmax(-1)
    torch.testing.assert_close(its, mine, atol=1e-5, rtol=1e-5)
    batch.task_ids.fill_(0)
    assert not torch.allclose(its, head.logits(encoder(batch)[real]).log_softmax(-1), atol=1e-3)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
@EVERY
def test_lora_is_an_adapter_of_peft(tmp_path: Path, family: HfFamily) -> None:
    import peft

    ending = "ForSequenceClassification"
    contents = open_contents(family.save(tmp_path / "base", ending))
    settings, head = LoraSettings(rank=4, targets="all"), ClassHead(48, 3, pooled=True)
    model = Model(load_encoder(contents), {CLASSIFIER: head}, {"task": CLASSIFIER})
    add_lora(model, settings, seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.3)
    state = model.state_dict()
    plain = dict(merged(state, settings))
    assert {x for x in contents.entries if x.startswith("heads.")} == {
        x for x in plain if x.startswith("heads.")
    }
    export_hf(
        plain,
        tmp_path / "hf",
        config=contents.config,
        head=ExportedHead(name=CLASSIFIER, outputs=HeadOutputs(head_class=ending)),
    )
    write_adapter(
        tmp_path / "adapter", adapter_of(state), settings, tmp_path / "hf", base=str(tmp_path)
    )
    read: Any = transformers.AutoModelForSequenceClassification.from_pretrained
    batch = given(batch_of(family, contents.config.pad), family)
    its = read(tmp_path / "hf").eval()(**batch).logits
    opened = peft.PeftModel.from_pretrained(read(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(opened.eval()(**batch).logits, its, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(read(tmp_path / "base").eval()(**batch).logits, its, atol=1e-3)


def test_an_adapter_beside_shards_has_the_head(tmp_path: Path) -> None:
    """hf/ of a run has shards from 5 GB on."""
    ending = "ForSequenceClassification"
    whole = HF_FAMILIES["Electra"].save(tmp_path / "whole", ending)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(whole)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert not (tmp_path / "shards/model.safetensors").exists()
    for name in ("whole", "shards"):
        folder = tmp_path / f"{name} adapter"
        write_adapter(folder, {}, LoraSettings(), tmp_path / name, base="base")
    saved = [
        load_file(tmp_path / f"{x} adapter/adapter_model.safetensors") for x in ("whole", "shards")
    ]
    assert saved[0].keys() == saved[1].keys() and any("out_proj" in name for name in saved[0])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@EVERY
def test_layers_learn_more_slowly_below(tmp_path: Path, family: HfFamily) -> None:
    encoder = load_encoder(open_contents(family.save(tmp_path)))
    names = [f"backbone.{name}" for name, _ in encoder.named_parameters()]
    scales = param_lr_scales(names, 0.5, {}, above=encoder.above_layers)
    assert scales["backbone.word.weight"] == 0.5 ** (family.own_layers + 1)
    assert scales[f"backbone.layers.{family.own_layers - 1}.qkv.weight"] == 0.5


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, marks=[] if x.own_graph else pytest.mark.exhaustive)
        for x in HF_FAMILIES.values()
    ],
    ids=lambda x: x.name,
)
def test_onnx_runtime_computes_the_same(tmp_path: Path, family: HfFamily) -> None:
    """All outputs are compared, and a graph that differs is refused. Each layer takes seconds to
    export, so there is one."""
    source = family.save(tmp_path / "in", "ForSequenceClassification", **{family.layers: 1})
    parity = convert_to_onnx(source, tmp_path / "out").files[0].parity
    assert parity is not None
    assert {"head classifier", "pooled"} <= {x.name for x in parity.differences}


@pytest.mark.parametrize(
    ("family", "ending", "values"),
    [
        ("MPNet", "Model", {"relative_attention_num_buckets": 64}),  # it computes with 32
        ("MPNet", "Model", {"pad_token_id": 0}),  # it counts positions by id 1
        ("Electra", "ForMultipleChoice", {"summary_type": "last"}),
        ("Electra", "ForMultipleChoice", {"summary_activation": "tanh"}),
        ("Electra", "ForMultipleChoice", {"summary_use_proj": False}),
    ],
)
def test_what_is_not_computed_here_is_refused(
    tmp_path: Path, family: str, ending: str, values: dict[str, Any]
) -> None:
    known = {x.name: x for x in HF_FAMILIES.values()}
    folder = known[family].save(tmp_path / "in", ending, **values)
    with pytest.raises(UserError, match=f"config.json: {next(iter(values))}: must be "):
        open_contents(folder)
    if family == "Electra":  # no other class reads these values
        open_contents(known[family].save(tmp_path / "other", "ForSequenceClassification", **values))


@pytest.mark.parametrize(
    ("preset", "words", "millions"),
    [
        ("electra-small", 30_522, 13.5),
        ("electra-base", 30_522, 108.9),
        ("distilbert-base", 30_522, 66.4),
        ("mpnet-base", 30_527, 108.9),
        ("albert-base-v2", 30_000, 12 - 0.9),
        ("deberta-v3-xsmall", 128_100, 21 + 49),
        ("deberta-v3-small", 128_100, 42.5 + 98.4),
        ("deberta-v3-base", 128_100, 85 + 98.4),
        ("deberta-v3-large", 128_100, 302 + 131),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(
    preset: str, words: int, millions: float
) -> None:
    config = EncoderConfig.from_dict({"preset": preset, "vocab_size": words})
    with torch.device("meta"):
        encoder = build_encoder(config)
    pooler = sum(x.numel() for x in encoder.pooler.parameters())
    count = sum(x.numel() for x in encoder.parameters()) - pooler
    assert count / 1e6 == pytest.approx(millions, rel=1e-2)
