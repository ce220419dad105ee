"""Predict masked tokens of a text and of its translation from both (TLM; Lample and Conneau 2019,
section 3.3; ERNIE-M: Ouyang et al. 2021, arXiv 2012.15674).

    [CLS] the [M] sat [SEP] le chat [M] [SEP]      every token attends to every token

A masked word may be read off its translation, which aligns the two languages. A pair is one text in
its row; each of its two texts is masked as in `knowledge_masking`, with at least one prediction.
Positions run on over the pair; XLM starts again at 0 with the second text, and adds an embedding of
the language, which the released ERNIE-M does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.pretrain.shared.text_pairs import MaskedPairs


@dataclass(frozen=True, kw_only=True)
class TranslationLanguageModel(MaskedPairs, CorpusTask):
    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        where, _ = self.mask_both(example, source, rng)
        example.labels[self.name] = where, example.unmasked_ids[where]
