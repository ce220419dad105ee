"""A checkpoint, run: in our own encoder, or a Hugging Face folder in transformers.

reference(contents).open()(texts) ──> {"embeddings": ..., "layer 1": ..., "pooled": ...,
                                       "head masked_words": ...}   real tokens only, fp32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.batch import Batch, PackedText
from palm_ds.model.encoder import Encoder
from palm_ds.model.heads import MaskedWordHead
from palm_ds.weights.formats.contents import Contents
from palm_ds.weights.formats.huggingface.families import is_known_class
from palm_ds.weights.formats.huggingface.names import (
    CLASSIFIER,
    MASKED_WORDS,
    NEXT_SENTENCE,
    QUESTION_ANSWERING,
)

_WORDS_AT = 24
_NAMED = {  # the scores of a class of transformers', by the names of our heads
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
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Inputs of one kind: (texts, length) each; `real` tells tokens from padding."""

    kind: str
    ids: torch.Tensor
    segments: torch.Tensor
    real: torch.Tensor

    def at(self) -> torch.Tensor:
        """Some real tokens, as flat places: where words are guessed."""
        places = self.real.flatten().nonzero().flatten()
        return places[:: max(len(places) // _WORDS_AT, 1)]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A checkpoint that can be run. `open()` loads it; what it gives is run on some texts."""

    name: str
    contents: Contents
    open: Callable[[], Callable[[Texts], Outputs]]


# ---- our encoder ----


def reference(contents: Contents, *, task_id: int = 0) -> Side:
    """The checkpoint in our own encoder."""
    name = f"our encoder with {contents.format}"
    return Side(name=name, contents=contents, open=lambda: _Reference(contents, task_id))


class _Reference:
    """Our encoder, filled from a checkpoint."""

    def __init__(self, contents: Contents, task_id: int):
        self.contents, self.task_id = contents, task_id
        with torch.device("meta"):
            backbone = Encoder(contents.config)
        state = {
            name.removeprefix("backbone."): _read(contents, name)
            for name in contents.entries
            if name.startswith("backbone.")
        }
        self.pooler = "pooler.dense.weight" in state
        backbone.load_state_dict(state, strict=self.pooler, assign=True)
        self.backbone = backbone.eval()

    def __call__(self, texts: Texts) -> Outputs:
        found: Outputs = {}
        real = texts.real.flatten()

        def keep(name: str) -> Callable[..., None]:
            return lambda _module, _given, out: found.update({name: out.flatten(0, 1)})

        parts = [("embeddings", self.backbone.norm)]
        parts += [(f"layer {i + 1}", x) for i, x in enumerate(self.backbone.layers)]  # type: ignore[misc]
        hooks = [part.register_forward_hook(keep(name)) for name, part in parts]
        try:
            last = self.backbone(self._batch(texts))  # (texts, length, hidden)
        finally:
            for hook in hooks:
                hook.remove()
        outputs = {name: x[real] for name, x in found.items()}
        pooled = self.backbone.pooler(last[:, 0]) if self.pooler else None
        if pooled is not None:
            outputs["pooled"] = pooled
        flat = last.flatten(0, 1)
        for name, head in self.contents.heads.items():
            if head.kind == "masked_words":
                outputs[f"head {name}"] = self._words(name, flat[texts.at()])
            elif not head.pooled or pooled is not None:
                rows = pooled if head.pooled else flat[real]
                assert rows is not None
                weight, bias = (_read(self.contents, f"heads.{name}.out.{x}") for x in _ENDS)
                outputs[f"head {name}"] = F.linear(rows, weight, bias)
        return outputs

    def _words(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """(n, words): the scores of a masked-word head."""
        with torch.device("meta"):
            head = MaskedWordHead(self.backbone)
        prefix = f"heads.{name}."
        names = [x for x in self.contents.entries if x.startswith(prefix)]
        state = {x.removeprefix(prefix): _read(self.contents, x) for x in names}
        head.load_state_dict(state, assign=True)
        return head.logits(rows)

    def _batch(self, texts: Texts) -> Batch:
        rows = []
        for ids, segments, real in zip(texts.ids, texts.segments, texts.real, strict=True):
            n = int(real.sum())
            text = PackedText(
                ids=ids[:n].numpy(), segments=segments[:n].numpy(), task_id=self.task_id
            )
            rows.append([text])
        return Batch.from_rows(rows, length=texts.ids.shape[1], pad=self.contents.config.pad)


_ENDS = ("weight", "bias")


def _read(contents: Contents, name: str) -> torch.Tensor:
    """fp32 values. Raises UserError where one is no number."""
    entry = contents.entries[name]
    values = entry.read().detach().to(torch.float32).contiguous()
    if not torch.isfinite(values).all():
        theirs = " + ".join(entry.theirs)
        raise UserError(f"{contents.path}: {theirs}: has values that are NaN or infinite")
    return values


# ---- transformers ----


def in_transformers(contents: Contents, *, task_id: int = 0) -> Side:
    """A Hugging Face folder in transformers' own model."""
    name = f"transformers' {contents.format.removeprefix('Hugging Face ')}"
    return Side(name=name, contents=contents, open=lambda: _Transformers(contents, task_id))


class _Transformers:
    """transformers' model of a folder."""

    def __init__(self, contents: Contents, task_id: int):
        import transformers

        self.contents, self.task_id = contents, task_id
        self.kind = contents.format.removeprefix("Hugging Face ")
        if not is_known_class(self.kind):
            raise UserError(f"{contents.path}: {self.kind}: not one of Bert, Ernie or Roberta")
        with _quiet(transformers):
            self.model = getattr(transformers, self.kind).from_pretrained(
                contents.path, dtype=torch.float32, local_files_only=True
            )
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
        if self.kind.endswith("ForMultipleChoice"):  # one choice each
            given = {name: x[:, None] for name, x in given.items()}
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
        """By their pooler. Classes without one leave it in the file, for those that have one."""
        base = getattr(self.model, self.model.base_model_prefix, self.model)
        if getattr(base, "pooler", None) is not None:
            return base.pooler(last)
        weight, bias = (_read(self.contents, f"backbone.pooler.dense.{x}") for x in _ENDS)
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
        """Of whole texts as they are; of tokens, those that the other side has too."""
        if scores.ndim < 3:
            return scores
        at = texts.at() if head == MASKED_WORDS else texts.real.flatten().nonzero().flatten()
        return scores.flatten(0, 1)[at]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """What transformers says about the heads it lacks is not for who converts."""
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
