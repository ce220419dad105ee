"""How Hugging Face's Bert, Ernie and Roberta call our parameters.

One table, `table`, read in both directions. Query, key and value are one matrix here and three
there; the pooler of a Roberta classifier is a part of its head there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.contents import BUFFER, COPY, Entry, Head
from palm_ds.weights.formats.huggingface.families import FAMILIES
from palm_ds.weights.formats.tensor_files import TORCH_DTYPES, held

State = dict[str, torch.Tensor]
Names = dict[str, tuple[str, ...]]

# What the heads of an imported folder are called.
MASKED_WORDS, NEXT_SENTENCE, CLASSIFIER = "masked_words", "next_sentence", "classifier"
QUESTION_ANSWERING = "qa_outputs"

_EMBEDDINGS = {
    "word.weight": "embeddings.word_embeddings.weight",
    "position.weight": "embeddings.position_embeddings.weight",
    "segment.weight": "embeddings.token_type_embeddings.weight",
    "task.weight": "embeddings.task_type_embeddings.weight",
    "norm": "embeddings.LayerNorm",
}
_LAYER = {
    "project": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "output_norm": "output.LayerNorm",
}
_QKV = ("query", "key", "value")
_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_HEADS = re.compile(r"(cls|lm_head|classifier|qa_outputs)\.")


# ---- the table ----


def table(kind: str, layers: int, *, own_dense: bool = False) -> Names:
    """{our name: theirs, without the base model's prefix} of everything that may be there.

    `own_dense`: a Roberta classifier of whole texts, whose head holds what is our pooler.
    """
    stems: Names = {f"backbone.{ours}": (theirs,) for ours, theirs in _EMBEDDINGS.items()}
    for i in range(layers):
        prefix = f"encoder.layer.{i}"
        stems[f"backbone.layers.{i}.qkv"] = tuple(f"{prefix}.attention.self.{x}" for x in _QKV)
        for ours, theirs in _LAYER.items():
            stems[f"backbone.layers.{i}.{ours}"] = (f"{prefix}.{theirs}",)
    stems["backbone.pooler.dense"] = ("classifier.dense" if own_dense else "pooler.dense",)
    family = FAMILIES[kind]
    for ours, theirs in family.masked_lm.items():
        stems[f"heads.{MASKED_WORDS}.{ours}"] = (theirs,)
    if family.next_sentence:
        stems[f"heads.{NEXT_SENTENCE}.out"] = ("cls.seq_relationship",)
    stems[f"heads.{CLASSIFIER}.out"] = ("classifier.out_proj" if own_dense else "classifier",)
    stems[f"heads.{QUESTION_ANSWERING}.out"] = ("qa_outputs",)
    return dict(pair for ours, theirs in stems.items() for pair in _both_ends(ours, theirs))


def prefixed(name: str, kind: str) -> str:
    """As it is called in a file: parts of the base model begin with its name."""
    return name if _HEADS.match(name) else f"{kind}.{name}"


def _both_ends(ours: str, theirs: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """The weight and the bias of a map or LayerNorm; a table of rows and a lone bias are one."""
    if theirs[0].endswith((".weight", ".bias")):
        return [(ours, theirs)]
    return [(f"{ours}.{end}", tuple(f"{x}.{end}" for x in theirs)) for end in ("weight", "bias")]


def heads_in(entries: Mapping[str, Entry], *, pooled: Collection[str]) -> dict[str, Head]:
    """The heads under the names above. `pooled`: those over classes that read whole texts."""
    heads = {}
    if f"heads.{MASKED_WORDS}.bias" in entries:
        heads[MASKED_WORDS] = Head(kind="masked_words", pooled=False)
    for name in (NEXT_SENTENCE, CLASSIFIER, QUESTION_ANSWERING):
        if out := entries.get(f"heads.{name}.out.weight"):
            classes = out.shape[0] if out.shape else 0
            heads[name] = Head(kind="classes", classes=classes, pooled=name in pooled)
    return heads


# ---- from theirs to ours ----


def to_ours(
    found: Mapping[str, Entry], kind: str, layers: int, where: str
) -> tuple[dict[str, Entry], dict[str, str]]:
    """({our name: entry}, {their name: why it stays behind}) of the tensors of a file.

    `where` begins messages. Raises UserError where the output table is not the word table, and
    where one tensor is there under two names.
    """
    if layers > len(found):  # before there are as many names as somebody wrote
        raise UserError(f"{where}: incomplete: {layers} layers in {len(found)} tensors")
    theirs = _clean_names(found, kind, where)
    left = {theirs.pop(name).theirs[0]: BUFFER for name in _BUFFERS if name in theirs}
    left |= _drop_tied(theirs, where)
    own_dense = "classifier.out_proj.weight" in theirs
    entries: dict[str, Entry] = {}
    for ours, names in table(kind, layers, own_dense=own_dense).items():
        if missing := [name for name in names if name not in theirs]:
            if len(missing) < len(names):
                raise UserError(f"{where}: incomplete, it has no {prefixed(missing[0], kind)}")
            continue
        entries[ours] = _joined([theirs.pop(name) for name in names], where)
    return entries, left | {entry.theirs[0]: _why(name) for name, entry in sorted(theirs.items())}


def from_names(state: Mapping[str, torch.Tensor], kind: str) -> tuple[State, list[str]]:
    """Hugging Face's parameters under our names, and the names of what is none of ours.

    `kind` is the model_type.
    """
    found = {name: held(name, tensor) for name, tensor in state.items()}
    layers = {m[1] for m in (re.search(r"\bencoder\.layer\.(\d+)\.", x) for x in state) if m}
    entries, left = to_ours(found, kind, len(layers), "weights")
    return {ours: entry.read() for ours, entry in entries.items()}, lost(left)


def lost(left: Mapping[str, str]) -> list[str]:
    """The names of what stays behind and is nowhere else."""
    return sorted(name for name, why in left.items() if not why.startswith((BUFFER, COPY)))


def _joined(parts: Sequence[Entry], where: str) -> Entry:
    """A tensor of theirs, or three one below the other, as one of ours."""
    if len(parts) == 1:
        return replace(parts[0], read=lambda: _values(parts[0], where))
    rows = sum(part.shape[0] if part.shape else 0 for part in parts)
    how = ", ".join(["three in one", *filter(None, [parts[0].how])])
    return Entry(
        theirs=tuple(name for part in parts for name in part.theirs),
        shape=(rows, *parts[0].shape[1:]),
        read=lambda: torch.cat([_values(part, where) for part in parts]),
        how=how,
    )


def _values(entry: Entry, where: str) -> torch.Tensor:
    """Quantised weights mean nothing without their scales, which other tensors hold."""
    values = entry.read()
    if values.dtype not in TORCH_DTYPES.values():
        raise UserError(
            f"{where}: {entry.theirs[0]} is {values.dtype}; floating numbers are wanted"
        )
    return values


def _why(name: str) -> str:
    if name.startswith("pooler."):
        return "the classifier has a dense map of its own in the pooler's place"
    return "no place in this encoder and its heads"


def _clean_names(found: Mapping[str, Entry], kind: str, where: str) -> dict[str, Entry]:
    """Without the base model's prefix, and with today's names of a LayerNorm's parameters."""
    clean: dict[str, Entry] = {}
    for name, entry in found.items():
        short = name.removeprefix("module.").removeprefix(f"{kind}.")
        short = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", short)
        short = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", short)
        if short in clean:
            raise UserError(f"{where}: {name} and {clean[short].theirs[0]} are the same parameter")
        clean[short] = entry
    return clean


def _drop_tied(theirs: dict[str, Entry], where: str) -> dict[str, str]:
    left = {}
    for name, source in _TIED.items():
        copy = theirs.pop(name, None)
        if copy is None:
            continue
        if source not in theirs:
            theirs[source] = copy
            continue
        if not _same(copy, theirs[source]):
            raise UserError(
                f"{where}: {name} differs from {source}: this encoder's masked-word head has the "
                "word table itself, an output table of its own cannot be taken over"
            )
        left[copy.theirs[0]] = COPY + theirs[source].theirs[0]
    return left


def _same(one: Entry, other: Entry) -> bool:
    return one.shape == other.shape and torch.equal(one.read(), other.read())
