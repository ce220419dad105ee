"""Placeholders behind a text that the encoder itself fills in before it reads the text (ERNIE-M's
back-translation: Ouyang et al. 2021, arXiv 2012.15674).

    first pass    [CLS] the cat sat [SEP] [M] [M] [M] [SEP]    without masks, gradient and dropout
    second pass   [CLS] the [M] sat [SEP] le chat - [SEP]      the masked text, behind it a guess

In the first pass placeholders attend to the text and to one another, and the text does not see
them: as masks see the other text in cross_attention_masked_lm, which teaches this. All are filled
in at once. The second pass is the forward pass of a training step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import HIDDEN


class FillsPlaceholders(Protocol):
    """A model with tasks whose placeholders it fills in."""

    backbone: nn.Module
    heads: nn.ModuleDict
    head_of: dict[str, str]
    pseudo_tokens: dict[str, float]


def placeholder_name(task: str) -> str:
    """The name of the labels that say where a task's placeholders are, and their keys."""
    return f"{task} (pseudo tokens)"


@torch.no_grad()
def with_pseudo_tokens(model: FillsPlaceholders, batch: Batch) -> Batch:
    """The batch with the placeholders of its tasks filled in. A batch without any runs the model on
    a row of padding, so that ZeRO 3 sees the same modules on every process."""
    if not model.pseudo_tokens:
        return batch
    nothing = batch.input_ids.new_zeros(1)
    labels = {
        task: batch.labels.get(placeholder_name(task), (nothing, nothing))
        for task in model.pseudo_tokens
    }
    there = [task for task in labels if placeholder_name(task) in batch.labels]
    given = _without_masks(batch, there) if there else batch.padding_row()
    modules = [model.backbone, *(model.heads[model.head_of[task]] for task in labels)]
    training = [module.training for module in modules]
    for module in modules:
        module.eval()
    rows = model.backbone(given, torch.cat([positions for positions, _ in labels.values()]))
    pieces = rows.split([len(positions) for positions, _ in labels.values()])
    ids = batch.input_ids.flatten().clone()
    for (task, (positions, keys)), piece in zip(labels.items(), pieces, strict=True):
        head = model.heads[model.head_of[task]]
        tokens = head(piece, keys, model.pseudo_tokens[task])
        if task in there:
            ids[positions] = tokens
    for module, was in zip(modules, training, strict=True):
        module.train(was)
    return replace(batch, input_ids=ids.view_as(batch.input_ids))


def _without_masks(batch: Batch, tasks: list[str]) -> Batch:
    """The texts of these tasks before they were masked, hidden from their placeholders' side: a
    placeholder sees the text and its like, nothing sees the [SEP] behind them."""
    assert batch.visibility is not None
    ids, visibility = batch.input_ids.flatten().clone(), batch.visibility.flatten(1).clone()
    for task in tasks:
        if task in batch.labels:
            masked, original = batch.labels[task]
            ids[masked] = original
        placeholders, _ = batch.labels[placeholder_name(task)]
        visibility[0, placeholders + 1] = HIDDEN  # of the last one: [SEP]
        visibility[:, placeholders] = 1
    return replace(
        batch,
        input_ids=ids.view_as(batch.input_ids),
        visibility=visibility.view_as(batch.visibility),
    )
