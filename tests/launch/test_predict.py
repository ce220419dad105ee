"""launch/predict.py: every row, in order, whatever else is predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import palm_ds as palm
from palm_ds.inference import predictor as predictor_module
from palm_ds.inference.model_tasks import input_task_of
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.train.export import head_taken
from palm_ds.weights import weights_folder
from tests.helpers.reseal import reseal
from tests.helpers.saved_model import (
    TASKS,
    TITLE,
    pairs,
    questions,
    recipe_of,
    save_model,
    texts,
    titles,
    write_rows,
)
from tests.helpers.serving import local, opened
from tests.launch.conftest import Said

TEXT_TASKS = ("mood", "topic", "size")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("run"))


@pytest.fixture
def predict(enter: Callable[..., Said], tmp_path: Path) -> Callable[..., Path]:
    """predict(run, rows, option, ...): the folder written by the command."""
    made: list[Path] = []

    def predict(run: Path, rows: list[dict[str, Any]], *options: str) -> Path:
        made.append(tmp_path / f"out{len(made)}")
        file = write_rows(tmp_path / f"input{len(made)}.jsonl", rows)
        said = enter("predict", run, "--input", file, "--output", made[-1], *options)
        assert said.code == 0, said.err
        assert f"{len(rows):,} rows" in said.out
        assert not list(tmp_path.glob(".*")), "something was left next to the output"
        return made[-1]

    return predict


def lines(folder: Path, task: str, name: str = "predictions") -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / f"{task}.{name}.json").read_text().splitlines()]


def test_every_row_has_a_line_for_each_task_in_order(run, predict, monkeypatch) -> None:
    monkeypatch.setattr(predictor_module, "CHUNK", 7)
    rows = texts(40, seed=9, longest=60)
    out = predict(run, rows, "--tasks", ",".join(TEXT_TASKS), "--batch_tokens", "50")
    for task in TEXT_TASKS:
        assert [line["index"] for line in lines(out, task)] == list(range(40))
    assert set(lines(out, "mood")[0]) == {"index", "label", "logits", "probs"}
    about = json.loads((out / "about.json").read_text())
    assert about["rows"] == 40
    assert set(about["tasks"]) == set(TEXT_TASKS)


def test_rows_that_some_tasks_cannot_read(run, tmp_path, enter) -> None:
    file = write_rows(tmp_path / "input.jsonl", texts(3, seed=1))
    said = enter("predict", run, "--input", file, "--output", tmp_path / "out")
    assert said.code == 2 and said.err.count("\n") == 1, said
    assert "has no column" in said.err
    assert "(needed for pair; --tasks A,B predicts only some)" in said.err


def test_a_task_predicts_the_same_alone_and_with_others(run, predict, monkeypatch) -> None:
    monkeypatch.setattr(predictor_module, "CHUNK", 16)
    rows = texts(40, seed=9)
    together = predict(run, rows, "--tasks", ",".join(TEXT_TASKS))
    for task in TEXT_TASKS:
        alone = predict(run, rows, "--tasks", task)
        ours, theirs = lines(alone, task), lines(together, task)
        assert [{**x, "logits": 0, "probs": 0, "value": 0} for x in ours] == [
            {**x, "logits": 0, "probs": 0, "value": 0} for x in theirs
        ]
        for name in ("logits", "probs", "value"):
            numbers = [torch.tensor([x.get(name, 0.0) for x in y]) for y in (ours, theirs)]
            torch.testing.assert_close(*numbers, atol=1e-5, rtol=0)


def test_tasks_on_the_same_texts_share_one_encoder_pass(run) -> None:
    asked = TrainedModel.open(run).predictor(TEXT_TASKS)
    assert [len(each.tasks) for each in asked.passes] == [3]
    everything = TrainedModel.open(run).predictor()
    assert [tuple(task.name for task in each.tasks) for each in everything.passes] == [
        TEXT_TASKS,
        ("pair",),
        ("answer",),
    ]


def test_a_blend_has_the_input_of_training_for_any_of_its_tasks(tmp_path, predict) -> None:
    tasks = {
        "answer": {"kind": "reading", "source": "questions", "stride": 8, "max_query": 4},
        "mood": {"kind": "classification", "source": "questions", "texts": ["context"]},
    }
    tasks["mood"]["labels"] = ["no", "yes"]
    run = save_model(tmp_path / "run", ["answer + mood"], tasks=tasks)
    rows = questions(9, seed=3)
    alone = predict(run, rows, "--tasks", "mood")
    together = predict(run, rows)
    for ours, theirs in zip(lines(alone, "mood"), lines(together, "mood"), strict=True):
        assert ours["label"] == theirs["label"]
        assert ours["logits"] == pytest.approx(theirs["logits"], abs=1e-5)
    input_task = input_task_of(recipe_of(run), "mood")
    assert input_task.name == "answer"


def test_labels_are_scored_but_do_not_change_predictions(run, predict) -> None:
    rows = texts(20, seed=4)
    asked = ("--tasks", ",".join(TEXT_TASKS))
    with_labels = predict(run, rows, *asked)
    without = predict(run, [{"text_a": row["text_a"]} for row in rows], *asked)
    for task in TEXT_TASKS:
        assert lines(with_labels, task) == lines(without, task)
    scores = json.loads((with_labels / "scores.json").read_text())
    found = [line["label"] for line in lines(with_labels, "mood")]
    right = sum(label == row["label"] for label, row in zip(found, rows, strict=True))
    assert scores["mood"]["accuracy"] == pytest.approx(right / 20)
    assert set(scores) == set(TEXT_TASKS)
    assert set(scores["mood"]["report"]) == {"classes", "averages", "confusion", "calibration"}
    assert not (without / "scores.json").exists()


def test_unknown_labels_do_not_prevent_predictions(run, enter, tmp_path) -> None:
    rows = [{"text_a": "so good", "label": "-1"}, {"text_a": "bad", "label": "-1"}]
    file = write_rows(tmp_path / "test.jsonl", rows)
    said = enter("predict", run, "--input", file, "--output", tmp_path / "o", "--tasks", "mood")
    assert said.code == 0
    assert "mood: not scored:" in said.out
    assert "unknown label '-1'" in said.out
    assert len(lines(tmp_path / "o", "mood")) == 2


def test_long_rows_are_truncated_and_counted(run, enter, tmp_path) -> None:
    rows = [{"text_a": "good " * n} for n in (5, 29, 30, 31, 500)]  # 32 with [CLS] and [SEP]
    file = write_rows(tmp_path / "long.jsonl", rows)
    said = enter("predict", run, "--input", file, "--output", tmp_path / "o", "--tasks", "mood")
    assert "note: mood: truncated: 2 rows" in said.out
    found = lines(tmp_path / "o", "mood")
    assert found[2]["logits"] == found[3]["logits"] == found[4]["logits"] != found[1]["logits"]


def test_reading_comprehension_writes_squads_files(run, predict) -> None:
    rows = questions(6, seed=8)
    out = predict(run, rows, "--tasks", "answer")
    answers = json.loads((out / "answer.predictions.json").read_text())
    assert list(answers) == [row["id"] for row in rows]
    for row in rows:
        assert answers[row["id"]] in row["context"]
    best = json.loads((out / "answer.nbest_predictions.json").read_text())
    assert {name: found[0]["text"] for name, found in best.items()} == answers
    assert [line["id"] for line in lines(out, "answer", "rows")] == list(answers)


def test_predicted_tags_next_to_those_of_the_file(tmp_path, predict, enter) -> None:
    rows = [
        {"tokens": ["so", "very goods", "x"], "tags": ["O", "B-A", "B-B"]},
        {"tokens": ["good"] * 90, "tags": ["O", "B-A", "I-A"] * 30},
    ]
    tasks = {"slots": {"kind": "tagging", "source": "tags"}}
    file = write_rows(tmp_path / "tags.jsonl", rows)
    source = {"table": str(file), "tokenizer": str(tmp_path / "run" / "vocabulary")}
    run = save_model(tmp_path / "run", ["slots"], tasks=tasks, sources={"tags": source}, held_out=0)
    out = predict(run, rows)
    found = lines(out, "slots")
    assert [len(line["tags"]) for line in found] == [3, 90]
    sentences = (out / "slots.conll").read_text().split("\n\n")[:2]
    for row, line, sentence in zip(rows, found, sentences, strict=True):
        cells = [x.split("\t") for x in sentence.split("\n")]
        assert cells == [
            list(x) for x in zip(row["tokens"], row["tags"], line["tags"], strict=True)
        ]
    scores = json.loads((out / "scores.json").read_text())["slots"]
    said = enter(
        "evaluate",
        "--kind",
        "tagging",
        "--gold",
        file,
        "--predictions",
        out / "slots.predictions.json",
        "--json",
        tmp_path / "s.json",
    )
    assert said.code == 0, said.err
    judged = json.loads((tmp_path / "s.json").read_text())
    assert judged["f1"] == pytest.approx(scores["f1"])
    assert judged["accuracy"] == pytest.approx(scores["accuracy"])


def test_a_table_for_submission(run, predict) -> None:
    rows = texts(5)
    out = predict(run, rows, "--tasks", "mood,topic", "--tsv")
    written = (out / "mood.tsv").read_text().splitlines()
    assert written[0] == "index\tprediction"
    assert written[1:] == [f"{x['index']}\t{x['label']}" for x in lines(out, "mood")]
    topics = (out / "topic.tsv").read_text().splitlines()[1:]
    assert topics == [f"{x['index']}\t{','.join(x['labels'])}" for x in lines(out, "topic")]


def test_predictions_equal_those_of_transformers_with_the_export(tmp_path, predict) -> None:
    tasks = {"mood": {"kind": "classification", "source": "pairs"}}
    run = save_model(tmp_path / "run", ["mood"], tasks=tasks)
    recipe = recipe_of(run)
    asked = TrainedModel.open(run).predictor()
    state = asked.model.state_dict()
    weights_folder.export_hf(
        asked.model,
        run / "hf",
        config=asked.model.backbone.config,
        tokenizer=asked.tokenizer,
        head=head_taken(recipe, state),
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(run / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    rows = pairs(30, seed=5)
    made = tokenizer(
        [row["text_a"] for row in rows],
        [row["text_b"] for row in rows],
        truncation=True,
        max_length=32,
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        logits = theirs(**made).logits
    found = lines(predict(run, rows), "mood")
    torch.testing.assert_close(
        torch.tensor([x["logits"] for x in found]), logits, atol=1e-5, rtol=0
    )
    names = [theirs.config.id2label[i] for i in logits.argmax(-1).tolist()]
    assert [x["label"] for x in found] == names
    assert (logits.std(0) > 1e-2).all()


def test_two_models_in_one_process_do_not_touch_each_other(run, tmp_path, predict) -> None:
    other = save_model(tmp_path / "other", ["mood"], length=24, seed=3)
    rows = texts(10)
    before = predict(run, rows, "--tasks", "mood")
    first, second = (TrainedModel.open(each).predictor(["mood"]) for each in (run, other))
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.mul_(1.5)
    after = predict(run, rows, "--tasks", "mood")
    assert lines(before, "mood") == lines(after, "mood")
    assert lines(predict(other, rows), "mood") != lines(before, "mood")
    assert first.recipe.length != second.recipe.length


def test_only_a_folder_of_predictions_is_replaced(run, enter, tmp_path) -> None:
    file, out = write_rows(tmp_path / "in.jsonl", texts(3)), tmp_path / "out"
    command = ("predict", run, "--input", file, "--output", out, "--tasks", "mood")
    leftover = tmp_path / ".out.parts"
    leftover.mkdir()
    (leftover / "part_000000000000.jsonl").write_text('0\n[{"label": "of another run"}]\n')
    assert enter(*command).code == 0
    first = (out / "mood.predictions.json").read_bytes()
    (out / "mood.predictions.json").write_text("torn")
    assert enter(*command).code == 0
    assert (out / "mood.predictions.json").read_bytes() == first
    assert not leftover.exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    said = enter("predict", run, "--input", file, "--output", precious)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "has other files than predictions" in said.err
    assert (precious / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--tasks": "mod"}, "no task 'mod'; did you mean \"mood\"?"),
        ({"--input": "nothing.tsv"}, "nothing.tsv: no such file"),
        ({"--columns": "text_a"}, "expected ROLE=NAME"),
        ({"--columns": "text_q=x"}, "columns.text_q: unknown role"),
        ({"--precision": "fp64"}, 'precision: no "fp64"'),
        ({"--batch_tokens": "-1"}, "batch_tokens: expected 0 or more"),
        ({"model": "nowhere"}, "nowhere: "),
        ({"--tasks": "pair"}, "tasks.pair"),
    ],
)
def test_mistakes_are_one_clear_line(run, enter, tmp_path, change, message) -> None:
    file = write_rows(tmp_path / "in.jsonl", [{"text_a": "good"}])
    options = {"--input": file, "--output": tmp_path / "out", "--tasks": "mood"} | change
    model = options.pop("model", run)
    said = enter("predict", model, *(x for pair in options.items() for x in pair))
    assert (said.code, said.err.count("\n")) == (2, 1), said.err
    assert message in said.err
    assert not (tmp_path / "out").exists()


def test_rows_without_what_a_task_reads_are_named(run, enter, tmp_path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text_a": "good"}\n{"text_a": 7}\n{"text_a": ["x"]}\n')
    said = enter("predict", run, "--input", file, "--output", tmp_path / "o", "--tasks", "mood")
    assert said.code == 2
    assert f"{file}:3: " in said.err


def test_a_folder_without_its_recipe_is_refused(tmp_path, enter, run) -> None:
    import shutil

    shutil.copytree(run / "weights", tmp_path / "weights")
    about = json.loads((tmp_path / "weights" / "weights.json").read_text())
    (tmp_path / "weights" / "weights.json").write_text(json.dumps(about | {"recipe": {}}))
    reseal(tmp_path / "weights")
    said = enter("predict", tmp_path / "weights", "--input", "x", "--output", tmp_path / "o")
    assert said.code == 2
    assert "does not name the tasks it was trained on" in said.err


def test_masked_words_are_predicted_in_a_separate_pass(run, predict, tmp_path, enter) -> None:
    tasks = {
        "mood": {"kind": "classification", "source": "texts"},
        "hidden": {"kind": "masked_words", "source": "texts", "rate": 0.4},
    }
    both = save_model(tmp_path / "both", ["mood + hidden"], tasks=tasks)
    rows = [*texts(8, seed=4), {"text_a": "", "label": "bad"}]
    usual = predict(both, rows)
    assert set(json.loads((usual / "about.json").read_text())["tasks"]) == {"mood"}
    out = predict(both, rows, "--tasks", "mood,hidden", "--tsv")
    assert lines(out, "mood") == lines(usual, "mood"), "it saw the hidden words"
    found = lines(out, "hidden")
    assert found[-1] == {"index": 8}, "a text without a word"
    for line in found[:-1]:
        assert set(line) == {"index", "word_id", "words", "right", "loss"}
        assert len(line["word_id"]) == len(line["words"])
    cells = (out / "hidden.tsv").read_text().splitlines()
    assert cells[1] == f"0\t{' '.join(found[0]['words'])}"
    assert json.loads((out / "scores.json").read_text())["hidden"]["perplexity"] > 1

    alone = save_model(tmp_path / "alone", ["hidden"], tasks={"hidden": tasks["hidden"]})
    assert len(lines(predict(alone, rows), "hidden")) == 9


def test_texts_are_written_and_scored(tmp_path, predict, enter) -> None:
    tasks = {"title": TITLE, "mood": TASKS["mood"]}
    run = save_model(tmp_path / "run", ["title", "mood"], tasks=tasks)
    rows = titles(7, seed=8)
    greedy = predict(run, rows, "--tasks", "title")
    bare = [{"source": row["source"]} for row in rows]
    assert lines(predict(run, bare, "--tasks", "title"), "title") == lines(greedy, "title")
    found = lines(greedy, "title")
    assert [list(each) for each in found] == [["index", "text", "score"]] * 7
    scores = json.loads((greedy / "scores.json").read_text())["title"]
    plain = ("--tasks", "title", "--generate", "length_penalty=0")
    sums = [
        sum(each["score"] for each in lines(predict(run, rows, *plain, *more), "title"))
        for more in ((), ("beams=4",))
    ]
    assert sums[1] > sums[0] - 1e-3  # log-probabilities
    short = lines(predict(run, rows, "--tasks", "title", "--generate", "max_tokens=1"), "title")
    assert all(
        len(one["text"]) < len(other["text"]) for one, other in zip(short, found, strict=True)
    )
    gold = write_rows(tmp_path / "gold.jsonl", rows)
    said = enter("evaluate", "--gold", gold, "--predictions", greedy / "title.predictions.json")
    assert said.code == 0 and f"{scores['rouge_l']:.4f}" in said.out
    arguments = ("predict", run, "--input", gold, "--output", tmp_path / "none")
    said = enter(*arguments, "--tasks", "title", "--generate", "beam=2")
    assert said.code != 0 and 'generate.beam: unknown key; did you mean "beams"' in said.err
    said = enter(*arguments, "--tasks", "mood", "--generate", "beams=2")
    assert "generate: none of the tasks (mood) writes texts" in said.err


def test_texts_from_python(tmp_path) -> None:
    run = save_model(tmp_path / "run", ["title"], tasks={"title": TITLE})
    model = palm.load(run)
    rows = titles(3, seed=8)
    found = model.predict(rows, task="title")["title"]
    assert model([row["source"] for row in rows]) == found  # plain texts are sources
    drawn = model.predict(rows, generate={"temperature": 1.5, "seed": 4})["title"]
    assert [each["text"] for each in drawn] != [each["text"] for each in found]
    assert set(model.evaluate(rows)["title"]) == {"rouge_l", "rouge_1", "rouge_2", "bleu_4"}


def test_a_server_writes_the_same_texts(tmp_path) -> None:
    """Of bare texts, which are sources, and of rows; beside a task that classifies."""
    run = save_model(
        tmp_path / "run", ["title", "mood"], tasks={"title": TITLE, "mood": TASKS["mood"]}
    )
    rows = titles(3, seed=8)
    wanted = palm.load(run).predict(rows, task="title")["title"]
    models, served = opened(run=run)
    form = models.models["run"].tasks["title"].form()
    assert (form.shows, [field.role for field in form.fields]) == ("text", ["source"])
    with local(models, served) as server:
        for inputs in (rows, [row["source"] for row in rows]):
            found = server.answer("/predict/title", {"inputs": inputs})["predictions"]
            assert [each["text"] for each in found] == [each["text"] for each in wanted]
            assert [x["score"] for x in found] == pytest.approx([x["score"] for x in wanted])
        assert "mood" in server.answer("/predict/mood", {"inputs": ["so good"]})["task"]
        body = {"input_ids": [[1, 2, 3]]}
        assert "ids are not read by tasks that write" in server.refusal("/predict/title", body)[1]
        many = {"inputs": [["a", "b", "c", "d"]]}
        assert "4 texts; the task reads source and" in server.refusal("/predict/title", many)[1]
