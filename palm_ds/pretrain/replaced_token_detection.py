"""Tell which tokens a generator has replaced (ELECTRA: Clark et al. 2020; DeBERTa-v3: He et al.).

    text        the cat sat on the mat
    generator   the [MASK] sat on the [MASK]     predicts the masked tokens, and samples them
    encoder     the dog sat on the mat           which of these are not the original ones?

Both are trained together: the generator on masked tokens, with `generator_weight`; the encoder, as
the discriminator, with binary cross-entropy over all tokens but special ones and
`discriminator_weight`. A sampled token that is the original counts as original. Masks and samples
follow from the example alone: they are the same for any number of processes, and in every
evaluation.

The defaults are ELECTRA's, except that ELECTRA shows 15 % of the masked tokens to its generator
unchanged (`mask_rate: 0.85`). DeBERTa-v3 has `embedding_sharing: gradient_disentangled` and a
generator with half the layers, `{num_layers: N, width: 1}`. It trains the two with
separate optimizers; with Adam only the clipping differs, since no parameter has gradients of both
losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from palm_ds.common.settings import Share
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import Unit, unigram_baseline
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.shared_embeddings import EmbeddingSharing, check_sharing
from palm_ds.model.heads.replaced_tokens import (
    Generator,
    GeneratorSettings,
    ReplacedTokenHead,
    detection_scores,
    generator_name,
)
from palm_ds.pretrain.shared.unit_masking import UnitMasking

_MOST_KEY = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenDetection(UnitMasking, CorpusTask):
    generator: GeneratorSettings = GeneratorSettings()
    """The generator's sizes, as in `{num_layers: 6, width: 1}`, and a folder to start it from."""
    embedding_sharing: EmbeddingSharing = "shared"
    """shared: one set of embeddings, trained by both losses (ELECTRA). gradient_disentangled: the
    encoder's are the generator's, which its loss does not train, plus differences (DeBERTa-v3).
    none: each has its own."""
    temperature: PositiveFloat = 1.0
    """The generator's scores are divided by it before tokens are sampled."""
    generator_weight: NonNegativeFloat = 1.0
    """Weight of the generator's loss, times `weight`."""
    discriminator_weight: NonNegativeFloat = 50.0
    """Weight of the discriminator's loss, times `weight`."""
    units: tuple[Unit, ...] = ("token",)
    """Units to mask as a whole, as in knowledge_masking."""
    mask_rate: Share = 1.0
    """Share of the predicted tokens that the generator sees as [MASK]."""
    random_rate: Share = 0.0
    """Share of the predicted tokens that the generator sees as a random token; the rest is shown
    unchanged."""

    head_settings = ("generator", "embedding_sharing", "temperature")
    changes_encoder = True
    labels_last = True

    def loss_weights(self) -> dict[str, float]:
        return {
            self.name: self.weight * self.discriminator_weight,
            generator_name(self.name): self.weight * self.generator_weight,
        }

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        """Tokens that another task of the group has masked are left to it: they would count as
        replaced."""
        free = example.input_ids == example.unmasked_ids
        where = self.mask(example, source, rng, free=free)
        keys = rng.integers(_MOST_KEY, size=len(where))
        targets = np.column_stack([example.unmasked_ids[where], keys])
        example.labels[generator_name(self.name)] = where, targets
        own = np.flatnonzero(free & (example.source_offsets >= 0))
        example.labels[self.name] = own, example.unmasked_ids[own]

    def head(self, backbone: Encoder) -> ReplacedTokenHead:
        check_sharing(backbone, self.embedding_sharing, self.path_of("embedding_sharing"))
        config = self.generator.config(backbone.config, self.path_of("generator"))
        generator = Generator(
            config, backbone, sharing=self.embedding_sharing, temperature=self.temperature
        )
        return ReplacedTokenHead(backbone, generator)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Of the generator's targets: the corpus's unigram frequencies. That of the discriminator
        depends on what was sampled (`tallied`)."""
        if targets.ndim < 2:
            return super().baseline(targets, source)
        return unigram_baseline(targets, source.unigrams)

    def tallied(self, tallies: Mapping[str, float]) -> dict[str, Any]:
        return detection_scores(tallies)
