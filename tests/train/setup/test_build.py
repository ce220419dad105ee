"""Stages resolved with open corpora, and what a run consumes compared with its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.corpus.manifest import read_manifest, write_manifest
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.engine import Engine
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.text.tokenizer import wordpiece
from palm_ds.train.evaluate.evaluate import evaluate
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import (
    build_held_out,
    build_model,
    build_pairs,
    build_stream,
)
from palm_ds.train.setup.resolve import resolve, size
from palm_ds.train.setup.sources import check_units, open_data
from palm_ds.train.startup_notes import corpus_summaries
from tests.helpers.small_corpus import SPECIALS, write_small_corpus
from tests.helpers.small_tables import write_tables

MASKS, ORDER, APART = "knowledge_masking", "sentence_reordering", "sentence_distance"
BLENDS = [MASKS, f"{ORDER} + {MASKS}", APART]
LENGTH, ROWS = 64, 8


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_small_corpus(folder / "one", documents=60)
    write_small_corpus(folder / "two", documents=40, seed=1)
    return folder


def recipe(corpora: Path, stages: Any, *, mixed: bool = False, **changes: Any) -> Recipe:
    source: dict[str, Any] = {"corpus": str(corpora / "one")}
    if mixed:
        source = {"mix": {str(corpora / "one"): 3.0, str(corpora / "two"): 1.0}}
    values = {
        "backbone": {"preset": "tiny", "max_positions": LENGTH},
        "length": LENGTH,
        "batch": f"{ROWS} rows",
        "sources": {"text": source},
        "held_out": 0.1,
        "tasks": {name: {"source": "text"} for name in (MASKS, ORDER, APART)},
        "stages": stages,
        **changes,
    }
    return make_recipe(values, "recipe.yaml")


def slow_measure(made: Recipe, task_group: str) -> tuple[float, float]:
    """(tokens of the rows of an epoch, tokens of a row that an example takes), by packing an epoch
    with other means: each example into the first row that still takes it, the longest first."""
    (dataset,) = build_stream(make_plain(made, task_group), open_data(made)).datasets
    lengths = [int(dataset.layouts(np.array([n]))["length"][0]) for n in range(dataset.num_items)]
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, max_length in enumerate(free) if max_length >= length), None)
        if at is None:
            free.append(LENGTH - length)
        else:
            free[at] -= length
    return float(len(free) * LENGTH), len(free) * LENGTH / len(lengths)


def make_plain(made: Recipe, task_group: str) -> Recipe:
    values = made.resolved() | {"stages": [{task_group: 1}], "seed": 0}
    values["backbone"] = {"preset": "tiny", "max_positions": LENGTH}
    return make_recipe(values, "recipe.yaml")


def test_plain_steps_are_unchanged_and_open_nothing(corpora):
    made = recipe(corpora / "nowhere", {"continual": BLENDS, "steps": 8})
    assert resolve(made) is made


def test_tokens_become_steps_without_a_corpus(corpora):
    stages = {"continual": BLENDS[:2], "steps": f"{9 * LENGTH * ROWS - 1} tokens"}
    resolved = resolve(recipe(corpora / "nowhere", stages))
    assert resolved.stages == [{BLENDS[0]: 6}, {BLENDS[0]: 3, BLENDS[1]: 9}]
    assert resolved.curriculum_spec.resolved


@pytest.mark.parametrize("task_group", BLENDS)
def test_sequences_become_steps_by_the_mean_length_of_examples(corpora, task_group):
    made = recipe(corpora, {"joint": [task_group], "steps": "300 sequences"})
    _, mean_length = slow_measure(made, task_group)
    expected = int(np.ceil(300 * mean_length / (LENGTH * ROWS)))
    assert resolve(made, open_data(made)).stages == [{task_group: expected}]


def test_a_stream_with_a_budget_in_sequences_has_about_that_many(corpora):
    made = recipe(corpora, {"alternate": BLENDS, "steps": "900 sequences"})
    data = open_data(made)
    for dataset, examples in build_stream(resolve(made, data), data).consumed().items():
        assert 890 <= examples < 990, dataset  # the last step is filled, and rows nearly are


def test_proportional_is_by_the_tokens_of_an_epoch(corpora):
    made = recipe(corpora, {"alternate": BLENDS, "steps": 1000, "sampler": "proportional"})
    sizes = [slow_measure(made, task_group)[0] for task_group in BLENDS]
    (stage,) = resolve(made).stages
    assert stage.pop("mix") == "step"
    assert sum(stage.values()) == 1000
    assert all(
        abs(stage[b] - 1000 * n / sum(sizes)) < 1 for b, n in zip(BLENDS, sizes, strict=True)
    )


def test_mix_ratio_counts_epochs_of_the_reference(corpora):
    sampler = {"mix_ratio": {APART: 0.5}, "reference": MASKS, "epochs": 3}
    made = recipe(corpora, {"joint": BLENDS, "sampler": sampler})
    epoch = int(slow_measure(made, MASKS)[0]) // (LENGTH * ROWS)
    assert epoch > 2
    assert resolve(made).stages == [
        {BLENDS[0]: 3 * epoch, BLENDS[1]: 3 * epoch, APART: 3 * epoch // 2}
    ]


def test_a_mix_of_corpora_is_measured_by_its_shares_of_tokens(corpora):
    stages = {"joint": [MASKS], "steps": "100 sequences"}
    both = recipe(corpora, stages, mixed=True)
    sizes = size(both, open_data(both))[MASKS]
    data = open_data(both)
    one, two = build_stream(make_plain(both, MASKS), data).datasets
    alone = [
        size(single, open_data(single))[MASKS]
        for single in (
            recipe(corpora, stages),
            recipe(corpora, stages, sources={"text": {"corpus": str(corpora / "two")}}),
        )
    ]
    assert one.num_items != two.num_items
    assert sizes.tokens == pytest.approx(sum(each.tokens for each in alone))
    examples = 0.75 / alone[0].mean_length + 0.25 / alone[1].mean_length  # a token
    assert sizes.mean_length == pytest.approx(1 / examples, rel=0.02)  # names decide the draws


def test_resolved_stages_do_not_depend_on_the_seed_and_resolve_to_themselves(corpora):
    stages = {"continual": BLENDS, "steps": "777 sequences"}
    first, other = (resolve(recipe(corpora, stages, seed=seed)) for seed in (1, 2))
    assert first.stages == other.stages
    assert resolve(first) is first
    assert first.curriculum == read_stages(first.stages, [MASKS, ORDER, APART])


def test_a_share_smaller_than_a_step_is_an_error(corpora):
    sampler = {"mix_ratio": {APART: 1e-4}, "reference": MASKS}
    with pytest.raises(UserError, match="'sentence_distance' would get"):
        resolve(recipe(corpora, {"joint": BLENDS, "sampler": sampler}))


def test_ernie_files_are_a_source(corpora, tmp_path):
    """Opened through a list, with a corpus next to it; trained on like any other."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(30))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    lines = [
        f"1 {5 + n} 6 2 7 8 2;0 0 0 0 1 1 1;0 1 2 3 4 5 6;-1 0 0 -1 0 1 -1;1" for n in range(9)
    ]
    (tmp_path / "part").write_text("\n".join(lines) + "\n")
    (tmp_path / "list").write_text("part\t0.5\n")
    source = {"ernie": str(tmp_path / "list"), "tokenizer": str(tmp_path / "vocab.txt")}
    made = recipe(corpora, {"joint": [MASKS], "steps": 3}, sources={"text": source})
    data = open_data(made)
    assert list(data.corpora) == [f"{tmp_path / 'list'}.corpus"]
    sources = [source for _, source, _ in [*data.train["text"], *data.held_out["text"]]]
    texts = [source.read(a, b) for source in sources for a, b in spans(source)]
    assert sorted(int(piece.ids[0]) for piece in texts) == [5 + n for n in range(9)]
    assert {tuple(piece.ids[1:]) for piece in texts} == {(6, 7, 8)}
    (batch,) = build_stream(made, data).batches(2, 0, 1, ROWS)
    assert len(batch.labels[MASKS][0]) >= ROWS

    other = lines[0].replace("1 5 6", "1 30 6")
    (tmp_path / "valid").write_text(f"{other}\n")
    source["validation"] = str(tmp_path / "valid")
    data = open_data(recipe(corpora, {"joint": [MASKS], "steps": 3}, sources={"text": source}))
    assert len(data.train["text"][0][1].documents) == 9  # all of it
    ((_, valid, _),) = data.held_out["text"]
    assert [int(valid.read(a, b).ids[0]) for a, b in spans(valid)] == [30]


def test_another_corpus_to_evaluate_on(corpora):
    folders = [corpora / "one", corpora / "two"]
    source = {"corpus": str(folders[0]), "validation": str(folders[1])}
    made = recipe(corpora, {"joint": [MASKS], "steps": 3}, sources={"text": source})
    data = open_data(made)
    sizes = [len(corpus) for corpus in data.corpora.values()]
    assert len(data.train["text"][0][1].documents) == sizes[0]
    ((name, held, _),) = data.held_out["text"]
    assert name == str(folders[1]) and len(held.documents) == sizes[1]
    rows = build_held_out(made, data)
    assert rows.rows and {dataset.source.corpus.path for dataset in rows.datasets} == {folders[1]}


def spans(source: CorpusSource) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in zip(source.starts, source.ends, strict=True)]


SCHEDULES: dict[str, Any] = {
    "continual": {"continual": BLENDS, "steps": 12},
    "continual, budgets": {
        "continual": BLENDS,
        "steps": {BLENDS[0]: 16, BLENDS[1]: "5000 tokens", APART: "150 sequences"},
    },
    "continual+": {"continual": [MASKS, ORDER, APART], "always": MASKS, "steps": 12},
    "joint": {"joint": BLENDS, "steps": 9},
    "joint, proportional": {"joint": BLENDS, "steps": 25, "sampler": "proportional"},
    "alternate": {"alternate": BLENDS, "steps": 9},
    "alternate+": {"alternate": [ORDER, APART], "always": MASKS, "steps": 9},
    "alternate, temperature": {"alternate": BLENDS, "steps": 25, "sampler": {"temperature": 5}},
    "sequential": {"sequential": BLENDS, "steps": 7},
    "explicit": [{MASKS: 5}, {MASKS: 2, APART: 7, "mix": "step"}, {BLENDS[1]: 3, APART: 3}],
}


@pytest.mark.parametrize(
    ("name", "mix"),
    [(n, m) for n in SCHEDULES for m in ("batch", "step") if m == "step" or "alternate" not in n],
)
def test_a_run_consumes_what_its_plan_says(corpora, name, mix):
    """Every row of every step: with `mix: step` each group has exactly its steps; with `batch` its
    share of every stage's tokens, to the last window. Each example comes once, in order."""
    stages = SCHEDULES[name]
    if isinstance(stages, list):
        stages = {"explicit": [{b: n for b, n in s.items() if b != "mix"} for s in stages]}
    made = recipe(corpora, stages | {"mix": mix})
    data = open_data(made)
    resolved = resolve(made, data)
    plan, stream = resolved.curriculum, build_stream(resolved, data)
    names = [dataset.name for dataset in stream.datasets]
    seen: Counter[str] = Counter()
    steps_of: Counter[tuple[int, str]] = Counter()
    tokens_of: Counter[tuple[int, str]] = Counter()
    for step in range(plan.steps):
        stage = plan.stage_at(step)
        rows = stream.step_rows(step)
        assert len(rows) == ROWS
        task_groups = {names[dataset] for row in rows for dataset, _, _ in row}
        assert mix == "batch" or len(task_groups) == 1
        steps_of.update((stage, task_group) for task_group in task_groups)
        for row in rows:
            for dataset, _, layout in row:
                seen[names[dataset]] += 1
                tokens_of[stage, names[dataset]] += int(layout["length"])
    assert dict(seen) == stream.consumed()
    for number, stage in enumerate(plan.stages):
        for task_group, steps in stage.steps_of:
            if mix == "step":
                assert steps_of[number, task_group] == steps
            share = tokens_of[number, task_group] / (stage.steps * ROWS * LENGTH)
            assert share == pytest.approx(steps / stage.steps, abs=0.06)
    assert sum(stage.steps for stage in plan.stages) == sum(map(plan.total_of, plan.task_groups))


def bare_corpus(folder: Path, *, phrases: int, documents: int = 6, counted: bool = True) -> Path:
    """Documents of 40 words, the first with `phrases` phrases of two tokens; no entities."""
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(20))], lower=False)
    rng = np.random.default_rng(0)
    made = []
    for number in range(documents):
        annotations = {name: np.zeros(40, np.uint8) for name in ("sentence", "phrase", "entity")}
        annotations["sentence"][::10] = 1
        for start in range(0, 3 * phrases * (number == 0), 3):
            annotations["phrase"][start : start + 2] = 1, 2
        made.append(
            (f"d{number}", rng.integers(5, 25, 40), annotations | {"word": np.ones(40, np.uint8)})
        )
    write_corpus(folder, made, tokenizer)
    if not counted:  # as of an annotation that was added later
        write_manifest(folder, replace(read_manifest(folder), span_counts={}))
    return folder


@pytest.mark.parametrize("counted", [True, False])
def test_the_units_of_each_corpus_are_counted(tmp_path: Path, counted: bool) -> None:
    folder = bare_corpus(tmp_path / "bare", phrases=4, counted=counted)
    units = {MASKS: {"source": "text", "units": ["word", "phrase"]}}
    made = recipe(tmp_path, [{MASKS: 1}], tasks=units, sources={"text": {"corpus": str(folder)}})
    data = open_data(made)
    check_units(made, data)
    assert corpus_summaries(data) == [f"{folder}: 240 tokens, 240 words, 4 phrases, 0 entities"]


@pytest.mark.parametrize("counted", [True, False])
def test_a_unit_that_the_corpora_lack_is_refused(tmp_path: Path, counted: bool) -> None:
    folder = bare_corpus(tmp_path / "bare", phrases=0, counted=counted)
    sources = {"text": {"corpus": str(folder)}}
    made = recipe(tmp_path, [{MASKS: 1}], tasks={MASKS: {"source": "text"}}, sources=sources)
    with pytest.raises(UserError) as caught:
        check_units(made, open_data(made))
    assert str(caught.value).startswith(
        f"tasks.{MASKS}.units: phrase, but {folder} has none; remove it from `units`, "
    )
    words = {MASKS: {"source": "text", "units": ["token"]}, "b": {"kind": MASKS, "source": "text"}}
    words["b"]["units"] = ["word"]  # pyright: ignore[reportArgumentType]
    made = recipe(tmp_path, [{MASKS: 1}], tasks=words, sources=sources)
    check_units(made, open_data(made))


def test_one_corpus_of_a_mixture_may_lack_a_unit(tmp_path: Path) -> None:
    folders = [bare_corpus(tmp_path / f"{n}", phrases=n) for n in (0, 2)]
    mix = {"text": {"mix": {str(folder): 1.0 for folder in folders}}}
    tasks = {MASKS: {"source": "text", "units": ["word", "phrase"]}}
    made = recipe(tmp_path, [{MASKS: 1}], tasks=tasks, sources=mix)
    data = open_data(made)
    check_units(made, data)
    assert [line.split(", ")[2] for line in corpus_summaries(data)] == ["0 phrases", "2 phrases"]


@pytest.mark.parametrize("corpora", [["talk"], ["talk", "more"]])
def test_too_little_held_out_data_names_the_share(tmp_path: Path, corpora: list[str]) -> None:
    """0.01 of 150 dialogues holds out one or two, but a fake reply needs two to draw from."""
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(20))], lower=False)
    annotations = {"sentence": np.tile([1, 0, 0, 0], 3), "role": np.repeat([0, 1, 0], 4)}
    made = [(f"d{n}", np.arange(5, 17), annotations) for n in range(60)]
    for name in corpora:
        write_corpus(tmp_path / name, made, tokenizer, annotations=("sentence", "role"))
    values: dict[str, Any] = {
        "tasks": {"talk": {"kind": "dialogue_language_model", "source": "text"}},
        "sources": {"text": {"mix": {str(tmp_path / name): 1 for name in corpora}}},
    }
    few = recipe(tmp_path, [{"talk": 1}], held_out=0.001, **values)
    with pytest.raises(UserError) as caught:
        build_held_out(few, open_data(few))
    assert str(caught.value).startswith(
        f"held_out: 0.001 of {60 * len(corpora)} documents of sources.text holds out "
        f"{len(corpora)}, too few to evaluate on (tasks.talk: "
    )
    assert "increase it, or give sources.text.validation" in str(caught.value)
    enough = recipe(tmp_path, [{"talk": 1}], held_out=0.2, **values)
    assert build_held_out(enough, open_data(enough)).rows


def test_documents_of_one_sentence_are_not_blamed_on_the_held_out_share(tmp_path: Path) -> None:
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(20))], lower=False)
    annotations = {"sentence": np.array([1, *[0] * 11])}
    made = [(f"d{n}", np.arange(5, 17), annotations) for n in range(60)]
    write_corpus(tmp_path / "lines", made, tokenizer, annotations=("sentence",))
    made_recipe = recipe(
        tmp_path,
        [{"distance": 1}],
        held_out=0.2,
        tasks={"distance": {"kind": "sentence_distance", "source": "text"}},
        sources={"text": {"corpus": str(tmp_path / "lines")}},
    )
    with pytest.raises(UserError) as caught:
        build_held_out(made_recipe, open_data(made_recipe))
    message = str(caught.value)
    assert message.startswith("tasks.distance: nothing in ") and "held_out" not in message
    assert message.endswith("; tasks over sentences need several in a document that fit a row")


def test_a_missing_annotation_is_not_blamed_on_the_number_of_sentences(tmp_path: Path) -> None:
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(20))], lower=False)
    annotations = {"sentence": np.array([1, *[0] * 5] * 2)}
    made = [(f"d{n}", np.arange(5, 17), annotations) for n in range(60)]
    write_corpus(tmp_path / "texts", made, tokenizer, annotations=("sentence",))
    made_recipe = recipe(
        tmp_path,
        [{"relevance": 1}],
        held_out=0.2,
        tasks={"relevance": {"kind": "ir_relevance", "source": "text"}},
        sources={"text": {"corpus": str(tmp_path / "texts")}},
    )
    with pytest.raises(UserError) as caught:
        build_held_out(made_recipe, open_data(made_recipe))
    assert str(caught.value).endswith("--annotation heading)")


def test_held_out_tokens_are_masked_at_a_rate_of_their_own(corpora: Path) -> None:
    """The same tokens whatever the rates of the task and the stage, so that losses compare."""

    def masked(rate: float, **evaluate: float) -> list[list[int]]:
        tasks = {MASKS: {"source": "text", "rate": rate}}
        stages = [{MASKS: 2, "rate": [0.4, 0.2]}]
        made = recipe(corpora, stages, tasks=tasks, evaluate=evaluate)
        batches = build_held_out(made, open_data(made)).batches(0, 1, 4)
        return [batch.labels[MASKS][0].tolist() for _, batch in batches]

    own = masked(0.3)
    assert masked(0.3, mask_rate=0.15) == masked(0.15) != own
    assert masked(0.15, mask_rate=0.3) == own
    assert sum(map(len, own)) > 1.7 * sum(map(len, masked(0.15)))


def test_without_held_out_examples_nothing_is_evaluated(corpora: Path) -> None:
    """A probe or minimal pairs may be evaluated alone."""
    tasks = {MASKS: {"source": "text"}}
    made = recipe(corpora, [{MASKS: 1}], tasks=tasks, evaluate={"examples": 0})
    found = build_held_out(made, open_data(made))
    assert found.is_empty and evaluate(cast(Engine, Mute()), found, made.built_tasks) == {}


class Mute:
    """An engine without tasks over whole steps, alone."""

    rank, world, micro_rows = 0, 1, 4
    global_batch: Mapping[str, Any] = {}
    processes = SINGLE_PROCESS


def pairs_of(made: Recipe) -> Any:
    data = open_data(made)
    ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
    model = build_model(made, ds_config, data.vocabulary, device=torch.device("cpu"))
    return build_pairs(made, model, data.tokenizer)


def test_minimal_pairs_are_read_with_a_masked_token_task(corpora: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("w1 w2\nw1 w3 w4\n")
    asked = {"pairs": str(tmp_path / "*.txt"), "pair_score": "masked"}
    more = {"masks": {"kind": MASKS, "source": "text"}}
    tasks = {name: {"source": "text"} for name in (APART, MASKS)} | more
    stages = {"joint": [APART, MASKS, "masks"], "steps": 3}
    backbone = {"preset": "tiny", "max_positions": LENGTH, "task_types": 4}
    values: dict[str, Any] = {"tasks": tasks, "backbone": backbone}
    assert pairs_of(recipe(corpora, stages, **values)) is None
    for export, task, row in (("", MASKS, 1), (APART, MASKS, 1), ("masks", "masks", 2)):
        found = pairs_of(recipe(corpora, stages, evaluate=asked, export_task=export, **values))
        assert (found.task, found.task_id, found.score) == (task, row, "masked")
        assert [len(ids) for ids in found.sentences] == [3, 2]
        assert found.paradigms["pairs"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("task", "pairs", "message"),
    [
        (APART, "w1\nw2\n", "evaluate.pairs: no task predicts masked tokens"),
        (MASKS, "w1\n", "evaluate.pairs: {file}: 1 lines; a pair is two lines"),
        (MASKS, "w1\n" + "w1 " * 63, "evaluate.pairs: {file}:1: a sentence of 63 tokens; "),
        (MASKS, "", "evaluate.pairs: {file}: has no minimal pairs"),
    ],
)
def test_minimal_pairs_that_cannot_be_scored(
    corpora: Path, tmp_path: Path, task: str, pairs: str, message: str
) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text(pairs)
    tasks = {task: {"source": "text"}}
    made = recipe(corpora, [{task: 1}], tasks=tasks, evaluate={"pairs": str(file)})
    with pytest.raises(UserError) as error:
        pairs_of(made)
    assert str(error.value).startswith(message.format(file=file))


def test_fine_tuning_initializes_a_missing_pooler_as_transformers(
    corpora: Path, tmp_path: Path
) -> None:
    """From a plain normal distribution; in pretraining from a truncated one."""
    write_tables(tmp_path)
    table = {"table": str(tmp_path / "train.tsv"), "tokenizer": str(tmp_path / "vocab.txt")}
    fine_tuning = recipe(
        corpora,
        [{"sort": 1}],
        sources={"rows": table},
        tasks={"sort": {"kind": "classification", "source": "rows"}},
    )
    largest = {}
    for name, made in (
        ("fine-tuning", fine_tuning),
        ("pretraining", recipe(corpora, [{MASKS: 1}])),
    ):
        data = open_data(made)
        model = build_model(
            resolve(made, data), make_ds_config({}), data.vocabulary, device=torch.device("cpu")
        )
        largest[name] = float(model.backbone.pooler.dense.weight.detach().abs().max())
    assert largest["pretraining"] <= 2 * 0.02
    assert largest["fine-tuning"] > 2.5 * 0.02
