"""A user-defined pretraining task, fine-tuning task, encoder and tokenizer in every command.

Three runs serve all tests: `before` pretrains the custom encoder on a custom task, `custom`
fine-tunes it on custom tasks, `standard` fine-tunes palm_ds's own encoder on the same, with a
custom tokenizer.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from palm_ds.cli import main
from palm_ds.text.tokenizer import load_tokenizer
from tests.helpers.own_task import Counting
from tests.helpers.saved_model import write_rows
from tests.helpers.small_corpus import write_small_corpus
from tests.launch.conftest import Said

MACHINE = Path(__file__).resolve().parents[2] / "ds_configs" / "cpu.json"
EVEN, MANY, DEEPER = (f"tests.helpers.own_task.{x}" for x in ("EvenTokens", "HowMany", "Deeper"))
PIECES = "tests.helpers.own_tokenizer.Pieces"
PRE_NORM = "tests.helpers.own_encoder.PreNorm"
ENCODER = {"kind": PRE_NORM, "options": {"scale": 0.5}}
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 32, "token_types": 2}
REST = {"length": 32, "schedule": {"kind": "linear", "warmup": 0}, "log": {"every": 1}}
REST |= {"export_onnx": []}


def call(*words: object) -> Said:
    """A command line in this process: how it ended, and what it said."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main.main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Said(code, out.getvalue(), err.getvalue())


def command(*words: object) -> str:
    """command("predict", argument, ...): the output of a successful command."""
    said = call(*words)
    assert said.code == 0, said.err
    return said.out


def refused(*words: object) -> str:
    """The line with which a command refuses."""
    said = call(*words)
    assert said.code == 2 and said.err.count("\n") == 1, said.err
    return said.err


@dataclass(frozen=True)
class Runs:
    """The folder of all runs, with their recipes and data."""

    folder: Path

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def recipe(self, name: str, **values: Any) -> Path:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**REST, **values}))
        return file

    def train(self, how: str, name: str, **values: Any) -> str:
        recipe, place = self.recipe(name, **values), ("--run_dir", self.folder / name)
        return command(how, recipe, "--deepspeed_config", MACHINE, *place)


def pretraining(runs: Runs) -> dict[str, Any]:
    tasks = {"even": EVEN, "words": "knowledge_masking"}
    return {
        "backbone": {**SIZES, **ENCODER},
        "batch": "4 rows",
        "sources": {"text": {"corpus": str(runs / "corpus")}},
        "held_out": 0.2,
        "tasks": {name: {"kind": kind, "source": "text"} for name, kind in tasks.items()},
        "stages": {"joint": list(tasks), "steps": 1},
        "evaluate": {"examples": 4},
    }


def finetuning(runs: Runs) -> dict[str, Any]:
    """`many` alone decides; `deeper` has a head that only palm_ds can hold."""
    table = {"table": str(runs / "rows.jsonl"), "validation": str(runs / "rows.jsonl")}
    return {
        "batch": "4 examples",
        "sources": {"texts": {**table, "tokenizer": str(runs / "corpus/tokenizer")}},
        "tasks": {
            "many": {"kind": MANY, "source": "texts", "unit": 2.0},
            "deeper": {"kind": DEEPER, "source": "texts", "auxiliary": True},
        },
        "stages": [{"many": "1 epochs", "deeper": "1 epochs"}],
        "evaluate": {"best": "many.minus_error"},
    }


def own_tokenizer(runs: Runs) -> Path:
    """A folder of a tokenizer of the user's own with the corpus's vocabulary."""
    tokenizer = load_tokenizer(runs / "corpus/tokenizer")
    (runs / "words").mkdir()
    words = "".join(f"{token}\n" for token in tokenizer.tokens(range(tokenizer.size)))
    (runs / "words/vocab.txt").write_text(words)
    own = {"custom_tokenizer": {"kind": PIECES, "options": {"longest": 9}}}
    (runs / "words/tokenizer_config.json").write_text(json.dumps(own))
    return runs / "words"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    write_small_corpus(runs / "corpus")
    write_rows(runs / "rows.jsonl", [{**x, "label": int(x["label"])} for x in Counting(12)])
    runs.train("pretrain", "before", **pretraining(runs))
    start = {"init_from": str(runs / "before" / "weights")}
    assert "minus_error" in runs.train("finetune", "custom", **finetuning(runs), **start)
    other = finetuning(runs)
    other["sources"]["texts"]["tokenizer"] = str(own_tokenizer(runs))
    assert "minus_error" in runs.train("finetune", "standard", **other, backbone=SIZES)
    return runs


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


def test_runs_leave_what_they_can(runs: Runs) -> None:
    assert "heads.even.out.weight" in weights(runs / "before" / "weights")
    assert not (runs / "custom" / "hf").exists(), "Hugging Face has no encoder like it"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(runs / "standard/hf")
    head = weights(runs / "standard" / "weights")["heads.many.out.weight"]
    torch.testing.assert_close(theirs.classifier.weight.detach(), head)


def test_weights_keep_the_tokenizer_of_the_user(runs: Runs) -> None:
    for folder in (runs / "words", runs / "standard/weights/tokenizer", runs / "standard/hf"):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.splitter and tokenizer.splitter.kind == PIECES
        assert tokenizer.tokens(tokenizer.encode_words(["W1 w2,"])[0]) == ["w1", "[UNK]"]


def test_inspect(runs: Runs) -> None:
    shown = command("inspect", runs / "before.yaml")
    assert "even" in shown and "words" in shown
    assert "many" in command("inspect", runs / "custom.yaml", "--held_out")
    lines = command("inspect", runs / "custom.yaml", "--json").splitlines()
    assert all(json.loads(line) for line in lines) and lines


@pytest.mark.parametrize("name", ["custom", "standard"])
def test_predict_and_evaluate(name: str, runs: Runs, tmp_path: Path) -> None:
    rows, out = runs / "rows.jsonl", tmp_path / "out"
    command("predict", runs / name, "--input", rows, "--output", out, "--tsv")
    lines = [json.loads(x) for x in (out / "many.predictions.json").read_text().splitlines()]
    assert len(lines) == 12 and set(lines[0]) == {"index", "value"}
    cells = [x.split("\t")[1] for x in (out / "many.tsv").read_text().splitlines()[1:]]
    assert cells == [str(line["value"]) for line in lines]
    scores = json.loads((out / "scores.json").read_text())
    assert set(scores) == {"many"}, "the other is auxiliary"

    scored = ("--gold", rows, "--predictions", out / "many.predictions.json", "--kind", MANY)
    command("evaluate", *scored, "--task", "unit=2", "--json", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text()) == pytest.approx(scores["many"])
    command("evaluate", *scored, "--json", tmp_path / "scores.json")  # the unit that was noted
    assert json.loads((tmp_path / "scores.json").read_text()) == pytest.approx(scores["many"])


def test_fill_mask(runs: Runs) -> None:
    lines = command("fill-mask", runs / "before", "w1 [MASK] w3", "--json").splitlines()
    assert len(json.loads(lines[0])["masks"]) == 1


@pytest.mark.parametrize("name", ["before", "custom"])
def test_report(name: str, runs: Runs) -> None:
    (runs / name / "report.html").unlink()
    command("report", runs / name)
    page = (runs / name / "report.html").read_text()
    assert "even" in page if name == "before" else "minus_error" in page


def test_show(runs: Runs) -> None:
    shown = command("show", runs / "custom")
    assert f"kind {PRE_NORM}" in shown and "many (" in shown
    tensors = json.loads(command("show", runs / "custom", "--json"))["tensors"]
    assert tensors["heads.deeper.first.weight"]["shape"] == [3, 16]


def checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("name", ["custom", "standard"])
def test_a_checkpoint_becomes_weights(name: str, runs: Runs, tmp_path: Path) -> None:
    """With the shapes of custom heads and encoders, and the tokenizer."""
    step = checkpoint(runs / name)
    said = command("convert", step, tmp_path / "out")
    assert "checked: no difference" in said
    written = weights(tmp_path / "out")
    assert {k: v.shape for k, v in written.items()} == {
        k: v.shape for k, v in weights(runs / name / "weights").items()
    }
    assert "the same: no difference" in command("verify", step, tmp_path / "out")
    command("resize", tmp_path / "out", tmp_path / "larger", "--multiple", 64)
    assert len(weights(tmp_path / "larger")["backbone.word.weight"]) % 64 == 0


@pytest.mark.parametrize("to", ["huggingface", "paddle"])
def test_custom_encoders_stay_in_palm_ds(to: str, runs: Runs, tmp_path: Path) -> None:
    said = refused("convert", runs / "custom", tmp_path / "out", "--to", to)
    assert f"{to} has no {PRE_NORM} encoder; convert to palm_ds" in said
    assert not (tmp_path / "out").exists()
    said = refused("verify", runs / "custom", runs / "standard")
    assert f"have different encoders, {PRE_NORM} and bert" in said


@pytest.mark.parametrize("to", ["huggingface", "paddle"])
def test_custom_tasks_are_converted(to: str, runs: Runs, tmp_path: Path) -> None:
    """The head that is one linear map goes with the encoder; the other is named."""
    out = tmp_path / "out"
    head = ("--head", "many", "--onnx", "none") if to == "huggingface" else ()
    said = command("convert", runs / "standard", out, "--to", to, *head)
    assert "heads.deeper.first.weight" in said and "skipped" in said
    assert "the same" in command("verify", runs / "standard", out)
    if to == "huggingface":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
        head = weights(runs / "standard" / "weights")["heads.many.out.weight"]
        torch.testing.assert_close(model.classifier.weight.detach(), head)


def test_a_run_is_extended(runs: Runs) -> None:
    values = pretraining(runs)
    kind = {"even": {"kind": "sentence_distance", "source": "text"}}
    recipe = runs.recipe("other", **{**values, "tasks": {**values["tasks"], **kind}})
    ds_config = ("--deepspeed_config", MACHINE, "--run_dir", runs / "other")
    said = refused("pretrain", recipe, *ds_config, "--extend", runs / "before")
    assert f"tasks.even is of kind {EVEN} there and sentence_distance here" in said

    more = {"distance": {"kind": "sentence_distance", "source": "text"}}
    values |= {"tasks": {**values["tasks"], **more}, "stages": [{"even": 1, "distance": 1}]}
    said = runs.train("pretrain", "extended", **values, extend=str(runs / "before"))
    assert "newly initialized: heads.distance.out.weight" in said


# ---- commands that start others ----


class Done:
    """A command that `spawn` starts, run in this process."""

    def __init__(self, words: Sequence[str], *_output: object) -> None:
        *_, module = words[: words.index("-m") + 2]
        said = call(module.rpartition(".")[2], *words[words.index("-m") + 2 :])
        self.returncode, self.err = said.code, said.err

    def poll(self) -> int:
        assert self.returncode == 0, self.err
        return self.returncode


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("palm_ds.train.sweeps.suite.spawn", Done)
    monkeypatch.setattr(
        "palm_ds.train.sweeps.ablation.run_and_wait", lambda words: Done(words).poll()
    )
    yield


@pytest.mark.usefixtures("in_this_process")
def test_suite(runs: Runs, tmp_path: Path) -> None:
    recipe = runs.recipe("member", **finetuning(runs), init_from=str(runs / "before" / "weights"))
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"recipes": {"mine": str(recipe)}, "seeds": 1}))
    said = command("suite", suite, "--deepspeed_config", MACHINE, "--out", tmp_path / "out")
    assert "mine" in said and "minus_error" in said


@pytest.mark.usefixtures("in_this_process")
def test_ablate(runs: Runs, tmp_path: Path) -> None:
    place = ("--deepspeed_config", MACHINE, "--out", tmp_path / "out")
    said = command("ablate", runs / "before.yaml", *place, "--schedules", "joint", "--steps", 1)
    (line,) = (line for line in said.splitlines() if "| even" in line)
    assert "loss" in line
    scores: Mapping[str, Any] = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert set(scores["schedules"]["joint"]["scores"]) == {"even", "words"}
