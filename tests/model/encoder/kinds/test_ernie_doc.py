"""ERNIE-Doc's memories: how far they reach, what gradients they stop, and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.inputs.batch import Batch, SegmentMemory
from palm_ds.model.inputs.memory import SlotMemories
from palm_ds.model.kernels import Kernels

LENGTH, MEMORY, LAYERS = 6, 4, 2
WORDS = 60


def encoder_of(**values: object) -> Encoder:
    config = EncoderConfig.from_dict(
        {
            "kind": "ernie_doc",
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_layers": LAYERS,
            "num_heads": 2,
            "max_positions": LENGTH,
            "init_range": 0.3,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "options": {"memory_length": MEMORY},
            **values,
        }
    )
    return build_encoder(config)


def window(ids: torch.Tensor, past: torch.Tensor | None = None, *, padding: int = 0) -> Batch:
    """Rows of one window each, with so many tokens of padding before the last one."""
    zeros, length = torch.zeros_like(ids), ids.shape[1]
    places = torch.arange(length).expand_as(ids)
    inside = (places >= length - 1 - padding) & (places < length - 1)
    return Batch(
        input_ids=ids,
        position_ids=places,
        token_type_ids=zeros,
        task_ids=zeros,
        sequence_ids=torch.where(inside, -1, 0),
        cu_seqlens=torch.arange(len(ids) + 1) * length,
        memory=SegmentMemory(past),
    )


def read(encoder: Encoder, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The vectors of one window after another."""
    past, found = None, []
    for ids in windows:
        batch = window(ids, past)
        found.append(encoder(batch))
        assert batch.memory is not None
        past = batch.memory.following
    return found


def document(windows: int) -> list[torch.Tensor]:
    """Windows without a word in common."""
    return [torch.arange(n * LENGTH, (n + 1) * LENGTH)[None] for n in range(windows)]


@torch.no_grad()
def test_memories_reach_further_than_there_are_layers() -> None:
    """Transformer-XL's would end after as many windows as layers: each layer there remembers what
    it read, here what it wrote."""
    encoder, words = encoder_of(), document(LAYERS + 3)
    other = [words[0].flip(1), *words[1:]]
    pairs = zip(read(encoder, words), read(encoder, other), strict=True)
    differences = [float((a - b).abs().max()) for a, b in pairs]
    assert min(differences) > 1e-5
    alone = encoder(window(words[-1]))
    assert (alone - read(encoder, words)[-1]).abs().max() > 1e-3


@torch.no_grad()
def test_recorded_queries_and_keys_are_those_of_the_window() -> None:
    """Not those of the memory, which come from the same matrix."""
    encoder, words = encoder_of(), document(2)
    first = window(words[0])
    encoder(first)
    assert first.memory is not None
    with recorded(encoder, WantedStates(embeddings=True, qkv=(1,))) as states:
        encoder(window(words[1], first.memory.following))
    assert torch.equal(states.qkv[1], encoder.get_submodule("layers.0.qkv")(states.embeddings))


def test_no_gradient_goes_into_earlier_windows() -> None:
    """The memory's keys and values are computed anew, so that matrices learn from it."""
    encoder, words = encoder_of(), document(3)
    read(encoder, words)[-1].sum().backward()
    assert encoder.word.weight.grad is not None
    of_words = encoder.word.weight.grad.abs().sum(1)
    assert of_words[: 2 * LENGTH].max() == 0 and of_words[2 * LENGTH : 3 * LENGTH].min() > 0


@torch.no_grad()
def test_padding_changes_no_vector_of_a_token() -> None:
    encoder, (ids,) = encoder_of(), document(1)
    other = ids.clone()
    other[0, 2:5] = 50
    real = torch.tensor([0, 1, 5])
    one, two = (encoder(window(x, padding=3))[0, real] for x in (ids, other))
    assert torch.equal(one, two)
    assert (one - encoder(window(ids))[0, real]).abs().max() > 1e-3
    at = torch.tensor([5])
    assert torch.equal(encoder(window(ids, padding=3), at)[0], one[2])


@torch.no_grad()
def test_a_shorter_window_has_the_distances_of_a_longer_one() -> None:
    """The rows of the table belong to distances, whatever the length of a row."""
    encoder = encoder_of(max_positions=2 * LENGTH)
    (ids,) = document(1)
    longer = window(torch.cat([ids, ids[:, :1]], 1))
    longer.sequence_ids[:, -1] = -1
    assert torch.allclose(encoder(longer)[:, :LENGTH], encoder(window(ids)), atol=1e-6)


def test_dropout_follows_from_the_place_in_the_step() -> None:
    """Rows in one micro-batch or in two: the same masks, also of what all rows share."""
    rates = {"dropout": 0.3, "attention_dropout": 0.3}
    encoder = encoder_of(**rates)
    encoder.kernels = Kernels(dropout="counter")
    for layer in encoder.layers:
        layer.train()
    ids = torch.cat(document(2))
    past = torch.randn(LAYERS, 2, MEMORY, 16)
    both = replace(window(ids, past), dropout_key=7)
    whole = encoder(both)
    for row in range(2):
        alone = window(ids[row : row + 1], past[:, row : row + 1])
        part = encoder(replace(alone, dropout_key=7, first_row=row))
        assert torch.allclose(part[0], whole[row], atol=1e-6)
    assert not torch.allclose(encoder(replace(both, dropout_key=8)), whole, atol=1e-2)


def test_packed_texts_are_refused() -> None:
    with pytest.raises(UserError, match="ernie_doc reads documents window by window"):
        encoder_of()(replace(window(document(1)[0]), memory=None))


def test_slots_remember_their_document_alone() -> None:
    memories = SlotMemories((1, 2, 3), torch.device("cpu"))
    ids = torch.zeros(2, 4, dtype=torch.int64)

    def step(documents: list[int], value: float) -> torch.Tensor:
        batch = replace(window(ids), documents=torch.tensor(documents), first_row=4)
        memories.begin([batch])
        assert batch.memory is not None and batch.memory.past is not None
        batch.memory.following = torch.full((1, 2, 2, 3), value)
        memories.keep(batch)
        return batch.memory.past[0, :, 0, 0]

    assert step([7, 8], 1.0).tolist() == [0, 0]
    assert step([7, 9], 2.0).tolist() == [1, 0]
    again = SlotMemories((1, 2, 3), torch.device("cpu"))
    again.restore(dict(memories.stored()))
    memories = again
    assert step([7, 9], float("nan")).tolist() == [2, 2]
    assert step([7, 9], 3.0).tolist() == [0, 0]
