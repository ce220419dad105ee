"""Where predictions may be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.prediction_files import check_output


@pytest.mark.parametrize("output", ["file", "file/inside"])
def test_predictions_are_not_written_into_a_file(output: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_output(tmp_path / "new" / "folder")
    with pytest.raises(UserError, match="file.* is a file; name a folder for the predictions"):
        check_output(tmp_path / output)
