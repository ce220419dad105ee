"""Paddle files for tests, in Paddle's exact bytes, and encoders in them."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.model.config.config import EncoderConfig

Arrays = dict[str, np.ndarray]

CODES = {
    "bool": 0,
    "int16": 1,
    "int32": 2,
    "int64": 3,
    "float16": 4,
    "float32": 5,
    "float64": 6,
    "uint8": 20,
    "int8": 21,
    "complex64": 23,
    "complex128": 24,
}
BFLOAT16 = 22  # the values are given as uint16


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def description(code: int, shape: Sequence[int]) -> bytes:
    return b"\x08" + varint(code) + b"".join(b"\x10" + varint(size) for size in shape)


def record(desc: bytes, data: bytes, *, levels: Sequence[bytes] = ()) -> bytes:
    """A variable, whatever its description and values claim."""
    head = struct.pack("<IQ", 0, len(levels))
    head += b"".join(struct.pack("<Q", len(level)) + level for level in levels)
    return head + struct.pack("<Ii", 0, len(desc)) + desc + data


def variable(array: np.ndarray, code: int | None = None) -> bytes:
    code = CODES[array.dtype.name] if code is None else code
    return record(description(code, array.shape), array.tobytes())


def write_folder(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """One file per variable."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        (folder / name).write_bytes(variable(array))
    return folder


# An encoder --------------------------------------------------------------------------------------

CONFIG = EncoderConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    max_positions=10,
    token_types=3,
    task_types=4,
    layer_norm_eps=1e-5,
)
ERNIE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "vocab_size": 11,
    "max_position_embeddings": 10,
    "sent_type_vocab_size": 3,
    "task_type_vocab_size": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
_LAYER = {
    "multi_head_att_query_fc": ("self_attn.q_proj", "attn.q"),
    "multi_head_att_key_fc": ("self_attn.k_proj", "attn.k"),
    "multi_head_att_value_fc": ("self_attn.v_proj", "attn.v"),
    "multi_head_att_output_fc": ("self_attn.out_proj", "attn.o"),
    "ffn_fc_0": ("linear1", "ffn.i"),
    "ffn_fc_1": ("linear2", "ffn.o"),
    "post_att_layer_norm": ("norm1", "ln1"),
    "post_ffn_layer_norm": ("norm2", "ln2"),
}
_TABLES = {
    "word": ("word_embedding", 11),
    "position": ("pos_embedding", 10),
    "token_type": ("sent_embedding", 3),
    "task_type": ("task_embedding", 4),
}


def static(config: EncoderConfig = CONFIG, *, task: bool = True, seed: int = 1) -> Arrays:
    """An encoder in the names and orientation of ERNIE's static graph."""
    rng, width = np.random.default_rng(seed), config.hidden_size
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    arrays = {name: draw(rows, width) for name, rows in _TABLES.values()}
    if not task:
        del arrays["task_embedding"]
    arrays |= {f"pre_encoder_layer_norm_{end}": draw(width) for end in ("scale", "bias")}
    arrays |= {"pooled_fc.w_0": draw(width, width), "pooled_fc.b_0": draw(width)}
    for i in range(config.num_layers):
        for part in _LAYER:
            name = f"encoder_layer_{i}_{part}"
            rows = 4 * width if part == "ffn_fc_1" else width
            columns = 4 * width if part == "ffn_fc_0" else width
            if part.endswith("norm"):
                arrays |= {f"{name}_{end}": draw(width) for end in ("scale", "bias")}
            else:
                arrays |= {f"{name}.w_0": draw(rows, columns), f"{name}.b_0": draw(columns)}
    return arrays


def masked_words(before: str = "", *, width: int = 8, words: int = 11) -> Arrays:
    rng = np.random.default_rng(2)
    shapes = {
        "trans_fc.w_0": (width, width),
        "trans_fc.b_0": (width,),
        "trans_layer_norm_scale": (width,),
        "trans_layer_norm_bias": (width,),
        "out_fc.b_0": (words,),
    }
    drawn = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {f"{before}mask_lm_{name}": array.astype(np.float32) for name, array in drawn.items()}


def classes(name: str, count: int, ends: tuple[str, str] = (".w_0", ".b_0")) -> Arrays:
    rng = np.random.default_rng(3)
    weight, bias = rng.normal(size=(8, count)), rng.normal(size=count)
    return {name + ends[0]: weight.astype(np.float32), name + ends[1]: bias.astype(np.float32)}


def nlp(arrays: Arrays, prefix: str = "ernie.") -> Arrays:
    """The same under PaddleNLP's names."""
    renamed = {}
    for name, array in arrays.items():
        for ending, end in {
            "_scale": "weight",
            "_bias": "bias",
            ".w_0": "weight",
            ".b_0": "bias",
        }.items():
            if name.endswith(ending):
                stem = name.removesuffix(ending)
                stem = stem.replace("pre_encoder_layer_norm", "embeddings.layer_norm")
                stem = stem.replace("pooled_fc", "pooler.dense")
                for part, (theirs, _) in _LAYER.items():
                    for i in range(3):
                        stem = stem.replace(
                            f"encoder_layer_{i}_{part}", f"encoder.layers.{i}.{theirs}"
                        )
                renamed[f"{prefix}{stem}.{end}"] = array
        for kind, (table, _) in _TABLES.items():
            if name == table:
                renamed[f"{prefix}embeddings.{kind}_embeddings.weight"] = array
    assert len(renamed) == len(arrays)
    return renamed


def checkpoint(
    tmp_path: Path, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = ERNIE
) -> Path:
    """ERNIE's folder: params/, its config, and other files."""
    folder = tmp_path / "ernie"
    write_folder(folder / "params", arrays)
    if config is not None:
        (folder / "ernie_config.json").write_text(json.dumps(config))
    return folder


def pickled(tmp_path: Path, arrays: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    folder = tmp_path / "nlp"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_state.pdparams").write_bytes(pickle.dumps(dict(arrays), 4))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
