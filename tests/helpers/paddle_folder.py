"""PaddleNLP folders of tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.model.config.config import EncoderConfig
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.contents import HeadInfo, TensorEntry
from palm_ds.weights.formats.huggingface.plan import ExportPlan
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.paddle.write import plan, write
from palm_ds.weights.formats.tensor_files import in_memory_entry


def write_paddle(
    state: Mapping[str, torch.Tensor],
    folder: Path,
    config: EncoderConfig,
    *,
    heads: Mapping[str, HeadInfo] | None = None,
    tokenizer: Tokenizer | None = None,
    target: ExportOptions | None = None,
) -> ExportPlan:
    """Write palm_ds weights as a PaddleNLP folder, complete or not at all.

    `heads`: those in `state`; by default inferred from the tensors, with classification heads
    assumed to read whole texts.
    """
    kept = {name: value for name, value in state.items() if not name.endswith(".tied_words")}
    entries = {name: in_memory_entry(name, tensor) for name, tensor in kept.items()}
    planned = plan(entries, config, heads or _heads(entries), target or ExportOptions())
    write_folder_atomically(Path(folder), lambda part: write(planned, part, tokenizer=tokenizer))
    return planned


def _heads(entries: Mapping[str, TensorEntry]) -> dict[str, HeadInfo]:
    heads = {}
    for ours, entry in entries.items():
        _, _, part = ours.partition("heads.")
        name, _, part = part.partition(".")
        if part == "norm.weight":
            heads[name] = HeadInfo(kind="masked_words")
        elif part == "out.weight":
            heads[name] = HeadInfo(kind="classes", classes=entry.shape[0])
    return heads
