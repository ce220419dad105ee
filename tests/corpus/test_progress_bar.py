"""The progress of a preparation: no speed before there is one."""

from __future__ import annotations

import io

from rich.console import Console

from palm_ds.corpus.progress_bar import show_progress


def test_a_speed_is_shown_once_texts_are_encoded() -> None:
    """It said 0.0 MB/s while the tokenizer was trained."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with show_progress(console, 100) as watch:
        watch(0, 40)
    assert "40 %" in shown.getvalue() and "MB/s" not in shown.getvalue()
    with show_progress(console, 100) as watch:
        watch(100, 100)
    assert "MB/s" in shown.getvalue()
