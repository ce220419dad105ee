"""Labels, samples, losses and gradients against a restatement in plain torch, and a short run in
which the discriminator becomes better than its baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, refs
from palm_ds.data.tasks.task import build
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.encoder.flops import training_flops
from palm_ds.model.encoder.shared_embeddings import merged_tables, split_tables
from palm_ds.model.heads.replaced_tokens import KEY, TOKEN, generator_name
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.keyed_sampling import gumbel_noise, keyed_samples
from palm_ds.train.plan.work import size_of, work_of
from tests.helpers.small_corpus import write_small_corpus

LENGTH, NAME = 48, "replaced_token_detection"
MADE = generator_name(NAME)
KINDS: Mapping[str, Mapping[str, object]] = {
    "electra": {"options": {"embedding_size": 8}},
    "deberta_v2": {"options": {"buckets": 8, "longest": 40}},
    "bert": {"task_types": 3},
    "modernbert": {},
    "neobert": {},
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
    output = made["word.weight"] if words.tied else words.decoder
    logits = rows @ output.T + words.bias
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

    def odd(x: int) -> int:
        return mix(x) % 2**32 | 1

    def signed(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    columns_of = [odd((v + 1) * 0x9E3779B97F4A7C15 & whole) for v in range(columns)]
    products = [signed(odd(key) * column) for column in columns_of]
    bits = [signed((x ^ (x >> 15)) * 0x9E3779B1) + 2**31 for x in products]
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
        ("neobert", "shared", {"width": 0.5}),
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


# ---- labels ----


@pytest.mark.parametrize(
    "together", [(NAME,), ("knowledge_masking", NAME), (NAME, "knowledge_masking")]
)
def test_labels_equal_a_slow_restatement(source: CorpusSource, together: tuple[str, ...]) -> None:
    """The generator predicts tokens at the rate, each with a key; the discriminator is asked about
    all but special tokens and those that another task has masked."""
    rate, tokens, masked = 0.3, 0, 0
    dataset = dataset_of(source, *together, rate=rate, mask_rate=0.85)
    seen: set[int] = set()
    for n, layout in enumerate(dataset.layouts(np.arange(40))):
        example = dataset.example(n, layout)
        others = {*example.labels["knowledge_masking"][0].tolist()} if len(together) > 1 else set()
        at, targets = example.labels[MADE]
        changed = {i for i, x in enumerate(example.input_ids) if x != example.unmasked_ids[i]}
        shown = (others & changed) - {*at.tolist()}
        asked = [i for i in range(1, len(example) - 1) if i not in shown]
        where, original = example.labels[NAME]
        assert where.tolist() == asked
        assert original.tolist() == [example.unmasked_ids[i] for i in asked]
        assert {*at.tolist()} <= {*asked}
        assert targets[:, TOKEN].tolist() == [example.unmasked_ids[i] for i in at]
        assert changed <= {*at.tolist()} | shown
        tokens, masked = tokens + len(asked), masked + len(changed - shown)
        seen |= {*targets[:, KEY].tolist()}
        if len(together) == 1 and n < 5:
            rng = keyed_generator(derive_key(dataset.key, NAME, "label"), n)
            task = replace(dataset.tasks[0])
            again = task.example(layout, source, rng)
            task.label(again, source, rng)
            assert again.labels[MADE][1].tolist() == targets.tolist()
    assert masked / tokens == pytest.approx(rate * 0.85, abs=0.02)
    assert len(seen) > masked  # no key twice


def test_samples_follow_the_softmax() -> None:
    """20,000 draws from one distribution at temperature 2."""
    torch.manual_seed(3)
    row, table, bias = torch.randn(1, 6), torch.randn(11, 6), torch.randn(11)
    keys = torch.randint(2**63 - 1, (20_000,))
    found = keyed_samples(row.expand(len(keys), -1), table, bias, keys, temperature=2.0)
    share = torch.bincount(found, minlength=11) / len(keys)
    wanted = ((row @ table.T + bias)[0] / 2).softmax(-1)
    error = (wanted * (1 - wanted) / len(keys)).sqrt()
    assert ((share - wanted).abs() < 4 * error).all()
    order = torch.randperm(len(keys))
    again = keyed_samples(row.expand(len(keys), -1), table, bias, keys[order], temperature=2.0)
    assert again.equal(found[order])
    noise = gumbel_noise(keys[:3], 500)
    for one, key in zip(noise, keys, strict=False):
        assert one.numpy() == pytest.approx(slow_gumbel(int(key), 500), abs=1e-5)


# ---- the model ----


@pytest.mark.parametrize("sharing", ["shared", "gradient_disentangled", "none"])
def test_a_batch_without_labels_gives_zero_gradients(source: CorpusSource, sharing: str) -> None:
    """Every parameter takes part, and no text is changed."""
    dataset = dataset_of(source, NAME, "retromae", embedding_sharing=sharing)
    model = model_of(dataset, build_encoder(config_of("bert", source.vocabulary.size)))
    batch = replace(batch_of(dataset, 0, 2), labels={})
    sum(x.loss_sum for x in model(batch).values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_other_heads_use_the_sum_of_both_tables(source: CorpusSource) -> None:
    """Masked words and RetroMAE's decoder, whose gradient is that of the differences alone; every
    parameter has one name, and is saved once, as the sum."""
    dataset = dataset_of(
        source, NAME, "knowledge_masking", "retromae", embedding_sharing="gradient_disentangled"
    )
    model = model_of(dataset, build_encoder(config_of("bert", source.vocabulary.size)))
    with torch.no_grad():
        model.backbone.word.delta.normal_()
    words = model.heads["knowledge_masking"]
    base = model.heads[NAME].generator.encoder.word.weight
    assert torch.equal(words.output_embeddings, base + model.backbone.word.delta)
    words.output_embeddings.sum().backward()
    model.heads["retromae"].tokens(torch.arange(3)).sum().backward()
    assert base.grad is None and model.backbone.word.delta.grad[:3].eq(2).all()
    names = [name for name, _ in model.named_parameters()]
    assert f"heads.{NAME}.generator.encoder.word.weight" in names
    state = model.state_dict()
    assert sorted(state) == sorted(names)
    merged = merged_tables(state)
    assert torch.equal(merged["backbone.word.weight"], base + model.backbone.word.delta)
    assert not [name for name in merged if "delta" in name]
    again = split_tables(merged, state)
    assert again.keys() == state.keys()
    for name, values in state.items():
        torch.testing.assert_close(again[name], values, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("bert", {"width": 0.3}, r"tasks.x.generator: num_heads: 1 does not divide|hidden"),
        ("cnn", {}, "a generator has to be a transformer"),
    ],
)
def test_refused(kind: str, keys: dict[str, float], message: str) -> None:
    sizes = {"hidden_size": 12, "num_layers": 1, "num_heads": 4, "vocab_size": 20}
    config = EncoderConfig.from_dict({**sizes, "kind": kind, "token_types": 1, "task_types": 0})
    own = {"num_heads": 5} if kind == "bert" else {}
    task = build("x", {"kind": NAME, "source": "text", "generator": {**keys, **own}})
    with pytest.raises(UserError, match=message):
        task.head(build_encoder(config))


@pytest.mark.parametrize("sharing", ["shared", "gradient_disentangled"])
def test_recomputation_changes_no_gradient(source: CorpusSource, sharing: str) -> None:
    """With dropout: both encoders are computed twice, the samples once."""
    dataset = dataset_of(source, NAME, embedding_sharing=sharing)
    batch = replace(batch_of(dataset, 0, 4), dropout_key=7)
    config = config_of("electra", source.vocabulary.size, dropout=0.1, attention_dropout=0.1)
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        kernels = Kernels(dropout="counter")
        model = model_of(dataset, build_encoder(config, kernels, recompute=recompute))
        calls: list[int] = []
        for encoder in (model.backbone, model.generators[NAME].encoder):
            encoder.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        total = torch.stack([x.loss_sum for x in model(batch).values()]).sum()
        found.append({"loss": total.detach(), **gradients(model, total)})
        assert len(calls) == (4 if recompute else 2)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("kind", ["electra", "bert"])
def test_embeddings_wider_than_layers_and_rows_have_dropout(
    source: CorpusSource, kind: str
) -> None:
    """As those of ELECTRA-base, 768, are than its generator's layers, 256, and rows of 512."""
    dataset = dataset_of(source, NAME, generator={"width": 0.25})
    options = {"options": {"embedding_size": 64}} if kind == "electra" else {}
    config = config_of(kind, source.vocabulary.size, hidden_size=64, dropout=0.5, **options)
    model = model_of(dataset, build_encoder(config, Kernels(dropout="counter"))).train()
    encoder = model.generators[NAME].encoder
    assert encoder.word.embedding_dim == 64 > max(encoder.hidden_size, LENGTH)
    dropped: list[torch.Tensor] = []
    encoder.widen.register_forward_pre_hook(lambda _, given: dropped.append(given[0] == 0))
    model(replace(batch_of(dataset, 0, 4), dropout_key=7))
    shares = dropped[0].float().mean((0, 1))  # of each column
    assert shares.shape == (64,) and shares.min() > 0.3 and shares.max() < 0.7


def test_an_encoder_has_one_generator(source: CorpusSource) -> None:
    backbone = build_encoder(config_of("electra", source.vocabulary.size))
    tasks = [build(name, {"kind": NAME, "source": "text"}) for name in ("one", "two")]
    heads = {task.name: task.head(backbone) for task in tasks}
    with pytest.raises(UserError, match="tasks.two: an encoder has one generator.*share: one"):
        Model(backbone, heads, {name: name for name in heads})


def test_a_plan_counts_the_generator(source: CorpusSource) -> None:
    """Its layers on every token, and its vocabulary at the masked ones."""
    dataset = dataset_of(source, NAME)
    model = model_of(dataset, build_encoder(config_of("electra", source.vocabulary.size)))
    batch = batch_of(dataset, 0, 4)
    size, work = size_of(model), work_of(model, [batch], rows=8)
    assert (work.labels, work.generated) == (0, 2 * batch.count(MADE))
    passes = [(model.backbone.config, []), (model.generators[NAME].encoder.config, [MADE])]
    wanted = 2 * sum(float(training_flops(config, batch, labels)) for config, labels in passes)
    assert work.of_model(size) == pytest.approx(wanted)


# ---- learning ----


@pytest.mark.slow
def test_the_discriminator_becomes_better_than_its_baseline(tmp_path: Path) -> None:
    """150 steps from scratch: its loss falls below the entropy of the share of replaced tokens, and
    most of those it detects were replaced."""
    corpus = write_small_corpus(tmp_path / "corpus", words=200)
    source = split_corpus(corpus, 0.0, ())[0]
    dataset = dataset_of(source, NAME, embedding_sharing="gradient_disentangled")
    sizes = {"hidden_size": 32, "options": {}, "init_range": 0.2}
    kernels = Kernels(attention="tiles", masked_lm_loss="chunked")
    torch.manual_seed(0)
    config = config_of("electra", source.vocabulary.size, **sizes)
    model, task = model_of(dataset, build_encoder(config, kernels)), dataset.tasks[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    weights = task.loss_weights()
    assert weights == {NAME: 50, MADE: 1}
    for step in range(150):
        batch = batch_of(dataset, 8 * step, 8)
        means = [x.loss_sum / batch.count(n) * weights[n] for n, x in model(batch).items()]
        optimizer.zero_grad()
        sum(means).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    batch = batch_of(dataset, 5000, 60)
    with torch.no_grad():
        found = model.eval()(batch)
    tallies = {name: float(value) for name, value in found[NAME].tallies.items()}
    made = task.tallied(tallies)
    loss, count = float(found[NAME].loss_sum) / batch.count(NAME), batch.count(NAME)
    share = tallies["replaced"] / count
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert made["baseline_loss"] == pytest.approx(entropy)
    assert made["baseline_accuracy"] == made["metrics"]["always_original"] == 1 - share
    assert made["metrics"]["accuracy"] == pytest.approx(float(found[NAME].correct) / count)
    assert loss < 0.8 * entropy
    assert made["metrics"]["precision"] > 0.6 and made["metrics"]["detected"] > 0.3
