"""Preparation that drops copies and documents of low quality."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.add_annotation import add_annotations
from palm_ds.corpus.manifest import Manifest
from palm_ds.corpus.options import InputOptions, ScreenOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import open_corpus

SHORT = ScreenOptions(dedup="near", filters=("tests.corpus.screening.test_screen:no_zebras",))


def no_zebras(text: str) -> str:
    """A filter."""
    return "has a zebra" if "zebra" in text else ""


def fails_on_zebras(text: str) -> str:
    """A filter with a mistake."""
    return {"zebra": 1}[text] if "zebra" in text else ""  # type: ignore[return-value]


def write_inputs(folder: Path) -> list[str]:
    """60 texts in two files, and what should become of each is in its id."""
    rng = np.random.default_rng(3)
    texts: list[str] = []
    rows = []
    for number in range(60):
        words = [f"word{n}" for n in rng.integers(0, 5000, 50)]
        kind = "kept"
        if number % 10 == 7:
            words, kind = texts[number - 4].upper().split(), "copy"
        elif number % 10 == 8:
            words, kind = [*texts[number - 6].split(), "moreover"], "near"
        elif number % 10 == 9:
            words, kind = [*words, "zebra"], "zebra"
        texts.append(" ".join(words))
        rows.append(json.dumps({"id": f"{number} {kind}", "text": texts[-1]}))
    rows.insert(5, "this is not JSON")
    (folder / "a.jsonl").write_text("\n".join(rows[:31]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(rows[31:]) + "\n")
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def options(**changes: object) -> PrepareOptions:
    values = {
        "train": "wordpiece",
        "vocab_size": 400,
        "shard_mb": 0.004,
        "screen": SHORT,
        "text": TextOptions(language="en", collocations=False),
        **changes,
    }
    return PrepareOptions(**values)  # type: ignore[arg-type]


def dropped_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "dropped.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Manifest]:
    folder = tmp_path_factory.mktemp("screen")
    inputs = write_inputs(folder)
    return folder, inputs, prepare(folder / "c", inputs, options())


def test_copies_and_filtered_documents_are_dropped_and_named(
    made: tuple[Path, list[str], Manifest],
) -> None:
    folder, _, manifest = made
    corpus = open_corpus(folder / "c")
    names = [corpus.document(number)[0] for number in range(len(corpus))]
    assert names == [f"{n} kept" for n in range(60) if n % 10 < 7]
    assert len(manifest.shards) > 3
    assert manifest.dropped == {"copy": 6, "has a zebra": 6, "near copy": 6}
    assert manifest.rejected == 1
    entries = dropped_in(folder / "c")
    assert len(entries) == 18
    # the line that is not JSON counts
    assert entries[0] == {"file": "a.jsonl", "line": 9, "reason": "copy", "of": "a.jsonl, line 4"}
    assert entries[1]["reason"] == "near copy" and 0.9 < entries[1]["similarity"] < 1
    assert entries[2] == {"file": "a.jsonl", "line": 11, "reason": "has a zebra"}
    assert entries[9]["file"] == "b.jsonl" and entries[9]["of"] == "b.jsonl, line 4"


def test_the_result_does_not_depend_on_workers_or_shards(
    made: tuple[Path, list[str], Manifest], tmp_path: Path
) -> None:
    folder, inputs, manifest = made
    prepare(tmp_path / "c", inputs, options(workers=2))
    assert contents(tmp_path / "c") == contents(folder / "c")
    other = prepare(tmp_path / "d", inputs, options(shard_mb=0.002))
    assert other.dropped == manifest.dropped and len(other.shards) > len(manifest.shards)
    assert (tmp_path / "d" / "dropped.jsonl").read_text() == (
        folder / "c" / "dropped.jsonl"
    ).read_text()


def test_many_work_units_hold_no_open_files(tmp_path: Path) -> None:
    """A machine allows a process 1,024 of them, and a large corpus has thousands of units."""
    inputs = write_inputs(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    try:
        exact = ScreenOptions(dedup="exact")
        manifest = prepare(tmp_path / "c", inputs, options(shard_mb=0.0005, screen=exact))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(manifest.shards) > 20
    assert manifest.dropped == {"copy": 6}


def test_it_is_known_as_complete_and_refused_with_other_options(
    made: tuple[Path, list[str], Manifest],
) -> None:
    folder, inputs, manifest = made
    assert prepare(folder / "c", inputs, options()).dropped == manifest.dropped
    with pytest.raises(UserError, match=r"different options or inputs \(screen.dedup"):
        prepare(folder / "c", inputs, options(screen=ScreenOptions(dedup="exact")))


def test_annotations_can_be_added_to_what_was_kept(
    made: tuple[Path, list[str], Manifest], tmp_path: Path
) -> None:
    folder, inputs, _ = made
    prepare(tmp_path / "c", inputs, options())
    add_annotations(tmp_path / "c", inputs, ["capital"])
    corpus, before = open_corpus(tmp_path / "c"), open_corpus(folder / "c")
    assert "capital" in corpus.annotations
    for number in range(len(corpus)):
        name, span = corpus.document(number)
        assert (name, span.ids.tolist()) == (name, before.document(number)[1].ids.tolist())


def test_copies_of_a_test_set_are_dropped(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    rows = [json.loads(line)["text"] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    held_out = [rows[0] + " indeed", rows[1], "zebra " + rows[2]]
    (tmp_path / "test.txt").write_text("\n\n".join(held_out))
    screen = ScreenOptions(dedup="0.75")
    manifest = prepare(
        tmp_path / "c", inputs, options(screen=screen, not_in=(str(tmp_path / "test.txt"),))
    )
    corpus = open_corpus(tmp_path / "c")
    names = {corpus.document(number)[0] for number in range(len(corpus))}
    assert not names & {"30 kept", "31 kept", "32 kept"} and "33 kept" in names
    entries = dropped_in(tmp_path / "c")
    assert [e["of"] for e in entries if e["of"].startswith("test")][:3] == [
        "test.txt, line 1",
        "test.txt, line 3",
        "test.txt, line 5",
    ]
    assert manifest.options["screen"]["not_in"] == [
        ["test.txt", (tmp_path / "test.txt").stat().st_size]
    ]


def test_a_corpus_of_which_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one zebra\n\ntwo zebras\n")
    with pytest.raises(UserError, match="no documents: --dedup and --filter dropped 2 documents"):
        prepare(tmp_path / "c", [str(tmp_path / "a.txt")], options())


def test_a_filter_that_raises_names_the_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one horse\n\ntwo zebras\n")
    name = f"{__name__}:fails_on_zebras"
    screen = ScreenOptions(filters=(name,))
    said = f"--filter {name}: failed on the document at .*a.txt.*: KeyError: 'two zebras'"
    with pytest.raises(UserError, match=said):
        prepare(tmp_path / "c", [str(tmp_path / "a.txt")], options(screen=screen))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"not_in": ("x",), "screen": ScreenOptions()}, "--not_in: give --dedup"),
        ({"screen": ScreenOptions(filters=("gofer",))}, "--filter 'gofer': unknown"),
        (
            {
                "input": InputOptions(format="ernie"),
                "train": None,
                "vocab_size": PrepareOptions.vocab_size,
                "tokenizer": "v.txt",
            },
            "remove --dedup and --filter",
        ),
    ],
)
def test_options_that_do_not_go_together(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        options(**changes)


@pytest.mark.parametrize("values", [{"dedup": "exakt"}, {"dedup": "0.3"}, {"dedup": "nan"}])
def test_wrong_options(values: dict) -> None:
    with pytest.raises(UserError, match="--dedup .*: must be exact, near, or a number"):
        ScreenOptions(**values)
