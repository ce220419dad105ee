"""Runs a Hugging Face folder in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from palm_ds.common.errors import UserError, first_line
from palm_ds.common.messages import printable
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.pooling import Pooling, pool_padded
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    MASKED_WORDS,
    NEXT_SENTENCE,
    QUESTION_ANSWERING,
    REPLACED_TOKENS,
    SENTENCE_ORDER,
)
from palm_ds.weights.formats.huggingface.families import architecture_of, family_of_class
from palm_ds.weights.formats.huggingface.names import wrappers
from palm_ds.weights.formats.huggingface.read import CONFIG
from palm_ds.weights.formats.runnable import (
    ClassScores,
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
        "ForPreTraining": REPLACED_TOKENS,
    },
    "prediction_logits": {"ForPreTraining": MASKED_WORDS},
    "seq_relationship_logits": {"ForPreTraining": NEXT_SENTENCE},
    "sop_logits": {"ForPreTraining": SENTENCE_ORDER},
}


def in_transformers(contents: CheckpointContents, *, task_id: int = 0) -> RunnableCheckpoint:
    """A Hugging Face folder, run by transformers, or by palm_ds's encoder if transformers lacks its
    class."""
    import transformers

    kind = contents.format.removeprefix("Hugging Face ")
    if not family_of_class(kind) or not hasattr(transformers, kind):
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
        self.inputs = architecture_of(family_of_class(kind)).inputs
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
        given = {name: value for name, value in given.items() if name in self.inputs}
        if self.kind.endswith(
            "ForMultipleChoice"
        ):  # each text is a question with one choice; Ernie keeps task ids flat
            flat = ("task_type_ids",)
            given = {
                name: value if name in flat else value[:, None] for name, value in given.items()
            }
        out = self.model(**given, output_hidden_states=True)
        real = texts.real.flatten()
        names = ["embeddings", *(f"layer {i}" for i in range(1, len(out.hidden_states)))]
        outputs = {
            name: x.flatten(0, 1)[real] for name, x in zip(names, out.hidden_states, strict=True)
        }
        if "backbone.pooler.dense.weight" in self.contents.entries:
            outputs["pooled"] = self._pooled(out.hidden_states[-1], texts.real)
        return outputs | self._scores(out, texts)

    def _pooled(self, last: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The pooled texts; computed here if the class has no pooler but the file does."""
        base = getattr(self.model, self.model.base_model_prefix, self.model)
        pooler = getattr(base, "pooler", None)
        if isinstance(pooler, torch.nn.Linear):  # Albert's, whose activation is beside it
            return base.pooler_activation(pooler(last[:, 0]))
        if pooler is not None:
            return pooler(last)
        with on_meta():
            encoder = build_encoder(self.contents.config)
        start = "backbone.pooler."
        names = [x for x in self.contents.entries if x.startswith(start)]
        state = {name.removeprefix(start): read_values(self.contents, name) for name in names}
        encoder.pooler.load_state_dict(state, assign=True)
        return encoder.pooled_texts(last, real)

    def _scores(self, out: Any, texts: Texts) -> Outputs:
        scores_of: Outputs = {}
        for key, names in _NAMED.items():
            head = next((name for end, name in names.items() if self.kind.endswith(end)), "")
            if head in self.contents.heads:
                scores_of[f"head {head}"] = self._placed(out[key], head, texts)
        if f"head {SENTENCE_ORDER}" in scores_of:  # as palm_ds counts its classes
            scores_of[f"head {SENTENCE_ORDER}"] = scores_of[f"head {SENTENCE_ORDER}"].flip(-1)
        head = self.contents.heads.get(CLASSIFIER)
        if head is not None and head.outputs.averaged:  # as sentence-transformers' modules do
            means = pool_padded(out.last_hidden_state, texts.real, Pooling(pooling="mean"))
            scores_of[f"head {CLASSIFIER}"] = ClassScores(self.contents, CLASSIFIER)(means)
        if self.kind.endswith("ForQuestionAnswering"):
            scores = torch.stack([out.start_logits, out.end_logits], dim=-1)
            scores_of[f"head {QUESTION_ANSWERING}"] = self._placed(
                scores, QUESTION_ANSWERING, texts
            )
        return scores_of

    def _placed(self, scores: torch.Tensor, head: str, texts: Texts) -> torch.Tensor:
        """Scores of texts unchanged; scores of tokens at the places that both sides compute."""
        if head == REPLACED_TOKENS:
            return scores.flatten()[texts.real.flatten()][:, None]
        if scores.ndim < 3:
            return scores
        at = texts.at() if head == MASKED_WORDS else texts.real.flatten().nonzero().flatten()
        return scores.flatten(0, 1)[at]


def _load(transformers: ModuleType, kind: str, contents: CheckpointContents) -> Any:
    """Load a folder in transformers. From config.json it gets only the encoder's values, which were
    checked: other keys can make it load code from the hub, or any number of class names."""
    about = read_json(contents.path / CONFIG)
    family = family_of_class(kind)
    keys = architecture_of(family).run_keys
    values = {key: about[key] for key in keys if about.get(key) is not None}
    values |= {key: made(values[key]) for key, made in keys.items() if made and key in values}
    classifier = contents.heads.get(CLASSIFIER)
    classes = classifier.classes if classifier else 2
    sources = (name for entry in contents.entries.values() for name in entry.source_names)
    around = wrappers(family)
    wrapped = any(around.search(name) for name in sources)
    try:
        model_class = getattr(transformers, kind)
        config = model_class.config_class(**values, num_labels=classes)
        return model_class.from_pretrained(
            contents.path,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            key_mapping={around.pattern: ""} if wrapped else None,
        )
    except Exception as error:  # of many types; each means that it is not such a model
        reason = printable(first_line(error))
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
