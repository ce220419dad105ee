"""Models pushed to the hub from Python, against a stand-in of its HTTP interface, open in
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import palm_ds as palm
from palm_ds.api.save_model import push_saved
from palm_ds.common.errors import UserError
from palm_ds.train.report.metrics_file import FILE, read_metrics
from tests.helpers.hub_server import HubServer, hub_server
from tests.helpers.small_tables import TINY, write_tables

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of DeepSpeed's
    # of httpx2, about how huggingface_hub uploads a file
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
TEXTS = ["w1 w2 w3", "w39 w38", "w20"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


def downloaded(server: HubServer, name: str, folder: Path, branch: str = "main") -> Path:
    """The files of a repository as a folder."""
    for path, content in server.repos[name].branches[branch].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def classified(folder: Path) -> list[list[float]]:
    pipeline: Any = transformers.pipeline
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    found = classify(TEXTS, top_k=None)
    return [
        [{x["label"]: x["score"] for x in each}[name] for name in ("no", "yes")] for each in found
    ]


def test_a_trainer_a_loaded_model_and_a_backbone_push(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = write_tables(tmp_path / "tables")
    task = palm.tasks.Classification.on(train=tables / "train.tsv", dev=tables / "dev.tsv")
    trainer = palm.Trainer(
        task,
        backbone=palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt"),
        folder=tmp_path / "run",
        recipe={"export_onnx": ["fp32"]},
        **{"batch": 16, "epochs": 1, "lr": 2e-3, "length": 32},
    )
    trainer.train()
    (mine,) = trainer.predict(TEXTS).values()
    wanted = [pytest.approx(each["probs"], abs=1e-5) for each in mine]
    address = trainer.push_to_hub("org/trained", private=True)
    assert address == f"{server.url}/org/trained" and server.repos["org/trained"].private
    assert classified(downloaded(server, "org/trained", tmp_path / "trained")) == wanted
    assert '"org/trained"' in (tmp_path / "trained/README.md").read_text()
    assert (tmp_path / "trained/onnx/model.onnx").is_file()
    assert "hf/onnx/model.onnx, " in read_metrics(trainer.folder / FILE).events[-1]["message"]

    model = palm.load(tmp_path / "run")
    address = model.push_to_hub("org/loaded", revision="v2")
    assert address == f"{server.url}/org/loaded/tree/v2"
    assert classified(downloaded(server, "org/loaded", tmp_path / "loaded", "v2")) == wanted

    model.save_pretrained(tmp_path / "trained")
    assert not list((tmp_path / "trained").rglob("*onnx*"))  # it was of other weights

    backbone = palm.Backbone.from_pretrained(tmp_path / "run")
    backbone.push_to_hub("org/encoder")
    again = palm.Backbone.from_pretrained(downloaded(server, "org/encoder", tmp_path / "encoder"))
    one, other = again(TEXTS), backbone(TEXTS)
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    assert (one - other).abs().max() < 1e-5
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"^org/encoder: no token: log in with `hf auth login`"):
        backbone.push_to_hub("org/encoder", token="")


def test_only_the_first_process_pushes(server: HubServer) -> None:
    saved: list[Path] = []
    options: dict[str, Any] = {"private": False, "token": None, "revision": "v2"}
    address = push_saved(saved.append, "org/name", **options, first_process=False)
    assert len(saved) == 1 and address == f"{server.url}/org/name/tree/v2" and not server.repos
