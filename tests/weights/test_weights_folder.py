"""Weights saved and loaded: portable folders, Hugging Face folders both ways, errors in one
line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    ErnieConfig,
    ErnieForPreTraining,
    RobertaConfig,
    RobertaForMaskedLM,
)

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, GenerationHead, MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import load_tokenizer, wordpiece
from palm_ds.weights.formats.weights_info import INFO, read_info
from palm_ds.weights.model_folder import encoder_config, open_model
from palm_ds.weights.weights_folder import (
    LoadReport,
    WeightsInfo,
    export_hf,
    load_weights,
    save_weights,
)
from tests.helpers.small_configs import SMALL, bert_of, roberta_of

CONFIG = replace(SMALL, vocab_size=37, task_types=5)
BERT = bert_of(CONFIG)
ROBERTA = roberta_of(CONFIG)
SHAPES = {"ernie": CONFIG, "bert": BERT, "roberta": ROBERTA}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def model(config: EncoderConfig = CONFIG, seed: int = 1, *, words: bool = True) -> Model:
    torch.manual_seed(seed)
    backbone = build_encoder(config)
    heads: dict[str, torch.nn.Module] = {"distance": ClassHead(16, 3, pooled=True)}
    if words:
        heads["masking"] = MaskedLMHead(backbone)
    net = Model(backbone, heads, {name: name for name in heads}).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def info(config: EncoderConfig = CONFIG) -> WeightsInfo:
    return WeightsInfo(
        backbone=config,
        task_ids={"masking": 0, "distance": 1},
        head_of={"masking": "masking", "distance": "distance"},
        made_by={"program": "a test", "step": 7},
    )


def same(one: Model, other: Model) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


# ---- the portable folder ----


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    broken, fresh = model(), model(seed=2)
    name = "backbone.layers.0.attention_norm.weight"
    name = name if name in broken.state_dict() else min(broken.state_dict())
    with torch.no_grad():
        broken.state_dict()[name].view(-1)[3] = value
    save_weights(broken, tmp_path / "weights", info())
    with pytest.raises(UserError, match=rf"1 of [\d,]+ values of {name} are not finite \(NaN"):
        load_weights(open_model(tmp_path / "weights"), fresh)
    assert same(fresh, model(seed=2))


def test_export_task_is_stored(tmp_path: Path) -> None:
    save_weights(model(), tmp_path / "weights", replace(info(), export_task="distance"))
    found = read_info(tmp_path / "weights" / INFO)
    assert (found.export_task, found.task_id) == ("distance", 1)
    assert json.loads((tmp_path / "weights/weights.json").read_text())["export_task"] == "distance"
    assert (info().export_task, info().task_id) == ("", 0)


def test_a_portable_folder_comes_back_bit_for_bit(tmp_path: Path) -> None:
    net, other = model(), model(seed=2)
    save_weights(net, tmp_path / "weights", info())
    assert sorted(os.listdir(tmp_path / "weights")) == ["weights.json", "weights.safetensors"]
    assert len({file.stat().st_mode for file in (tmp_path / "weights").iterdir()}) == 1
    loaded = load_weights(open_model(tmp_path / "weights"), other)
    assert same(net, other) and not loaded.newly_initialized and not loaded.unused
    found = read_info(tmp_path / "weights" / INFO)
    assert replace(found, files={}) == info() and set(found.files) == {"weights.safetensors"}
    assert encoder_config(tmp_path / "weights") == CONFIG


def test_a_state_of_half_precision_is_saved_in_fp32(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in model().state_dict().items()}
    state["heads.masking.tied_words"] = state["backbone.word.weight"]
    save_weights(state, tmp_path / "weights", info())
    kept = load_file(tmp_path / "weights" / "weights.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert kept.keys() == model().state_dict().keys()


def test_heads_of_other_tasks_are_newly_initialized_or_reported(tmp_path: Path) -> None:
    save_weights(model(), tmp_path / "weights", info())
    torch.manual_seed(9)
    backbone = build_encoder(CONFIG)
    other = Model(backbone, {"case": ClassHead(16, 2)}, {"case": "case"})
    before = other.heads["case"].out.weight.clone()  # type: ignore[union-attr]
    loaded = load_weights(open_model(tmp_path / "weights"), other)
    assert loaded.newly_initialized == ("heads.case.out.weight", "heads.case.out.bias")
    assert set(loaded.unused) == {n for n in model().state_dict() if n.startswith("heads.")}
    assert torch.equal(before, other.heads["case"].out.weight)  # type: ignore[union-attr]
    assert any("newly initialized: heads.case" in line for line in loaded.lines())
    assert any(
        "skipped in" in line and "heads.distance (2 parameters)" in line for line in loaded.lines()
    )


def test_a_head_for_other_classes_is_not_taken_in_silence(tmp_path: Path) -> None:
    known = {"distance": HeadOutputs(labels=("near", "far", "other"))}
    save_weights(model(), tmp_path / "weights", replace(info(), heads=known))

    def load(classes: int, *labels: str, **more: Any) -> LoadReport:
        backbone = build_encoder(CONFIG)
        heads = {"distance": ClassHead(16, classes, pooled=True)}
        net = Model(backbone, heads, {"distance": "distance"})
        return load_weights(
            open_model(tmp_path / "weights"), net, labels={"distance": labels}, **more
        )

    assert not load(3, "near", "far", "other").notes
    (note,) = load(3, "a", "b", "c").notes
    assert "was trained for 3 classes (near, far, other), now for 3 classes (a, b, c)" in note
    for labels in (("near", "far"), ("far", "near", "other")):
        with pytest.raises(
            UserError, match="'distance' has 3 classes .near, far, other., the task"
        ):
            load(len(labels), *labels)
        with pytest.raises(UserError, match="new_head: true.* another name, .*`extend`"):
            load(len(labels), *labels)
        loaded = load(len(labels), *labels, new_heads=["distance"])
        assert loaded.newly_initialized == ("heads.distance.out.weight", "heads.distance.out.bias")


def test_an_older_folder_is_replaced_completely(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    save_weights(model(), folder, info())
    (folder / "stray").write_text("old")
    (tmp_path / ".weights.part").mkdir()  # of a run that was killed
    (tmp_path / ".weights.part" / "weights.json").write_text("half")
    save_weights(model(seed=3), folder, info())
    assert sorted(os.listdir(tmp_path)) == ["weights"]
    assert sorted(os.listdir(folder)) == ["weights.json", "weights.safetensors"]
    other = model()
    load_weights(open_model(folder), other)
    assert same(other, model(seed=3))


# ---- to Hugging Face ----


def packed_hidden(net: Model, ids: torch.Tensor, segment: int, task: int) -> torch.Tensor:
    from palm_ds.data.tasks.example import Example, collate

    row = ids[0].numpy()
    text = Example(
        input_ids=row, token_type_ids=row * 0 + segment, source_offsets=row, annotations={}
    )
    batch = collate(
        [[(text, 0), (text, task)]], length=len(row) * 2 + 1, pad=net.backbone.config.pad
    )
    return net.backbone(batch)[0, len(row) : 2 * len(row)]


@pytest.mark.parametrize("kind", list(SHAPES))
@torch.no_grad()
def test_an_exported_folder_gives_the_same_outputs(kind: str, tmp_path: Path) -> None:
    config = SHAPES[kind]
    net = model(config)
    export_hf(net, tmp_path / "hf", config=config)
    encoder, report = AutoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert encoder.config.model_type == kind
    assert not report["missing_keys"] and not report["mismatched_keys"]
    segment, task = config.token_types - 1, max(config.task_types - 1, 0)
    inputs = {"input_ids": IDS, "token_type_ids": torch.full_like(IDS, segment)}
    if config.task_types:
        inputs["task_type_ids"] = torch.full_like(IDS, task)
    theirs = encoder.eval()(**inputs)
    hidden = packed_hidden(net, IDS, segment, task)
    torch.testing.assert_close(hidden, theirs.last_hidden_state[0], atol=1e-5, rtol=0)
    pooled = net.backbone.pooler(hidden[:1])
    torch.testing.assert_close(pooled, theirs.pooler_output, atol=1e-5, rtol=0)
    words, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    logits = net.heads["masking"].logits(hidden)  # type: ignore[operator]
    torch.testing.assert_close(logits, words.eval()(**inputs).logits[0], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@torch.no_grad()
def test_an_encoder_gets_a_task_embedding_and_token_types(kind: str, tmp_path: Path) -> None:
    """It starts as it was, for every task; a new token type is like the last one."""
    config = SHAPES[kind]
    export_hf(model(config), tmp_path / "hf", config=config)
    last = config.token_types - 1
    inputs = {"input_ids": IDS, "token_type_ids": torch.full_like(IDS, last)}
    theirs = AutoModel.from_pretrained(tmp_path / "hf").eval()(**inputs).last_hidden_state[0]
    net = model(replace(config, task_types=4, token_types=last + 3), seed=2)
    report = load_weights(open_model(tmp_path / "hf"), net)
    assert {"backbone.task.weight", "backbone.segment.weight"} <= set(report.loaded)
    tasks, types = report.notes
    assert "4 rows of zeros are added" in tasks and f"2 like the last of {last + 1}" in types
    for segment, task in ((last, 1), (last + 2, 3)):
        hidden = packed_hidden(net, IDS, segment, task)
        torch.testing.assert_close(hidden, theirs, atol=1e-5, rtol=0)


def test_rows_of_tables_are_never_dropped(tmp_path: Path) -> None:
    save_weights(model(), tmp_path / "weights", info())
    for rows in (0, 6):
        with pytest.raises(UserError, match=f"task_types 5, but this model has {rows}"):
            load_weights(open_model(tmp_path / "weights"), model(replace(CONFIG, task_types=rows)))
    with pytest.raises(UserError, match="token_types 4, but this model has 2"):
        load_weights(open_model(tmp_path / "weights"), model(replace(CONFIG, token_types=2)))


def test_the_chosen_task_is_hugging_faces_default(tmp_path: Path) -> None:
    net = model()
    export_hf(net, tmp_path / "hf", config=CONFIG, task_id=3)
    theirs = AutoModel.from_pretrained(tmp_path / "hf").eval()(input_ids=IDS)
    hidden = packed_hidden(net, IDS, 0, 3)
    torch.testing.assert_close(hidden, theirs.last_hidden_state[0], atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="task_id: no row 5"):
        export_hf(net, tmp_path / "hf", config=CONFIG, task_id=5)


def test_without_a_masked_lm_head_only_the_encoder_is_exported(tmp_path: Path) -> None:
    export_hf(model(words=False), tmp_path / "hf", config=CONFIG)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [
        "ErnieModel"
    ]
    _, report = AutoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_the_export_of_a_run_opens_with_its_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(32))]
    tokenizer, net = wordpiece(words, lower=False), model()
    made_by = {"recipe": "abc"}
    about = WeightsInfo(
        backbone=CONFIG, task_ids={"masking": 0}, head_of=net.head_of, made_by=made_by
    )
    save_weights(net.state_dict(), tmp_path / "weights", about, tokenizer=tokenizer)
    export_hf(net.state_dict(), tmp_path / "hf", config=CONFIG, tokenizer=tokenizer)
    info = read_info(tmp_path / "weights" / INFO)
    assert info.task_ids == {"masking": 0} and info.made_by == made_by
    assert info.head_of == net.head_of
    assert load_tokenizer(tmp_path / "weights" / "tokenizer").fingerprint == tokenizer.fingerprint
    names = {"config.json", "model.safetensors", "tokenizer.json", "modules.json"}
    assert names <= set(os.listdir(tmp_path / "hf"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = theirs("w3 w7 w1", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[2, 8, 12, 6, 3]]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path / "hf").eval()(input_ids=ids).last_hidden_state
        expected = packed_hidden(net, ids, 0, 0)
    torch.testing.assert_close(hidden[0], expected, atol=1e-5, rtol=0)


def test_a_shape_that_hugging_face_lacks_is_refused(tmp_path: Path) -> None:
    odd = replace(CONFIG, position_offset=2, pad=1)
    with pytest.raises(UserError, match="task embeddings and a position offset"):
        export_hf(model(odd), tmp_path / "hf", config=odd)
    odd = replace(ROBERTA, position_offset=3)
    with pytest.raises(UserError, match="pad \\+ 1 = 2"):
        export_hf(model(odd), tmp_path / "hf", config=odd)


# ---- from Hugging Face ----


@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_round_trip_is_bit_for_bit(kind: str, tmp_path: Path) -> None:
    net, other = model(SHAPES[kind]), model(SHAPES[kind], seed=2)
    export_hf(net, tmp_path / "hf", config=SHAPES[kind])
    loaded = load_weights(open_model(tmp_path / "hf"), other)
    assert loaded.newly_initialized == ("heads.distance.out.weight", "heads.distance.out.bias")
    assert loaded.unused == ()
    mine, theirs = net.state_dict(), other.state_dict()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine if "distance" not in n)
    assert encoder_config(tmp_path / "hf") == SHAPES[kind]


HF_SIZES = dict(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=20,
)


@torch.no_grad()
@pytest.mark.parametrize("binary", [False, True])
def test_folders_that_transformers_wrote(binary: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    roberta = {**HF_SIZES, "max_position_embeddings": 22, "type_vocab_size": 1}
    ernie = dict(type_vocab_size=4, task_type_vocab_size=5, use_task_id=True, layer_norm_eps=1e-5)
    written = {
        "bert": BertForPreTraining(BertConfig(**HF_SIZES, hidden_act="relu", layer_norm_eps=1e-5)),
        "ernie": ErnieForPreTraining(ErnieConfig(**HF_SIZES, **ernie)),
        "roberta": RobertaForMaskedLM(RobertaConfig(**roberta, layer_norm_eps=1e-5)),
    }
    for kind, hf in written.items():
        folder = tmp_path / kind
        hf.eval().save_pretrained(folder, max_shard_size="6kB")  # in several shards
        if binary:
            for path in folder.glob("model*"):
                path.unlink()
            torch.save(hf.state_dict(), folder / "pytorch_model.bin")
        net = model(SHAPES[kind])
        loaded = load_weights(open_model(folder), net)
        nsp = ("heads.next_sentence.out.weight", "heads.next_sentence.out.bias")
        assert loaded.unused == (() if kind == "roberta" else nsp)
        pooler = tuple(n for n in loaded.newly_initialized if "pooler" in n)
        assert len(pooler) == (2 if kind == "roberta" else 0)
        hidden = packed_hidden(net, IDS, 0, 0)
        scores = net.heads["masking"].logits(hidden)  # type: ignore[operator]
        output = hf(input_ids=IDS)
        theirs = output.logits if kind == "roberta" else output.prediction_logits
        torch.testing.assert_close(scores, theirs[0], atol=1e-5, rtol=0)


def test_every_masked_word_head_gets_the_imported_one(tmp_path: Path) -> None:
    export_hf(model(), tmp_path / "hf", config=CONFIG)
    torch.manual_seed(3)
    backbone = build_encoder(CONFIG)
    heads = {"one": MaskedLMHead(backbone), "two": MaskedLMHead(backbone)}
    net = Model(backbone, heads, {"a": "one", "b": "two"})
    assert load_weights(open_model(tmp_path / "hf"), net).newly_initialized == ()
    assert torch.equal(net.heads["one"].dense.weight, net.heads["two"].dense.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("own", [True, False], ids=["weights", "hf"])
def test_the_only_masked_word_head_goes_to_tasks_of_any_name(own: bool, tmp_path: Path) -> None:
    """Starting from a run with another task name must not initialize the head again."""
    source = model()
    if own:
        save_weights(source, tmp_path / "from", WeightsInfo(backbone=CONFIG))
    else:
        export_hf(source, tmp_path / "from", config=CONFIG)
    torch.manual_seed(3)
    backbone = build_encoder(CONFIG)
    heads = {name: MaskedLMHead(backbone) for name in ("mlm", "masking", "masked_words")}
    heads["titles"] = GenerationHead(backbone, smoothing=0.1)
    loaded = load_weights(
        open_model(tmp_path / "from"), Model(backbone, heads, {x: x for x in heads})
    )
    assert loaded.newly_initialized == ()
    assert not any("masking" in name for name in loaded.unused)
    wanted = source.heads["masking"].state_dict()
    for name, head in heads.items():
        for part, values in wanted.items():
            assert torch.equal(head.state_dict()[part], values), (name, part)


def test_two_masked_lm_heads_are_matched_by_name(tmp_path: Path) -> None:
    backbone = build_encoder(CONFIG)
    two = {name: MaskedLMHead(backbone) for name in ("one", "two")}
    save_weights(
        Model(backbone, two, {x: x for x in two}), tmp_path / "w", WeightsInfo(backbone=CONFIG)
    )
    other = build_encoder(CONFIG)
    heads = {name: MaskedLMHead(other) for name in ("two", "three")}
    loaded = load_weights(open_model(tmp_path / "w"), Model(other, heads, {x: x for x in heads}))
    assert {name.split(".")[1] for name in loaded.newly_initialized} == {"three"}
    assert {name.split(".")[1] for name in loaded.unused} == {"one"}


def test_untied_output_embeddings_are_not_loaded_into_a_tied_head(tmp_path: Path) -> None:
    untied = replace(CONFIG, tie_word_embeddings=False)
    save_weights(model(untied), tmp_path / "weights", info(untied))
    net, other = model(untied, seed=2), model(seed=2)
    assert load_weights(open_model(tmp_path / "weights"), net).unused == ()
    with pytest.raises(UserError, match="tie_word_embeddings false, but this model has true"):
        load_weights(open_model(tmp_path / "weights"), other)
    assert same(other, model(seed=2))


# ---- mistakes ----


def odd_head(folder: Path) -> None:
    state = load_file(folder / "weights.safetensors")
    state["heads.distance.out.weight"] = torch.zeros(4, 16)
    save_file(state, folder / "weights.safetensors")


def odd_number(folder: Path) -> None:
    about = json.loads((folder / INFO).read_text())
    (folder / INFO).write_text(json.dumps({**about, "backbone": {"num_layer": 3}}))


def as_it_is(_folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "numbers", "words"),
    [
        (odd_number, {}, ["weights.json", "num_layer", "num_layers"]),
        (odd_head, {}, ["heads.distance.out.weight", "(4, 16)", "(3, 16)"]),
        (as_it_is, {"vocab_size": 38}, ["backbone.vocab_size", "37", "38"]),
        (as_it_is, {"activation": "relu"}, ["backbone.activation", "gelu", "relu"]),
        (as_it_is, {"intermediate_size": 25}, ["backbone.intermediate_size", "24", "25"]),
        (as_it_is, {"num_layers": 3}, ["backbone.num_layers", "2", "3"]),
    ],
)
def test_incompatible_weights_are_one_clear_line(
    spoil: Callable[[Path], None], numbers: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    save_weights(model(), tmp_path / "weights", info())
    spoil(tmp_path / "weights")
    net = model(replace(CONFIG, **numbers), seed=2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(open_model(tmp_path / "weights"), net)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
