"""ALBERT beyond what all families have: weights that several layers share, the head for the order
of sentences, and folders with BERT's vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder, encoder_class
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.runnable import load_encoder
from palm_ds.weights.formats.weights_info import WeightsInfo
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import export_hf, load_weights, save_weights
from tests.helpers.hf_families import ALBERT
from tests.model.encoder.test_transformer import texts, weighted

SMALL = EncoderConfig.from_dict(
    {
        "kind": "albert",
        "vocab_size": 64,
        "hidden_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 72,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "options": {"embedding_size": 20},
    }
)


def grouped(groups: int, of_group: int = 1, **more: Any) -> EncoderConfig:
    options = {**SMALL.options, "groups": groups, "layers_per_group": of_group}
    return replace(SMALL, options=options, **more)


def batch_of(*lengths: int) -> Batch:
    batch = Batch.from_rows([texts(lengths)], length=sum(lengths), pad=0)
    batch.dropout_key = 5
    return batch


def test_shared_weights_get_the_sum_of_their_layers_gradients() -> None:
    """Those of four layers with equal weights of their own, whose dropout masks are others in each
    layer; recomputed or not."""
    torch.manual_seed(2)
    one = build_encoder(SMALL, Kernels(dropout="counter")).train()
    each = build_encoder(grouped(4), Kernels(dropout="counter")).train()
    again = build_encoder(SMALL, Kernels(dropout="counter"), recompute=True).train()
    state = one.state_dict()
    again.load_state_dict(state)
    copies = {
        name.replace("layers.0.", f"layers.{number}."): x
        for name, x in state.items()
        for number in range(4 if name.startswith("layers.") else 1)
    }
    each.load_state_dict(copies)
    outputs = [encoder(batch_of(30, 9)) for encoder in (one, each, again)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    for output in outputs:
        weighted(output).backward()
    for name, parameter in one.layers[0].named_parameters():
        parts = [layer.get_parameter(name).grad for layer in each.layers]
        torch.testing.assert_close(parameter.grad, sum(parts), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(again.layers[0].get_parameter(name).grad, parameter.grad)


def test_states_of_layers_that_one_module_computes_are_told_apart() -> None:
    encoder = build_encoder(grouped(2)).eval()
    batch = batch_of(30)
    wanted = WantedStates(embeddings=True, hidden=(1, 2, 3, 4), qkv=(1, 2, 4))
    wanted.check(encoder, "here")
    with recorded(encoder, wanted) as states:
        for _ in range(2):  # the second pass replaces the first
            last = encoder(batch)
    assert states.embeddings is not None
    inputs = [states.embeddings, *(states.hidden[number] for number in (1, 2, 3))]
    assert torch.equal(states.hidden[4], last)
    assert len({float(x.detach().sum()) for x in inputs}) == 4
    layers: list[Any] = encoder.computed_layers
    assert [layers.index(x) for x in layers] == [0, 0, 2, 2]
    for number, found in states.qkv.items():
        torch.testing.assert_close(found, layers[number - 1].qkv(inputs[number - 1]))
    with pytest.raises(UserError, match="there is no layer 5; it has 4"):
        WantedStates(hidden=(5,)).check(encoder, "here")


def test_weights_count_once_and_operations_at_each_depth() -> None:
    deep, shallow = SMALL, replace(SMALL, num_layers=2)
    counts = [sum(x.numel() for x in build_encoder(x).parameters()) for x in (deep, shallow)]
    assert counts[0] == counts[1]
    kind = encoder_class(deep)
    least = [kind.least_parameters(x, 64) for x in (deep, shallow)]
    assert least[0] == least[1] < counts[0]
    widening = 6 * 20 * 48
    flops = [kind.flops(x).token - widening for x in (deep, shallow)]
    assert flops[0] == 2 * flops[1]


@pytest.mark.parametrize("pooled", ["sentence_order", "another"])
def test_the_head_for_the_order_of_sentences_is_alberts(tmp_path: Path, pooled: str) -> None:
    """Ours counts 1 for texts in order, ALBERT's 0. Another head has no place in the class."""
    config = replace(SMALL, dropout=0.0, attention_dropout=0.0)
    encoder = build_encoder(config)
    heads = {"words": MaskedLMHead(encoder), pooled: ClassHead(48, 2, pooled=True)}
    model = Model(encoder, heads, {name: name for name in heads}).eval()
    export_hf(model, tmp_path, config=config)
    about = json.loads((tmp_path / "config.json").read_text())
    if pooled == "another":
        assert about["architectures"] == ["AlbertForMaskedLM"]
        return
    assert about["architectures"] == ["AlbertForPreTraining"]
    its: Any = transformers.AlbertForPreTraining.from_pretrained(tmp_path).eval()
    batch = batch_of(30)
    out = its(batch.input_ids, token_type_ids=batch.token_type_ids)
    mine = heads[pooled].out(encoder.pooler(encoder(batch)[:, 0]))
    torch.testing.assert_close(out.sop_logits, mine.flip(-1), atol=1e-5, rtol=1e-5)
    contents = open_contents(tmp_path)
    assert contents.heads["sentence_order"].outputs.labels == ("swapped", "in order")
    read = contents.entries["heads.sentence_order.out.weight"].read()
    assert torch.equal(read, heads[pooled].out.weight)


def test_layers_are_chosen_among_those_with_weights(tmp_path: Path) -> None:
    many, few = grouped(4), grouped(1, num_layers=6)
    source = Model(
        build_encoder(many), {"words": MaskedLMHead(build_encoder(many))}, {"a": "words"}
    )
    save_weights(source, tmp_path / "w", WeightsInfo(backbone=many, head_of={"a": "words"}))
    target = Model(build_encoder(few), {"words": MaskedLMHead(build_encoder(few))}, {"a": "words"})
    report = load_weights(open_model(tmp_path / "w"), target, layers=[2])
    assert not report.newly_initialized and "weights: layers 2 of 4" in report.lines()
    assert torch.equal(
        target.backbone.get_parameter("layers.0.qkv.weight"),
        source.backbone.get_parameter("layers.2.qkv.weight"),
    )
    for layers, why in (
        ([4], "no layer 4; .* has layers 0 to 3"),
        ([0, 1], "2 layers, but 1 have"),
    ):
        with pytest.raises(UserError, match=why):
            load_weights(open_model(tmp_path / "w"), target, layers=layers)


def test_a_recipe_with_some_layers_keeps_the_depth(tmp_path: Path) -> None:
    folder = ALBERT.save(tmp_path, "ForMaskedLM", num_hidden_layers=4, num_hidden_groups=2)
    recipe = make_recipe(
        {
            "init_from": str(folder),
            "init_layers": [1],
            "backbone": {"options": {"groups": 1}},
            "length": 16,
            "batch": "1 rows",
            "sources": {"text": {"corpus": str(tmp_path)}},
            "tasks": {"knowledge_masking": {"source": "text"}},
            "stages": [{"knowledge_masking": "1 steps"}],
        },
        "here",
    )
    assert recipe.backbone_config.num_layers == 4
    assert recipe.backbone_config.options == {"embedding_size": 20, "groups": 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_groups": 4}, r"config.json: .*4 x 1 layers .* do not fit num_layers 3"),
        ({"num_hidden_groups": "2"}, "num_hidden_groups: expected a whole number"),
        ({"inner_group_num": 0}, "inner_group_num: expected a whole number"),
        ({"num_hidden_groups": 3}, "has no albert.encoder.albert_layer_groups.1"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = ALBERT.save(tmp_path)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | values))
    with pytest.raises(UserError, match=message):
        load_encoder(open_contents(folder))


def test_a_chinese_folder_has_berts_vocabulary(tmp_path: Path) -> None:
    """With vocab.txt and config.json alone, as published; transformers' BertTokenizer opens it."""
    folder = ALBERT.save(tmp_path, "ForMaskedLM", hidden_act="relu")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "我", "爱", "a", "##b", "，", "é"]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    mine = load_tokenizer(folder)
    its = transformers.BertTokenizer.from_pretrained(folder)
    for text in ("我爱AB，", "我 爱\tab 不", "É[MASK]"):
        expected = its(text.replace("[MASK]", "x"), add_special_tokens=False)["input_ids"]
        assert mine.encode_texts([text.replace("[MASK]", "x")])[0][0].tolist() == expected
    convert(folder, tmp_path / "hf", "huggingface", ConversionOptions(strict=True))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again("我爱AB，")["input_ids"] == its("我爱AB，")["input_ids"]
