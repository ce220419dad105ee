"""Heads: small modules over rows of the encoder's output, each with its loss.

    ClassHead        one of several classes
    MaskedLMHead     the token at a masked position
    GenerationHead   the token that an [ATTN] query stands for
    PooledHead       of whole texts: palm_ds/model/heads/pooled.py
    EmbeddingHead    vectors of texts: palm_ds/model/heads/embedding.py
    SpladeHead       sparse vectors of texts: palm_ds/model/heads/splade.py
    regions of images, and whether an image fits a text: palm_ds/model/heads/regions.py

A head gets only the rows that carry a label, after dropout. `forward` returns the sum of their
losses (the engine divides by the count over the whole step) and the number of correct predictions;
`logits` returns the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.config.config import ACTIVATIONS
from palm_ds.model.encoder.encoder import Encoder, init_weights
from palm_ds.model.encoder.shared_embeddings import tied_sum, tied_tables
from palm_ds.model.ops.compiled import CompiledRegion
from palm_ds.model.ops.keyed_sampling import keyed_samples
from palm_ds.model.ops.masked_lm_loss import (
    TOKEN,
    CrossEntropy,
    masked_lm_loss,
    smoothed_cross_entropy,
    smoothed_lm_loss,
)
from palm_ds.model.ops.splade import splade_vectors

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys

SoftKind: TypeAlias = Literal["", "classes", "labels", "groups", "number", "tokens"]
"""What a head's scores (n, any) are, as far as a student learns from them:

    classes   a softmax over each row
    labels    a sigmoid each
    groups    a softmax over the rows of each group, in each column
    number    values: always squared error
    tokens    a softmax over the vocabulary (soft_vocabulary_loss.py)
    ""        nothing that can be learned
"""


class HeadOutput(NamedTuple):
    """The summed loss of the labeled rows (an fp32 scalar) and how many were predicted correctly
    (NaN where a prediction is neither right nor wrong)."""

    loss_sum: torch.Tensor
    correct: torch.Tensor


class Head(nn.Module):
    """The interface of a head: `forward(rows, targets)` returns a HeadOutput, `logits(rows)` the
    scores of the rows, (n, any). Both also get `groups` if `grouped`."""

    pooled = False
    """Whether it reads rows that went through the encoder's pooler (heads of whole texts do)."""
    classifies = False
    """Whether it classifies the rows it reads; some encoders have a pooler for such heads of tokens
    too (`Encoder.pools_tokens`)."""
    averaged = False
    """Whether it reads the mean over the tokens of the sequence that a labeled position is in,
    without the pooler."""
    global_batch = False
    """Whether its loss compares the texts of a whole step, whatever micro-batch and process they
    are in, as in-batch negatives do. Such a head has the `step_losses` of an `EmbeddingHead`
    (palm_ds/model/heads/embedding.py)."""
    reads_texts = False
    """Whether it gets the rows of all tokens of the texts that its labels are in, one text after
    the other, and the lengths of these texts."""
    sparse = False
    """Whether most numbers of its vectors are 0."""
    reads_first = False
    """Whether it gets two rows for each label: first those of all labeled tokens, then those of
    the first tokens of their texts."""
    reads_regions = False
    """Whether its labels are at regions of images."""
    matches_images = False
    """Whether it reads what `Encoder.match` makes of the images and texts of its labels."""
    grouped = False
    """Whether the labels of an example count as one. Such a head gets `groups`, (n,) int64,
    ascending from 0: the example that each row belongs to."""
    predicts_tokens = False
    """Whether its targets, or their first numbers, are tokens of the whole vocabulary."""
    input_dropout = 0.0
    """Dropout rate of the rows in training; the model applies it, since masks depend on where a row
    is in the batch."""

    soft: SoftKind = ""
    """What its scores are for a student that learns them."""
    further: Mapping[str, Head] = MappingProxyType({})
    """{what it is about: the head of another loss of the same tasks}. A task's labels for it have
    the name of `further_loss`. Modules of their own, or views of this one."""

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        """A valid target (1, ...), for a batch without labels."""
        return torch.zeros(1, dtype=torch.int64, device=device)

    def hidden_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Of a head that `matches_images` the rows (n, any) that its dropout applies to, after its
        hidden layer if it has one, of those (n, hidden) that the encoder returns."""
        return rows

    def reads(self, *, images: bool = False, means: bool = False) -> None:
        """Let a head of whole texts read each with its image, or the means of their tokens."""
        self.matches_images, self.averaged = images, means
        self.pooled = self.pooled and not (images or means)


def further_loss(task: str, about: str) -> str:
    """The name of the labels, the loss and the scores of one of a head's further losses."""
    return f"{task} ({about})"


def predicts_tokens(head: nn.Module) -> bool:
    """Whether a head predicts tokens; a user's may be any module."""
    return getattr(head, "predicts_tokens", False)


def class_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    smoothing: float = 0.0,
    weights: Sequence[float] = (),
) -> HeadOutput:
    """Summed cross-entropy in fp32. `smoothing` is the share of a target spread over all classes;
    `weights` are the classes' weights, all 1 if empty."""
    # One by one, since `new_tensor` would wait for the device.
    each = [logits.new_full((), value, dtype=torch.float32) for value in weights]
    weight = torch.stack(each) if each else None
    loss = F.cross_entropy(
        logits.float(), targets, weight, reduction="sum", label_smoothing=smoothing
    )
    return HeadOutput(loss, (logits.detach().argmax(-1) == targets).sum())


class ClassHead(Head):
    """One of `classes`: a linear map. Smoothing and class weights apply to training
    only."""

    classifies = True
    soft = "classes"

    def __init__(
        self,
        hidden_size: int,
        classes: int,
        *,
        pooled: bool = False,
        images: bool = False,
        means: bool = False,
        init_range: float = 0.02,
        truncated: bool = False,
        dropout: float = 0.0,
        smoothing: float = 0.0,
        weights: Sequence[float] = (),
    ):
        """`images`, `means`: of texts with their images, or of the means of their tokens.
        `truncated`: the initial weights are those of a pretraining head (`init_weights`)."""
        super().__init__()
        self.pooled, self.classes = pooled, classes
        self.reads(images=images, means=means)
        self.classifies = not means
        self.input_dropout, self.smoothing, self.weights = dropout, smoothing, tuple(weights)
        self.out = nn.Linear(hidden_size, classes)
        init_weights(self, init_range, truncated=truncated)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        if not self.training:
            return class_loss(self.logits(rows), targets)
        return class_loss(self.logits(rows), targets, self.smoothing, self.weights)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(rows)  # (n, classes)


class MaskedLMHead(Head):
    """Predicts masked tokens: dense, activation, LayerNorm, then a product with the output
    embeddings; in some architectures that product alone.

    These are the encoder's token embeddings, `tied_words`, registered here too so that ZeRO 3
    gathers them for this module; a state_dict has them once, under the encoder's name. Without
    `tie_word_embeddings` they are the head's own `decoder`.
    """

    predicts_tokens = True
    soft = "tokens"

    def __init__(self, backbone: Encoder):
        super().__init__()
        config, kernels = backbone.config, backbone.kernels
        self.activation = ACTIVATIONS[config.head_activation or config.activation]
        self.loss_kernel = kernels.masked_lm_loss
        self.compiled: CrossEntropy | None = None
        if kernels.compile == "on":
            self.compiled = CompiledRegion("masked-LM loss").wrap(smoothed_cross_entropy)
        self.classes = backbone.word.num_embeddings
        width = backbone.word.embedding_dim
        self.dense, self.norm = backbone.masked_lm_transform() or (None, None)
        self.bias = nn.Parameter(torch.zeros(self.classes)) if backbone.masked_lm_bias else None
        init_weights(self, config.init_range)
        self.tied = config.tie_word_embeddings and backbone.ties_words(config)
        if self.tied:
            self.tied_words, self.tied_delta = tied_tables(backbone.word)
            save_tied_words_once(self)
        else:
            self.decoder = nn.Parameter(torch.empty(self.classes, width))
            deviation = config.init_range
            nn.init.trunc_normal_(self.decoder, std=deviation, a=-2 * deviation, b=2 * deviation)

    @property
    def output_embeddings(self) -> torch.Tensor:
        """(vocabulary, width of the token embeddings)"""
        return tied_sum(self.tied_words, self.tied_delta) if self.tied else self.decoder

    @property
    def output_bias(self) -> torch.Tensor:
        """(vocabulary,); zeros in an architecture without it."""
        return self.output_embeddings.new_zeros(self.classes) if self.bias is None else self.bias

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, *, temperature: float | None = None
    ) -> Any:
        """The loss; with a `temperature` the tokens (n,) that are sampled by keys, the `targets`:
        like a loss in a call, for which ZeRO 3 gathers the weights."""
        rows = self.transform(rows)
        embeddings, bias = self.output_embeddings, self.output_bias
        if temperature is not None:
            return keyed_samples(rows, embeddings, bias, targets, temperature)
        loss = masked_lm_loss(rows, embeddings, bias, targets, self.loss_kernel, self.compiled)
        return HeadOutput(*loss)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(self.transform(rows), self.output_embeddings, self.bias)  # (n, vocabulary)

    def text_vectors(self, rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """SPLADE's vectors (texts, vocabulary) fp32, given rows (tokens, hidden) of texts of these
        lengths."""
        rows = self.transform(rows)
        return splade_vectors(rows, lengths, self.output_embeddings, self.output_bias)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dense is None or self.norm is None:
            return rows
        return self.norm(self.activation(self.dense(rows)))


class GenerationHead(MaskedLMHead):
    """Predicts the token that each query stands for. Smoothing and the weights of flows apply to
    training only: in evaluation the loss is the log of the perplexity."""

    def __init__(self, backbone: Encoder, *, smoothing: float = 0.0, weights: Sequence[float] = ()):
        """`weights`: of the losses of each flow, on average 1; empty: all alike."""
        super().__init__(backbone)
        self.smoothing, self.weights = smoothing, tuple(weights)
        if self.weights and min(self.weights) == max(self.weights):
            self.weights = ()

    def forward(
        self, rows: torch.Tensor, targets: torch.Tensor, *, temperature: float | None = None
    ) -> Any:
        """`targets` (n,) tokens, or (n, 2) tokens and the number of their flow."""
        changed = self.training and (self.smoothing or self.weights)
        if temperature is not None or not changed:
            tokens = targets.view(len(rows), -1)[:, TOKEN]
            return super().forward(rows, tokens, temperature=temperature)
        loss = smoothed_lm_loss(
            self.transform(rows),
            self.output_embeddings,
            self.output_bias,
            targets,
            self.loss_kernel,
            smoothing=self.smoothing,
            weights=self.weights,
            compiled=self.compiled,
        )
        return HeadOutput(*loss)

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, 2, dtype=torch.int64, device=device)


_TIED = ("tied_words", "tied_delta", "tied_ngrams")


def save_tied_words_once(module: nn.Module) -> None:
    """Leave what it shares with the encoder's token embeddings out of its state_dict."""
    module.register_state_dict_post_hook(_omit_tied_embeddings)
    module.register_load_state_dict_post_hook(_expect_no_tied_embeddings)


def _omit_tied_embeddings(module: nn.Module, state: dict, prefix: str, _metadata: object) -> None:
    for name in _TIED:
        state.pop(prefix + name, None)


def _expect_no_tied_embeddings(_module: nn.Module, keys: _IncompatibleKeys) -> None:
    missing = keys.missing_keys
    missing[:] = [name for name in missing if name.rpartition(".")[2] not in _TIED]
