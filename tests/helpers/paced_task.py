"""Masked tokens whose steps last PALM_TEST_STEP_SECONDS, so that a signal meets a run that runs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from palm_ds.model.heads import HeadOutput, MaskedLMHead
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking

if TYPE_CHECKING:
    from palm_ds.model.encoder import Encoder


class PacedHead(MaskedLMHead):
    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        if self.training:
            time.sleep(float(os.environ.get("PALM_TEST_STEP_SECONDS", "0")))
        return super().forward(rows, targets)


@dataclass(frozen=True, kw_only=True)
class Paced(KnowledgeMasking):
    def head(self, backbone: Encoder) -> PacedHead:
        return PacedHead(backbone)
