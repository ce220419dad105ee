"""Labels, samples, losses and gradients against a restatement in plain torch, and a short run in
which the discriminator becomes better than its baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, refs
from palm_ds.data.tasks.task import build
from palm_ds.model.encoder.encoder import Encoder, EncoderConfig, build_encoder
from palm_ds.model.heads.replaced_tokens import KEY, TOKEN, generator_name
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from tests.helpers.small_corpus import write_small_corpus

LENGTH, NAME = 48, "replaced_token_detection"
MADE = generator_name(NAME)
KINDS: Mapping[str, Mapping[str, object]] = {
    "electra": {"options": {"embedding_size": 8}},
    "deberta_v2": {"options": {"buckets": 8, "longest": 40}},
    "bert": {"task_types": 3},
    "modernbert": {},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=20), 0.0, ("word",))[0]


def config_of(kind: str, vocabulary: int, **changes: object) -> EncoderConfig:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_positions": LENGTH}
    fixed = {"vocab_size": vocabulary, "dropout": 0.0, "attention_dropout": 0.0, "kind": kind}
    return EncoderConfig.from_dict({**sizes, **fixed, **KINDS[kind], **changes})


def dataset_of(source: CorpusSource, *tasks: str, **keys: object) -> TaskGroupDataset:
    own = {NAME: keys, "knowledge_masking": {"units": ["word"]}}
    made = tuple(build(name, {"source": "text", **own.get(name, {})}) for name in tasks)
    return TaskGroupDataset(
        name=" + ".join(tasks), tasks=made, task_id=0, source=source, seed=5, max_length=LENGTH
    )


def batch_of(dataset: TaskGroupDataset, first: int, count: int) -> Batch:
    """Each example in its own row."""
    numbers = np.arange(first, first + count)
    rows = [[ref] for ref in refs(0, numbers, dataset.layouts(numbers))]
    return build_rows([dataset], rows, LENGTH, 0)


def model_of(dataset: TaskGroupDataset, backbone: Encoder) -> Model:
    tasks = sorted(dataset.tasks, key=lambda task: not task.changes_encoder)
    return Model(
        backbone, {t.name: t.head(backbone) for t in tasks}, {t.name: t.name for t in tasks}
    )


# ---- the plain restatement ----


def effective(model: Model, sharing: str) -> tuple[dict[str, torch.Tensor], ...]:
    """The parameters of two encoders that share nothing, as functions of the model's."""
    own = dict(model.named_parameters())
    prefix = f"heads.{NAME}.generator.encoder."
    theirs = {n.removeprefix("backbone."): x for n, x in own.items() if n.startswith("backbone.")}
    made = {n.removeprefix(prefix): x for n, x in own.items() if n.startswith(prefix)}
    if sharing == "shared":
        assert not [name for name in made if name.startswith(("word", "position", "norm"))]
        first = ("word.", "position.", "segment.", "task.", "norm.")
        made |= {name: x for name, x in theirs.items() if name.startswith(first)}
    for name in [x for x in theirs if x.endswith(".delta")]:
        table = name.replace("delta", "weight")
        theirs[table] = made[table].detach() + theirs.pop(name)
    assert ("word.delta" in dict(model.backbone.named_parameters())) == (
        sharing == "gradient_disentangled"
    )
    return theirs, made


def by_the_papers(
    model: Model, batch: Batch, sharing: str
) -> tuple[Batch, dict[str, torch.Tensor]]:
    """The batch with samples, and both losses."""
    theirs, made = effective(model, sharing)
    head = model.heads[NAME]
    words, encoder = head.generator.words, head.generator.encoder
    small, large = (type(x)(x.config) for x in (encoder, model.backbone))
    at, targets = batch.labels[MADE]
    rows = functional_call(small, made, (batch,)).flatten(0, 1)[at]
    rows = words.norm(words.activation(words.dense(rows)))
    logits = rows @ made["word.weight"].T + words.bias
    losses = {MADE: F.cross_entropy(logits, targets[:, TOKEN], reduction="sum")}
    samples = [
        int((score.double().numpy() + slow_gumbel(int(key), len(score))).argmax())
        for score, key in zip(logits.detach(), targets[:, KEY], strict=True)
    ]
    ids = batch.input_ids.clone().flatten()
    ids[at] = torch.tensor(samples)
    shown = replace(batch, input_ids=ids.view_as(batch.input_ids))
    places, original = batch.labels[NAME]
    vectors = functional_call(large, theirs, (shown,)).flatten(0, 1)
    read = vectors[places]
    if model.backbone.config.kind == "deberta_v2":
        first = torch.tensor([int(p) // LENGTH * LENGTH for p in places])  # a text a row
        read = F.layer_norm(read + vectors[first], (16,), head.norm.weight, head.norm.bias, 1e-7)
    score = head.out(head.activation(head.dense(read)))[:, 0]
    wrong = (ids[places] != original).float()
    losses[NAME] = -(wrong * F.logsigmoid(score) + (1 - wrong) * F.logsigmoid(-score)).sum()
    return shown, losses


def slow_gumbel(key: int, columns: int) -> np.ndarray:
    """(columns,) by splitmix64 in Python's integers."""
    whole = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & whole
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & whole
        return x ^ (x >> 31)

    golden, row = 0x9E3779B97F4A7C15, mix(key)
    bits = [mix((row + (v + 1) * golden) & whole) >> 32 for v in range(columns)]
    return np.array([-math.log(-math.log1p(-(x + 0.5) / 2**32)) for x in bits])


@pytest.mark.parametrize(
    ("kind", "sharing", "keys"),
    [
        ("electra", "shared", {"width": 0.5}),
        ("electra", "gradient_disentangled", {"width": 0.5}),
        ("deberta_v2", "gradient_disentangled", {"num_layers": 1, "width": 1.0}),
        ("bert", "gradient_disentangled", {"num_layers": 1, "width": 0.25}),
        ("bert", "none", {"width": 0.5, "num_heads": 1}),
        ("modernbert", "shared", {"width": 0.5}),
    ],
)
def test_samples_losses_and_gradients_equal_a_restatement(
    source: CorpusSource, kind: str, sharing: str, keys: dict[str, object]
) -> None:
    dataset = dataset_of(source, NAME, generator=keys, embedding_sharing=sharing, rate=0.3)
    torch.manual_seed(1)
    model = model_of(dataset, build_encoder(config_of(kind, source.vocabulary.size)))
    with torch.no_grad():
        for parameter in model.parameters():  # tables of differences too
            parameter += torch.randn_like(parameter) * 0.1
    batch = batch_of(dataset, 0, 6)
    shown, wanted = by_the_papers(model, batch, sharing)
    seen: list[Batch] = []
    model.backbone.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = model(batch)
    assert seen[0].input_ids.equal(shown.input_ids)
    assert not shown.input_ids.equal(batch.input_ids)
    for name in (NAME, MADE):
        torch.testing.assert_close(found[name].loss_sum, wanted[name], rtol=1e-5, atol=1e-5)
    for name in (NAME, MADE):
        mine, its = (gradients(model, losses) for losses in (found[name].loss_sum, wanted[name]))
        for parameter, gradient in its.items():
            torch.testing.assert_close(mine[parameter], gradient, rtol=1e-4, atol=2e-5)
        touched = {parameter for parameter, gradient in mine.items() if gradient.any()}
        inside = {x for x in touched if ".generator." in x}
        assert inside == (touched if name == MADE and sharing != "shared" else inside)
        if name == NAME and sharing == "gradient_disentangled":
            assert not inside and "backbone.word.delta" in touched


def gradients(model: Model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values()], retain_graph=True, allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
