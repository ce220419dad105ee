"""Chooses what a Hugging Face folder will be: its family, its class and its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import PositiveInt

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Settings, one_of
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.pooling import TextPooling
from palm_ds.weights.formats.contents import HeadInfo, TensorEntry
from palm_ds.weights.formats.expected_shapes import expected_shapes
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    CROSS_ENCODER,
    HEAD_CLASSES,
    MASKED_WORDS,
    NEXT_SENTENCE,
    QUESTION_ANSWERING,
    REPLACED_TOKENS,
    Architecture,
    Family,
)
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_for, architecture_of

DTYPES = ("float32", "float16", "bfloat16")


BARE = "Model"
"""The class of an encoder without heads."""
_ENCODERS = (BARE, "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Settings):
    """Options of an export."""

    family: Annotated[str, one_of(FAMILIES, "")] = ""
    """bert, roberta, modernbert, ... (families.py); empty: the one that computes the same, which is
    ernie for a bert encoder with task embeddings."""
    task_id: int = 0
    """The row of the task embedding that becomes the default (ernie) or is folded into other
    embeddings (all others)."""
    head: str = ""
    """The classification head to write, as the only head; empty: the masked-LM and next-sentence
    heads, or an imported classifier if it is the only head."""
    head_class: Annotated[str, one_of(HEAD_CLASSES, BARE, "")] = ""
    """ForSequenceClassification, ForTokenClassification, ...: the class to write `head` as; Model:
    the encoder alone; empty: chosen by what `head` reads, and its shape."""
    words: str = ""
    """The masked-LM head to write; empty: the first."""
    dtype: Annotated[str, one_of(DTYPES, "")] = "float32"
    """float32, float16, bfloat16; empty: the one that holds all tensors."""
    pooling: TextPooling | None = TextPooling()
    """How texts become vectors, for a model without a classification head; None: not stated."""
    max_shard_bytes: PositiveInt = 5 * 10**9
    """Largest size of one weight file; larger models are sharded."""


@dataclass(frozen=True, kw_only=True)
class ResolvedExport:
    """The class that is written, and its heads."""

    kind: str
    ending: str
    heads: Mapping[str, str]
    """{palm_ds head: its name in names.py}"""

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def form(self) -> Architecture:
        return architecture_of(self.kind)

    @property
    def layout(self) -> str:
        """The ending of the class of transformers whose tensors are in the file of the encoder."""
        return BARE if self.ending == CROSS_ENCODER else self.ending

    @property
    def architecture(self) -> str:
        """The name of that class."""
        return self.family.class_name(self.layout)

    @property
    def embeds(self) -> bool:
        """Whether it is an encoder that texts may be embedded with: it has no other use."""
        return self.ending in _ENCODERS


def resolve_export(
    config: EncoderConfig, heads: Mapping[str, HeadInfo], target: ExportOptions
) -> ResolvedExport:
    """Choose a class that this encoder and its heads fill completely."""
    kind = family_to_write(config, target.family)
    if target.head_class == BARE:
        if target.head:
            raise UserError(
                f"head_class: {BARE} is the encoder without a head; leave out head {target.head}"
            )
        return ResolvedExport(kind=kind, ending=BARE, heads={})
    name = target.head or _only_head(heads, target)
    if name:
        ending = target.head_class or _usual_class(name, heads)
        _check_class(name, heads, kind, ending)
        return ResolvedExport(kind=kind, ending=ending, heads={name: HEAD_CLASSES[ending].name})
    detecting = {name: REPLACED_TOKENS for name in _detection(heads, target)}
    if detecting and (ending := architecture_of(kind).detection):
        return ResolvedExport(kind=kind, ending=ending, heads=detecting)
    beside = detecting if architecture_of(kind).detection_beside else {}
    chosen: dict[str, str] = {}
    if words := _words(heads, target):
        if not FAMILIES[kind].has_masked_lm(config):
            words = ""
        else:
            chosen[words] = MASKED_WORDS
    pair_head = FAMILIES[kind].pair_head
    pair = heads.get(pair_head)
    fits = (
        pair and (pair.classes, pair.pooled) == (2, True) and not reads_another(pair, kind, target)
    )
    alone = HEAD_CLASSES["ForNextSentencePrediction"].name == pair_head  # it has a class alone
    if fits and (words or alone):
        chosen[pair_head] = pair_head
    only = "ForMaskedLM" if words else "ForNextSentencePrediction" if chosen else BARE
    ending = "ForPreTraining" if len(chosen) == 2 else only
    return ResolvedExport(kind=kind, ending=ending, heads={**chosen, **beside})


def reads_another(head: HeadInfo, kind: str, target: ExportOptions) -> bool:
    """Whether the head's texts had another row of the task embedding than the one folded in."""
    return not FAMILIES[kind].task_embedding and head.task_id not in (None, target.task_id)


def check_whole(
    chosen: ResolvedExport,
    heads: Mapping[str, HeadInfo],
    entries: Mapping[str, TensorEntry],
    config: EncoderConfig,
) -> None:
    """Raises UserError if a part of the chosen heads is missing."""
    for part in expected_shapes(config, {name: heads[name] for name in chosen.heads}):
        if part.startswith("heads.") and part not in entries:
            raise UserError(f'head "{part.split(".")[1]}": {part} is missing')
    ends = HEAD_CLASSES.get(chosen.ending)
    every = encoder_class(config).pools_tokens
    pair = chosen.ending == "ForPreTraining" and REPLACED_TOKENS not in chosen.heads.values()
    pooled = pair or (ends is not None and not ends.averaged and (ends.pooled or every))
    if pooled and "backbone.pooler.dense.weight" not in entries:
        raise UserError(f"{chosen.architecture} needs a pooler, which this checkpoint lacks")


def family_to_write(config: EncoderConfig, wanted: str = "") -> str:
    """The wanted family, or that of the encoder. Raises UserError if none fits the encoder."""
    form = architecture_for(config)
    if wanted:
        if why := form.check_family(wanted, config):
            raise UserError(why)
        return wanted
    if family := form.family_of(config):
        return family
    raise UserError(form.no_family(config))


def _only_head(heads: Mapping[str, HeadInfo], target: ExportOptions) -> str:
    """The head that `head_class` implies, or an imported classifier that is the only head and is
    exported as the class it was."""
    if target.head_class == "ForNextSentencePrediction":
        return NEXT_SENTENCE
    imported = [name for name in (CLASSIFIER, QUESTION_ANSWERING) if name in heads]
    if imported and (target.head_class or len(heads) == 1):
        return imported[0]
    if target.head_class:
        raise UserError(f"head_class: {target.head_class}: name the head to write as this class")
    return ""


def _usual_class(name: str, heads: Mapping[str, HeadInfo]) -> str:
    """Class that the head was used as, else one that fits its shape."""
    head = heads.get(name)
    if head is not None and head.outputs.averaged:
        return CROSS_ENCODER
    used = HEAD_CLASSES.get(head.outputs.head_class) if head is not None else None
    if head is not None and used is not None and used.pooled == head.pooled:
        return head.outputs.head_class
    if head is None or head.pooled:
        return "ForSequenceClassification"
    return "ForQuestionAnswering" if name == QUESTION_ANSWERING else "ForTokenClassification"


def _detection(heads: Mapping[str, HeadInfo], target: ExportOptions) -> list[str]:
    """The head that detects replaced tokens, if there is one and no masked-LM head is asked for."""
    names = [name for name, head in heads.items() if head.kind == "replaced_tokens"]
    return [] if target.words else names[:1]


def _words(heads: Mapping[str, HeadInfo], target: ExportOptions) -> str:
    names = [name for name, head in heads.items() if head.kind == "masked_words"]
    if target.words and target.words not in names:
        raise UserError(f'words: no masked-LM head "{target.words}"{suggest(target.words, names)}')
    return target.words or next(iter(names), "")


def _check_class(name: str, heads: Mapping[str, HeadInfo], kind: str, ending: str) -> None:
    """Raises UserError unless the class reads the same input as the head and allows as many
    classes."""
    wanted = HEAD_CLASSES[ending]
    architecture = ("" if wanted.averaged else FAMILIES[kind].class_prefix) + ending
    head = heads.get(name)
    if head is None or head.kind != "classes":
        known = [other for other, head in heads.items() if head.kind == "classes"]
        raise UserError(f'head: no classification head "{name}"{suggest(name, known)}')
    known = wanted.averaged or ending in architecture_of(kind).classes
    if not known or (wanted.name == NEXT_SENTENCE and FAMILIES[kind].pair_head != NEXT_SENTENCE):
        raise UserError(f"Hugging Face has no {architecture}")
    if (head.pooled, head.outputs.averaged) != (wanted.pooled, wanted.averaged):
        reads = "whole texts" if head.pooled else "tokens"
        reads = "the means of tokens" if head.outputs.averaged else reads
        raise UserError(f'head: "{name}" reads {reads}, which {architecture} does not')
    if wanted.classes not in (None, classes := head.exported_classes):
        raise UserError(
            f'head: "{name}" has {classes} classes, {architecture} needs {wanted.classes}'
        )
