"""Compressed files as bytes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from palm_ds.common.rows.stored import open_bytes


def test_a_small_zstd_file_of_much_text_takes_little_memory(tmp_path: Path) -> None:
    """4 bytes are a block of 128 KiB: all that was read at a time was decompressed together, and
    copied for every piece that was taken."""
    file, blocks = tmp_path / "a.txt.zst", 1_000
    block = (1 << 1 | 1 << 17 << 3).to_bytes(3, "little") + b"a"
    last = (1 | 1 << 1 | 1 << 17 << 3).to_bytes(3, "little") + b"a"
    file.write_bytes(bytes.fromhex("28b52ffd0038") + block * (blocks - 1) + last)
    tracemalloc.start()
    with open_bytes(file) as handle:
        size = sum(map(len, iter(lambda: handle.read(1 << 20), b"")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == blocks << 17 and peak < 80 << 20
