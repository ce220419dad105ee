"""Predict each token from those before it (GPT: Radford et al. 2018).

    [CLS] the cat sat [SEP]        attends to itself and to what is before it
    the   cat sat                  predicts the next token; special tokens are not predicted

It runs on every encoder whose attention follows the plan of its batch, those with sliding windows
and rotary positions included: the encoder is then a decoder like Ettin's (Weller et al. 2025).
Other tasks of its task group read the same vectors, which know nothing of the text after them.

It has a masked-LM head, which it can `share` with tasks that predict masked words, in one stage or
in several.

    # one after the other (Gisserot-Boukhlef et al. 2025), in either order
    knowledge_masking: {source: text}
    causal_language_model: {source: text, share: knowledge_masking}
    stages: [{causal_language_model: 10_000}, {knowledge_masking: 30_000}]

    # both in a stage, masked words at the place before them (GPT-BERT: Charpentier and Samuel 2024)
    knowledge_masking: {source: text, shifted: true, weight: 0.9375}
    causal_language_model: {source: text, share: knowledge_masking, weight: 0.0625}
    stages: [{knowledge_masking: 15_000, causal_language_model: 1_000}]

A stage mixes its tasks by examples, within every step and for any number of processes. GPT-BERT
mixes them by processes, of which it therefore needs a multiple of 16, and takes the mean of their
losses; here each task's loss is the mean over its own examples, so give `weight` the same shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.heads.outputs import Reading
from palm_ds.model.inputs.visibility import causal
from palm_ds.pretrain.shared.predictions import TokenPrediction


@dataclass(frozen=True, kw_only=True)
class CausalLanguageModel(TokenPrediction, CorpusTask):
    attends_partially = True

    @property
    def reading(self) -> Reading:
        return "causal"

    @classmethod
    def labels_others(cls) -> bool:
        """It says what the tokens of its own examples attend to."""
        return False

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        example = super().example(layout, source, rng)
        example.visibility = causal(len(example))
        return example

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        where = np.flatnonzero(example.source_offsets >= 0)
        example.labels[self.name] = where - 1, example.unmasked_ids[where]
