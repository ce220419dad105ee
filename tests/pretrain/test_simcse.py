"""Every sentence twice: the same tokens, other dropout masks, no negative of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, refs
from palm_ds.data.tasks.masking import units_of
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.pretrain.simcse import Simcse
from palm_ds.train.recipe.recipe import make_recipe
from tests.helpers.pair_corpus import tokenizer_of, whole, write_sentences
from tests.helpers.small_corpus import write_small_corpus


def task_of(**values: Any) -> Simcse:
    return Simcse(name="simcse", source="text", **values)


def dataset_of(source: CorpusSource, task: Simcse, max_length: int = 64) -> TaskGroupDataset:
    return TaskGroupDataset(
        name="simcse", tasks=(task,), task_id=0, source=source, seed=5, max_length=max_length
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=20), 0.0, ())[0]


def test_examples_by_hand(tmp_path) -> None:
    documents = [("one", ["a b", "c d e"]), ("two", ["a", "b c d e a"])]
    corpus = write_sentences(tmp_path / "c", documents, tokenizer_of("a b c d e"))
    dataset = dataset_of(whole(corpus), task_of(shortest=2), max_length=12)
    found = set()
    for n, layout in enumerate(dataset.layouts(np.arange(12))):
        example = dataset.example(n, layout)
        found.add(" ".join(corpus.tokenizer().tokens(example.input_ids)))
        half = len(example) // 2
        assert example.sub_lengths == (half, half)
        where, targets = example.labels["simcse"]
        assert where.tolist() == [0, half] and targets[0, 1] == targets[1, 1]
    assert found == {  # the last one is cut
        "[CLS] a b [SEP] [CLS] a b [SEP]",
        "[CLS] c d e [SEP] [CLS] c d e [SEP]",
        "[CLS] b c d e [SEP] [CLS] b c d e [SEP]",
    }


def test_masks_whole_words_of_both_copies(tmp_path) -> None:
    """`simcse + knowledge_masking`: copies keep the annotations, by which words are masked."""
    corpus = write_small_corpus(tmp_path / "corpus", documents=20)
    source = split_corpus(corpus, 0.0, ("word",))[0]
    masks = KnowledgeMasking(name="masks", source="text", units=("word",), rate=0.5)
    dataset = replace(dataset_of(source, task_of()), tasks=(task_of(), masks))
    sides = np.zeros(2)
    for n, layout in enumerate(dataset.layouts(np.arange(40))):
        example = dataset.example(n, layout)
        half, (where, ids) = len(example) // 2, example.labels["masks"]
        assert ids.tolist() == example.unmasked_ids[where].tolist()
        unit, chosen = units_of(example, ("word",)), np.zeros(len(example), bool)
        chosen[where] = True
        assert all(len({*chosen[unit == k].tolist()}) == 1 for k in range(unit.max() + 1))
        np.testing.assert_array_equal(
            example.annotations["word"][:half], example.annotations["word"][half:]
        )
        sides += (where < half).sum(), (where >= half).sum()
    assert min(sides) > 50


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_dropout_is_all_that_differs(source: CorpusSource, pooling: Any) -> None:
    task = task_of(pooling=pooling)
    dataset = dataset_of(source, task)
    numbers = np.arange(8)
    rows = [[ref] for ref in refs(0, numbers, dataset.layouts(numbers))]
    batch = replace(build_rows([dataset], rows, 64, 0), dropout_key=3)
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=source.vocabulary.size, hidden_size=16, num_layers=2, num_heads=2, dropout=0.1
    )
    backbone = build_encoder(config, Kernels(dropout="counter"))
    model = Model(backbone, {"simcse": task.head(backbone)}, {"simcse": "simcse"})
    vectors = model(batch)["simcse"].scores
    assert vectors is not None and (vectors[::2] - vectors[1::2]).abs().min(1)[0].max() > 0
    vectors = model.eval()(batch)["simcse"].scores
    assert vectors is not None
    torch.testing.assert_close(vectors[::2], vectors[1::2], atol=1e-5, rtol=1e-5)
    head: Any = model.heads["simcse"]
    losses, correct = head.step_losses(vectors, batch.labels["simcse"][1], batch.groups["simcse"])
    assert len(losses) == 8 and correct.tolist() == [1.0] * 8
    assert task.text_pooling().pooling == pooling


def test_refused() -> None:
    with pytest.raises(UserError, match="temperature: expected a number above 0, got 0"):
        task_of(temperature=0)
    with pytest.raises(UserError, match="shortest: expected a number above 0, got 0"):
        task_of(shortest=0)


@pytest.mark.parametrize("kind", ["modernbert", "bert"])
def test_an_encoder_without_dropout_has_nothing_to_learn(kind: str) -> None:
    rates = {"dropout": 0.0, "attention_dropout": 0.0} if kind == "bert" else {}
    values: dict[str, Any] = {
        "backbone": {"kind": kind, "hidden_size": 16, "num_layers": 1, "num_heads": 2, **rates},
        "sources": {"text": {"corpus": "corpus"}},
        "tasks": {"simcse": {"source": "text"}},
        "stages": [{"simcse": 1}],
        "length": 64,
        "batch": "4 rows",
    }
    with pytest.raises(UserError, match="tasks.simcse: learns by dropout alone, but backbone.drop"):
        make_recipe(values)
    make_recipe({**values, "backbone": {**values["backbone"], "attention_dropout": 0.1}})
    adapted = {**values, "init_from": "model", "lora": {"dropout": 0.1}}
    assert make_recipe(adapted).lora
