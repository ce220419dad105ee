"""translation_language_model, cross_attention_masked_lm and back_translation_masked_lm: examples
against the pairs they came from; what attends to what, losses and pseudo tokens against a
restatement in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, refs
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import build
from palm_ds.engine import check_model
from palm_ds.model.attention.dense import plain_attention
from palm_ds.model.attention.plan import AttentionPlan
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.pseudo_tokens import with_pseudo_tokens
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import visible
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.keyed_sampling import gumbel_noise
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from tests.helpers.pair_corpus import whole, write_translations
from tests.helpers.small_corpus import write_small_corpus

LENGTH, WORDS = 40, 65
TLM, CAMLM = "translation_language_model", "cross_attention_masked_lm"
BTMLM = "back_translation_masked_lm"
CLS, SEP, MASK = 2, 3, 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CorpusSource:
    return whole(write_translations(tmp_path_factory.mktemp("c") / "pairs"))


def dataset_of(source: CorpusSource, kind: str, length: int = LENGTH, **keys: Any):
    task = build(kind, {"source": "text", **keys})
    task.check(source, length)
    return TaskGroupDataset(kind, (task,), task_id=0, source=source, seed=3, max_length=length)


def batch_of(dataset: TaskGroupDataset, numbers: list[int], *, packed: bool = False) -> Batch:
    made = refs(0, np.array(numbers), dataset.layouts(np.array(numbers)))
    length = dataset.max_length * (len(numbers) if packed else 1)
    return build_rows([dataset], [made] if packed else [[x] for x in made], length, 0)


def model_of(dataset: TaskGroupDataset, kernel: str = "plain", dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS, hidden_size=16, num_layers=3, num_heads=2, max_positions=128,
        init_range=0.3, dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip
    backbone = build_encoder(config, Kernels(attention=kernel))
    (task,) = dataset.tasks
    head = task.head(backbone)
    torch.nn.init.normal_(head.bias, 0.0, 0.5)
    temperature = task.pseudo_tokens
    pseudo = {} if temperature is None else {task.name: temperature}
    return Model(backbone, {task.name: head}, {task.name: task.name}, pseudo).eval()


# ---- examples ----


def in_pair_order(example: Example) -> np.ndarray:
    """Where each token of the pair stands in the example."""
    places = example.position_ids
    return np.arange(len(example)) if places is None else np.argsort(places, kind="stable")


@pytest.mark.parametrize("kind", [TLM, CAMLM])
def test_every_example_is_its_pair_masked_on_both_sides(source: CorpusSource, kind: str) -> None:
    dataset, shares = dataset_of(source, kind, rate=0.3), []
    numbers = np.arange(dataset.num_items)
    for n, layout in zip(numbers.tolist(), dataset.layouts(numbers), strict=True):
        example = dataset.example(n, layout)
        order = in_pair_order(example)
        ids, unmasked = example.input_ids[order], example.unmasked_ids[order]
        first, tokens, second = (int(layout[x]) for x in ("first", "first_tokens", "second"))
        a = source.read(first, first + tokens).ids
        b = source.read(second, second + int(layout["second_tokens"])).ids
        np.testing.assert_array_equal(unmasked, [CLS, *a, SEP, *b, SEP])
        np.testing.assert_array_equal(
            example.token_type_ids[order], [0] * (len(a) + 2) + [1] * (len(b) + 1)
        )
        at, targets = example.labels[kind]
        np.testing.assert_array_equal(example.unmasked_ids[at], targets)
        where = np.sort(np.argsort(order)[at])
        assert (where < len(a) + 2).any() and (where >= len(a) + 2).any()
        others = np.setdiff1d(np.arange(len(ids)), where)
        np.testing.assert_array_equal(ids[others], unmasked[others])
        shares.append(len(where) / (len(a) + len(b)))
    assert abs(np.mean(shares) - 0.3) < 0.03


def by_the_paper(side: np.ndarray, masked: np.ndarray) -> torch.Tensor:
    """(tokens, tokens) bool: what each token of a pair attends to."""
    seen = np.zeros((len(side), len(side)), bool)
    for i in range(len(side)):
        for j in range(len(side)):
            own = side[i] == side[j]
            if masked[i]:
                seen[i, j] = (own and masked[j]) or (not own and not masked[j])
            else:
                seen[i, j] = own and not masked[j]
    return torch.from_numpy(seen)


def pair_mask(example: Example) -> tuple[np.ndarray, torch.Tensor]:
    """The order of the pair, and what its tokens attend to there."""
    order = in_pair_order(example)
    masked = np.isin(order, example.labels[CAMLM][0])
    side = np.arange(len(order)) > np.flatnonzero(example.unmasked_ids[order] == SEP)[0]
    return order, by_the_paper(side.astype(int), masked)


def test_masks_attend_to_the_other_text(source: CorpusSource) -> None:
    dataset = dataset_of(source, CAMLM)
    for n in range(8):
        batch = batch_of(dataset, [n])
        example = dataset.example(n, dataset.layouts(np.array([n]))[0])
        order, wanted = pair_mask(example)
        same = batch.sequence_ids[0, :, None] == batch.sequence_ids[0, None, :]
        assert batch.visibility is not None
        seen = (visible(batch.visibility)[0] & same)[order][:, order]
        assert torch.equal(seen, wanted)


# ---- losses ----


def dense(model: Model, ids: list[int], types: list[int], mask: torch.Tensor) -> torch.Tensor:
    """(tokens, hidden) of one text at positions from 0, whose tokens attend by `mask`."""
    total = len(ids)
    batch = Batch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.arange(total)[None],
        token_type_ids=torch.tensor([types]),
        task_ids=torch.zeros(1, total, dtype=torch.int64),
        sequence_ids=torch.zeros(1, total, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, total], dtype=torch.int32),
    )
    plan = AttentionPlan(kernel="plain", compute=plain_attention, mask=mask[None, None])
    return model.backbone.read(batch, [plan] * len(model.backbone.layers))[0]


def cross_entropy(model: Model, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    (head,) = model.heads.values()
    scores = head.norm(head.activation(head.dense(rows))) @ model.backbone.word.weight.T + head.bias
    return F.cross_entropy(scores, targets, reduction="sum")


@pytest.mark.parametrize("kind", [TLM, CAMLM])
def test_losses_are_those_of_the_whole_pair(source: CorpusSource, kind: str) -> None:
    """Packed rows, and every implementation for CPUs, against one pair at a time with a mask of
    its whole."""
    dataset, numbers, wanted = dataset_of(source, kind), [0, 5, 9], torch.zeros(())
    model = model_of(dataset)
    for n in numbers:
        example = dataset.example(n, dataset.layouts(np.array([n]))[0])
        order = in_pair_order(example)
        mask = pair_mask(example)[1] if kind == CAMLM else torch.ones(len(order), len(order)) > 0
        ids, types = example.input_ids[order], example.token_type_ids[order]
        rows = dense(model, ids.tolist(), types.tolist(), mask)
        at, targets = example.labels[kind]
        places = torch.from_numpy(np.argsort(order)[at])
        wanted = wanted + cross_entropy(model, rows[places], torch.from_numpy(targets))
    for kernel in ("plain", "sdpa", "tiles"):
        model = model_of(dataset, kernel)
        found = model(batch_of(dataset, numbers, packed=True))[kind].loss_sum
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["plain", "sdpa", "tiles"])
def test_own_text_is_out_of_reach(source: CorpusSource, kernel: str) -> None:
    """The gradient of a text's masked tokens with respect to its own unmasked ones is zero to the
    last bit; that with respect to the other text's is not."""
    dataset = dataset_of(source, CAMLM, rate=0.3)
    model, batch = model_of(dataset, kernel), batch_of(dataset, [4])
    example = dataset.example(4, dataset.layouts(np.array([4]))[0])
    reached: list[torch.Tensor] = []

    def keep(_module: object, _given: object, out: torch.Tensor) -> torch.Tensor:
        reached.append(out.detach().requires_grad_())
        return reached[-1]

    model.backbone.word.register_forward_hook(keep)
    places = np.asarray(example.position_ids)
    side = places > int(np.asarray(example.position_ids)[example.unmasked_ids == SEP].min())
    at, targets = batch.labels[CAMLM]
    masked = np.isin(np.arange(len(places)), at.numpy())
    for own in (False, True):
        mine = side[at.numpy()] == own
        labels = {CAMLM: (at[mine], targets[mine])}
        loss = model(replace(batch, labels=labels))[CAMLM].loss_sum
        (grad,) = torch.autograd.grad(loss, reached[-1])
        size = grad.flatten(0, -2)[: len(places)].abs().amax(-1).numpy()
        assert (size[(side == own) & ~masked] == 0).all()
        assert (size[(side != own) & masked] == 0).all()
        assert (size[(side != own) & ~masked] > 0).all() and (
            size[(side == own) & masked] > 0
        ).all()


# ---- back-translation ----


def guess(model: Model, example: Example, temperature: float) -> list[int]:
    """The pseudo tokens of one text, from a mask of the whole."""
    where, keys = example.placeholders[BTMLM]
    ids, many = example.unmasked_ids.tolist(), len(example)
    hidden = np.isin(np.arange(many), where)
    mask = torch.from_numpy(hidden[:, None] | ~hidden[None, :])
    mask[:, many - 1] = torch.arange(many) == many - 1  # the [SEP] behind: seen by itself alone
    with torch.no_grad():
        rows = dense(model, ids, example.token_type_ids.tolist(), mask)[where]
        (head,) = model.heads.values()
        rows = head.norm(head.activation(head.dense(rows)))
        scores = rows @ model.backbone.word.weight.T + head.bias
    if temperature:
        scores = scores / temperature + gumbel_noise(torch.from_numpy(keys), WORDS)
    return scores.argmax(-1).tolist()


def filled_in(model: Model, batch: Batch) -> Batch:
    return with_pseudo_tokens(model.backbone, model.labeled, model.pseudo_tokens, batch)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_back_translation_is_two_passes(source: CorpusSource, temperature: float) -> None:
    """Pseudo tokens and losses, packed, against one sentence at a time; dropout is for the second
    pass alone."""
    dataset = dataset_of(source, BTMLM, temperature=temperature, pseudo_rate=0.6)
    model, wanted, numbers, pseudo = model_of(dataset), torch.zeros(()), [0, 3, 4, 7], []
    for n in numbers:
        example = dataset.example(n, dataset.layouts(np.array([n]))[0])
        where, keys = example.placeholders[BTMLM]
        tokens = int((example.source_offsets >= 0).sum())
        assert len(where) == max(round(0.6 * tokens), 1) == len(set(keys.tolist()))
        assert (example.unmasked_ids[where] == MASK).all() and example.input_ids[
            where[-1] + 1
        ] == SEP
        guessed = guess(model, example, temperature)
        pseudo += guessed
        ids = example.input_ids.copy()
        ids[where] = guessed
        rows = dense(
            model, ids.tolist(), example.token_type_ids.tolist(), torch.ones(len(ids), len(ids)) > 0
        )
        at, targets = example.labels[BTMLM]
        assert (at < where[0]).all() and len(at)
        wanted = wanted + cross_entropy(model, rows[at], torch.from_numpy(targets))
    batch = batch_of(dataset, numbers, packed=True)
    for kernel, dropout in (("plain", 0.0), ("tiles", 0.0), ("sdpa", 0.5)):
        model = model_of(dataset, kernel, dropout)
        filled = filled_in(model.train(), batch)
        assert filled.input_ids.flatten()[batch.placeholders[BTMLM][0]].tolist() == pseudo
        assert all(module.training for module in model.modules())
        if not dropout:
            found = model(batch)[BTMLM].loss_sum
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


def test_no_task_s_masks_are_in_the_first_pass(source: CorpusSource) -> None:
    """Placeholders see the whole text, whatever other tasks of the task group mask of it."""
    alone, other = dataset_of(source, BTMLM), dataset_of(source, "knowledge_masking", rate=0.4)
    both = replace(alone, tasks=(*alone.tasks, replace(other.tasks[0], units=("token",))))
    model, numbers = model_of(alone), [0, 3, 4, 7]
    batch = batch_of(both, numbers, packed=True)
    assert set(batch.labels) == {BTMLM, "knowledge_masking"}
    pseudo = filled_in(model, batch).input_ids.flatten()[batch.placeholders[BTMLM][0]]
    examples = [both.example(n, both.layouts(np.array([n]))[0]) for n in numbers]
    assert pseudo.tolist() == [x for example in examples for x in guess(model, example, 0.0)]


def test_pseudo_tokens_follow_from_their_keys(source: CorpusSource) -> None:
    """Not from the other texts of a row or a batch; other keys give others, and with the likeliest
    tokens no key matters. A batch without texts runs the model as well."""
    dataset = dataset_of(source, BTMLM, temperature=1.0)
    model = model_of(dataset)

    def guessed(batch: Batch) -> torch.Tensor:
        return filled_in(model, batch).input_ids.flatten()[batch.placeholders[BTMLM][0]]

    batch = batch_of(dataset, [2, 6])
    together = guessed(batch)
    alone = torch.cat([guessed(batch_of(dataset, [n])) for n in (2, 6)])
    assert torch.equal(together, alone)
    places, keys = batch.placeholders[BTMLM]
    other = replace(batch, placeholders={BTMLM: (places, keys + 1)})
    assert not torch.equal(guessed(other), together)
    model.pseudo_tokens[BTMLM] = 0.0
    assert torch.equal(guessed(other), guessed(batch))
    empty = model(replace(batch, labels={}, placeholders={}))
    assert empty[BTMLM].loss_sum == 0


# ---- settings ----


def test_bad_settings(source: CorpusSource, tmp_path: Path) -> None:
    running = whole(write_small_corpus(tmp_path / "text", documents=8))
    with pytest.raises(UserError, match="no annotation label; make a corpus of pairs"):
        dataset_of(running, TLM).layouts(np.arange(2))
    with pytest.raises(UserError, match="needs rows of 5 tokens or more"):
        dataset_of(source, CAMLM, 4)
    with pytest.raises(UserError, match="no room for a sentence of 4"):
        dataset_of(source, BTMLM, 8)
    assert "40 pairs of texts" in dataset_of(source, TLM).describe()


def test_tokens_made_of_perturbed_embeddings_are_refused(source: CorpusSource) -> None:
    model = model_of(dataset_of(source, BTMLM))
    with pytest.raises(UserError, match=f"optimizer.fgm: tasks.{BTMLM} makes other tokens"):
        check_model(model, OptimizerConfig(fgm=0.1), make_ds_config({}))
