"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from palm_ds.common.file_hash import sha256_of_file


def test_the_hash_is_that_of_the_contents(tmp_path: Path) -> None:
    for data in (b"", b"x" * ((1 << 20) + 1)):
        (tmp_path / "file").write_bytes(data)
        assert sha256_of_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()
