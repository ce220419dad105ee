"""The accuracy of a trained model on minimal pairs.

scores = score_minimal_pairs(TrainedModel.open("runs/mine"), ["blimp/*.jsonl"])
scores.mean, scores.paradigms["npi_present_1"].accuracy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from palm_ds.data.reader.minimal_pairs import read_paradigms
from palm_ds.data.stream.packing import row_capacity
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup
from palm_ds.train.evaluate.minimal_pairs import (
    PairScore,
    PairScores,
    pair_set,
    rows_within_memory,
)
from palm_ds.weights.formats.huggingface.names import MASKED_WORDS


def score_minimal_pairs(
    model: TrainedModel,
    files: str | Sequence[str],
    score: PairScore = "unmasked",
    *,
    group: ProcessGroup = SINGLE_PROCESS,
    done: Callable[[int, int], None] = lambda inputs, of: None,
) -> PairScores:
    """The accuracies on the pairs of files, each a paradigm; every process of the group reads its
    share. `score` and `done`: see train/evaluate/minimal_pairs.py. Raises UserError, also if the
    model has no masked-LM head."""
    paradigms, filler = read_paradigms(files), model.filler()
    backbone = filler.model.backbone
    pairs = pair_set(
        paradigms,
        filler.tokenizer,
        task=MASKED_WORDS,
        task_id=filler.task_id,
        most=backbone.config.max_length,
        score=score,
    )
    length = row_capacity(backbone.kernels.attention, pairs.longest) or model.tokens
    rows = max(model.tokens // length, 1)

    def logits(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return filler.model.logits(batch.to(model.device), MASKED_WORDS)

    losses = pairs.losses(
        logits,
        length=length,
        rows=rows_within_memory(rows, length, backbone.word.num_embeddings),
        rank=group.rank,
        world=group.world,
        done=done,
    )
    return pairs.scores(np.sum(group.gather(losses), axis=0))
