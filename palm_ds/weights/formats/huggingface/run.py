"""Runs a Hugging Face folder in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.huggingface.families import is_known_class
from palm_ds.weights.formats.huggingface.names import (
    CLASSIFIER,
    MASKED_WORDS,
    NEXT_SENTENCE,
    QUESTION_ANSWERING,
    WRAPPERS,
)
from palm_ds.weights.formats.huggingface.read import CONFIG
from palm_ds.weights.formats.runnable import (
    Outputs,
    RunnableCheckpoint,
    Texts,
    in_palm_ds,
    read_values,
)
from palm_ds.weights.formats.tensor_files import read_json

_NAMED = {  # {output of a transformers class: {class ending: the palm_ds head}}
    "logits": {
        "ForMaskedLM": MASKED_WORDS,
        "ForSequenceClassification": CLASSIFIER,
        "ForMultipleChoice": CLASSIFIER,
        "ForTokenClassification": CLASSIFIER,
        "ForNextSentencePrediction": NEXT_SENTENCE,
    },
    "prediction_logits": {"ForPreTraining": MASKED_WORDS},
    "seq_relationship_logits": {"ForPreTraining": NEXT_SENTENCE},
}
_ENDS = ("weight", "bias")
_FLOATS = {
    "layer_norm_eps",
    "initializer_range",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
}
_BOOLEAN_KEYS = {"use_task_id", "tie_word_embeddings", "is_decoder"}
_ENCODER_KEYS = {
    *_FLOATS,
    *_BOOLEAN_KEYS,
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "type_vocab_size",
    "task_type_vocab_size",
    "position_embedding_type",
    "pad_token_id",
}
"""The keys of config.json that are passed to transformers."""


def in_transformers(contents: CheckpointContents, *, task_id: int = 0) -> RunnableCheckpoint:
    """A Hugging Face folder, run by transformers, or by palm_ds's encoder if transformers lacks its
    class."""
    import transformers

    kind = contents.format.removeprefix("Hugging Face ")
    if not is_known_class(kind) or not hasattr(transformers, kind):
        return in_palm_ds(contents, task_id=task_id)
    return RunnableCheckpoint(
        name=f"transformers' {kind}",
        contents=contents,
        open=lambda: _Transformers(contents, kind, task_id),
    )


class _Transformers:
    """A folder loaded in transformers; called with texts."""

    def __init__(self, contents: CheckpointContents, kind: str, task_id: int):
        import transformers

        self.contents, self.kind, self.task_id = contents, kind, task_id
        with _quiet(transformers):
            self.model = _load(transformers, self.kind, contents)
        self.model.eval()

    def __call__(self, texts: Texts) -> Outputs:
        shape = texts.ids.shape
        given = {
            "input_ids": texts.ids,
            "attention_mask": texts.real.long(),
            "token_type_ids": texts.segments,
        }
        if self.contents.config.task_types:
            given["task_type_ids"] = torch.full(shape, self.task_id)
        if self.kind.endswith(
            "ForMultipleChoice"
        ):  # each text is a question with one choice; Ernie keeps task ids flat
            flat = ("task_type_ids",)
            given = {name: x if name in flat else x[:, None] for name, x in given.items()}
        out = self.model(**given, output_hidden_states=True)
        real = texts.real.flatten()
        names = ["embeddings", *(f"layer {i}" for i in range(1, len(out.hidden_states)))]
        outputs = {
            name: x.flatten(0, 1)[real] for name, x in zip(names, out.hidden_states, strict=True)
        }
        if "backbone.pooler.dense.weight" in self.contents.entries:
            outputs["pooled"] = self._pooled(out.hidden_states[-1])
        return outputs | self._scores(out, texts)

    def _pooled(self, last: torch.Tensor) -> torch.Tensor:
        """The pooled texts; computed here if the class has no pooler but the file does."""
        base = getattr(self.model, self.model.base_model_prefix, self.model)
        if getattr(base, "pooler", None) is not None:
            return base.pooler(last)
        weight, bias = (read_values(self.contents, f"backbone.pooler.dense.{x}") for x in _ENDS)
        return torch.tanh(F.linear(last[:, 0], weight, bias))

    def _scores(self, out: Any, texts: Texts) -> Outputs:
        found: Outputs = {}
        for key, names in _NAMED.items():
            head = next((name for end, name in names.items() if self.kind.endswith(end)), "")
            if head in self.contents.heads:
                found[f"head {head}"] = self._placed(out[key], head, texts)
        if self.kind.endswith("ForQuestionAnswering"):
            scores = torch.stack([out.start_logits, out.end_logits], dim=-1)
            found[f"head {QUESTION_ANSWERING}"] = self._placed(scores, QUESTION_ANSWERING, texts)
        return found

    def _placed(self, scores: torch.Tensor, head: str, texts: Texts) -> torch.Tensor:
        """Scores of texts unchanged; scores of tokens at the places that both sides compute."""
        if scores.ndim < 3:
            return scores
        at = texts.at() if head == MASKED_WORDS else texts.real.flatten().nonzero().flatten()
        return scores.flatten(0, 1)[at]


def _load(transformers: Any, kind: str, contents: CheckpointContents) -> Any:
    """Load a folder in transformers. From config.json it gets only the encoder's values, which were
    checked: other keys can make it load code from the Hub, or any number of class names."""
    about = read_json(contents.path / CONFIG)
    values = {key: about[key] for key in _ENCODER_KEYS if about.get(key) is not None}
    values |= {key: float(values[key]) for key in _FLOATS & values.keys()}
    values |= {key: bool(values[key]) for key in _BOOLEAN_KEYS & values.keys()}
    classifier = contents.heads.get(CLASSIFIER)
    classes = classifier.classes if classifier else 2
    sources = (name for entry in contents.entries.values() for name in entry.source_names)
    wrapped = any(WRAPPERS.search(name) for name in sources)
    try:
        model_class = getattr(transformers, kind)
        config = model_class.config_class(**values, num_labels=classes)
        return model_class.from_pretrained(
            contents.path,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            key_mapping={WRAPPERS.pattern: ""} if wrapped else None,
        )
    except Exception as error:  # of many types; each means that it is not such a model
        reason = printable(next(iter(str(error).splitlines()), type(error).__name__))
        raise UserError(
            f"{contents.path}: transformers cannot open it as {kind}: {reason}"
        ) from None


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Silences transformers' warnings about heads that a class lacks."""
    logging = transformers.utils.logging
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
