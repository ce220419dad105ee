"""The source of a conversion: a path, else a repository of the hub at one commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.weights.convert import convert
from palm_ds.weights.convert.locate import locate
from tests.weights.formats.hf_models import make

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with tiny-bert and org/old in it, and no way to the hub."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("models--tiny-bert", "models--org--old"):
        snapshot = cache / name / "snapshots" / COMMIT
        make("bert", "ForMaskedLM").save_pretrained(snapshot)
        (cache / name / "refs").mkdir()
        (cache / name / "refs/main").write_text(COMMIT)
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.mark.parametrize("to", ["palm_ds", "huggingface"])
def test_a_repository_of_the_hub_is_converted_and_its_commit_recorded(to: str, hub: Path) -> None:
    done = convert.convert("tiny-bert", "out", to)
    origin = f"tiny-bert on the Hugging Face hub, revision {COMMIT}"
    assert done.parity and done.parity.passed and f"from {origin}" in done.notes
    if to == "palm_ds":
        assert json.loads(Path("out/weights.json").read_text())["made_by"]["origin"] == origin
    else:
        assert f"from {origin}" in Path("out/README.md").read_text()


def test_a_path_comes_first(hub: Path) -> None:
    Path("tiny-bert").mkdir()
    assert locate(Path("tiny-bert")) == (Path("tiny-bert"), "")
    Path("bert_model.ckpt.index").write_text("")
    assert locate(Path("bert_model.ckpt")) == (Path("bert_model.ckpt"), "")
    assert locate(Path("a/b/c")) == (Path("a/b/c"), "")
    with pytest.raises(UserError, match="revision: tiny-bert has none"):
        locate(Path("tiny-bert"), "main")


@pytest.mark.parametrize(
    ("name", "revision", "why"),
    [
        ("org/none", "", "HF_HUB_OFFLINE is set"),
        ("tiny-bert", "v2", "HF_HUB_OFFLINE is set"),
        ("org/old", "", "holds no model*.safetensors; other files of weights are not downloaded"),
    ],
)
def test_what_is_neither_is_one_line(name: str, revision: str, why: str, hub: Path) -> None:
    message = f"^{name}: no such file or folder, and not from the Hugging Face hub: {why}"
    with pytest.raises(UserError, match=message.replace("*", r"\*")) as caught:
        locate(Path(name), revision)
    assert "\n" not in str(caught.value)
