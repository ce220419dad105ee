"""Reading comprehension: equal to BertForQuestionAnswering, no answer of real data lost, the best
answers those that trying all finds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.nn import functional as F  # noqa: N812
from transformers import BertForQuestionAnswering

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings, open_table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.windows import LONGEST, DocumentDataset, DocumentSettings, DocumentWindows
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import build
from palm_ds.model.multi_task_model import Model
from palm_ds.tasks.classification import Classification
from palm_ds.tasks.metrics.answers import normalized
from palm_ds.tasks.reading import Reading, SpanHead
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights import weights_folder
from palm_ds.weights.formats.huggingface.write import ExportOptions, plan, write
from palm_ds.weights.formats.native import open_contents
from palm_ds.weights.formats.weights_info import WeightsInfo
from tests.helpers.hf_names import from_names
from tests.helpers.text_tables import (
    LETTERS,
    bert_config,
    built_of,
    dataset_of,
    learned,
    make_task,
    model_of,
    padded,
    predictions,
    small_tokenizer,
    source_of,
)

LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z good bad so very"


def row(question: str, context: str, *answers: str, **more: Any) -> dict[str, Any]:
    """A row with answers at their first occurrence."""
    found = [{"text": text, "start": context.index(text)} for text in answers]
    more = {"impossible": not answers, **more}
    return {"question": question, "context": context, "answers": found, **more}


ROWS = [
    row("very ?", "so good . a b c", "good"),
    row("x y z ?", LONG, "very", "m n"),
    row("", "a b", "a b"),
]
REFUSING = [
    *ROWS,
    {"question": "so ?", "context": LONG, "answers": [], "impossible": True},
    {"question": "so so ?", "context": "", "answers": [], "impossible": True},
]


task_of = partial(make_task, Reading, "qa")


def windows_of(source: TableSource, task: Reading, max_length: int = 64) -> list[Example]:
    built, _ = built_of(dataset_of(source, task, max_length=max_length))
    return sorted((e for row in built for (_, n, _), e in row), key=lambda e: e.item)


def words(example: Example) -> list[str]:
    return small_tokenizer().tokens(example.input_ids)


def answer_words(example: Example, name: str = "qa") -> list[str] | None:
    """The tokens that the targets mark; None if there are no targets."""
    _, targets = example.labels[name]
    if not targets.any():
        return None
    assert targets.sum(0).tolist() == [1, 1]
    first, last = targets.argmax(0)
    return words(example)[first : last + 1]


# The head --------------------------------------------------------------------------------------


def hugging_face() -> tuple[BertForQuestionAnswering, dict[str, torch.Tensor]]:
    """A model with noise as weights, and these under palm_ds's names."""
    torch.manual_seed(4)
    theirs = BertForQuestionAnswering(bert_config()).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state, left = from_names(theirs.state_dict(), "bert")
    assert left == []
    return theirs, {name.replace("qa_outputs", "qa"): x for name, x in state.items()}


def test_scores_and_loss_equal_transformers(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(stride=5).resolved(source)
    theirs, state = hugging_face()
    model = model_of(task)
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == ["backbone.pooler.dense.weight", "backbone.pooler.dense.bias"]
    dataset = dataset_of(source, task, max_length=20)
    built, batch = built_of(dataset)
    with torch.no_grad():
        output = model(batch, ["qa"])["qa"]
    assert output.scores is not None
    at, loss, right = 0, 0.0, 0
    for example in (example for row in built for _, example in row):
        _, targets = example.labels["qa"]
        first, last = (int(x) for x in targets.argmax(0))
        with torch.no_grad():
            expected = theirs(
                input_ids=torch.from_numpy(example.input_ids)[None],
                token_type_ids=torch.from_numpy(example.token_type_ids)[None],
                start_positions=torch.tensor([first]),
                end_positions=torch.tensor([last]),
            )
        both = torch.stack([expected.start_logits[0], expected.end_logits[0]], 1)
        mine = output.scores[at : at + len(example)]
        torch.testing.assert_close(mine, both, atol=1e-5, rtol=0)
        at += len(example)
        if targets.any():
            loss += float(expected.loss)
            right += both.argmax(0).tolist() == [first, last]
    assert at == len(output.scores)
    assert float(output.loss_sum) == pytest.approx(loss, abs=1e-4)
    assert int(output.correct) == right


@settings(max_examples=50, deadline=None)
@given(some.lists(some.integers(1, 7), min_size=1, max_size=5), some.randoms())
def test_each_window_has_its_own_softmax(sizes: list[int], random: Any) -> None:
    torch.manual_seed(random.randint(0, 10**6))
    head = SpanHead(4, 2)
    rows = torch.randn(sum(sizes), 4, requires_grad=True)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    targets = torch.zeros(sum(sizes), 2, dtype=torch.int64)
    expected, right, at = rows.sum() * 0, 0, 0
    for size in sizes:
        if random.random() < 0.8:  # else nothing to learn
            logits = head.logits(rows[at : at + size])
            ends = torch.tensor([random.randrange(size) for _ in range(2)])
            targets[at + ends, torch.arange(2)] = 1
            expected = expected + F.cross_entropy(logits.T, ends, reduction="mean")
            right += int((logits.argmax(0) == ends).all())
        at += size
    (wanted,) = torch.autograd.grad(expected, rows)
    found = head(rows, targets, groups)
    (gradient,) = torch.autograd.grad(found.loss_sum, rows)
    torch.testing.assert_close(found.loss_sum, expected)
    torch.testing.assert_close(gradient, wanted)
    assert int(found.correct) == right


def test_extreme_scores_stay_finite() -> None:
    head = SpanHead(2, 2)
    with torch.no_grad():
        head.out.weight.copy_(torch.eye(2))
        head.out.bias.zero_()
    rows = torch.tensor([[3e4, -3e4], [-3e4, 3e4]], requires_grad=True)
    found = head(rows, torch.tensor([[1, 0], [0, 1]]), torch.zeros(2, dtype=torch.int64))
    found.loss_sum.backward()
    assert found.loss_sum.item() == 0 and found.correct.item() == 1
    assert rows.grad is not None and rows.grad.isfinite().all()


def test_a_batch_without_windows_costs_nothing(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    model = model_of(task)
    _, batch = built_of(dataset_of(source, task))
    batch.labels.clear()
    batch.groups.clear()
    output = model(batch)["qa"]
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0 and output.correct.item() == 0
    gradients = [parameter.grad for parameter in model.heads.parameters()]
    assert all(grad is not None and not grad.any() for grad in gradients)


@pytest.mark.parametrize("family", ["bert", "ernie"])
def test_export_to_hugging_face(tmp_path: Path, family: str) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    model = model_of(task)
    assert weights_folder.token_heads_of(model) == ("qa",)
    info = WeightsInfo(
        backbone=model.backbone.config, token_heads=weights_folder.token_heads_of(model)
    )
    weights_folder.save_weights(model, tmp_path / "weights", info)
    contents = open_contents(tmp_path / "weights")
    target = ExportOptions(family=family, head="qa", head_class="ForQuestionAnswering")
    planned = plan(contents.entries, contents.config, contents.heads, target)
    write_folder_atomically(tmp_path / "hf", lambda part: write(planned, part))
    name = f"{family.title()}ForQuestionAnswering"
    assert planned.architecture == name
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "hf").eval()
    rows = padded([(ROWS[0]["question"], ROWS[0]["context"])])
    (mine,) = (e for e in windows_of(source, task) if e.item == 0)
    assert rows.ids[0].tolist() == mine.input_ids.tolist()
    _, batch = built_of(dataset_of(source_of(tmp_path, ROWS[:1]), task))
    with torch.no_grad():
        expected = theirs(**rows.arguments)
        found = model.logits(batch, "qa")
    torch.testing.assert_close(found[:, 0], expected.start_logits[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:, 1], expected.end_logits[0], atol=1e-5, rtol=0)


# Windows and labels ----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    contexts=some.lists(some.integers(0, 40), min_size=1, max_size=4),
    questions=some.integers(0, 9),
    stride=some.integers(1, 12),
    max_length=some.integers(13, 30),
)
def test_windows_cover_every_token(
    tmp_path_factory, contexts, questions, stride, max_length
) -> None:
    rows = [
        row("so " * questions, " ".join((LONG.split() * 2)[:many]), id=number)
        | {"answers": [], "impossible": True}
        for number, many in enumerate(contexts)
    ]
    source = source_of(tmp_path_factory.mktemp("rows"), rows)
    task = task_of(stride=stride, max_query=7).resolved(source)
    dataset = dataset_of(source, task, max_length=max_length)
    layouts = dataset.layouts(np.arange(dataset.num_items))
    seen: list[set[int]] = [set() for _ in rows]
    most: list[list[int]] = [[] for _ in rows]
    for n, layout in enumerate(layouts):
        example = dataset.example(n, layout)  # which checks that it is as long as the layout says
        assert len(example) <= max_length
        text = words(example)
        assert text[: 2 + min(questions, 7)] == ["[CLS]", *["so"] * min(questions, 7), "[SEP]"]
        assert text[-1] == "[SEP]" and text.count("[SEP]") == 2
        item = example.item
        inside = np.arange(text.index("[SEP]") + 1, len(text) - 1)
        places = example.source_offsets[inside] - source.encoded("context").starts[item]
        assert example.token_type_ids[inside].tolist() == [1] * len(inside)
        seen[item] |= set(places.tolist())
        mark = example.annotations.get("most_context", np.ones(len(example)))
        most[item] += places[mark[inside] > 0].tolist()
    for item, many in enumerate(contexts):
        assert seen[item] == set(range(many))
        assert sorted(most[item]) == list(range(many))  # each in just one window


def test_only_windows_with_the_answer_are_learned(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(stride=6).resolved(source)
    assert (task.unanswerable, task.score, task.max_answer) == (False, "squad1", 30)
    every, kept = task.items(source, 20), task.training_items(source, 20)
    assert [len(every), len(kept)] == [6, 5]
    examples = windows_of(source, task, max_length=20)
    found = [answer_words(example) for example in examples]
    assert found[0] == ["good"] and found[-1] == ["a", "b"]
    assert [x for x in found[1:-1] if x] == [["m", "n"], ["m", "n"], ["very"]]
    assert sum(x is not None for x in found) == len(kept)
    assert not any(task.label_column in example.annotations for example in examples)


def test_windows_without_the_answer_are_learned_as_unanswerable(tmp_path: Path) -> None:
    source = source_of(tmp_path, REFUSING)
    task = task_of(stride=6).resolved(source)
    assert (task.unanswerable, task.score) == (True, "squad2")
    found = [answer_words(example) for example in windows_of(source, task, max_length=20)]
    assert found.count(["[CLS]"]) == len(found) - 5 and None not in found
    assert len(task.training_items(source, 20)) == len(found)
    never = task_of(stride=6, unanswerable=False).resolved(source)
    assert len(never.training_items(source, 20)) == 5
    found = [answer_words(example) for example in windows_of(source, never, max_length=20)]
    assert ["[CLS]"] not in found and sum(x is not None for x in found) == 5


def test_a_lost_answer_is_neither_learned_nor_treated_as_unanswerable(tmp_path) -> None:
    lost = {"question": "b", "context": "a b c", "answers": [{"text": "zz", "start": 0}]}
    lost["impossible"] = False
    source = source_of(tmp_path, [*REFUSING, lost], lost_answers="keep")
    task = task_of().resolved(source)
    task.check(source, labeled=True)
    assert answer_words(windows_of(source, task)[-1]) is None
    assert len(task.items(source, 64)) - len(task.training_items(source, 64)) == 1
    assert "1 answers not found in their context" in task.describe(source)


def test_the_first_or_a_random_answer_of_a_window(tmp_path: Path) -> None:
    source = source_of(tmp_path, [row("?", "a b c d e", "d", "b c", "a")])
    first = task_of().resolved(source)
    assert answer_words(windows_of(source, first)[0]) == ["d"]
    drawn = task_of(answer="random").resolved(source)
    dataset = dataset_of(source, drawn, fixed=False)
    layouts = dataset.layouts(np.arange(60))
    found = [tuple(answer_words(dataset.example(n, layouts[n])) or ()) for n in range(60)]
    assert set(found) == {("d",), ("b", "c"), ("a",)}
    again = [tuple(answer_words(dataset.example(n, layouts[n])) or ()) for n in range(60)]
    assert again == found


def test_answers_within_words_become_the_tokens_that_cover_them(tmp_path: Path) -> None:
    rows = [row("?", "so goods so", "ood"), row("?", " so  good ", "so ", " good")]
    source = source_of(tmp_path, rows)
    task = task_of(answer="random").resolved(source)
    one, two = windows_of(source, task)
    assert answer_words(one) == ["good"]
    assert answer_words(two) in (["so"], ["good"])
    describe = task.describe(source)
    assert describe == "qa: 2 questions; 3 answers; 1 answers that start or end inside a token"


def test_a_blend_with_a_task_that_builds_the_same_input(tmp_path: Path) -> None:
    rows = [{**REFUSING[0], "label": "yes"}, {**REFUSING[1], "label": "no"}]
    source = source_of(tmp_path, rows)
    kind = build(
        "kind", {"kind": "classification", "source": "s", "texts": ["context", "question"]}
    )
    assert isinstance(kind, Classification)
    kind, task = kind.resolved(source), task_of().resolved(source)
    built, batch = built_of(dataset_of(source, kind, task))
    examples = {e.item: e for row in built for _, e in row}
    assert answer_words(examples[0]) == ["good"] and answer_words(examples[1]) == ["very"]
    assert (batch.count("kind"), batch.count("qa")) == (2, 2)
    made = predictions(model_of(kind, task), source, kind, task)["qa"]
    assert all(made[i]["text"] in rows[i]["context"] for i in (0, 1))
    other = build("other", {"kind": "classification", "source": "s", "texts": ["question"]})
    assert isinstance(other, Classification)
    with pytest.raises(UserError, match=r"tasks.qa: .* leaves out the context; name qa first"):
        built_of(dataset_of(source, other.resolved(source), task))


# Answers ---------------------------------------------------------------------------------------


def oracle(
    source: TableSource, task: Reading, max_length: int, rng: np.random.Generator
) -> dict[int, dict[str, Any]]:
    """Predictions from scores that know the answers, and noise."""
    pieces: dict[int, list[dict[str, Any]]] = {}
    for example in windows_of(source, task, max_length):
        _, targets = example.labels[task.name]
        scores = rng.normal(size=targets.shape) + 20 * targets
        piece = task.decode(scores.astype(np.float32), example, source)
        pieces.setdefault(example.item, []).append(json.loads(json.dumps(piece)))
    return task.gather(pieces, source)


REAL = [
    ("en/xquad/xquad.en.articles00-35.json", "vocab_en.txt", "squad1", 30),
    ("zh/xquad/xquad.zh.articles00-35.json", "vocab.txt", "cmrc", 100),
    ("zh/drcd/DRCD_dev.json", "vocab.txt", "cmrc", 100),
    ("zh/cmrc2018/cmrc2018_dev.json", "vocab.txt", "cmrc", 100),
]


@pytest.mark.parametrize(("file", "vocabulary", "rules", "longest"), REAL)
def test_no_answer_of_real_data_is_lost(
    file: str, vocabulary: str, rules: str, longest: int, shared: Path
) -> None:
    settings = parse(TableSettings, {"lost_answers": "keep"}, "read")
    table = open_table(str(shared / "data/finetune" / file), settings)
    tokenizer = load_tokenizer(shared / "data/ernie" / vocabulary)
    source = TableSource(table, np.arange(len(table)), tokenizer, "real")
    task = task_of().resolved(source)
    task.check(source, labeled=True)
    assert (task.score, task.max_answer, task.unanswerable) == (rules, longest, False)
    # every answer, as the text of its tokens
    spans, answers = source.encoded("context"), task.answers(source)
    total = same = 0
    for item, listed in enumerate(source.column("answers")):
        standing = [each["text"] for each in listed if each["start"] >= 0]
        for text, (first, last) in zip(standing, answers.of(item), strict=True):
            places = spans.spans_of(item)
            found = table[item]["context"][places[first, 0] : places[last, 1]]
            total += 1
            same += found == text.strip()
    assert total == len(answers.tokens) and same / total >= 0.998
    # some questions all the way: windows, scores, text
    some_rows = np.arange(0, len(table), max(1, len(table) // 300))
    part = TableSource(table, some_rows, tokenizer, "part")
    made = oracle(part, task, 256, np.random.default_rng(0))
    assert sorted(made) == list(range(len(part)))
    asked = {
        item: [each["text"] for each in part.column("answers")[item] if each["start"] >= 0]
        for item in made
    }
    for item in made:
        text, start = made[item]["text"], made[item]["start"]
        assert part.row(item)["context"][start : start + len(text)] == text
    right = [
        normalized(made[i]["text"]) in map(normalized, texts) for i, texts in asked.items() if texts
    ]
    assert np.mean(right) >= 0.99
    scores = task.metrics(made, part)
    assert next(iter(scores)) in ("f1", "average")
    assert scores["f1"] >= 0.97 and scores["exact"] >= 0.97


@settings(max_examples=25, deadline=None)
@given(
    seed=some.integers(0, 10**6),
    many=some.integers(0, 25),
    letters=some.integers(1, 12),
    refuses=some.booleans(),
)
def test_the_best_answers_equal_an_exhaustive_search(
    tmp_path_factory, seed: int, many: int, letters: int, refuses: bool
) -> None:
    rng = np.random.default_rng(seed)
    context = " ".join(rng.choice(list("abcdefghijkl")[:letters], many))
    source = source_of(tmp_path_factory.mktemp("rows"), [{"question": "so ?", "context": context}])
    task = task_of(unanswerable=refuses, n_best=5, max_answer=3, stride=4, null_threshold=1.0)
    pieces, every, nothing = [], [], []
    for example in windows_of(source, task, max_length=14):
        scores = rng.normal(size=(len(example), 2)).round(2)
        pieces.append(task.decode(scores.astype(np.float32), example, source))
        nothing.append(scores[0].sum())
        text = words(example)
        begin = text.index("[SEP]") + 1
        mark = example.annotations.get("most_context", np.ones(len(text)))
        for i in range(begin, len(text) - 1):
            for j in range(i, min(i + 3, len(text) - 1)):
                if mark[i]:
                    every.append((scores[i, 0] + scores[j, 1], " ".join(text[i : j + 1])))
    made = task.gather({0: pieces}, source)[0]
    best: dict[str, float] = {}
    for score, text in sorted(every, reverse=True):
        best.setdefault(text, score)
    ranked = sorted(best.items(), key=lambda pair: -pair[1])
    expected = ranked[:5] or [("", 0.0)]
    cut_apart = len(ranked) < 6 or ranked[4][1] - ranked[5][1] > 1e-4  # the last is not a tie
    odds = min(nothing) - expected[0][1]
    if refuses:
        given_text = "" if odds > 1.0 else expected[0][0]
        expected = [pair for pair in expected if pair[0]] + [("", min(nothing))]
        expected.sort(key=lambda pair: -pair[1])
        assert made["null_odds"] == pytest.approx(odds, abs=1e-5)
    else:
        given_text = expected[0][0]
        assert "null_odds" not in made
    listed = [(each["start_logit"] + each["end_logit"]) for each in made["n_best"]]
    assert listed == pytest.approx([score for _, score in expected], abs=1e-5)
    if cut_apart and len(set(np.round(listed, 2))) == len(listed):  # no two equally good
        assert [each["text"] for each in made["n_best"]] == [text for text, _ in expected]
        assert made["text"] == given_text
    shares = np.exp(np.array([score for _, score in expected]))
    found = [each["probability"] for each in made["n_best"]]
    assert found == pytest.approx(shares / shares.sum(), abs=1e-5)
    for each in made["n_best"]:
        start, text = each["start"], each["text"]
        assert text == (context[start : start + len(text)] if start >= 0 else "")


def answer_of(source: TableSource, task: Reading, item: int, first: int, last: int) -> str:
    """The text for scores that mark these places of the first window."""
    example = next(e for e in windows_of(source, task) if e.item == item)
    scores = np.zeros((len(example), 2), np.float32)
    scores[first, 0] = scores[last, 1] = 9
    piece = task.decode(scores, example, source)
    return task.gather({item: [piece]}, source)[item]["text"]


def test_answers_are_substrings_of_the_original(tmp_path: Path) -> None:
    rows = [
        {"question": "?", "context": "So  GOOD,\tvery\n bad."},
        {"question": "?", "context": "a"},
    ]
    source = source_of(tmp_path, rows)
    task = task_of()
    assert answer_of(source, task, 0, 3, 4) == "So  GOOD"
    assert answer_of(source, task, 0, 3, 8) == "So  GOOD,\tvery\n bad."
    assert answer_of(source, task, 0, 8, 8) == "."
    assert answer_of(source, task, 1, 3, 3) == "a"


def test_chinese_answers_contain_no_spaces(tmp_path: Path, shared: Path) -> None:
    context = "光荣和Nintendo合作，于2004年 发行。"
    source = source_of(tmp_path, [row("谁？", context, "光荣和Nintendo", "2004年 发行")])
    tokenizer = load_tokenizer(shared / "data/ernie/vocab.txt")
    source = TableSource(source.table, source.numbers, tokenizer, "zh")
    task = task_of().resolved(source)
    assert (task.max_answer, task.score) == (100, "cmrc")
    made = oracle(source, task, 64, np.random.default_rng(1))
    assert made[0]["text"] == "光荣和Nintendo" and made[0]["start"] == 0
    assert task.metrics(made, source) == {"average": 1.0, "f1": 1.0, "exact": 1.0}


def test_tables_without_answers_are_predicted(tmp_path: Path) -> None:
    rows = [{k: x for k, x in row.items() if k in ("question", "context")} for row in REFUSING]
    source = source_of(tmp_path, rows)
    for refuses in (False, True):
        task = task_of(unanswerable=refuses, stride=5)
        task.check(source, labeled=False)
        made = predictions(model_of(task), source, task, max_length=20)["qa"]
        assert sorted(made) == list(range(5))
        assert made[4]["text"] == ""  # an empty context has nothing to say
        assert all(made[i]["text"] in rows[i]["context"] for i in made)
        assert all(math.isclose(sum(x["probability"] for x in made[i]["n_best"]), 1, abs_tol=1e-4)
                   for i in made)  # fmt: skip
        assert task.metrics(made, source) == {}
        json.dumps(made, allow_nan=False)


def test_files_are_those_of_squad(tmp_path: Path) -> None:
    rows = [{**each, "id": f"q{number}"} for number, each in enumerate(REFUSING)]
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    made = oracle(source, task, 24, np.random.default_rng(0))
    files = task.prediction_files(made, source)
    assert list(files) == ["predictions.json", "nbest_predictions.json", "null_odds.json"]
    ids = [f"q{number}" for number in range(5)]
    assert all(list(content) == ids for content in files.values())
    assert files["predictions.json"] == dict(zip(ids, ["good", "very", "a b", "", ""], strict=True))
    assert files["nbest_predictions.json"]["q0"][0]["text"] == "good"
    assert all((odds > 0) == (name > "q2") for name, odds in files["null_odds.json"].items())
    scores = task.metrics(made, source)
    assert (scores["f1"], scores["no_answer_exact"], scores["best_exact"]) == (1.0, 1.0, 1.0)
    never = task_of(unanswerable=False).resolved(source_of(tmp_path, ROWS))
    unnamed = source_of(tmp_path, ROWS)
    files = never.prediction_files(oracle(unnamed, never, 24, np.random.default_rng(0)), unnamed)
    assert list(files) == ["predictions.json", "nbest_predictions.json"]
    assert files["predictions.json"] == {"0": "good", "1": "very", "2": "a b"}


def test_rules_may_be_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    made = oracle(source, task_of().resolved(source), 64, np.random.default_rng(0))
    for rules, names in {
        "squad1": ["f1", "exact"],
        "squad2": ["f1", "exact", "has_answer_f1", "has_answer_exact"],
        "cmrc": ["average", "f1", "exact"],
    }.items():
        found = task_of(score=rules).resolved(source).metrics(made, source)
        assert found == dict.fromkeys(names, 1.0)


def test_it_learns(tmp_path: Path) -> None:
    rows = [
        row("so ?", f"{a} {b} very {answer} {c}", answer)
        for a, b, c, answer in zip("abcdef", "efabcd", "cdefab", "stuwxz", strict=True)
    ]
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    made = predictions(learned(source, task, steps=30, lr=1e-2), source, task)["qa"]
    assert task.metrics(made, source) == {"f1": 1.0, "exact": 1.0}


# Mistakes --------------------------------------------------------------------------------------


def refused(source: TableSource, message: str, **values: Any) -> None:
    with pytest.raises(UserError, match=message) as raised:
        task_of(**values).check(source, labeled=True)
    assert "\n" not in str(raised.value)


def test_bad_rows_are_reported_with_their_place(tmp_path: Path) -> None:
    bare = [{"question": "a", "context": "b"}]
    refused(source_of(tmp_path, bare), r"tasks.qa: .*no column 'answers'")
    refused(source_of(tmp_path, [{"text_a": "b"}]), r"tasks.qa: .*no column 'question'")
    refused(
        source_of(tmp_path, REFUSING),
        r"jsonl:4: .* squad1 does not allow.*score: squad2$",
        score="squad1",
    )


class Rows:
    """An unchecked table, as a custom reader may return it."""

    columns = ("question", "context", "answers")

    def __init__(self, *answers: Any):
        self.answers = answers

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"question": "a", "context": "a b c", "answers": self.answers[i]}

    def where(self, i: int) -> str:
        return f"mine:{i + 1}"


GOOD = [{"text": "b", "start": 2}]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([GOOD, None], r"^mine:2: answers is empty; .* `impossible`$"),
        ([GOOD, GOOD, []], r"^mine:3: answers is empty"),
        ([GOOD, [{"text": "b"}]], r"^mine:2: answers: expected .* got {'text': 'b'}$"),
        ([["b"]], r"^mine:1: answers: expected .* got 'b'$"),
        ([[{"text": "b", "start": "two"}]], r"^mine:1: answers: expected"),
        (
            [[{"text": "b", "start": 3}]],
            r"^mine:1: answers: 'b' is not in the context at character 3$",
        ),
        ([[{"text": "c d", "start": 4}]], r"^mine:1: answers: 'c d' is not in the context"),
    ],
)
def test_bad_answers_are_reported_with_their_place(answers: Sequence[Any], message: str) -> None:
    table: Any = Rows(*answers)
    refused(TableSource(table, np.arange(len(table)), small_tokenizer(), "mine"), message)


def test_rows_too_short_for_question_and_context(tmp_path: Path) -> None:
    source = source_of(tmp_path, [row("so " * 30, "a b", "a")])
    with pytest.raises(UserError, match=r"tasks.qa: 20 tokens leave no room .* question of 30"):
        task_of().items(source, 20)
    assert len(task_of(max_query=16).items(source, 20)) == 2  # windows of one token
    with pytest.raises(UserError, match=r"tasks.qa.max_length: 21 tokens, but rows hold 20"):
        task_of(max_length=21).items(source, 20)
    with pytest.raises(UserError, match=r"tasks.qa: no window of .* contains an answer"):
        task_of(max_query=16).training_items(source_of(tmp_path, [row("so", LONG, LONG)]), 20)


def test_models_with_and_without_the_head_are_distinguished() -> None:
    body = model_of(task_of()).backbone
    model = Model(body, {"qa": SpanHead(body.hidden_size, 2)}, {"qa": "qa"})
    assert {name: tuple(x.shape) for name, x in model.heads.state_dict().items()} == {
        "qa.out.weight": (2, 16),
        "qa.out.bias": (2,),
    }


# Documents -------------------------------------------------------------------------------------

MIDDLE = row("so ?", " ".join(LETTERS[i % 23] for i in range(70)) + " good good", "good good")


def ernies_windows(query: int, context: int, length: int, stride: int) -> list[tuple[int, int]]:
    """[start, end) of the windows of a context, as ERNIE-Doc's reader of questions cuts them."""
    spans, start = [], 0
    while start < context:
        size = min(context - start, length - query - 3)
        spans.append((start, start + size))
        if start + size == context:
            break
        start += min(size, stride)
    return spans


def document_of(source: TableSource, task: Reading, **changes: Any) -> DocumentDataset:
    windows = DocumentWindows.of(DocumentSettings(**{"stride": 12, **changes}), 32, 8)
    return DocumentDataset.of(dataset_of(source, task, max_length=LONGEST), windows)


def all_windows(dataset: DocumentDataset, n: int) -> list[Example]:
    (layout,) = dataset.layouts(np.array([n]))
    found = []
    for number in range(dataset.counts(layout[None])[0]):
        layout["window"] = number
        found.append(dataset.example(n, layout))
    return found


@pytest.mark.parametrize("rows", [[*ROWS, MIDDLE], REFUSING], ids=["answers", "refusing"])
def test_windows_of_a_document_are_those_of_ernies_reader(tmp_path: Path, rows: list[Any]) -> None:
    """[CLS] window [SEP] question [SEP] padding, all of type 0; the target of one without the whole
    answer is [CLS]; the first reading has none."""
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    dataset = document_of(source, task)
    question, context = source.encoded("question"), source.encoded("context")
    for n in range(len(source)):
        ids, asked = context.read(n).ids.tolist(), question.read(n).ids.tolist()
        spans = ernies_windows(len(asked), len(ids), 32, 12) or [(0, 0)]
        windows = all_windows(dataset, n)
        assert len(windows) == 2 * len(spans)
        answers, most = task.answers(source).of(n).tolist(), []
        for (start, end), first, window in zip(
            spans, windows[: len(spans)], windows[len(spans) :], strict=True
        ):
            filled = [2, *ids[start:end], 3, *asked, 3]
            assert window.input_ids.tolist() == filled + [0] * (32 - len(filled))
            assert not first.labels and not window.token_type_ids.any()
            wanted = [(x - start, y - start) for x, y in answers if start <= x and y < end]
            at, targets = window.labels["qa"]
            assert at.tolist() == list(range(len(filled))) and "qa" in window.grouped_labels
            begin, last = (1 + wanted[0][0], 1 + wanted[0][1]) if wanted else (0, 0)
            assert [targets[begin, 0], targets[last, 1]] == [1, 1] and targets.sum() == 2
            mark = window.annotations.get("most_context", np.ones(32))
            most += (start + np.flatnonzero(mark[1 : 1 + end - start])).tolist()
        assert sorted(most) == list(range(len(ids)))


def test_the_answer_is_the_best_of_all_windows_of_a_document(tmp_path: Path) -> None:
    source = source_of(tmp_path, [MIDDLE])
    task = task_of().resolved(source)
    pieces = []
    for window in all_windows(document_of(source, task, counted="all"), 0):
        scores = np.zeros((len(window.labels["qa"][0]), 2), np.float32)
        found = answer_words(window)
        assert found is not None
        if found == ["good", "good"]:
            first = words(window).index("good")
            scores[first, 0], scores[first + 1, 1] = 3, 4
        pieces.append(task.decode(scores, window, source))
    (predicted,) = task.gather({0: pieces}, source).values()
    assert (predicted["text"], predicted["score"]) == ("good good", 7.0)
    assert predicted["start"] == MIDDLE["answers"][0]["start"]


def test_a_long_question_has_half_of_a_window(tmp_path: Path) -> None:
    source = source_of(tmp_path, [row(LONG, LONG, "very")])
    for window in all_windows(document_of(source, task_of().resolved(source)), 0):
        _, question, _ = " ".join(words(window)).split(" [SEP]")
        assert len(question.split()) == 14 and LONG.startswith(question.strip())
