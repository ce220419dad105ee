"""Every example against the passage it came from, losses against a restatement in plain torch, and
queries that see nothing of one another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.corpus.mine_ngrams import mine_ngrams
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, refs
from palm_ds.data.tasks.example import Example, lengthened
from palm_ds.data.tasks.task import build
from palm_ds.inference.inspect_stream import View, as_record, as_text, sequences
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.ngrams import NgramEmbedding, NgramHead
from palm_ds.model.heads.replaced_tokens import generator_name
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import HIDDEN
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.keyed_sampling import gumbel_noise
from palm_ds.pretrain.explicit_ngram_masking import ExplicitNgramMasking
from palm_ds.train.plan.work import size_of, work_of
from palm_ds.weights import weights_folder
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.weights_info import WeightsInfo
from tests.helpers.small_corpus import write_small_corpus

LENGTH, NAME = 48, "explicit_ngram_masking"
FINE, REPLACED, MADE = f"{NAME} (fine)", f"{NAME} (replaced)", generator_name(NAME)
CLS, SEP, MASK, WORDS = 2, 3, 4, 65
KINDS: dict[str, dict[str, Any]] = {
    "ernie_gram": {},
    "bert": {"task_types": 3},
    "mpnet": {"max_positions": LENGTH + 2, "options": {"relative_buckets": 8}},
    "deberta_v2": {"options": {"buckets": 8, "longest": 40}},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c")
    corpus = write_small_corpus(folder / "corpus", documents=20)
    mine_ngrams(corpus.path, folder / "ngrams.tsv", sizes=(60, 40), least=3)
    return split_corpus(corpus, 0.0, ())[0]


def dataset_of(source: CorpusSource, *, task_id: int = 0, **keys: Any) -> TaskGroupDataset:
    lexicon = str(Path(source.corpus.path).parent / "ngrams.tsv")
    task = build(NAME, {"source": "text", "lexicon": lexicon, **keys})
    task.check(source, LENGTH)
    return TaskGroupDataset(
        NAME, (task,), task_id=task_id, source=source, seed=3, max_length=LENGTH
    )


def task_of(dataset: TaskGroupDataset) -> ExplicitNgramMasking:
    (task,) = dataset.tasks
    assert isinstance(task, ExplicitNgramMasking)
    return task


def batch_of(dataset: TaskGroupDataset, count: int, *, packed: bool = False) -> Batch:
    numbers = np.arange(count)
    made = refs(0, numbers, dataset.layouts(numbers))
    length = LENGTH * count if packed else LENGTH
    return build_rows([dataset], [made] if packed else [[x] for x in made], length, 0)


def model_of(dataset: TaskGroupDataset, kind: str = "ernie_gram", **changes: Any) -> Model:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_positions": LENGTH}
    fixed = {"vocab_size": WORDS, "dropout": 0.0, "attention_dropout": 0.0, "kind": kind}
    config = EncoderConfig.from_dict({**sizes, **fixed, **KINDS[kind], **changes})
    backbone = build_encoder(config, Kernels(attention="plain"))
    model = Model(backbone, {NAME: task_of(dataset).head(backbone)}, {NAME: NAME})
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of 0 and norms of 1 would hide mistakes
            torch.nn.init.normal_(parameter, float(parameter.mean() > 0.5), 0.3)
        elif parameter.shape[0] != 33:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter)
    return model.eval()


# ---- examples ----


def expanded(example: Example, task: ExplicitNgramMasking) -> tuple[list[int], int]:
    """The passage that an example was made of, and its places."""
    at, targets = example.labels[NAME]
    told, text = dict(zip(at.tolist(), targets.tolist(), strict=True)), []
    places = int((example.source_offsets >= 0).sum()) + len(at) + 2
    for place in range(1, places - 1):
        own = told.get(place, int(example.input_ids[place]))
        text += [own] if own >= 0 else task.ngrams.ngrams[-1 - own]
    return text, places


@pytest.mark.parametrize("comprehensive", [False, True])
def test_every_example_is_its_passage(source: CorpusSource, comprehensive: bool) -> None:
    dataset = dataset_of(source, comprehensive=comprehensive, relation={})
    task, numbers = task_of(dataset), np.arange(dataset.num_items)
    layouts, grams = dataset.layouts(numbers), 0
    for n, layout in zip(numbers.tolist(), layouts, strict=True):
        spare = min(2, int(layout["spare"]))
        example = dataset.example(n, lengthened(layout, spare))
        drawn, end = int(layout["drawn"]), int(layout["end"])
        text, places = expanded(example, task)
        assert text == source.read(end - len(text), end).ids.tolist()
        ids, (at, targets) = example.input_ids, example.labels[NAME]
        assert len(at) == drawn and (ids[at] == MASK).all() and (np.diff(at) > 0).all()
        assert (ids[0], ids[places - 1], (ids == MASK).sum()) == (CLS, SEP, drawn)
        grams += (targets < 0).sum()
        keyed, every = example.labels[MADE], example.labels[REPLACED]
        np.testing.assert_array_equal(keyed[1][:, 0], targets)
        assert keyed[0].tolist() == at.tolist() and every[0].tolist() == [*range(1, places - 1)]
        np.testing.assert_array_equal(every[1][at - 1], targets)
        others = np.setdiff1d(every[0], at)
        np.testing.assert_array_equal(every[1][others - 1], ids[others])
        if not comprehensive:
            assert (
                len(example)
                == places
                == len(text)
                + 2
                - sum(len(task.ngrams.ngrams[-1 - y]) - 1 for y in targets.tolist() if y < 0)
            )
            assert example.visibility is None and FINE not in example.labels
            continue
        assert len(example) == layout["length"] + spare == len(text) + 2 + drawn
        where, tokens = example.labels[FINE]
        assert where.tolist() == [*range(places, len(example))]
        assert example.position_ids is not None and example.visibility is not None
        wanted = [
            (place, -1 - len(task.ngrams) - order, token)
            for place, y in zip(at.tolist(), targets.tolist(), strict=True)
            for order, token in enumerate([y] if y >= 0 else task.ngrams.ngrams[-1 - y])
        ]
        rows = zip(example.position_ids[where], ids[where], tokens, strict=True)
        assert [tuple(map(int, row)) for row in rows] == wanted
        assert example.position_ids[:places].tolist() == [*range(places)]
        assert (example.visibility.order[where] == HIDDEN).all()
        assert not example.visibility.order[:places].any() and not example.visibility.limit.any()
    assert grams > 30


@pytest.mark.parametrize("comprehensive", [False, True])
def test_others_of_its_group_label_the_tokens_that_it_leaves(
    source: CorpusSource, comprehensive: bool
) -> None:
    """No n-gram is a label of theirs, and what they mask does not count as replaced."""
    words = split_corpus(source.corpus, 0.0, ("word",))[0]
    own = {"knowledge_masking": {"units": ["word"]}, "token_document_relation": {"least": 20}}
    kinds = ("knowledge_masking", "token_document_relation", "retromae")
    others = tuple(build(kind, {"source": "text", **own.get(kind, {})}) for kind in kinds)
    dataset = dataset_of(words, comprehensive=comprehensive, relation={})
    dataset = replace(dataset, tasks=(*dataset.tasks, *others))
    lost = 0
    for n, layout in enumerate(dataset.layouts(np.arange(dataset.num_items))):
        example = dataset.example(n, layout)
        at, labels = example.labels[NAME][0], example.labels
        masked, tokens = labels["knowledge_masking"]
        assert tokens.min() >= 0 and (tokens == example.unmasked_ids[masked]).all()
        assert not np.isin(at, masked).any() and (example.input_ids[at] == MASK).all()
        asked = labels["token_document_relation"][0]
        assert not np.isin(at, asked).any()
        plain = np.flatnonzero(example.source_offsets >= 0)
        assert labels["retromae"][1][:, 0].tolist() == example.unmasked_ids[plain].tolist()
        changed = masked[example.input_ids[masked] != tokens]
        where, original = labels[REPLACED]
        assert where.tolist() == sorted(np.setdiff1d(np.append(plain, at), changed).tolist())
        np.testing.assert_array_equal(original, example.unmasked_ids[where])
        lost += len(changed)
    assert lost > 20


def test_the_share_of_segments_is_exact_on_average(source: CorpusSource) -> None:
    dataset = dataset_of(source, rate=0.2, comprehensive=False)
    task, drawn, segments = task_of(dataset), 0, 0
    numbers = np.arange(3 * dataset.num_items)
    for layout in dataset.layouts(numbers):
        tokens = int(layout["length"]) - 2
        if tokens > 20:
            ids = source.read(int(layout["end"]) - tokens, int(layout["end"])).ids
            segments += len(task.ngrams.cut(ids)[0])
            drawn += int(layout["drawn"])
    assert drawn / segments == pytest.approx(0.2, abs=0.01)
    assert "100 n-grams of at most 3 tokens" in task.describe(source)


def test_inspect_shows_ngrams_and_mask_symbols(source: CorpusSource) -> None:
    dataset = dataset_of(source, relation={})
    task, numbers = task_of(dataset), np.arange(20)
    rows = [[ref] for ref in refs(0, numbers, dataset.layouts(numbers))]
    view = View(
        title="",
        datasets=[dataset],
        rows=rows,
        shown=numbers.tolist(),
        length=LENGTH,
        tokenizer=source.corpus.tokenizer(),
        token_tasks=frozenset({NAME}),
    )
    text = "".join(as_text(view, row).plain for row in view.shown)
    records = [as_record(view, seen) for seen in sequences(view, view.shown)]
    originals = {x for record in records for x in record["original"].values()}
    known = {" ".join(f"w{x - 5}" for x in tokens) for tokens in task.ngrams.ngrams}
    found = originals & known
    assert len(found) > 5 and all(f"[MASK]({ngram})" in text for ngram in found)
    symbols = {x for record in records for x in record["tokens"] if x.startswith("[M")}
    assert symbols == {"[MASK]", "[M1]", "[M2]", "[M3]"} and "[M3]" in text


# ---- who sees whom ----


@pytest.mark.parametrize("kind", KINDS)
def test_queries_see_the_text_and_themselves(source: CorpusSource, kind: str) -> None:
    """In packed rows: another symbol in one query changes that query alone; without queries the
    text's vectors are the same."""
    dataset = dataset_of(source)
    backbone = model_of(dataset, kind).backbone
    batch = batch_of(dataset, 3, packed=True)
    with torch.no_grad():
        found = backbone(batch)[0]
        queries = batch.labels[FINE][0]
        for query in queries[[0, len(queries) // 2, -1]].tolist():
            ids = batch.input_ids.clone()
            ids[0, query] = 9 if ids[0, query] < 0 else -1
            changed = (backbone(replace(batch, input_ids=ids))[0] - found).abs().amax(-1) > 0
            assert changed.nonzero().flatten().tolist() == [query]
        ids = batch.input_ids.clone()
        ids[0, 3] = 9
        changed = (backbone(replace(batch, input_ids=ids))[0] - found).abs().amax(-1) > 1e-5
        first = dataset.example(0, dataset.layouts(np.arange(1))[0])
        assert changed[: len(first)].all() and not changed[len(first) :].any()
        alone = Example(first.input_ids, first.token_type_ids, first.source_offsets, {})
        places = int(queries[0])
        text = Batch.from_rows([[alone.packed(0)]], length=len(first), pad=0)
        text = replace(
            text, input_ids=text.input_ids[:, :places], position_ids=text.position_ids[:, :places]
        )
        text = replace(
            text,
            **{
                name: getattr(text, name)[:, :places]
                for name in ("token_type_ids", "task_ids", "sequence_ids")
            },
            cu_seqlens=torch.tensor([0, places], dtype=torch.int32),
        )
        torch.testing.assert_close(backbone(text)[0], found[:places], atol=2e-6, rtol=0)


# ---- losses ----


def vectors_of(model: Model, batch: Batch) -> torch.Tensor:
    return model.backbone(batch).flatten(0, 1)


def scores(head: Any, rows: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    """Of tokens, then of n-grams, one table after the other."""
    rows = head.norm(F.gelu(head.dense(rows)))
    biases = (head.bias, head.ngram_bias)
    return torch.cat([rows @ x.T + b for x, b in zip(tables, biases, strict=False)], -1)


def joint(targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor([y if y >= 0 else WORDS + (-1 - y) for y in targets.tolist()])


@pytest.mark.parametrize("relation", [None, {"width": 0.5, "temperature": 0.7}])
def test_losses_are_those_of_the_equations(source: CorpusSource, relation: Any) -> None:
    dataset = dataset_of(source, relation=relation)
    task, model, batch = task_of(dataset), model_of(dataset), batch_of(dataset, 4, packed=True)
    outputs = model(batch)
    head: Any = model.heads[NAME]
    assert isinstance(head, NgramHead) and isinstance(model.backbone.word, NgramEmbedding)
    words, table = model.backbone.word.weight, model.backbone.word.ngrams
    ngrams = table[: len(task.ngrams)]
    assert len(table) == len(task.ngrams) + task.ngrams.longest
    (at, targets), (queries, tokens) = batch.labels[NAME], batch.labels[FINE]
    shown, expected = batch, {}
    if relation:
        generator = head.generator
        small = generator.encoder(batch).flatten(0, 1)[at]
        logits = scores(generator.words, small, words, ngrams)
        keys = batch.labels[MADE][1][:, 1]
        expected[MADE] = F.cross_entropy(logits, joint(targets), reduction="sum")
        drawn = (logits / 0.7 + gumbel_noise(keys, logits.shape[1])).argmax(-1)
        ids = batch.input_ids.clone()
        ids[0, at] = torch.tensor([x if x < WORDS else -1 - (x - WORDS) for x in drawn.tolist()])
        assert (ids[0, at] < 0).any()
        shown = replace(batch, input_ids=ids)
        places, original = batch.labels[REPLACED]
        rows = vectors_of(model, shown)[places]
        score = head.replaced.out(F.gelu(head.replaced.dense(rows)))[:, 0]
        wrong = (ids[0, places] != original).float()
        expected[REPLACED] = F.binary_cross_entropy_with_logits(score, wrong, reduction="sum")
        tallies = outputs[REPLACED].tallies
        assert tallies["tokens"] == len(places) and tallies["replaced"] == wrong.sum() > 0
    vectors = vectors_of(model, shown)
    coarse = scores(head, vectors[at], words, ngrams)
    fine = scores(head, vectors[queries], words)
    expected[NAME] = F.cross_entropy(coarse, joint(targets), reduction="sum")
    expected[FINE] = F.cross_entropy(fine, tokens, reduction="sum")
    assert outputs.keys() == expected.keys() == model.losses.keys() == task.loss_weights().keys()
    for name, loss in expected.items():
        assert outputs[name].loss_sum.item() == pytest.approx(loss.item(), rel=1e-5), name
    assert outputs[NAME].correct == (coarse.argmax(-1) == joint(targets)).sum()
    parameters = [x for x in model.parameters() if x.requires_grad]
    totals = sum(x.loss_sum for x in outputs.values()), sum(expected.values())
    mine, its = (torch.autograd.grad(x, parameters, allow_unused=True) for x in totals)
    for one, other in zip(mine, its, strict=True):  # the pooler is used by neither
        if other is not None:
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
    work = work_of(model, [batch], 1)
    assert work.labels == len(at) + len(queries)
    assert (size_of(model).generator is not None) == bool(relation)


def test_baselines_are_those_of_segments_and_tokens(source: CorpusSource) -> None:
    task = task_of(dataset_of(source, relation={}))
    batch = batch_of(dataset_of(source, relation={}), 30)
    for name in (NAME, MADE):
        loss, _ = task.baseline_of(name, batch.labels[name][1].numpy(), source)
        assert 3 < loss.mean() < np.log(WORDS + 100)
    tokens = batch.labels[FINE][1].numpy()
    loss, _ = task.baseline_of(FINE, tokens, source)
    np.testing.assert_allclose(loss, -np.log(source.unigrams[tokens]))
    assert np.isnan(task.baseline_of(REPLACED, tokens, source)[0]).all()


# ---- weights ----


def test_weights_have_no_tables_over_ngrams(source: CorpusSource, tmp_path: Path) -> None:
    """They are those of a model that predicts masked words, from which another run can start."""
    dataset = dataset_of(source, relation={})
    model = model_of(dataset)
    info = WeightsInfo(backbone=model.backbone.config, task_ids={NAME: 0}, head_of={NAME: NAME})
    weights_folder.save_weights(model, tmp_path / "weights", info)
    contents = open_checkpoint(tmp_path / "weights")
    assert [(x, y.kind) for x, y in contents.heads.items()] == [(NAME, "masked_words")]
    parts = {name.removeprefix(f"heads.{NAME}.") for name in contents.entries}
    assert not [x for x in parts if "ngram" in x or x.startswith(("generator", "replaced"))]
    assert contents.entries["backbone.word.weight"].shape == (WORDS, 16)
    other = model_of(dataset)
    report = weights_folder.load_weights(contents, other)
    assert "backbone.word.ngrams" in report.newly_initialized and not report.unused
    assert torch.equal(other.backbone.word.weight, model.backbone.word.weight)
    for name, values in other.heads[NAME].state_dict().items():
        same = torch.equal(values, model.heads[NAME].state_dict()[name])
        assert same == (name.split(".")[0] in ("dense", "norm", "bias")), name


# ---- mistakes ----


def test_mistakes_are_one_line(source: CorpusSource, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"tasks.{NAME}.lexicon: give the file that"):
        build(NAME, {"source": "text"})
    task = build(NAME, {"source": "text", "lexicon": str(tmp_path / "none")})
    with pytest.raises(UserError, match=rf"tasks.{NAME}.lexicon: .*none: No such file"):
        task.check(source, LENGTH)
    own = Path(source.corpus.path).parent / "ngrams.tsv"
    head, rest = own.read_text().split("\n", 1)
    (tmp_path / "other").write_text(head + "0\n" + rest)
    task = build(NAME, {"source": "text", "lexicon": str(tmp_path / "other")})
    with pytest.raises(UserError, match="n-grams of another tokenizer than"):
        task.check(source, LENGTH)
    task = build(NAME, {"source": "text", "lexicon": str(own)})
    with pytest.raises(UserError, match="rows of 6 tokens have no room for a passage of 4"):
        task.check(source, 6)
    backbone = model_of(dataset_of(source)).backbone
    changed = f"^tasks.{NAME}: another task has changed the token embeddings already"
    with pytest.raises(UserError, match=changed):
        task.head(backbone)
    values = {"source": "text", "embedding_sharing": "gradient_disentangled"}
    detection = build("replaced_token_detection", values)
    refused = "^tasks.replaced_token_detection.embedding_sharing: gradient_disentangled does not go"
    with pytest.raises(UserError, match=refused):
        detection.head(backbone)


def test_windows_without_queries(source: CorpusSource) -> None:
    sizes = {"hidden_size": 16, "num_layers": 4, "num_heads": 4, "vocab_size": WORDS}
    backbone = build_encoder(EncoderConfig.from_dict({"kind": "modernbert", **sizes}))
    dataset = dataset_of(source, comprehensive=False)
    model = Model(backbone, {NAME: task_of(dataset).head(backbone)}, {NAME: NAME})
    assert model(batch_of(dataset, 2))[NAME].loss_sum > 0
