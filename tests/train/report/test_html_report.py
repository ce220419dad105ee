import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.class_report import calibration_bins, calibration_table
from palm_ds.train.report import charts
from palm_ds.train.report.charts import _averaged, running_mean
from palm_ds.train.report.environment import environment
from palm_ds.train.report.html_report import write_report
from tests.helpers.browser import open_browser, phone
from tests.helpers.warm_python import run

MASKING, DISTANCE = "knowledge_masking", "sentence_distance"
STAGES = [{MASKING: 300}, {MASKING: 100, f"{DISTANCE} + {MASKING}": 200}]


def step_record(step: int) -> dict:
    loss = {MASKING: 8 - step / 200} | ({DISTANCE: 1.0 - step / 2000} if step > 300 else {})
    return {
        "kind": "step",
        "step": step,
        "stage": 1 + int(step > 300),
        "lr": 1e-4 * step,
        "loss": loss,
        "accuracy": {task: 0.5 for task in loss},
        "grad_norm": 1.0 if step != 50 else None,
        "tokens_per_second": 12000.0 + step,
        "data_wait": 0.01,
        "elapsed": step / 2,
    }


def evaluation(step: int) -> dict:
    score = {
        "loss": 5.4321,
        "accuracy": 0.625,
        "perplexity": 228.6,
        "baseline_loss": 6.7,
        "baseline_accuracy": 0.0444,
        "standard_error": 0.0125,
        "standard_errors_above": 46.4,
        "count": 1500,
    }
    return {"kind": "evaluation", "step": step, "scores": {MASKING: score}, "elapsed": step / 2}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    records = [step_record(step) for step in range(10, 601, 10)]
    records.append(evaluation(600))
    save = {"kind": "event", "event": "save", "step": 600, "message": "saved <600>", "elapsed": 301}
    records.append(save)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    recipe = {"seed": 1, "tasks": {DISTANCE: {}, MASKING: {}}, "stages": STAGES}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (tmp_path / "environment.json").write_text(json.dumps(environment()))
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 1}}')
    return tmp_path


@pytest.fixture
def empty_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what else is on the page: to draw them takes half a second."""
    monkeypatch.setattr(charts, "_svg", lambda *_: "<svg></svg>")


class Tags(HTMLParser):
    """Fails on a tag closed out of turn, counts the others, collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in ("meta", "br", "path", "use", "rect", "image"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("path", "use", "rect"):
            return
        assert self.open and self.open.pop() == tag, f"</{tag}> is out of turn"

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(path: Path) -> Tags:
    tags = Tags()
    tags.feed(path.read_text())
    assert tags.open == []
    return tags


def test_the_page_is_self_contained(run_folder: Path) -> None:
    path = write_report(run_folder)
    text = path.read_text()
    page = parsed(path)
    assert page.count["svg"] == 4 + 4  # two curves a task, four of how it ran
    assert not re.search(r'(src|href)="(?!#)', text), "nothing is fetched from elsewhere"
    assert "class='note'" not in text
    for shown in ("step 600 of 600", "5:00 of running", "5.4321", "62.50 % ± 1.25", "+46.4"):
        assert shown in page.text


BROKEN_WORDS = """
const found = [];
for (const cell of document.querySelectorAll("td")) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[^\\s-]+/g)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
    if (word[0].length < 30 && lines.size > 1) found.push(word[0]);
  }
}
return found;
"""
"""Words of cells that stand on two lines."""


@pytest.mark.slow
@pytest.mark.exhaustive  # the page on a wide screen is looked at by default
def test_on_a_phone(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Wide tables scroll by themselves, curves have the width of the screen, and text is readable
    in the light and in the dark."""
    (run_folder / "recipe.yaml").write_text(f"name: {'long' * 50}\n")
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(tagged(600, 0.75)) + "\n")
    report = write_report(run_folder)
    with open_browser(tmp_path_factory.mktemp("browser")) as browser:

        def brightness(selector: str, name: str) -> float:
            color = browser.find_element("css selector", selector).value_of_css_property(name)
            return float(np.mean([int(x) for x in re.findall(r"\d+", color)[:3]]))

        for dark in (False, True):
            with phone(browser, dark=dark):
                browser.get(report.as_uri())
                assert browser.execute_script("return document.documentElement.scrollWidth") == 390
                curves = browser.find_elements("css selector", "svg")
                assert {curve.rect["width"] > 330 for curve in curves} == {True}
                assert browser.execute_script(BROKEN_WORDS) == []
                page = brightness("body", "background-color")
                assert (page < 60) == dark
                for selector, name in (("body", "color"), ("svg text", "fill"), ("td", "color")):
                    assert abs(brightness(selector, name) - page) > 120, selector


@pytest.mark.usefixtures("empty_curves")
def test_the_plan_and_the_environment_are_on_it(run_folder: Path) -> None:
    page = parsed(write_report(run_folder))
    assert re.search(rf"{re.escape(DISTANCE)} \+ {MASKING}\s*200\s*200", page.text)
    assert re.search(r"steps\s*300\s*300\s*600", page.text)
    assert "torch" in page.text and '"stage": 1' in page.text


@pytest.mark.usefixtures("empty_curves")
def test_forgetting_is_on_the_page_if_there_are_several_stages(run_folder: Path) -> None:
    assert "Forgetting" not in parsed(write_report(run_folder)).text
    early, middle = evaluation(300), evaluation(400)
    early["scores"][MASKING] |= {"accuracy": 0.7, "loss": 5.0}
    middle["scores"][MASKING] |= {"accuracy": 0.99}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(early) + "\n" + json.dumps(middle) + "\n")
    path = write_report(run_folder)
    text = parsed(path).text.split("Forgetting")[1].split("Held-out scores")[0]
    accuracy, loss = text.split("loss", 1)
    assert re.search(rf"{MASKING}\s*70.0 %\*\s*62.5 %\s*-7.5 ± 1.8", accuracy.replace("</td>", " "))
    assert "5.0000*" in loss and "+0.4321" in loss and "99.0" not in text
    assert "<span class='bad'>-7.5" in path.read_text()


@pytest.mark.usefixtures("empty_curves")
def test_tasks_are_shown_in_the_order_of_the_recipe(run_folder: Path) -> None:
    text = write_report(run_folder).read_text()
    assert text.index(f"<h3>{DISTANCE}</h3>") < text.index(f"<h3>{MASKING}</h3>")


@pytest.mark.usefixtures("empty_curves")
def test_a_broken_last_line_is_reported_and_the_rest_is_shown(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 610, "lo')
    page = parsed(write_report(run_folder))
    assert "line 63 of metrics.jsonl is broken" in page.text and "step 600 of 600" in page.text


@pytest.mark.usefixtures("empty_curves")
@pytest.mark.parametrize(
    "edited",
    [
        {"kind": "evaluation", "step": 601, "scores": {MASKING: None}},
        {"kind": "evaluation", "step": 601, "scores": [1]},
        {"kind": "evaluation", "step": 601, "scores": {MASKING: {"loss": "low"}}},
        {"kind": "evaluation", "step": 601, "scores": {MASKING: {"metrics": {"f1": "?"}}}},
        {"kind": "step", "step": 601, "loss": 3.2},
        {"kind": "evaluation", "step": 601, "scores": {MASKING: {"tables": {"a": 1}}}},
        {"kind": "evaluation", "step": 601, "scores": {MASKING: {"tables": {"a": []}}}},
        {"kind": "evaluation", "step": 601, "started": 1},
        {"kind": "step", "step": 601, "loss": {MASKING: 10**400}},
        {"kind": "step", "step": 10**30, "loss": {MASKING: 1.0}},
        {"kind": "step", "step": 601, "loss": {MASKING: 1.0}, "elapsed": "long"},
        {"kind": "step", "step": 601, "loss": {"\ud800": 1.0}},
        {"kind": "event", "step": 601, "event": "unlabelled"},
        {"kind": "event", "step": 601, "event": "chosen", "of_step": "best"},
        {"kind": "event", "step": 601, "event": ["chosen"]},
    ],
)
def test_an_edited_line_that_says_nothing_is_reported(run_folder: Path, edited: dict) -> None:
    nothing = {"kind": "evaluation", "step": 600, "scores": {MASKING: {"loss": None}}}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(nothing) + "\n" + json.dumps(edited) + "\n")
    page = parsed(write_report(run_folder))
    assert "line 64 of metrics.jsonl is broken" in page.text and "line 63" not in page.text
    assert "step 600 of 600" in page.text


@pytest.mark.usefixtures("empty_curves")
def test_a_task_that_has_not_started_is_not_on_the_page(run_folder: Path) -> None:
    early = [step_record(step) for step in range(10, 301, 10)]
    scored = evaluation(300) | {"started": [MASKING]}
    scored["scores"][DISTANCE] = {**scored["scores"][MASKING], "loss": 9.8765}
    (run_folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in [*early, scored])
    )
    assert "9.8765" not in write_report(run_folder).read_text()


@pytest.mark.usefixtures("empty_curves")
def test_a_task_without_labels_is_on_top_of_the_page(run_folder: Path) -> None:
    message = "tasks.sentence_distance: not one label"
    event = {"kind": "event", "event": "unlabelled", "step": 320, "message": message}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert f'<p class="note">{message}</p>' in write_report(run_folder).read_text()


@pytest.mark.usefixtures("empty_curves")
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("recipe.yaml", None, "recipe.yaml is missing"),
        ("recipe.yaml", "a: [", "recipe.yaml cannot be read"),
        ("recipe.yaml", "stages: 3", "recipe.yaml: stages:"),
        ("recipe.yaml", "tasks: 3", "step 600"),
        ("recipe.yaml", "a: &a [*a]", "recipe.yaml cannot be read"),
        ("environment.json", '{"host": "\\ud800"}', "host"),
        ("environment.json", "{", "environment.json cannot be read"),
        ("environment.json", "[" * 9999, "environment.json cannot be read"),
        ("recipe.yaml", "seed: 2020-13-01", "recipe.yaml cannot be read"),
        ("recipe.yaml", "[" * 3000, "recipe.yaml cannot be read"),
        ("ds_config.json", None, "ds_config.json is missing"),
    ],
)
def test_missing_and_broken_files_are_reported(
    run_folder: Path, name: str, content: str | None, said: str
) -> None:
    if content is None:
        (run_folder / name).unlink()
    else:
        (run_folder / name).write_text(content)
    page = parsed(write_report(run_folder))
    assert said in page.text and "step 600" in page.text


@pytest.mark.parametrize("worth", [1e308, -1e308])
def test_a_curve_leaves_out_what_no_run_measures(run_folder: Path, worth: float) -> None:
    """The limits of its axis overflowed, and there was no report."""
    lines = [step_record(step) for step in (10, 20, 30)] + [evaluation(30)]
    lines[1]["loss"][MASKING] = lines[1]["grad_norm"] = worth
    lines[3]["scores"][MASKING] |= {"baseline_loss": worth, "metrics": {"f1": worth}}
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert "loss" in parsed(write_report(run_folder)).text
    assert charts.series(lines[:3], "loss", MASKING)[0].tolist() == [10, 30]


def test_names_and_messages_are_escaped(run_folder: Path) -> None:
    evil = "<script>alert(1)</script>"
    line = {"kind": "step", "step": 601, "loss": {evil: 1.0}, "accuracy": {evil: 0.1}}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    path = write_report(run_folder)
    assert "<script" not in path.read_text() and "saved &lt;600&gt;" in path.read_text()
    assert evil in parsed(path).text


def test_a_metric_is_named_as_it_is_in_the_curves(run_folder: Path) -> None:
    """Between two dollar signs matplotlib reads a formula."""
    score = {"loss": 1.0, "metrics": {r"$\frac{$": 0.5}}
    line = {"kind": "evaluation", "step": 601, "scores": {MASKING: score}}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert r"$\frac{$</text>" in write_report(run_folder).read_text()


@pytest.mark.usefixtures("empty_curves")
def test_a_report_has_no_passwords(run_folder: Path) -> None:
    source = {"sources": {"rows": {"table": "https://me:secret@host/a.tsv"}}}
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump(source))
    about = {"command": "palm-ds finetune init_from=https://me:secret@host/model"}
    (run_folder / "environment.json").write_text(json.dumps(about))
    text = write_report(run_folder).read_text()
    assert "secret" not in text and text.count("https://***@host/") == 2


@pytest.mark.parametrize("lines", [[], [evaluation(0)], [step_record(1)]])
def test_a_run_that_has_just_started_has_a_report(run_folder: Path, lines: list[dict]) -> None:
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    page = parsed(write_report(run_folder))
    assert ("No step was logged yet" in page.text) == (not lines or lines[0]["step"] == 0)


def test_the_page_of_a_long_run_is_small(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 30001):
            file.write(json.dumps(step_record(step)) + "\n")
    assert write_report(run_folder).stat().st_size < 2_000_000


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run folder, it has no metrics\.jsonl"):
        write_report(tmp_path)


def test_runs_in_the_folder_of_a_sweep_are_named(tmp_path: Path) -> None:
    for name in ("trial_0001", "trial_0000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    first = re.escape(str(tmp_path / "trial_0000"))
    with pytest.raises(UserError, match=rf"metrics\.jsonl; runs are in it, such as {first}$"):
        write_report(tmp_path)
    (tmp_path / "sweep.md").touch()
    with pytest.raises(UserError, match=rf"such as {first}, which .*/sweep\.md compares$"):
        write_report(tmp_path)


def test_the_command(run_folder: Path, root: Path) -> None:
    done = run([root / "launch/report.py", run_folder, "/nowhere"])
    assert done.returncode == 2
    assert done.stdout == f"{run_folder / 'report.html'}\n"
    assert done.stderr.startswith("error: /nowhere: not a run folder")


def test_the_running_mean_keeps_a_constant_and_does_not_lag() -> None:
    assert running_mean(np.full(50, 3.0), 10) == pytest.approx(np.full(50, 3.0))
    line = np.arange(400.0)
    assert running_mean(line, 10)[100:300] == pytest.approx(line[100:300], abs=0.01)


def test_many_points_are_averaged_in_order() -> None:
    means = _averaged(np.arange(10000.0))
    assert len(means) == 1500 and (np.diff(means) > 0).all()
    assert means[0] == 3 and means[-1] == pytest.approx(9996.5, abs=1)


# Tasks that are scored by metrics ---------------------------------------------------------------


def tagged(step: int, f1: float) -> dict:
    score = {
        "loss": 0.7,
        "accuracy": None,
        "baseline_loss": 0.9,
        "metrics": {"f1": f1, "mse": 12.5, "pearson_and_spearman": 0.5, "spearman": 0.5},
        "tables": {
            "Confusion": [["is", "taken for <a>", "taken for b"], ["<a>", 7, 0], ["b", 1, 2]],
            "Calibration": calibration_table(calibration_bins([0.7, 0.9, 0.95], [1, 1, 0])),
        },
        "count": 10,
    }
    return {"kind": "evaluation", "step": step, "scores": {DISTANCE: score}, "elapsed": step}


@pytest.mark.usefixtures("empty_curves")
def test_metrics_and_confusions_are_those_of_the_final_weights(run_folder) -> None:
    chosen = {"kind": "event", "event": "chosen", "step": 600, "of_step": 500, "elapsed": 600}
    with (run_folder / "metrics.jsonl").open("a") as file:
        for record in (tagged(500, 0.8125), tagged(550, 0.75), chosen):
            file.write(json.dumps(record) + "\n")
    text = write_report(run_folder).read_text()
    tags = Tags()
    tags.feed(text)
    assert "f1 0.812  mse 12.5" in tags.text and "f1 0.750" not in tags.text
    assert "sentence_distance: Confusion" in tags.text and "taken for &lt;a&gt;" in text
    assert "expected calibration error" in tags.text and "0.9 - 1.0" in tags.text
    assert not tags.open


def test_the_diagram_of_calibration() -> None:
    rows = tagged(1, 0.5)["scores"][DISTANCE]["tables"]["Calibration"][1:]
    assert "accuracy" in charts.figure([charts.calibration_panel(rows)], height=2.8)
