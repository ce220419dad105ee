"""The Hugging Face architectures that have BERT's shape, and what differs between them.

    ernie        BERT with a task embedding (`use_task_id`)
    roberta      positions counted from pad + 1, no next-sentence head, a different masked-LM head
    xlm-roberta  Roberta under another name, with a SentencePiece tokenizer; so is camembert

Tensor names that all of them share are in names.py. An architecture of another shape gets its own
module in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from palm_ds.model.config.config import EncoderConfig

_BERT_HEAD = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "bias": "cls.predictions.bias",
    "decoder": "cls.predictions.decoder.weight",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. PaddleNLP uses the same names, unless `paddle_tokenizer` is empty."""

    class_prefix: str
    """`Bert` of `BertForMaskedLM`."""
    tensor_prefix: str
    """`bert` of `bert.embeddings.LayerNorm.weight`."""
    masked_lm: Mapping[str, str]
    """{part of palm_ds's masked-LM head: its Hugging Face name}"""
    masked_lm_activation: str = ""
    """The activation that this head always has; empty means the encoder's."""
    next_sentence: bool = True
    """Whether its pretraining class has a next-sentence head."""
    task_embedding: bool = False
    positions_after_pad: bool = False
    """Positions are counted from pad + 1."""
    classifier_dense: bool = False
    """The text classifier has its own dense layer instead of the pooler."""
    paddle_tokenizer: str
    """PaddleNLP's tokenizer class that reads a vocab.txt; empty: not written for PaddleNLP."""
    paddle_eps: float | None = None
    """The LayerNorm eps that PaddleNLP hard-codes; None means that it follows the config."""

    def has_masked_lm(self, config: EncoderConfig) -> bool:
        """Whether its masked-LM head computes the same as palm_ds's with this config."""
        activation = config.head_activation or config.activation
        return activation == (self.masked_lm_activation or config.activation)

    def position_offset(self, pad: int) -> int:
        """The row of the position embeddings for the first token of a text."""
        return pad + 1 if self.positions_after_pad else 0


_ROBERTA = Family(
    class_prefix="Roberta",
    tensor_prefix="roberta",
    masked_lm={
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "bias": "lm_head.bias",
        "decoder": "lm_head.decoder.weight",
    },
    masked_lm_activation="gelu",
    next_sentence=False,
    positions_after_pad=True,
    classifier_dense=True,
    paddle_tokenizer="RobertaChineseTokenizer",
)
FAMILIES: dict[str, Family] = {
    "bert": Family(
        class_prefix="Bert",
        tensor_prefix="bert",
        masked_lm=_BERT_HEAD,
        paddle_tokenizer="BertTokenizer",
    ),
    "ernie": Family(
        class_prefix="Ernie",
        tensor_prefix="ernie",
        masked_lm=_BERT_HEAD,
        task_embedding=True,
        paddle_tokenizer="ErnieTokenizer",
        paddle_eps=1e-12,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(_ROBERTA, class_prefix="XLMRoberta", paddle_tokenizer=""),
    "camembert": replace(_ROBERTA, class_prefix="Camembert", paddle_tokenizer=""),
}
"""By `model_type`."""
FAMILY_NAMES = f"{', '.join(list(FAMILIES)[:-1])} or {list(FAMILIES)[-1]}"


def family_of(config: EncoderConfig) -> str:
    """The `model_type` of the first architecture that computes the same; empty if none does."""
    for name, family in FAMILIES.items():
        same_positions = config.position_offset == family.position_offset(config.pad)
        if same_positions and bool(config.task_types) == family.task_embedding:
            return name
    return ""


def served_family(config: EncoderConfig) -> str:
    """Likewise, once the embedding of one task is folded into the token type embeddings: servers
    such as text-embeddings-inference and vLLM do not know Ernie."""
    return family_of(replace(config, task_types=0))


def is_known_class(architecture: str) -> bool:
    """Whether a transformers class (`BertForMaskedLM`) belongs to one of these architectures."""
    return architecture.startswith(tuple(family.class_prefix for family in FAMILIES.values()))


def other_masked_lm(kind: str, config: EncoderConfig) -> str:
    """Reason why a masked-LM head of this encoder cannot be one of this architecture's."""
    family = FAMILIES[kind]
    return (
        f"{family.class_prefix}'s masked-LM head always has "
        f"{family.masked_lm_activation or config.activation}, but this one has "
        f"{config.head_activation or config.activation}"
    )
