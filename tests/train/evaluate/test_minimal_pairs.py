"""Minimal pairs scored by a model, against transformers and against recorded losses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import BertForMaskedLM, BertTokenizerFast

from palm_ds.cli.evaluate import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.data.reader.minimal_pairs import read_paradigms
from palm_ds.inference.held_out_loss import score_minimal_pairs
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.train.evaluate.minimal_pairs import PairScore, pair_accuracy, pair_set
from tests.helpers.bert_folder import write_bert

WORDS = ["the", "a", "cat", "dog", "cats", "dogs", "runs", "run", "sees", "no", "ever", "big", "."]
RECORDED = "huggingface_RoBERTa-base_Liu2019/0/saves/babyberta"
LENGTH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), BertForMaskedLM, WORDS, length=LENGTH)


def sentences(rng: np.random.Generator) -> Iterator[str]:
    while True:
        yield " ".join(rng.choice(WORDS, int(rng.integers(2, 12))))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """BLiMP's form and Zorro's, with sentences of different lengths and a pair of one sentence."""
    folder, text = tmp_path_factory.mktemp("pairs"), sentences(np.random.default_rng(5))
    rows = [{"sentence_good": next(text), "sentence_bad": next(text), "UID": "x"} for _ in range(9)]
    rows.append({"sentence_good": "The cat runs.", "sentence_bad": "the cat runs ."})
    (folder / "blimp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "zorro.txt").write_text("\n".join(next(text) for _ in range(14)))
    return [str(folder / "blimp.jsonl"), str(folder / "zorro.txt")]


@torch.no_grad()
def restated(bert: BertForMaskedLM, ids: list[int], score: PairScore, mask: int) -> float:
    """The loss of a sentence, one forward pass after another."""
    labels = torch.tensor(ids)
    if score == "unmasked":
        return float(F.cross_entropy(bert(labels[None]).logits[0], labels))
    total = 0.0
    for at in range(1, len(ids) - 1):
        hidden = labels.clone()
        hidden[at] = mask
        total += float(F.cross_entropy(bert(hidden[None]).logits[0, at], labels[at]))
    return total


@pytest.mark.parametrize("score", ["unmasked", "masked"])
def test_losses_and_accuracies_are_those_of_transformers(
    model: Path, files: list[str], score: PairScore
) -> None:
    bert = BertForMaskedLM.from_pretrained(model).eval()
    tokenizer = BertTokenizerFast.from_pretrained(model)
    opened = TrainedModel.open(model)
    filler = opened.filler()
    found = pair_set(
        read_paradigms(files),
        filler.tokenizer,
        task="masked_words",
        task_id=0,
        most=LENGTH,
        score=score,
    )

    def logits(batch):
        with torch.no_grad():
            return filler.model.logits(batch, "masked_words")

    losses = found.losses(logits, length=LENGTH, rows=3)
    of_sentence = np.bincount(found._inputs[0], weights=losses)
    accuracies = []
    for paradigm in read_paradigms(files):
        right = 0.0
        for pair, numbers in zip(paradigm.pairs, found.paradigms[paradigm.name], strict=True):
            expected = [
                restated(bert, tokenizer(text).input_ids, score, tokenizer.mask_token_id)
                for text in (pair.good, pair.bad)
            ]
            assert of_sentence[numbers] == pytest.approx(expected, rel=1e-4)
            tie = tokenizer(pair.good).input_ids == tokenizer(pair.bad).input_ids
            right += 0.5 if tie else expected[0] < expected[1]
        accuracies.append(right / len(paradigm.pairs))
    scores = score_minimal_pairs(opened, files, score)
    assert [each.accuracy for each in scores.paradigms.values()] == pytest.approx(accuracies)
    assert list(scores.paradigms) == ["blimp", "zorro"]
    assert scores.mean == pytest.approx(np.mean(accuracies)) and scores.pairs == 17
    assert 0 < scores.mean < 1


@pytest.mark.parametrize("score", ["unmasked", "masked"])
def test_neither_batches_nor_processes_matter(
    model: Path, files: list[str], score: PairScore
) -> None:
    opened = TrainedModel.open(model)
    filler = opened.filler()
    found = pair_set(
        read_paradigms(files),
        filler.tokenizer,
        task="masked_words",
        task_id=0,
        most=LENGTH,
        score=score,
    )
    calls = []

    def logits(batch):
        calls[-1] += 1
        with torch.no_grad():
            return filler.model(batch, ["masked_words"])["masked_words"].scores

    def losses(rows: int, world: int) -> np.ndarray:
        parts = []
        for rank in range(world):
            calls.append(0)
            parts.append(found.losses(logits, length=LENGTH, rows=rows, rank=rank, world=world))
        assert len(set(calls[-world:])) == 1  # ZeRO 3 needs equally many forward passes
        assert (np.count_nonzero(parts, axis=0) == 1).all()  # every input is read once
        return np.sum(parts, axis=0)

    whole = losses(rows=4, world=1)
    assert losses(rows=1, world=3) == pytest.approx(whole, rel=1e-5)
    assert losses(rows=50, world=2) == pytest.approx(whole, rel=1e-5)  # one has empty rows only
    few = score_minimal_pairs(replace(opened, batch_tokens=LENGTH), files, score)
    assert few.record() == score_minimal_pairs(opened, files, score).record()


def test_ties_count_half_and_losses_that_are_no_numbers_are_no_accuracy() -> None:
    good, bad = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 2.0, 5.0])
    assert pair_accuracy(good, bad) == (1 + 0.5 + 0 + 1) / 4
    assert np.isnan(pair_accuracy(np.array([1.0, np.nan]), np.array([2.0, 2.0])))


def test_pairs_and_arithmetic_against_recorded_losses(shared: Path) -> None:
    """Zorro's own losses of RoBERTa-base for its sentences, 4 digits each. Its scoring counts a
    pair whose good sentence has strictly the lower loss; ours counts half of each tie besides."""
    zorro = shared / "data/minimal_pairs/zorro"
    if not zorro.is_dir():
        pytest.skip(f"no Zorro: {zorro} is no folder")
    paradigms = read_paradigms(str(zorro / "sentences/babyberta/*.txt"))
    strict, ours, ties = [], [], 0
    for paradigm in paradigms:
        file = zorro / "reference" / RECORDED / f"probing_{paradigm.name}_results_500000.txt"
        lines = [line.rsplit(None, 1) for line in file.read_text().splitlines()]
        recorded = {text: float(loss) for text, loss in lines}
        assert [text for text, _ in lines] == [
            text for pair in paradigm.pairs for text in (pair.bad, pair.good)
        ]
        good = np.array([recorded[pair.good] for pair in paradigm.pairs])
        bad = np.array([recorded[pair.bad] for pair in paradigm.pairs])
        even = [float(loss) for _, loss in lines[1::2]]
        odd = [float(loss) for _, loss in lines[::2]]
        right = sum(g < b for g, b in zip(even, odd, strict=True))
        equal = sum(g == b for g, b in zip(even, odd, strict=True))
        accuracy = pair_accuracy(good, bad)
        assert accuracy == pytest.approx((right + equal / 2) / len(even), abs=1e-12)
        strict.append(right / len(even))
        ours.append(accuracy)
        ties += equal
    assert (len(paradigms), sum(len(each.pairs) for each in paradigms)) == (23, 46000)
    assert ties == 44
    assert np.mean(strict) == pytest.approx(0.82489, abs=1e-5)
    assert np.mean(ours) == pytest.approx(0.82537, abs=1e-5)


def test_command(
    model: Path, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    asked = ["--pairs", *files, "--model", str(model)]
    assert COMMAND.call([*asked, "--device", "cpu", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    scores = score_minimal_pairs(TrainedModel.open(model), files)
    assert json.loads(out.read_text()) == {
        "model": str(model),
        "score": "unmasked",
        **scores.record(),
    }
    assert [line.split()[1:2] for line in printed.splitlines() if "blimp" in line]
    for name, accuracy in [("zorro", scores.paradigms["zorro"].accuracy), ("mean", scores.mean)]:
        line = next(line for line in printed.splitlines() if f" {name} " in line)
        assert f"{accuracy:.2%}" in line
    assert COMMAND.call([*asked, "--device", "cpu", "--score", "masked", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == "masked"


@pytest.mark.parametrize(
    "given", ["", "--pairs x", "--model x", "--gold x --pairs y --model z", "--gold x"]
)
def test_options_that_do_not_go_together(given: str) -> None:
    with pytest.raises(UserError, match="give --gold and --predictions, or --pairs and --model"):
        COMMAND.call(given.split())


def test_a_sentence_that_is_too_long_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(f"the cat\nthe dog\n{'the ' * LENGTH}\na\n")
    with pytest.raises(UserError, match=rf"long.txt:3: a sentence of {LENGTH} tokens; .* {22} "):
        score_minimal_pairs(TrainedModel.open(model), str(tmp_path / "long.txt"))
