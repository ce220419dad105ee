"""Turns texts into vectors with any encoder: a run, or a checkpoint of any format.

    embedder = TrainedModel.open("runs/mine").embedder(EmbeddingSettings(normalize=True))
    embedder.embed(["a text", ("a text", "its pair")])      # (2, hidden) float32
    embedder.vectors(["a text"])                            # the same; SparseVectors of splade

    texts ──tokens, sorted by length──> batches without padding ──encoder──> pooled ──> input order

Which texts share a batch depends on the texts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Settings, one_of
from palm_ds.common.sparse_vectors import NO_ENTRIES, DenseOrSparse, SparseVector, SparseVectors
from palm_ds.data.stream.packing import even_parts, padded_length, rows_to_predict
from palm_ds.data.tasks.example import build_input
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.ops.splade import largest
from palm_ds.model.pooling import OF_ALL_TOKENS, POOLINGS, SPLADE, pool
from palm_ds.tasks.shared.text_task import level
from palm_ds.text.exported_tokenizer import normalizing_tokenizer
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.text.tokens import TokenSpan
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.huggingface.sentence_transformers import embedding_length, modules_of
from palm_ds.weights.formats.runnable import has_pooler

Text: TypeAlias = str | Sequence[str]
"""A text, or a pair of texts: [CLS] one [SEP] other [SEP]."""
CHUNK = 4096
"""Texts that are sorted and batched together."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(Settings):
    """Settings for turning a text into a vector. Those that are None are as the model's folder says
    (its files of sentence-transformers), or else as stated here."""

    pooling: Annotated[str, one_of((*POOLINGS, "pooler", SPLADE))] | None = None
    """`mean`, over all tokens with [CLS] and [SEP]; `cls`; `max`; `pooler`, the trained layer over
    [CLS]; or `splade`, a weight for each word of the vocabulary by the masked-LM head. Default:
    mean."""
    layers: tuple[int, ...] = (-1,)
    """Layers whose outputs are averaged: 1 is the first, -1 the last, 0 the embeddings."""
    concat: bool = False
    """Put the vectors of the layers one after another instead of averaging them."""
    tokens: bool = False
    """One vector for each token, special ones included, instead of one for the text."""
    normalize: bool | None = None
    """Scale vectors to length 1. Default: no."""
    dimensions: NonNegativeInt = 0
    """Keep only the first ones (Matryoshka), before normalizing. Default: all."""
    max_active_dims: NonNegativeInt = 0
    """Keep only the largest numbers of a sparse vector (splade), as many as this. Default: all."""
    max_length: int | None = None
    """The most tokens of a text, special ones included; longer texts are truncated. Default: what
    the model reads."""
    prompt: str | None = None
    """Put before every text, as in "query: ". Default: nothing."""
    task: str = ""
    """The task whose embedding is added, if the model has task embeddings; default: the
    model's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens and self.pooling is not None:
            raise UserError("pooling, tokens: vectors of tokens are not pooled; remove one")
        if self.pooling == "pooler" and self.layers != (-1,):
            raise UserError("layers: the pooler reads the last layer; choose another pooling")
        if not self.layers:
            raise UserError("layers: empty; -1 is the last layer")
        if self.pooling == SPLADE:
            self._check_splade()
        if self.concat and self.dimensions:
            raise UserError("dimensions, concat: exclude each other; remove one")

    def _check_splade(self) -> None:
        """Raises UserError for a setting of dense vectors."""
        if self.layers != (-1,):
            raise UserError("layers: splade's masked-LM head reads the last layer; remove `layers`")
        if self.dimensions:
            raise UserError("dimensions: splade's are words; give max_active_dims instead")


class _TextBatch(NamedTuple):
    """A batch, and where its texts are in it."""

    batch: Batch
    texts: np.ndarray  # (n,) the texts in their order in the batch
    segments: np.ndarray  # (n,) the number of each text's sequence in the batch


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """An encoder on a device, with its tokenizer."""

    contents: CheckpointContents
    """The weights were read from here."""
    encoder: Encoder
    tokenizer: Tokenizer
    settings: EmbeddingSettings
    """Complete: nothing that matters is None."""
    task_id: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch_tokens: int = 1024
    pools_prompt: bool = True
    """Whether the model was trained to pool the tokens of a prompt too, as is done here."""
    words: MaskedLMHead | None = None
    """The masked-LM head that splade reads."""

    @property
    def folder(self) -> Path:
        """The folder or file of the weights."""
        return self.contents.path

    def with_settings(self, settings: EmbeddingSettings) -> Embedder:
        """The same model with other settings. Raises UserError."""
        complete = complete_settings(settings, self.contents)
        if complete.pooling == SPLADE and self.words is None:
            raise UserError(
                "pooling: splade needs the masked-LM head, without which this embedder was opened"
            )
        task_id = embedding_task_id(self.contents, complete.task)
        return replace(self, settings=complete, task_id=task_id)

    @property
    def sparse(self) -> bool:
        """Whether most numbers of its vectors are 0."""
        return self.settings.pooling == SPLADE

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        if self.sparse:
            return self.encoder.word.num_embeddings
        size = self.encoder.hidden_size
        if self.settings.concat:
            return size * len(self.settings.layers)
        return min(self.settings.dimensions or size, size)

    def embed(self, texts: Sequence[Text]) -> np.ndarray:
        """(texts, size) float32."""
        assert not self.settings.tokens, "embed_tokens gives the vectors of tokens"
        return self.embed_encoded(self.encode(texts))

    def embed_encoded(self, texts: Sequence[PackedText]) -> np.ndarray:
        """Likewise, of encoded texts."""
        out = np.empty((len(texts), self.size), np.float32)
        for numbers, vectors in self._computed(texts):
            out[numbers] = vectors
        return out

    def vectors(self, texts: Sequence[Text]) -> DenseOrSparse:
        """`embed`; where most numbers are 0, without these."""
        return self.vectors_encoded(self.encode(texts))

    def vectors_encoded(self, texts: Sequence[PackedText]) -> DenseOrSparse:
        """Likewise, of encoded texts."""
        if not self.sparse:
            return self.embed_encoded(texts)
        out = [NO_ENTRIES] * len(texts)
        for numbers, vectors in self._computed(texts):
            for number, vector in zip(numbers.tolist(), SparseVectors.of(vectors), strict=True):
                out[number] = vector
        return SparseVectors.stack(out, self.size)

    def named(self, vector: SparseVector) -> dict[str, float]:
        """{token: weight} of a sparse vector, the largest weight first."""
        order = np.argsort(-vector.values, kind="stable")
        tokens = self.tokenizer.tokens(vector.indices[order].tolist())
        return dict(zip(tokens, vector.values[order].tolist(), strict=True))

    def _computed(self, texts: Sequence[PackedText]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(numbers of texts, their vectors), of one batch after another."""
        for piece in self._batches(texts):
            with torch.inference_mode():
                yield piece.texts, self._finished(self._vectors(piece))

    def embed_tokens(self, texts: Sequence[PackedText]) -> list[np.ndarray]:
        """The vectors of every token of each encoded text, (tokens, size) float32."""
        out: list[np.ndarray] = [np.empty(0)] * len(texts)
        for piece in self._batches(texts):
            with torch.inference_mode():
                vectors = self._finished(self._layers(piece.batch.to(self.device)))
            starts = piece.batch.cu_seqlens.numpy()
            for text, segment in zip(piece.texts, piece.segments, strict=True):
                out[text] = vectors[starts[segment] : starts[segment + 1]]
        return out

    def encode(self, texts: Sequence[Text]) -> list[PackedText]:
        """Each text with its special tokens, truncated. Raises UserError."""
        return self.encode_counting(texts)[0]

    def encode_counting(self, texts: Sequence[Text]) -> tuple[list[PackedText], int]:
        """`encode`, and how many texts were truncated."""
        prompt = self.settings.prompt or ""
        if prompt and not self.pools_prompt:
            raise UserError(
                f"prompt: the pooling of {self.folder} leaves out the tokens of {prompt!r} "
                "(include_prompt: false), which is not supported"
            )
        pieces = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        for number, piece in enumerate(pieces):
            if not 1 <= len(piece) <= 2 or not all(isinstance(text, str) for text in piece):
                raise UserError(f"text {number}: expected a text or a pair, got {piece!r:.60}")
        flat = [text for first, *rest in pieces for text in (prompt + first, *rest)]
        tokens = iter(ids for ids, _ in self.tokenizer.encode_texts(flat))
        whole = [[next(tokens) for _ in piece] for piece in pieces]
        most = [self._room(len(each)) for each in whole]
        cut = sum(sum(map(len, each)) > room for each, room in zip(whole, most, strict=True))
        return [self._encoded(each, room) for each, room in zip(whole, most, strict=True)], cut

    def _room(self, texts: int) -> int:
        """Tokens of one text or of a pair that fit, without special ones."""
        return (self.settings.max_length or 2) - self.tokenizer.vocabulary.around(texts)

    def _encoded(self, texts: Sequence[np.ndarray], most: int) -> PackedText:
        """The ids of one text or of a pair, truncated and with special tokens."""
        lengths = np.array([[len(text) for text in texts]])
        kept = level(lengths, most)[0] if lengths.sum() > most else lengths[0]
        spans = [TokenSpan(0, ids[:n]) for ids, n in zip(texts, kept, strict=True)]
        layout = build_input(spans, self.tokenizer.vocabulary)
        types = np.minimum(layout.token_type_ids, self.encoder.config.token_types - 1)
        return replace(self.encoded(layout.input_ids), token_type_ids=types)

    def encoded(self, ids: np.ndarray) -> PackedText:
        """A text that was encoded elsewhere."""
        return PackedText(
            input_ids=ids, token_type_ids=np.zeros(len(ids), np.int64), task_id=self.task_id
        )

    def _batches(self, texts: Sequence[PackedText]) -> Iterator[_TextBatch]:
        for first in range(0, len(texts), CHUNK):
            lengths = np.array([len(text.input_ids) for text in texts[first : first + CHUNK]])
            order = np.argsort(-lengths, kind="stable")
            for part in even_parts(lengths[order], self.batch_tokens):
                rows = rows_to_predict(lengths[order[part]], self.encoder.kernels.attention)
                yield self._batch([first + order[part][row] for row in rows], texts)

    def _batch(self, rows: Sequence[np.ndarray], texts: Sequence[PackedText]) -> _TextBatch:
        packed = [[texts[text] for text in row] for row in rows]
        filled = np.array([sum(len(each.input_ids) for each in row) for row in packed])
        length = padded_length(int(filled.max()), self.device)
        # a row that is not full ends in one sequence of padding
        sequences = np.array([len(row) for row in rows]) + (filled < length)
        before = np.concatenate([[0], np.cumsum(sequences)[:-1]])
        segments = [n + np.arange(len(row)) for n, row in zip(before, rows, strict=True)]
        batch = Batch.from_rows(packed, length=length, pad=self.tokenizer.vocabulary.pad)
        return _TextBatch(batch, np.concatenate(list(rows)), np.concatenate(segments))

    def _vectors(self, piece: _TextBatch) -> torch.Tensor:
        """The vectors (n, hidden) of a batch's texts."""
        batch, pooling = piece.batch.to(self.device), self.settings.pooling
        wanted = torch.from_numpy(piece.segments).to(self.device)
        if self.sparse:
            assert self.words is not None, "checked where it was opened"
            at, lengths = batch.tokens_of(batch.cu_seqlens[:-1].long()[wanted])
            rows = self.encoder.of_texts(self.encoder(batch)).flatten(0, 1)[at]
            return self.words.text_vectors(rows, lengths)
        averaged = pooling == "pooler" and self.encoder.averages_texts
        if averaged or pooling in OF_ALL_TOKENS or self.settings.layers != (-1,):
            how = "mean" if averaged else str(pooling)
            tokens, early = self._layers(batch), averaged and self.encoder.pools_each_token
            tokens = self.encoder.pooler(tokens) if early else tokens
            vectors = pool(tokens, batch.sequence_lengths, how).index_select(0, wanted)
            return self.encoder.pooler(vectors) if averaged and not early else vectors
        at = batch.cu_seqlens[:-1].long()[wanted]
        first = self.encoder.of_texts(
            self.encoder(batch, at)
        )  # most of the last layer is computed for [CLS] alone
        return self.encoder.pooler(first) if pooling == "pooler" else first

    def _layers(self, batch: Batch) -> torch.Tensor:
        """The outputs (rows * length, hidden) of the chosen layers, averaged or one after
        another."""
        if self.settings.layers == (-1,):
            return self.encoder.of_texts(self.encoder(batch)).flatten(0, 1)
        numbers = [
            number % (len(self.encoder.computed_layers) + 1) for number in self.settings.layers
        ]
        wanted = WantedStates(
            embeddings=0 in numbers, hidden=tuple(number for number in numbers if number)
        )
        with recorded(self.encoder, wanted) as states:
            self.encoder(batch)
        outputs = [states.hidden[number] if number else states.embeddings for number in numbers]
        found = [output.flatten(0, 1) for output in outputs if output is not None]
        return torch.cat(found, 1) if self.settings.concat else torch.stack(found).mean(0)

    def _finished(self, vectors: torch.Tensor) -> np.ndarray:
        vectors = vectors[:, : self.size].float()
        if self.settings.normalize:
            vectors = F.normalize(vectors, dim=1)
        if most := self.settings.max_active_dims:
            vectors = largest(vectors, most)
        return vectors.cpu().numpy()


# ---- opening ----


def make_embedder(
    contents: CheckpointContents,
    encoder: Encoder,
    tokenizer: Tokenizer,
    settings: EmbeddingSettings,
    *,
    device: torch.device,
    batch_tokens: int,
    words: MaskedLMHead | None = None,
) -> Embedder:
    """An embedder with a checkpoint's built encoder and tokenizer. Raises UserError."""
    complete, stated = complete_settings(settings, contents), modules_of(contents)
    if complete.pooling == SPLADE and words is None:
        raise UserError(
            f"{contents.path}: pooling: splade needs the masked-LM head, which is not built; "
            "choose another pooling"
        )
    return Embedder(
        contents=contents,
        encoder=encoder,
        tokenizer=normalizing_tokenizer(tokenizer, lower=True) if stated.lower else tokenizer,
        settings=complete,
        task_id=embedding_task_id(contents, complete.task),
        device=device,
        batch_tokens=batch_tokens,
        pools_prompt=stated.pools_prompt,
        words=words,
    )


def splade_head(contents: CheckpointContents) -> str:
    """The name of the masked-LM head that splade reads: that of the exported task, or the first.
    Raises UserError if there is none."""
    if not (heads := contents.masked_lm_heads):
        raise UserError(f"{contents.path}: pooling: splade needs a masked-LM head; it has none")
    exported = contents.head_of.get(contents.export_task, "")
    return exported if exported in heads else heads[0]


def complete_settings(
    settings: EmbeddingSettings, contents: CheckpointContents
) -> EmbeddingSettings:
    """The settings with what they leave open, checked against the model. Raises UserError."""
    config, folder = contents.config, contents.path
    stated = modules_of(contents)
    if stated.other and settings.pooling is None and not settings.tokens:
        raise UserError(
            f"{folder}: its vectors depend on {stated.other} of sentence-transformers, which is "
            "not supported; choose a pooling"
        )
    count = config.num_layers
    for number in settings.layers:
        if not -count - 1 <= number <= count:
            raise UserError(
                f"layers: {number}: {folder} has layers 1 to {count}; 0 stands for the embeddings"
            )
    reads = config.max_length
    longest = settings.max_length or embedding_length(contents)
    if not 3 <= longest <= reads:
        raise UserError(f"max_length: {longest}: {folder} reads from 3 to {reads} tokens")
    dimensions = 0 if settings.concat else settings.dimensions or stated.dimensions
    if dimensions > config.hidden_size:
        size = config.hidden_size
        raise UserError(f"dimensions: {dimensions}: vectors of {folder} have only {size} numbers")
    normalize = stated.normalize if settings.normalize is None else settings.normalize
    pooling = None if settings.tokens else settings.pooling or stated.pooling or "mean"
    most = settings.max_active_dims or (stated.max_active_dims if pooling == SPLADE else 0)
    if most and pooling != SPLADE:
        raise UserError("max_active_dims: only for sparse vectors (pooling: splade)")
    if pooling == SPLADE:
        splade_head(contents)  # checks itself
    if pooling == "pooler" and not has_pooler(contents):
        raise UserError(f"{folder}: pooling: it has no trained pooler; choose mean, cls or max")
    return replace(
        settings,
        pooling=pooling,
        normalize=normalize,
        dimensions=dimensions,
        max_active_dims=most,
        max_length=longest,
        prompt=stated.prompt if settings.prompt is None else settings.prompt,
    )


def embedding_task_id(contents: CheckpointContents, task: str) -> int:
    """The row of the task embedding that is added: of the named task, or as the model says. Raises
    UserError."""
    folder = contents.path
    if task and task not in contents.task_ids:
        known = suggest(task, contents.task_ids) if contents.task_ids else "; it names no tasks"
        raise UserError(f"task: {task!r}: no such task in {folder}{known}")
    if not contents.config.task_types:
        return 0
    return contents.task_ids[task] if task else contents.task_id
