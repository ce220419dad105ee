"""The licence and the README of a source are kept, as text and from nowhere else."""

from __future__ import annotations

from pathlib import Path

from palm_ds.weights.convert.convert import convert
from palm_ds.weights.convert.documents import KEPT_README, read_documents
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
    assert found.texts == {KEPT_README: "license: mit"} and found.licence == ""


def test_in_the_cache_of_the_hub_they_are_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0123").write_text("text")
    folder = tmp_path / "snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "LICENSE").symlink_to("../../blobs/0123")
    assert read_documents(folder).texts == {"LICENSE": "text"}
