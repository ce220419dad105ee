"""Which words were capitalized: by hand, and compared with an independent reading of the text."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from palm_ds.cli.prepare import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.corpus.store import open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.task import build
from palm_ds.text.display import token_texts
from palm_ds.text.tokenizer import wordpiece
from tests.helpers.byte_level_bpe import bpe_folder
from tests.helpers.small_corpus import SPECIALS, write_small_corpus

MARKS = ("capital", "word")


def make():
    return build("capitalization", {"source": "text"})


def source_of(folder: Path, ids: list[int], word: list[int], capital: list[int]) -> CorpusSource:
    tokens = [*SPECIALS, "paris", "par", "##is", "3rd", ".", "中", "été", "'s"]
    annotations = {"sentence": [1] + [0] * (len(ids) - 1), "word": word, "capital": capital}
    arrays = {name: np.array(values, np.uint8) for name, values in annotations.items()}
    document = ("one", np.array(ids), arrays)
    write_corpus(folder, [document], wordpiece(tokens, lower=True), annotations=tuple(annotations))
    return split_corpus(open_corpus(folder), 0.0, MARKS)[0]


def dataset_of(source: CorpusSource, *kinds: str, max_length: int = 64) -> TaskGroupDataset:
    tasks = tuple(build(kind, {"source": "text"}) for kind in kinds)
    name = " + ".join(kinds)
    return TaskGroupDataset(
        name=name, tasks=tasks, task_id=0, source=source, seed=2, max_length=max_length
    )


def test_labels_by_hand(tmp_path):
    # Paris, "3rd", ".", a Chinese character, Été, 's, an unknown word, par ##is, paris
    ids = [5, 8, 9, 10, 11, 12, 1, 6, 7, 5]
    word = [1, 1, 1, 1, 1, 1, 1, 1, 0, 1]
    capital = [1, 0, 0, 0, 1, 0, 1, 1, 1, 0]
    dataset = dataset_of(source_of(tmp_path / "c", ids, word, capital), "capitalization")
    example = dataset.example(0, dataset.layouts(np.array([0]))[0])
    at, targets = example.labels["capitalization"]
    assert at.tolist() == [1, 5, 8, 10]  # [CLS] is 0
    assert targets.tolist() == [1, 1, 1, 0]


def test_digits_after_a_space_are_no_letters(tmp_path):
    """In byte-level vocabularies the space is written as a letter, and so are Chinese bytes."""
    text = "Greta has 17 lions ( of 3 中文 )."
    (tmp_path / "in.txt").write_text("\n\n".join([text] * 4), "utf-8")
    tokenizer = bpe_folder(tmp_path / "bpe", {}, [text.lower()])
    options = ["--language", "en", "--lower", "--tokenizer", str(tokenizer)]
    COMMAND.call([str(tmp_path / "corpus"), str(tmp_path / "in.txt"), *options])
    source = split_corpus(open_corpus(tmp_path / "corpus"), 0.0, MARKS)[0]
    dataset = dataset_of(source, "capitalization")
    example = dataset.example(0, dataset.layouts(np.array([0]))[0])
    at, targets = example.labels["capitalization"]
    texts = [text for text, _ in token_texts(source.corpus.tokenizer(), example.unmasked_ids[at])]
    assert list(zip(texts, targets.tolist(), strict=True))[:4] == [
        *[("greta", 1), ("has", 0), ("lions", 0), ("of", 0)]
    ]


def test_a_word_cut_by_the_start_of_a_passage_has_no_label(tmp_path):
    dataset = dataset_of(source_of(tmp_path / "c", [7, 5], [0, 1], [1, 1]), "capitalization")
    example = dataset.example(0, dataset.layouts(np.array([0]))[0])
    assert example.labels["capitalization"][0].tolist() == [2]


@pytest.fixture(scope="module", params=["wordpiece", "sentencepiece"])
def text(tmp_path_factory, request) -> tuple[CorpusSource, list[str]]:
    """Plain words with some capitals, prepared by the command: (source, texts). In the small
    SentencePiece vocabulary, the space before a word is often a token of its own."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(4)
    words = ["lion", "Lion", "meadow", "Greta", "greta", "Élan", "élan", "17", "x", "OK", "rain"]
    texts = [" ".join([*rng.choice(words, rng.integers(30, 200)), "end ."]) for _ in range(30)]
    (folder / "in.txt").write_text("\n\n".join(texts), "utf-8")
    options = ["--language", "en", "--lower", "--train", request.param, "--vocab_size", "100"]
    COMMAND.call([str(folder / "corpus"), str(folder / "in.txt"), *options])
    annotations = ("capital", "word", "phrase", "entity")
    return split_corpus(open_corpus(folder / "corpus"), 0.0, annotations)[0], texts


def slow_answers(text: str) -> list[int]:
    """Of each word of the text that begins with a letter, in order."""
    words = re.findall(r"\w+", text)
    return [int(word[0] != word[0].lower()) for word in words if word[0].isalpha()]


@pytest.mark.parametrize("task_group", ["capitalization", "knowledge_masking + capitalization"])
def test_labels_equal_an_independent_reading_of_the_text(text, task_group):
    """All passages of a document together label each of its words, masked or not."""
    source, texts = text
    dataset = dataset_of(source, *task_group.split(" + "), max_length=4096)
    compared = 0
    answers: dict[int, list[tuple[int, int]]] = {}
    for n, layout in enumerate(dataset.layouts(np.arange(dataset.num_items))):
        example = dataset.example(n, layout)
        at, targets = example.labels["capitalization"]
        document = int(np.searchsorted(source.starts, example.source_offsets[1], side="right")) - 1
        places = example.source_offsets[at].tolist()
        answers.setdefault(document, []).extend(zip(places, targets.tolist(), strict=True))
    for document, written in enumerate(texts):
        mine = [target for _, target in sorted(answers[document])]
        assert mine == slow_answers(written)
        compared += len(mine)
    assert compared > 2000


def test_the_order_in_a_blend_makes_no_difference(text):
    source, _ = text
    labels = []
    for kinds in (("capitalization", "knowledge_masking"), ("knowledge_masking", "capitalization")):
        dataset = dataset_of(source, *kinds, max_length=4096)
        ids = {}
        for n, layout in enumerate(dataset.layouts(np.arange(dataset.num_items))):
            example = dataset.example(n, layout)
            at, targets = example.labels["capitalization"]
            ids |= dict(zip(example.source_offsets[at].tolist(), targets.tolist(), strict=True))
        labels.append(ids)
    assert labels[0] == labels[1]
    assert len(labels[0]) > 1000


def test_the_baseline_is_the_frequency_of_capitals(text):
    source, texts = text
    answers = np.array([answer for written in texts for answer in slow_answers(written)])
    share = answers.mean()
    loss, accuracy = make().baseline(answers, source)
    assert loss.mean() == pytest.approx(-share * np.log(share) - (1 - share) * np.log(1 - share))
    assert accuracy.mean() == pytest.approx(max(share, 1 - share))


def test_a_vocabulary_with_capitals_is_refused(tmp_path):
    tokens = [*SPECIALS, "Paris", "a"]
    annotations = {name: np.array([1], np.uint8) for name in ("sentence", *MARKS)}
    cased = wordpiece(tokens, lower=False)
    write_corpus(
        tmp_path / "c", [("one", np.array([5]), annotations)], cased, annotations=tuple(annotations)
    )
    source = split_corpus(open_corpus(tmp_path / "c"), 0.0, MARKS)[0]
    dataset = dataset_of(source, "capitalization")
    with pytest.raises(UserError, match="tasks.capitalization: .*keeps capitals.*--lower"):
        dataset.example(0, dataset.layouts(np.array([0]))[0])


def test_a_corpus_without_the_annotation_gets_a_hint(tmp_path):
    corpus = write_small_corpus(tmp_path / "c", documents=3)
    with pytest.raises(UserError, match="no annotation capital; add it with"):
        split_corpus(corpus, 0.0, make().annotations())


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([9, 10], "no word begins with a letter that may be a capital; there is nothing to learn"),
        ([5, 10], "no word is capitalized; was the text lowercased before it was prepared?"),
    ],
)
def test_a_corpus_without_capitals_is_told(ids: list[int], found: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "c", ids, [1, 1], [0, 0])
    line = f"capitalization: {tmp_path / 'c'}: {found}"
    assert dataset_of(source, "capitalization").describe() == line
    usual = source_of(tmp_path / "usual", [5, 10], [1, 1], [1, 0])
    assert not dataset_of(usual, "capitalization").describe()
