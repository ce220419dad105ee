"""Labels against a slow restatement, the decoder against the paper's equations, and a tiny run in
which the [CLS] vectors learn what is in their texts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, refs
from palm_ds.data.tasks.task import build
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.retromae import FIRST, NUM_SETS, Retromae, RetromaeHead
from tests.helpers.small_corpus import write_small_corpus

LENGTH, RATE = 32, 0.6


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=20), 0.0, ("word",))[0]


def dataset_of(source: CorpusSource, *kinds: str, rate: float = RATE) -> TaskGroupDataset:
    own = {"retromae": {"rate": rate}, "knowledge_masking": {"units": ["word"], "rate": 0.3}}
    tasks = tuple(build(kind, {"source": "text", **own.get(kind, {})}) for kind in kinds)
    return TaskGroupDataset(
        name=" + ".join(kinds), tasks=tasks, task_id=0, source=source, seed=5, max_length=LENGTH
    )


def batch_of(dataset: TaskGroupDataset, first: int, count: int) -> Batch:
    """Each example in its own row."""
    numbers = np.arange(first, first + count)
    rows = [[ref] for ref in refs(0, numbers, dataset.layouts(numbers))]
    return build_rows([dataset], rows, LENGTH, 0)


def config(vocabulary: int, **changes: object) -> EncoderConfig:
    base = EncoderConfig(
        vocab_size=vocabulary, hidden_size=16, num_layers=1, num_heads=2, max_positions=LENGTH
    )
    return replace(base, dropout=0.0, attention_dropout=0.0, **changes)  # type: ignore[arg-type]


# ---- labels ----


@pytest.mark.parametrize(
    "kinds", [("retromae",), ("retromae", "knowledge_masking"), ("simcse", "retromae")]
)
def test_labels_equal_a_slow_restatement(source: CorpusSource, kinds: tuple[str, ...]) -> None:
    """Every token that is not special, as it was before masking; its set of 63 sets, which hide
    each token with the task's rate."""
    dataset = dataset_of(source, *kinds)
    hidden = masked = tokens = 0
    for n, layout in enumerate(dataset.layouts(np.arange(40))):
        example = dataset.example(n, layout)
        masked += int((example.input_ids != example.unmasked_ids).sum())
        rng = keyed_generator(derive_key(dataset.key, "retromae", "label"), n)
        wanted, start = [], 0
        for length in example.sub_lengths or (len(example),):
            places = range(start + 1, start + length - 1)  # without [CLS] and [SEP]
            sets = [[rng.random() >= RATE for _ in places] for _ in range(NUM_SETS)]
            chosen = rng.integers(NUM_SETS, size=len(places))
            for k, place in enumerate(places):
                bits = sum(1 << s for s in range(NUM_SETS) if sets[s][k])
                token = int(example.unmasked_ids[place])
                wanted.append([start, token, place - start, int(k == 0), bits, int(chosen[k])])
                hidden, tokens = hidden + NUM_SETS - bits.bit_count(), tokens + 1
            start += length
        where, targets = example.labels["retromae"]
        assert np.column_stack([where, targets]).tolist() == wanted
    assert hidden / tokens / NUM_SETS == pytest.approx(RATE, abs=0.01)
    assert (masked > 0.2 * tokens) == ("knowledge_masking" in kinds)


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_refused(rate: float) -> None:
    with pytest.raises(UserError, match="tasks.x.rate: expected (a number above 0|at most 1), got"):
        Retromae(name="x", source="text", rate=rate)


# ---- the decoder ----


def by_the_paper(
    head: RetromaeHead, rows: torch.Tensor, targets: torch.Tensor, words: torch.Tensor
) -> torch.Tensor:
    """The loss, token by token: x_i sees h, and each x_j in its set but itself."""
    layer, heads = head.layer, head.layer.num_heads
    bounds = [*targets[:, FIRST].nonzero()[:, 0].tolist(), len(targets)]
    total = torch.zeros(())
    for start, end in zip(bounds, bounds[1:], strict=False):
        ids, places, _, sets, chosen = targets[start:end].T
        p, h = head.positions.weight[places], rows[start]
        memory = [h, *head.norm(words[ids] + p)]
        for i in range(end - start):
            query = head.norm(h + p[i])
            seen = [0] + [1 + j for j in range(end - start) if j != i and sets[j] >> chosen[i] & 1]
            key, value = layer.key_value(torch.stack([memory[j] for j in seen])).chunk(2, -1)
            q, k, v = (x.unflatten(-1, (heads, -1)) for x in (layer.query(query), key, value))
            weights = (torch.einsum("hd,jhd->hj", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
            attended = torch.einsum("hj,jhd->hd", weights, v).flatten()
            x = layer.attention_norm(query + layer.project(attended))
            x = layer.output_norm(x + layer.contract(F.gelu(layer.expand(x))))
            x = head.words.norm(F.gelu(head.words.dense(x)))
            logits = x @ head.words.output_embeddings.T + head.words.bias
            total = total + F.cross_entropy(logits, ids[i])
    return total


NARROW = {"kind": "electra", "task_types": 0, "options": {"embedding_size": 8}}


@pytest.mark.parametrize(
    "more", [{}, {"tie_word_embeddings": False}, NARROW], ids=["tied", "untied", "narrow"]
)
def test_decoder_equals_the_equations(source: CorpusSource, more: dict[str, object]) -> None:
    """Texts of 1 to 28 tokens, so that some share a tile; loss and all gradients."""
    batch = batch_of(dataset_of(source, "simcse", "retromae"), 0, 5)
    targets = batch.labels["retromae"][1]
    assert len(set(np.diff(targets[:, FIRST].nonzero()[:, 0]))) > 1
    targets = torch.cat([targets, targets[:1]])  # a text of one token
    torch.manual_seed(1)
    backbone = build_encoder(config(source.vocabulary.size, activation="gelu", **more))
    head = RetromaeHead(backbone).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += torch.randn_like(parameter) * 0.2
    h = torch.randn(int(targets[:, FIRST].sum()), 16, dtype=torch.float64, requires_grad=True)
    text = targets[:, FIRST].cumsum(0) - 1
    words = head.widen(head.tokens.tied_words)
    wanted = by_the_paper(head, h[text], targets, words)
    found = head(h[text], targets).loss_sum
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0.0)
    parameters = [h, *head.parameters()]
    expected = torch.autograd.grad(wanted, parameters)
    for mine, its in zip(torch.autograd.grad(found, parameters), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_a_batch_without_labels_gives_zero_gradients(source: CorpusSource) -> None:
    backbone = build_encoder(config(source.vocabulary.size))
    net = Model(backbone, {"retromae": RetromaeHead(backbone)}, {"retromae": "retromae"})
    batch = replace(batch_of(dataset_of(source, "retromae"), 0, 2), labels={})
    net(batch)["retromae"].loss_sum.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_token_embeddings_are_saved_once_and_loaded(tmp_path: Path) -> None:
    backbone = build_encoder(config(20, tie_word_embeddings=False))
    net = Model(backbone, {"r": RetromaeHead(backbone)}, {"r": "r"})
    state = net.state_dict()
    assert not [name for name in state if name.endswith("tied_words")]
    assert "heads.r.words.decoder" in state
    other = build_encoder(config(20, tie_word_embeddings=False))
    same = Model(other, {"r": RetromaeHead(other)}, {"r": "r"})
    same.load_state_dict(state)
    assert dict(same.named_parameters(remove_duplicate=False))["heads.r.tokens.tied_words"] is (
        other.word.weight
    )
    torch.testing.assert_close(other.word.weight, backbone.word.weight)


# ---- learning ----


def test_the_vectors_learn_what_is_in_the_texts(source: CorpusSource) -> None:
    """The loss falls, and rises again if texts get the vectors of other texts."""
    dataset = dataset_of(source, "retromae", "knowledge_masking", rate=0.9)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2}
    kernels = Kernels(attention="tiles", masked_lm_loss="chunked")
    backbone = build_encoder(config(source.vocabulary.size, **sizes), kernels)
    heads = {task.name: task.head(backbone) for task in dataset.tasks}
    net = Model(backbone, heads, {name: name for name in heads})
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for step in range(80):
        batch = batch_of(dataset, 16 * step, 16)
        means = [x.loss_sum / batch.count(name) for name, x in net(batch).items()]
        optimizer.zero_grad()
        sum(means, torch.zeros(())).backward()
        optimizer.step()
        losses.append(means[0].item())
    batch = batch_of(dataset, 5000, 16)
    positions, targets = batch.labels["retromae"]
    with torch.no_grad():
        vectors = net.backbone(batch).flatten(0, 1)
        own = net.heads["retromae"](vectors[positions], targets).loss_sum / len(targets)
        others = (positions + LENGTH) % (16 * LENGTH)
        wrong = net.heads["retromae"](vectors[others], targets).loss_sum / len(targets)
    assert own < losses[0] - 0.5
    assert wrong > own + 0.3
