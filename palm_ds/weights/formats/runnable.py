"""Checkpoints that can be run: they return what each layer and head computes on some texts.

in_palm_ds(contents).open()(texts) ──> {"embeddings": ..., "layer 1": ..., "pooled": ...,
                                       "head masked_words": ...}   real tokens only, fp32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import PLAIN, Encoder, build_encoder, encoder_class
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.heads.replaced_tokens import ReplacedTokenHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.kernels import Kernels
from palm_ds.model.pooling import Pooling, pool_padded
from palm_ds.weights.formats.contents import NEXT_SENTENCE_CLASSES, CheckpointContents
from palm_ds.weights.formats.expected_shapes import POOLERS

_MASKED_AT = 24
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Inputs of one kind: (texts, length) each; `real` tells tokens from padding."""

    kind: str
    ids: torch.Tensor
    segments: torch.Tensor
    real: torch.Tensor

    def at(self) -> torch.Tensor:
        """Flat positions of some real tokens: where the masked-LM head is applied."""
        places = self.real.flatten().nonzero().flatten()
        return places[:: max(len(places) // _MASKED_AT, 1)]


@dataclass(frozen=True, kw_only=True)
class RunnableCheckpoint:
    """A checkpoint, and how to run it. `open()` loads it; the result is called with texts."""

    name: str
    contents: CheckpointContents
    open: Callable[[], Callable[[Texts], Outputs]]


# ---- our encoder ----


def in_palm_ds(contents: CheckpointContents, *, task_id: int = 0) -> RunnableCheckpoint:
    """Any checkpoint, run in palm_ds's encoder."""
    name = f"palm_ds's encoder with {contents.format}"
    return RunnableCheckpoint(
        name=name, contents=contents, open=lambda: _InPalmDs(contents, task_id)
    )


class _InPalmDs:
    """The encoder with a checkpoint's values."""

    def __init__(self, contents: CheckpointContents, task_id: int):
        self.contents, self.task_id = contents, task_id
        self.pooler = has_pooler(contents)
        self.backbone = load_encoder(contents)

    def __call__(self, texts: Texts) -> Outputs:
        real = texts.real.flatten()
        wanted = WantedStates()
        if self.backbone.is_specified():
            numbers = range(1, len(self.backbone.computed_layers) + 1)
            wanted = WantedStates(embeddings=True, hidden=tuple(numbers))
        with recorded(self.backbone, wanted) as states:
            last = self.backbone(self._batch(texts))  # (texts, length, hidden)
        states_of = {} if states.embeddings is None else {"embeddings": states.embeddings}
        states_of |= {f"layer {number}": value for number, value in states.hidden.items()}
        outputs = {name: value.flatten(0, 1)[real] for name, value in states_of.items()}
        last = self.backbone.of_texts(last)
        pooled = self.backbone.pooled_texts(last, texts.real) if self.pooler else None
        if pooled is not None:
            outputs["pooled"] = pooled
        flat = last.flatten(0, 1)
        outputs[last_state(self.contents.config)] = flat[real]
        for name, head in self.contents.heads.items():
            if head.kind == "masked_words":
                outputs[f"head {name}"] = self._words(name, flat[texts.at()])
            elif head.kind == "replaced_tokens":
                outputs[f"head {name}"] = self._detection(name, last)[real]
            elif head.outputs.averaged:
                means = pool_padded(last, texts.real, Pooling(pooling="mean"))
                outputs[f"head {name}"] = ClassScores(self.contents, name)(means)
            elif not head.pooled or pooled is not None:
                rows = flat[real]
                if self.backbone.pools_tokens or head.pooled:
                    rows = pooled if head.pooled else self.backbone.pooler(rows)
                assert rows is not None
                outputs[f"head {name}"] = ClassScores(self.contents, name)(rows)
        return outputs

    def _words(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """(positions, vocabulary): the scores of a masked-LM head."""
        return load_masked_lm(self.contents, name, self.backbone).logits(rows)

    def _detection(self, name: str, last: torch.Tensor) -> torch.Tensor:
        """(texts * length, 1): the scores of a head that detects replaced tokens."""
        rows = last.flatten(0, 1)
        with on_meta():
            head = ReplacedTokenHead(self.backbone)
        if head.reads_first:
            rows = torch.cat([rows, last[:, :1].expand_as(last).flatten(0, 1)])
        return _with_values(head, self.contents, name).logits(rows)

    def _batch(self, texts: Texts) -> Batch:
        rows = []
        for ids, segments, real in zip(texts.ids, texts.segments, texts.real, strict=True):
            n = int(real.sum())
            text = PackedText(
                input_ids=ids[:n].numpy(), token_type_ids=segments[:n].numpy(), task_id=self.task_id
            )
            rows.append([text])
        return Batch.from_rows(rows, length=texts.ids.shape[1], pad=self.contents.config.pad)


def last_state(config: EncoderConfig) -> str:
    """The output that is the encoder's last state, by name."""
    return f"layer {config.num_layers}" if encoder_class(config).is_specified() else "encoder"


def has_pooler(contents: CheckpointContents) -> bool:
    """Whether the checkpoint has a trained pooler."""
    return any(name.startswith("backbone.pooler.") for name in contents.entries)


def load_encoder(contents: CheckpointContents, kernels: Kernels = PLAIN) -> Encoder:
    """The encoder of a checkpoint on the CPU, in fp32. Raises UserError if a value is not
    finite."""
    custom = is_custom(contents.config.kind)
    with torch.device("cpu") if custom else on_meta():  # custom ones may compute in __init__
        backbone = build_encoder(contents.config, kernels)
    state = {
        name.removeprefix("backbone."): read_values(contents, name)
        for name in contents.entries
        if name.startswith("backbone.")
    }
    missing, unexpected = backbone.load_state_dict(state, strict=False, assign=True)
    lost = [name for name in missing if not f"backbone.{name}".startswith(POOLERS)]
    assert not lost and not unexpected, f"{contents.path}: {lost or unexpected}"
    return backbone.eval()


def load_masked_lm(contents: CheckpointContents, name: str, backbone: Encoder) -> MaskedLMHead:
    """A masked-LM head of a checkpoint over its encoder."""
    with on_meta():
        head = MaskedLMHead(backbone)
    return _with_values(head, contents, name)


HeadT = TypeVar("HeadT", bound=nn.Module)


def _with_values(head: HeadT, contents: CheckpointContents, name: str) -> HeadT:
    """A head with the values of one in a checkpoint; those of a generator are left out."""
    prefix, generator = f"heads.{name}.", f"heads.{name}.generator."
    names = [x for x in contents.entries if x.startswith(prefix) and not x.startswith(generator)]
    state = {x.removeprefix(prefix): read_values(contents, x) for x in names}
    head.load_state_dict(state, assign=True)
    return head.eval()


def as_elsewhere(scores: torch.Tensor, outputs: HeadOutputs) -> torch.Tensor:
    """Scores as in other programs: numbers in the units of their file, next-sentence scores in
    BERT's order, one score of relevance."""
    if outputs.labels == NEXT_SENTENCE_CLASSES:
        return scores.flip(-1)
    if outputs.relevance:
        return scores[..., 1:] - scores[..., :1]
    return scores * outputs.deviation + outputs.mean if outputs.scaled else scores


def as_trained(scores: torch.Tensor, outputs: HeadOutputs) -> torch.Tensor:
    """The inverse of `as_elsewhere`: what the task that trained the head decodes. The scores of a
    relevance are known up to a constant that both have."""
    if outputs.labels == NEXT_SENTENCE_CLASSES:
        return scores.flip(-1)
    if outputs.relevance:
        return torch.cat([torch.zeros_like(scores), scores], -1)
    return (scores - outputs.mean) / outputs.deviation if outputs.scaled else scores


class ClassScores(nn.Module):
    """The scores of a checkpoint's classification head, as other programs expect them, of rows
    (..., hidden) that were pooled for it."""

    def __init__(self, contents: CheckpointContents, name: str):
        super().__init__()
        self.outputs, hidden = contents.heads[name].outputs, contents.heads[name].hidden
        self.layers = nn.ModuleList(
            _linear(contents, f"heads.{name}.{part}")
            for part in ["hidden"] * bool(hidden) + ["out"]
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        *hidden, out = self.layers
        for layer in hidden:
            rows = F.relu(layer(rows))
        return as_elsewhere(out(rows), self.outputs)


def _linear(contents: CheckpointContents, module: str) -> nn.Linear:
    weight, bias = (read_values(contents, f"{module}.{end}") for end in ("weight", "bias"))
    with on_meta():
        layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


def read_values(contents: CheckpointContents, name: str) -> torch.Tensor:
    """A tensor in fp32. Raises UserError if a value is NaN or infinite."""
    entry = contents.entries[name]
    values = entry.read().detach().to(torch.float32).contiguous()
    if not torch.isfinite(values).all():
        names = " + ".join(entry.source_names)
        raise UserError(f"{contents.path}: {names}: has values that are NaN or infinite")
    return values
