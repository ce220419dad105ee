from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from palm_ds.common.messages import (
    byte_size,
    counted,
    first_sentence,
    json_line,
    only_warnings,
    plain_messages,
    printable,
    short_number,
    without_secrets,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ümläut, 中文", "plain, ümläut, 中文"),
        ("w\x1b[2Jx\x07", r"w\x1b[2Jx\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\u202eb\u200b", r"a\u202eb\u200b"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\ud800", r"\ud800"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    line = json_line({"x": text})
    assert line.isprintable() and json.loads(line) == {"x": text}


@pytest.mark.parametrize(
    ("number", "what", "said"),
    [
        (0, "row", "0 rows"),
        (1, "query", "1 query"),
        (2, "query", "2 queries"),
        (2, "key", "2 keys"),
        (1, "process", "1 process"),
        (2000, "process", "2,000 processes"),
    ],
)
def test_one_thing_is_no_plural(number: int, what: str, said: str) -> None:
    assert counted(number, what) == said


@pytest.mark.parametrize(
    ("number", "said"), [(25_344, "25.3 k"), (1_310_000, "1.3 M"), (9_876_543_210, "9,876.5 M")]
)
def test_short_numbers(number: int, said: str) -> None:
    assert short_number(number) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (38_700, "38.7 KB"),
        (999_960, "1 MB"),
        (1.234e9, "1.23 GB"),
        (99.97e9, "100 GB"),
        (2.5e15, "2,500 TB"),
    ],
)
def test_sizes(count: float, said: str) -> None:
    """Those of small runs were 3.87e-05 GB."""
    assert byte_size(count) == said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One. Two.", "One."),
        ("Is it one? Two.", "Is it one?"),
        ("Mine (Doe et al. 2021. No. 3): it. Two.", "Mine (Doe et al. 2021. No. 3): it."),
        ("As Doe et al. say: 1.5 of it. Two.", "As Doe et al. say: 1.5 of it."),
        ("bert, roberta, ... (encoders.md). Two.", "bert, roberta, ... (encoders.md)."),
        ("open (paren. Two.", "open (paren."),
        ("no end (of. it)", "no end (of. it)"),
    ],
)
def test_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_line_breaks_may_be_kept() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


LIBRARY = logging.getLogger("palm_ds")
log = logging.getLogger("palm_ds.train")


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """An unconfigured logger, restored afterwards."""
    assert not LIBRARY.handlers and LIBRARY.level == logging.NOTSET
    yield
    LIBRARY.handlers.clear()
    LIBRARY.setLevel(logging.NOTSET)


def test_secrets_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abc123")
    monkeypatch.setenv("PALM_DS_TOKEN", "a")
    assert without_secrets("key abc123 at http://u:p@h/x?y=1") == "key *** at http://***@h/x?y=1"
    signed = "https://h/x?X-Amz-Date=1&X-Amz-Signature=ab12&sig=c%2B"
    assert without_secrets(signed) == "https://h/x?X-Amz-Date=1&X-Amz-Signature=***&sig=***"
    others = "mail@example.org, http://host/a@b"
    assert without_secrets(others) == others
    with plain_messages():
        log.warning("https://u:p@h/x: again in 1 s")
    assert capsys.readouterr().err == "https://***@h/x: again in 1 s\n"


def test_plain_lines_on_stdout_and_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_messages():
        log.info("step %d [of] 5 %%", 3)
        log.warning("checkpoint skipped")
        log.debug("kernels")
    log.info("later")
    assert capsys.readouterr() == ("step 3 [of] 5 %\n", "checkpoint skipped\n")
    assert not LIBRARY.handlers and LIBRARY.level == logging.NOTSET


def test_nested_handlers_print_once(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_messages(), plain_messages():
        log.info("once")
    assert capsys.readouterr().out == "once\n"


def test_messages_follow_a_replaced_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_messages():
        monkeypatch.setattr(sys, "stdout", sys.stderr)  # as a live display does
        log.info("line")
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "line\n")


def test_a_program_that_sets_a_level_decides(capsys: pytest.CaptureFixture[str]) -> None:
    LIBRARY.setLevel(logging.ERROR)
    with plain_messages():
        log.info("progress")
        log.warning("warning")
    assert capsys.readouterr() == ("", "")
    assert LIBRARY.level == logging.ERROR


def test_other_processes_log_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_messages():
        only_warnings()
        log.info("logged by the first process")
        log.warning("of this one")
    assert capsys.readouterr() == ("", "of this one\n")
    LIBRARY.setLevel(logging.ERROR)
    only_warnings()
    assert LIBRARY.level == logging.ERROR
