"""Masked tokens whose steps last PALM_TEST_STEP_SECONDS, so that a signal meets a run that runs,
and whose checkpoints take PALM_TEST_WRITE_SECONDS, so that it meets one that is being written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from palm_ds.model.heads.heads import HeadOutput, MaskedLMHead
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.runtime.checkpoint.checkpoint import FileManifest

if TYPE_CHECKING:
    from palm_ds.model.encoder.encoder import Encoder


class PacedHead(MaskedLMHead):
    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        if self.training:
            time.sleep(float(os.environ.get("PALM_TEST_STEP_SECONDS", "0")))
        return super().forward(rows, targets)


@dataclass(frozen=True, kw_only=True)
class Paced(KnowledgeMasking):
    def head(self, backbone: Encoder) -> PacedHead:
        if seconds := float(os.environ.get("PALM_TEST_WRITE_SECONDS", "0")):
            slow_disk(seconds)
        return PacedHead(backbone)


def slow_disk(seconds: float) -> None:
    """Every file of a checkpoint takes so long from now on."""
    write = FileManifest.write

    def slow(manifest: FileManifest, path: Path, make: Callable[[Path], None]) -> None:
        time.sleep(seconds)
        write(manifest, path, make)

    FileManifest.write = slow
