"""Heads over the regions of images, and over images beside texts.

RegionFeatureHead    the features of a masked region: squared error
RegionClassHead      the detector's distribution over its classes: Kullback-Leibler divergence
RegionScoreHead      which region a text is about: a sigmoid each
ImageMatchHead       whether an image and a text belong together
CircleHead           the same, by the circle loss over a pair and others
CrossModalHead       which texts belong to an image, and which images to a text, of a whole step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.config.config import ACTIVATIONS
from palm_ds.model.encoder.encoder import Encoder, init_weights
from palm_ds.model.heads.embedding import EmbeddingHead, StepLosses, VectorSettings
from palm_ds.model.heads.heads import Head, HeadOutput, class_loss
from palm_ds.model.heads.pooled import PooledHead, best_of_groups
from palm_ds.model.kernels import layer_norm

CLASSES = "classes"
"""What the further loss of a RegionFeatureHead is about."""


class RegionHead(Head):
    """`outputs` numbers of a region's vector: linear map, activation, LayerNorm, linear map."""

    reads_regions = True

    def __init__(self, backbone: Encoder, outputs: int):
        super().__init__()
        width, config = backbone.region_width, backbone.config
        self.activation = ACTIVATIONS[config.activation]
        self.transform = nn.Linear(width, width)
        self.norm = layer_norm(width, config.layer_norm_eps, backbone.kernels.layer_norm)
        self.out = nn.Linear(width, outputs)
        init_weights(self, config.init_range)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.activation(self.transform(rows))))  # (n, outputs)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, self.out.out_features, device=device)


class RegionFeatureHead(RegionHead):
    """The features of a region: the squared error, averaged over them. With `classes` its further
    loss is that of the detector's distribution."""

    def __init__(self, backbone: Encoder, features: int, *, classes: int = 0):
        super().__init__(backbone, features)
        if classes:
            self.region_classes = RegionClassHead(backbone, classes)
            self.further: Mapping[str, Head] = {CLASSES: self.region_classes}

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n, features); `correct` is NaN."""
        error = F.mse_loss(self.logits(rows).float(), targets.float(), reduction="none")
        loss = error.mean(-1).sum()
        return HeadOutput(loss, torch.full_like(loss.detach(), math.nan))


class RegionClassHead(RegionHead):
    """The distribution of a detector: a region counts as correct if the likeliest class is."""

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n, classes), which add up to 1."""
        scores, targets = self.logits(rows).float(), targets.float()
        loss = F.kl_div(scores.log_softmax(-1), targets, reduction="sum")
        return HeadOutput(loss, (scores.detach().argmax(-1) == targets.argmax(-1)).sum())


class RegionScoreHead(Head):
    """A score of each region of an image. The loss of an image is the mean over its regions; it is
    correct if the region with the highest score has a target of 1."""

    reads_regions = True
    grouped = True

    def __init__(self, backbone: Encoder, *, dropout: float = 0.0):
        super().__init__()
        self.input_dropout = dropout
        self.score = nn.Linear(backbone.region_width, 1)
        init_weights(self, backbone.config.init_range, truncated=False)

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        """`targets` (n,) float, `groups` (n,) int64. Tensors over groups have n entries, as in
        ChoiceHead."""
        scores, targets = self.logits(rows, groups)[:, 0].float(), targets.float()
        loss = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        count = torch.zeros_like(scores).index_add(0, groups, torch.ones_like(scores))[groups]
        right = best_of_groups(scores.detach(), groups) & (targets > 0.5)
        return HeadOutput((loss / count).sum(), right.sum())

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return self.score(rows)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, device=device)


class ImageMatchHead(Head):
    """Two classes, of which the second one is a match."""

    matches_images = True

    def __init__(self, backbone: Encoder):
        super().__init__()
        self.match = nn.Linear(backbone.match_width, 2)
        init_weights(self, backbone.config.init_range)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`rows` (n, match_width), `targets` (n,) int64"""
        return class_loss(self.logits(rows), targets)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.match(rows)


class CircleHead(PooledHead):
    """The match of an image and a text: the sigmoid of a score. An example is a pair that belongs
    together, and negatives in two halves; its loss is the mean over both of the circle loss (Sun et
    al. 2020, arXiv 2002.10857, equation 6) of the pair against that half, as in ERNIE-ViL's
    retrieval. It is correct if the pair has the highest score. A pair alone has no loss."""

    grouped = True
    soft = "labels"

    def __init__(
        self, width: int, *, margin: float = 0.3, scale: float = 32.0, dropout: float = 0.0
    ):
        super().__init__(width, dropout=dropout, images=True)
        self.margin, self.scale = margin, scale
        nn.init.xavier_uniform_(self.out.weight)  # as ERNIE-ViL's

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> HeadOutput:
        """`targets` (n,) int64: 0 the pair, 1 or 2 a negative of that half; `groups` (n,) int64.
        Tensors over groups have n entries, as in ChoiceHead."""
        scores = self.logits(rows)[:, 0].float()
        near = torch.sigmoid(scores).double()  # since exponentials of the scale overflow
        far = near.detach()
        to_pair = F.relu(1 + self.margin - far) * (near - (1 - self.margin))
        to_other = F.relu(far + self.margin) * (near - self.margin)
        pair, other = (-self.scale * to_pair).exp(), (self.scale * to_other).exp()
        own, loss = targets == 0, torch.zeros_like(near)
        for half in (1, 2):
            total = torch.zeros_like(near).index_add(0, groups, other * (targets == half))
            loss = loss + torch.log1p(total[groups] * pair * own) / 2
        several = torch.zeros_like(near).index_add(0, groups, (~own).double())[groups] > 0
        right = best_of_groups(scores.detach(), groups) & own & several
        return HeadOutput(loss.sum().float(), right.sum())


class Member(IntEnum):
    """Roles of the sequences of an example for a CrossModalHead."""

    IMAGE = 0
    TEXT = 1
    """The text that looks for the image."""
    POSITIVE = 2
    """A further text of the image."""
    NEGATIVE = 3


class CrossModalHead(EmbeddingHead):
    """InfoNCE of images and texts in both directions, over all of a step, with several positives.

    Targets (n, 2) int64: a Member, and a number that is equal for equal images or texts. The first
    two sequences of an example are its image and its text, and each has a loss; that of the example
    is their mean. It is correct if the image's first text is one of its own."""

    def __init__(self, vectors: VectorSettings, *, temperature: float):
        super().__init__(vectors)
        self.temperature = temperature

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=torch.int64, device=device)

    def _losses(
        self, vectors: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> StepLosses:
        members, numbers = targets.unbind(1)
        of_image, of_text = members == Member.IMAGE, members != Member.IMAGE
        scores = vectors[of_image] @ vectors[of_text].T / self.temperature
        _, image = torch.unique(numbers[of_image], return_inverse=True)
        _, text = torch.unique(numbers[of_text], return_inverse=True)
        same = members[of_text] != Member.NEGATIVE
        known = torch.zeros(len(image), len(text), dtype=torch.bool, device=text.device)
        known[image[groups[of_text][same]], text[same]] = True
        belong = known[image][:, text]
        own = members[of_text] == Member.TEXT
        to_text = _share_of(scores, belong)
        to_image = _share_of(scores[:, own].T, belong[:, own].T)
        first = scores.detach().argmax(1, keepdim=True)
        return StepLosses((to_text + to_image) / 2, belong.gather(1, first)[:, 0])


def _share_of(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(n,) minus the logarithm of the share of the softmax over scores (n, any) that the `chosen`
    have together."""
    return scores.logsumexp(1) - scores.masked_fill(~chosen, -math.inf).logsumexp(1)
