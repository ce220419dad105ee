"""Interface of an architecture at Hugging Face: names of tensors, config.json, classes.

    class BertArchitecture(Architecture):    in the folder architectures, bert.py
    hf = "bert"                              in the encoder: the name of that file
    hf = "my_architecture.MyArchitecture"    in an encoder of the user's

Readers and writers ask these methods and know no architecture themselves. An architecture covers
all model types whose encoders compute the same, its families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.weights.formats.contents import TensorEntry

Names = dict[str, tuple[str, ...]]
Entries = dict[str, TensorEntry]

# Names of the heads of an imported folder.
MASKED_WORDS, CLASSIFIER, QUESTION_ANSWERING = "masked_words", "classifier", "qa_outputs"
NEXT_SENTENCE, SENTENCE_ORDER = PAIR_HEADS = "next_sentence", "sentence_order"
"""Of two texts, in pretraining classes."""
REPLACED_TOKENS = "replaced_tokens"
CROSS_ENCODER = "CrossEncoder"
"""sentence-transformers' class, in place of the ending of one of transformers
(cross_encoder.py)."""
READING = "palm_ds_reading"
"""The key of config.json that says where a masked-LM head predicts a token, if not at its own place
(palm_ds/model/heads/outputs.py)."""
COUNTS = {2: "two", 3: "three"}
"""How many tensors of a file are one of ours, in reports."""
WORDS = "backbone.word.weight"
POSITIONS = "backbone.position.weight"
SEGMENTS = "backbone.segment.weight"
TASKS = "backbone.task.weight"
"""The task embedding, which a family without one folds into another table."""


@dataclass(frozen=True, kw_only=True)
class HeadClass:
    """A class with one classification head."""

    name: str
    """The head's name above."""
    pooled: bool
    classes: int | None = None
    """The number of classes it requires; None means any."""
    averaged: bool = False
    """Whether it reads the means of tokens."""


HEAD_CLASSES = {
    "ForSequenceClassification": HeadClass(name=CLASSIFIER, pooled=True),
    "ForMultipleChoice": HeadClass(name=CLASSIFIER, pooled=True, classes=1),
    "ForTokenClassification": HeadClass(name=CLASSIFIER, pooled=False),
    "ForQuestionAnswering": HeadClass(name=QUESTION_ANSWERING, pooled=False, classes=2),
    "ForNextSentencePrediction": HeadClass(name=NEXT_SENTENCE, pooled=True, classes=2),
    CROSS_ENCODER: HeadClass(name=CLASSIFIER, pooled=True, averaged=True),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type. PaddleNLP uses the same names, unless `paddle_tokenizer` is empty."""

    class_prefix: str
    """`Bert` of `BertForMaskedLM`."""
    tensor_prefix: str
    """`bert` of `bert.embeddings.LayerNorm.weight`."""
    pair_head: str = ""
    """The one of PAIR_HEADS that its pretraining class has, if any."""
    task_embedding: bool = False
    class_names: Mapping[str, str] = field(default_factory=dict)
    """{ending: class} where the class has another name."""
    masked_lm_activation: str = ""
    """The activation that its masked-LM head always has; empty means the encoder's."""
    states_head_activation: bool = False
    """Whether its config.json has a key for the activation of the masked-LM head."""
    paddle_tokenizer: str = ""
    """PaddleNLP's tokenizer class that reads a vocab.txt; empty: not written for PaddleNLP."""
    paddle_only: bool = False
    """Whether PaddleNLP alone has it: transformers does not, or no longer."""
    without_masked_lm: bool = False
    """Whether it has no class with a masked-LM head."""
    paddle_eps: float | None = None
    """The LayerNorm eps that PaddleNLP hard-codes; None means that it follows the config."""

    def class_name(self, ending: str) -> str:
        """The name of a class (`ForMaskedLM`)."""
        return self.class_names.get(ending, self.class_prefix + ending)

    def has_masked_lm(self, config: EncoderConfig) -> bool:
        """Whether its masked-LM head computes the same as palm_ds's with this config."""
        activation = config.head_activation or config.activation
        computed = self.masked_lm_activation or config.activation
        return not self.without_masked_lm and (
            self.states_head_activation or ACTIVATIONS[activation] is ACTIVATIONS[computed]
        )


class Architecture(ABC):
    """Hugging Face's side of one of our encoders."""

    kind: ClassVar[str]
    """The encoder, as `backbone.kind` names it."""
    families: ClassVar[Mapping[str, Family]]
    """By `model_type`; the first one is written unless another is asked for."""
    words: ClassVar[str]
    """The token embeddings in a file, without the base model's prefix."""
    tied: ClassVar[Mapping[str, str]]
    """{second name of a tensor in a file: its first name}, without that prefix."""
    shared: ClassVar[Mapping[str, str]] = {}
    """{palm_ds name: the palm_ds name whose values it starts with if a file has none of its own}"""
    heads: ClassVar[tuple[str, ...]]
    """First parts of the names of tensors that do not belong to the base model."""
    masked_lm: ClassVar[tuple[str, ...]]
    """The beginnings of the names of a masked-LM head."""
    detection: ClassVar[str] = ""
    """Ending of the class with a head that detects replaced tokens; empty: there is none."""
    detection_beside: ClassVar[bool] = False
    """Whether files of its other classes keep such a head, which transformers ignores."""
    classes: ClassVar[tuple[str, ...]] = tuple(HEAD_CLASSES)
    """Endings of its classes with one classification head."""
    other_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes that some files have in place of the base model's."""
    buffers: ClassVar[tuple[str, ...]] = ()
    """Constants that old files have."""
    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    """Arguments of its models in transformers."""
    run_keys: ClassVar[Mapping[str, type | None]]
    """{key of config.json that is passed to transformers: the type it needs there, if Python's JSON
    may give another}."""
    merged_dropouts: ClassVar[tuple[str, ...]] = ()
    """Rates of config.json at places where our encoder drops with `dropout`."""
    published_ids: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that transformers sets to ids of the published tokenizer if a file lacks
    them; written are those of the encoder's own tokenizer, or null without one."""
    lora_modules: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    """{matrix of a layer, as recipes name it: its module in a layer of transformers, or those that
    have equal parts of its rows}; empty: peft's adapters cannot have them."""
    lora_layer: ClassVar[str] = ""
    """The name of a layer in transformers, if it is not that in a file."""
    layer: ClassVar[str]
    """The name of a layer in a file, `encoder.layer` or `layers`."""
    task_table: ClassVar[str] = ""
    """The table (`word`, `segment` or `position`) that takes in a row of the task embedding, since
    families have none; empty: an encoder with a task embedding has no family."""

    # ---- tensors ----

    @abstractmethod
    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        """{palm_ds name: names in a file, without the base model's prefix} of all parameters; of
        several, each has an equal part of the rows. `kind` is the model type, `layout` one of
        `layout_of`'s."""

    def layers_in_file(self, config: EncoderConfig) -> list[str]:
        """The names of the layers that have weights, in the order of ours."""
        return [f"{self.layer}.{number}" for number in range(config.num_layers)]

    def layer_names(
        self,
        config: EncoderConfig,
        parts: Mapping[str, str | tuple[str, ...]],
        layers: Sequence[str] = (),
    ) -> Names:
        """{palm_ds name: names in a file} of the layers, given those of the parts of each; `layers`
        in place of `layers_in_file`."""
        return {
            f"backbone.layers.{i}.{ours}": tuple(
                f"{layer}.{x}" for x in ((hf,) if isinstance(hf, str) else hf)
            )
            for i, layer in enumerate(layers or self.layers_in_file(config))
            for ours, hf in parts.items()
        }

    def constants(self, config: EncoderConfig) -> tuple[str, ...]:
        """Tensors in old files that such an encoder does not read."""
        return self.buffers

    def layout_of(self, kind: str, ending: str) -> str:
        """The names of a class's tensors (`ForTokenClassification`), if not the usual ones."""
        return ""

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        """The same of a file with these names, whose config.json names the class `architecture`, or
        none ("")."""
        return ""

    def complete(self, entries: Entries) -> Entries:
        """The entries of a file, with those of `shared`."""
        more = {ours: entries[its] for ours, its in self.shared.items() if its in entries}
        return {**more, **entries}

    def arrange(self, entries: Entries, config: EncoderConfig) -> Entries:
        """The entries of a file with the rows of each tensor in our order; `reshape` restores
        that of the file."""
        return entries

    # ---- config.json ----

    @abstractmethod
    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        """The encoder that config.json describes. Raises UserError, starting with `where`, for
        values that no program writes, and for what our encoder does not compute."""

    @abstractmethod
    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        """The encoder's part of config.json. transformers rejects 1 in place of 1.0 there."""

    # ---- writing ----

    def family_of(self, config: EncoderConfig) -> str:
        """The model type that computes the same; empty if none does."""
        folds = not config.task_types or self.task_table
        return next(iter(self.families)) if folds else ""

    def no_family(self, config: EncoderConfig) -> str:
        """The reason `family_of` returned none."""
        return f"Hugging Face's {config.kind} has no task embedding"

    def reshape(
        self, kept: Entries, config: EncoderConfig, kind: str, task_id: int
    ) -> tuple[Entries, EncoderConfig, dict[str, str]]:
        """(entries, config, {palm_ds name: what in it has no source}) of the model to write, whose
        texts have the row `task_id` of the task embedding, if there is one."""
        return fold_task_into(kept, config, task_id, self.task_table)

    def check_family(self, kind: str, config: EncoderConfig) -> str:
        """The reason an encoder of this architecture cannot be of this model type; empty if it
        can."""
        if kind in self.families:
            folded = replace(config, task_types=0)  # by `reshape`
            return "" if self.family_of(folded) else self.no_family(folded)
        return f"family: {kind} is another architecture; this one is {' or '.join(self.families)}"


def sizes_json(config: EncoderConfig) -> dict[str, Any]:
    """The sizes in config.json that nearly all families have under these keys."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
    }


def usual_config_json(config: EncoderConfig) -> dict[str, Any]:
    """The encoder's part of config.json under BERT's keys, which many families have."""
    return {
        **sizes_json(config),
        "intermediate_size": config.feed_forward_size,
        "hidden_act": config.activation,
        "hidden_dropout_prob": float(config.dropout),
        "attention_probs_dropout_prob": float(config.attention_dropout),
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.token_types,
        "initializer_range": float(config.init_range),
        "layer_norm_eps": float(config.layer_norm_eps),
        "pad_token_id": config.pad,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def head_names(
    masked_lm: Mapping[str, str], *, own_dense: bool = False, answers: bool = True
) -> Names:
    """{palm_ds name: names in a file} of heads that most families have: the one of masked words,
    whose parts are given, that of classes, which may have a dense layer of its own, and that of
    `answers`."""
    names: Names = {f"heads.{MASKED_WORDS}.{ours}": (hf,) for ours, hf in masked_lm.items()}
    names[f"heads.{CLASSIFIER}.out"] = ("classifier.out_proj" if own_dense else "classifier",)
    return {**names, f"heads.{QUESTION_ANSWERING}.out": ("qa_outputs",)} if answers else names


def both_ends(stems: Names) -> Names:
    """Weight and bias for the name of a linear layer or LayerNorm; an embedding or a single bias as
    it is."""
    names: Names = {}
    for ours, hf in stems.items():
        if hf[0].endswith((".weight", ".bias")):
            names[ours] = hf
            continue
        for end in ("weight", "bias"):
            names[f"{ours}.{end}"] = tuple(f"{each}.{end}" for each in hf)
    return names


def fold_task(table: TensorEntry, task: TensorEntry, row: int) -> TensorEntry:
    """A table with one row of the task embedding added to each of its rows, so that every token
    gets the same sum."""
    return TensorEntry(
        source_names=table.source_names + task.source_names,
        shape=table.shape,
        read=lambda: table.read().float() + task.read()[row].float(),
        transform=f"row {row} of {task.shape[0]} of the task embedding folded in",
    )


def fold_task_into(
    kept: Entries, config: EncoderConfig, task_id: int, table: str
) -> tuple[Entries, EncoderConfig, dict[str, str]]:
    """`Architecture.reshape` of a family without a task embedding: that of a task is added to every
    row of a table of which each token has one. In token embeddings, scores of all tokens with tied
    output embeddings rise by the same number, which changes no probability."""
    if not (config.task_types and table):
        return dict(kept), config, {}
    name = f"backbone.{table}.weight"
    result = {x: entry for x, entry in kept.items() if x != TASKS}
    result[name] = fold_task(kept[name], kept[TASKS], task_id)
    return result, without_tasks(config), {}


def without_tasks(config: EncoderConfig) -> EncoderConfig:
    """The config of an encoder whose task embedding was folded into another table."""
    return replace(config, task_types=0)
