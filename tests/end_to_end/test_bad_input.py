"""Every user mistake is one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from palm_ds.cli.main import main
from palm_ds.common.errors import exit_on_user_error
from palm_ds.common.json_files import SEAL, sealed_json
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import open_corpus
from palm_ds.text.tokenizer import SPECIALS

GOOD = b"".join(json.dumps({"text": f"Good text {i}. " * 20}).encode() + b"\n" for i in range(50))
TRAIN = ["--train", "wordpiece", "--vocab_size", "100"]


@pytest.fixture(scope="module")
def corpus_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small corpus, for tests to damage."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_bytes(GOOD)
    prepare(
        folder / "c", [str(folder / "a.jsonl")], PrepareOptions(train="wordpiece", vocab_size=100)
    )
    files = (folder / "c").rglob("*")
    return {f.relative_to(folder / "c").as_posix(): f.read_bytes() for f in files if f.is_file()}


def file(name: str, content: bytes, *more: str) -> Callable[[Path], list[str]]:
    """A command whose input is this file."""

    def lay(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return [str(folder / "out"), str(folder / name), *TRAIN, *more]

    return lay


PAIRS = ("--format", "pairs")
ROW = b'{"text_a": "x", "text_b": "y", "label": %s}'
TSV = b"text_a\ttext_b\tlabel\n" + b"x\ty\t1\n" * 99


def pairs(name: str, content: bytes) -> Callable[[Path], list[str]]:
    return file(name, content, *PAIRS)


def talk(name: str, content: bytes, *more: str) -> Callable[[Path], list[str]]:
    return file(name, content, "--format", "dialogues", *more)


def lines(content: bytes, *more: str, packed: int | bool = True) -> Callable[[Path], list[str]]:
    """A command whose input are ERNIE's lines; `packed`: all of them, or without the last bytes."""
    data = gzip.compress(content) if packed else content
    data = data[:-packed] if packed > 1 else data

    def lay(folder: Path) -> list[str]:
        (folder / "a.gz").write_bytes(data)
        (folder / "vocab.txt").write_text("\n".join([*SPECIALS, "a"]))
        command = [str(folder / "out"), str(folder / "a.gz"), "--format", "ernie"]
        return [*command, "--tokenizer", str(folder / "vocab.txt"), *more]

    return lay


def words(*arguments: str) -> Callable[[Path], list[str]]:
    """A command with valid input; {} in the arguments is the test's folder."""

    def lay(folder: Path) -> list[str]:
        (folder / "a.jsonl").write_bytes(GOOD)
        (folder / "empty").mkdir()
        (folder / "other").mkdir()
        (folder / "other/x.bin").write_bytes(b"x")
        (folder / "splits/train").mkdir(parents=True)
        (folder / "splits/dataset_dict.json").write_text("{}")
        (folder / "broken").mkdir()
        (folder / "broken/state.json").write_text("{}")
        (folder / "broken/dataset_info.json").write_text("{}")
        (folder / "phrases.txt").write_bytes(b"")
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
        (folder / "twice.txt").write_text("\n".join([*SPECIALS, "a", "a"]))
        (folder / "tokenizer.json").write_text("no json")
        return [argument.replace("{}", str(folder)) for argument in arguments]

    return lay


OUT = ("{}/out", "{}/a.jsonl")
MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no arguments": (words(), "required: OUT"),
    "no input": (words("{}/out", *TRAIN), "no input"),
    "missing file": (words("{}/out", "{}/nowhere.jsonl", *TRAIN), "nowhere.jsonl: no such file"),
    "pattern of nothing": (words("{}/out", "{}/*.txt.gz", *TRAIN), "no file matches"),
    "empty folder": (
        words("{}/out", "{}/empty", *TRAIN),
        "empty: nothing to read: it has no files",
    ),
    "unknown files": (words("{}/out", "{}/other", *TRAIN), "its 1 files are of unknown types"),
    "unknown file": (words("{}/out", "{}/other/x.bin", *TRAIN), "unknown file type"),
    "several splits": (words("{}/out", "{}/splits", *TRAIN), "several splits; give one of train"),
    "broken dataset": (words("{}/out", "{}/broken", *TRAIN), "not an Arrow dataset"),
    "file twice": (words("{}/out", "{}/a.jsonl", "{}/a.jsonl", *TRAIN), "is given twice"),
    "no field": (words(*OUT, *TRAIN, "--text_field", "body"), "no field `body`; it has `text`"),
    "no id field": (words(*OUT, *TRAIN, "--id_field", "key"), "no field `key`"),
    "strict": (words(*OUT, *TRAIN, "--strict", "--id_field", "k"), "a.jsonl: line 1: no field"),
    "no tokenizer": (words(*OUT), "either --tokenizer PATH or --train"),
    "two tokenizers": (words(*OUT, *TRAIN, "--tokenizer", "x"), "either --tokenizer"),
    "missing tokenizer": (words(*OUT, "--tokenizer", "{}/no.txt"), "no.txt: no such file"),
    "no mask": (words(*OUT, "--tokenizer", "{}/vocab.txt"), "no [MASK] or <mask> token"),
    "duplicate": (words(*OUT, "--tokenizer", "{}/twice.txt"), "line 7: 'a' is already on line 6"),
    "bad json": (words(*OUT, "--tokenizer", "{}/tokenizer.json"), "tokenizer.json: not JSON"),
    "small vocabulary": (words(*OUT, "--train", "wordpiece", "--vocab_size", "9"), "at least 100"),
    "unknown kind": (words(*OUT, "--train", "bpe"), "invalid choice: 'bpe'"),
    "unknown option": (words(*OUT, *TRAIN, "--lowercase"), "--lowercase"),
    "language": (words(*OUT, *TRAIN, "--language", "xx"), "invalid choice: 'xx'"),
    "workers": (words(*OUT, *TRAIN, "--workers", "0"), "--workers: expected a number above 0"),
    "no number": (words(*OUT, *TRAIN, "--workers", "many"), "invalid int value: 'many'"),
    "a vast vocabulary": (words(*OUT, "--train", "wordpiece", "--vocab_size", "9" * 11), "at most"),
    "no size of shards": (
        words(*OUT, *TRAIN, "--shard_mb", "nan"),
        "--shard_mb: expected a finite number",
    ),
    "endless samples": (
        words(*OUT, *TRAIN, "--sample_mb", "inf"),
        "--sample_mb: expected a finite number",
    ),
    "an empty input": (words("{}/out", "", *TRAIN), "input: an empty name; give files"),
    "an empty output": (words("", "{}/a.jsonl", *TRAIN), "OUT: empty; name a new folder"),
    "a failing mark": (
        words(*OUT, *TRAIN, "--annotation", "x=math:sqrt"),
        "annotation 'x': failed on document 'a.jsonl@0': TypeError: ",
    ),
    "a failing segmenter": (
        file("a.txt", "一句话。".encode(), "--segmenter", "math:sqrt"),
        "segmenter 'math:sqrt': failed on '一句话",
    ),
    "empty lexicon": (words(*OUT, *TRAIN, "--lexicon_phrase", "{}/phrases.txt"), "no entries"),
    "no lexicon": (words(*OUT, *TRAIN, "--lexicon_entity", "{}/x.txt"), "x.txt: cannot be read"),
    "unknown annotation": (words(*OUT, *TRAIN, "--annotation", "capitl"), 'did you mean "capital"'),
    "bad mark": (words(*OUT, *TRAIN, "--annotation", "nowhere:mark"), "cannot import 'nowhere'"),
    "no segmenter": (words(*OUT, *TRAIN, "--segmenter", "json:cut"), "'json' has no 'cut'"),
    "bad segmenter": (words(*OUT, *TRAIN, "--segmenter", "json"), "must be module:function"),
    "inspect nothing": (words("corpus", "inspect", "{}/nowhere"), "nowhere: no such folder"),
    "inspect with input": (words("corpus", "inspect", *OUT), "unrecognized arguments: "),
    "inspect a folder": (words("corpus", "inspect", "{}/empty"), "no manifest.json"),
    "add to nothing": (
        words("corpus", "annotate", *OUT, "--annotation", "capital"),
        "out: no such folder",
    ),
    "truncated gzip": (file("a.jsonl.gz", gzip.compress(GOOD)[:-20]), "damaged gzip file after"),
    "no gzip": (file("a.jsonl.gz", b"plain text"), "damaged gzip file"),
    "truncated zstd": (file("a.jsonl.zst", zstandard.compress(GOOD)[:-20]), "damaged zstd file"),
    "no zstd": (file("a.jsonl.zst", b"plain text"), "damaged zstd file"),
    "no parquet": (file("a.parquet", b"plain text"), "not a parquet file"),
    "no arrow": (file("a.arrow", b"plain text"), "not an Arrow dataset"),
    "empty file": (file("a.jsonl", b""), "a.jsonl: has no documents"),
    "a JSON array": (file("a.jsonl", b'[{"text": "x"}]'), "a.jsonl: line 1: a JSON list"),
    "only blanks": (file("a.txt", b"\n \n\n"), "a.txt: has no documents"),
    "UTF-16": (
        file("a.txt", "text\n".encode("utf-16")),
        "line 1: invalid UTF-8 at byte 1 (maybe UTF-16: iconv -f UTF-16 -t UTF-8 converts it)",
    ),
    "a spreadsheet": (file("a.xlsx", b"PK"), "a.xlsx: is a spreadsheet, which is not read; export"),
    "gzip without its suffix": (
        file("a.jsonl", gzip.compress(GOOD)),
        "line 1: invalid UTF-8 at byte 2 of the line (compressed by gzip: the name of the file",
    ),
    "no title": (words(*OUT, *TRAIN, "--title_field", "title"), "no field `title`; it has `text`"),
    "titles of pairs": (words(*OUT, *TRAIN, *PAIRS, "--title_field", "t"), "pairs has no titles"),
    "unknown format": (words(*OUT, *TRAIN, "--format", "pair"), "invalid choice: 'pair'"),
    "embedded pairs": (
        words("{}/out", "embedded", *TRAIN, *PAIRS),
        "contains documents, not pairs",
    ),
    "one name": (words(*OUT, *TRAIN, *PAIRS, "--pair_fields", "a"), "give three names"),
    "two names": (words(*OUT, *TRAIN, *PAIRS, "--pair_fields", "a", "b"), "or give --no_label"),
    "four names": (
        words("{}/out", *TRAIN, *PAIRS, "--pair_fields", *"abcd"),
        "after OUT and INPUT",
    ),
    "names twice": (words(*OUT, *TRAIN, *PAIRS, "--pair_fields", *"aba"), "duplicate field"),
    "names of nothing": (words(*OUT, *TRAIN, "--pair_fields", *"abc"), "only for --format pairs"),
    "no label of what": (words(*OUT, *TRAIN, "--no_label"), "--no_label: only for --format pairs"),
    "no pairs": (words(*OUT, *TRAIN, *PAIRS), "line 1: no field `text_a`; it has `text`"),
    "no label": (
        pairs("a.jsonl", b'{"text_a": "x", "text_b": "y"}'),
        "(--no_label if the pairs have",
    ),
    "half a label": (pairs("a.jsonl", ROW % b"0.5"), "in field `label` is float, not text"),
    "empty pairs": (pairs("a.tsv", b""), "a.tsv: has no documents"),
    "a header alone": (pairs("a.tsv", b"text_a\ttext_b\tlabel\n"), "a.tsv: has no documents"),
    "no header": (
        pairs("a.tsv", b"x\ty\t1\n"),
        "no column `text_a`; it has x, y, 1 (--pair_fields",
    ),
    "no label column": (
        pairs("a.csv", b"text_a,text_b\nx,y\n"),
        "no column `label`; it has text_a",
    ),
    "commas in a tsv": (pairs("a.tsv", b"text_a,text_b,label\n"), "no column `text_a`"),
    "a binary table": (
        pairs("a.tsv", b"\xff\xfe\t\n"),
        "line 1, the column names: invalid",
    ),
    "an open quote": (pairs("a.csv", b'text_a,"text_b\n'), "the column names: not CSV"),
    "pairs in a text": (pairs("a.txt", b"x\n"), "unknown file type of pairs (.jsonl"),
    "truncated pairs": (pairs("a.tsv.gz", gzip.compress(TSV)[:-9]), "damaged gzip file after line"),
    "truncated header": (pairs("a.tsv.gz", b"\x1f\x8b"), "damaged gzip file"),
    "no turns": (words(*OUT, *TRAIN, "--format", "dialogues"), "no field `turns`; it has `text`"),
    "other turns": (talk("a.jsonl", b'{"turns": ["x"]}', "--turns_field", "t"), "no field `t`; it"),
    "half an array": (talk("a.json", b'[{"turns": ["x"]},'), "not a JSON array: Expecting value"),
    "no array": (talk("a.json", b'{"turns": 3}'), "field `turns` is int, not a list of turns"),
    "turns in a table": (talk("a.tsv", b"turns\nx\n"), "unknown file type of dialogues (.jsonl"),
    "a dialogue of numbers": (
        talk("a.json", b"[1, 2]"),
        "row 0: a JSON int, expected an object",
    ),
    "lines to train on": (
        file("a.gz", b"", "--format", "ernie"),
        "contain ids; give their --tokenizer",
    ),
    "lower lines": (lines(b"", "--lower"), "contain ids, not text; remove --lower"),
    "lines with a lexicon": (lines(b"", "--lexicon_phrase", "x"), "contain ids, not text"),
    "no lines": (lines(b""), "a.gz: has no documents"),
    "other lines": (lines(b"[CLS] a b"), "line 1: expected 5 fields, token_ids;sentence_ty"),
    "no gzip lines": (lines(b"1 2", packed=False), "damaged gzip file"),
    "truncated lines": (lines(b"1 2\n" * 99, packed=12), "damaged gzip file after line"),
    "lines, strict": (lines(b"1;2", "--strict"), "a.gz: line 1: expected 5 fields"),
    "mark of others": (
        words(*OUT, *TRAIN, "--annotation", "role"),
        "--annotation role: comes with --format dia",
    ),
    "write nothing": (
        words("corpus", "export-ernie", "{}/nowhere", "{}/x.gz"),
        "nowhere: no such folder",
    ),
    "write to no gz": (words("corpus", "export-ernie", "{}/empty", "{}/x"), "no manifest.json"),
    "another's option": (words(*OUT, *TRAIN, "--length", "9"), "unrecognized arguments: --length"),
}


def line_of(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The single line that the command prints before it exits with 2."""
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        main(arguments if arguments[:1] == ["corpus"] else ["prepare", *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert len(error) < 600
    return error


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay, message = MISTAKES[case]
    assert message in line_of(capsys, lay(tmp_path))
    assert not (tmp_path / "out").exists()


def cut_off(data: bytes) -> bytes:
    return data[:-100]


def flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def edit(**changes) -> Callable[[bytes], bytes]:
    """Of a manifest, whose own hash is right."""

    def change(data: bytes) -> bytes:
        state = {**json.loads(data), **changes}
        del state[SEAL]
        return sealed_json({k: v for k, v in state.items() if v is not None}).encode()

    return change


SHARD = "data-00000-of-00001.arrow"
DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "no manifest": ("manifest.json", None, "no manifest.json"),
    "half a manifest": ("manifest.json", cut_off, "manifest.json: not JSON"),
    "a changed manifest": (
        "manifest.json",
        lambda data: data.replace(b'"rejected": 0', b'"rejected": 1'),
        "manifest.json: has changed since it was written",
    ),
    "another JSON": ("manifest.json", lambda _: b"[]", "no key `version`"),
    "another version": (
        "manifest.json",
        edit(version=1),
        "version 1, but this program reads version 2",
    ),
    "a key less": ("manifest.json", edit(marks=None), "key `marks` is missing"),
    "a shard less said": ("manifest.json", edit(shards=[{"name": "x"}]), "damaged"),
    "no shard": (SHARD, None, f"{SHARD} is missing"),
    "truncated shard": (SHARD, cut_off, "bytes, but the manifest says"),
    "changed shard": (SHARD, flip, "was changed or damaged"),
    "no index": ("index/sentence_starts.npy", None, "index/sentence_starts.npy is missing"),
    "truncated index": ("index/document_starts.npy", cut_off, "document_starts.npy has"),
    "changed index": ("index/first_sentence.npy", flip, "was changed or damaged"),
    "no tokenizer": ("tokenizer/tokenizer.json", None, "tokenizer/tokenizer.json is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_corpora(case: str, corpus_files: dict[str, bytes], tmp_path: Path, capsys) -> None:
    name, change, message = DAMAGE[case]
    for other, data in corpus_files.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(data)
    if change is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(change(corpus_files[name]))
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        open_corpus(tmp_path, verify=True)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and str(tmp_path) in error and error.count("\n") == 1


def test_a_replaced_tokenizer_in_a_corpus(corpus_files: dict[str, bytes], tmp_path: Path) -> None:
    """The fingerprint differs, even without `verify`."""
    for other, data in corpus_files.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(data)
    file = tmp_path / "tokenizer/tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"##o"', b'"##`"', 1))
    with pytest.raises(ValueError, match="not the tokenizer the corpus was prepared with"):
        open_corpus(tmp_path).tokenizer()


def test_an_index_of_another_size(corpus_files: dict[str, bytes], tmp_path: Path) -> None:
    for other, data in corpus_files.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(data)
    file = tmp_path / "index/document_starts.npy"
    array = np.load(file)
    np.save(file, array.astype(np.float64))
    with pytest.raises(ValueError, match=r"has float64 \(51,\), expected int64 \(51,\)"):
        open_corpus(tmp_path)


def test_options_that_differ_from_those_of_out(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    command = [str(tmp_path / "out"), str(tmp_path / "a.jsonl"), *TRAIN]
    assert main(["prepare", *command]) == 0
    error = line_of(capsys, [*command, "--lower"])
    assert "text.lower: False -> True" in error
    (tmp_path / "a.jsonl").write_bytes(GOOD + GOOD)
    assert "bytes" in line_of(capsys, command)


def test_options_that_differ_from_those_of_a_started_run(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n")
    command = [str(tmp_path / "out"), str(tmp_path / "a.jsonl"), *TRAIN]
    line_of(capsys, [*command, "--strict"])
    (tmp_path / "out.partial/parts/00000.json").write_text("{}")  # as if a shard were finished
    error = line_of(capsys, command)
    assert "strict: True -> False" in error and "out.partial" in error


def test_an_existing_folder_at_the_target(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    command = [str(tmp_path / "out"), str(tmp_path / "a.jsonl"), *TRAIN]
    assert "no manifest.json; not a corpus" in line_of(capsys, command)
    (tmp_path / "out/thesis.txt").rename(tmp_path / "thesis.txt")  # an empty one would be taken
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.txt").write_text("years of work")
    assert "exists but is not an unfinished corpus" in line_of(capsys, command)
    assert (tmp_path / "out.partial/thesis.txt").exists()


@pytest.mark.distributed
def test_a_worker_was_killed(tmp_path: Path, root: Path) -> None:
    """The message names the cause, and finished work is kept."""
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "deadly_marks.py").write_text(
        "import os, signal\ndef die(document): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(root / "launch/prepare.py"), "out", "a.jsonl", *TRAIN]
    ended = subprocess.run(
        [*command, "--workers", "2", "--annotation", "deadly_marks:die"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "error: a worker process was killed" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "out.partial/job.json").exists()
