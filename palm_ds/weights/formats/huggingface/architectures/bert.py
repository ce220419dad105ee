"""BERT and what has its shape: ERNIE, RoBERTa, XLM-RoBERTa and CamemBERT.

    ernie        BERT with a task embedding (`use_task_id`)
    roberta      positions counted from pad + 1, no next-sentence head, a different masked-LM head
    xlm-roberta  Roberta under another name, with a SentencePiece tokenizer; so is camembert
    ernie_m      PaddleNLP's: an XLM-Roberta without token types and without a masked-LM head

Query, key and value are one matrix in palm_ds and three in Hugging Face; a Roberta classifier has
its pooler in the head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.foreign_config import FOREIGN_KEYS, read_encoder_config
from palm_ds.weights.formats.huggingface.architecture import (
    HEAD_CLASSES,
    NEXT_SENTENCE,
    POSITIONS,
    SEGMENTS,
    TASKS,
    Entries,
    Family,
    Names,
    fold_task,
    without_tasks,
)
from palm_ds.weights.formats.huggingface.bert_like import (
    MASKED_LM,
    ROBERTA_MASKED_LM,
    BertLike,
    moved_positions,
    tied_output,
)
from palm_ds.weights.formats.huggingface.check_config import check_foreign_values

_OWN_DENSE = "own dense"
"""The layout of a text classifier whose head contains palm_ds's pooler."""


@dataclass(frozen=True, kw_only=True)
class BertFamily(Family):
    """Values that differ between the families of BERT's shape."""

    masked_lm: Mapping[str, str]
    """{part of palm_ds's masked-LM head: its Hugging Face name}"""
    positions_after_pad: bool = False
    """Positions are counted from pad + 1."""
    token_types: bool = True
    """Whether it has a token type embedding."""
    classifier_dense: bool = False
    """The text classifier has its own dense layer instead of the pooler."""

    def position_offset(self, pad: int) -> int:
        """The row of the position embeddings for the first token of a text."""
        return pad + 1 if self.positions_after_pad else 0


_ROBERTA = BertFamily(
    class_prefix="Roberta",
    tensor_prefix="roberta",
    masked_lm=ROBERTA_MASKED_LM,
    masked_lm_activation="gelu",
    positions_after_pad=True,
    classifier_dense=True,
    paddle_tokenizer="RobertaChineseTokenizer",
)
_FAMILIES: dict[str, BertFamily] = {
    "bert": BertFamily(
        class_prefix="Bert",
        tensor_prefix="bert",
        masked_lm=MASKED_LM,
        pair_head=NEXT_SENTENCE,
        paddle_tokenizer="BertTokenizer",
    ),
    "ernie": BertFamily(
        class_prefix="Ernie",
        tensor_prefix="ernie",
        masked_lm=MASKED_LM,
        pair_head=NEXT_SENTENCE,
        task_embedding=True,
        paddle_tokenizer="ErnieTokenizer",
        paddle_eps=1e-12,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(_ROBERTA, class_prefix="XLMRoberta", paddle_tokenizer=""),
    "camembert": replace(_ROBERTA, class_prefix="Camembert", paddle_tokenizer=""),
    "ernie_m": BertFamily(
        class_prefix="ErnieM",
        tensor_prefix="ernie_m",
        masked_lm={},
        without_masked_lm=True,
        positions_after_pad=True,
        token_types=False,
        paddle_tokenizer="ErnieMTokenizer",
        paddle_only=True,
        paddle_eps=1e-5,
    ),
}


class BertArchitecture(BertLike):
    """The architecture of `kind: bert`."""

    kind = "bert"
    families = _FAMILIES
    classes = tuple(HEAD_CLASSES)
    tied = tied_output(MASKED_LM) | tied_output(ROBERTA_MASKED_LM)
    heads = ("cls", "lm_head", "classifier", "qa_outputs")
    masked_lm = ("cls.predictions.", "lm_head.")
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    inputs = ("input_ids", "attention_mask", "token_type_ids", "task_type_ids")
    run_keys = {
        **BertLike.run_keys,
        "use_task_id": bool,
        "is_decoder": bool,
        **dict.fromkeys(("task_type_vocab_size", "position_embedding_type")),
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        own_dense = layout == _OWN_DENSE
        pooler = "classifier.dense" if own_dense else "pooler.dense"
        further: Names = {"backbone.pooler.dense": (pooler,)}
        family = _FAMILIES[kind]
        if family.pair_head:
            further[f"heads.{NEXT_SENTENCE}.out"] = ("cls.seq_relationship",)
        return self.all_names(config, further, family.masked_lm, own_dense=own_dense)

    def layout_of(self, kind: str, ending: str) -> str:
        own_dense = _FAMILIES[kind].classifier_dense and ending == "ForSequenceClassification"
        return _OWN_DENSE if own_dense else ""

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return _OWN_DENSE if "classifier.out_proj.weight" in names else ""

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_foreign_values(about, where)
        known = {key: value for key, value in about.items() if key in FOREIGN_KEYS}
        return read_encoder_config(known, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        values = super().config_json(config, kind)
        if self.families[kind].task_embedding:
            values["use_task_id"] = bool(config.task_types)
            if config.task_types:
                values["task_type_vocab_size"] = config.task_types
        return values

    def family_of(self, config: EncoderConfig) -> str:
        for name, family in _FAMILIES.items():
            same_positions = config.position_offset == family.position_offset(config.pad)
            if same_positions and bool(config.task_types) == family.task_embedding:
                return name
        return ""

    def no_family(self, config: EncoderConfig) -> str:
        if config.task_types:
            return "Hugging Face has no encoder with task embeddings and a position offset"
        return (
            f"Hugging Face's Bert counts positions from 0 and its Roberta from pad + 1 = "
            f"{config.pad + 1}, but this encoder from position_offset = {config.position_offset}"
        )

    def check_family(self, kind: str, config: EncoderConfig) -> str:
        """`reshape` moves positions, so an encoder can be of each."""
        return "" if kind in self.families else super().check_family(kind, config)

    def reshape(
        self, kept: Entries, config: EncoderConfig, kind: str, task_id: int
    ) -> tuple[Entries, EncoderConfig, dict[str, str]]:
        """The embedding of a task is added to every token type embedding, unless the family has a
        task embedding; position rows are shifted if the family counts from another offset."""
        result, created = dict(kept), {}
        family = _FAMILIES[kind]
        if config.task_types and family.task_embedding and task_id:
            name = TASKS
            result[name] = _swapped(kept[name], task_id)
        if config.task_types and not family.task_embedding:
            task, name = result.pop(TASKS), SEGMENTS
            result[name] = fold_task(kept[name], task, task_id)
            config = without_tasks(config)
        if not family.token_types:
            _check_one_type(config, family)
            result = _without_token_type(result)
        offset = family.position_offset(config.pad)
        result, config, more = moved_positions(result, config, offset)
        return result, config, created | more


def _swapped(rows: TensorEntry, row: int) -> TensorEntry:
    """Swaps rows 0 and `row`: Hugging Face uses task 0 if the caller gives none."""
    order = list(range(rows.shape[0]))
    order[0], order[row] = row, 0
    how = f"rows 0 and {row} swapped"
    return TensorEntry(
        source_names=rows.source_names,
        shape=rows.shape,
        read=lambda: rows.read()[order],
        transform=how,
    )


def _check_one_type(config: EncoderConfig, family: Family) -> None:
    if config.token_types > 1:
        raise UserError(
            f"family: a {family.class_prefix} has no token types, but this encoder has "
            f"{config.token_types}"
        )


def _without_token_type(kept: Entries) -> Entries:
    """With the only token type added to each position; zeros, which a reader made, add nothing."""
    result = {x: entry for x, entry in kept.items() if x != SEGMENTS}
    positions, types = kept[POSITIONS], kept[SEGMENTS]
    if not types.read().any():
        return result
    result[POSITIONS] = TensorEntry(
        source_names=positions.source_names + types.source_names,
        shape=positions.shape,
        read=lambda: positions.read() + types.read(),
        transform="the token type added",
    )
    return result
