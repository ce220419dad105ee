"""Spans of units: the published lengths, whole units, the exact share, and how they are shown."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.rng import keyed_generator
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.data.tasks.masking import other_tokens
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.pretrain.shared.unit_masking import SpanSettings, spans_of
from palm_ds.text.tokens import SpecialTokens, TokenSpan

VOCABULARY = SpecialTokens(
    size=1005, pad=0, unk=1, cls=2, sep=3, mask=4, regular=np.arange(5, 1005)
)
SPANBERT = SpanSettings(lengths="geometric", p=0.2, longest=10)
GPT_BERT = SpanSettings(lengths="uniform", longest=3)


class Texts:
    """All that `label` needs of a source."""

    vocabulary = VOCABULARY


def text(tokens: int) -> Example:
    """Words of one, two and three tokens in turn."""
    words = np.resize([1, 1, 0, 1, 0, 0], tokens).astype(np.uint8)
    return build_input([TokenSpan(0, 100 + np.arange(tokens), {"word": words})], VOCABULARY)


def make(**values: object) -> KnowledgeMasking:
    return KnowledgeMasking(name="knowledge_masking", units=("word",), **values)  # type: ignore[arg-type]


def test_lengths_are_the_published_ones() -> None:
    """SpanBERT, figure 2: 22.4 % of length 1, 3.8 on average."""
    lengths = SPANBERT.draw(200_000, keyed_generator(1, 1))
    share = 0.2 * 0.8 ** np.arange(10)
    assert np.bincount(lengths)[1:] / len(lengths) == pytest.approx(share / share.sum(), abs=4e-3)
    assert lengths.mean() == pytest.approx(3.8, abs=0.02)
    lengths = GPT_BERT.draw(90_000, keyed_generator(1, 2))
    assert np.bincount(lengths)[1:] / len(lengths) == pytest.approx([1 / 3] * 3, abs=7e-3)
    with pytest.raises(UserError, match="spans.shortest"):
        SpanSettings(shortest=4, longest=3)


def test_spans_are_runs_of_whole_units() -> None:
    unit = np.array([-1, 0, 0, 1, 2, 2, 2, -1, 3, 4, 5, 5, -1])
    seen = set()
    for n in range(200):
        span = spans_of(unit, GPT_BERT, keyed_generator(2, n))
        assert (span[unit < 0] == -1).all()
        assert span[0] == -1 and sorted({*span.tolist()}) == [*range(-1, span.max() + 1)]
        for number in range(6):
            assert len({*span[unit == number].tolist()}) == 1
        for number in range(span.max() + 1):
            where = np.flatnonzero(span == number)
            assert (np.diff(where) == 1).all() and len({*unit[where].tolist()}) <= 3
            seen.add(tuple(where.tolist()))
    assert {(1, 2), (1, 2, 3), (1, 2, 3, 4, 5, 6), (4, 5, 6), (8,), (9, 10, 11)} <= seen
    assert spans_of(np.array([-1, -1]), SPANBERT, keyed_generator(1, 1)).tolist() == [-1, -1]


@pytest.mark.parametrize("spans", [SPANBERT, GPT_BERT])
def test_the_share_is_the_rate_and_words_stay_whole(spans: SpanSettings) -> None:
    task, shares, run_lengths = make(spans=spans), [], []
    for n in range(800):
        example = text(600)
        task.label(example, Texts(), keyed_generator(3, n))  # type: ignore[arg-type]
        at, targets = example.labels[task.name]
        assert np.array_equal(targets, example.unmasked_ids[at])
        shares.append(len(at) / 600)
        begins = example.annotations["word"][at] == 1
        assert begins[np.concatenate([[True], np.diff(at) > 1])].all()
        run_lengths.append(begins.sum() / (np.diff(at) > 1).sum())
    error = np.std(shares) / len(shares) ** 0.5
    assert abs(np.mean(shares) - 0.15) < 4 * error + 1e-4
    # Neighboring spans join, so that runs are longer than spans.
    assert np.mean(run_lengths) > spans.draw(10_000, keyed_generator(1, 1)).mean()


@pytest.mark.parametrize("corrupt", ["token", "unit", "span"])
def test_what_is_shown_is_drawn_for_a_token_a_unit_or_a_span(corrupt: str) -> None:
    task, same = make(spans=SPANBERT, corrupt=corrupt), {"unit": [], "span": []}
    hidden: list[bool] = []
    for n in range(100):
        example, rng = text(300), keyed_generator(4, n)
        words = np.cumsum(example.annotations["word"], dtype=np.int64)
        word = words * (example.source_offsets >= 0)
        span = spans_of(word - 1, SPANBERT, keyed_generator(4, n))
        task.label(example, Texts(), rng)  # type: ignore[arg-type]
        at = example.labels[task.name][0]
        masked = example.input_ids[at] == VOCABULARY.mask
        hidden += masked.tolist()
        for name, number in (("unit", word[at]), ("span", span[at])):
            pairs = np.flatnonzero(np.diff(number) == 0)
            same[name] += (masked[pairs] == masked[pairs + 1]).tolist()
    assert np.mean(hidden) == pytest.approx(0.8, abs=0.04)
    assert all(same["unit"]) == (corrupt != "token")
    assert all(same["span"]) == (corrupt == "span")


def test_a_random_token_can_be_another_one_always() -> None:
    regular = np.arange(5, 12)
    ids = np.repeat([1, 5, 8, 11, 400], 700)  # [UNK] and an unknown id are none of them
    drawn = other_tokens(ids, regular, keyed_generator(5, 5))
    assert np.isin(drawn, regular).all() and not (drawn == ids).any()
    for token in (5, 8, 11):
        counts = np.bincount(drawn[ids == token], minlength=12)[5:]
        assert (counts[regular != token] > 70).all()
    small = SpecialTokens(size=9, pad=0, unk=1, cls=2, sep=3, mask=4, regular=np.arange(100, 104))
    shown = {}
    for random in ("any", "other"):
        task = make(mask_rate=0.0, random_rate=1.0, random=random, rate=0.9)
        source, example = Texts(), text(400)
        source.vocabulary = small  # type: ignore[misc]
        example.unmasked_ids[1:-1] = 100 + np.arange(400) % 4
        task.label(example, source, keyed_generator(6, 6))  # type: ignore[arg-type]
        at, targets = example.labels[task.name]
        shown[random] = (example.input_ids[at] == targets).mean()
    assert shown["other"] == 0 and shown["any"] == pytest.approx(0.25, abs=0.1)


def test_spans_to_corrupt_need_spans() -> None:
    with pytest.raises(UserError, match=r"tasks.knowledge_masking.corrupt: span, but there are no"):
        make(corrupt="span")
