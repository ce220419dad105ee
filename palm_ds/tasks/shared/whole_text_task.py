"""Base of tasks that read one vector of a text: what the encoder's pooler makes of it, or the mean
over its tokens.

The mean is what sentence-transformers' encoders are trained to give; their pooler is left as it was
before that. A class of transformers always reads the pooler, so a head of means is written as a
CrossEncoder of sentence-transformers (palm_ds/weights/formats/huggingface/cross_encoder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.task import Task
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, encoder_class
from palm_ds.tasks.shared.image_text import OptionalImages

HeadPooling: TypeAlias = Literal["pooler", "mean"]


@dataclass(frozen=True, kw_only=True)
class WholeTextTask(OptionalImages):
    """A task on whole texts, one vector each."""

    pooling: HeadPooling | None = None
    """What the head reads of a text: what the encoder's `pooler` makes of it, or the `mean` over
    its tokens. Default: `pooler`; for `classification` without `lora` the mean, if `init_from` was
    trained to give such vectors, as sentence-transformers' encoders mostly are."""

    head_settings: ClassVar[Sequence[str]] = ("pooling",)
    prefers_means: ClassVar[bool] = False
    """Whether means are the default if the encoder was trained to give them: only where they were
    seen to help (docs/finetuning.md)."""

    @property
    def averaged(self) -> bool:
        """Whether the head reads means."""
        return self.pooling == "mean"

    def why_no_mean(self, config: EncoderConfig) -> str:
        """Why the head cannot read means; empty if it can."""
        if encoder_class(config).memory_length(config):
            return f"{config.kind} reads windows of texts"
        return "`images` are read by poolers" if self.images else ""

    def text_width(self, backbone: Encoder) -> int:
        """Also raises UserError if it cannot read means."""
        if self.averaged and (why := self.why_no_mean(backbone.config)):
            raise UserError(f"{self.where}.pooling: no mean, as {why}; use pooler")
        return super().text_width(backbone)

    def describe_rows(self, source: TableSource, max_length: int) -> str:
        line = super().describe_rows(source, max_length)
        return f"{line}; read as the mean over tokens (pooling)" if self.averaged else line

    def with_head_of(self, origin: Task) -> Task:
        """With the pooling of the task that owns the shared head, by default."""
        if self.pooling is None and (given := getattr(origin, "pooling", None)):
            return replace(self, pooling=given).with_head_of(origin)
        return super().with_head_of(origin)
