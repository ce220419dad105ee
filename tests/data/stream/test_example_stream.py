"""Steps of N examples: exactly those, once each, for any number of processes and micro-batches."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.example_stream import ExampleStream
from palm_ds.data.stream.stages import order_of
from palm_ds.data.stream.task_group_dataset import make_datasets
from palm_ds.data.tasks.task import build
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.sources import open_data
from tests.helpers.sampling import only
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.word_tables import open_source, write_texts, write_vocabulary

SIZES = {"a": 70, "b": 23, "c": 9}
few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write_vocabulary(folder)
    for name, rows in SIZES.items():
        write_texts(folder / f"{name}.tsv", rows, classes=3, pairs=name == "b")
    return folder


@pytest.fixture(scope="module")
def sources(folder) -> dict[str, Any]:
    vocabulary = folder / "vocab.txt"
    return {name: open_source(folder / f"{name}.tsv", vocabulary) for name in SIZES}


def make_stream(sources, stages: Any, examples: dict[str, int], seed: int = 1) -> ExampleStream:
    labels = ("c0", "c1", "c2")
    values = {"kind": "classification", "labels": labels}
    tasks = {name: build(name, {**values, "source": name}) for name in SIZES}
    curriculum = read_stages(stages, list(SIZES))
    tables = {name: [(name, source, 1.0)] for name, source in sources.items()}
    datasets, mixtures = make_datasets(
        curriculum.task_groups, tasks, dict.fromkeys(SIZES, 0), tables, seed=seed, length=64
    )
    stream = ExampleStream(
        curriculum=curriculum,
        datasets=datasets,
        mixtures=mixtures,
        examples=examples,
        length=64,
        seed=seed,
        pad=0,
    )
    stream.rows = stream.most_rows()
    return stream


def test_a_step_of_a_long_run_costs_no_more_than_the_first():
    curriculum = read_stages([{"a": 10**8, "b": 10**8}, {"b": 10**8}], ["a", "b"])
    stream = ExampleStream(curriculum, [], {}, {"a": 1000, "b": 3000}, length=64, seed=1, pad=0)
    last = 2 * 10**8 - 1
    assert stream.taken(last) == {
        "a": (10**11 - 500, 10**11),
        "b": (3 * 10**11 - 1500, 3 * 10**11),
    }
    assert stream.taken(last + 1) == {"b": (3 * 10**11, 3 * 10**11 + 3000)}


def read(stream: ExampleStream, step: int) -> Counter[tuple[str, int]]:
    """(dataset, n) of the examples of a step."""
    rows = stream.step_rows(step)
    return Counter((stream.datasets[dataset].name, n) for row in rows for dataset, n, _ in row)


def slowly(stream: ExampleStream) -> list[Counter[tuple[str, int]]]:
    """The examples of every step, counted one at a time."""
    taken: Counter[str] = Counter()
    steps: list[Counter[tuple[str, int]]] = []
    for number, stage in enumerate(stream.curriculum.stages):
        task_groups = [task_group for task_group, _ in stage.steps_of]
        if stage.mix != "batch":
            order = [task_groups[i] for i in order_of(stage, number, stream.seed)]
            piles = [[task_group] * stream.examples[task_group] for task_group in order]
        else:
            wanted = {
                task_group: n * stream.examples[task_group] for task_group, n in stage.steps_of
            }
            given: Counter[str] = Counter()
            line = []
            for _ in range(sum(wanted.values())):  # whose next stands earliest in the whole
                left = [
                    task_group
                    for task_group in task_groups
                    if given[task_group] < wanted[task_group]
                ]
                nearest = min(left, key=lambda b: Fraction(2 * given[b] + 1, 2 * wanted[b]))
                line.append(nearest)
                given[nearest] += 1
            cuts = [len(line) * step // stage.steps for step in range(stage.steps + 1)]
            piles = [line[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        for pile in piles:
            step: Counter[tuple[str, int]] = Counter()
            for task_group in pile:
                step[task_group, taken[task_group]] += 1
                taken[task_group] += 1
            steps.append(step)
    return steps


shapes = st.fixed_dictionaries(
    {
        "stages": st.lists(
            st.fixed_dictionaries(
                {name: st.integers(0, 5) for name in SIZES},
                optional={"mix": st.sampled_from(["step", "turns"])},
            ).filter(lambda stage: any(stage[name] for name in SIZES)),
            min_size=1,
            max_size=3,
        ),
        "examples": st.fixed_dictionaries({name: st.integers(1, 17) for name in SIZES}),
        "seed": st.integers(0, 2**31),
    }
)


@few
@given(shape=shapes)
def test_every_step_has_exactly_its_examples(sources, shape) -> None:
    stream = make_stream(sources, **shape)
    expected = slowly(stream)
    assert len(expected) == stream.curriculum.steps
    upto: Counter[str] = Counter({dataset.name: 0 for dataset in stream.datasets})
    for step, wanted in enumerate(expected):
        assert stream.consumed(step) == dict(upto)
        found = read(stream, step)
        assert found == wanted and set(found.values()) == {1}  # which also means: none is empty
        upto.update(dataset for dataset, _ in found)
    assert stream.consumed() == dict(upto)
    for task_group in stream.curriculum.task_groups:
        assert (
            upto[task_group]
            == stream.curriculum.total_of(task_group) * shape["examples"][task_group]
        )


def test_with_mix_batch_every_step_has_the_recipes_number_of_examples(sources) -> None:
    stream = make_stream(sources, [{"a": 5, "b": 3, "c": 1}], dict.fromkeys(SIZES, 4))
    steps = [read(stream, step) for step in range(9)]
    assert [found.total() for found in steps] == [4] * 9
    assert all(len({dataset for dataset, _ in found}) > 1 for found in steps)


@settings(few, max_examples=6)
@given(shape=shapes, world=st.integers(1, 4), micro=st.sampled_from([None, 1, 2, 3]))
def test_processes_and_micro_batches_partition_the_same_rows(sources, shape, world, micro) -> None:
    stream = make_stream(sources, **shape)
    sections = {"train_micro_batch_size_per_gpu": micro} if micro else {}
    ds_config = make_ds_config(sections)
    needed = stream.most_rows()
    stream.rows = ds_config.round_up_rows(needed, world)
    assert stream.rows >= needed and stream.rows - needed < world * (micro or 8)
    of_micro, accumulation = ds_config.micro_batching(stream.rows, world)
    for step in {0, stream.curriculum.steps // 2, stream.curriculum.steps - 1}:
        parts = [stream.batches(step, rank, world, of_micro) for rank in range(world)]
        assert {len(part) for part in parts} == {accumulation}
        batches = [batch for part in parts for batch in part]
        sizes = [len(batch.input_ids) for batch in batches if batch.real_tokens]
        assert max(sizes) <= of_micro and max(sizes) - min(sizes) <= 1
        whole = stream.build(step, stream.step_rows(step))
        assert texts(batches) == texts([whole])
        firsts = [batch.first_row for batch in batches if batch.real_tokens]
        assert firsts == [sum(sizes[:i]) for i in range(len(sizes))]
        for task, (_, targets) in whole.labels.items():
            shared = [batch.labels[task][1] for batch in batches if task in batch.labels]
            assert torch.equal(torch.cat(shared), targets)


def texts(batches) -> list[tuple[int, ...]]:
    """The texts of batches, in order."""
    found = []
    for batch in batches:
        ids, block = batch.input_ids.flatten(), batch.sequence_ids.flatten()
        for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            if block[a] >= 0:
                found.append(tuple(ids[a:b].tolist()))
    return found


def test_an_epoch_has_every_row_once_in_another_order(sources) -> None:
    stream = make_stream(sources, [{"b": 46}], {"b": 1})  # two epochs of 23 rows
    items = [int(row[0][2][2]) for step in range(46) for row in stream.step_rows(step)]
    assert sorted(items[:23]) == sorted(items[23:]) == list(range(23))
    assert items[:23] != items[23:] and items[:23] != list(range(23))
    other = make_stream(sources, [{"b": 46}], {"b": 1}, seed=2)
    assert [int(other.step_rows(s)[0][0][2][2]) for s in range(23)] != items[:23]


def test_any_step_can_be_read_directly(sources) -> None:
    stages = [{"a": 6, "b": 5, "c": 4}, {"a": 3, "c": 8, "mix": "step"}]
    examples = {"a": 7, "b": 3, "c": 2}
    whole = make_stream(sources, stages, examples)
    in_turn = [rows_of(whole, step) for step in range(whole.curriculum.steps)]
    for step in reversed(range(whole.curriculum.steps)):
        again = make_stream(sources, stages, examples)
        again.load_state_dict(whole.state_dict(step))
        assert rows_of(again, step) == in_turn[step]


def rows_of(stream: ExampleStream, step: int) -> list:
    rows = stream.step_rows(step)
    return [[(dataset, n, layout.tobytes()) for dataset, n, layout in row] for row in rows]


def test_an_extending_run_continues_in_the_data(sources) -> None:
    old = make_stream(sources, [{"a": 4}], {"a": 5})
    new = make_stream(sources, [{"a": 2}], {"a": 5})
    new.already_read = old.consumed()
    assert new.already_read == {"a": 20}
    found = read(new, 0) + read(new, 1)
    assert sorted(n for _, n in found) == list(range(20, 30))
    assert new.consumed() == {"a": 30} and new.consumed(1) == {"a": 25}


def test_packing_uses_few_rows_without_excess_length(sources) -> None:
    stream = make_stream(sources, [{"a": 5}], {"a": 32})
    for step in range(5):
        rows = stream.step_rows(step)
        used = [sum(int(layout["length"]) for *_, layout in row) for row in rows]
        assert len(rows) <= -(-sum(used) // 64) + 1  # one more at most than whole rows would be
        assert max(used) <= 64
    (batch,) = stream.batches(0, 0, 1, stream.rows)
    rows = stream.step_rows(0)[:1]
    short = stream.build(0, [row[:1] for row in rows])
    length = int(rows[0][0][2][0])
    assert short.input_ids.shape == (1, -(-length // 8) * 8) and short.real_tokens == length
    assert batch.input_ids.shape[1] <= 64


def test_a_process_without_a_text_gets_an_empty_row(sources) -> None:
    stream = make_stream(sources, [{"c": 2}], {"c": 1})
    stream.rows = 4
    parts = [stream.batches(0, rank, 4, 1) for rank in range(4)]
    assert all(len(part) == 1 for part in parts)
    assert sum(bool(part[0].labels) for part in parts) == 1
    assert sum(part[0].real_tokens for part in parts) == len(texts(parts[3])[0])


def test_corpora_of_a_source_share_its_examples_by_weight(tmp_path) -> None:
    corpora = [write_small_corpus(tmp_path / name, seed=i) for i, name in enumerate(("x", "y"))]
    task = build("m", {"kind": "knowledge_masking", "source": "s"})
    mixture = [
        (name, split_corpus(corpus, 0.0, ("word", "phrase", "entity"))[0], weight)
        for name, corpus, weight in zip("xy", corpora, (3.0, 1.0), strict=True)
    ]
    curriculum = read_stages([{"m": 10}], ["m"])
    datasets, mixtures = make_datasets(
        curriculum.task_groups, {"m": task}, {"m": 0}, {"s": mixture}, seed=1, length=64
    )
    stream = ExampleStream(curriculum, datasets, mixtures, {"m": 7}, 64, 1, 0)
    assert stream.consumed() == {"m @ x": 52, "m @ y": 18}  # of 70, three to one, rounded down
    seen: Counter[tuple[str, int]] = Counter()
    for step in range(10):
        found = read(stream, step)
        assert found.total() == 7
        seen += found
    for name, count in stream.consumed().items():
        assert sorted(n for dataset, n in seen if dataset == name) == list(range(count))


# Amounts and PaddlePALM's arithmetic, in a recipe ----------------------------------------------


def recipe(folder: Path, stages: Any, batch: str = "4 examples", **tasks: Any) -> Recipe:
    vocabulary = str(folder / "vocab.txt")
    values = {
        "backbone": {"preset": "tiny", "max_positions": 64},
        "length": 64,
        "batch": batch,
        "held_out": 0.0,
        "sources": {
            name: {"table": str(folder / f"{name}.tsv"), "tokenizer": vocabulary} for name in SIZES
        },
        "tasks": {
            name: {"kind": "classification", "source": name, **tasks.get(name, {})}
            for name in SIZES
        },
        "stages": stages,
    }
    return make_recipe(values, "recipe.yaml")


def steps_of(folder: Path, stages: Any, batch: str = "4 examples", **tasks: Any) -> dict:
    made = recipe(folder, stages, batch, **tasks)
    (stage,) = resolve(made).curriculum.stages
    return dict(stage.steps_of)


@pytest.mark.parametrize(
    ("each", "epochs"),
    [
        pytest.param(each, epochs, marks=[] if n % 5 == 0 else pytest.mark.exhaustive)
        for n, (each, epochs) in enumerate(
            itertools.product((1, 2, 3, 7, 10, 14, 15, 35, 49, 70), (1, 3, 6, 7))
        )
    ],
)
def test_even_epochs_are_exact(folder, each, epochs) -> None:
    """70 rows: rounding of sevenths and fifteenths adds no step."""
    steps = -(-70 * epochs // each)
    assert steps_of(folder, [{"a": f"{epochs} epochs"}], f"{each} examples") == {"a": steps}
    sequences = 30 * each
    assert steps_of(folder, [{"a": f"{sequences} sequences"}], f"{each} examples") == {"a": 30}


@pytest.mark.parametrize("mix", only(["batch"], ["step", "batch"]))
@pytest.mark.parametrize(
    ("ratios", "reference", "epochs", "batches"),
    [
        ({}, "a", 1, {}),
        ({"a": 1.0, "b": 0.5, "c": 0.25}, "a", 2, {}),
        ({"a": 0.3, "b": 2, "c": 0.7}, "b", 3, {"b": 2, "a": 8}),
        ({"b": 0.29}, "a", 2.5, {"a": 1, "c": 3}),
    ],
)
def test_steps_are_paddlepalms_expected_steps(
    folder, mix, ratios, reference, epochs, batches
) -> None:
    """int(num_epochs * mix_ratio * steps_pur_epoch(reference)), steps_pur_epoch = num_examples //
    batch_size (multihead_trainer.py:237), and each task gets exactly that many steps."""
    sampler = {"mix_ratio": ratios, "reference": reference, "epochs": epochs}
    stages = {"joint": list(SIZES), "mix": mix, "sampler": sampler}
    tasks = {name: {"batch": n} for name, n in batches.items()}
    of_epoch = SIZES[reference] // batches.get(reference, 4)
    wanted = {
        n: int(Fraction(str(epochs)) * Fraction(str(ratios.get(n, 1))) * of_epoch) for n in SIZES
    }
    made = resolve(recipe(folder, stages, "4 examples", **tasks))
    (stage,) = made.curriculum.stages
    assert dict(stage.steps_of) == wanted and made.curriculum.steps == sum(wanted.values())
    stream = build_stream(made, open_data(made))
    assert isinstance(stream, ExampleStream)
    assert stream.consumed() == {n: wanted[n] * batches.get(n, 4) for n in SIZES}
    if mix == "step":
        task_groups = [
            set(dataset for dataset, _ in read(stream, step))
            for step in range(made.curriculum.steps)
        ]
        assert (
            Counter(name for (name,) in task_groups) == wanted
        )  # one task a step, and all of them


def test_the_order_of_tasks_is_random(folder) -> None:
    """Tasks are sampled, not taken in turn: the order is random, the counts are exact."""
    sampler = {"mix_ratio": {}, "reference": "a", "epochs": 2}
    stages = {"joint": list(SIZES), "mix": "step", "sampler": sampler}
    orders = []
    for seed in (1, 2):
        made = resolve(recipe(folder, stages))
        orders.append(order_of(made.curriculum.stages[0], 0, seed).tolist())
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_task_without_a_step_is_an_error(folder) -> None:
    sampler = {"mix_ratio": {"c": 0.01}, "reference": "a", "epochs": 1}
    made = recipe(folder, {"joint": list(SIZES), "mix": "step", "sampler": sampler})
    with pytest.raises(UserError, match="'c' would get 1 epochs x ratio 0.01 x 17 steps per epoch"):
        resolve(made)
    sampler = {"mix_ratio": {}, "reference": "c", "epochs": 9}  # 9 rows are no step of 10
    made = recipe(folder, {"joint": list(SIZES), "sampler": sampler}, "10 examples")
    with pytest.raises(UserError, match="x 0 steps per epoch of 'c', less than one step"):
        resolve(made)


def test_samplers_count_in_steps_of_examples(folder) -> None:
    joint = {"joint": list(SIZES), "steps": 51, "sampler": "uniform"}
    assert steps_of(folder, joint) == {"a": 17, "b": 17, "c": 17}
    joint["sampler"] = "proportional"  # of 102 rows; 11.5 and 4.5 steps, the earlier is rounded up
    assert steps_of(folder, joint) == {"a": 35, "b": 12, "c": 4}
    joint["sampler"] = {"temperature": 2}
    roots = {name: rows**0.5 for name, rows in SIZES.items()}
    exact = {name: 51 * root / sum(roots.values()) for name, root in roots.items()}
    found = steps_of(folder, joint)
    assert sum(found.values()) == 51 and all(abs(found[n] - exact[n]) < 1 for n in SIZES)
    joint |= {"steps": "2 epochs", "sampler": "proportional"}  # 204 examples in all
    assert steps_of(folder, joint) == {"a": 35, "b": 12, "c": 4}
