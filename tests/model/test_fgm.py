from __future__ import annotations

from typing import Any

import torch
from torch import nn

from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.fgm import FGM, perturbation
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model

LENGTH, WIDTH = 12, 8


def batch_of(*rows: tuple[int, ...], labeled: int = 99) -> Batch:
    """Rows of texts of these lengths, the first `labeled` of which have a label."""
    made, seed = [], 0
    for row in rows:
        made.append([])
        for size in row:
            seed += 1
            ids = torch.randint(5, 30, (size,), generator=torch.Generator().manual_seed(seed))
            nothing = torch.zeros(size, dtype=torch.int64).numpy()
            text = Example(
                input_ids=ids.numpy(),
                token_type_ids=nothing,
                source_offsets=nothing,
                annotations={},
            )
            if seed <= labeled:
                text.labels["sort"] = (nothing[:1], nothing[:1] + seed % 3)
            made[-1].append((text, 0))
    return collate(made, length=LENGTH, pad=0)


def model_of() -> Model:
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=30,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=2,
        max_positions=LENGTH,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return Model(
        build_encoder(config), {"sort": ClassHead(WIDTH, 3, pooled=True)}, {"sort": "sort"}
    )


def test_each_text_is_perturbed_by_the_same_length() -> None:
    batch = batch_of((3, 5), (7,), (), (12,))
    torch.manual_seed(0)
    gradient = torch.randn(4, LENGTH, WIDTH) * torch.tensor([1e-25, 1.0, 1.0, 1e10])[:, None, None]
    gradient[batch.sequence_ids < 0] = 0
    for scale in (1.0, 1e-12, 1e12):
        change = perturbation(gradient * scale, batch.cu_seqlens, 0.3)
        assert change.isfinite().all() and not change[batch.sequence_ids < 0].any()
    change = perturbation(gradient[1:3], torch.tensor([0, 7, 12, 24]), 0.3)
    wanted = 0.3 * gradient[1] / gradient[1].norm()
    torch.testing.assert_close(change[0], wanted)
    assert not change[1].any()


def attack(model: Model, batch: Batch, striker: FGM) -> list[float]:
    losses = []
    striker.begin(batch)
    for second in (False, True):
        if second:
            striker.attack()
        loss = model(batch)["sort"].loss_sum
        loss.backward()
        losses.append(loss.item())
    striker.restore()
    return losses


def test_the_perturbation_raises_the_loss_and_is_undone() -> None:
    """In packed rows: nearby, the loss grows by |gradient| * length for each text."""
    model, batch, length = model_of(), batch_of((3, 5), (7, 4), labeled=3), 1e-3
    striker = FGM(model.backbone.word, length)
    clean = model(batch)["sort"].loss_sum.item()
    before, after = attack(model, batch, striker)
    assert before == clean == model(batch)["sort"].loss_sum.item()
    vectors: list[torch.Tensor] = []
    keep: Any = lambda module, inputs, output: vectors.append(output)  # noqa: E731
    handle = model.backbone.word.register_forward_hook(keep)
    loss = model(batch)["sort"].loss_sum
    (gradient,) = torch.autograd.grad(loss, vectors)
    handle.remove()
    flat = gradient.flatten(0, 1)
    starts = batch.cu_seqlens.tolist()
    steps = [flat[a:b].norm().item() for a, b in zip(starts, starts[1:], strict=False)]
    assert sum(size > 0 for size in steps) == 3  # the text without a label does not move
    assert abs((after - before) - length * sum(steps)) < 0.02 * length * sum(steps)


def test_a_frozen_table_is_perturbed_too() -> None:
    batch = batch_of((6,), (9,))
    free, frozen = model_of(), model_of()
    frozen.backbone.word.requires_grad_(False)
    losses = [attack(m, batch, FGM(m.backbone.word, 0.5)) for m in (free, frozen)]
    assert losses[0] == losses[1] and losses[0][1] > losses[0][0]
    for (name, a), b in zip(free.named_parameters(), frozen.parameters(), strict=True):
        assert (b.grad is None) == (name == "backbone.word.weight")
        assert b.grad is None or (a.grad is not None and torch.equal(a.grad, b.grad))


def test_other_embeddings_are_unaffected() -> None:
    """Outside of begin and end the hook does nothing."""
    words = nn.Embedding(5, 3)
    ids = torch.tensor([[1, 2]])
    before = words(ids)
    FGM(words, 1.0)
    assert torch.equal(words(ids), before)
