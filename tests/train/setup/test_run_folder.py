"""The run folder: what cannot be one is refused before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.train.setup.run_folder import check_writable


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "run")
    with pytest.raises(UserError, match="run folder .*file: is a file; name a folder"):
        check_writable(tmp_path / "file")
    with pytest.raises(UserError, match="run folder .*file/run: .*file is a file; name a folder"):
        check_writable(tmp_path / "file" / "run")
