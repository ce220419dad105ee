"""Reconstruct the whole text from its [CLS] vector (RetroMAE: Xiao et al. 2022, section 3).

    encoder   [CLS] the [MASK] sat on the mat [SEP]     masked by another task of the group
    decoder   h + p_3 sees h, "the", "mat"  ──>  sat    one layer; every token is reconstructed

To reconstruct a text of which it sees little, the decoder needs what is in the [CLS] vector. This
is enhanced decoding (section 3.3), which reconstructs every token, each from another part of the
text; basic decoding (3.2) reconstructs the masked tokens only, all from the same part. As in the
authors' code a text has many sets of visible tokens, of which every position gets one at random; a
token never sees itself.

The encoder's own masked-LM loss is that of `retromae + knowledge_masking` with `rate: 0.15` to 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.settings import PositiveShare
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import unigram_baseline
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.config.config import ACTIVATIONS
from palm_ds.model.encoder.encoder import Encoder, init_weights
from palm_ds.model.encoder.shared_embeddings import tied_sum, tied_tables
from palm_ds.model.heads.heads import Head, HeadOutput, MaskedLMHead, save_tied_words_once
from palm_ds.model.kernels import layer_norm
from palm_ds.model.pooling import TextPooling

TOKEN, POSITION, FIRST, SETS, CHOSEN = range(5)
"""Columns of the targets: a token; its position in its text; 1 at the first token of a text; the
sets of visible tokens that it is in, as bits; the set that its own position sees."""
NUM_SETS = 63  # the bits of an int64 without its sign


@dataclass(frozen=True, kw_only=True)
class Retromae(CorpusTask):
    """Trains the [CLS] vectors of texts without labels."""

    rate: PositiveShare = 0.5
    """Share of the other tokens that the decoder does not see at a position; 0.5 to 0.7 in the
    paper."""

    def text_pooling(self) -> TextPooling:
        return TextPooling(pooling="cls", normalize=True, trained=True)

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        """Every token of a text but its special ones is a label at the text's [CLS]."""
        ends = np.cumsum(example.sub_lengths or (len(example),))
        texts = np.split(np.arange(len(example)), ends[:-1])
        labels = [self._of_text(example, text, rng) for text in texts]
        where, targets = zip(*labels, strict=True)
        example.labels[self.name] = np.concatenate(where), np.concatenate(targets)

    def _of_text(
        self, example: Example, text: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The labels of the text at these places of an example."""
        places = text[example.source_offsets[text] >= 0]
        visible = rng.random((NUM_SETS, len(places))) >= self.rate
        targets = np.zeros((len(places), 5), np.int64)
        targets[:, TOKEN] = example.unmasked_ids[places]
        targets[:, POSITION] = places - text[0]
        targets[:1, FIRST] = 1
        targets[:, SETS] = (1 << np.arange(NUM_SETS)) @ visible
        targets[:, CHOSEN] = rng.integers(NUM_SETS, size=len(places))
        return np.full(len(places), text[0]), targets

    def head(self, backbone: Encoder) -> nn.Module:
        return RetromaeHead(backbone)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's unigram frequencies."""
        return unigram_baseline(targets, source.unigrams)


class Slots(NamedTuple):
    """Slots of the decoder: tiles of whole texts, each text a [CLS] vector and its tokens."""

    tokens: torch.Tensor
    """(n,) int64, the flat slots of the tokens"""
    texts: torch.Tensor
    """(texts,) int64, those of the [CLS] vectors"""
    first: torch.Tensor
    """(texts,) int64, the number of each text's first token"""
    visible: torch.Tensor
    """(tiles, length, length) bool: whether slot i sees slot j"""


def arrange(targets: torch.Tensor) -> Slots:
    """The slots of the tokens of `targets` (n, 5). A tile has room for the longest text, so that
    attention needs no more memory than that of the encoder."""
    text, first = targets[:, FIRST].cumsum(0) - 1, targets[:, FIRST].nonzero()[:, 0]
    sizes = np.diff([*first.tolist(), len(targets)]) + 1  # this waits for the device
    length, starts, end = int(sizes.max()), [], 0
    for size in sizes.tolist():
        if end % length + size > length:
            end += -end % length
        starts.append(end)
        end += size
    texts = torch.tensor(starts, device=text.device)
    tokens = texts[text] + 1 + torch.arange(len(text), device=text.device) - first[text]
    slots = -(-end // length) * length
    # Padding is a text of its own. What is no token is in every set, and sees itself.
    number = text.new_full((slots,), -1).index_copy(0, tokens, text)
    number = number.index_copy(0, texts, torch.arange(len(sizes), device=text.device))
    sets = text.new_full((slots,), -1).index_copy(0, tokens, targets[:, SETS]).view(-1, length)
    chosen = text.new_zeros(slots).index_copy(0, tokens, targets[:, CHOSEN]).view(-1, length)
    number = number.view(-1, length)
    in_set = (sets[:, None, :] >> chosen[:, :, None]) & 1
    visible = (number[:, None, :] == number[:, :, None]) & in_set.bool()
    visible.diagonal(dim1=1, dim2=2).copy_(sets == -1)
    return Slots(tokens, texts, first, visible)


class TokenLookup(nn.Module):
    """The encoder's token embeddings, (n,) -> (n, hidden), registered here too so that ZeRO 3
    gathers them for this module."""

    def __init__(self, backbone: Encoder):
        super().__init__()
        self.tied_words, self.tied_delta = tied_tables(backbone.word)
        save_tied_words_once(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, tied_sum(self.tied_words, self.tied_delta))


class DecoderLayer(nn.Module):
    """One layer whose queries are not its keys and values. It has no dropout."""

    def __init__(self, backbone: Encoder):
        super().__init__()
        config, size = backbone.config, backbone.hidden_size
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.activation]
        self.query, self.key_value = nn.Linear(size, size), nn.Linear(size, 2 * size)
        self.project = nn.Linear(size, size)
        self.attention_norm = _norm(backbone)
        self.expand = nn.Linear(size, config.feed_forward_size)
        self.contract = nn.Linear(config.feed_forward_size, size)
        self.output_norm = _norm(backbone)

    def forward(self, queries: torch.Tensor, memory: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Queries (n, hidden) of the tokens and memory (slots, hidden) -> (n, hidden)."""
        placed = torch.zeros_like(memory).index_copy(0, slots.tokens, self.query(queries))
        parts = placed, *self.key_value(memory).chunk(2, -1)
        shape = (*slots.visible.shape[:2], self.num_heads, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in parts)
        mask = slots.visible[:, None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended = attended.transpose(1, 2).reshape_as(memory).index_select(0, slots.tokens)
        x = self.attention_norm(queries + self.project(attended))
        return self.output_norm(x + self.contract(self.activation(self.expand(x))))


class RetromaeHead(Head):
    """Reads the [CLS] vector h of a text once for each of its tokens:

        queries            LayerNorm(h + p_i)              (the paper's H1)
        keys and values    h, LayerNorm(e_j + p_j)         (H2)

    with the encoder's token embeddings e, which a linear map widens where they are narrower than h
    (ELECTRA, ALBERT), and position embeddings p of its own. The paper leaves the LayerNorms out of
    its equations; the authors' code has them."""

    predicts_tokens = True

    def __init__(self, backbone: Encoder):
        super().__init__()
        config, width = backbone.config, backbone.word.embedding_dim
        self.tokens = TokenLookup(backbone)
        narrow = width != config.hidden_size
        self.widen = nn.Linear(width, config.hidden_size) if narrow else nn.Identity()
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.norm = _norm(backbone)
        self.layer = DecoderLayer(backbone)
        init_weights(self, config.init_range)
        self.words = MaskedLMHead(backbone)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> HeadOutput:
        """`targets` (n, 5) int64."""
        return self.words(self.decode(rows, targets), targets[:, TOKEN])

    def decode(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Vectors that tokens are predicted from, (n, hidden)."""
        slots, places = arrange(targets), self.positions(targets[:, POSITION])
        known = self.norm(self.widen(self.tokens(targets[:, TOKEN])) + places)
        memory = known.new_zeros(slots.visible[..., 0].numel(), known.shape[1])
        memory = memory.index_copy(0, slots.tokens, known)
        memory = memory.index_copy(0, slots.texts, rows.index_select(0, slots.first))
        return self.layer(self.norm(rows + places), memory, slots)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The vectors (n, hidden) themselves."""
        return rows

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        target = torch.zeros(1, 5, dtype=torch.int64, device=device)
        target[:, FIRST] = 1
        return target


def _norm(backbone: Encoder) -> nn.Module:
    config = backbone.config
    return layer_norm(config.hidden_size, config.layer_norm_eps, backbone.kernels.layer_norm)
