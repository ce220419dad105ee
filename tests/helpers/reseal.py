"""A folder of weights that was edited by hand gets the hashes of its present files, as if it had
been written so."""

from __future__ import annotations

import json
from pathlib import Path

from palm_ds.common.files import sha256_of_file
from palm_ds.common.json_files import SEAL, write_sealed_json
from palm_ds.weights.formats.weights_info import INFO


def reseal(folder: Path) -> None:
    about = json.loads((folder / INFO).read_text())
    about.pop(SEAL)
    files = sorted(x for x in folder.rglob("*") if x.is_file() and x != folder / INFO)
    about["files"] = {
        file.relative_to(folder).as_posix(): {
            "size": file.stat().st_size,
            "sha256": sha256_of_file(file),
        }
        for file in files
    }
    write_sealed_json(folder / INFO, about)
