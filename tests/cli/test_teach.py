"""`palm-ds teach` takes what training takes: shipped recipes and overrides."""

from __future__ import annotations

import pytest

from palm_ds.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chnsenticorp_bow", "--output: missing; name the file to write, such as scores.parquet"),
        ("chnsenticorp_bwo", 'no shipped recipe has this name; did you mean "finetune/chnsent'),
        ("chnsenticorp_bow scores.parquet", "override 'scores.parquet': expected key=value"),
    ],
)
def test_recipes_by_name(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["teach", *words.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
