"""The sequence of rows: seeking equals iterating, nothing is lost or repeated, rows are full,
and processes do not matter."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.data.sources.corpus_blocks import BlockSizes
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.packed_stream import PackedStream
from palm_ds.data.stream.stages import StepSize
from palm_ds.data.stream.task_group_dataset import held_out_rows, make_datasets
from palm_ds.data.tasks.task import build
from palm_ds.model.inputs.visibility import HIDDEN
from tests.helpers.small_corpus import write_small_corpus

KINDS = ("knowledge_masking", "sentence_reordering", "sentence_distance", "span_generation")
BLENDS = ["knowledge_masking", "sentence_reordering + knowledge_masking", "sentence_distance"]
MARKS = ("word", "phrase", "entity")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return [
        write_small_corpus(folder / "one", documents=60, seed=0),
        write_small_corpus(folder / "two", documents=30, seed=1),
    ]


def make_stream(
    corpora,
    *,
    sizes=None,
    stages,
    seed=1,
    length=64,
    rows=4,
    window_rows=32,
    weights=(1.0,),
    growing=0,
) -> PackedStream:
    tasks = {kind: build(kind, {"source": "text"}) for kind in KINDS}
    curriculum = read_stages(stages, KINDS)
    sources = [
        (f"corpus{i}", split_corpus(corpus, 0.1, MARKS, sizes)[0], weight)
        for i, (corpus, weight) in enumerate(zip(corpora, weights, strict=False))
    ]
    ids = {kind: i for i, kind in enumerate(KINDS)}
    datasets, mixtures = make_datasets(
        curriculum.task_groups, tasks, ids, {"text": sources}, seed=seed, length=length
    )
    size = StepSize(length, rows)
    if growing:
        size = StepSize(length, 3 * rows, (rows, 2 * rows), growing)
    return PackedStream(
        curriculum=curriculum,
        datasets=datasets,
        mixtures=[mixtures] * len(curriculum.stages),
        sizes=[size] * len(curriculum.stages),
        seed=seed,
        pad=corpora[0].vocabulary.pad,
        window_rows=window_rows,
    )


def plain(rows) -> list:
    return [[(dataset, n, layout.tobytes()) for dataset, n, layout in row] for row in rows]


plans = st.sampled_from(
    [
        {"continual": BLENDS, "steps": 12},
        {"continual": BLENDS, "steps": 12, "mix": "step"},
        [{BLENDS[0]: 3, BLENDS[2]: 9, "mix": "turns"}],
        {"joint": BLENDS, "steps": 9},
        {"sequential": BLENDS[:2], "steps": 7},
        [{BLENDS[0]: 3, BLENDS[2]: 17}, {BLENDS[1]: 5, "mix": "step"}, {BLENDS[0]: 4}],
        [{BLENDS[0]: 4, "span_generation": 4}, {"span_generation + knowledge_masking": 3}],
    ]
)
shapes = st.fixed_dictionaries(
    {
        "stages": plans,
        "seed": st.integers(0, 2**31),
        "length": st.sampled_from([32, 64, 100]),
        "rows": st.integers(1, 9),
        "window_rows": st.sampled_from([8, 32, 128]),
        "growing": st.sampled_from([0, 0, 1, 2, 5]),
    }
)
few = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@few
@given(shape=shapes, data=st.data())
def test_seek_equals_iterate(corpora, shape, data):
    """Any step, directly, from the position of any earlier step, or after later steps."""
    stream = make_stream(corpora[:1], **shape)
    rows = [plain(stream.step_rows(step)) for step in range(stream.curriculum.steps)]
    for stage in stream.curriculum.stages:
        sizes = [len(rows[stage.first + step]) for step in range(stage.steps)]
        each, one = shape["growing"], shape["rows"]
        whole = [one] * each + [2 * one] * each + [3 * one] * stage.steps if each else [one] * 99
        assert sizes == whole[: stage.steps]
    at = data.draw(st.integers(0, stream.curriculum.steps - 1))
    assert plain(make_stream(corpora[:1], **shape).step_rows(at)) == rows[at]
    assert plain(stream.step_rows(at)) == rows[at]
    resumed = make_stream(corpora[:1], **shape)
    resumed.load_state_dict(make_stream(corpora[:1], **shape).state_dict(at))
    later = data.draw(st.integers(at, stream.curriculum.steps - 1))
    assert plain(resumed.step_rows(later)) == rows[later]
    assert [plain(resumed.step_rows(s)) for s in range(at, stream.curriculum.steps)] == rows[at:]


@few
@given(shape=shapes)
def test_every_feed_is_consumed_in_order_with_nothing_lost_or_doubled(corpora, shape):
    stream = make_stream(corpora[:1], **shape)
    seen = Counter(
        (dataset, n)
        for step in range(stream.curriculum.steps)
        for row in stream.step_rows(step)
        for dataset, n, _ in row
    )
    assert set(seen.values()) == {1}
    consumed = stream.consumed()
    for number, dataset in enumerate(stream.datasets):
        mine = sorted(n for f, n in seen if f == number)
        assert mine == list(range(consumed[dataset.name])), dataset.name


def test_an_epoch_has_every_item_once(corpora):
    stream = make_stream(corpora[:1], stages=[{BLENDS[0]: 400}])
    dataset = stream.datasets[0]
    items = dataset.num_items
    for epoch in range(2):
        layouts = dataset.layouts(np.arange(epoch * items, (epoch + 1) * items))
        assert sorted(layouts["end"]) == sorted(dataset.order.items[:, 1])
    assert not np.array_equal(
        dataset.layouts(np.arange(items)), dataset.layouts(np.arange(items, 2 * items))
    )


WINDOWS = BlockSizes(block_tokens=200, window_blocks=8, window_documents=3, segment_blocks=12)


def test_large_corpora_seek_and_resume_alike(corpora):
    shape = {"stages": {"continual": BLENDS, "steps": 30}, "sizes": WINDOWS, "rows": 6}
    stream = make_stream(corpora[:1], **shape)
    assert all(dataset.windowed for dataset in stream.datasets)
    rows = [plain(stream.step_rows(step)) for step in range(30)]
    resumed = make_stream(corpora[:1], **shape)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict(17))))
    assert [plain(resumed.step_rows(step)) for step in range(17, 30)] == rows[17:]
    consumed = Counter(
        (dataset, n)
        for step in range(30)
        for row in stream.step_rows(step)
        for dataset, n, _ in row
    )
    assert set(consumed.values()) == {1}
    one, two = make_stream(corpora[:1], **shape), make_stream(corpora[:1], **shape)
    whole = one.batches(5, 0, 1, 2)
    halves = two.batches(5, 1, 2, 1), make_stream(corpora[:1], **shape).batches(5, 0, 2, 1)
    ids = [batch.input_ids for half in reversed(halves) for batch in half]
    assert torch.equal(torch.cat([batch.input_ids for batch in whole]), torch.cat(ids))


def test_a_position_in_another_order_is_refused(corpora):
    shape = {"stages": {"continual": BLENDS, "steps": 30}}
    state = make_stream(corpora[:1], **shape).state_dict(5)
    del state["windowed"]
    make_stream(corpora[:1], **shape).load_state_dict(state)
    with pytest.raises(UserError, match="shuffles large corpora differently"):
        make_stream(corpora[:1], sizes=WINDOWS, **shape).load_state_dict(state)


def test_a_position_at_the_end_of_a_run_is_empty_and_harmless(corpora):
    stream = make_stream(corpora[:1], stages=[{BLENDS[0]: 3}])
    assert stream.state_dict(3) == {}
    stream.load_state_dict({})
    assert len(stream.step_rows(0)) == 4


@few
@given(
    shape=shapes,
    split_to=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (3, 2)]),
)
def test_processes_and_micro_batches_are_slices_of_the_same_rows(corpora, shape, split_to):
    world, micro = split_to
    shape = {**shape, "rows": world * micro * 2}
    stream = make_stream(corpora[:1], **shape)
    rows = stream.rows_at(3)
    whole = stream.batches(3, 0, 1, rows)[0]
    parts = [
        batch
        for rank in range(world)
        for batch in make_stream(corpora[:1], **shape).batches(3, rank, world, micro)
    ]
    for name in ("input_ids", "position_ids", "token_type_ids", "task_ids", "sequence_ids"):
        assert torch.equal(torch.cat([getattr(b, name) for b in parts]), getattr(whole, name))
    assert [b.first_row for b in parts] == list(range(0, rows, micro))
    for task, (_, targets) in whole.labels.items():
        given_out = [b.labels[task][1] for b in parts if task in b.labels]
        assert torch.equal(torch.cat(given_out), targets)


@few
@given(shape=shapes)
def test_batches_are_well_formed(corpora, shape):
    stream = make_stream(corpora[:1], **shape)
    vocabulary = corpora[0].vocabulary
    (batch,) = stream.batches(stream.curriculum.steps - 1, 0, 1, stream.rows)
    real = batch.sequence_ids >= 0
    assert (batch.input_ids[~real] == vocabulary.pad).all()
    starts = batch.cu_seqlens
    assert starts[0] == 0
    assert starts[-1] == batch.input_ids.numel()
    # Every block starts with [CLS] at position 0 and has positions 0, 1, 2, ... up to its queries.
    hidden = torch.zeros(batch.input_ids.numel(), dtype=torch.bool)
    if batch.visibility is not None:
        hidden = batch.visibility[0].flatten() == HIDDEN
    flat_block, flat_positions = batch.sequence_ids.flatten(), batch.position_ids.flatten()
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert len(flat_block[begin:end].unique()) == 1
        if flat_block[begin] >= 0:
            assert batch.input_ids.flatten()[begin] == vocabulary.cls
            seen = int((~hidden[begin:end]).sum())
            assert flat_positions[begin : begin + seen].tolist() == list(range(seen))
            assert flat_positions[begin:end].max() == seen - 1
    for task, (at, _) in batch.labels.items():
        assert real.flatten()[at].all(), task


def test_a_mixture_of_corpora_keeps_its_weights(corpora):
    stages = [{BLENDS[0]: 60}]
    stream = make_stream(corpora, stages=stages, weights=(1.0, 3.0), window_rows=64)
    tokens = Counter()
    for step in range(60):
        for row in stream.step_rows(step):
            for dataset, _, layout in row:
                tokens[dataset] += int(layout["length"])
    assert tokens[1] / tokens[0] == pytest.approx(3.0, rel=0.1)


def test_a_stage_mixes_blends_in_proportion_in_every_step(corpora):
    stages = [{BLENDS[0]: 30, BLENDS[2]: 90}]
    stream = make_stream(corpora[:1], stages=stages, rows=32, window_rows=64)
    shares = []
    for step in range(1, 100, 9):
        tokens = Counter()
        for row in stream.step_rows(step):
            for dataset, _, layout in row:
                tokens[dataset] += int(layout["length"])
        shares.append(tokens[1] / tokens.total())
    assert np.mean(shares) == pytest.approx(0.75, abs=0.05)
    assert min(shares) > 0.5


def test_with_mix_step_a_step_has_one_blend(corpora):
    stream = make_stream(corpora[:1], stages={"joint": BLENDS, "steps": 10, "mix": "step"})
    counts = Counter()
    for step in range(30):
        datasets = {dataset for row in stream.step_rows(step) for dataset, _, _ in row}
        assert len(datasets) == 1
        counts[datasets.pop()] += 1
    assert counts == {0: 10, 1: 10, 2: 10}


def test_a_stage_continues_where_the_last_one_stopped(corpora):
    stages = [{BLENDS[0]: 5}, {BLENDS[0]: 5}]
    stream = make_stream(corpora[:1], stages=stages)
    numbers = [
        [n for step in steps for row in stream.step_rows(step) for _, n, _ in row]
        for steps in (range(5), range(5, 10))
    ]
    assert max(numbers[0]) + 1 == min(numbers[1])


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("task_groups", [[0], [1], [2], [0, 1, 2]])
def test_packing_of_real_text_is_above_the_bound(request, language, length, task_groups):
    corpus = request.getfixturevalue(f"shared_{language}")
    stages = {"continual": [BLENDS[b] for b in task_groups], "steps": 24}
    rows = 16384 // length
    stream = make_stream([corpus], stages=stages, length=length, rows=rows, window_rows=512)
    used = [
        sum(int(layout["length"]) for *_, layout in row)
        for step in range(stream.curriculum.steps)
        for row in stream.step_rows(step)
    ]
    assert np.mean(used) / length >= 0.985


def test_held_out_rows_are_the_same_for_every_seed(corpora):
    corpus = corpora[0]
    _, held = split_corpus(corpus, 0.2, MARKS)
    tasks = {kind: build(kind, {"source": "text"}) for kind in KINDS}
    ids = dict.fromkeys(KINDS, 0)
    sources = {"text": [("one", held, 1.0)]}
    datasets, _ = make_datasets(BLENDS, tasks, ids, sources, seed=0, length=64, fixed=True)
    rows = held_out_rows(datasets[0], 0, 7)
    assert sorted(n for row in rows for _, n, _ in row) == list(range(7))


def test_held_out_documents_are_not_trained_on(corpora):
    training, held = split_corpus(corpora[0], 0.2, MARKS)
    assert len(held.documents) > 0
    assert not set(training.documents) & set(held.documents)
    assert len(training.documents) + len(held.documents) == len(corpora[0])
