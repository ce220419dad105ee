"""Placeholders behind a text that the encoder itself fills in before it reads the text (ERNIE-M's
back-translation: Ouyang et al. 2021, arXiv 2012.15674).

    first pass    [CLS] the cat sat [SEP] [M] [M] [M] [SEP]    without masks, gradient and dropout
    second pass   [CLS] the [M] sat [SEP] le chat - [SEP]      the masked text, behind it a guess

In the first pass placeholders attend to the text and to one another, and the text does not see
them: as masks see the other text in cross_attention_masked_lm, which teaches this. All are filled
in together. The second pass is the forward pass of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import HIDDEN


@torch.no_grad()
def with_pseudo_tokens(
    encoder: Encoder,
    heads: Mapping[str, nn.Module],
    temperatures: Mapping[str, float],
    batch: Batch,
) -> Batch:
    """The batch with the placeholders of these tasks filled in by their `heads`. A batch without
    any runs the encoder on a row of padding, so that ZeRO 3 sees the same modules on every
    process."""
    if not temperatures:
        return batch
    nothing = batch.input_ids.new_zeros(1)
    places = {task: batch.placeholders.get(task, (nothing, nothing)) for task in temperatures}
    given = _without_masks(batch) if batch.placeholders else batch.padding_row()
    modules = [encoder, *(heads[task] for task in places)]
    training = [module.training for module in modules]
    for module in modules:
        module.eval()
    at = torch.cat([positions for positions, _ in places.values()])
    rows = encoder.of_texts(encoder(given, at))
    pieces = rows.split([len(positions) for positions, _ in places.values()])
    ids = batch.input_ids.flatten().clone()
    for (task, (positions, keys)), piece in zip(places.items(), pieces, strict=True):
        tokens = heads[task](piece, keys, temperature=temperatures[task])
        if task in batch.placeholders:
            ids[positions] = tokens
    for module, was in zip(modules, training, strict=True):
        module.train(was)
    return replace(batch, input_ids=ids.view_as(batch.input_ids))


def _without_masks(batch: Batch) -> Batch:
    """Texts with placeholders before they were masked. A placeholder attends to the text and its
    like; none of them to the [SEP] behind, and the text to itself alone."""
    assert batch.visibility is not None
    ids, visibility = batch.input_ids.flatten().clone(), batch.visibility.flatten(1).clone()
    if batch.masked:
        masked, original = batch.masked
        ids[masked] = original
    for positions, _ in batch.placeholders.values():
        visibility[0, positions + 1] = HIDDEN  # of the last one: [SEP]
        visibility[:, positions] = 1
    return replace(
        batch,
        input_ids=ids.view_as(batch.input_ids),
        visibility=visibility.view_as(batch.visibility),
    )
