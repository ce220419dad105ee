"""Scores by class on request: on the screen, as JSON, as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palm_ds.cli.main import main
from palm_ds.train.report import charts

CLASSES = 200


@pytest.fixture
def scored(tmp_path: Path) -> list[str]:
    """Three rows of each class, of which every tenth is taken for the next; with probabilities."""
    gold, found = tmp_path / "gold.jsonl", tmp_path / "found.jsonl"
    rows = [{"text_a": "a", "label": f"<{i % CLASSES}>"} for i in range(3 * CLASSES)]
    gold.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with found.open("w") as file:
        for i, row in enumerate(rows):
            label = f"<{(i + 1) % CLASSES}>" if i % 10 == 0 else row["label"]
            probs = [0.8, *[0.2 / (CLASSES - 1)] * (CLASSES - 1)]
            file.write(json.dumps({"index": i, "label": label, "probs": probs}) + "\n")
    return [
        "evaluate",
        "--kind",
        "classification",
        "--gold",
        str(gold),
        "--predictions",
        str(found),
    ]


def test_two_hundred_classes_do_not_flood_a_terminal(
    scored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(scored) == 0
    assert "class" not in capsys.readouterr().out
    assert main([*scored, "--report"]) == 0
    said = capsys.readouterr().out
    assert "macro average" in said and "weighted average" in said
    assert "... and 182 more" in said and len(said.splitlines()) < 70
    assert ["<10>", "<11>", "3"] in [line.split() for line in said.splitlines()]


def test_a_file_and_a_page_have_all_of_them(
    scored: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(charts, "_svg", lambda *_: "<svg></svg>")
    page, file = tmp_path / "a/b/scores.html", tmp_path / "c/scores.json"
    assert main([*scored, "--html", str(page), "--json", str(file)]) == 0
    assert "Classes" not in capsys.readouterr().out
    report = json.loads(file.read_text())["report"]
    assert len(report["classes"]) == CLASSES and report["confusion"]["<10>"] == {"<11>": 3}
    assert report["calibration"]["ece"] == pytest.approx(0.9 - 0.8)
    text = page.read_text()
    assert text.count("<tr>") > CLASSES and "&lt;10&gt;" in text and "<details>" in text
    assert text.count("<svg>") == 1


def test_minimal_pairs_have_no_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--pairs", "a", "--model", "m", "--report"])
    assert "minimal pairs have no classes" in capsys.readouterr().err
