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

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.documents import WindowPlace
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.heads.outputs import Reading
from palm_ds.pretrain.shared.predictions import TokenPrediction
from palm_ds.pretrain.shared.unit_masking import UnitMasking


@dataclass(frozen=True, kw_only=True)
class KnowledgeMasking(UnitMasking, TokenPrediction, CorpusTask):
    documents = "also"
    shifted: bool = False
    """Predict a masked token at the place before it, as causal_language_model does, so that one
    head serves both (MNTP; GPT-BERT)."""

    @property
    def reading(self) -> Reading:
        return "shifted" if self.shifted else "masked"

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        where = self.mask(example, source, rng)
        example.labels[self.name] = where - self.shifted, example.unmasked_ids[where]

    def adapt_window(self, window: Example, place: WindowPlace, source: CorpusSource) -> None:
        """`shifted`: no token stands before a document's first one, since windows end in [CLS]."""
        if self.shifted and self.name in window.labels:
            where, targets = window.labels[self.name]
            before = window.source_offsets[where] >= 0
            window.labels[self.name] = where[before], targets[before]
