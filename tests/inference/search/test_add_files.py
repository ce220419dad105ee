"""The command: an index of files, made, changed and searched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.inference.search.add_files import check_model
from palm_ds.inference.search.index import open_index
from palm_ds.inference.trained_model import TrainedModel

RNG = np.random.default_rng(3)
TEXTS = [" ".join(RNG.choice(["good", "bad", "so", "very", "?"], n)) for n in range(1, 20)]


def rows(folder: Path, first: int, last: int, note: str = "") -> str:
    file = folder / f"rows_{first}{note}.jsonl"
    lines = [
        json.dumps({"id": n, "title": f"t{n}", "text": f"{TEXTS[n]}{note}", "even": n % 2 == 0})
        for n in range(first, last)
    ]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> list[Any]:
    """The lines of JSON that a command prints."""
    capsys.readouterr()
    assert main(["index", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_index_is_made_changed_and_searched(
    words_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "i"
    (built,) = answer(capsys, "build", index, words_run, rows(tmp_path, 0, 12), "--pooling", "cls")
    assert (built["added"], built["texts"]) == (12, 12)
    (more,) = answer(capsys, "add", index, rows(tmp_path, 10, 19), rows(tmp_path, 0, 2, " ?"))
    assert more | {"seconds": 0} == {
        **{"added": 9, "replaced": 2, "unchanged": 2, "texts": 19},
        **{"graph": False, "seconds": 0},
    }
    (gone,) = answer(capsys, "delete", index, "3", "4", "99")
    assert gone == {"deleted": 2, "absent": 1, "texts": 17}
    (gone,) = answer(capsys, "delete", index, "--filter", '{"even": true}')
    assert gone["deleted"] == 9
    left = [1, 5, 7, 9, 11, 13, 15, 17]
    found = answer(capsys, "search", index, "so very bad", "--top", 99)
    assert sorted(int(each["id"]) for each in found) == left
    embedder = TrainedModel.open(words_run).embedder()
    texts = [f"{each['title']} {each['text']}" for each in found]
    vectors = embedder.with_settings(replace(embedder.settings, pooling="cls")).embed(
        [*texts, "so very bad"]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(
        [each["score"] for each in found], vectors[:-1] @ vectors[-1], atol=1e-5
    )
    hybrid = answer(capsys, "search", index, "t7", "--hybrid", "--filter", '{"even": false}')
    assert hybrid[0]["id"] == "7" and hybrid[0]["metadata"] == {"even": False}
    assert main(["index", "search", str(index), "t7", "--filter", '{"even": true}']) == 0
    assert capsys.readouterr() == ("", "nothing found: no text passes --filter\n")
    (about,) = answer(capsys, "info", index)
    assert (about["texts"], about["deleted"], about["graph"]) == (8, 13, 0)
    assert main(["index", "info", str(index)]) == 0
    assert "13 deleted; `palm-ds index compact` frees their space" in capsys.readouterr().out
    (compacted,) = answer(capsys, "compact", index)
    assert (compacted["left_out"], compacted["texts"]) == (13, 8)
    assert (
        answer(capsys, "search", index, "t7", "--hybrid", "--filter", '{"even": false}') == hybrid
    )
    (about,) = answer(capsys, "info", index)
    assert (about["texts"], about["deleted"]) == (8, 0)


def test_vectors_of_another_model_are_refused(
    words_run: Path, tasks_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "build", tmp_path / "i", words_run, rows(tmp_path, 0, 5))
    embedders = [TrainedModel.open(path).embedder() for path in (words_run, tasks_run)]
    with open_index(tmp_path / "i") as index:
        check_model(index, embedders[0], words_run)
        with pytest.raises(UserError, match="tasks: not the model of .*a cosine of"):
            check_model(index, embedders[1], tasks_run)
        object.__setattr__(index.embedding, "fingerprint", "of a conversion")
        check_model(index, embedders[0], words_run)


def test_mistakes_in_one_line(
    words_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["index", *map(str, words)])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    index, file = tmp_path / "i", rows(tmp_path, 0, 3)
    assert "nowhere.txt: no such file" in error_of("build", index, words_run, "nowhere.txt")
    assert "no column 'x' for the text" in error_of(
        "build", index, words_run, file, "--column", "x"
    )
    assert not index.exists()
    assert "not an index; `palm-ds index build` makes one" in error_of("add", index, file)
    assert main(["index", "build", str(index), str(words_run), file]) == 0
    assert "is already an index; `palm-ds index add`" in error_of("build", index, words_run, file)
    assert "give either ids or --filter" in error_of("delete", index)
    assert "--filter: expected JSON such as" in error_of("delete", index, "--filter", "[1]")
    assert "'=>' is not an operator" in error_of("delete", index, "--filter", '{"a": {"=>": 1}}')
    assert "--top 0: expected at least 1" in error_of("search", index, "x", "--top", "0")
    moved = json.loads((index / "index.json").read_text()) | {"model": "runs/moved"}
    (index / "index.json").write_text(json.dumps(moved))
    assert (
        "runs/moved: the model of .* is no longer there; give its new place: --model"
        in error_of("search", index, "x").replace(str(index), ".*")
    )


def test_a_mistake_in_a_later_row_leaves_no_empty_index(
    words_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def error() -> str:
        with pytest.raises(SystemExit):
            main(["index", "build", str(index), str(words_run), rows(tmp_path, 0, 5), str(bad)])
        return capsys.readouterr().err.splitlines()[-1]

    index, bad = tmp_path / "i", tmp_path / "bad.jsonl"
    bad.write_text('{"id": 9, "text": "good"}\n{"id": 10, "text": ""}\n')
    assert error().endswith("bad.jsonl:2: the text is empty") and not index.exists()
    monkeypatch.setattr("palm_ds.inference.search.add_files.CHUNK", 4)
    assert "i has the texts before; `palm-ds index add` with mended files continues" in error()
    with open_index(index) as made:
        assert made.total == 4


def test_the_last_row_of_an_id_stays(
    words_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when the same rows are added again, of which the last is there already."""
    file, index = tmp_path / "rows.jsonl", tmp_path / "i"
    lines = [json.dumps({"id": "1", "text": text}) for text in ("so bad", "very good")]
    file.write_text("\n".join([*lines, json.dumps({"id": "2", "text": "so so"})]))
    answer(capsys, "build", index, words_run, file)
    for _ in range(2):
        (again,) = answer(capsys, "add", index, file)
        assert (again["added"], again["unchanged"], again["texts"]) == (0, 3, 2)
    found = answer(capsys, "search", index, "good")
    assert {each["id"]: each["text"] for each in found} == {"1": "very good", "2": "so so"}


def test_a_search_that_finds_nothing_says_why(
    words_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def why(*options: str) -> str:
        capsys.readouterr()
        assert main(["index", "search", str(tmp_path / "i"), "so", *options]) == 0
        return capsys.readouterr().err

    answer(capsys, "build", tmp_path / "i", words_run, rows(tmp_path, 0, 3), "--pooling", "splade")
    both = "nothing found: no text has a word of the query and passes --filter\n"
    assert why("--filter", '{"even": "no"}') == both
    answer(capsys, "delete", tmp_path / "i", "0", "1", "2")
    assert why() == "nothing found: the index has no texts\n"


def test_an_id_that_is_no_text_is_refused(
    words_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "build", tmp_path / "i", words_run, rows(tmp_path, 0, 2))
    with pytest.raises(SystemExit):
        main(["index", "delete", str(tmp_path / "i"), "\udcff"])
    assert "ids: half a character at 1: not Unicode" in capsys.readouterr().err
