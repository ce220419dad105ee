"""Predict masked tokens of a text from its translation alone (CAMLM; ERNIE-M: Ouyang et al. 2021,
arXiv 2012.15674).

    pair           a1 [M] a3 a4        b1 b2 [M] b4
    [M] of a       attends to itself and other masks of a, and to b1 b2 b4
    a1 a3 a4       attend to one another, never to what attends to b

A masked token must be translated, since the rest of its own text is out of reach, in every layer.
Unmasked tokens see neither masks nor the other text: through them a mask would see its own text
again. The attention thus falls into two halves that never meet, and a pair is read as two
sequences, at the positions that its tokens have in the pair:

    a1 a3 a4 [SEP] | [M] of b       order 0 | 1: masks attend to both, the others to the first part
    b1 b2 b4 [SEP] | [M] of a

Baidu has not released its pretraining code. That masks see the masks of their own text is read off
a figure; that unmasked tokens see the unmasked ones of their own text alone follows. Our
choice: special tokens are unmasked tokens of the text in front of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.inputs.visibility import Visibility
from palm_ds.pretrain.shared.text_pairs import MaskedPairs


@dataclass(frozen=True, kw_only=True)
class CrossAttentionMaskedLM(MaskedPairs, CorpusTask):
    attends_partially = True

    @property
    def displaces(self) -> bool:
        return True

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        where, text = self.mask_both(example, source, rng)
        masked = np.zeros(len(example), np.int64)
        masked[where] = 1
        read_in = text ^ masked  # the sequence: of the text itself, or for a mask the other one
        order = np.lexsort([masked, read_in])
        _rearrange(example, order)
        example.sub_lengths = tuple(np.bincount(read_in, minlength=2).tolist())
        steps = masked[order].astype(np.int32)
        example.visibility = Visibility(steps, steps)
        where = np.flatnonzero(steps)
        example.labels[self.name] = where, example.unmasked_ids[where]


def _rearrange(example: Example, order: np.ndarray) -> None:
    """Put the tokens of an example without labels into another `order`, at their positions."""
    example.position_ids = order
    for name in ("input_ids", "unmasked_ids", "token_type_ids", "source_offsets"):
        setattr(example, name, getattr(example, name)[order])
    example.annotations = {name: values[order] for name, values in example.annotations.items()}
