"""The rows shown for a step are the rows that training reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from palm_ds.common.errors import UserError
from palm_ds.inference.inspect_stream import (
    View,
    as_record,
    as_text,
    describe,
    open_held_out,
    open_step,
    sequences,
    summary,
)
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.train.recipe.recipe import Recipe, make_recipe, read_recipe
from palm_ds.train.setup.build import build_held_out, build_stream
from palm_ds.train.setup.sources import open_data
from tests.helpers.saved_model import recipe_of, save_model, write_rows
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.write_checkpoint import write_checkpoint

WORD_STARTS = """
from dataclasses import dataclass
import numpy as np
from palm_ds.model.heads.heads import ClassHead
from palm_ds.data.tasks.task import CorpusTask
from tests.helpers.write_checkpoint import write_checkpoint


@dataclass(frozen=True, kw_only=True)
class WordStarts(CorpusTask):
    def annotations(self):
        return ("word",)

    def label(self, example, source, rng):
        at = np.flatnonzero(example.source_offsets >= 0)
        example.labels[self.name] = at, example.annotations["word"][at]

    def head(self, backbone):
        return ClassHead(backbone.config.hidden_size, classes=2)

    def class_name(self, label):
        return ("inside", "start")[label]
"""
BLENDS = ["masking", "sentence_reordering + starts + masking", "sentence_distance + phrases"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    write_small_corpus(folder / "corpus", documents=60)
    (folder / "word_starts.py").write_text(WORD_STARTS)
    recipe = {
        "backbone": {"preset": "tiny", "max_positions": 64},
        "length": 64,
        "batch": "24 rows",
        "sources": {"text": {"corpus": str(folder / "corpus")}},
        "held_out": 0.2,
        "tasks": {
            "masking": {"kind": "knowledge_masking", "source": "text"},
            "phrases": {"kind": "knowledge_masking", "source": "text", "share": "masking"},
            "sentence_reordering": {"source": "text"},
            "sentence_distance": {"source": "text"},
            "starts": {"kind": "word_starts.WordStarts", "source": "text"},
        },
        "stages": {"continual": BLENDS, "steps": 8},
        "evaluate": {"examples": 30},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.syspath_prepend(str(folder))
    return read_recipe(folder / "recipe.yaml")


def plain(view: View, row: int) -> str:
    return as_text(view, row).plain


@pytest.mark.parametrize("step", [1, 9, 24])
def test_the_sequences_are_those_of_the_batch(recipe: Recipe, step: int) -> None:
    view = open_step(recipe, step, rows=2)
    stream = build_stream(recipe, open_data(recipe))
    (batch,) = stream.batches(step - 1, 0, 1, 24)
    assert list(view.shown) == [0, 1] and len(view.rows) == 24
    labels: dict[str, dict[int, int]] = {}
    covered = np.zeros((24, 64), bool)
    for seen in sequences(view, range(24)):
        record = json.loads(json.dumps(as_record(view, seen)))
        inside = slice(record["start"], record["start"] + record["length"])
        row = record["row"] - 1
        assert record["tokens"] == view.tokenizer.tokens(batch.input_ids[row, inside])
        assert record["segments"] == batch.token_type_ids[row, inside].tolist()
        assert set(batch.task_ids[row, inside].tolist()) == {record["task_id"]}
        covered[row, inside] = True
        for task, entries in record["labels"].items():
            flat = row * 64 + record["start"]
            labels.setdefault(task, {}).update({flat + e["position"]: e["label"] for e in entries})
    assert (covered == (batch.sequence_ids >= 0).numpy()).all()
    wanted = {
        task: dict(zip(*(x.tolist() for x in y), strict=True)) for task, y in batch.labels.items()
    }
    assert labels == wanted


def test_originals_agree_with_the_corpus(recipe: Recipe) -> None:
    view = open_step(recipe, 20, rows=24)
    changed = 0
    for seen in sequences(view, range(24)):
        record, origin = as_record(view, seen), seen.example.source_offsets
        corpus = seen.dataset.source.corpus
        for at, token in enumerate(record["tokens"]):
            if origin[at] < 0:
                assert token in ("[CLS]", "[SEP]") and str(at) not in record["original"]
                continue
            truth = view.tokenizer.tokens(
                corpus.read(int(origin[at]), int(origin[at]) + 1, ()).ids
            )[0]
            assert record["original"].get(str(at), token) == truth
            changed += token != truth
    assert changed > 100


def test_a_row_as_text(recipe: Recipe) -> None:
    view = open_step(recipe, 24, rows=24)
    whole = "\n".join(plain(view, row) for row in range(24))
    count = Counter(seen.dataset.name for seen in sequences(view, range(24)))
    for task_group in BLENDS:
        assert count[task_group] > 0
        assert (
            len(re.findall(rf"^  {re.escape(task_group)}  positions", whole, re.M))
            == count[task_group]
        )
    assert re.search(
        r"^    sentence_reordering: (1|1 2|2 1|1 2 3|1 3 2|2 1 3|2 3 1|3 1 2|3 2 1)$", whole, re.M
    )
    assert re.search(
        "^    sentence_distance: (adjacent|same document|other document)$", whole, re.M
    )
    assert re.search(
        r"^    starts: inside \d+ \(w\d+(, w\d+)*(, \.\.\.)?\); start \d+ \(w", whole, re.M
    )
    assert re.search(r"^    phrases: \d+ tokens: w\d+, ", whole, re.M)
    assert re.search(r"^    segment 2  w", whole, re.M) and "segment 0  [CLS] " in whole
    assert re.search(r"\[MASK\]\(w\d+\)", whole) and re.search(r" w\d+\(w\d+\)", whole)
    assert re.search(r" w\d+\(=\)", whole)
    (first,) = list(sequences(view, [0]))[:1]
    masked = int((first.example.input_ids == view.tokenizer.vocabulary.mask).sum())
    assert plain(view, 0).split("  positions")[1].count("[MASK](") == masked


def test_every_sequence_of_a_row_has_a_color(recipe: Recipe) -> None:
    view = open_step(recipe, 24, rows=24)
    row = next(n for n, entries in enumerate(view.rows) if len(entries) > 1)
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as capture:
        console.print(as_text(view, row))
    assert "\x1b[36mw" in capture.get() and "\x1b[35mw" in capture.get()
    assert "\x1b[1;7m[MASK]" in capture.get()


def shown(view: View) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in summary(view):
            console.print(part)
    return capture.get()


def test_the_summary_counts_the_whole_step(recipe: Recipe) -> None:
    view = open_step(recipe, 24, rows=0)
    assert len(view.shown) == 0
    text, seen = shown(view), list(sequences(view, range(24)))
    real = sum(len(each.example) for each in seen)
    assert "step 24 of 24, stage 3: 24 rows of 64" in text
    assert f"{len(seen)} sequences, {real:,} of 1,536 positions" in text
    for task_group in BLENDS:
        lengths = [len(each.example) for each in seen if each.dataset.name == task_group]
        line = next(line for line in text.splitlines() if line.startswith(f"{task_group} "))
        cells = line.removeprefix(task_group).split()
        assert cells[:4] == [
            str(len(lengths)),
            str(min(lengths)),
            f"{np.mean(lengths):.1f}",
            str(max(lengths)),
        ]
    labels = Counter()
    for each in seen:
        labels.update({task: len(at) for task, (at, _) in each.example.labels.items()})
    for task, many in labels.items():
        assert re.search(rf"^{task} +{many:,} ", text, re.M)
    assert re.search(r"^masking .*\[MASK\] \d+\.\d %", text, re.M)
    assert re.search(r"^starts .*start \d+\.\d %, inside", text, re.M)


def test_tokens_that_are_predicted_from_cls(recipe: Recipe) -> None:
    """They are listed as they were before masking, and [CLS] is not marked."""
    tasks = {"masking": recipe.tasks["masking"], "retromae": {"source": "text"}}
    stages = [{"retromae + masking": 2}]
    view = open_step(replace(recipe, tasks=tasks, stages=stages), 1, rows=1)
    (first, *_) = sequences(view, [0])
    names = view.tokenizer.tokens(first.example.unmasked_ids[1:-1])
    text = plain(view, 0)
    assert f"    retromae: {len(names)} tokens: {', '.join(names)}\n" in text
    assert "[CLS](=)" not in text
    assert re.search(r"^retromae +[\d,]+ +[\d.]+ *$", shown(view), re.M)


def test_held_out_rows_are_those_of_the_evaluation(recipe: Recipe) -> None:
    view = open_held_out(recipe, rows=1)
    held = build_held_out(recipe, open_data(recipe))
    assert len(view.rows) == len(held.rows) and len(view.shown) == 3
    first = [next(iter(sequences(view, [row]))).dataset.name for row in view.shown]
    assert first == BLENDS
    out = set(view.datasets[0].source.documents.tolist())
    training = open_step(recipe, 1, rows=0).datasets[0].source.documents.tolist()
    assert out and not out & set(training)
    assert shown(view).startswith("held out: ")


def test_an_extending_run_continues_in_the_data(
    recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    extended = read_recipe(folder / "recipe.yaml", [f"extend={tmp_path}"])
    with pytest.raises(UserError, match="extend: .*: no checkpoint in"):
        open_step(extended, 1, rows=1)
    write_checkpoint(
        tmp_path / "checkpoints",
        5,
        write=lambda place, written: None,
        layout=checkpoint.Layout(world=1, stage=0, precision="fp32"),
        parameters={},
        engine={},
        state={"consumed": dict.fromkeys(BLENDS, 2000)},
        group=SINGLE_PROCESS,
        keep=1,
    )
    view = open_step(extended, 1, rows=1)
    assert min(seen.number for seen in sequences(view, range(24))) >= 2000
    assert max(seen.number for seen in sequences(open_step(recipe, 1, rows=1), range(24))) < 2000


def test_rows_that_only_a_teacher_labels(tmp_path: Path) -> None:
    values = recipe_of(save_model(tmp_path, stages=("mood",))).resolved()
    rows = [{"text_a": "so good", "label": label} for label in ("good", None, "bad", "fair")]
    values["sources"]["texts"]["table"] = str(write_rows(tmp_path / "some.jsonl", rows))
    values["sources"]["texts"]["read"] = {"missing_labels": "keep"}
    values |= {"teacher": {"path": str(tmp_path)}, "held_out": 0.0, "batch": "4 examples"}
    view = open_step(make_recipe(values), 1, rows=4)
    found = [describe(view, seen.dataset.tasks[0], seen.example) for seen in sequences(view, [0])]
    assert sorted(found) == ["bad", "fair", "good", "no labels but the teacher's"]
    labeled = [as_record(view, seen)["labels"] for seen in sequences(view, [0])]
    assert sum(not labels for labels in labeled) == 1


def test_mistakes(recipe: Recipe, folder: Path) -> None:
    for step in (0, 25, -3):
        with pytest.raises(UserError, match=f"--step {step}: the plan has steps 1 to 24"):
            open_step(recipe, step, rows=1)
    for call in (lambda: open_step(recipe, 1, rows=-1), lambda: open_held_out(recipe, rows=-1)):
        with pytest.raises(UserError, match="--rows -1: expected the number of rows"):
            call()
    nothing = read_recipe(folder / "recipe.yaml", ["held_out=0"])
    with pytest.raises(UserError, match="held_out is 0"):
        open_held_out(nothing, rows=1)


def test_an_encoder_whose_options_depend_on_its_heads(recipe: Recipe) -> None:
    """EuroBERT's `kv_heads` must divide the heads."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "options": {"kv_heads": 2}}
    kind = {"kind": "eurobert", "token_types": 1, "task_types": 0}
    values = {**recipe.resolved(), "backbone": {**kind, **sizes}}
    values["tasks"] = {"masking": {"kind": "knowledge_masking", "source": "text"}}
    values["stages"] = [{"masking": 4}]
    assert open_step(make_recipe(values), 1, rows=1).token_tasks == {"masking"}


def test_no_engine_is_started(root: Path) -> None:
    code = "import sys, palm_ds.inference.inspect_stream; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
