"""User-defined classes: a pretraining task, a fine-tuning task with head and metric, a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

import palm_ds as palm


@dataclass(frozen=True, kw_only=True)
class EvenTokens(palm.CorpusTask):
    """Pretraining: whether the number of a token is even."""

    def label(self, example: Any, source: Any, rng: np.random.Generator) -> None:
        where = np.flatnonzero(example.source_offsets >= 0)
        example.labels[self.name] = where, example.unmasked_ids[where] % 2

    def head(self, backbone: Any) -> palm.Head:
        return palm.heads.ClassHead(backbone.hidden_size, 2)


class SquareHead(palm.Head):
    """A number, squared error, by a linear map of the pooled text."""

    pooled = True

    def __init__(self, width: int):
        super().__init__()
        self.out = torch.nn.Linear(width, 1)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, device=device)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> palm.HeadOutput:
        error = (self.logits(rows)[:, 0].float() - targets.float()) ** 2
        return palm.HeadOutput(error.sum(), torch.full((), float("nan"), device=rows.device))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(rows)


@dataclass(frozen=True, kw_only=True)
class HowMany(palm.TextTask):
    """How many words a text has, as `label` says."""

    unit: float = 1.0
    """What counts as one."""

    prediction_key: ClassVar[str] = "value"

    def label(self, example: Any, source: Any, rng: np.random.Generator) -> None:
        value = float(source.row(example.item).get("label") or 0) / self.unit
        example.labels[self.name] = np.zeros(1, np.int64), np.array([value], np.float32)

    def head(self, backbone: Any) -> SquareHead:
        return SquareHead(backbone.hidden_size)

    def decode(self, scores: np.ndarray, example: Any, source: Any) -> dict[str, Any]:
        return {"value": float(scores[0, 0])}

    def metrics(self, predictions: Mapping[int, dict[str, Any]], source: Any) -> dict[str, float]:
        wrong = [
            abs(each["value"] - float(source.row(item)["label"]) / self.unit)
            for item, each in predictions.items()
        ]
        return {"minus_error": -float(np.mean(wrong))}

    def hf_export(self) -> Any:
        return self.exported()


class DeepHead(SquareHead):
    """Two linear maps, of other widths than the encoder's: no other program has such a head."""

    def __init__(self, width: int):
        super().__init__(width)
        self.out = torch.nn.Linear(3, 1)
        self.first = torch.nn.Linear(width, 3)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(rows)))


@dataclass(frozen=True, kw_only=True)
class Deeper(HowMany):
    """The same with another head."""

    def head(self, backbone: Any) -> DeepHead:
        return DeepHead(backbone.hidden_size)


class Counting:
    """A reader: rows are generated on demand."""

    def __init__(self, rows: int):
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.rows):
            many = 1 + number % 6
            words = " ".join(f"w{(number + k) % 40}" for k in range(many))
            yield {"text_a": words, "label": np.int64(many)}
