"""Hard negatives: those of sentence-transformers, and what its margins and limits leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.inference.parts import OutputParts
from palm_ds.inference.search import mine_files
from palm_ds.inference.search.mine_files import pair_scorer
from palm_ds.inference.search.mine_negatives import Miner, MiningSettings, Passages
from palm_ds.inference.trained_model import TrainedModel
from tests.helpers.saved_model import write_rows
from tests.helpers.small_index import vectors_of

PASSAGES = [f"passage {n}" for n in range(60)]
ANSWERS = {f"query {n}": [f"passage {2 * n}", f"passage {2 * n + 1}"] for n in range(8)}


def scores_of(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Numbers as of a cross-encoder, some of them negative."""
    return np.concatenate([vectors_of([f"{x} {y}"])[:, 0] * 9 for x, y in pairs])


def mined(scorer: Any = None, answers: Mapping[str, Sequence[str]] = ANSWERS, **settings: Any):
    passages = Passages(texts=PASSAGES, vectors=vectors_of(PASSAGES))
    miner = Miner(
        passages=passages,
        embed_queries=vectors_of,
        embed_texts=vectors_of,
        settings=MiningSettings(**settings),
        scorer=scorer,
    )
    return [*miner.mine(answers)]


class Encoder:
    """What `mine_hard_negatives` asks of a model."""

    device = "cpu"

    def encode_query(self, texts: list[str], **_: object) -> np.ndarray:
        return vectors_of(texts)

    encode_document = encode_query

    def similarity(self, one: Any, other: Any) -> Any:
        import torch

        return torch.as_tensor(one) @ torch.as_tensor(other).T

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        import torch

        return (torch.as_tensor(one) * torch.as_tensor(other)).sum(1)


class CrossEncoder:
    def predict(self, pairs: list[tuple[str, str]], **_: object) -> Any:
        import torch

        return torch.as_tensor(scores_of(pairs))


@pytest.mark.parametrize(
    ("settings", "reranked"),
    [
        ({"num_negatives": 3}, False),
        ({"num_negatives": 2, "range_min": 4, "range_max": 10}, False),
        ({"num_negatives": 5, "absolute_margin": 0.1}, False),
        ({"num_negatives": 5, "relative_margin": 0.3, "min_score": -0.2}, False),
        ({"num_negatives": 4, "max_score": 0.3, "range_max": 50}, False),
        ({"num_negatives": 4, "absolute_margin": 1.0, "range_max": 90}, True),
        ({"num_negatives": 4, "relative_margin": 0.5, "range_max": 90}, True),
    ],
)
def test_negatives_are_those_of_sentence_transformers(
    settings: dict[str, Any], reranked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    util = pytest.importorskip("sentence_transformers.util")
    datasets = pytest.importorskip("datasets")
    rows = [(query, text) for query, own in ANSWERS.items() for text in own]
    peer = util.mine_hard_negatives(
        datasets.Dataset.from_dict(
            dict(zip(("query", "positive"), zip(*rows, strict=True), strict=True))
        ),
        Encoder(),
        corpus=PASSAGES,
        cross_encoder=CrossEncoder() if reranked else None,
        output_format="triplet",
        output_scores=True,
        verbose=False,
        **{"range_max": 100, **settings},
    )
    wanted = [(x["query"], x["positive"], x["negative"], x["scores"]) for x in peer]
    own = [
        (each.query, positive, text, [each.positives[positive], score])
        for each in mined(scores_of if reranked else None, **settings)
        for positive in ANSWERS[each.query]
        for text, score in each.negatives
    ]
    assert [x[:3] for x in own] == [x[:3] for x in wanted] != []
    np.testing.assert_allclose([x[3] for x in own], [x[3] for x in wanted], atol=1e-5)


def test_sampling_is_a_function_of_the_query_and_the_seed() -> None:
    def drawn(seed: int, answers: Mapping[str, Sequence[str]] = ANSWERS) -> dict[str, list[str]]:
        how = {"num_negatives": 5, "range_max": 20, "sampling_strategy": "random", "seed": seed}
        found = mined(answers=answers, **how)
        for each in found:
            scores = [score for _, score in each.negatives]
            assert scores == sorted(scores, reverse=True) and len(set(each.negatives)) == 5
        return {each.query: [text for text, _ in each.negatives] for each in found}

    draws = [drawn(seed) for seed in range(12)]
    query = "query 3"
    assert drawn(1) == draws[1] and drawn(1, {query: ANSWERS[query]})[query] == draws[1][query]
    nearest = {each.query: each for each in mined(num_negatives=20, range_max=20)}[query]
    found = {text for each in draws for text in each[query]}
    assert found <= {text for text, _ in nearest.negatives} and len(found) > 15


def test_no_positive_no_copy_and_no_query_is_a_negative() -> None:
    texts = ["a", " a", "b  c", "b c", "d", "d", "e", "q"]
    vectors = vectors_of(["q"]).repeat(len(texts), 0)
    miner = Miner(
        passages=Passages(texts=texts, vectors=vectors),
        embed_queries=vectors_of,
        embed_texts=vectors_of,
        settings=MiningSettings(num_negatives=4),
    )
    (found,) = miner.mine({"q": ["a", "b c"]})
    assert [text for text, _ in found.negatives] == ["d", "e"]


# ---- the command ----


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"anchor": f"so {n % 3}", "positive": f"good {'very ' * n}bad"} for n in range(12)
    ]
    write_rows(tmp_path / "pairs.jsonl", [*rows, {"anchor": None, "positive": "bad bad"}])
    return tmp_path / "pairs.jsonl"


def command(
    capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    capsys.readouterr()
    assert main(["mine", *map(str, words), "--json"]) == 0
    output = Path(str(words[words.index("--output") + 1]))
    return json.loads(capsys.readouterr().out), [*map(json.loads, output.read_text().splitlines())]


def test_rows_of_a_file_get_negatives(
    words_run: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all rows, of an index, and of other files; the scores are the cosines of the vectors."""
    out = tmp_path / "mined.jsonl"
    done, rows = command(capsys, words_run, pairs, "--output", out, "--scores")
    texts = [row["positive"] for row in rows]
    assert (done["rows"], done["negatives"], done["without"]) == (13, 48, 0)
    embed = TrainedModel.open(words_run).embedder().embed
    for n, row in enumerate(rows[:-1]):
        assert row["query"] == f"so {n % 3}" and len(row["negatives"]) == 4
        assert not set(row["negatives"]) & set(texts[n % 3 : 12 : 3])
        vectors = embed([row["query"], row["positive"], *row["negatives"]])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(row["teacher_scores"], vectors[1:] @ vectors[0], atol=1e-5)
    assert rows[-1] == {
        **{"query": None, "positive": "bad bad", "negatives": [], "teacher_scores": []}
    }
    done, _ = command(capsys, words_run, pairs, "--output", out, "--min_score", 2)
    assert (done["negatives"], done["without"], done["negative_score"]) == (0, 12, None)
    write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    _, others = command(
        capsys, words_run, pairs, "--output", out, "--passages", tmp_path / "texts.jsonl"
    )
    assert [x["negatives"] for x in others] == [x["negatives"] for x in rows]
    index = tmp_path / "i"
    assert main(["index", "build", str(index), str(words_run), str(tmp_path / "texts.jsonl")]) == 0
    _, others = command(capsys, words_run, pairs, "--output", out, "--index", index)
    assert [x["negatives"] for x in others] == [x["negatives"] for x in rows]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages and queries, one to a part."""
    for name in ("CHUNK", "QUERIES"):
        monkeypatch.setattr(mine_files, name, 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("ends_at", [3, 15])  # of 13 passages; of the 3 queries after them
@pytest.mark.parametrize("change", ["", "settings", "pairs", "model"])
def test_an_interrupted_run_continues(
    words_run: Path,
    tasks_run: Path,
    pairs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends_at: int,
    change: str,
) -> None:
    how, out, parts = ["--reranker", tasks_run, "--scores"], tmp_path / "mined.jsonl", []
    write = OutputParts.write

    def until(self: OutputParts, number: int, written: Any) -> None:
        if len(parts) == ends_at:
            raise KeyboardInterrupt
        write(self, number, written)
        parts.append(number)

    monkeypatch.setattr(OutputParts, "write", until)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        command(capsys, words_run, pairs, "--output", out, *how)
    assert not out.exists()
    monkeypatch.setattr(OutputParts, "write", write)
    if change == "settings":
        how += ["--num_negatives", 2]
    if change == "pairs":
        pairs.write_text(pairs.read_text().replace("so 0", "so so"))
    if change == "model":
        how[1] = shutil.copytree(tasks_run, tmp_path / "other")
    found, _ = command(capsys, words_run, pairs, "--output", out, *how)
    assert found["continued"] == (2 if ends_at == 15 and not change else 0)
    whole, _ = command(capsys, words_run, pairs, "--output", tmp_path / "whole.jsonl", *how)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*.parts")) and whole["continued"] == 0


def test_a_reranker_scores(
    words_run: Path,
    tasks_run: Path,
    pairs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "mined.jsonl"
    how = ("--reranker", tasks_run, "--scores", "--absolute_margin", "0", "--range_max", 9)
    done, rows = command(capsys, words_run, pairs, "--output", out, *how)
    score = pair_scorer(TrainedModel.open(tasks_run))
    found = [row for row in rows if row["negatives"]]
    assert done["without"] == 12 - len(found) and found
    for row in found:
        texts = [row["positive"], *row["negatives"]]
        own = score([(row["query"], text) for text in texts])
        np.testing.assert_allclose(row["teacher_scores"], own, atol=1e-5)
        assert max(own[1:]) <= own[0] + 1e-6


def test_mistakes_in_one_line(
    words_run: Path,
    tasks_run: Path,
    pairs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def error_of(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["mine", str(words_run), *map(str, words)])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    out = ("--output", tmp_path / "o.jsonl")
    assert "--range_max 2: leaves 1 passages after the first 1, for 4 negatives" in error_of(
        pairs, *out, "--range_min", 1, "--range_max", 2
    )
    assert "--sampling_strategy" in error_of(pairs, *out, "--sampling_strategy", "best")
    assert "--index, --passages: give only one" in error_of(
        pairs, *out, "--index", "i", "--passages", pairs
    )
    assert "--reranker_task: needs --reranker" in error_of(pairs, *out, "--reranker_task", "x")
    assert "is also an input; name another" in error_of(pairs, "--output", pairs)
    assert "name a .jsonl file" in error_of(pairs, "--output", tmp_path / "o.tsv")
    reranker = ("--reranker", tasks_run, "--reranker_task")
    assert "no task 'mood' that scores pairs" in error_of(pairs, *out, *reranker, "mood")
    write_rows(tmp_path / "empty.jsonl", [{"query": "a", "positive": " "}])
    assert "empty.jsonl:1: positive: the text is empty" in error_of(tmp_path / "empty.jsonl", *out)
    with pytest.raises(UserError, match="--relative_margin"):
        MiningSettings(relative_margin=1.5)
