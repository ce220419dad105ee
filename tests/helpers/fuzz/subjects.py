"""What is mutated: small valid checkpoints of every format, tokenizers, tables.

templates(folder)        ──> {name: Subject}, whose files lie in `folder`
subject.spoil(folder)    ──> changes one file of a copy
subject.use(folder)      ──> reads it as a command would: succeeds, or raises UserError
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from palm_ds.data.reader.options import TableSettings
from palm_ds.data.reader.table import open_table
from palm_ds.inference.prediction_files import read_predictions
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.deepspeed.ds_config import read_ds_config
from palm_ds.text.tokenizer import SPECIALS, load_tokenizer, wordpiece
from palm_ds.train.recipe.recipe import read_recipe
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.tensor_files import open_tensors
from palm_ds.weights.formats.tensorflow.tensor_bundle import masked_crc
from palm_ds.weights.weights_folder import WeightsInfo, save_weights
from tests.helpers.fuzz.mutate import (
    changed_value,
    mutated_bytes,
    mutated_json,
    mutated_pickle,
    overwritten,
)
from tests.helpers.noisy_model import noisy_model
from tests.weights.formats.deepspeed.test_read import shards
from tests.weights.formats.paddle_made import write_folder
from tests.weights.formats.tensorflow_made import write_bundle

CONFIG = EncoderConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    intermediate_size=12,
    max_positions=16,
    token_types=2,
    task_types=0,
)
TOKENIZER = wordpiece([*SPECIALS, *"abcdefghijklmno", "##a", "##b", "##c", "##d"], lower=True)
TEXTS = ["a bcd, EFG \u4e00\u00e9", "abcd " * 20]
TABLES = {
    "t.tsv": b"label\ttext_a\ttext_b\n1\ta cat\tb\n0\ta dog\tc\n1\t\xe4\xb8\x80\td\n",
    "t.csv": b'label,text_a\n1,"a ""cat"", b"\n0,"a\nb"\n',
    "t.jsonl": b'{"label": "x", "text_a": "a"}\n{"label": "y", "text_a": "b"}\n' * 2,
    "t.conll": b"a O\nb B-X\n\nc I-X\nd O\n",
    "t.json": json.dumps(
        {
            "data": [
                {
                    "paragraphs": [
                        {
                            "context": "A cat sat.",
                            "qas": [
                                {
                                    "id": "q",
                                    "question": "Who?",
                                    "answers": [{"text": "cat", "answer_start": 2}],
                                }
                            ],
                        }
                    ]
                }
            ]
        }
    ).encode(),
}

RECIPE = {
    "seed": 1,
    "backbone": {"preset": "tiny", "max_positions": 128, "dropout": 0.1},
    "length": 128,
    "batch": "4096 tokens",
    "optimizer": {"kind": "adamw", "lr": 1e-4, "betas": [0.9, 0.98], "freeze": []},
    "schedule": {"kind": "wsd", "warmup": 4, "decay": 9},
    "sources": {
        "text": {"mix": {"here": 1.0, "there": 2.0}},
        "rows": {"table": ["a.tsv"], "read": {"columns": {"text_a": 0}, "drop": {"label": [1]}}},
    },
    "tasks": {
        "words": {"kind": "knowledge_masking", "source": "text", "units": ["word"]},
        "order": {"kind": "sentence_reordering", "source": "text", "most": 3},
    },
    "stages": {"continual": ["words", "order + words"], "steps": 30, "always": "words"},
    "evaluate": {"every": 5, "best": "mean", "metrics": {}},
    "save": {"every": 5, "keep": 2},
}
DS_CONFIG = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 10},
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 5,
    "palm_ds": {"data_workers": 0, "kernels": {"attention": "plain"}, "timeout_minutes": 3},
}
PREDICTIONS = [
    {"index": 0, "label": "a", "probs": [0.5, 0.5]},
    {"index": 1, "label": "b", "logits": [0, 1.5]},
]

Spoil = Callable[[Path, Random], None]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One thing to mutate."""

    template: Path
    spoil: Spoil
    use: Callable[[Path, Random], object]
    weight: int = 1
    """How often it is drawn."""


# ---- spoiling ----


def json_file(name: str) -> Spoil:
    def spoil(folder: Path, random: Random) -> None:
        path = folder / name
        text = mutated_json(path.read_text("utf-8"), random)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))

    return spoil


def raw_file(*names: str) -> Spoil:
    def spoil(folder: Path, random: Random) -> None:
        path = folder / random.choice(names)
        path.write_bytes(mutated_bytes(path.read_bytes(), random))

    return spoil


def pickle_file(name: str) -> Spoil:
    def spoil(folder: Path, random: Random) -> None:
        path = folder / name
        path.write_bytes(mutated_pickle(path.read_bytes(), random))

    return spoil


def zipped_pickle(name: str) -> Spoil:
    """torch's archive with another data.pkl, or with other bytes."""

    def spoil(folder: Path, random: Random) -> None:
        path = folder / name
        if random.random() < 0.2:
            path.write_bytes(mutated_bytes(path.read_bytes(), random))
            return
        with zipfile.ZipFile(path) as archive:
            members = {each: archive.read(each) for each in archive.namelist()}
        way = zipfile.ZIP_STORED if random.random() < 0.95 else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(path, "w", way) as archive:
            for each, data in members.items():
                pickled = each.endswith("data.pkl")
                archive.writestr(each, mutated_pickle(data, random) if pickled else data)

    return spoil


def header(folder: Path, random: Random) -> None:
    """The header of a safetensors file."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    said = json.loads(data[8 : 8 + size])
    text = json.dumps(changed_value(said, random)).encode()
    if random.random() < 0.1:
        text = mutated_bytes(text, random)
    length = len(text) if random.random() < 0.95 else random.choice((0, 1, len(text) + 1, 1 << 62))
    path.write_bytes(length.to_bytes(8, "little") + text + data[8 + size :])


def tensorflow_index(folder: Path, random: Random) -> None:
    """Other bytes, mostly inside a block with a checksum that fits."""
    path = folder / "bert_model.ckpt.index"
    data = path.read_bytes()
    if random.random() < 0.2:
        path.write_bytes(mutated_bytes(data, random))
        return
    ends = [at for at in range(5, len(data) - 48) if _ends_block(data, at)]
    start, end = random.choice(list(zip([0, *(at + 5 for at in ends)], ends, strict=False)))
    changed = overwritten(data, random, start, end)
    checksum = masked_crc(changed[start : end + 1]).to_bytes(4, "little")
    path.write_bytes(changed[: end + 1] + checksum + changed[end + 5 :])


def _ends_block(data: bytes, at: int) -> bool:
    """Whether a block may end here: the byte of no compression, then a checksum of any block."""
    return data[at] == 0 and any(
        masked_crc(data[start : at + 1]) == int.from_bytes(data[at + 1 : at + 5], "little")
        for start in _block_starts(data, at)
    )


def _block_starts(data: bytes, at: int) -> list[int]:
    """The start of the file and the ends of blocks, found by their empty meta block."""
    meta = data.rfind(bytes(4) + b"\x01\0\0\0\0", 0, at)
    return [0] if meta < 0 else [0, meta, meta + 13]


# ---- using ----


def converts(*, to: str = "", name: str = "") -> Callable[[Path, Random], object]:
    """Opens and writes it; one in forty is also run."""

    def use(folder: Path, random: Random) -> object:
        target = to or random.choice(("palm_ds", "huggingface", "huggingface", "paddle"))
        options = ConversionOptions(verify=random.random() < 1 / 40)
        return convert(folder / name, folder.with_name("out"), target, options)

    return use


def tokenizes(folder: Path, random: Random) -> object:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocabulary.size
    encoded = tokenizer.encode_texts(TEXTS)
    tokenizer.save(folder.with_name("out"))
    return encoded


def reads_table(folder: Path, random: Random) -> object:
    skip = random.random() < 0.3
    settings = TableSettings(bad_rows="skip" if skip else "stop")
    return open_table(str(next(folder.iterdir())), settings)


def reads_recipe(folder: Path, random: Random) -> object:
    return read_recipe(folder / "recipe.json")  # JSON is YAML


def reads_ds_config(folder: Path, random: Random) -> object:
    return read_ds_config(folder / "ds_config.json")


def reads_predictions(folder: Path, random: Random) -> object:
    return list(read_predictions(folder / "predictions.json"))


# ---- templates ----


def templates(folder: Path) -> dict[str, Subject]:
    """Makes the templates. Randomness: none."""
    made = _made(folder)
    subjects = {
        "config": Subject(
            template=made["bert"], spoil=json_file("config.json"), use=converts(), weight=8
        ),
        "safetensors": Subject(template=made["bert"], spoil=header, use=converts(), weight=4),
        "safetensors bytes": Subject(
            template=made["bert"], spoil=raw_file("model.safetensors"), use=converts()
        ),
        "shard index": Subject(
            template=made["sharded"],
            spoil=json_file("model.safetensors.index.json"),
            use=converts(),
        ),
        "bin": Subject(
            template=made["bin"], spoil=zipped_pickle("pytorch_model.bin"), use=converts(), weight=4
        ),
        "legacy bin": Subject(
            template=made["legacy"], spoil=raw_file("pytorch_model.bin"), use=converts(), weight=2
        ),
        "weights.json": Subject(
            template=made["ours"], spoil=json_file("weights.json"), use=converts(), weight=3
        ),
        "pdparams": Subject(
            template=made["paddle"],
            spoil=pickle_file("model_state.pdparams"),
            use=converts(),
            weight=4,
        ),
        "paddle config": Subject(
            template=made["paddle"], spoil=json_file("config.json"), use=converts(), weight=2
        ),
        "paddle variables": Subject(
            template=made["variables"],
            spoil=raw_file("word_embedding", "pooled_fc.b_0", "ernie_config.json"),
            use=converts(),
            weight=2,
        ),
        "tensorflow index": Subject(
            template=made["tensorflow"], spoil=tensorflow_index, use=converts(), weight=3
        ),
        "tensorflow config": Subject(
            template=made["tensorflow"], spoil=json_file("bert_config.json"), use=converts()
        ),
        "deepspeed": Subject(
            template=made["deepspeed"],
            spoil=zipped_pickle("global_step3/mp_rank_00_model_states.pt"),
            use=converts(),
            weight=3,
        ),
        "tokenizer.json": Subject(
            template=made["tokenizer"], spoil=json_file("tokenizer.json"), use=tokenizes, weight=6
        ),
        "tokenizer_config.json": Subject(
            template=made["vocab"], spoil=json_file("tokenizer_config.json"), use=tokenizes
        ),
        "vocab.txt": Subject(
            template=made["vocab"], spoil=raw_file("vocab.txt"), use=tokenizes, weight=2
        ),
    }
    for name, use in (
        ("recipe", reads_recipe),
        ("ds_config", reads_ds_config),
        ("predictions", reads_predictions),
    ):
        spoil = json_file(f"{name}.json") if name != "predictions" else raw_file(f"{name}.json")
        subjects[name] = Subject(template=made[name], spoil=spoil, use=use, weight=5)
    for name in TABLES:
        subjects[f"table {name}"] = Subject(
            template=made[name], spoil=raw_file(name), use=reads_table, weight=2
        )
    return subjects


def _made(folder: Path) -> Mapping[str, Path]:
    """The valid folders."""
    net = noisy_model(CONFIG, "words", {"next_sentence": (2, True)})
    info = WeightsInfo(backbone=CONFIG, head_of={"words": "words"})
    save_weights(net, folder / "ours", info, tokenizer=TOKENIZER)
    made = {name: folder / name for name in ("ours", "bert", "sharded", "paddle", "deepspeed")}
    quick = ConversionOptions(verify=False)
    convert(made["ours"], made["bert"], "huggingface", quick)
    small = ConversionOptions(verify=False, shard_size="1KB")
    convert(made["ours"], made["sharded"], "huggingface", small)
    convert(made["ours"], made["paddle"], "paddle", quick)
    shards(made["deepspeed"], net, 2, 1)
    (made["deepspeed"] / "weights.json").write_bytes((made["ours"] / "weights.json").read_bytes())
    state = {name: entry.read() for name, entry in open_tensors(made["bert"]).items()}
    for name, zipped in (("bin", True), ("legacy", False)):
        made[name] = _bin(made["bert"], folder / name, state, zipped)
    made["tensorflow"] = _tensorflow(made["bert"], folder / "tensorflow", state)
    made["variables"] = _variables(folder / "variables")
    made["tokenizer"], made["vocab"] = folder / "tokenizer", folder / "vocab"
    for name in ("tokenizer", "vocab"):
        TOKENIZER.save(made[name])
    (made["vocab"] / "tokenizer.json").unlink()
    lines = "".join(json.dumps(each) + "\n" for each in PREDICTIONS)
    for name, text in (
        ("recipe", json.dumps(RECIPE)),
        ("ds_config", json.dumps(DS_CONFIG)),
        ("predictions", lines),
    ):
        made[name] = folder / name
        made[name].mkdir()
        (made[name] / f"{name}.json").write_text(text)
    for name, content in TABLES.items():
        made[name] = folder / name.replace(".", "_")
        made[name].mkdir()
        (made[name] / name).write_bytes(content)
    return made


def _bin(bert: Path, folder: Path, state: Mapping[str, torch.Tensor], zipped: bool) -> Path:
    shutil.copytree(bert, folder)
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(dict(state), path, _use_new_zipfile_serialization=zipped)
    return folder


def _tensorflow(bert: Path, folder: Path, state: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir()
    named = {}
    for name, tensor in state.items():
        theirs = name.replace("layer.", "layer_").replace(".", "/")
        if "LayerNorm" in name:
            theirs = theirs.replace("/weight", "/gamma").replace("/bias", "/beta")
        elif "_embeddings" in name:
            theirs = theirs.removesuffix("/weight")
        elif name.startswith("cls.predictions.bias"):
            theirs = "cls/predictions/output_bias"
        elif "seq_relationship" in name:
            theirs = theirs.replace("/weight", "/output_weights").replace("/bias", "/output_bias")
        else:
            theirs = theirs.replace("/weight", "/kernel")
        named[theirs] = tensor.T.contiguous() if theirs.endswith("/kernel") else tensor
    write_bundle(folder / "bert_model.ckpt", named)
    about = json.loads((bert / "config.json").read_text())
    kept = ("hidden_", "num_", "vocab", "interm", "max_", "type_", "attention_", "init")
    values = {key: x for key, x in about.items() if key.startswith(kept)}
    (folder / "bert_config.json").write_text(json.dumps(values))
    return folder


def _variables(folder: Path) -> Path:
    """ERNIE 1.0 as fluid wrote it, a file a variable."""
    torch.manual_seed(1)
    width, inner = CONFIG.hidden_size, CONFIG.feed_forward_size
    shapes = {"word_embedding": (24, width), "pos_embedding": (16, width)}
    shapes |= {"sent_embedding": (2, width), "pooled_fc.w_0": (width, width)}
    shapes |= {"pooled_fc.b_0": (width,)}
    norms = ["pre_encoder", "encoder_layer_0_post_att", "encoder_layer_0_post_ffn"]
    for norm in norms:
        shapes |= {f"{norm}_layer_norm_{end}": (width,) for end in ("scale", "bias")}
    for name in ("query", "key", "value", "output"):
        before = f"encoder_layer_0_multi_head_att_{name}_fc"
        shapes |= {f"{before}.w_0": (width, width), f"{before}.b_0": (width,)}
    shapes |= {
        "encoder_layer_0_ffn_fc_0.w_0": (width, inner),
        "encoder_layer_0_ffn_fc_0.b_0": (inner,),
    }
    shapes |= {
        "encoder_layer_0_ffn_fc_1.w_0": (inner, width),
        "encoder_layer_0_ffn_fc_1.b_0": (width,),
    }
    write_folder(folder, {name: torch.randn(shape).numpy() for name, shape in shapes.items()})
    config = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"vocab_size": 24, "max_position_embeddings": 16, "hidden_act": "relu"}
    (folder / "ernie_config.json").write_text(json.dumps(config))
    return folder


def copy_of(template: Path, folder: Path) -> Path:
    """A copy to spoil."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o755)
    return folder
