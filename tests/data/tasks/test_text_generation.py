"""Texts do not depend on how they are batched; some tokens are never written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.data.tasks.task import build
from palm_ds.data.tasks.text_generation import (
    GenerationLimits,
    TextGenerator,
    banned_tokens,
    generate_texts,
)
from tests.helpers.text_tables import model_of, small_tokenizer, source_of

LIMITS = GenerationLimits(length=64, segments=2)
ROWS = [{"source": " ".join("abcdefghij"[:many])} for many in (3, 9, 1, 5, 9, 2, 7)]


@pytest.mark.parametrize(
    "how", [{}, {"beams": 3, "no_repeat_ngram": 2}, {"temperature": 1.0, "top_k": 8, "seed": 3}]
)
def test_batches_and_lockstep_do_not_change_texts(how: dict[str, Any], tmp_path: Path) -> None:
    task = build("title", {"kind": "generation", "source": "s", "max_target": 8})
    assert isinstance(task, TextGenerator)
    source, model = source_of(tmp_path, ROWS), model_of(task)

    def texts(items: list[int], tokens: int, *, lockstep: bool = False) -> list[str]:
        settings = replace(task.decoding, **how)
        found = generate_texts(
            model, task, items, source, LIMITS,
            settings=settings, batch_tokens=tokens, lockstep=lockstep,
        )  # fmt: skip
        return [each["text"] for each in found]

    wanted = texts(list(range(7)), 10_000)
    assert len(set(wanted)) > 1
    assert texts(list(range(7)), 1) == wanted
    assert texts([4, 0, 6], 30) == [wanted[4], wanted[0], wanted[6]]
    assert texts(list(range(7)), 10_000, lockstep=True) == wanted


def test_lockstep_continues_where_there_are_no_positions_left(tmp_path: Path) -> None:
    task = build("title", {"kind": "generation", "source": "s", "generate": {"max_tokens": 200}})
    assert isinstance(task, TextGenerator)
    source, model = source_of(tmp_path, ROWS[:2]), model_of(task)
    assert model.backbone.config.max_positions < 200
    found = [
        generate_texts(
            model,
            task,
            range(2),
            source,
            LIMITS,
            settings=task.decoding,
            batch_tokens=256,
            lockstep=lockstep,
        )  # fmt: skip
        for lockstep in (False, True)
    ]
    assert found[0] == found[1]


def test_lockstep_calls_the_same_modules_whatever_the_rows(tmp_path: Path) -> None:
    task = build("title", {"kind": "generation", "source": "s", "max_target": 8})
    assert isinstance(task, TextGenerator)
    source, model = source_of(tmp_path, ROWS), model_of(task)
    counts = []
    for items in ([0, 2, 5], [1, 4, 6]):
        calls: list[int] = []
        hook = model.backbone.layers[0].register_forward_hook(lambda *_, to=calls: to.append(1))
        generate_texts(
            model, task, items, source, LIMITS,
            settings=task.decoding, batch_tokens=128, lockstep=True,
        )  # fmt: skip
        hook.remove()
        counts.append(len(calls))
    assert counts[0] == counts[1] == 2 * (1 + 7)  # two batches: the sources, and seven steps


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_stop_leaves_out_the_rest_of_the_rows(tmp_path: Path, lockstep: bool) -> None:
    task = build("title", {"kind": "generation", "source": "s", "max_target": 8})
    assert isinstance(task, TextGenerator)
    asked = iter([False, True])
    written = generate_texts(
        model_of(task), task, [0, 1, 2], source_of(tmp_path, ROWS), LIMITS,
        settings=task.decoding, batch_tokens=1, lockstep=lockstep, stop=lambda: next(asked),
    )  # fmt: skip
    assert sum(map(bool, written)) == 1


def test_special_and_unused_tokens_are_never_written() -> None:
    vocabulary = replace(small_tokenizer().vocabulary, attn=7)
    barred = set(banned_tokens(vocabulary, vocabulary.size + 3, vocabulary.sep).tolist())
    assert {vocabulary.pad, vocabulary.cls, vocabulary.mask, vocabulary.unk, 7} <= barred
    assert barred >= set(range(vocabulary.size, vocabulary.size + 3))
    assert vocabulary.sep not in barred
    assert len(barred) == 4 + 1 + 3
    assert np.isin(sorted(set(vocabulary.regular.tolist()) - {7}), sorted(barred)).sum() == 0
