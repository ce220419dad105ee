"""Distillation of the inside of a teacher, as a module of the model.

    student states (rows, length, hidden)  ──projection, if the widths differ──┐
    teacher states (rows, length, other)  ─────────────────────────────────────┴──> sums per part

Each sum is over the tokens without padding and is divided by their number in the whole step. The
projections are trained with the model and kept in checkpoints, but not exported.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.distillation.losses import relation_losses, state_losses
from palm_ds.model.distillation.settings import (
    RELATIONS,
    HiddenStatesSettings,
    RelationsSettings,
    TeacherSettings,
)
from palm_ds.model.encoder.encoder import Encoder, encoder_class, init_weights
from palm_ds.model.encoder.states import WantedStates
from palm_ds.model.inputs.batch import Batch, EncoderStates
from palm_ds.model.inputs.visibility import visible

PREFIX = "distillation."
"""Of the names of its parameters in the model."""


class Distillation(nn.Module):
    """The losses of hidden states, attention, relations and embeddings."""

    def __init__(self, settings: TeacherSettings, student: Encoder, teacher: EncoderConfig):
        super().__init__()
        self.settings = settings
        config = student.config
        numbers = config.num_layers, teacher.num_layers
        self.maps = _layer_maps(settings, *numbers)
        self.relation_heads = _relation_heads(settings.relations, config, teacher)
        self.attention_heads = _attention_heads(settings, config, teacher)
        self.student, self.teacher = (self._wanted(side) for side in (0, 1))
        self.student.check(student, "teacher: the student")
        widths = {
            "hidden_states": (config.hidden_size, teacher.hidden_size),
            "embeddings": (
                student.first_input_width(config),
                encoder_class(teacher).first_input_width(teacher),
            ),
        }
        for name, (width, wanted) in widths.items():
            if getattr(settings, name) and width != wanted:
                self.add_module(name, nn.Linear(width, wanted))
        init_weights(self, config.init_range)

    def _wanted(self, side: int) -> WantedStates:
        """States to record of the student (0) or the teacher (1)."""
        layers = {name: [pair[side] for pair in layer_map] for name, layer_map in self.maps.items()}
        qkv = {*layers.get("attention", ()), *layers.get("relations", ())}
        return WantedStates(
            embeddings=self.settings.embeddings is not None,
            hidden=tuple(dict.fromkeys(layers.get("hidden_states", ()))),
            qkv=tuple(sorted(qkv)),
        )

    def forward(
        self, student: EncoderStates, teacher: EncoderStates, batch: Batch
    ) -> dict[str, torch.Tensor]:
        """{part: summed loss} of the student's states and the teacher's."""
        measured = {name: self._layers(name, student, teacher, batch) for name in self.maps}
        if self.settings.embeddings:
            assert student.embeddings is not None and teacher.embeddings is not None
            vectors = self._projected("embeddings", student.embeddings)
            measure = self.settings.embeddings.loss
            measured["embeddings"] = state_losses(vectors, teacher.embeddings, measure)
        real = batch.sequence_ids >= 0
        # Whatever padding holds, it is finite, so that a product is enough.
        return {name: (losses * real).sum() for name, losses in measured.items()}

    def _layers(
        self, name: str, student: EncoderStates, teacher: EncoderStates, batch: Batch
    ) -> torch.Tensor:
        """Per token (rows, length), the mean over the layers of a map."""
        each = [self._layer(name, pair, student, teacher, batch) for pair in self.maps[name]]
        return torch.stack(each).mean(0)

    def _layer(
        self,
        name: str,
        pair: tuple[int, int],
        student: EncoderStates,
        teacher: EncoderStates,
        batch: Batch,
    ) -> torch.Tensor:
        if name == "hidden_states":
            assert self.settings.hidden_states is not None
            vectors = self._projected(name, student.hidden[pair[0]])
            return state_losses(vectors, teacher.hidden[pair[1]], self.settings.hidden_states.loss)
        thirds = student.qkv[pair[0]].chunk(3, -1), teacher.qkv[pair[1]].chunk(3, -1)
        seen = _seen(batch)
        if name == "attention":
            student_qk, teacher_qk = ((third[0], third[1]) for third in thirds)
            heads = self.attention_heads
            return relation_losses(student_qk, teacher_qk, seen, heads=heads, measure="mse")
        assert self.settings.relations is not None
        losses = []
        for a, b in self.settings.relations.pairs:
            left, right = ((third[RELATIONS[a]], third[RELATIONS[b]]) for third in thirds)
            losses.append(relation_losses(left, right, seen, heads=self.relation_heads))
        return torch.stack(losses).sum(0)

    def _projected(self, name: str, vectors: torch.Tensor) -> torch.Tensor:
        projection = self._modules.get(name)
        return vectors if projection is None else projection(vectors)


def _seen(batch: Batch) -> torch.Tensor:
    """(rows, length, length) bool: whether token i attends to token j. Padding attends to itself,
    so that no row of a softmax is empty."""
    ids = batch.sequence_ids
    same = ids[:, :, None] == ids[:, None, :]
    return same if batch.visibility is None else same & visible(batch.visibility)


def without_projections(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's weights as they are exported."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}


def _layer_maps(
    settings: TeacherSettings, student: int, teacher: int
) -> dict[str, list[tuple[int, int]]]:
    """{part: pairs of a student's and a teacher's layer}."""
    even = {layer: -(-layer * teacher // student) for layer in range(1, student + 1)}
    usual = {"hidden_states": even, "attention": even, "relations": {student: teacher}}
    maps = {}
    for name, default in usual.items():
        section: HiddenStatesSettings | None = getattr(settings, name)
        if section is None:
            continue
        maps[name] = list((section.layers or default).items())
        for pair in maps[name]:
            sides = zip(("student", "teacher"), pair, (student, teacher), strict=True)
            for who, number, count in sides:
                if not 1 <= number <= count:
                    raise UserError(
                        f"teacher.{name}.layers: {number} is not a layer of the {who}, which has "
                        f"{count}"
                    )
    return maps


def _relation_heads(
    settings: RelationsSettings | None, student: EncoderConfig, teacher: EncoderConfig
) -> int:
    heads = (settings.heads if settings else 0) or teacher.num_heads
    for who, width in (("student", student.hidden_size), ("teacher", teacher.hidden_size)):
        if settings and width % heads:
            raise UserError(
                f"teacher.relations.heads: {heads} does not divide the {who}'s width, {width}"
            )
    return heads


def _attention_heads(
    settings: TeacherSettings, student: EncoderConfig, teacher: EncoderConfig
) -> int:
    if settings.attention and student.num_heads != teacher.num_heads:
        raise UserError(
            f"teacher.attention: the student has {student.num_heads} heads, the teacher "
            f"{teacher.num_heads}; use teacher.relations, which has heads of its own"
        )
    return student.num_heads
