"""Checkpoints of ERNIE, PALM and PaddleNLP: outputs equal the original program's, nothing is
lost, and errors are clear."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.formats.contents import COPY, OPTIMIZER, CheckpointContents, HeadInfo
from palm_ds.weights.formats.paddle import read as paddle
from tests.helpers.ernie_tiny import write_release
from tests.weights.formats.paddle_made import (
    CONFIG,
    ERNIE,
    Arrays,
    checkpoint,
    classes,
    masked_words,
    nlp,
    pickled,
    static,
    variable,
)

# ---- outputs recorded where the files were written ----

# case: (its path, the program whose outputs it has)
RECORDED = {
    "fluid 1, one file per variable": ("fluid_ernie1/persistables", "fluid_ernie1"),
    "fluid 1, combined": ("fluid_ernie1/combined", "fluid_ernie1"),
    "fluid 1, half with masters": ("fluid_fp16", "fluid_ernie1"),
    "fluid 2, one file per variable": ("fluid_ernie2", "fluid_ernie2"),
    "fluid 2, saved program": ("fluid_ernie2/program/model.pdparams", "fluid_ernie2"),
    "dygraph, Python 3": ("dygraph185_py37", "dygraph185_py37"),
    "dygraph, Python 2": ("dygraph185_py27", "dygraph185_py27"),
    "develop": ("develop262", "develop262"),
    "develop, cut arrays": ("develop262/bigparam.pdparams", "develop262"),
    "PALM": ("palm202/ckpt.step1", "palm202"),
    "PaddleNLP Ernie": ("paddlenlp_ernie", "paddlenlp_ernie"),
    "PaddleNLP Ernie, safetensors": ("paddlenlp_ernie/safetensors", "paddlenlp_ernie"),
    "PaddleNLP Ernie, masked words": ("paddlenlp_ernie_mlm", "paddlenlp_ernie_mlm"),
    "PaddleNLP Bert": ("paddlenlp_bert", "paddlenlp_bert"),
    "PaddleNLP Roberta": ("paddlenlp_roberta", "paddlenlp_roberta"),
}
CLASSES = {  # our head: what its recorded logits are called
    "next_sentence": ("next_sent_fc_logits", "nsp_fc_logits", "nsp_logits"),
    "sent_reorder": ("sent_reorder_fc_logits",),
}


@pytest.fixture(scope="module")
def oracle(shared: Path) -> Path:
    if not (folder := shared / "oracle").is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


@pytest.mark.parametrize("case", RECORDED)
def test_the_outputs_are_those_of_paddle(oracle: Path, case: str) -> None:
    where, recorded = RECORDED[case]
    assert paddle.recognizes(oracle / where)
    contents = paddle.open_contents(oracle / where)
    assert not contents.entries["backbone.word.weight"].read().isnan().any()
    compared = compare(contents, dict(np.load(oracle / recorded / "io.npz")))
    assert {"embedding", "layer 0", "layer 1", "masked_words"} <= compared.keys()
    assert max(compared.values()) < 1e-5, compared


def test_half_precision_alone(oracle: Path, tmp_path: Path) -> None:
    """Without master weights, half precision costs 5e-4 in outputs up to 4."""
    folder = tmp_path / "params"
    shutil.copytree(oracle / "fluid_fp16/params", folder, ignore=shutil.ignore_patterns("*.master"))
    config = oracle / "fluid_fp16/ernie_config.json"
    contents = paddle.open_contents(folder, config=config)
    assert contents.entries["backbone.layers.0.qkv.weight"].read().dtype is torch.float16
    compared = compare(contents, dict(np.load(oracle / "fluid_ernie1/io.npz")))
    assert 1e-5 < max(compared.values()) < 1e-3, compared


def test_other_checkpoints_are_not_recognized_as_paddle(oracle: Path) -> None:
    for case in ("hf_bert", "hf_ernie", "hf_roberta", "tf_bert", "deepspeed_z3_fp32"):
        assert not paddle.recognizes(oracle / case)


def compare(contents: CheckpointContents, recorded: Arrays) -> dict[str, float]:
    """{output: largest difference from the recorded one} at real tokens."""
    real = torch.from_numpy(recorded["in_input_mask"].astype(bool))
    found = outputs(contents, recorded, real)
    differences = {}
    for name, (keys, where) in wanted(contents, real).items():
        for key in [f"out_{key}" for key in keys if f"out_{key}" in recorded]:
            want = torch.from_numpy(recorded[key])
            mine = found[name]
            if name in contents.heads and contents.heads[name].kind == "masked_words":
                mine = mine if want.ndim == 3 else mine.flatten(0, 1)[recorded["in_mask_pos"]]
            if mine.ndim == 3:
                mine, want = mine[where], want[where]
            differences[name] = float((mine - want).abs().max())
    return differences


def wanted(
    contents: CheckpointContents, real: torch.Tensor
) -> dict[str, tuple[tuple[str, ...], Any]]:
    names: dict[str, tuple[tuple[str, ...], Any]] = {
        "embedding": (("embedding_output", "hidden_0"), real),
        "layer 0": (("layer_0_output", "hidden_1"), real),
        "layer 1": (("sequence_output", "hidden_2"), real),
        "pooled": (("pooled",), None),
        "masked_words": (("mlm_logits",), real),
    }
    return names | {name: (keys, None) for name, keys in CLASSES.items() if name in contents.heads}


def outputs(
    contents: CheckpointContents, given: Arrays, real: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The outputs of encoder and heads on the recorded inputs."""
    backbone, heads = modules(contents)
    found: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(backbone.layers):
        layer.register_forward_hook(keep(found, f"layer {i}"))
    backbone.norm.register_forward_hook(keep(found, "embedding"))
    with torch.no_grad():
        last = backbone(batch_of(given, real))
        found["pooled"] = backbone.pooler(last[:, 0])
        for name, head in heads.items():
            found[name] = head.logits(found["pooled"] if head.pooled else last)  # type: ignore
    return found


def keep(found: dict[str, torch.Tensor], name: str) -> Any:
    return lambda _module, _given, made: found.update({name: made})


def modules(contents: CheckpointContents) -> tuple[Encoder, torch.nn.ModuleDict]:
    """The encoder and the heads with all weights of a checkpoint."""
    backbone = build_encoder(contents.config).eval()
    heads = torch.nn.ModuleDict(
        {
            name: MaskedLMHead(backbone)
            if head.kind == "masked_words"
            else CRFHead(backbone.hidden_size, head.classes)
            if head.transitions
            else ClassHead(backbone.hidden_size, head.classes, pooled=head.pooled)
            for name, head in contents.heads.items()
        }
    )
    both = torch.nn.ModuleDict({"backbone": backbone, "heads": heads})
    state = {name: entry.read().float() for name, entry in contents.entries.items()}
    for name, entry in contents.entries.items():
        assert entry.shape == state[name].shape, name
    missing, unexpected = both.load_state_dict(state, strict=False)
    assert unexpected == []
    assert not [name for name in missing if "pooler" not in name]
    return backbone, heads


def batch_of(given: Arrays, real: torch.Tensor) -> Batch:
    ids = torch.from_numpy(given["in_src_ids"])
    rows, length = ids.shape
    blank = np.zeros((rows, length), np.int64)
    sizes = [n for row in real.sum(1).tolist() for n in (row, length - row) if n]
    positions = given.get("in_pos_ids", blank + np.arange(length))
    return Batch(
        input_ids=ids,
        position_ids=torch.from_numpy(positions) * real,
        token_type_ids=torch.from_numpy(given["in_sent_ids"]),
        task_ids=torch.from_numpy(given.get("in_task_ids", blank)),
        sequence_ids=torch.where(real, 0, -1),
        cu_seqlens=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
        labels={},
    )


# ---- checkpoints made here ----


def accounted(contents: CheckpointContents, names: Mapping[str, Any]) -> None:
    """Every tensor is the source of an entry, or skipped for a reason."""
    taken = [name for entry in contents.entries.values() for name in entry.source_names]
    assert sorted([*taken, *contents.skipped]) == sorted(names)


def test_an_encoder_and_its_origin(tmp_path: Path) -> None:
    arrays = static()
    contents = paddle.open_contents(checkpoint(tmp_path, arrays))
    assert contents.format == "ERNIE, one file per variable"
    assert contents.config == replace(CONFIG, intermediate_size=32)
    accounted(contents, arrays)
    modules(contents)
    qkv = contents.entries["backbone.layers.1.qkv.weight"]
    assert qkv.transform == "three in one, transposed"
    assert qkv.source_names == tuple(
        f"encoder_layer_1_multi_head_att_{x}_fc.w_0" for x in ("query", "key", "value")
    )
    assert np.array_equal(qkv.read()[8:16].numpy(), arrays[qkv.source_names[1]].T)
    assert contents.entries["backbone.word.weight"].transform == ""
    assert contents.notes == ("LayerNorm eps 1e-05, as ERNIE computes",)


def test_opening_reads_no_values(tmp_path: Path) -> None:
    contents = paddle.open_contents(folder := checkpoint(tmp_path, static()))
    shutil.rmtree(folder / "params")
    with pytest.raises(UserError, match="word_embedding: cannot be read"):
        contents.entries["backbone.word.weight"].read()


def test_persistables_of_training(tmp_path: Path) -> None:
    arrays = static(task=False)
    state = {f"pooled_fc.w_0_{x}_0": arrays["pooled_fc.w_0"] for x in ("moment1", "moment2")}
    state |= {f"pooled_fc.w_0_{x}_0": np.ones(1, np.float32) for x in ("beta1_pow_acc",)}
    state |= {"learning_rate_0": np.ones(1, np.float32)}
    state |= {"@LR_DECAY_COUNTER@": np.ones(1, np.int64), "queue": np.ones(1, np.int64)}
    contents = paddle.open_contents(checkpoint(tmp_path, arrays | state))
    assert dict.fromkeys(state, OPTIMIZER) | {
        "queue": "no place in this encoder and its heads"
    } == dict(contents.skipped)
    accounted(contents, arrays | state)
    assert contents.config.task_types == 0


def test_master_weights_take_precedence(tmp_path: Path) -> None:
    arrays = static()
    name = "encoder_layer_0_ffn_fc_0.w_0"
    both = arrays | {name: arrays[name].astype(np.float16), f"{name}.master": arrays[name]}
    contents = paddle.open_contents(checkpoint(tmp_path, both))
    entry = contents.entries["backbone.layers.0.expand.weight"]
    assert entry.source_names == (f"{name}.master",)
    assert np.array_equal(entry.read().numpy(), arrays[name].T)
    assert contents.skipped == {name: f"{COPY}{name}.master in half precision"}


HEADS: dict[str, tuple[Arrays, dict[str, HeadInfo]]] = {
    "two tasks": (
        classes("next_sent_fc", 2) | classes("sent_reorder_fc", 4),
        {
            "next_sentence": HeadInfo(kind="classes", classes=2),
            "sent_reorder": HeadInfo(kind="classes", classes=4),
        },
    ),
    "masked words": (masked_words(), {"masked_words": HeadInfo(kind="masked_words")}),
    "a trainer of PALM's": (
        masked_words("mlm.v1_ernie."),
        {"masked_words": HeadInfo(kind="masked_words")},
    ),
    "two trainers of PALM's": (
        masked_words("a.b.") | masked_words("c."),
        {"a_b": HeadInfo(kind="masked_words"), "c": HeadInfo(kind="masked_words")},
    ),
    "a classifier": (
        classes("cls_out", 3, ("_w", "_b")),
        {"classifier": HeadInfo(kind="classes", classes=3)},
    ),
    "a classifier of a task": (
        classes("senti_cls_out", 3, ("_w", "_b")) | classes("match.x.cls_out", 2, ("_w", "_b")),
        {
            "senti": HeadInfo(kind="classes", classes=3),
            "match_x": HeadInfo(kind="classes", classes=2),
        },
    ),
    "of tokens": (
        classes("mrc.cls_squad_out", 2, ("_w", "_b")),
        {"mrc": HeadInfo(kind="classes", classes=2, pooled=False)},
    ),
    "with a CRF": (
        classes("slot.cls_out", 5, ("_w", "_b")) | {"slot.crfw": np.ones((7, 5), np.float32)},
        {"slot": HeadInfo(kind="classes", classes=5, pooled=False, transitions=True)},
    ),
    "half of one": ({"cls_out_w": np.ones((8, 2), np.float32)}, {}),
    "a part of the masked words'": (
        {name: x for name, x in masked_words().items() if "norm" not in name},
        {},
    ),
    "an output table that is tied": (
        masked_words() | {"mask_lm_out_fc.w_0": static()["word_embedding"].T.copy()},
        {"masked_words": HeadInfo(kind="masked_words")},
    ),
    "an output table of its own": (
        masked_words() | {"mask_lm_out_fc.w_0": np.ones((8, 11), np.float32)},
        {},
    ),
}


@pytest.mark.parametrize("what", HEADS)
def test_heads_of_the_static_graph(tmp_path: Path, what: str) -> None:
    arrays, heads = HEADS[what]
    contents = paddle.open_contents(checkpoint(tmp_path, static() | arrays))
    assert contents.heads == heads
    accounted(contents, static() | arrays)
    modules(contents)


def test_untied_output_embeddings(tmp_path: Path) -> None:
    arrays, _ = HEADS["an output table of its own"]
    contents = paddle.open_contents(checkpoint(tmp_path, static() | arrays))
    assert set(contents.skipped) == set(arrays)
    assert any("untied output embeddings" in note for note in contents.notes)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("kind", ["ernie", "bert"])
def test_names_of_paddlenlp(tmp_path: Path, kind: str, bare: bool) -> None:
    arrays = nlp(static(task=kind == "ernie"), "" if bare else f"{kind}.")
    heads = classes("classifier", 3, (".weight", ".bias"))
    config = {key: x for key, x in ERNIE.items() if key != "sent_type_vocab_size"}
    config |= {"model_type": kind, "type_vocab_size": 3, "intermediate_size": 32}
    config |= {"layer_norm_eps": 1e-7, "fuse": False, "pool_act": "tanh", "task_id": 0}
    for named, head in {
        "ForSequenceClassification": ("classifier", True),
        "ForTokenClassification": ("classifier", False),
        "ForQuestionAnswering": ("qa_outputs", False),
    }.items():
        about = config | {"architectures": [kind.capitalize() + named]}
        contents = paddle.open_contents(pickled(tmp_path, arrays | heads, about))
        assert contents.heads == {head[0]: HeadInfo(kind="classes", classes=3, pooled=head[1])}
        assert contents.config.layer_norm_eps == (1e-12 if kind == "ernie" else 1e-7)
        accounted(contents, arrays | heads)
        modules(contents)


def test_an_older_config_of_paddlenlp(tmp_path: Path) -> None:
    folder = pickled(tmp_path, nlp(static(task=False), "roberta."), {})
    inner = {**ERNIE, "init_class": "RobertaModel", "pad_token_id": 1}
    (folder / "config.json").unlink()
    about = {"init_args": [inner], "init_class": "RobertaForSequenceClassification"}
    (folder / "model_config.json").write_text(json.dumps(about))
    contents = paddle.open_contents(folder)
    assert contents.format == "PaddleNLP RobertaForSequenceClassification, .pdparams"
    assert (contents.config.position_offset, contents.config.pad) == (2, 1)
    (folder / "model_config.json").write_text(json.dumps({**ERNIE, "pad_token_id": 1}))
    assert paddle.open_contents(folder).config.position_offset == 2  # the names say Roberta


def test_a_classifier_with_its_own_pooler(tmp_path: Path) -> None:
    arrays = nlp(static(task=False), "roberta.") | classes(
        "classifier.out_proj", 3, (".weight", ".bias")
    )
    own = {"classifier.dense.weight": np.eye(8, dtype=np.float32)}
    own |= {"classifier.dense.bias": np.ones(8, np.float32)}
    about = {
        **ERNIE,
        "model_type": "roberta",
        "architectures": ["RobertaForSequenceClassification"],
    }
    contents = paddle.open_contents(pickled(tmp_path, arrays | own, about))
    assert contents.heads == {"classifier": HeadInfo(kind="classes", classes=3)}
    assert contents.entries["backbone.pooler.dense.bias"].read().eq(1).all()
    assert contents.skipped == {
        f"roberta.pooler.dense.{end}": "the classifier has its own pooler"
        for end in ("weight", "bias")
    }
    accounted(contents, arrays | own)


def test_safetensors_in_paddles_orientation(tmp_path: Path) -> None:
    about = {**ERNIE, "model_type": "ernie"}
    whole = paddle.open_contents(pickled(tmp_path, nlp(static()), about))
    folder = tmp_path / "safe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about))
    save_file(nlp(static()), folder / "model.safetensors", {"format": "np"})
    assert paddle.recognizes(folder)
    contents = paddle.open_contents(folder)
    same(contents, whole)
    names = sorted(nlp(static()))
    for i, part in enumerate((names[:20], names[20:])):
        save_file({name: nlp(static())[name] for name in part}, folder / f"{i}.safetensors")
    where = {name: f"{int(i >= 20)}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert paddle.recognizes(folder)
    same(paddle.open_contents(folder), whole)


def same(one: CheckpointContents, other: CheckpointContents) -> None:
    assert one.entries.keys() == other.entries.keys()
    for name, entry in one.entries.items():
        assert torch.equal(entry.read(), other.entries[name].read()), name


def test_an_encoder_inside_a_custom_model(tmp_path: Path) -> None:
    """Two encoders in one file, with structured names that only the table explains."""
    one, other = nlp(static(), "query.ernie."), nlp(static(seed=5), "title.ernie.")
    folder = pickled(tmp_path, one | other, {**ERNIE, "model_type": "ernie"})
    with pytest.raises(UserError, match=r"has encoders at 'query.ernie.' and 'title.ernie.'"):
        paddle.open_contents(folder)
    contents = paddle.open_contents(folder, prefix="title.ernie.")
    accounted(contents, one | other)
    found = contents.entries["backbone.word.weight"].read().numpy()
    assert np.array_equal(found, static(seed=5)["word_embedding"])
    named = {f"x{i}": name for i, name in enumerate(static())}
    arrays: dict[str, Any] = {f"x{i}": array for i, array in enumerate(static().values())}
    arrays["StructuredToParameterName@@"] = named
    same(
        paddle.open_contents(pickled(tmp_path, arrays, ERNIE)),
        paddle.open_contents(checkpoint(tmp_path, static())),
    )


def test_palms_archive(tmp_path: Path) -> None:
    arrays = {f"__paddlepalm_{x}": array for x, array in (static() | masked_words("m.")).items()}
    folder = tmp_path / "palm"
    folder.mkdir()
    with tarfile.open(folder / "__palmmodel__", "w") as tar:
        for name, array in arrays.items():
            info = tarfile.TarInfo(name)
            info.size = len(data := variable(array))
            tar.addfile(info, io.BytesIO(data))
    (folder / "ernie_config.json").write_text(json.dumps(ERNIE))
    contents = paddle.open_contents(folder)
    assert contents.format == "PALM, in PALM's archive"
    assert contents.config.layer_norm_eps == 1e-6
    assert contents.heads == {"masked_words": HeadInfo(kind="masked_words")}
    accounted(contents, arrays)
    modules(contents)


# ---- combined files ----


def combined(tmp_path: Path, arrays: Arrays, config: Mapping[str, Any] = ERNIE) -> Path:
    folder = tmp_path / "combined"
    folder.mkdir(exist_ok=True)
    data = b"".join(variable(arrays[name]) for name in sorted(arrays))
    (folder / "__params__").write_bytes(data)
    (folder / "ernie_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("task", [False, True])
@pytest.mark.parametrize("more", ["", "words", "pair", "words pair", "words table", "cls"])
def test_a_combined_file_of_usual_variables(tmp_path: Path, more: str, task: bool) -> None:
    arrays = static(task=task)
    arrays |= masked_words() if "words" in more else {}
    arrays |= classes("next_sent_fc", 2) if "pair" in more else {}
    arrays |= classes("cls_out", 3, ("_w", "_b")) if "cls" in more else {}
    arrays |= {"mask_lm_out_fc.w_0": np.ones((8, 11), np.float32)} if "table" in more else {}
    contents = paddle.open_contents(combined(tmp_path, arrays))
    accounted(contents, arrays)
    same(contents, paddle.open_contents(checkpoint(tmp_path, arrays)))


def test_a_combined_file_of_other_variables(tmp_path: Path) -> None:
    arrays = static() | classes("sent_reorder_fc", 4)
    folder = combined(tmp_path, arrays)
    with pytest.raises(UserError, match="variables without names, and none of ERNIE's graphs"):
        paddle.open_contents(folder)
    contents = paddle.open_contents(folder, names=list(arrays))
    assert contents.heads == {"sent_reorder": HeadInfo(kind="classes", classes=4)}
    with pytest.raises(UserError, match="variables, but 3 names were given"):
        paddle.open_contents(folder, names=["a", "b", "c"])


# ---- what the config does not say ----


@pytest.mark.parametrize(
    ("config", "arrays", "eps"),
    [
        (ERNIE, {}, 1e-5),
        ({**ERNIE, "use_task_emb": True}, {}, 1e-6),
        (ERNIE, classes("x.cls_out", 2, ("_w", "_b")), 1e-6),
    ],
)
def test_the_eps_of_the_program_that_wrote_it(
    tmp_path: Path, config: dict, arrays: Arrays, eps: float
) -> None:
    folder = checkpoint(tmp_path, static() | arrays, config)
    contents = paddle.open_contents(folder)
    assert contents.config.layer_norm_eps == eps
    assert contents.notes[0].startswith(f"LayerNorm eps {eps:g}, as ")
    asked = paddle.open_contents(folder, eps=3e-7)
    assert (asked.config.layer_norm_eps, asked.notes[0]) == (
        3e-7,
        "LayerNorm eps 3e-07, as requested",
    )


@pytest.mark.parametrize("era", ["static", "dygraph"])
def test_the_release_of_ernie_tiny(tmp_path: Path, era: str) -> None:
    """Three layers, two token types, no task embedding, and a tokenizer of words and pieces."""
    place = "ernie" if era == "static" else "nlp"
    tokenizer = load_tokenizer(write_release(tmp_path / place))
    arrays = static(replace(CONFIG, num_layers=3), task=False)
    arrays["word_embedding"] = np.ones((tokenizer.size, 8), np.float32)
    arrays["sent_embedding"] = arrays["sent_embedding"][:2]
    config = {key: x for key, x in ERNIE.items() if not key.endswith("_type_vocab_size")}
    config |= {"num_hidden_layers": 3, "hidden_act": "relu", "type_vocab_size": 2}
    config["vocab_size"] = tokenizer.size
    if era == "static":
        folder = checkpoint(tmp_path, arrays, config)
    else:
        folder = pickled(tmp_path, nlp(arrays), {**config, "model_type": "ernie"})
    contents = paddle.open_contents(folder)
    read = contents.config
    assert (read.num_layers, read.token_types, read.task_types, read.activation) == (
        3,
        2,
        0,
        "relu",
    )
    assert contents.tokenizer is not None
    assert load_tokenizer(contents.tokenizer).fingerprint == tokenizer.fingerprint


def test_a_module_of_paddlehub(tmp_path: Path) -> None:
    """assets/: params/, a vocabulary without ids, and a config with the model's name."""
    size = load_tokenizer(write_release(tmp_path / "ernie", hub=True)).size
    arrays = static(task=False) | {"word_embedding": np.ones((size, 8), np.float32)}
    folder = checkpoint(tmp_path, arrays, {**ERNIE, "vocab_size": size})
    named = folder / "ernie_tiny_config.json"
    (folder / "ernie_config.json").rename(named)
    contents = paddle.open_contents(folder)
    assert (contents.config.vocab_size, contents.tokenizer) == (size, folder / "vocab.txt")
    shutil.copy(named, folder / "ernie_base_config.json")
    names = r"ernie_base_config\.json, ernie_tiny_config\.json"
    with pytest.raises(
        UserError, match=rf"ernie: has several configs \({names}\); give one with --config"
    ):
        paddle.open_contents(folder)
    assert paddle.open_contents(folder, config=named).config == contents.config


def test_tensors_overrule_the_config(tmp_path: Path) -> None:
    config = {**ERNIE, "sent_type_vocab_size": 2, "intermediate_size": 20, "use_task_id": False}
    contents = paddle.open_contents(checkpoint(tmp_path, static(), config))
    assert (
        contents.config.token_types,
        contents.config.feed_forward_size,
        contents.config.task_types,
    ) == (3, 32, 4)
    assert len(contents.notes) == 4
    bare = {name: x for name, x in static().items() if "pooled" not in name and "task" not in name}
    (tmp_path / "x").mkdir()
    contents = paddle.open_contents(
        checkpoint(tmp_path / "x", bare, {**ERNIE, "use_task_id": True})
    )
    assert contents.config.task_types == 0
    assert any(note.startswith("task embeddings: none") for note in contents.notes)
    assert any(note.startswith("no pooler") for note in contents.notes)


def test_the_activation_is_the_configs(tmp_path: Path) -> None:
    for name in ("relu", "gelu"):
        folder = checkpoint(tmp_path, static(), {**ERNIE, "hidden_act": name})
        assert paddle.open_contents(folder).config.activation == name


def test_a_vocabulary_with_ids(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcd", "[UNK]"]
    folder = checkpoint(tmp_path, static())
    lines = "".join(f"{token}\t{i}\n" for i, token in enumerate(tokens))
    (folder / "vocab.txt").write_text(lines)
    contents = paddle.open_contents(folder)
    assert contents.tokenizer == folder / "vocab.txt"
    assert load_tokenizer(folder / "vocab.txt").tokens(range(9)) == tokens


# ---- what is wrong ----


def broken(change: Callable[[Arrays], Any], config: Mapping[str, Any] | None = ERNIE) -> Any:
    def make(tmp_path: Path) -> Path:
        arrays = static()
        change(arrays)
        return checkpoint(tmp_path, arrays, config)

    return make


def with_file(name: str, data: bytes) -> Any:
    def make(tmp_path: Path) -> Path:
        folder = checkpoint(tmp_path, static())
        (folder / name).write_bytes(data)
        return folder

    return make


def only(name: str, data: bytes) -> Any:
    def make(tmp_path: Path) -> Path:
        folder = tmp_path / "only"
        folder.mkdir()
        (folder / name).write_bytes(data)
        (folder / "ernie_config.json").write_text(json.dumps(ERNIE))
        return folder

    return make


def two_pickles(tmp_path: Path) -> Path:
    for name in ("b.pdparams", "a.pdparams"):
        (tmp_path / name).write_bytes(pickle.dumps({}, 4))
    return tmp_path


def odd(name: str, shape: tuple[int, ...]) -> Callable[[Arrays], Any]:
    return lambda arrays: arrays.update({name: np.ones(shape, np.float32)})


WRONG: dict[str, tuple[Any, str]] = {
    "no such folder": (lambda tmp_path: tmp_path / "none", "none: no such file or folder"),
    "an empty folder": (lambda tmp_path: tmp_path, "contains no Paddle checkpoint"),
    "no activation": (
        broken(lambda _: None, {k: x for k, x in ERNIE.items() if k != "hidden_act"}),
        r"ernie_config\.json: has no hidden_act",
    ),
    "other positions": (
        broken(lambda _: None, {**ERNIE, "max_position_embeddings": 512}),
        "max_position_embeddings is 512, but the tensors have 10",
    ),
    "fewer layers": (
        broken(lambda _: None, {**ERNIE, "num_hidden_layers": 1}),
        "num_hidden_layers is 1, but the tensors have 2",
    ),
    "another model": (
        broken(lambda _: None, {**ERNIE, "model_type": "gpt2"}),
        "must be 'bert' or 'ernie' or 'roberta' or",
    ),
    "relative positions": (
        broken(lambda _: None, {**ERNIE, "rel_pos_size": 32}),
        "rel_pos_size: 32, but the tensors have 0 relative positions; ERNIE-Gram's are 33",
    ),
    "another pooler": (
        broken(lambda _: None, {**ERNIE, "pool_act": "relu"}),
        "pool_act: must be tanh",
    ),
    "a missing table": (broken(lambda x: x.pop("pos_embedding")), "no backbone.position.weight"),
    "a matrix of another shape": (
        broken(odd("encoder_layer_0_ffn_fc_0.w_0", (8, 30))),
        r"encoder_layer_0_ffn_fc_1\.w_0 gives|ffn_fc_0",
    ),
    "a head of another vocabulary": (
        broken(lambda x: x.update(masked_words(words=12))),
        r"mask_lm_out_fc\.b_0 has shape \(12,\), but the configuration expects \(11,\)",
    ),
    "something else among the variables": (
        with_file("params/notes", b"some notes of mine"),
        "params/notes: not a Paddle variable",
    ),
    "a vocabulary that is too long": (
        with_file(
            "vocab.txt",
            b"".join(b"%s\n" % x for x in b"[PAD] [CLS] [SEP] [MASK] [UNK]".split())
            + b"".join(b"w%d\n" % i for i in range(9)),
        ),
        r"vocab\.txt: has 14 tokens, but the token embeddings have 11 rows",
    ),
    "a vocabulary with wrong ids": (
        with_file("vocab.txt", b"[PAD]\t0\n[CLS]\t2\n"),
        "id '2', expected 1",
    ),
    "a vocabulary that is none": (with_file("vocab.txt", b"\xff\xfe"), "not UTF-8 text"),
    "two pickles": (
        two_pickles,
        r"several files \(a\.pdparams, b\.pdparams\); give one of them",
    ),
    "a combined file that is cut": (only("__params__", variable(np.ones(3))[:-1]), "ends inside"),
    "a combined file of something": (
        only("__params__", variable(np.ones(3))),
        "1 variables without names",
    ),
    "an archive of nothing": (
        only("__palmmodel__", bytes(10240)),
        "no token embeddings among 0 tensors|cannot be read",
    ),
    "an archive that is none": (only("__palmmodel__", b"x" * 600), "cannot be read as an"),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_clear_line(tmp_path: Path, what: str) -> None:
    make, message = WRONG[what]
    path = make(tmp_path)
    before = sorted(path.rglob("*")) if path.exists() else []
    with pytest.raises(UserError, match=message) as caught:
        paddle.open_contents(path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert (sorted(path.rglob("*")) if path.exists() else []) == before
