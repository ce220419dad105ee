"""Detection of replaced tokens (ELECTRA: Clark et al. 2020, arXiv 2003.10555).

    the [MASK] sat   ──generator──>  distribution  ──sample──>  the dog sat
    the  dog   sat   ──encoder──>    original, replaced, original

The generator is a small encoder with a masked-LM head, trained with the encoder; no gradient passes
through the sample. Its targets are pairs of a token and a key that the sample follows from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from pydantic import NonNegativeInt
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key
from palm_ds.common.settings import PositiveShare, Settings
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, init_weights
from palm_ds.model.encoder.shared_embeddings import EmbeddingSharing, share_embeddings
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec
from palm_ds.model.heads.heads import Head, HeadOutput, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import layer_norm
from palm_ds.model.ops.keyed_sampling import keyed_samples
from palm_ds.model.ops.masked_lm_loss import masked_lm_loss

TOKEN, KEY = range(2)
"""Columns of a generator's targets."""


def generator_name(task: str) -> str:
    """The name of the labels, loss and scores of a task's generator."""
    return f"{task} (generator)"


@dataclass(frozen=True, kw_only=True)
class GeneratorSizes(Settings):
    """The generator: an encoder of the same kind, in other sizes."""

    num_layers: NonNegativeInt = 0
    """Layers of the generator; 0: as many as the encoder has. DeBERTa-v3: half of them."""
    width: PositiveShare = 0.25
    """Its hidden size, inner size and attention heads as a share of the encoder's, unless they are
    given. ELECTRA: 1/4, base 1/3; DeBERTa-v3: 1."""
    hidden_size: NonNegativeInt = 0
    """Its hidden size; 0: by `width`."""
    intermediate_size: NonNegativeInt = 0
    """Inner size of its feed-forward networks; 0: by `width`."""
    num_heads: NonNegativeInt = 0
    """Its attention heads; 0: by `width`."""

    def config(self, encoder: EncoderConfig, where: str = "generator") -> EncoderConfig:
        """The generator of an encoder. Raises UserError, starting with `where`, for sizes that do
        not fit."""
        sizes = {
            "num_layers": self.num_layers or encoder.num_layers,
            "hidden_size": self.hidden_size or self._share(encoder.hidden_size),
            "intermediate_size": self.intermediate_size or self._share(encoder.feed_forward_size),
            "num_heads": self.num_heads or self._share(encoder.num_heads),
        }
        try:
            return replace(encoder, **sizes)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def _share(self, size: int) -> int:
        return max(round(size * self.width), 1)


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings(GeneratorSizes):
    """The generator of replaced_token_detection."""

    path: str = ""
    """A folder with a trained generator to start from, whose sizes replace those above; `init_from`
    has the discriminator."""


def build_generator_encoder(
    config: EncoderConfig, backbone: Encoder, sharing: EmbeddingSharing
) -> TransformerEncoder:
    """An encoder like `backbone` with other sizes, its embeddings as wide as those it shares.
    Raises UserError for a backbone that is no transformer."""
    made = type(backbone)
    if not issubclass(made, TransformerEncoder):
        raise UserError(
            f"backbone.kind: {config.kind}: a generator has to be a transformer, as this encoder "
            "is not"
        )
    width = backbone.word.embedding_dim
    if sharing != "none" and made.embedding_width(config) != width:
        if "embedding_size" in getattr(made.options_type, "__dataclass_fields__", {}):
            config = replace(config, options={**config.options, "embedding_size": width})
        else:
            made = _widened(made, width)
    keywords = {} if made.options_type is not None else config.options
    return made(config, backbone.kernels, recompute=backbone.recompute, **keywords)


def _widened(base: type[TransformerEncoder], width: int) -> type[TransformerEncoder]:
    """An encoder with embeddings of this width, where its kind has no setting for it. Its masked-LM
    head always has a transform, which makes vectors as wide as they are."""

    class WidenedEncoder(base):
        @classmethod
        def spec(cls, config: EncoderConfig) -> TransformerSpec:
            return replace(super().spec(config), embedding_size=width, head_transform=True)

    return WidenedEncoder


class Sampled(NamedTuple):
    """The loss and the correct predictions of masked tokens, and the tokens sampled there (n,)."""

    loss_sum: torch.Tensor
    correct: torch.Tensor
    tokens: torch.Tensor


class SamplingHead(MaskedLMHead):
    """A masked-LM head that also samples, in the same call: ZeRO 3 gathers its weights for that."""

    def __init__(self, backbone: Encoder, temperature: float):
        super().__init__(backbone)
        self.temperature = temperature

    def forward(  # type: ignore[override]
        self, rows: torch.Tensor, targets: torch.Tensor
    ) -> Any:
        """Returns a `Sampled`. `targets` (n, 2) int64."""
        rows = self.transform(rows)
        embeddings, bias, token = self.output_embeddings, self.output_bias, targets[:, TOKEN]
        loss = masked_lm_loss(rows, embeddings, bias, token, self.loss_kernel, self.compiled)
        keys = targets[:, KEY]
        return Sampled(*loss, keyed_samples(rows, embeddings, bias, keys, self.temperature))


class Generator(nn.Module):
    """Fills in masked tokens. Its encoder has no pooler: nothing would use it."""

    written = True
    """Whether it is among the weights of a finished run."""

    def __init__(
        self,
        config: EncoderConfig,
        backbone: Encoder,
        *,
        sharing: EmbeddingSharing = "shared",
        temperature: float = 1.0,
    ):
        super().__init__()
        self.encoder = build_generator_encoder(config, backbone, sharing)
        self.encoder.pooler = nn.Identity()
        self.sharing: EmbeddingSharing = sharing
        share_embeddings(self.encoder, backbone, sharing)
        self.words = self.sampling_head(temperature)

    def sampling_head(self, temperature: float) -> SamplingHead:
        """The head that predicts and samples, once `encoder` is there."""
        return SamplingHead(self.encoder, temperature)

    def forward(
        self, batch: Batch, labels: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[Sampled]:
        """For each (flat positions, targets (n, 2)) what is sampled there. Positions may repeat."""
        if batch.dropout_key is not None:  # the encoder's masks are others
            batch = batch.with_dropout_key(derive_key("generator", batch.dropout_key) >> 1)
        at = torch.cat([positions for positions, _ in labels])
        rows = self.encoder.of_texts(self.encoder(batch, at))
        pieces = rows.split([len(positions) for positions, _ in labels])
        pairs = zip(pieces, labels, strict=True)
        return [self.words(piece, targets) for piece, (_, targets) in pairs]


class ReplacedTokenHead(Head):
    """Whether a token was replaced: dense, activation, one number, whose sigmoid is the
    probability. Where the encoder says so (`detects_in_context`), it reads the norm of the sum of
    the token's vector and that of its text's first token, as in DeBERTa-v3.

    A head without a generator detects, and is trained on no text."""

    def __init__(self, backbone: Encoder, generator: Generator | None = None):
        super().__init__()
        config, size = backbone.config, backbone.hidden_size
        self.reads_first = backbone.detects_in_context
        if self.reads_first:
            self.norm = layer_norm(size, config.layer_norm_eps, backbone.kernels.layer_norm)
        self.activation = ACTIVATIONS[config.activation]
        self.dense, self.out = nn.Linear(size, size), nn.Linear(size, 1)
        init_weights(self, config.init_range)
        self.generator = generator

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, 1) of rows (n, hidden); with `reads_first` (2 n, hidden), the second half those of
        the first tokens."""
        if self.reads_first:
            own, first = rows.chunk(2)
            rows = self.norm(own + first)
        return self.out(self.activation(self.dense(rows)))

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n,) int64: 1 for a replaced token."""
        scores = self.logits(rows)[:, 0].float()
        loss = F.binary_cross_entropy_with_logits(scores, targets.float(), reduction="sum")
        return HeadOutput(loss, ((scores.detach() > 0) == (targets > 0)).sum())

    def tallies(self, rows: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Numbers of all tokens, of those that were replaced, that were found so, and of both."""
        flagged, replaced = self.logits(rows)[:, 0] > 0, targets > 0
        return {
            "tokens": targets.new_tensor(len(targets)),
            "replaced": replaced.sum(),
            "flagged": flagged.sum(),
            "detected": (flagged & replaced).sum(),
        }

    def replace_tokens(
        self, batch: Batch, tasks: Sequence[str]
    ) -> tuple[Batch, dict[str, HeadOutput]]:
        """The batch with the generator's samples in place of masked tokens, and these tasks' labels
        for this head; and {name: output of the generator} for each of them."""
        assert self.generator is not None
        return write_samples(self.generator, batch, {task: task for task in tasks})


def write_samples(
    generator: Generator, batch: Batch, detection: Mapping[str, str]
) -> tuple[Batch, dict[str, HeadOutput]]:
    """The batch with the generator's samples in place of masked tokens, and with labels that say
    which tokens these have replaced; and {name: output of the generator}. `detection`: {task: name
    of these labels}, which are the original tokens before. A batch without masked tokens runs the
    generator on a row of padding."""
    names = [generator_name(task) for task in detection]
    nothing = batch.input_ids.new_zeros(1), batch.input_ids.new_zeros(1, 2)
    labels = [batch.labels.get(name, nothing) for name in names]
    real = [name in batch.labels for name in names]
    samples = generator(batch if any(real) else batch.padding_row(), labels)
    ids = batch.input_ids.flatten().clone()
    for (positions, _), sampled, is_real in zip(labels, samples, real, strict=True):
        if is_real:
            ids[positions] = sampled.tokens
    replaced = {}
    for name in detection.values():
        if name in batch.labels:
            positions, original = batch.labels[name]
            replaced[name] = positions, (ids[positions] != original).long()
    outputs = {
        name: HeadOutput(each.loss_sum * is_real, each.correct * is_real)
        for name, each, is_real in zip(names, samples, real, strict=True)
    }
    shown = replace(
        batch, input_ids=ids.view_as(batch.input_ids), labels={**batch.labels, **replaced}
    )
    return shown, outputs


def detection_scores(tallies: Mapping[str, float]) -> dict[str, Any]:
    """Held-out scores of `ReplacedTokenHead.tallies`: the share of the replaced tokens that is
    detected, that of the detected ones that was replaced, and the accuracy, beside that of taking
    every token for an original one. The loss of that baseline is the entropy of the share that was
    replaced."""
    tokens, detected = tallies["tokens"], tallies["detected"]
    replaced, flagged = tallies["replaced"], tallies["flagged"]
    share = replaced / tokens
    metrics = {
        "f1": 2 * detected / max(replaced + flagged, 1),
        "detected": detected / max(replaced, 1),
        "precision": detected / max(flagged, 1),
        "accuracy": 1 - (replaced + flagged - 2 * detected) / tokens,
        "always_original": 1 - share,
    }
    return {
        "metrics": metrics,
        "baseline_loss": -sum(p * math.log(p) for p in (share, 1 - share) if p),
        "baseline_accuracy": 1 - share,
    }
