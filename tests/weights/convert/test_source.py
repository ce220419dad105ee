"""The source of a conversion: a path, else a repository of the hub at one commit. Its license and
README are kept, as text and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.weights.convert.convert import convert
from palm_ds.weights.convert.source import KEPT_README, locate, read_documents
from tests.weights.formats.hf_models import make, save

README = "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n\x1b[2Jby somebody\n"


def source_in(folder: Path) -> Path:
    save(make("bert", "Model"), folder)
    (folder / "README.md").write_text(README)
    (folder / "LICENSE").write_text("Do what you want.")
    (folder / "NOTICE.txt").write_text("By somebody.")
    return folder


def test_documents_survive_conversion_through_every_format(tmp_path: Path) -> None:
    convert(source_in(tmp_path / "a"), tmp_path / "b", "palm_ds")
    convert(tmp_path / "b", tmp_path / "c", "huggingface")
    convert(tmp_path / "c", tmp_path / "d", "huggingface")
    for name in "bcd":
        folder = tmp_path / name
        assert (folder / "LICENSE").read_text() == "Do what you want."
        assert (folder / "NOTICE.txt").read_text() == "By somebody."
        assert (folder / KEPT_README).read_text() == README.replace("\x1b", "\\x1b")
    card = (tmp_path / "c/README.md").read_text()
    assert f"- `{KEPT_README}`" in card and "- `LICENSE`" in card
    assert "license: apache-2.0" in (tmp_path / "d/README.md").read_text()


def test_other_files_are_not_copied(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    (folder / "LICENSE.bin").write_bytes(b"\xff\xfe")
    (folder / "NOTICE").write_bytes(bytes(2 << 20))
    (folder / "COPYING").mkdir()
    (folder / "license_checker.py.exe x").write_text("no document")
    (folder / "README.md").write_text("license: mit")
    found = read_documents(folder)
    assert found.texts == {KEPT_README: "license: mit"} and found.license == ""


def test_in_the_cache_of_the_hub_they_are_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0123").write_text("text")
    folder = tmp_path / "snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "LICENSE").symlink_to("../../blobs/0123")
    assert read_documents(folder).texts == {"LICENSE": "text"}


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
    done = convert("tiny-bert", "out", to)
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
    with pytest.raises(UserError, match="revision: only for .*; tiny-bert is not one"):
        locate(Path("tiny-bert"), "main")


@pytest.mark.parametrize(
    ("name", "revision", "why"),
    [
        ("org/none", "", "HF_HUB_OFFLINE is set"),
        ("tiny-bert", "v2", "HF_HUB_OFFLINE is set"),
        ("org/old", "", "has no model*.safetensors; weights in other formats are not downloaded"),
    ],
)
def test_what_is_neither_is_one_line(name: str, revision: str, why: str, hub: Path) -> None:
    elsewhere = f"it could not be taken from the Hugging Face hub: {why}"
    message = f"^{name}: no such file or folder, and {elsewhere}".replace("*", r"\*")
    with pytest.raises(UserError, match=message) as caught:
        locate(Path(name), revision)
    assert "\n" not in str(caught.value)
