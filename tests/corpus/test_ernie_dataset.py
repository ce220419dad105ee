"""ERNIE 1.0's lines: reading, writing, training on them, malformed lines."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.ernie_dataset import open_ernie, truncate_pair, write_ernie
from palm_ds.corpus.options import InputOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.rejected import read_rejected
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.text.tokenizer import load_tokenizer
from tests.corpus.test_prepare import hashes
from tests.helpers.small_corpus import write_small_corpus

VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30)), "##s", "[UNK]"]
GOOD = "1 5 6 34 2 7 8 2;0 0 0 0 0 1 1 1;0 1 2 3 4 5 6 7;-1 0 0 1 -1 0 1 -1;1"
OTHER = "1 9 2 9 2;0 0 0 1 1;0 1 2 3 4;-1 0 -1 0 -1;0"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    return tmp_path / "vocab.txt"


def made(out: Path, inputs: list[Path], vocabulary: Path, **options) -> Corpus:
    source = InputOptions(format="ernie")
    prepare(
        out,
        list(map(str, inputs)),
        PrepareOptions(tokenizer=str(vocabulary), input=source, **options),
    )
    return open_corpus(out, verify=True)


def gz(file: Path, *lines: str) -> Path:
    file.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    return file


def lines_of(file: Path) -> list[str]:
    return gzip.decompress(file.read_bytes()).decode().removesuffix("\n").split("\n")


def test_a_line_is_a_pair(tmp_path: Path, vocabulary: Path) -> None:
    corpus = made(tmp_path / "c", [gz(tmp_path / "a.gz", GOOD, OTHER)], vocabulary)
    assert corpus.annotations == ("sentence", "word", "phrase", "entity", "label", "mask_word")
    assert corpus.manifest.options["labels"] == ["0", "1"]
    name, piece = corpus.document(0)
    assert name == "a.gz@0" and piece.ids.tolist() == [5, 6, 34, 7, 8]
    assert piece.annotations["word"].tolist() == [1, 1, 0, 1, 0]
    assert np.flatnonzero(piece.annotations["sentence"]).tolist() == [0, 3]
    assert piece.annotations["label"].tolist() == [1] * 5
    assert piece.annotations["mask_word"].tolist() == [100] * 5
    assert corpus.sentence_starts.tolist() == [0, 3, 5, 6, 7]
    assert corpus.take(np.array([5, 6]), "label").tolist() == [0, 0]


def test_a_plain_file_is_read_too(tmp_path: Path, vocabulary: Path) -> None:
    (tmp_path / "part-0").write_text(GOOD + "\n" + OTHER)
    assert len(made(tmp_path / "c", [tmp_path / "part-0"], vocabulary)) == 2


def test_a_file_list_gives_the_share_of_whole_word_masking(
    tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths relative to the list or the working directory, or absolute; rounded percentages."""
    (tmp_path / "here").mkdir()
    (tmp_path / "lists").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = {"lists/a.gz": "1.1", "here/b.gz": "0.254", "c.gz": "-1", "here/d.gz": "0.5"}
    for name in names:
        gz(tmp_path / name, GOOD)
    shown = ["a.gz", "b.gz", str(tmp_path / "c.gz"), "d.gz"]
    rows = [f"{name}\t{p}\n" for name, p in zip(shown, names.values(), strict=True)]
    (tmp_path / "lists/train").write_text("\n".join(rows))
    corpus = made(tmp_path / "c", [tmp_path / "lists/train"], vocabulary)
    assert corpus.take(corpus.document_starts[:-1], "mask_word").tolist() == [100, 25, 0, 50]
    assert [entry["mask_word"] for entry in corpus.manifest.inputs] == [100, 25, 0, 50]


BAD_LINES = {
    "fields": ("1 2;0 0;0 1;0 0", "got 4"),
    "empty": ("", "got 1"),
    "types": (GOOD.replace("1 1 1;0 1", "1 1;0 1"), "7 sentence_type_ids for 8 token_ids"),
    "positions": (GOOD.replace(" 7;-1", ";-1"), "7 position_ids for 8 token_ids"),
    "words": (GOOD.replace("0 1 -1;1", "0 -1;1"), "7 seg_labels for 8 token_ids"),
    "number": (GOOD.replace("34", "x34"), "token_ids: 'x34' is not a whole number"),
    "fraction": (GOOD.replace("34", "3.4"), "token_ids: '3.4' is not a whole number"),
    "no numbers": (GOOD.replace("1 5 6 34 2 7 8 2", ""), "no token_ids"),
    "label": (GOOD[:-1] + "2", "next_sentence_label is '2', expected 0 or 1"),
    "no label": (GOOD[:-1], "next_sentence_label is '', expected 0 or 1"),
    "one text": (
        "1 9 9 2;0 0 0 0;0 1 2 3;-1 0 0 -1;1",
        "sentence_type_ids are not 0 ... 0 1 ... 1",
    ),
    "three texts": (GOOD.replace("0 1 1 1;", "1 2 2 2;"), "sentence_type_ids are not"),
    "empty text": ("1 2 9 2;0 0 1 1;0 1 2 3;-1 -1 0 -1;1", "one of the two texts is empty"),
    "seg label": (GOOD.replace("0 0 1 -1 0", "0 0 2 -1 0"), "other than -1, 0 and 1"),
    "special inside": (GOOD.replace("0 0 1 -1 0", "0 -1 1 -1 0"), "must be -1 at the first token"),
    "order": (GOOD.replace("0 1 2 3 4 5 6 7", "0 1 2 3 4 5 7 6"), "position_ids are not 0, 1, 2"),
    "large id": (GOOD.replace("34", "36"), "token id 36, but the vocabulary has 36"),
    "negative id": (GOOD.replace("34", "-3"), "token id -3, but the vocabulary has 36"),
    "other specials": (GOOD.replace("2 7", "9 7"), "special tokens (1, 9, 2), which are (1, 2, 2)"),
    "letters": ("北\u2028京", "got 1"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines(case: str, tmp_path: Path, vocabulary: Path) -> None:
    line, reason = BAD_LINES[case]
    file = gz(tmp_path / "a.gz", GOOD, line, OTHER)
    corpus = made(tmp_path / "c", [file], vocabulary)
    assert len(corpus) == 2
    (entry,) = read_rejected(corpus.path)
    assert reason in entry["reason"] and (entry["file"], entry["line"]) == ("a.gz", 2)
    with pytest.raises(UserError, match=r"a.gz: line 2: .*\(--strict\)"):
        made(tmp_path / "strict", [file], vocabulary, strict=True)


BAD_LISTS = {
    "a file.gz 1.0\n": "line 1: expected path<TAB>mask_word_prob",
    "a.gz\tmany\n": "line 1: mask_word_prob 'many' is not a number",
    "a.gz\tnan\n": "line 1: mask_word_prob 'nan' is not a number",
    "a.gz\t1\nb.gz\t1\n": "line 2: b.gz: no such file next to the list or in the working directory",
    "a.gz\t1\na.gz\t0\n": "a.gz is given twice",
}


@pytest.mark.parametrize("content", BAD_LISTS)
def test_bad_lists(content: str, tmp_path: Path, vocabulary: Path) -> None:
    gz(tmp_path / "a.gz", GOOD)
    (tmp_path / "list").write_text(content)
    with pytest.raises(UserError) as caught:
        made(tmp_path / "c", [tmp_path / "list"], vocabulary)
    assert BAD_LISTS[content] in str(caught.value)


# Written ----------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, vocabulary: Path) -> None:
    corpus = made(tmp_path / "c", [gz(tmp_path / "a.gz", GOOD, OTHER, GOOD)], vocabulary)
    assert write_ernie(corpus.path, tmp_path / "b.gz") == 3
    assert lines_of(tmp_path / "b.gz") == [GOOD, OTHER, GOOD]


@pytest.mark.slow
def test_the_published_set_round_trip(shared: Path, tmp_path: Path) -> None:
    data = shared / "data/ernie"
    corpus = made(tmp_path / "c", [data / "demo_train_set.gz"], data / "vocab.txt", shard_mb=0.3)
    assert len(corpus) == 10_000 and corpus.manifest.rejected == 0
    labels = corpus.take(corpus.document_starts[:-1], "label")
    assert Counter(labels.tolist()) == {1: 3779, 0: 6221}
    write_ernie(corpus.path, tmp_path / "b.gz")
    there = gzip.decompress((data / "demo_train_set.gz").read_bytes())
    assert gzip.decompress((tmp_path / "b.gz").read_bytes()) == there


def parsed(line: str) -> tuple[list[int], list[int], list[int], int]:
    """(first text, second text, seg_labels, label), after checking the fixed parts of the line."""
    ids, types, positions, words, label = (list(map(int, f.split())) for f in line.split(";"))
    second = types.index(1)
    assert types == [0] * second + [1] * (len(ids) - second)
    assert positions == list(range(len(ids)))
    special = [i for i, word in enumerate(words) if word == -1]
    assert special == [0, second - 1, len(ids) - 1]
    return ids[1 : second - 1], ids[second:-1], words, label[0]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_small_corpus(tmp_path_factory.mktemp("documents") / "c", documents=300)


def test_documents_are_cut_into_pairs(documents: Corpus, tmp_path: Path) -> None:
    count = write_ernie(documents.path, tmp_path / "a.gz", length=64, seed=3)
    found = [parsed(line) for line in lines_of(tmp_path / "a.gz")]
    assert len(found) == count > 1000
    labels = np.array([label for *_, label in found])
    assert abs(labels.sum() - count / 2) < 4 * np.sqrt(count) / 2
    sizes = np.array([len(first) + len(second) + 3 for first, second, *_ in found])
    assert sizes.max() <= 64
    # The lengths of the texts hardly depend on the label.
    difference = abs(sizes[labels == 1].mean() - sizes[labels == 0].mean())
    assert difference < 4 * sizes.std() * 2 / np.sqrt(count)


def test_labels_tell_whether_the_second_text_follows(documents: Corpus, tmp_path: Path) -> None:
    """Searched for in the corpus: right after the first text, or in another document."""
    write_ernie(documents.path, tmp_path / "a.gz", length=64)
    texts = [" ".join(map(str, documents.document(i)[1].ids)) + " " for i in range(300)]
    for line in lines_of(tmp_path / "a.gz")[:200]:
        first, second, _, label = parsed(line)
        one, other = (" ".join(map(str, x)) + " " for x in (first, second))
        adjacent = any(one + other in text for text in texts)
        together = any(one in text and other in text for text in texts)
        assert adjacent if label else not together
        assert any(other in text for text in texts)


def test_word_boundaries_are_those_of_the_corpus(documents: Corpus, tmp_path: Path) -> None:
    write_ernie(documents.path, tmp_path / "a.gz", length=64)
    _, piece = documents.document(0)
    first, _, words, _ = parsed(lines_of(tmp_path / "a.gz")[0])
    assert first == piece.ids[: len(first)].tolist()
    assert words[1 : len(first) + 1] == (1 - piece.annotations["word"][: len(first)]).tolist()


def test_writing_again_gives_the_same_file(documents: Corpus, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_ernie(documents.path, tmp_path / f"{name}.gz", length=32, seed=seed)
    one, same, other = ((tmp_path / f"{name}.gz").read_bytes() for name in "abc")
    assert one == same != other


def test_written_lines_can_be_read(documents: Corpus, tmp_path: Path) -> None:
    count = write_ernie(documents.path, tmp_path / "a.gz")
    documents.tokenizer().save(tmp_path / "tokenizer")
    corpus = made(tmp_path / "c", [tmp_path / "a.gz"], tmp_path / "tokenizer")
    assert len(corpus) == count and corpus.manifest.rejected == 0


@pytest.mark.parametrize(
    ("first", "second", "most", "wanted"),
    [(3, 4, 9, (3, 4)), (9, 4, 9, (5, 4)), (2, 9, 9, (2, 7)), (9, 9, 9, (5, 4)), (9, 9, 8, (4, 4))],
)
def test_the_longer_text_is_truncated(first: int, second: int, most: int, wanted: tuple) -> None:
    assert truncate_pair(first, second, most) == wanted


def test_pairs_are_truncated_on_request(tmp_path: Path, vocabulary: Path) -> None:
    corpus = made(tmp_path / "c", [gz(tmp_path / "a.gz", GOOD)], vocabulary)
    write_ernie(corpus.path, tmp_path / "b.gz", length=8)
    assert lines_of(tmp_path / "b.gz") == [GOOD]
    long = "1 " + "5 " * 9 + "2 7 2;" + "0 " * 11 + "1 1;" + " ".join(map(str, range(13)))
    long += ";-1 " + "0 " * 9 + "-1 0 -1;0"
    corpus = made(tmp_path / "d", [gz(tmp_path / "c.gz", long)], vocabulary)
    write_ernie(corpus.path, tmp_path / "e.gz", length=8)
    assert parsed(lines_of(tmp_path / "e.gz")[0])[:2] == ([5] * 4, [7])


def test_invalid_exports(documents: Corpus, tmp_path: Path, vocabulary: Path) -> None:
    rows = [{"text_a": "w1", "text_b": "w2", "label": name} for name in ("but", "and")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PrepareOptions(tokenizer=str(vocabulary), input=InputOptions(format="pairs"))
    prepare(tmp_path / "pairs", [str(tmp_path / "a.jsonl")], options)
    annotations = {name: np.ones(1, np.uint8) for name in ("sentence", "word")}
    one = ("x", np.array([5]), annotations)
    tokenizer = load_tokenizer(vocabulary)
    write_corpus(tmp_path / "one", [one], tokenizer, annotations=tuple(annotations))
    write_corpus(tmp_path / "short", [one, one], tokenizer, annotations=tuple(annotations))
    (tmp_path / "there.gz").write_bytes(b"mine")
    for corpus, name, length, message in (
        (documents.path, "a.txt", None, "call it .*a.txt.gz"),
        (documents.path, "there.gz", None, "already exists"),
        (documents.path, "no/a.gz", None, "No such file"),
        (documents.path, "a.gz", 7, "--length 7: must be at least 8"),
        (
            tmp_path / "pairs",
            "a.gz",
            None,
            "and, but; ERNIE's lines allow only 0 and 1",
        ),
        (tmp_path / "one", "a.gz", None, "has only one document"),
        (tmp_path / "short", "a.gz", None, "no document has two sentences"),
    ):
        with pytest.raises(UserError, match=message):
            write_ernie(corpus, tmp_path / name, length=length)
    assert (tmp_path / "there.gz").read_bytes() == b"mine"
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "a.gz").exists()


# Trained from as they are -----------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    gz(tmp_path / "a.gz", GOOD, OTHER)
    (tmp_path / "list").write_text("a.gz\t0.5\n")
    return tmp_path / "list"


def opened(listed: Path, vocabulary: Path) -> Corpus:
    return open_ernie(listed, vocabulary, listed.with_name("list.corpus"))


def test_a_corpus_is_prepared_once(listed: Path, vocabulary: Path) -> None:
    corpus = opened(listed, vocabulary)
    assert len(corpus) == 2 and corpus.take(np.array([0]), "mask_word").tolist() == [50]
    before = hashes(corpus.path)
    number = corpus.path.stat().st_ino
    assert len(opened(listed, vocabulary)) == 2
    assert hashes(corpus.path) == before and corpus.path.stat().st_ino == number
    names = {path.name for path in listed.parent.iterdir()}
    assert names == {"a.gz", "vocab.txt", "list", "list.corpus", "list.corpus.lock"}


def test_a_changed_file_is_prepared_again(listed: Path, vocabulary: Path) -> None:
    opened(listed, vocabulary)
    gz(listed.with_name("a.gz"), GOOD, OTHER, OTHER)
    assert len(opened(listed, vocabulary)) == 3
    listed.write_text("a.gz\t1\n")
    assert opened(listed, vocabulary).take(np.array([0]), "mask_word").tolist() == [100]
    gz(listed.with_name("b.gz"), GOOD)
    listed.write_text("a.gz\t1\nb.gz\t1\n")
    assert len(opened(listed, vocabulary)) == 4
    vocabulary.write_text("\n".join([*VOCABULARY, "more"]))
    assert opened(listed, vocabulary).tokenizer().size == len(VOCABULARY) + 1


def test_a_touched_file_is_compared_by_its_contents(listed: Path, vocabulary: Path) -> None:
    """A touched file is compared by its contents; the corpus is kept."""
    corpus = opened(listed, vocabulary)
    number = corpus.path.stat().st_ino
    os.utime(listed.with_name("a.gz"), (1, 1))
    assert opened(listed, vocabulary).path.stat().st_ino == number
    source = json.loads((corpus.path / "source.json").read_text())
    assert source[0]["modified"] == 10**9
    assert not any("/" in str(value) for entry in source for value in entry.values())


def test_an_open_corpus_stays_readable_while_it_is_replaced(listed: Path, vocabulary: Path) -> None:
    corpus = opened(listed, vocabulary)
    assert corpus.read(0, 5).ids.tolist() == [5, 6, 34, 7, 8]
    gz(listed.with_name("a.gz"), OTHER)
    assert opened(listed, vocabulary).read(0, 2).ids.tolist() == [9, 9]
    assert corpus.read(0, 5).ids.tolist() == [5, 6, 34, 7, 8]


def test_a_damaged_or_interrupted_corpus_is_prepared_again(listed: Path, vocabulary: Path) -> None:
    corpus = opened(listed, vocabulary)
    (corpus.path / "manifest.json").unlink()
    assert len(opened(listed, vocabulary)) == 2
    for rest in ("list.corpus.new", "list.corpus.new.partial", "list.corpus.old"):
        listed.with_name(rest).mkdir()
        (listed.with_name(rest) / "x").write_text("x")
    (corpus.path / "source.json").write_text("{")
    assert len(opened(listed, vocabulary)) == 2
    assert not list(listed.parent.glob("list.corpus.[no]*"))


def test_concurrent_processes_prepare_it_once(listed: Path, vocabulary: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: opened(listed, vocabulary), range(4)))
    assert [len(corpus) for corpus in found] == [2] * 4
    assert len({corpus.path.stat().st_ino for corpus in found}) == 1


def test_bad_files_leave_nothing(listed: Path, vocabulary: Path) -> None:
    gz(listed.with_name("a.gz"), "1 2;3")
    with pytest.raises(
        UserError, match=r"no documents: .* \(1 in all\), .*a.gz: line 1: expected 5"
    ):
        opened(listed, vocabulary)
    assert not listed.with_name("list.corpus").exists()


def test_an_unwritable_folder(listed: Path, vocabulary: Path) -> None:
    """Root may write anywhere, except below a file."""
    listed.with_name("file").write_text("x")
    with pytest.raises(
        UserError, match=r"cannot be written to .*; prepare it elsewhere with .*OUT"
    ):
        open_ernie(listed, vocabulary, listed.with_name("file") / "corpus")
