"""Predict whole masked units: tokens, words, phrases, entities (ERNIE 1.0, 3.2; 2.0, 4.2.1).

Units are chosen in random order until they cover a share `rate` of an example's tokens. Every token
of a chosen unit is predicted; 80 % are shown as [MASK], 10 % as a random token, 10 % unchanged.

    Harry Potter is a series of fantasy novels        entity, word, word, phrase, ...
    [MASK] [MASK] is a series of [MASK] novels

The rule of ERNIE 1.0's released code (batching.py) is `{units: [word], chosen: each, whole: P}`:
each word is chosen independently, and a share P of the texts is masked by words, the others token
by token. ERNIE makes that choice once per pass over a file; here it is made per text, which gives
the same share without long runs of one kind. Random tokens here are never special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.pretrain.shared.unit_masking import UnitMasking

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.model.encoder.encoder import Encoder


@dataclass(frozen=True, kw_only=True)
class KnowledgeMasking(UnitMasking, CorpusTask):
    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        where = self.mask(example, source, rng)
        example.labels[self.name] = where, example.unmasked_ids[where]

    def head(self, backbone: Encoder) -> nn.Module:
        from palm_ds.model.heads.heads import MaskedLMHead

        return MaskedLMHead(backbone)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's unigram frequencies."""
        frequency = source.unigrams
        return -np.log(frequency[targets]), (targets == frequency.argmax()).astype(float)
