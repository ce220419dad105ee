"""What a notebook shows: short displays of all objects, progress below the cell; the notebooks of
the documentation run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import ErnieConfig, ErnieForPreTraining

import palm_ds as palm
from palm_ds.api.notebook import Report, TaskPredictions, in_notebook
from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from tests.helpers.small_tables import TINY, write_tables
from tests.helpers.warm_python import Program, free_port, python

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs/notebooks"


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(text: str) -> str:
    parser = _Balanced()
    parser.feed(text)
    assert not parser.open, text
    return text


def test_objects_show_a_few_lines(tmp_path: Path) -> None:
    """And open nothing for that."""
    tables = write_tables(tmp_path)
    rows = [{"text_a": "<script>", "label": "no"}] * 500
    task = palm.tasks.Classification.on(name="mood", train=rows, dev=tables / "dev.tsv")
    backbone = palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt")
    trainer = palm.Trainer(task, backbone=backbone, folder=tmp_path / "run")
    several = palm.MultiHeadTrainer([task], backbone=backbone)
    for shown in (task, backbone, trainer, several):
        assert len(repr(shown)) < 500 and "object at" not in repr(shown)
        assert "<script>" not in check_html(shown._repr_html_())
    assert "train=500 rows" in repr(task) and "tasks=mood" in repr(trainer)
    assert not (tmp_path / "run").exists()


def test_predictions_of_one_task_are_rows() -> None:
    rows = [{"label": "<b>", "probs": [0.5] * 50}] * 12
    found = TaskPredictions({"mood": rows})
    assert found == {"mood": rows} and found.rows == rows
    shown = check_html(found._repr_html_())
    assert "12 rows" in shown and "<b></td>" not in shown and shown.count("<tr>") == 11
    with pytest.raises(UserError, match=r"several tasks; choose one: \[mood, stars\]"):
        _ = TaskPredictions({"mood": rows, "stars": []}).rows


def test_a_report_is_shown_in_a_frame(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text('<p class="x">loss &amp; more</p>')
    shown = check_html(Report(tmp_path / "report.html")._repr_html_())
    assert 'srcdoc="&lt;p class=&quot;x&quot;&gt;loss &amp;amp; more' in shown
    assert not in_notebook()


class Kernel(Program):
    """A notebook's kernel, as far as jupyter_client asks."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, env: dict[str, str], cwd: str, **_: Any):
        super().__init__(command[command.index("-m") :], env=env, cwd=cwd)
        while os.getpgid(self.pid) != self.pid:  # what jupyter_client kills must be its own
            time.sleep(0.01)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


@pytest.fixture
def warm_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", Kernel)


CONVERT = "!palm-ds convert "


def executed(name: str, place: Path, instead: Mapping[str, str]) -> list[Any]:
    """The code cells of a notebook of the documentation after a run in a folder, with some of its
    text replaced. Conversions are made by this process, where their imports may be there."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    for cell, (old, new) in product(notebook.cells, {CONVERT: f"# {CONVERT}", **instead}.items()):
        cell.source = cell.source.replace(old, new)

    def convert(cell: Any, cell_index: int) -> None:
        if cell.source.startswith(f"# {CONVERT}"):
            words = cell.source.removeprefix("# !").split()[1:]
            paths = [str(place / word) if n in (1, 2) else word for n, word in enumerate(words)]
            assert main(paths) == 0

    where = {"metadata": {"path": str(place)}}
    options = {"timeout": 500, "resources": where, "on_cell_start": convert}
    nbclient.NotebookClient(notebook, **options).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_training(cells: list[Any]) -> None:
    """It shows a bar, a curve, scores and a report, and prints nothing."""
    outputs: list[Any] = [each for cell in cells for each in cell.outputs]
    assert [each.text for each in outputs if each.output_type == "stream"] == []
    training = next(cell for cell in cells if ".train()" in cell.source)
    progress = training.outputs[0].data["text/html"]
    done = re.search(r'<progress value="(\d+)" max="(\d+)"', check_html(progress))
    assert done and done[1] == done[2] and "<polyline" in progress and "accuracy" in progress
    assert float(training.outputs[-1].data["text/plain"]) == 1.0
    report = next(cell for cell in cells if ".report()" in cell.source)
    assert "<iframe" in report.outputs[0].data["text/html"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("warm_kernel")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestWarning")
def test_the_notebook_of_fine_tuning_runs(tmp_path: Path) -> None:
    check_training(executed("fine_tuning", tmp_path, {}))


def write_chinese_encoder(folder: Path) -> None:
    """A small ERNIE with new weights, as the hub has the large one."""
    characters = sorted(set("房间早餐电脑屏幕这本书包装很好不错满意差糟糕失望。"))
    tokens = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *characters]
    config = ErnieConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=4,
        task_type_vocab_size=3,
        use_task_id=True,
    )
    ErnieForPreTraining(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokens), encoding="utf-8")


@pytest.fixture
def warm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`palm-ds` of notebooks starts as fast as their kernel."""
    command = tmp_path / "bin/palm-ds"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {python()} -m palm_ds "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_kernel", "warm_commands")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestWarning")
def test_the_notebook_of_a_chinese_classifier_runs(tmp_path: Path) -> None:
    """On a small encoder in the folder that the notebook would download to."""
    for name in ("fastapi", "onnxruntime", "onnx"):
        pytest.importorskip(name)
    write_chinese_encoder(tmp_path / "models/pretrain/ernie-3.0-base-zh")
    port = str(free_port())
    cells = executed("chinese_classifier", tmp_path, {"lr=5e-5": "lr=4e-3", "8080": port})
    check_training(cells)
    shown = [cell.outputs[-1].data["text/plain"] for cell in cells if cell.outputs]
    assert "'好评'" in shown and "['好评', '差评']" in shown, shown
    assert "'label': '好评'" in shown[-2] and shown[-1] == "0", shown
