"""Derives the encoder's config of a Paddle checkpoint from its config file, tensors and origin.

ERNIE's files do not record LayerNorm's eps, and PaddleNLP's Ernie ignores the one in its config.
The number of token types and task types and the intermediate size are those of the tensors. Notes
list everything that is not read directly from the config file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.positions import GRAM_BUCKETS
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.foreign_config import FOREIGN_KEYS, read_encoder_config
from palm_ds.weights.formats.huggingface.architecture import SEGMENTS
from palm_ds.weights.formats.huggingface.check_config import check_foreign_values, check_only
from palm_ds.weights.formats.huggingface.families import FAMILIES
from palm_ds.weights.formats.paddle.names import NLP_SCHEMES, PADDLENLP, STATIC, NamingScheme
from palm_ds.weights.formats.tensor_files import read_json

CONFIGS = ("ernie_config.json", "bert_config.json", "config.json", "model_config.json")
_NAMED_CONFIGS = ("ernie*config.json", "unimo*.json", "ernie_vil*.json")
"""Of PaddleHub, ernie_tiny_config.json; of ERNIE's UNIMO, unimo_base_en.json; of ERNIE-ViL,
ernie_vil.base.json."""
_VOCABULARIES = ("vocab.txt", "vocab.json", "tokenizer.json")
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
# Keys that are ignored: the tensors or the origin of the checkpoint are more reliable.
_SEEN = {
    "tie_word_embeddings",
    "weight_sharing",
    "task_type_vocab_size",
    "use_task_id",
    "use_task_emb",
    "layer_norm_eps",
    "intermediate_size",
    "type_vocab_size",
    "sent_type_vocab_size",
    "has_pooler",
    "rel_pos_size",
}
_ERNIE_GEN = {  # of ERNIE-GEN's static graph; the values of this architecture
    "pre_encoder_cmd": ("nd",),
    "preprocess_cmd": ("",),
    "postprocess_cmd": ("dan",),
    "param_share": ("normal",),
    "n_layer_per_block": (1,),
    "emb_mapping_in": (False, 0),
}
GRAM, ERNIE_M, UNIMO, DOC = "ernie_gram", "ernie_m", "unimo", "ernie_doc"
VIL = "ernie_vil"
_SHAPES = {GRAM: "ernie", ERNIE_M: "xlm-roberta", UNIMO: "bert", DOC: "bert", VIL: "bert"}
"""{model type: the one whose configuration says the same}"""
_ACTIVATIONS = {"gelu.precise": "gelu", "gelu.approximate": "gelu_new"}
"""The activations of ERNIE-GEN's static graph that have other names here."""


_ERNIES_EPS = 1e-5
_QKV = re.compile(r"backbone\.layers\.\d+\.qkv\.weight")
_NONE = TensorEntry(source_names=(), shape=(), read=lambda: torch.empty(0))


@dataclass(frozen=True)
class PaddleConfig:
    """A config file."""

    path: Path
    values: dict[str, Any]

    @property
    def model(self) -> str:
        """The model's class: ErnieForMaskedLM, ...; empty if not given."""
        named = self.values.get("architectures")
        if isinstance(named, list) and named:
            return str(named[0])
        return str(self.values.get("init_class") or "")

    def outputs(self, classes: int) -> HeadOutputs:
        """The meaning of the classifier's scores. Raises UserError."""
        try:
            problem = str(self.values.get("problem_type") or "")
            return HeadOutputs(labels=self._labels(classes), problem_type=problem)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def _labels(self, classes: int) -> tuple[str, ...]:
        """The class names, if the config has all of them and they are not LABEL_0, ..."""
        named = self.values.get("id2label")
        labels = [named.get(str(i)) for i in range(classes)] if isinstance(named, dict) else []
        names = [
            label
            for i, label in enumerate(labels)
            if isinstance(label, str) and label != f"LABEL_{i}"
        ]
        return tuple(names) if len(names) == classes else ()

    @property
    def kind(self) -> str:
        """The model type: ernie, bert, roberta, or any other value; empty if not given."""
        named = self.values.get("model_type")
        if named is not None:
            return str(named)
        named_by = {x: family.class_prefix.lower() for x, family in FAMILIES.items()}
        fits = [x for x, y in named_by.items() if self.model.lower().startswith(y)]
        return max(fits, key=lambda x: len(named_by[x]), default="")


def read_paddle_config(folder: Path, config: Path | None) -> PaddleConfig:
    """Read the given config file, or the one in the tensors' folder or its parent. Raises UserError
    if there is none."""
    path = config or _find_config(folder)
    values = _with_types(_flat(read_json(path)))
    check_foreign_values(values, str(path))
    return PaddleConfig(path, values)


def _find_config(folder: Path) -> Path:
    places = (folder, folder.parent)
    for path in (place / name for place in places for name in CONFIGS):
        if path.is_file():
            return path
    for place in places:
        files = sorted({file for pattern in _NAMED_CONFIGS for file in place.glob(pattern)})
        if len(files) > 1:
            names = ", ".join(path.name for path in files)
            raise UserError(f"{place}: has several configs ({names}); give one with --config")
        if files:
            return files[0]
    raise UserError(
        f"{folder}: found none of {', '.join((*CONFIGS, *_NAMED_CONFIGS))} here or in the parent "
        "folder, which is needed for the number of attention heads; give one with --config"
    )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """PaddleNLP before 2.5 nested the encoder's config in that of the model with a head."""
    inner = values.get("init_args")
    mappings = [x for x in inner if isinstance(x, dict)] if isinstance(inner, list) else []
    return {**mappings[0], **values} if mappings else values


def _with_types(values: dict[str, Any]) -> dict[str, Any]:
    """Without the sizes of token type embeddings that do not exist, as in UNIMO's configs."""
    keys = ("type_vocab_size", "sent_type_vocab_size")
    return {key: value for key, value in values.items() if key not in keys or value != 0}


def find_vocabulary(folder: Path, rows: int) -> Path | None:
    """The vocabulary in the tensors' folder or its parent; if there is a tokenizer_config.json as
    well, that folder. Raises UserError if it has more tokens than the token embeddings have
    `rows`."""
    for path in (place / name for place in (folder, folder.parent) for name in _VOCABULARIES):
        if not path.is_file():
            continue
        vocabulary = path.parent if path.with_name("tokenizer_config.json").is_file() else path
        if (size := load_tokenizer(vocabulary).size) > rows:
            raise UserError(
                f"{path}: has {size:,} tokens, but the token embeddings have {rows:,} rows"
            )
        return vocabulary
    return None


def numbers(
    entries: Mapping[str, TensorEntry],
    about: PaddleConfig,
    scheme: NamingScheme,
    *,
    palm: bool,
    eps: float | None,
) -> tuple[EncoderConfig, list[str]]:
    """The encoder's config, and notes on it. `eps`: the requested eps, or None for the source's."""
    values = dict(about.values)
    if lacking := [key for key in _REQUIRED if key not in values]:
        raise UserError(f"{about.path}: has no {lacking[0]}")
    if values.get("pool_act", "tanh") != "tanh":
        raise UserError(f"{about.path}: pool_act: must be tanh here, got {values['pool_act']!r}")
    for key, right in _ERNIE_GEN.items():
        if (value := values.get(key)) is not None and value not in right:
            raise UserError(f"{about.path}: {key}: must be {right[0]!r} here, got {value!r}")
    values["hidden_act"] = _ACTIVATIONS.get(values["hidden_act"], values["hidden_act"])
    kind = about.kind or "ernie"
    known = {key: x for key, x in values.items() if key in FOREIGN_KEYS - _SEEN}
    own_kind, more = _relative_positions(values, entries, about, scheme)
    own_kind |= _unimo(values, about, scheme) | _regions(entries, about)
    own_kind |= {"kind": VIL} if about.kind == VIL else {}
    document = _document(values, entries, about, scheme)
    base = read_encoder_config({**known, "model_type": _SHAPES.get(kind, kind)}, str(about.path))
    sizes = {
        "vocab_size": _rows(entries, about, "word"),
        "max_positions": _rows(entries, about, "position"),
        "token_types": _token_types(entries, about),
        "task_types": _rows(entries, about, "task") if "backbone.task.weight" in entries else 0,
        "intermediate_size": _rows(entries, about, "layers.0.expand"),
        **document.pop("sizes", {}),
    }
    own_kind |= document
    _check_sizes(values, sizes, entries, about)
    chosen, why = _eps(scheme, palm, about, eps)
    if not entries.get(SEGMENTS, _NONE).source_names:  # none of its own: any size is without effect
        values = {x: y for x, y in values.items() if not x.endswith("type_vocab_size")}
    notes = [why, *_size_notes(values, sizes), *more]
    config = replace(base, layer_norm_eps=chosen, **sizes, **own_kind)
    if config.position_offset:
        first = f"positions are counted from pad + 1 = {config.position_offset}"
        nlp = "as in PaddleNLP since 2.5 (earlier versions count differently)"
        notes.append(f"{first}, {nlp if scheme is PADDLENLP else 'as in ERNIE'}")
    return config, notes


def _unimo(values: Mapping[str, Any], about: PaddleConfig, scheme: NamingScheme) -> dict[str, Any]:
    """The values of an UNIMO that its configuration does not state. ERNIE's has RoBERTa's
    positions, PaddleNLP's BERT's."""
    if about.kind != UNIMO:
        return {}
    check_only(values, {"normalize_before": (False, None)}, str(about.path))
    pad = values.get("pad_token_id")
    pad = pad if pad is not None else 0 if scheme is PADDLENLP else 1
    return {"kind": UNIMO, "pad": pad, "position_offset": 0 if scheme is PADDLENLP else pad + 1}


def _regions(entries: Mapping[str, TensorEntry], about: PaddleConfig) -> dict[str, Any]:
    """The options of an encoder that reads images, by the tensors: ERNIE's configs of UNIMO have
    the size of features with those of texts alone too."""
    feature = entries.get("backbone.region.feature.weight")
    if feature is None:
        return {}
    stated, features = about.values.get("image_embedding_size"), feature.shape[-1]
    if stated not in (None, features):
        raise UserError(
            f"{about.path}: image_embedding_size is {stated!r}, but the tensors have {features}"
        )
    return {"options": {"region_size": features, **_streams(about)}}


_STREAMS = {
    "v_hidden_size": "image_hidden_size",
    "v_num_attention_heads": "image_heads",
    "v_intermediate_size": "image_intermediate_size",
    "co_hidden_size": "co_hidden_size",
    "co_num_attention_heads": "co_heads",
    "t_biattention_id": "text_layers_before",
    "v_biattention_id": "image_layers_before",
}
"""ERNIE-ViL's keys, as our options are called."""


def _streams(about: PaddleConfig) -> dict[str, Any]:
    """The further options of an ERNIE-ViL; empty for any other."""
    if about.kind != VIL:
        return {}
    if missing := [key for key in _STREAMS if key not in about.values]:
        raise UserError(f"{about.path}: has no {missing[0]}")
    return {ours: about.values[its] for its, ours in _STREAMS.items()}


def _document(
    values: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    about: PaddleConfig,
    scheme: NamingScheme,
) -> dict[str, Any]:
    """The values of an ERNIE-Doc that others do not have, and `sizes`; empty for any other. Its
    table of positions has two rows for each token of a window and one for each memory."""
    if "backbone.layers.0.distance_map.weight" not in entries:
        return {}
    where = str(about.path)
    check_only(
        values,
        {
            "cls_token_idx": (-1, None),
            "normalize_before": (False, None),
            "rel_pos_params_sharing": (False, None),
        },
        where,
    )
    memory, rows = values.get("memory_len"), _rows(entries, about, "position")
    if type(memory) is not int or not 0 < memory < rows or (rows - memory) % 2:
        raise UserError(
            f"{where}: memory_len: {memory!r} does not fit {rows} rows of positions, which are two "
            "for each token of a window and one for each memory"
        )
    nlp, drop = scheme in NLP_SCHEMES, values.get("attention_dropout_prob")
    return {
        "kind": DOC,
        "options": {"memory_length": memory, **({"masked_score": 1e8} if nlp else {})},
        "sizes": {"max_positions": (rows - memory) // 2},
        **({} if drop is None else {"attention_dropout": float(drop)}),
    }


def _token_types(entries: Mapping[str, TensorEntry], about: PaddleConfig) -> int:
    """The rows of the token type embedding; 1 if an UNIMO has none."""
    none = about.kind == UNIMO and SEGMENTS not in entries
    return 1 if none else _rows(entries, about, "segment")


def _relative_positions(
    values: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    about: PaddleConfig,
    scheme: NamingScheme,
) -> tuple[dict[str, Any], list[str]]:
    """The kind and the options of an encoder whose tensors have relative positions, with a note:
    those with which it computes what the program that wrote the tensors does. Without them an
    ERNIE-Gram is a Bert. Raises UserError if the tensors contradict the config."""
    table, stated = entries.get("backbone.relative_bias.weight"), values.get("rel_pos_size") or 0
    rows = table.shape[0] if table else 0
    if stated not in (rows, 0) or rows not in (GRAM_BUCKETS, 0):
        raise UserError(
            f"{about.path}: rel_pos_size: {stated or rows!r}, but the tensors have {rows} relative "
            f"positions; ERNIE-Gram's are {GRAM_BUCKETS}"
        )
    if table is None:
        plain = about.kind == GRAM
        return {}, ["no relative positions: the encoder is a Bert"] if plain else []
    change = "backbone.options of a run that starts from it may say otherwise"
    if scheme is PADDLENLP:
        why = f"PaddleNLP never adds the relative positions that it keeps; {change}"
        return {"kind": GRAM, "options": {"relative_positions": "kept"}}, [why]
    if scheme is STATIC and not values.get("has_sent_emb"):
        why = f"token types are not added, as in ERNIE outside reading comprehension; {change}"
        return {"kind": GRAM, "options": {"token_types": "kept"}}, [why]
    return {"kind": GRAM}, []


def _rows(entries: Mapping[str, TensorEntry], about: PaddleConfig, module: str) -> int:
    entry = entries.get(f"backbone.{module}.weight")
    if entry is None:
        raise UserError(f"{about.path}: its tensors are incomplete: no backbone.{module}.weight")
    return entry.shape[0]


def _check_sizes(
    values: Mapping[str, Any],
    sizes: Mapping[str, int],
    entries: Mapping[str, TensorEntry],
    about: PaddleConfig,
) -> None:
    """Raises UserError if the tensors contradict the config."""
    found = {
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["max_positions"],
        "num_hidden_layers": len([name for name in entries if _QKV.fullmatch(name)]),
    }
    for key, size in found.items():
        if key in values and values[key] != size:
            raise UserError(f"{about.path}: {key} is {values[key]!r}, but the tensors have {size}")


def _size_notes(values: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Notes on sizes where the tensors overrule the config."""
    segments = values.get(
        "sent_type_vocab_size", values.get("type_vocab_size", sizes["token_types"])
    )
    inner = values.get("intermediate_size", sizes["intermediate_size"])
    asked = values.get("use_task_id", values.get("use_task_emb", bool(sizes["task_types"])))
    notes = []
    if segments != sizes["token_types"]:
        notes.append(
            f"{sizes['token_types']} token types, as in the tensors; the config says {segments}"
        )
    if inner != sizes["intermediate_size"]:
        notes.append(
            f"intermediate_size {sizes['intermediate_size']}, as in the tensors; "
            f"the config says {inner}"
        )
    if bool(asked) != bool(sizes["task_types"]):
        there = f"{sizes['task_types']} task embeddings" if sizes["task_types"] else "none"
        notes.append(f"task embeddings: {there}, as in the tensors; the config says {asked!r}")
    return notes


def _eps(
    scheme: NamingScheme, palm: bool, about: PaddleConfig, asked: float | None
) -> tuple[float, str]:
    """The LayerNorm eps, and a note on its origin."""
    trained = "the released ERNIE models were trained with 1e-05 (palm-ds convert --eps 1e-5)"
    if asked is not None:
        return asked, f"LayerNorm eps {asked:g}, as requested"
    if palm or "use_task_emb" in about.values:
        return 1e-6, f"LayerNorm eps 1e-06, as PALM computes; {trained}"
    if about.path.name == "bert_config.json" and scheme is STATIC:
        why = "as Paddle's BERT computes; Google's was trained with 1e-12 (--eps 1e-12)"
        return 1e-5, f"LayerNorm eps 1e-05, {why}"
    if scheme is STATIC and (stated := about.values.get("epsilon")):
        return float(stated), f"LayerNorm eps {stated:g}, from {about.path.name}"
    if scheme not in NLP_SCHEMES:
        return 1e-5, "LayerNorm eps 1e-05, as ERNIE computes"
    family = FAMILIES.get(about.kind or "ernie")
    if family is not None and family.paddle_eps is not None:
        shown, program = (
            f"LayerNorm eps {family.paddle_eps:g}",
            f"PaddleNLP's {family.class_prefix}",
        )
        if family.paddle_eps == _ERNIES_EPS:
            return family.paddle_eps, f"{shown}, as {program} computes"
        return family.paddle_eps, f"{shown}, hard-coded in {program} since 2.3; {trained}"
    saved = about.values.get("layer_norm_eps", about.values.get("epsilon"))
    if saved is None:
        return 1e-12, "LayerNorm eps 1e-12, PaddleNLP's default"
    if not isinstance(saved, float | int) or isinstance(saved, bool):
        raise UserError(f"{about.path}: layer_norm_eps: expected a number, got {saved!r}")
    return float(saved), f"LayerNorm eps {saved:g}, from {about.path.name}"
