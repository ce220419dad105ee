"""Multiple choice: equal to BertForMultipleChoice; questions of any number of choices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import build
from palm_ds.model.heads.pooled import ChoiceHead
from palm_ds.tasks.multiple_choice import MultipleChoice
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    make_task,
    model_of,
    predictions,
    small_tokenizer,
    source_of,
)

ROWS = [
    {"text_a": "so ?", "choices": ["good", "bad x", "y"], "label": 1},
    {"text_a": "very bads ?", "choices": ["a b c", "x"], "label": 0},
    {"text_a": "", "choices": ["z", "", "y", "w v"], "label": 3},
]


task_of = partial(make_task, MultipleChoice, "exam")


def test_the_loss_of_ragged_groups_is_that_of_each() -> None:
    torch.manual_seed(2)
    head = ChoiceHead(8)
    rows = torch.randn(12, 8, requires_grad=True)
    sizes, right = [3, 2, 1, 6], [2, 0, 0, 4]
    groups = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    targets = torch.cat([F.one_hot(torch.tensor(r), s) for r, s in zip(right, sizes, strict=True)])
    loss, correct = head(rows, targets, groups)
    scores = head.out(rows)[:, 0].split(sizes)
    each = [F.cross_entropy(s[None], torch.tensor([r])) for s, r in zip(scores, right, strict=True)]
    torch.testing.assert_close(loss, torch.stack(each).sum())
    assert correct == sum(int(s.argmax()) == r for s, r in zip(scores, right, strict=True))
    mine, theirs = (torch.autograd.grad(x, rows, retain_graph=True)[0] for x in (loss, sum(each)))
    torch.testing.assert_close(mine, theirs)


def test_ties_go_to_the_first_choice() -> None:
    head = ChoiceHead(4)
    rows, groups = torch.ones(4, 4), torch.tensor([0, 0, 1, 1])
    assert head(rows, torch.tensor([1, 0, 0, 1]), groups).correct == 1
    task = task_of(answers="number", count_from=0)
    scores = head.logits(rows, groups)[:2].detach().numpy()
    assert np.argmax(scores[:, 0]) == 0
    assert task._name(0, ["a", "b"]) == "0"


@pytest.mark.parametrize(
    ("labels", "answers", "count_from", "targets"),
    [
        ([1, 0, 3], "number", 0, [1, 0, 3]),
        ([2, 1, 4], "number", 1, [1, 0, 3]),
        ([2, 1, 3], "number", 0, [2, 1, 3]),
        (["B", "a", "D"], "letter", 0, [1, 0, 3]),
        (["bad x", "a b c", " w v"], "text", 0, [1, 0, 3]),
    ],
)
def test_labels_are_read_and_written_as_in_the_file(
    tmp_path, labels, answers, count_from, targets
) -> None:
    rows = [{**row, "label": label} for row, label in zip(ROWS, labels, strict=True)]
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    assert (task.answers, task.count_from) == (answers, count_from)
    assert task.targets(source).tolist() == targets
    task.check(source, labeled=True)
    written = predictions(model_of(task), source, task)["exam"]
    for item, row in enumerate(ROWS):
        best = int(np.argmax(written[item]["logits"]))
        names = {
            "number": str(best + count_from),
            "letter": "ABCD"[best],
            "text": row["choices"][best],
        }
        assert written[item]["label"] == names[answers]
    assert task.resolved(source) == task


@pytest.mark.parametrize(
    ("label", "answers", "count_from"),
    [("3", "number", 1), ("B", "letter", 0), ("bad x", "text", 0)],
)
def test_rows_without_a_label_say_nothing_about_the_format(
    tmp_path: Path, label: str, answers: str, count_from: int
) -> None:
    rows = [{**ROWS[1], "label": None}, {**ROWS[0], "label": label}]
    source = source_of(tmp_path, rows, missing_labels="keep")
    task = task_of().resolved(source)
    assert (task.answers, task.count_from) == (answers, count_from)
    assert (task.targets(source) >= 0).tolist() == [False, True]
    task.check(replace(source, numbers=source.numbers[task.labeled(source)]), labeled=True)


def test_label_settings_of_a_recipe_are_kept(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{**ROWS[0], "choices": ["3", "1", "2"], "label": 1}])
    assert task_of(answers="text").resolved(source).targets(source).tolist() == [1]
    source = source_of(tmp_path, [{**ROWS[0], "choices": ["3", "1", "2"], "label": 1}])
    assert task_of(count_from=1).resolved(source).targets(source).tolist() == [0]


def test_long_choices_are_truncated_and_none_is_lost(tmp_path: Path) -> None:
    rows = [
        {"text_a": "x " * 100, "choices": ["a " * 50, "b", "c " * 9], "label": 2},
        {"text_a": "x " * 4, "choices": ["a " * 50, "b"], "label": 1},
        ROWS[0],
    ]
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    built, batch = built_of(dataset_of(source, task, max_length=60))
    parts = {e.item: e.sub_lengths for row in built for _, e in row}
    assert parts == {0: (20, 20, 20), 1: (52, 8), 2: (6, 7, 6)}  # short ones are left whole
    (example,) = (e for row in built for _, e in row if e.item == 0)
    tokens = small_tokenizer().tokens(example.input_ids)
    assert tokens[20:40] == ["[CLS]", *["x"] * 16, "[SEP]", "b", "[SEP]"]
    assert example.token_type_ids[20:40].tolist() == [0] * 18 + [1] * 2
    assert batch.count("exam") == 3
    assert example.labels["exam"][1].tolist() == [0, 0, 1]


def test_a_second_text_comes_before_the_choice(tmp_path: Path) -> None:
    rows = [{"text_a": "x", "text_b": "y ?", "choices": ["a", "b"], "label": 0}]
    source = source_of(tmp_path, rows)
    built, _ = built_of(dataset_of(source, task_of().resolved(source)))
    tokens = small_tokenizer().tokens(built[0][0][1].input_ids)
    assert tokens[:8] == ["[CLS]", "x", "[SEP]", "y", "?", "[SEP]", "a", "[SEP]"]


def test_the_baseline_chooses_at_random(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    _, batch = built_of(dataset_of(source, task))
    loss, right = task.baseline(batch.labels["exam"][1].numpy(), source)
    assert loss.sum() == pytest.approx(np.log(3 * 2 * 4))
    assert right.sum() == pytest.approx(1 / 3 + 1 / 2 + 1 / 4)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x", "label": 1}])
    with pytest.raises(UserError, match="tasks.exam: .* has no column 'choices'"):
        task_of().resolved(source)
    source = source_of(tmp_path, [{"text_a": "x", "choices": ["a", "b"]}])
    with pytest.raises(UserError, match="tasks.exam: .* has no column 'label'"):
        task_of().resolved(source)
    with pytest.raises(UserError, match="tasks.exam: .* has no column 'label'"):
        task_of(answers="number").check(source, labeled=True)


def test_choices_that_do_not_fit_are_reported_with_their_place(tmp_path: Path) -> None:
    rows = [ROWS[0], {"text_a": "x " * 9, "choices": ["a b c"] * 9, "label": 0}]
    source = source_of(tmp_path, rows)
    with pytest.raises(
        UserError, match=r":2: 9 choices leave fewer than 8 tokens for each in a row of"
    ):
        built_of(dataset_of(source, task_of().resolved(source), max_length=64))


def test_it_builds_its_own_texts(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    first = build("kind", {"kind": "classification", "source": "s", "labels": ["a", "b"]})
    with pytest.raises(UserError, match="tasks.exam: it builds its own choices"):
        built_of(dataset_of(source, first, task_of().resolved(source)))
