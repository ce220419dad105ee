"""Hashes of files, texts and values; stored ones depend on them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from palm_ds.common.file_hash import fingerprint, hash_of_text, sha256_of_file


def test_the_hash_is_that_of_the_contents(tmp_path: Path) -> None:
    for data in (b"", b"x" * ((1 << 20) + 1)):
        (tmp_path / "file").write_bytes(data)
        assert sha256_of_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_fingerprints_stay_as_they_are_stored() -> None:
    known = "895aab6349c4a3bd"
    assert fingerprint({"lr": 1e-4, "tasks": ["ä", None, True]}) == known
    assert fingerprint({"tasks": ("ä", None, True), "lr": 0.0001}) == known
    assert fingerprint([Path("a")], default=str) == fingerprint(["a"])
    assert hash_of_text("ä") == hashlib.sha256("ä".encode()).hexdigest()
