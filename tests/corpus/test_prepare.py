"""A corpus has the same bytes whatever the workers and interruptions, and opens everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.options import InputOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, plan, prepare
from palm_ds.corpus.rejected import read_rejected
from palm_ds.corpus.store import open_corpus
from palm_ds.corpus.work_dir import load_job, save_job
from palm_ds.text.tokenizer import load_tokenizer
from tests.helpers import warm_python
from tests.helpers.small_disk import small_disk
from tests.helpers.warm_python import Program

WORDS = [
    "the",
    "New",
    "York",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "machine",
    "learning",
    "is",
    "good",
    "我们",
    "在",
    "北京",
    "学习",
]


def write_input(folder: Path, *, documents: int = 120, seed: int = 0) -> Path:
    """jsonl and text files of made-up sentences."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    texts = [
        ". ".join(" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(8)) + "."
        for _ in range(documents)
    ]
    half = documents // 2
    rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts[:half])]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "b.txt").write_text("\n\n".join(texts[half:]))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("source") / "input")


OPTIONS = {"train": "wordpiece", "vocab_size": 150, "shard_mb": 0.008}


def hashes(folder: Path) -> dict[str, str]:
    """Every file of a folder with its contents."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "corpus"
    prepare(out, [str(source)], PrepareOptions(**OPTIONS, text=TextOptions(lower=True)))
    return out


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("ไปตลาด", "100 %"),
        ("ไปตลาด" + "我们去市场" * 20, "6 %"),
        ("ไป" + "我们去市场" * 100, ""),  # a trace
        ("我们去 market", ""),
    ],
)
def test_scripts_without_spaces_are_noted(
    text: str, noted: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.txt").write_text(f"{text}\n\n{text}\n", "utf-8")
    with caplog.at_level("INFO"):
        prepare(tmp_path / "out", [str(tmp_path / "in.txt")], PrepareOptions(**OPTIONS))
    assert caplog.text.count("each token counts as a word") == bool(noted)
    assert f"note: {noted}" in caplog.text or not noted


@pytest.mark.parametrize(("text", "noted"), [("Привет мир.", "67 %"), ("The cat is good.", "")])
def test_text_that_the_tokenizer_does_not_know_is_noted(
    made: Path, text: str, noted: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in.txt").write_text(text, "utf-8")
    options = PrepareOptions(tokenizer=str(made / "tokenizer"))
    with caplog.at_level("INFO"):
        prepare(tmp_path / "out", [str(tmp_path / "in.txt")], options)
    assert caplog.text.count("unknown words or characters ([UNK])") == bool(noted)
    assert f"note: {noted}" in caplog.text or not noted


def test_a_full_disk_names_the_corpus_and_keeps_no_half_shard(tmp_path: Path, source: Path) -> None:
    """What a write raises names no file."""
    with small_disk(tmp_path / "disk", "60k") as disk:
        with pytest.raises(OSError, match="No space left on device") as raised:
            prepare(disk / "out", [str(source)], PrepareOptions(**OPTIONS))
        assert raised.value.filename == str(disk / "out")
        assert not [*(disk / "out.partial").glob("*.tmp")]


def test_a_corpus_contains_its_documents(made: Path, source: Path) -> None:
    corpus = open_corpus(made, verify=True)
    tokenizer = corpus.tokenizer()
    assert len(corpus) == corpus.manifest.documents == 120
    assert len(corpus.manifest.shards) > 3
    assert corpus.annotations == ("sentence", "word", "phrase", "entity", "capital")
    first = json.loads((source / "a.jsonl").read_text().split("\n")[0])
    name, piece = corpus.document(0)
    assert name == "d0" and piece.ids.dtype == np.uint8
    assert piece.ids.tolist() == tokenizer.encode_texts([first["text"]])[0][0].tolist()
    assert not (made / "parts").exists() and not (made / "job.json").exists()
    assert not made.with_name("corpus.partial").exists()


def test_the_index_agrees_with_the_annotations(made: Path) -> None:
    corpus = open_corpus(made)
    sentences = []
    for number in range(len(corpus)):
        start = int(corpus.document_starts[number])
        _, piece = corpus.document(number, ["sentence"])
        assert piece.start == start
        assert corpus.first_sentence[number] == len(sentences)
        sentences += (start + np.flatnonzero(piece.annotations["sentence"])).tolist()
    assert corpus.sentence_starts[:-1].tolist() == sentences
    assert corpus.sentence_starts[-1] == corpus.document_starts[-1] == corpus.manifest.tokens
    assert corpus.first_sentence[-1] == len(sentences) == corpus.manifest.sentences


def test_reading_a_span(made: Path) -> None:
    corpus = pickle.loads(pickle.dumps(open_corpus(made)))
    start = int(corpus.sentence_starts[corpus.first_sentence[70] + 1])
    end = int(corpus.sentence_starts[corpus.first_sentence[70] + 3])
    piece = corpus.read(start, end, ["word"])
    whole = corpus.document(70)[1]
    inside = slice(start - whole.start, end - whole.start)
    assert piece.ids.tolist() == whole.ids[inside].tolist()
    assert piece.annotations["word"].tolist() == whole.annotations["word"][inside].tolist()
    assert not piece.ids.flags.owndata and not piece.ids.flags.writeable
    with pytest.raises(UserError, match="no annotation 'wrod'; did you mean \"word\""):
        corpus.read(start, end, ["wrod"])
    with pytest.raises(IndexError):
        corpus.read(corpus.manifest.tokens, corpus.manifest.tokens + 1)


def test_datasets_opens_it(made: Path) -> None:
    corpus, table = open_corpus(made), datasets.load_from_disk(str(made))
    assert table.column_names == ["id", "ids", *corpus.annotations]
    assert len(table) == len(corpus)
    for number in (0, 59, 60, 119):
        name, piece = corpus.document(number)
        row = table[number]
        assert (row["id"], row["ids"]) == (name, piece.ids.tolist())
        assert all(row[name] == piece.annotations[name].tolist() for name in corpus.annotations)


def test_transformers_opens_its_tokenizer(made: Path) -> None:
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(made / "tokenizer")
    text = "a New York cat 我们"
    ids = load_tokenizer(made / "tokenizer").encode_texts([text])[0][0].tolist()
    assert peer(text, add_special_tokens=False)["input_ids"] == ids


@pytest.mark.distributed
def test_bytes_do_not_depend_on_the_number_of_workers(made: Path, source: Path, tmp_path) -> None:
    options = PrepareOptions(**OPTIONS, workers=2, text=TextOptions(lower=True))
    prepare(tmp_path / "corpus", [str(source)], options)
    assert hashes(tmp_path / "corpus") == hashes(made)


def test_units_and_shards_follow_the_input_s_size(source: Path, tmp_path: Path) -> None:
    one = prepare(tmp_path / "one", [str(source)], PrepareOptions(**{**OPTIONS, "shard_mb": 1.0}))
    assert len(one.shards) == 1
    many = prepare(
        tmp_path / "many", [str(source)], PrepareOptions(**{**OPTIONS, "shard_mb": 0.002})
    )
    assert len(many.shards) > 15
    assert one.documents == many.documents
    assert one.tokens == pytest.approx(many.tokens, rel=0.2)  # the sample for training differs


def command(out: Path, source: Path, *more: str) -> list[str]:
    script = Path(__file__).resolve().parents[2] / "launch" / "prepare.py"
    return [
        *(str(script), str(out), str(source)),
        *("--train", "wordpiece", "--vocab_size", "150", "--shard_mb", "0.008", "--lower"),
        *more,
    ]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("shards", "workers"),
    [
        (1, 1),
        (4, 2),
        pytest.param(1, 2, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_run_resumes(
    made: Path, source: Path, tmp_path: Path, workers: int, shards: int
) -> None:
    out = tmp_path / "corpus"
    partial = out.with_name("corpus.partial")
    run = Program(command(out, source, "--workers", str(workers)))
    deadline = time.monotonic() + 120
    while len(list(partial.glob("parts/*.json"))) < shards and run.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    killed = run.poll() is None
    if killed:
        os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.clear_away()
    if killed and not out.exists():
        done = {file: file.stat().st_mtime_ns for file in partial.glob("data-*.arrow")}
        damaged = min(done)
        damaged.write_bytes(damaged.read_bytes()[:-8])
        again = warm_python.run(command(out, source))
        assert again.returncode == 0 and "continuing with" in again.stdout
    assert hashes(out) == hashes(made)
    assert not partial.exists()


def test_finished_shards_are_kept_and_damaged_ones_are_not(
    made: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palm_ds.corpus import prepare as build

    out, calls = tmp_path / "corpus", []

    def stop_after(number: int):
        def work(task: tuple[str, int]) -> int:
            calls.append(task[1])
            if len(calls) > number:
                raise KeyboardInterrupt
            return write_shard(task)

        return work

    write_shard = build.write_shard
    options = PrepareOptions(**OPTIONS, text=TextOptions(lower=True))
    monkeypatch.setattr(build, "write_shard", stop_after(3))
    with pytest.raises(KeyboardInterrupt):
        prepare(out, [str(source)], options)
    assert not out.exists()
    damaged = next(out.with_name("corpus.partial").glob("data-00001-*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    calls.clear()
    monkeypatch.setattr(build, "write_shard", stop_after(1000))
    prepare(out, [str(source)], options)
    assert calls[:2] == [1, 3] and 0 not in calls and 2 not in calls
    assert hashes(out) == hashes(made)


def test_a_run_stopped_before_publishing_only_moves_the_folder(
    made: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palm_ds.corpus import prepare as build

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    options = PrepareOptions(**OPTIONS, text=TextOptions(lower=True))
    publish = build._publish
    monkeypatch.setattr(build, "_publish", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "corpus", [str(source)], options)
    monkeypatch.setattr(build, "_publish", publish)
    monkeypatch.setattr(build, "_make", stop)  # nothing is made again
    prepare(tmp_path / "corpus", [str(source)], options)
    assert hashes(tmp_path / "corpus") == hashes(made)


def test_a_run_stopped_while_publishing_only_moves_the_folder(
    made: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last two steps: the folder has no job.json any more."""
    from palm_ds.corpus import prepare as build

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out, options = tmp_path / "corpus", PrepareOptions(**OPTIONS, text=TextOptions(lower=True))
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(build, "move_into_place", stop)
        prepare(out, [str(source)], options)
    assert not (tmp_path / "corpus.partial/job.json").exists()
    with pytest.raises(UserError, match="corpus.partial: is a corpus with different options"):
        prepare(out, [str(source)], PrepareOptions(**OPTIONS))
    monkeypatch.setattr(build, "_make", stop)  # nothing is made again
    prepare(out, [str(source)], options)
    assert hashes(out) == hashes(made)


def test_a_finished_corpus_is_unchanged(made: Path, source: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*")}
    prepare(made, [str(source)], PrepareOptions(**OPTIONS, text=TextOptions(lower=True)))
    assert before == {file: file.stat().st_mtime_ns for file in made.rglob("*")}


def test_bad_lines_are_listed_with_their_place_in_the_file(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"Row {i} is here."}) for i in range(60)]
    for at in (3, 30, 59):
        rows[at] = "{broken"
    rows[40] = json.dumps({"text": "\u0007"})
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    out = tmp_path / "corpus"
    manifest = prepare(
        out,
        [str(tmp_path / "a.jsonl")],
        PrepareOptions(train="wordpiece", vocab_size=100, shard_mb=0.0004),
    )
    assert len(manifest.shards) > 3
    assert (manifest.documents, manifest.rejected) == (56, 4)
    found = {entry["line"]: entry["reason"] for entry in read_rejected(out)}
    assert list(found) == [4, 31, 41, 60]
    assert found[41] == "no tokens in this text"
    for entry in read_rejected(out):
        assert rows[entry["line"] - 1].startswith(entry["excerpt"][:3]) or entry["line"] == 41


def test_bad_lines_after_a_long_document_have_their_place(tmp_path: Path) -> None:
    """It moves the edges of the work units behind it, so that one has two parts of the file."""
    rows = [json.dumps({"text": "A row is here."})] * 60
    rows[5] = json.dumps({"text": "A long row. " * 60})
    for at in range(8, 60, 4):
        rows[at] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    options = PrepareOptions(train="wordpiece", vocab_size=100, shard_mb=0.0004)
    prepare(tmp_path / "corpus", [str(tmp_path / "a.jsonl")], options)
    found = [entry["line"] for entry in read_rejected(tmp_path / "corpus")]
    assert found == [*range(9, 61, 4)]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_strict_stops_at_the_first_bad_line(tmp_path: Path, workers: int) -> None:
    rows = [json.dumps({"text": f"Row {i} is here."}) for i in range(60)]
    rows[33] = rows[50] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    options = PrepareOptions(
        train="wordpiece", vocab_size=100, shard_mb=0.0004, strict=True, workers=workers
    )
    with pytest.raises(UserError, match=r"a.jsonl: line 34: not JSON.*--strict"):
        prepare(tmp_path / "corpus", [str(tmp_path / "a.jsonl")], options)
    assert not (tmp_path / "corpus").exists()


def test_a_worker_reads_the_job_once(source: Path, tmp_path: Path) -> None:
    """That of 100,000 input files is 30 MB of JSON, and is needed in every work unit."""
    options = PrepareOptions(train="wordpiece", vocab_size=300)
    for strict in (False, True):
        job = plan([str(source)], replace(options, strict=strict))
        save_job(tmp_path, job)
        assert load_job(tmp_path) == job
        assert load_job(tmp_path) is load_job(tmp_path)


def test_a_second_preparation_is_refused(source: Path, tmp_path: Path) -> None:
    from palm_ds.corpus.work_dir import exclusive_lock

    partial = tmp_path / "corpus.partial"
    partial.mkdir()
    with exclusive_lock(partial), pytest.raises(UserError, match="another preparation"):
        prepare(tmp_path / "corpus", [str(source)], PrepareOptions(**OPTIONS))


def test_a_vocabulary_is_trained_on_the_simplified_text(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    texts = ["我們雖然學習歷史，儘管時間不夠。", "學習歷史雖然難，我們儘力。"] * 30
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = PrepareOptions(
        text=TextOptions(language="zh", simplify=True), train="wordpiece", vocab_size=120
    )
    prepare(tmp_path / "corpus", [str(file)], options)
    corpus = open_corpus(tmp_path / "corpus")
    unknown = corpus.vocabulary.unk
    assert (corpus.document(0)[1].ids != unknown).all()
    assert "虽" in corpus.tokenizer().decode(corpus.document(0)[1].ids)


def test_invalid_options() -> None:
    for change, message in (
        ({"train": None}, "either --tokenizer"),
        ({"tokenizer": "x"}, "either --tokenizer"),
        ({"workers": 0}, "--workers: expected a number above 0, got 0"),
        ({"shard_mb": 0.0}, "--shard_mb"),
        ({"sample_mb": -1.0}, "--sample_mb"),
    ):
        with pytest.raises(UserError, match=message):
            PrepareOptions(**{**OPTIONS, **change})
    for kind, change, message in (
        (TextOptions, {"language": "eng"}, 'did you mean "en"'),
        (TextOptions, {"newline": "x"}, "--newline"),
        (TextOptions, {"collocation_npmi": 2.0}, "npmi"),
        (TextOptions, {"collocation_count": 0}, "count"),
        (InputOptions, {"format": "json"}, "jsonl"),
        (InputOptions, {"text_documents": "lines"}, "line"),
    ):
        with pytest.raises(UserError, match=message):
            kind(**change)


def test_a_failed_attempt_leaves_nothing_to_clean_up(tmp_path: Path) -> None:
    """Without a finished shard there is nothing to lose: other options start over."""
    source = write_input(tmp_path / "in")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "job.json").write_text("{}")
    (partial / "tokenizer").mkdir()
    prepare(tmp_path / "out", [str(source)], PrepareOptions(train="wordpiece", vocab_size=200))
    assert open_corpus(tmp_path / "out").manifest.documents == 120 and not partial.exists()


def test_mistakes_are_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    source = write_input(tmp_path / "in")
    with pytest.raises(UserError, match="file: is a file; name a new folder for the corpus"):
        prepare(tmp_path / "file", [str(source)], PrepareOptions(train="wordpiece"))
    with pytest.raises(UserError, match="--vocab_size 10: must be at least 100"):
        PrepareOptions(train="wordpiece", vocab_size=10)
    (tmp_path / "body.jsonl").write_text('{"body": "Some text."}\n')
    with pytest.raises(UserError, match=r"it has `body` \(--text_field names another\)"):
        prepare(tmp_path / "x", [str(tmp_path / "body.jsonl")], PrepareOptions(train="wordpiece"))
