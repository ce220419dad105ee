"""Pairs and dialogues: documents, sentences and annotations, in every file format."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from palm_ds.common.errors import UserError
from palm_ds.corpus.add_annotation import add_annotations
from palm_ds.corpus.inspect import heading
from palm_ds.corpus.options import InputOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.rejected import read_rejected
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.text.tokenizer import SPECIALS, sentencepiece
from tests.corpus.test_prepare import hashes

LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
WORDS = [*"0123456789.,!?'\"", *LETTERS, *(f"##{c}" for c in LETTERS), "北", "京", "。", "[", "]"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]), "utf-8")
    return str(tmp_path / "vocab.txt")


def made(file: Path, tokenizer: str, *, text: TextOptions | None = None, **options) -> Corpus:
    """The corpus of a file."""
    source = InputOptions(**{k: options.pop(k) for k in list(options) if k in vars(InputOptions())})
    out = file.with_name(f"{file.name}.corpus")
    prepare(
        out,
        [str(file)],
        PrepareOptions(tokenizer=tokenizer, input=source, text=text or TextOptions(), **options),
    )
    return open_corpus(out, verify=True)


def sentences(corpus: Corpus, number: int) -> list[str]:
    """The sentences of a document, their tokens joined."""
    _, piece = corpus.document(number)
    first, last = corpus.first_sentence[number : number + 2]
    edges = corpus.sentence_starts[first : last + 1] - piece.start
    tokens = [token.removeprefix("##") for token in corpus.tokenizer().tokens(piece.ids)]
    return ["".join(tokens[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def column(corpus: Corpus, name: str, number: int) -> list[int]:
    """The annotation's value in each sentence, which must be constant in it."""
    _, piece = corpus.document(number, [name])
    first, last = corpus.first_sentence[number : number + 2]
    edges = corpus.sentence_starts[first : last + 1] - piece.start
    parts = [piece.annotations[name][a:b].tolist() for a, b in zip(edges, edges[1:], strict=False)]
    assert all(len(set(part)) == 1 for part in parts)
    return [part[0] for part in parts]


# Pairs ------------------------------------------------------------------------------------------

PAIRS = [
    {"text_a": "a b. C d! Ee?", "text_b": "f", "label": "but"},
    {"text_a": 'he said "x', "text_b": "北京。 y\u2028z", "label": "and"},
    {"text_a": "  g, h", "text_b": "Dr. I. J.", "label": "but"},
    {"text_a": "k", "text_b": "l m", "label": "however"},
]
TEXTS = [["ab.cd!ee?", "f"], ['hesaid"x', "北京。yz"], ["g,h", "dr.i.j."], ["k", "lm"]]


def tsv(rows: list[dict]) -> str:
    names = list(rows[0])
    return "\n".join("\t".join(map(str, row)) for row in [names, *(r.values() for r in rows)])


def write_csv(file: Path) -> None:
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(PAIRS[0]))
        writer.writeheader()
        writer.writerows([{**row, "text_a": row["text_a"].replace("b", "b\n")} for row in PAIRS])


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def arrow(folder: Path) -> None:
    table = datasets.Dataset.from_list(PAIRS)
    table.cast_column("label", datasets.ClassLabel(names=["however", "but", "and"])).save_to_disk(
        str(folder)
    )


PAIR_FILES: dict[str, Callable[[Path], object]] = {
    "a.tsv": lambda file: file.write_text(tsv(PAIRS), "utf-8"),
    "a.tsv.gz": lambda file: file.write_bytes(gzip.compress(tsv(PAIRS).encode())),
    "b.tsv.zst": lambda file: file.write_bytes(zstandard.compress(tsv(PAIRS).encode())),
    "a.csv": write_csv,
    "a.jsonl": lambda file: file.write_bytes(jsonl(PAIRS)),
    "a.json": lambda file: file.write_text(json.dumps(PAIRS, indent=1)),
    "a.json.gz": lambda file: file.write_bytes(gzip.compress(json.dumps(PAIRS).encode())),
    "a.parquet": lambda file: pq.write_table(pa.Table.from_pylist(PAIRS), file, row_group_size=2),
    "folder": arrow,
}


@pytest.mark.parametrize("name", PAIR_FILES)
def test_pairs(name: str, tmp_path: Path, vocabulary: str) -> None:
    PAIR_FILES[name](tmp_path / name)
    corpus = made(tmp_path / name, vocabulary, format="pairs", shard_mb=0.0001)
    assert corpus.manifest.options["labels"] == ["and", "but", "however"]
    assert np.diff(corpus.first_sentence).tolist() == [2] * 4
    assert [sentences(corpus, i) for i in range(4)] == TEXTS
    assert [column(corpus, "label", i) for i in range(4)] == [[1, 1], [0, 0], [1, 1], [2, 2]]
    assert corpus.manifest.rejected == 0
    assert not (corpus.path / "labels.json").exists()


def test_a_class_label_that_is_not_known(tmp_path: Path, vocabulary: str) -> None:
    """-1, as in the test sets of benchmarks."""
    table = datasets.Dataset.from_list([{**PAIRS[0], "label": n} for n in (1, -1, 0)])
    kind = datasets.ClassLabel(names=["yes", "no"])
    table.cast_column("label", kind).save_to_disk(str(tmp_path / "folder"))
    corpus = made(tmp_path / "folder", vocabulary, format="pairs")
    assert corpus.manifest.options["labels"] == ["no", "yes"] and len(corpus) == 2
    (entry,) = read_rejected(corpus.path)
    assert entry["row"] == 1
    assert entry["reason"] == "the label in field `label` is null, not text"


def test_the_shape_of_discovery(tmp_path: Path, vocabulary: str) -> None:
    rows = [
        {"sentence1": "it rained", "sentence2": "we left", "label": "so,", "idx": 0},
        {"sentence1": "we left", "sentence2": "it rained", "label": "because", "idx": 1},
    ]
    (tmp_path / "a.tsv").write_text(tsv(rows))
    fields = ("sentence1", "sentence2", "label")
    corpus = made(tmp_path / "a.tsv", vocabulary, format="pairs", pair_fields=fields)
    assert corpus.manifest.options["labels"] == ["because", "so,"]
    assert column(corpus, "label", 0) == [1, 1]


def test_numeric_labels_are_sorted_as_numbers(tmp_path: Path, vocabulary: str) -> None:
    labels = [10, "9", -1, "no", 2, True]
    rows = [{"text_a": "a", "text_b": "b", "label": label} for label in labels]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    corpus = made(tmp_path / "a.jsonl", vocabulary, format="pairs")
    assert corpus.manifest.options["labels"] == ["-1", "2", "9", "10", "no", "true"]
    assert [column(corpus, "label", i)[0] for i in range(6)] == [3, 2, 0, 4, 1, 5]


def test_pairs_without_a_label(tmp_path: Path, vocabulary: str) -> None:
    (tmp_path / "a.tsv").write_text("text_a\ttext_b\na\tb\n")
    fields = ("text_a", "text_b")
    corpus = made(tmp_path / "a.tsv", vocabulary, format="pairs", pair_fields=fields)
    assert corpus.manifest.options["labels"] == [""]
    assert column(corpus, "label", 0) == [0, 0]


def test_languages_of_pairs(tmp_path: Path, vocabulary: str) -> None:
    (tmp_path / "a.tsv").write_text("text_a\ttext_b\na\tb\na\nb\ta\n")
    options = {"format": "pairs", "pair_fields": ("text_a", "text_b")}
    corpus = made(tmp_path / "a.tsv", vocabulary, languages=("en", "zh-Hant"), **options)
    assert corpus.manifest.languages == ("en", "zh-Hant") and len(corpus) == 2
    assert "languages en, zh-Hant" in heading(corpus).plain
    (bad,) = read_rejected(corpus.path)
    assert (bad["file"], bad["line"]) == ("a.tsv", 3)
    for given, message in (
        ({"languages": ("en",), **options}, "--languages en: --format pairs has 2"),
        ({"languages": ("en", "fr")}, "--languages en fr: --format auto has 1"),
        ({"languages": ("English",)}, "'English' is not a language tag such as en"),
        ({"languages": ("en",), "format": "ernie"}, "--format ernie has none"),
    ):
        with pytest.raises(UserError, match=message):
            InputOptions(**given)


def many_pairs(file: Path, labels: int = 40) -> Path:
    rng = np.random.default_rng(0)
    lines = ["text_a\ttext_b\tlabel"]
    for _ in range(400):
        first, second = (" ".join(rng.choice(LETTERS, rng.integers(1, 9))) for _ in range(2))
        lines.append(f"{first}. {second}\t{second}! {first}\tlabel {rng.integers(labels)}")
    file.write_text("\n".join(lines))
    return file


@pytest.mark.distributed
def test_label_numbers_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, vocabulary: str
) -> None:
    options = {"format": "pairs", "shard_mb": 0.002}
    for name, workers in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        made(many_pairs(tmp_path / name / "a.tsv"), vocabulary, workers=workers, **options)
    assert len(open_corpus(tmp_path / "one/a.tsv.corpus").manifest.shards) > 5
    assert hashes(tmp_path / "one/a.tsv.corpus") == hashes(tmp_path / "two/a.tsv.corpus")


def test_a_stopped_run_resumes(tmp_path: Path, vocabulary: str, monkeypatch) -> None:
    """Labels are collected again, and finished shards are kept."""
    from palm_ds.corpus import prepare as build

    whole = made(many_pairs(tmp_path / "a.tsv"), vocabulary, format="pairs", shard_mb=0.002)
    (tmp_path / "again").mkdir()
    file = many_pairs(tmp_path / "again/a.tsv")
    write_shard, calls = build.write_shard, []

    def stop(task: tuple[str, int]) -> int:
        calls.append(task[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write_shard(task)

    monkeypatch.setattr(build, "write_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        made(file, vocabulary, format="pairs", shard_mb=0.002)
    again = made(file, vocabulary, format="pairs", shard_mb=0.002)
    assert calls[:4] == [0, 1, 2, 2]
    assert hashes(again.path) == hashes(whole.path)


def test_an_annotation_is_added_to_pairs(tmp_path: Path, vocabulary: str) -> None:
    file = many_pairs(tmp_path / "a.tsv")
    corpus = made(file, vocabulary, format="pairs", shard_mb=0.002)
    before = corpus.take(np.arange(corpus.manifest.tokens), "label")
    manifest = add_annotations(corpus.path, [str(file)], ["heading"])
    after = open_corpus(corpus.path, verify=True)
    assert manifest.options["labels"] == corpus.manifest.options["labels"]
    assert np.array_equal(after.take(np.arange(len(before)), "label"), before)
    assert not after.take(np.arange(len(before)), "heading").any()  # pairs have none


def test_a_finished_corpus_of_pairs_is_recognized(tmp_path: Path, vocabulary: str) -> None:
    file = many_pairs(tmp_path / "a.tsv")
    corpus = made(file, vocabulary, format="pairs")
    assert made(file, vocabulary, format="pairs").manifest == corpus.manifest
    with pytest.raises(
        UserError, match=r"input.pair_fields: \[.*, .*, .*\] -> \['text_a', 'text_b'\]"
    ):
        made(file, vocabulary, format="pairs", pair_fields=("text_a", "text_b"))


def test_too_many_labels(tmp_path: Path, vocabulary: str) -> None:
    rows = [{"text_a": "a", "text_b": "b", "label": i} for i in range(256)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    corpus = made(tmp_path / "a.jsonl", vocabulary, format="pairs")
    assert column(corpus, "label", 255) == [255, 255]
    (tmp_path / "b.jsonl").write_bytes(jsonl([*rows, {**rows[0], "label": "x"}]))
    with pytest.raises(
        UserError,
        match=r"more than 256 labels in field `label`, such as 'x' \(.*b.jsonl: line 257\)",
    ):  # noqa: E501
        made(tmp_path / "b.jsonl", vocabulary, format="pairs")


BAD_PAIRS = [
    ("a\tb", "2 cells, but the header has 3"),
    ("a\tb\tx\ty", "4 cells, but the header has 3"),
    ("", "empty line"),
    ("\tb\tx", "field `text_a`: empty text"),
    ("a\t \tx", "field `text_b`: empty text"),
    ("a\tb\t", "empty label"),
    ("\u0007\tb\tx", "no tokens in text 1 of 2"),
    ("a\t\u0007\tx", "no tokens in text 2 of 2"),
    ("a\tb\t" + "x" * 200, "over 100 characters"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_PAIRS, ids=[r for _, r in BAD_PAIRS])
@pytest.mark.parametrize("ending", [".tsv", ".csv"])
def test_bad_pairs_are_listed(
    line: str, reason: str, ending: str, tmp_path: Path, vocabulary: str
) -> None:
    lines = ["text_a\ttext_b\tlabel", "c\td\tx", line, "e\tf\tx", ""]
    text = "\n".join(lines)
    (tmp_path / f"a{ending}").write_text(text if ending == ".tsv" else text.replace("\t", ","))
    corpus = made(tmp_path / f"a{ending}", vocabulary, format="pairs")
    assert [sentences(corpus, i) for i in range(len(corpus))] == [["c", "d"], ["e", "f"]]
    entry = list(read_rejected(corpus.path))
    assert [(e["line"], reason in e["reason"]) for e in entry] == [(3, True)]


def test_an_unclosed_quote(tmp_path: Path, vocabulary: str) -> None:
    (tmp_path / "a.csv").write_text('text_a,text_b,label\na,b,x\nc,"d,x\ne,f,x\n')
    corpus = made(tmp_path / "a.csv", vocabulary, format="pairs")
    assert len(corpus) == 1
    (entry,) = read_rejected(corpus.path)
    assert entry["line"] == 3 and "not CSV" in entry["reason"]


# Dialogues --------------------------------------------------------------------------------------

TURNS = ["Hello. How are you?", "i am fine", "Good!"]
SHAPES = {
    "strings": (TURNS, [0, 1, 0]),
    "pairs": ([["b", TURNS[0]], ["a", TURNS[1]], ["b", TURNS[2]]], [0, 1, 0]),
    "one after another": ([["b", TURNS[0]], ["b", TURNS[1]], ["a", TURNS[2]]], [0, 0, 1]),
    "three": ([[9, TURNS[0]], [3, TURNS[1]], [1, TURNS[2]]], [0, 1, 2]),
    "texts": ([{"text": text} for text in TURNS], [0, 1, 0]),
    "messages": ([{"attrs": [1], "message": text} for text in TURNS], [0, 1, 0]),
    "utterances": (
        [{"speaker": s, "utterance": t, "frames": {}} for s, t in zip("xyy", TURNS, strict=True)],
        [0, 1, 1],
    ),
    "roles": (
        [
            {"role": s, "content": t}
            for s, t in zip(["system", "user", "system"], TURNS, strict=True)
        ],
        [0, 1, 0],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("field", ["turns", "messages"])
def test_dialogues(shape: str, field: str, tmp_path: Path, vocabulary: str) -> None:
    turns, roles = SHAPES[shape]
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "d", field: turns}) + "\n")
    corpus = made(tmp_path / "a.jsonl", vocabulary, format="dialogues")
    assert sentences(corpus, 0) == ["hello.howareyou?", "iamfine", "good!"]
    assert column(corpus, "role", 0) == roles
    assert corpus.document(0)[0] == "d"
    assert corpus.manifest.annotations == (
        "sentence",
        "word",
        "phrase",
        "entity",
        "capital",
        "role",
    )


def dialogue_files(folder: Path) -> dict[str, Path]:
    """The same dialogues in every file format."""
    rows = [{"talk": [["u", f"turn {i} a."], ["s", "ok"]] * (i % 4 + 1)} for i in range(30)]
    named = [{"talk": [{"speaker": s, "text": t} for s, t in row["talk"]]} for row in rows]
    files = {name: folder / name for name in ("a.jsonl", "b.json", "c.parquet", "d.jsonl.gz")}
    files["a.jsonl"].write_bytes(jsonl(rows))
    files["b.json"].write_text("  \n" + json.dumps(rows, indent=2))
    pq.write_table(pa.Table.from_pylist(named), files["c.parquet"], row_group_size=7)
    files["d.jsonl.gz"].write_bytes(gzip.compress(jsonl(named)))
    return files


def test_dialogues_in_every_kind_of_file(tmp_path: Path, vocabulary: str) -> None:
    found = []
    for file in dialogue_files(tmp_path).values():
        corpus = made(file, vocabulary, format="dialogues", turns_field="talk")
        documents = range(len(corpus))
        found.append([(sentences(corpus, i), column(corpus, "role", i)) for i in documents])
        assert len(corpus) == 30 and corpus.manifest.rejected == 0
    assert all(other == found[0] for other in found)
    assert found[0][6] == (["turn6a.", "ok"] * 3, [0, 1] * 3)


BAD_DIALOGUES = [
    ({"text": "a"}, "no field `turns`; it has `text` (--turns_field names another)"),
    ({"turns": "a"}, "field `turns` is str, not a list of turns"),
    ({"turns": None}, "field `turns` is null, not a list of turns"),
    ({"turns": []}, "field `turns` has no turns"),
    ({"turns": ["a", " "]}, "turn 2: empty text"),
    ({"turns": ["a", 3]}, "turn 2 is int, not text"),
    ({"turns": ["a", "\u0007"]}, "no tokens in text 2 of 2"),
    ({"turns": [["u", "a", "b"]]}, "turn 1 is a list of 3, not a [speaker, text] pair"),
    ({"turns": [{"words": "a"}]}, "turn 1 has none of the fields text, message, utterance"),
    ({"turns": [["u", "a"], "b"]}, "turn 2 names no speaker, though other turns do"),
    ({"turns": [[["u"], "a"]]}, "turn 1: the speaker is list, not a name or number"),
    ({"turns": [[i, "a"] for i in range(257)]}, "257 speakers; at most 256 are supported"),
    ({"turns": ["a \ud800"]}, "turn 1: lone surrogate"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_DIALOGUES, ids=[r for _, r in BAD_DIALOGUES])
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_bad_dialogues_are_listed(
    row: dict, reason: str, ending: str, tmp_path: Path, vocabulary: str
) -> None:
    rows = [{"turns": ["a"]}, row, {"turns": ["b"]}]
    content = jsonl(rows) if ending == ".jsonl" else json.dumps(rows).encode()
    (tmp_path / f"a{ending}").write_bytes(content)
    corpus = made(tmp_path / f"a{ending}", vocabulary, format="dialogues")
    assert len(corpus) == 2
    (entry,) = read_rejected(corpus.path)
    assert reason in entry["reason"] and entry.get("line", entry.get("row", 0) + 1) == 2


def test_parts_with_a_tokenizer_that_does_not_split_into_words(tmp_path: Path) -> None:
    """Each part is encoded separately, whatever the model does at the start of a text."""
    from palm_ds.text.train_tokenizer import train_tokenizer

    texts = [f"hello there {a} {b}" for a in LETTERS for b in LETTERS]
    tokenizer = train_tokenizer(texts, kind="sentencepiece", vocab_size=100)
    tokenizer.save(tmp_path / "tokenizer")
    assert sentencepiece is not None and not tokenizer.by_word
    turns = ["hello there", "there a. b", " x hello"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"turns": turns}))
    corpus = made(tmp_path / "a.jsonl", str(tmp_path / "tokenizer"), format="dialogues")
    _, piece = corpus.document(0)
    starts = np.flatnonzero(piece.annotations["sentence"])
    assert [part.tolist() for part in np.split(piece.ids, starts[1:])] == [
        ids.tolist() for ids, _ in tokenizer.encode_texts([turn.strip() for turn in turns])
    ]
    assert column(corpus, "role", 0) == [0, 1, 0]


# A JSON array -----------------------------------------------------------------------------------


def test_an_array_is_read_one_element_at_a_time(
    tmp_path: Path, vocabulary: str, monkeypatch
) -> None:
    """Read in the smallest pieces, with everything allowed between elements."""
    monkeypatch.setattr("palm_ds.common.rows.json_array._READ", 1)
    rows = [{"text": 'a [x], \u2028 北 " }'}, {"text": "b", "more": [[], {}, 1.5]}]
    (tmp_path / "a.json").write_text(
        "\ufeff [\n" + " \r\n,\t".join(json.dumps(row, ensure_ascii=False) for row in rows) + "]\n",
        "utf-8",
    )
    corpus = made(tmp_path / "a.json", vocabulary)
    assert [sentences(corpus, i)[0] for i in range(2)] == ['a[x],北"[UNK]', "b"]
    assert [corpus.document(i)[0] for i in range(2)] == ["a.json#0", "a.json#1"]


BROKEN = {
    '[{"text": "a"}': "unexpected end of file",
    '[{"text": "a"} {"text": "b"}]': "'{', expected , or ]",
    '[{"text": "a"}, {"text": ]': "Expecting value",
    '[{"text": "a"},]': "Expecting value",
    '[{"text": "a"}] x': "extra data after the array",
    "[" * 100_000: "nested too deep",
    '[{"text": "aaaaaaaaaa': "element longer than 15 characters",
}


@pytest.mark.parametrize("content", BROKEN, ids=BROKEN.values())
def test_a_broken_array(content: str, tmp_path: Path, vocabulary: str, monkeypatch) -> None:
    if "longer" in BROKEN[content]:
        monkeypatch.setattr("palm_ds.corpus.input.read_records.LONGEST", 15)
        monkeypatch.setattr("palm_ds.common.rows.json_array._READ", 1)
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError) as caught:
        made(tmp_path / "a.json", vocabulary)
    assert f"a.json: not a JSON array: {BROKEN[content]}" in str(caught.value)


def test_an_empty_array(tmp_path: Path, vocabulary: str) -> None:
    (tmp_path / "a.json").write_text("[ ]")
    with pytest.raises(UserError, match="has no documents"):
        made(tmp_path / "a.json", vocabulary)


# Real data --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_dialogues(shared: Path, tmp_path: Path) -> None:
    en, zh = (str(shared / "data/ernie" / name) for name in ("vocab_en.txt", "vocab.txt"))
    for name, tokenizer, dialogues, turns in (
        ("sgd/dialogues.jsonl", en, 1827, 24466),
        ("kdconv/film/dev.json", zh, 150, 3858),
    ):
        out = tmp_path / name.partition("/")[0]
        source = InputOptions(format="dialogues")
        prepare(
            out,
            [str(shared / "data/dialogue" / name)],
            PrepareOptions(tokenizer=tokenizer, input=source),
        )
        corpus = open_corpus(out)
        assert (len(corpus), corpus.manifest.sentences) == (dialogues, turns)
        assert corpus.manifest.rejected == 0
        roles = corpus.take(corpus.sentence_starts[:-1], "role")
        assert set(roles.tolist()) == {0, 1}
        assert not roles[corpus.first_sentence[:-1]].any()  # the first speaker is 0


def test_real_pairs(shared: Path, tmp_path: Path) -> None:
    tokenizer = str(shared / "data/ernie/vocab_en.txt")
    file = shared / "data/ernie/palm_test_data/match4mrqa_train.tsv"
    prepare(
        tmp_path / "c",
        [str(file)],
        PrepareOptions(tokenizer=tokenizer, input=InputOptions(format="pairs")),
    )
    corpus = open_corpus(tmp_path / "c")
    rows = [line.split("\t") for line in file.read_text("utf-8").split("\n")[1:] if line]
    assert len(corpus) == len(rows) == 100 and corpus.manifest.options["labels"] == ["0", "1"]
    labels = corpus.take(corpus.document_starts[:-1], "label")
    assert labels.tolist() == [int(row[0]) for row in rows]


def test_a_pipe_is_refused(vocabulary: str, tmp_path: Path) -> None:
    """It has no size, and would be a corpus without documents."""
    os.mkfifo(tmp_path / "docs.txt")
    with pytest.raises(UserError, match=r"^input .*docs.txt: is a pipe or a device, .* to a file$"):
        made(tmp_path / "docs.txt", vocabulary)
