"""A task embedding and more token types for an encoder that starts from one without them: a BERT
that continues with ERNIE 2.0's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class

_TASKS, _SEGMENTS = "backbone.task.weight", "backbone.segment.weight"


def expand_embeddings(
    source: EncoderConfig, state: Mapping[str, torch.Tensor], target: EncoderConfig, folder: Path
) -> tuple[EncoderConfig, dict[str, torch.Tensor], list[str]]:
    """The config, tables and notes of an encoder that gets a task embedding or more token types.
    What it makes of a text is the same at first, whatever the task: rows of the task embedding are
    zeros, new token types are like the last one."""
    tables, notes, kind = {}, [], encoder_class(target)
    known, width = kind.is_specified(), kind.embedding_width(target)  # else unknown
    if known and target.task_types and not source.task_types:
        tables[_TASKS] = torch.zeros(target.task_types, width)
        source = replace(source, task_types=target.task_types)
        notes.append(
            f"task embedding: {folder} has none; {target.task_types} rows of zeros are added (if "
            "it is the hf/ of a run: its weights/ has them)"
        )
    new = target.token_types - source.token_types
    if known and new > 0 and _SEGMENTS in state:
        table = state[_SEGMENTS]
        tables[_SEGMENTS] = torch.cat([table, table[-1:].expand(new, -1)])
        notes.append(f"token types: {new} like the last of {source.token_types} are added")
        source = replace(source, token_types=target.token_types)
    return source, tables, notes
