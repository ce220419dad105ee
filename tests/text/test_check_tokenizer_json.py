"""Hostile tokenizers: one line, in bounded memory, before the library sees them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordPiece

from palm_ds.common.errors import UserError
from palm_ds.text.check_tokenizer_json import library_errors, may_run_away, without_panics
from palm_ds.text.tokenizer import SPECIALS, load_tokenizer, wordpiece

Edit = Callable[[dict[str, Any]], object]
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
MATCH = {"type": "Replace", "pattern": {"Regex": ".*"}, "content": "a" * 40}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [[x, -1.0] for x in SPECIALS]}
TABLE = base64.b64encode((1 << 31).to_bytes(4, "little") + bytes(96)).decode()


def vocabulary(**ids: object) -> Edit:
    return lambda state: state["model"]["vocab"].update(ids)


def normalizer(*parts: object) -> Edit:
    nest = {"type": "Sequence", "normalizers": list(parts)}
    return lambda state: state.update(normalizer={"type": "Sequence", "normalizers": [nest]})


HOSTILE: dict[str, tuple[Edit, str]] = {
    "an id of gigabytes": (vocabulary(x=10**9), "'x' has the id 1000000000, but there are 22"),
    "an id of two tokens": (vocabulary(x=7, y=7), "model.vocab: .* and .* have one id, 7$"),
    "a negative id": (vocabulary(x=-1), "not a tokenizer.json: invalid value"),
    "a line break": (vocabulary(**{"a\nb": 12}), "token 12 has a line break in it"),
    "ten kilobytes of growth": (normalizer(*[REPLACE] * 100), "a text 1,000 times as long"),
    "growth by a pattern": (normalizer(MATCH, MATCH), "a text 1,000 times as long"),
    "growth by a letter in words": (
        normalizer(*[{**REPLACE, "pattern": {"Regex": "a(?:(?<=a)(?=b)|)"}}] * 9),
        "a text 1,000 times as long",
    ),
    "a decoder that grows": (
        lambda state: state.update(decoder={"type": "Sequence", "decoders": [REPLACE] * 9}),
        "decoder: could make a text",
    ),
    "a table that lies": (
        normalizer({"type": "Precompiled", "precompiled_charsmap": TABLE}),
        "precompiled_charsmap: is not SentencePiece's table",
    ),
    "no table": (
        normalizer({"type": "Precompiled", "precompiled_charsmap": "?"}),
        "precompiled_charsmap: is not SentencePiece's table",
    ),
    "pieces of no length": (
        lambda state: state.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "pre_tokenizer: length: expected at least 1, got 0",
    ),
    "a pattern without end": (
        normalizer({**REPLACE, "pattern": {"Regex": "(a+)+$"}}),
        "cannot split a text into tokens: .*retry-limit",
    ),
    "random ids": (lambda state: state["model"].update(dropout=0.5), "0.5 makes ids random"),
    "no unknown token": (
        lambda state: state["model"].update(unk_token="?"),
        "cannot split a text into tokens: WordPiece error: Missing",
    ),
    "no unknown piece": (lambda state: state.update(model=UNIGRAM), "cannot split a text"),
    "no model": (
        lambda state: state.update(model=[]),
        r"model: expected keys and values, got \[\]",
    ),
    "another model": (
        lambda state: state["model"].update(type="Magic\x1b[2J"),
        "not a tokenizer.json: ",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("trace", ["0", "1"])
def test_a_hostile_tokenizer_is_one_line(
    what: str,
    trace: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", trace)
    wordpiece([*SPECIALS, *"abcdefgh", "##a", "##b", "##c"], lower=True).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    edit, message = HOSTILE[what]
    edit(state)
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"tokenizer {path}: ") and str(caught.value).isprintable()
    assert capfd.readouterr().err == ""  # Rust's report of a panic neither


def test_only_reports_of_panics_are_kept_off_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with without_panics():
        os.write(2, b"before\n\nthread '<unnamed>' (7) panicked at src/lib.rs:6:2:\nno!\n")
        os.write(2, b"note: run with `RUST_BACKTRACE=1`\nafter\n")
    assert capfd.readouterr().err == "before\nafter\n"


def test_a_regular_expression_that_runs_away_on_one_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It opens; texts are split in several threads, and only the one that it fails on is named."""
    wordpiece([*SPECIALS, "q", "##q", "a"], lower=True).save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    normalizer({**REPLACE, "pattern": {"Regex": "(q+)+$"}})(state)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        texts = ["q a", "q" * 60 + "!"] * 4
        found = [threads.submit(tokenizer.encode_texts, [text]) for text in texts]
        errors = [each.exception() for each in found]
    assert [type(error) for error in errors] == [type(None), UserError] * 4
    assert all("cannot split a text into tokens" in str(error) for error in errors[1::2])
    assert capfd.readouterr().err == ""


def test_what_may_run_away() -> None:
    backend = Backend(WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    assert not may_run_away(backend)
    for pattern, risky in ((" {2,}", False), ("a+", False), ("(a+)+", True), ("a*b*", True)):
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex(pattern), "removed")]
        )
        assert may_run_away(backend) is risky
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.normalizer = normalizers.Replace(Regex(pattern), " ")
        assert may_run_away(backend) is risky
        backend.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model": {}, "model": {}}', 'duplicate key "model"'),
        ("[" * 100_000, "not JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("<!doctype html>", "is an HTML page"),
    ],
)
def test_a_file_that_is_no_tokenizer(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_errors_of_the_library_are_one_line() -> None:
    panic = type("PanicException", (BaseException,), {})
    for error in (panic("a\nb"), ValueError("a"), Exception("a\nb")):
        with pytest.raises(UserError, match="^x: a$"), library_errors("x"):
            raise error
    for kept in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kept), library_errors("x"):
            raise kept
    with pytest.raises(UserError, match="^mine$"), library_errors("x"):
        raise UserError("mine")
