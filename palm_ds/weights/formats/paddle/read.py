"""Reads checkpoints of ERNIE, PALM and PaddleNLP, in every naming scheme, without Paddle.

    open_contents("ERNIE_Base_en_stable-2.0.0")             params/ + ernie_config.json + vocab.txt
    open_contents("saved_weights.pdparams", eps=1e-5)
    open_contents("__params__", config=Path("ernie_config.json"))

locate.py finds the tensors, names.py maps their names, config.py derives the encoder's config.
Settings that a config file lacks, or that the program that wrote it ignored, above all LayerNorm's
eps, are chosen by the origin of the weights and listed in `notes`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.weights.formats.contents import (
    COPY,
    NO_POOLER,
    OPTIMIZER,
    CheckpointContents,
    HeadInfo,
    TensorEntry,
)
from palm_ds.weights.formats.expected_shapes import TRANSITIONS, checked
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    MASKED_WORDS,
    QUESTION_ANSWERING,
    SEGMENTS,
    TASKS,
)
from palm_ds.weights.formats.huggingface.families import FAMILIES
from palm_ds.weights.formats.paddle.config import (
    DOC,
    ERNIE_M,
    GRAM,
    UNIMO,
    VIL,
    PaddleConfig,
    find_vocabulary,
    numbers,
    read_paddle_config,
)
from palm_ds.weights.formats.paddle.dialogue import join_roles_and_turns
from palm_ds.weights.formats.paddle.locate import PaddleFiles, check_alone, find, tensors
from palm_ds.weights.formats.paddle.names import (
    NAMING_SCHEMES,
    NLP_SCHEMES,
    OWN_POOLER,
    STATIC,
    NamingScheme,
    TensorRole,
)

PALM_PREFIX = "__paddlepalm_"
_QKV = ("query", "key", "value")
_WORDS_PARTS = ("dense.weight", "dense.bias", "norm.weight", "norm.bias", "bias")
_CLASSES_PARTS = ("out.weight", "out.bias")
_REGION_PARTS = ("score.weight", "score.bias")
_UNTIED = "its head has untied output embeddings"
_OF_OPTIMIZER = re.compile(
    r".+_(moment[12]?|velocity|beta[12]_pow_acc|mean_square|mean_grad|momentum)_\d+(\.master)?"
    r"|learning_rate_\d+|@LR_DECAY_COUNTER@|loss_scaling_\d+|num_(good|bad)_steps_\d+"
)


def recognizes(path: Path) -> bool:
    """Whether the path is a Paddle checkpoint: a file, or a folder that contains one."""
    return find(Path(path)) is not None


def open_contents(
    path: Path,
    *,
    eps: float | None = None,
    prefix: str | None = None,
    config: Path | None = None,
    names: Sequence[str] = (),
) -> CheckpointContents:
    """Open a folder or a file.

    `eps`: LayerNorm's; by default what the program that wrote the checkpoint computes with.
    `prefix`: of the encoder's names, if there are several encoders. `config`: the config file, if
    it is somewhere else. `names`: of a combined file's variables, if they are unusual.
    """
    path = Path(path)
    source = find(path)
    if source is None:
        what = "contains no Paddle checkpoint" if path.exists() else "no such file or folder"
        raise UserError(f"{path}: {what}")
    check_alone(source, path)
    about = read_paddle_config(source.folder, config)
    known, others = tensors(source, about.values, names)
    sorted_out = _sort(known, source, prefix)
    about = replace(about, values={**about.values, "model_type": _model_type(sorted_out, about)})
    made = _make(known, sorted_out, source)
    if about.kind == ERNIE_M:
        _add_token_type(made, source)
    if about.kind == DOC and TASKS in made.entries:  # PaddleNLP calls them token types, as we do
        made.entries[SEGMENTS] = made.entries.pop(TASKS)
    own, notes = numbers(made.entries, about, sorted_out.scheme, palm=sorted_out.palm, eps=eps)
    heads = _heads(made, about, sorted_out.roles)
    skipped = {**{name: f"not a tensor: {what}" for name, what in others.items()}, **made.skipped}
    contents = CheckpointContents(
        path=path,
        format=f"{_title(sorted_out, about, own)}, {source}",
        config=own,
        entries=made.entries,
        heads=heads,
        skipped=skipped,
        tokenizer=find_vocabulary(source.folder, own.vocab_size or 0),
        notes=(*notes, *made.notes, *_head_notes(heads, made.entries, about)),
    )
    return checked(contents)


def _model_type(sorted_out: _ClassifiedTensors, about: PaddleConfig) -> str:
    """The model type: that of the config, unless it states none or the tensors know better.

    ERNIE's static graph names no type; its encoders without token types are UNIMO, if they have
    parts for images or a pooler for texts, and ERNIE-M. PaddleNLP's UNIMO calls itself a bert.
    """
    if sorted_out.base == UNIMO:
        return UNIMO
    if about.kind or sorted_out.base in FAMILIES:
        return about.kind or sorted_out.base
    modules = {role.name.split(".")[1] for role in sorted_out.roles.values()}
    if "position_norm" in modules:
        return DOC
    if "co_layers" in modules:
        return VIL
    if sorted_out.scheme is not STATIC or modules & {"segment", "role", "relative_bias"}:
        return ""
    named = about.path.name.startswith(UNIMO) or any(
        key.startswith("image_") for key in about.values
    )
    return UNIMO if named or sorted_out.with_images else ERNIE_M


def _add_token_type(made: _ConvertedTensors, source: PaddleFiles) -> None:
    """Add the token type of an XLM-RoBERTa, which ERNIE-M has none of. Raises UserError if there is
    one."""
    if SEGMENTS in made.entries:
        raise UserError(f"{source.path}: an ERNIE-M has no token types, but this one has")
    words = made.entries["backbone.word.weight"]
    shape = (1, *words.shape[1:])
    made.entries[SEGMENTS] = TensorEntry(
        source_names=(),
        shape=shape,
        read=lambda: torch.zeros(shape, dtype=words.read().dtype),
        transform="zeros: ERNIE-M has no token types",
    )


# ---- naming schemes ----


@dataclass(frozen=True, kw_only=True)
class _ClassifiedTensors:
    """The naming scheme of the tensors, and the role of each."""

    scheme: NamingScheme
    base: str
    """Prefix of the encoder's names; in PaddleNLP it is the architecture."""
    palm: bool
    roles: dict[str, TensorRole]
    skipped: dict[str, str]

    @property
    def with_images(self) -> bool:
        """Whether the encoder reads images too."""
        return any(
            role.name.startswith("backbone.region") or name.startswith("pooled_fc_text")
            for name, role in self.roles.items()
        )


def _sort(
    stored: Mapping[str, TensorEntry], source: PaddleFiles, prefix: str | None
) -> _ClassifiedTensors:
    scheme, prefix = _naming_scheme(stored, source, prefix)
    skipped = {name: OPTIMIZER for name in stored if _OF_OPTIMIZER.fullmatch(name)}
    roles: dict[str, TensorRole] = {}
    for name in stored:
        if name in skipped:
            continue
        bare = name.removesuffix(".master")
        if name == bare and f"{name}.master" in stored:
            skipped[name] = f"{COPY}{name}.master in half precision"
        elif role := scheme.role(_bare(bare, prefix)):
            roles[name] = role
        else:
            skipped[name] = "no place in this encoder and its heads"
    palm = source.layout == "archive" or any(
        name.startswith(PALM_PREFIX) or re.match(r".+\.(mask_lm_|cls_\w*out_|crfw)", name)
        for name in stored
    )
    base = prefix.strip(".").rpartition(".")[2]
    return _ClassifiedTensors(
        scheme=scheme, base=base, palm=scheme is STATIC and palm, roles=roles, skipped=skipped
    )


def _naming_scheme(
    names: Collection[str], source: PaddleFiles, prefix: str | None
) -> tuple[NamingScheme, str]:
    """The naming scheme and the encoder's prefix, recognized by the token embeddings."""
    for scheme in NAMING_SCHEMES:
        tables = [name for name in names if name.endswith(scheme.word)]
        if prefix is not None:
            tables = [name for name in tables if name == prefix + scheme.word]
        befores = [name.removesuffix(scheme.word) for name in tables]
        befores = [x for x in befores if x in ("", PALM_PREFIX) or x.endswith((".", "_"))]
        if len(befores) > 1:
            shown = " and ".join(map(repr, befores[:4]))
            raise UserError(f"{source.path}: has encoders at {shown}; give one as prefix=")
        if befores:
            return scheme, befores[0]
    at = f" with prefix {prefix!r}" if prefix else ""
    wanted = " or ".join(scheme.word for scheme in NAMING_SCHEMES)
    raise UserError(
        f"{source.path}: no token embeddings{at} among {len(names)} tensors; expected {wanted}"
    )


def _bare(name: str, prefix: str) -> str:
    """The name without the encoder's prefix; heads are one level above the encoder."""
    if name.startswith(prefix):
        return name.removeprefix(prefix)
    outer = prefix.rstrip(".").rpartition(".")[0]
    return name.removeprefix(f"{outer}." if outer else "").removeprefix(PALM_PREFIX)


# ---- Paddle to palm_ds ----


@dataclass(kw_only=True)
class _ConvertedTensors:
    """palm_ds tensors, and why the others are skipped."""

    entries: dict[str, TensorEntry]
    skipped: dict[str, str]
    notes: list[str]


def _make(
    stored: Mapping[str, TensorEntry], sorted_out: _ClassifiedTensors, source: PaddleFiles
) -> _ConvertedTensors:
    roles = dict(sorted_out.roles)
    skipped = dict(sorted_out.skipped)
    _give_the_one_name(roles)
    _give_the_bias_its_name(roles)
    skipped |= _drop_other_pooler(roles)
    skipped |= _drop_copies(stored, roles)
    skipped |= _drop_narrow_heads(stored, roles)
    skipped |= _drop_broken_heads(roles)
    source_of: dict[str, str] = {}
    for name, role in roles.items():
        if role.name in source_of:
            raise UserError(
                f"{source.path}: {source_of[role.name]} and {name} are the same parameter"
            )
        source_of[role.name] = name
    entries = {}
    for palm_name, name in source_of.items():
        target = re.sub(r"\.(query|key|value)\.", ".qkv.", palm_name)
        if target not in entries:
            parts = [re.sub(r"\.qkv\.", f".{x}.", target) for x in _QKV]
            parts = parts if target != palm_name else [palm_name]
            if missing := [part for part in parts if part not in source_of]:
                raise UserError(f"{source.path}: incomplete, it has {name} but no {missing[0]}")
            pieces = [stored[source_of[part]] for part in parts]
            entries[target] = _entry(pieces, roles[name].transposed, source)
    join_roles_and_turns(entries, source.path)
    notes = [why for why in dict.fromkeys(skipped.values()) if why.startswith(_UNTIED)]
    return _ConvertedTensors(entries=entries, skipped=skipped, notes=notes)


def _entry(pieces: list[TensorEntry], transposed: bool, source: PaddleFiles) -> TensorEntry:
    """One palm_ds tensor from one or three Paddle tensors."""
    shapes = [piece.shape for piece in pieces]
    if len(set(shapes)) > 1 or (transposed and len(shapes[0]) != 2) or not shapes[0]:
        names = " + ".join(piece.source_names[0] for piece in pieces)
        found, wanted = (
            " + ".join(map(str, shapes)),
            "a matrix" if transposed else "at least one dimension",
        )
        each = ", each of the same shape" if len(pieces) > 1 else ""
        raise UserError(f"{source.path}: {names}: expected {wanted}{each}, got shape {found}")
    shape = shapes[0][::-1] if transposed else shapes[0]

    def read() -> torch.Tensor:
        read = [piece.read() for piece in pieces]
        turned = [x.T if transposed else x for x in read]
        return torch.cat(turned) if len(turned) > 1 else turned[0].contiguous()

    how = ["three in one"] if len(pieces) > 1 else []
    return TensorEntry(
        source_names=tuple(name for piece in pieces for name in piece.source_names),
        shape=(shape[0] * len(pieces), *shape[1:]),
        read=read,
        transform=", ".join([*how, "transposed"] if transposed else how),
    )


def _head(role: TensorRole) -> str:
    return role.name.split(".")[1] if role.name.startswith("heads.") else ""


def _heads_of(roles: Mapping[str, TensorRole]) -> list[str]:
    return sorted({_head(role) for role in roles.values()} - {""})


def _part(role: TensorRole) -> str:
    return role.name.split(".", 2)[2]


def _give_the_one_name(roles: dict[str, TensorRole]) -> None:
    """PALM names a masked-LM head after its trainer; a single one gets the usual name."""
    own = {_head(role) for role in roles.values() if _head(role) and _part(role) == "dense.weight"}
    if len(own) != 1 or own == {MASKED_WORDS}:
        return
    before = f"heads.{own.pop()}."
    for name, role in roles.items():
        if role.name.startswith(before) and not _part(role).startswith("out."):
            new_name = f"heads.{MASKED_WORDS}.{role.name.removeprefix(before)}"
            roles[name] = replace(role, name=new_name)


def _give_the_bias_its_name(roles: dict[str, TensorRole]) -> None:
    """Rename a tied bias that is only present under its second name."""
    names = {role.name for role in roles.values()}
    for name, role in roles.items():
        if _head(role) and _part(role) == "bias_copy":
            bias = role.name.removesuffix("_copy")
            if bias not in names:
                roles[name] = replace(role, name=bias)


def _drop_other_pooler(roles: dict[str, TensorRole]) -> dict[str, str]:
    """Remove the encoder's pooler from `roles` if the classifier has its own; {name: why}."""
    poolers = [name for name, role in roles.items() if ".pooler." in role.name]
    own = [name for name in poolers if OWN_POOLER in name]
    skipped = {
        name: "the classifier has its own pooler" for name in poolers if own and name not in own
    }
    for name in skipped:
        del roles[name]
    return skipped


def _drop_copies(stored: Mapping[str, TensorEntry], roles: dict[str, TensorRole]) -> dict[str, str]:
    """Remove copies of tied tensors, and heads with untied output embeddings, from `roles`;
    {name: why}."""
    skipped = {}
    word = next(name for name, role in roles.items() if role.name == "backbone.word.weight")
    for head in _heads_of(roles):
        parts = {name: _part(role) for name, role in roles.items() if _head(role) == head}
        for name in [name for name, part in parts.items() if part == "table"]:
            if _same(stored[name], stored[word]):
                skipped[name] = COPY + word
                continue
            why = f"{_UNTIED} {name}; palm_ds's masked-LM head shares the token embeddings"
            skipped |= dict.fromkeys(parts, why)
        skipped |= _biases_twice(stored, parts)
    for name in skipped:
        roles.pop(name, None)
    return skipped


def _biases_twice(stored: Mapping[str, TensorEntry], parts: Mapping[str, str]) -> dict[str, str]:
    bias = next((name for name, part in parts.items() if part == "bias"), "")
    copies = [name for name, part in parts.items() if part == "bias_copy"]
    same = {name: _same(stored[name], stored[bias]) for name in copies}
    return {name: COPY + bias if same[name] else f"differs from {bias}" for name in copies}


def _same(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors are equal; the first may be transposed."""
    if sorted(one.shape) != sorted(other.shape):
        return False
    a = one.read()
    b = other.read().to(a.dtype)
    return (a.shape == b.shape and torch.equal(a, b)) or (
        a.ndim == 2 and a.T.shape == b.shape and torch.equal(a.T, b)
    )


def _drop_narrow_heads(
    stored: Mapping[str, TensorEntry], roles: dict[str, TensorRole]
) -> dict[str, str]:
    """Remove masked-LM heads with output embeddings of another width than the encoder from `roles`,
    as ERNIE-Gram's are; {name: why}."""
    skipped = {}
    for head in _heads_of(roles):
        parts = {_part(role): name for name, role in roles.items() if _head(role) == head}
        dense = stored.get(parts.get("dense.weight", ""))
        if dense is not None and len(set(dense.shape)) > 1:
            why = f"its head makes vectors of {min(dense.shape)} values, not of the encoder's size"
            skipped |= dict.fromkeys(parts.values(), why)
    for name in skipped:
        del roles[name]
    return skipped


def _drop_broken_heads(roles: dict[str, TensorRole]) -> dict[str, str]:
    """Remove incomplete heads from `roles`; {name: why}."""
    skipped = {}
    for head in _heads_of(roles):
        parts = {_part(role): name for name, role in roles.items() if _head(role) == head}
        forms = (x for x in (_CLASSES_PARTS, _REGION_PARTS) if set(parts) & set(x))
        wanted = next(forms, _WORDS_PARTS)
        if missing := [part for part in wanted if part not in parts]:
            skipped |= dict.fromkeys(
                parts.values(), f"its head is incomplete, it has no {missing[0]}"
            )
    for name in skipped:
        del roles[name]
    return skipped


# ---- heads ----


def _heads(
    made: _ConvertedTensors, about: PaddleConfig, roles: Mapping[str, TensorRole]
) -> dict[str, HeadInfo]:
    """The complete heads; PaddleNLP's span classifier is renamed."""
    if about.model.endswith("ForQuestionAnswering"):
        _rename_head(made, CLASSIFIER, QUESTION_ANSWERING)
    of_tokens = {_head(role) for role in roles.values() if not role.pooled}
    of_tokens |= {_head(role) for role in roles.values() if role.name.endswith(TRANSITIONS)}
    of_tokens.add(QUESTION_ANSWERING)
    if about.model.endswith("ForTokenClassification"):
        of_tokens.add(CLASSIFIER)
    heads = {}
    names = " ".join(made.entries)
    for palm_name, entry in made.entries.items():
        _, name, part = palm_name.split(".", 2) if palm_name.startswith("heads.") else ("", "", "")
        if part == "bias":
            heads[name] = HeadInfo(kind="masked_words")
        elif part == "out.weight":
            count, pooled = entry.shape[0], name not in of_tokens
            outputs = about.outputs(count) if name == CLASSIFIER else HeadOutputs()
            crf = f"heads.{name}.{TRANSITIONS}" in made.entries
            inside = made.entries.get(f"heads.{name}.hidden.bias")
            with_images = pooled and ("backbone.co_layers" in names or inside is not None)
            heads[name] = HeadInfo(
                kind="classes",
                classes=count,
                pooled=pooled,
                transitions=crf,
                hidden=inside.shape[0] if inside else 0,
                outputs=replace(outputs, images=with_images),
            )
    return heads


def _rename_head(made: _ConvertedTensors, old: str, new: str) -> None:
    before = f"heads.{old}."
    for palm_name in [name for name in made.entries if name.startswith(before)]:
        made.entries[f"heads.{new}.{palm_name.removeprefix(before)}"] = made.entries.pop(palm_name)


def _head_notes(
    heads: Mapping[str, HeadInfo], entries: Mapping[str, TensorEntry], about: PaddleConfig
) -> list[str]:
    notes = []
    if "backbone.pooler.dense.weight" not in entries:
        notes.append(NO_POOLER)
    if CLASSIFIER in heads and not about.model:
        reads = "whole texts" if heads[CLASSIFIER].pooled else "tokens"
        notes.append(f"the config names no class: assuming that the classifier reads {reads}")
    return notes


def _title(sorted_out: _ClassifiedTensors, about: PaddleConfig, config: EncoderConfig) -> str:
    if sorted_out.palm:
        return "PALM"
    if sorted_out.scheme in NLP_SCHEMES and about.model:
        return f"PaddleNLP {about.model}"
    unimo = "UNIMO, texts and images" if config.options.get("region_size") else "UNIMO's text side"
    named = {DOC: "ERNIE-Doc", GRAM: "ERNIE-Gram", ERNIE_M: "ERNIE-M", UNIMO: unimo}
    named |= {VIL: "ERNIE-ViL, texts and images"}
    which = named.get(config.kind) or named.get(about.kind)
    return ", ".join(filter(None, [sorted_out.scheme.title, which]))
