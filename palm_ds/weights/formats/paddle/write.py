"""Writes folders that PaddleNLP's from_pretrained opens: Ernie, Bert, Roberta, ErnieM, UNIMO.

    plan(entries, config, heads, target) ──> ExportPlan      names and shapes; no value is read yet
    write(plan, folder)    ──> model_state.pdparams, config.json, tokenizer files with vocab.txt
    write_paddle(state, folder, config)                      both, for weights in memory

The class, the folding of a task's embedding and the shift of positions are planned as for Hugging
Face (huggingface/plan.py); this module adds PaddleNLP's names and (in, out) matrices. The pickle is
written one tensor at a time, in the form that paddle.save writes (protocol 4, numpy arrays).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tokenizers import Tokenizer as Backend

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.model.config.config import EncoderConfig
from palm_ds.text.byte_level_bpe import is_roberta_bpe, write_byte_level_bpe
from palm_ds.text.sentencepiece_model import UNLISTED, is_ernie_m_backend, write_ernie_m
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.weights.formats.contents import USUAL, CheckpointContents, HeadInfo, TensorEntry
from palm_ds.weights.formats.format import Export, Format
from palm_ds.weights.formats.huggingface.architecture import NEXT_SENTENCE
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_for
from palm_ds.weights.formats.huggingface.plan import ExportPlan
from palm_ds.weights.formats.huggingface.plan import plan as hf_plan
from palm_ds.weights.formats.huggingface.sentence_transformers import modules_of
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.paddle import static
from palm_ds.weights.formats.paddle.config import ERNIE_M
from palm_ds.weights.formats.paddle.pdparams import NAME_TABLE
from palm_ds.weights.formats.paddle.read import open_contents, recognizes
from palm_ds.weights.formats.tensor_files import TensorGroup, read_json

WEIGHTS, CONFIG = "model_state.pdparams", "config.json"
_NAMES = (  # (part of a Hugging Face name, the same in PaddleNLP)
    (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"\.attention\.self\.(q)uery\.|\.attention\.self\.(k)ey\.|\.attention\.self\.(v)alue\.", ""),
    (r"\.attention\.output\.dense\.", ".self_attn.out_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".norm1."),
    (r"\.intermediate\.dense\.", ".linear1."),
    (r"(layers\.\d+)\.output\.dense\.", r"\1.linear2."),
    (r"(layers\.\d+)\.output\.LayerNorm\.", r"\1.norm2."),
    (r"embeddings\.LayerNorm\.", "embeddings.layer_norm."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "cls.predictions.layer_norm."),
    (r"^cls\.predictions\.transform\.dense\.", "cls.predictions.transform."),
    (r"^cls\.predictions\.bias$", "cls.predictions.decoder_bias"),
    (r"^qa_outputs\.", "classifier."),
)
_ALSO = {  # second names of the token embeddings and the bias, which PaddleNLP writes too
    "cls.predictions.decoder_bias": (
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    ),
    "lm_head.bias": ("lm_head.decoder.weight", "lm_head.decoder.bias"),
    "lm_head.decoder_bias": ("lm_head.decoder_weight", ""),
}
_SETTINGS = (
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "padding_side",
    "truncation_side",
    "additional_special_tokens",
    "add_prefix_space",
)
"""What PaddleNLP's tokenizers read from tokenizer_config.json, in addition to special tokens."""
_CHOICES = "2, which no checkpoint states; from_pretrained(..., num_choices=N) for another number"
_ROBERTA_BPE = "RobertaBPETokenizer"
_OWN_DECODER = "PaddleNLP's masked-LM head shares the token embeddings; this one has its own"
_ACTIVATIONS = ("gelu", "relu")
"""Those of ours that paddle.nn.functional has."""
_CODES = {torch.float32: "f4", torch.float16: "f2", torch.bfloat16: "u2"}


def plan(
    entries: Mapping[str, TensorEntry],
    config: EncoderConfig,
    heads: Mapping[str, HeadInfo],
    target: ExportOptions,
) -> ExportPlan:
    """Plan a PaddleNLP folder. Raises UserError if the options do not fit this encoder and its
    heads."""
    if target.head_class == "ForNextSentencePrediction":
        raise UserError("head_class: PaddleNLP has no ForNextSentencePrediction")
    families = architecture_for(config).families
    if not any(family.paddle_tokenizer for family in families.values()):
        raise UserError(f"PaddleNLP has no {config.kind} encoder; use --to huggingface")
    if target.family and not FAMILIES[target.family].paddle_tokenizer:
        raise UserError(f"family: {target.family} is not written for PaddleNLP; use roberta")
    untied = () if config.tie_word_embeddings else _masked_lm_heads(heads)
    heads = {
        name: head
        for name, head in heads.items()
        if name not in untied and not (head.outputs.images or head.outputs.averaged)
    }
    exported = hf_plan(entries, config, heads, target, prefix=True)
    if exported.architecture.endswith(
        "ForNextSentencePrediction"
    ):  # PaddleNLP has no class for this head alone
        rest = {name: head for name, head in heads.items() if name != NEXT_SENTENCE}
        exported = hf_plan(entries, config, rest, target, prefix=True)
    _check_eps(exported)
    if config.activation not in _ACTIVATIONS:
        raise UserError(
            f"activation: PaddleNLP has no {config.activation}; it has {', '.join(_ACTIVATIONS)}"
        )
    named = exported.architecture.replace("ForPreTraining", "ForPretraining")
    more = {"architectures": [named], "pool_act": "tanh", "paddlenlp_version": None}
    created = {paddle_name(name): what for name, what in exported.created.items()}
    if named.endswith("ForMultipleChoice"):
        more["num_choices"] = 2
        created["num_choices"] = _CHOICES
    return replace(
        exported,
        config_json={**exported.config_json, **more},
        groups=tuple(_turned(group) for group in exported.groups),
        created=created,
        skipped={
            name: _OWN_DECODER if name.split(".")[1] in untied else _why(why, named)
            for name, why in exported.skipped.items()
        },
    )


def _masked_lm_heads(heads: Mapping[str, HeadInfo]) -> tuple[str, ...]:
    return tuple(name for name, head in heads.items() if head.kind == "masked_words")


def _check_eps(plan: ExportPlan) -> None:
    """Raises UserError if PaddleNLP would compute with another eps than the model."""
    family = FAMILIES[plan.config_json["model_type"]]
    if family.paddle_eps not in (None, plan.config.layer_norm_eps):
        raise UserError(
            f"eps: PaddleNLP's {family.class_prefix} always computes with a LayerNorm eps of "
            f"{family.paddle_eps:g}, whatever its config says, but this model has "
            f"{plan.config.layer_norm_eps:g}; accept the change with --eps {family.paddle_eps:g}, "
            "or write a Bert, which keeps the model's eps (--family bert, with one task's "
            "embedding folded in)"
        )


def write(plan: ExportPlan, folder: Path, *, tokenizer: Tokenizer | None = None) -> None:
    """Fill an empty folder, one tensor at a time. The caller publishes it. Raises UserError if a
    weight is NaN or infinite, or too large for the dtype."""
    write_json(folder / CONFIG, plan.config_json)
    with (folder / WEIGHTS).open("wb") as file:
        write_pickle(file, plan.groups, plan.dtype, _second_names(plan))
    if tokenizer is not None:
        tokenizer.save(folder)
        _name_tokenizer(folder, plan)


def why_no_tokenizer(tokenizer: Tokenizer, family: str) -> str:
    """The reason PaddleNLP has no class for a tokenizer of this family; empty if it has one."""
    if family == ERNIE_M and is_ernie_m_backend(tokenizer.backend):
        return ""
    if tokenizer.kind == "wordpiece" or is_roberta_bpe(tokenizer.backend):
        if tokenizer.kind == "wordpiece" and tokenizer.has_line_breaks:
            return "one of its tokens is a line break, which vocab.txt cannot hold"
        return ""
    return (
        f"PaddleNLP reads WordPiece from vocab.txt and RoBERTa's byte-level BPE; this one is "
        f"{tokenizer.kind}, and in tokenizer.json, which palm_ds and transformers read"
    )


def _name_tokenizer(folder: Path, plan: ExportPlan) -> None:
    """Write the vocabulary and the settings as PaddleNLP reads them, if it has such a class."""
    path = folder / "tokenizer_config.json"
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    listed = plan.config_json["model_type"] == ERNIE_M and is_ernie_m_backend(backend)
    if bpe := is_roberta_bpe(backend):
        write_byte_level_bpe(backend, folder)
    elif listed:
        write_ernie_m(backend, folder, read_json(path).get(UNLISTED, ()))
    elif not (folder / "vocab.txt").is_file():
        return
    saved = read_json(path)
    kept = {
        key: value for key, value in saved.items() if key.endswith("_token") or key in _SETTINGS
    }
    if special := _further_special(folder, kept):
        kept["additional_special_tokens"] = special
    named = FAMILIES[plan.config_json["model_type"]].paddle_tokenizer
    if bpe:
        named = _ROBERTA_BPE
    elif saved.get("strip_accents") is not None or saved.get("tokenize_chinese_chars") is False:
        named = "BertTokenizer"  # ErnieTokenizer has no such settings
    longest = min(saved.get("model_max_length", plan.config.max_length), plan.config.max_length)
    write_json(path, {"tokenizer_class": named, **kept, "model_max_length": longest})


def _further_special(folder: Path, saved: Mapping[str, Any]) -> list[str]:
    """The special tokens that no setting names: it does not read tokenizer.json."""
    roles = {value for key, value in saved.items() if key.endswith("_token")}
    added = read_json(folder / "tokenizer.json")["added_tokens"]
    texts = [token["content"] for token in added if token["special"]]
    listed = saved.get("additional_special_tokens") or []
    return list(dict.fromkeys([*listed, *(text for text in texts if text not in roles)]))


def paddle_name(name: str) -> str:
    """PaddleNLP's name for a Hugging Face tensor."""
    for hf_pattern, paddle_pattern in _NAMES:
        name = re.sub(hf_pattern, paddle_pattern or _attention, name)
    return name


def _attention(match: re.Match[str]) -> str:
    letter = next(group for group in match.groups() if group)
    return f".self_attn.{letter}_proj."


def _turned(group: TensorGroup) -> TensorGroup:
    """The group with PaddleNLP's names and (in, out) matrices."""
    names = tuple(map(paddle_name, group.names))
    if len(group.shape) != 2 or names[0].endswith(("_embeddings.weight", "_emb.weight")):
        return replace(group, names=names)
    transform = f"{group.transform}, transposed" if group.transform else "transposed"

    def make() -> Sequence[torch.Tensor]:
        return [tensor.T for tensor in group.make()]

    return replace(group, names=names, shape=group.shape[::-1], make=make, transform=transform)


def _why(why: str, architecture: str) -> str:
    return f"no place in {architecture}" if why.startswith("no place in") else why


def _second_names(plan: ExportPlan) -> dict[str, str]:
    """{second name: tensor} of the tied tensors."""
    names = {name for group in plan.groups for name in group.names}
    words = f"{plan.config_json['model_type']}.embeddings.word_embeddings.weight"
    copies = {}
    for bias, (table, copy) in _ALSO.items():
        if bias in names:
            copies |= {table: words} | ({copy: bias} if copy else {})
    return copies


# ---- the pickle ----


def write_pickle(
    file: BinaryIO,
    groups: Sequence[TensorGroup],
    dtype: torch.dtype,
    second_names: Mapping[str, str],
) -> None:
    """Write a state as paddle.save does: a dict of numpy arrays with the table of their names."""
    file.write(b"\x80\x04}")
    kept: dict[str, int] = {}  # index of each array in pickle's memo
    for name, shape, make in _tensors(groups):
        file.write(_text(name) + _array_head(shape, dtype))
        data = _bytes(name, make(), dtype)
        file.write(b"\x8e" + struct.pack("<Q", data.nbytes))
        file.write(data)
        file.write(b"tb\x94s")  # build the array from the state, memoize it, set it in the dict
        kept[name] = len(kept)
    for name, same in second_names.items():
        file.write(_text(name) + b"j" + struct.pack("<I", kept[same]) + b"s")
    names = {**dict.fromkeys(kept), **second_names}
    table = b"".join(_text(name) + _text(same or name) for name, same in names.items())
    file.write(_text(NAME_TABLE) + b"}(" + table + b"us.")


def _tensors(
    groups: Sequence[TensorGroup],
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], torch.Tensor]]]:
    for group in groups:
        made: list[torch.Tensor] = []  # of this group, from its first name to its last
        for i, name in enumerate(group.names):

            def make(i: int = i, group: TensorGroup = group, made: list = made) -> torch.Tensor:
                if not made:
                    made.extend(group.make())
                return made[i]

            yield name, group.shape, make


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(number: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", number)


def _array_head(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """The start of numpy's pickle of an array: everything but the values. The module has its name
    from numpy 1, which numpy 2 knows too."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    kind = b"cnumpy\ndtype\n" + _text(_CODES[dtype]) + b"\x89\x88\x87R"
    kind += b"(K\x03" + _text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    sizes = b"(" + b"".join(map(_integer, shape)) + b"t"
    return empty + b"(K\x01" + sizes + kind + b"\x89"


def _bytes(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    result = tensor.detach().to(dtype).contiguous()
    if not bool(result.isfinite().all()):
        large = bool(tensor.isfinite().all())
        what = f"too large for {dtype}" if large else "not finite (NaN or infinite)"
        raise UserError(f"{name}: has values that are {what}")
    return result.reshape(-1).view(torch.uint8).numpy().data


def _export(contents: CheckpointContents, target: ExportOptions) -> Export:
    if static.reads_images(contents.config) and not target.family:
        return _export_static(contents, target)
    planned = plan(contents.entries, contents.config, contents.heads, target)
    stated = modules_of(contents)
    usual = stated.is_usual(contents.config.max_length)
    why = f"{USUAL}; " if usual else ""
    behind = dict.fromkeys(contents.extras.files, f"{why}PaddleNLP has no sentence-transformers")
    tokenizer = contents.text_tokenizer or contents.tokenizer
    family = planned.config_json["model_type"]
    if tokenizer and (why := why_no_tokenizer(load_tokenizer(tokenizer), family)):
        behind["tokenizer"] = why
    planned = replace(planned, skipped={**planned.skipped, **behind})

    def fill(folder: Path, tokenizer: Tokenizer | None) -> None:
        write(planned, folder, tokenizer=tokenizer)

    return Export(write=fill, plan=planned)


def _export_static(contents: CheckpointContents, target: ExportOptions) -> Export:
    planned = static.plan(contents.entries, contents.config, contents.heads, target)

    def fill(folder: Path, tokenizer: Tokenizer | None) -> None:
        static.write(planned, folder, tokenizer)

    return Export(write=fill, plan=planned)


FORMAT = Format(
    name="paddle",
    looks_for="Paddle: *.pdparams, params/, or a combined file, with ernie_config.json or similar",
    recognizes=recognizes,
    open=open_contents,
    export=_export,
)
