"""Recipes: read strictly, filled in with defaults; a wrong one is one clear line."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import BertConfig, BertModel

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.pretrain.sentence_order import SentenceOrder
from palm_ds.runtime.optimizer.param_groups import AllBut
from palm_ds.train.recipe.checks import idle_tasks
from palm_ds.train.recipe.recipe import make_recipe, read_recipe, read_values

GOOD = {
    "backbone": {"preset": "tiny", "max_positions": 128},
    "length": 128,
    "batch": "4096 tokens",
    "sources": {"text": {"corpus": "somewhere"}},
    "tasks": {
        "knowledge_masking": {"source": "text"},
        "sentence_reordering": {"source": "text", "most": 3},
    },
    "stages": {
        "continual": ["knowledge_masking", "sentence_reordering + knowledge_masking"],
        "steps": 30,
    },
}


LORA = (
    ({}, "lora: needs `init_from`, the weights that it adapts"),
    ({"extend": "old"}, "lora, extend: LoRA adapts weights that stay fixed; start from that run's"),
    (
        {
            "init_from": "x",
            "backbone": {"kind": "cnn", "hidden_size": 16},
        },
        "lora: backbone.kind is cnn, which has no matrices for it",
    ),
    ({"lora": {"rnak": 4}}, 'lora.rnak: unknown key; did you mean "rank"?'),
    ({"alpha": 4}, 'alpha: unknown key; did you mean "lora.alpha"?'),
)


@pytest.mark.parametrize(("changes", "error"), LORA)
def test_a_recipe_with_lora_adapts_given_weights(tmp_path, changes, error) -> None:
    path = write(tmp_path, {**GOOD, "lora": {"rank": 2}, **changes})
    with pytest.raises(UserError) as caught:
        read_recipe(path)
    assert error in str(caught.value)


class BuildsOnly(SentenceOrder):
    """A user's task without a `label` of its own."""


class LabelsToo(SentenceOrder):
    """A user's task with one."""

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        example.labels[self.name] = np.array([0]), np.array([1])


def write(folder: Path, values: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def changed(*keys: str, to: object) -> dict:
    values = copy.deepcopy(GOOD)
    at = values
    for key in keys[:-1]:
        at = at.setdefault(key, {})
    at[keys[-1]] = to
    return values


def without(key: str) -> dict:
    return {k: v for k, v in GOOD.items() if k != key}


def test_a_good_recipe_is_filled_with_defaults(tmp_path):
    recipe = read_recipe(write(tmp_path, GOOD), ["optimizer.lr=2e-4", "seed=7"])
    assert recipe.rows == 32
    assert recipe.optimizer.lr == 2e-4
    assert recipe.seed == 7
    assert recipe.task_ids == {"knowledge_masking": 0, "sentence_reordering": 1}
    resolved = recipe.resolved()
    assert resolved["tasks"]["knowledge_masking"]["units"] == ["word", "phrase", "entity"]
    assert resolved["backbone"]["hidden_size"] == 128
    again = {k: v for k, v in resolved.items() if v is not None}
    again["backbone"] = {k: v for k, v in again["backbone"].items() if v is not None}
    same = read_recipe(write(tmp_path, again))
    assert same.fingerprint == recipe.fingerprint


def test_display_settings_are_not_part_of_the_fingerprint(tmp_path):
    path = write(tmp_path, GOOD)
    plain = read_recipe(path)
    assert read_recipe(path, ["log.every=3", "save.every=5"]).fingerprint == plain.fingerprint
    assert read_recipe(path, ["seed=2"]).fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("title", "key", "value"),
    [("probe", "probe", {"table": "t.tsv"}), ("minimal pairs", "pairs", "pairs.txt")],
)
def test_an_evaluation_set_has_a_name_of_its_own(title, key, value):
    source = {
        "table": "t.tsv",
        "validation": "v.tsv",
        "evaluation_sets": {title: {"table": "e.tsv"}},
    }
    values = {
        **without("stages"),
        "sources": {"text": source},
        "tasks": {"mood": {"kind": "classification", "source": "text"}},
        "stages": [{"mood": 1}],
    }
    assert make_recipe(values).sources["text"].evaluation_sets
    with pytest.raises(
        UserError, match=f"evaluation_sets.{title}: the scores of `evaluate.{key}` h"
    ):
        make_recipe({**values, "evaluate": {key: value}})


def test_tasks_that_take_turns_have_settings_of_their_own():
    own = {"lr": 4e-3, "betas": [0.5, 0.9], "weight_decay": 0.2, "clip": 0}
    order = {"source": "text", "trains": ["heads.*"], "freeze": ["heads.a.*"], "optimizer": own}
    masks, orders = "knowledge_masking", "sentence_order"
    stages = [
        {masks: 2, orders: 2, "mix": "turns", "lr": 2e-3},
        {masks: 1, "trains": ["backbone.*"], "weight_decay": 0.3},
    ]
    values = {"tasks": {masks: {"source": "text"}, orders: order}, "stages": stages}
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "clip": 1.0}
    schedule = {"kind": "constant", "warmup": 0}
    made = make_recipe({**GOOD, **values, "optimizer": optimizer, "schedule": schedule})
    heads, encoder = AllBut(("heads.*",)), AllBut(("backbone.*",))
    wanted = [(2e-3, 0.1, (), {})] * 2 + [(1e-3, 0.3, (encoder,), {})]
    turn = (4e-3, 0.2, ("heads.a.*", heads), {"betas": (0.5, 0.9), "clip": 0})
    for step, each in enumerate([wanted[0], turn, wanted[1], turn, wanted[2]]):
        at = made.curriculum.at(step, made.seed)
        assert 1e-3 * made.lr_scale(at) == pytest.approx(each[0])
        assert 0.1 * made.decay_scale(at) == pytest.approx(each[1])
        assert (made.step_settings.frozen(at), made.step_settings.optimizer(at).of_step) == each[2:]
    assert {*made.step_settings.freezable} == {"heads.a.*", heads, encoder}
    assert make_recipe(made.resolved()).fingerprint == made.fingerprint


def test_numbers_that_yaml_reads_as_text(tmp_path):
    text = yaml.safe_dump(GOOD) + "optimizer: {lr: 5e-5}\n"
    assert read_recipe(write(tmp_path, text)).optimizer.lr == 5e-5


def test_a_task_without_a_head_has_settings_of_its_own(tmp_path):
    task = {"kind": "back_translation_masked_lm", "source": "text", "share": "knowledge_masking"}
    values = changed("tasks", "guesses", to=task | {"temperature": 0.8})
    values["stages"] = {"sequential": ["knowledge_masking", "guesses"], "steps": 3}
    assert read_recipe(write(tmp_path, values)).tasks["guesses"]["temperature"] == 0.8


def test_tasks_that_share_a_head_share_its_id(tmp_path):
    values = changed(
        "tasks",
        "phrases",
        to={
            "kind": "knowledge_masking",
            "source": "text",
            "units": ["phrase"],
            "share": "knowledge_masking",
        },
    )
    values["stages"] = {"sequential": ["knowledge_masking", "phrases"], "steps": 3}
    recipe = read_recipe(write(tmp_path, values))
    assert recipe.task_ids["phrases"] == recipe.task_ids["knowledge_masking"] == 0


def test_a_row_of_its_own_and_that_of_another_task_are_refused():
    def task_ids(own: int, owner: int, task_types: int = 4) -> dict[str, int]:
        phrases = {"kind": "knowledge_masking", "source": "text", "share": "knowledge_masking"}
        values = changed("tasks", "phrases", to={**phrases, "task_id": own})
        values["tasks"]["knowledge_masking"]["task_id"] = owner
        values["backbone"]["task_types"] = task_types
        return make_recipe(values).task_ids

    assert task_ids(-1, 2)["phrases"] == task_ids(2, 2)["phrases"] == 2
    assert task_ids(0, 0, task_types=0)["phrases"] == 0
    for own in (0, 1):
        message = (
            rf"tasks.phrases.task_id: {own}, but it uses the task embedding of "
            "tasks.knowledge_masking, row 2; set it there, or remove `share`$"
        )
        with pytest.raises(UserError, match=message):
            task_ids(own, 2)


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [
        ({}, [0, 1, 2]),
        ({"sentence_reordering": 2}, [0, 2, 1]),
        ({"knowledge_masking": 1}, [1, 0, 2]),
        ({"sentence_distance": 0}, [2, 1, 0]),
        ({"knowledge_masking": 2, "sentence_distance": 2}, [2, 1, 2]),
    ],
)
def test_no_task_gets_a_row_that_another_has_chosen(chosen, rows):
    """Two tasks shared a row of the task embedding that only one of them had named."""
    values = changed("tasks", "sentence_distance", to={"source": "text"})
    for name, row in chosen.items():
        values["tasks"][name]["task_id"] = row
    assert [*make_recipe(values).task_ids.values()] == rows


def test_a_task_behind_another_uses_the_row_that_its_texts_have(tmp_path):
    """That of its own was never trained, and yet hf/, fill-mask and embeddings used it."""
    values = changed("tasks", "retromae", to={"source": "text"})
    behind, later = "knowledge_masking + retromae", "sentence_reordering + retromae"
    for groups, row in (([behind], 0), ([behind, later], 2), (["retromae", behind], 1)):
        values["stages"] = {"sequential": [*groups, "sentence_reordering"], "steps": 3}
        ids = read_recipe(write(tmp_path, values)).task_ids
        assert ids == {"knowledge_masking": 0, "retromae": row, "sentence_reordering": 2}


def test_corpus_dependent_stages_are_checked_without_and_planned_with_corpora(tmp_path):
    task_groups = GOOD["stages"]["continual"]
    stages = {"joint": task_groups, "steps": 30, "sampler": "proportional"}
    recipe = read_recipe(write(tmp_path, changed("stages", to=stages)))
    assert recipe.curriculum_spec.task_groups == tuple(task_groups)
    with pytest.raises(UserError, match="only once the corpora are open"):
        assert recipe.curriculum
    stages["joint"] = [*task_groups, "sentence_distance"]
    with pytest.raises(UserError, match="no task 'sentence_distance'"):
        read_recipe(write(tmp_path, changed("stages", to=stages)))


def test_budgets_in_tokens_need_no_corpus(tmp_path):
    stages = {"joint": GOOD["stages"]["continual"], "steps": "40_960 tokens"}
    recipe = read_recipe(write(tmp_path, changed("stages", to=stages)))
    assert recipe.curriculum.steps == 20
    assert recipe.plan_table().splitlines()[-1].split() == ["steps", "20", "20", "81,920"]
    assert read_recipe(write(tmp_path, GOOD), ["stages.steps=9"]).curriculum.steps == 18


def test_a_source_may_be_ernie_files(tmp_path):
    source = {"ernie": "data/files.txt", "tokenizer": "vocab.txt"}
    recipe = read_recipe(write(tmp_path, changed("sources", "text", to=source)))
    assert recipe.sources["text"].weights == {"data/files.txt.corpus": 1.0}


def test_onnx_files_are_not_part_of_the_fingerprint(tmp_path):
    path = write(tmp_path, GOOD)
    for text, value in {"[]": (), "[int8]": ("int8",), "null": None}.items():
        chosen = read_recipe(path, [f"export_onnx={text}"])
        assert chosen.export_onnx == value
        assert make_recipe(chosen.resolved()).export_onnx == value
        assert chosen.fingerprint == read_recipe(path).fingerprint


def test_export_task_is_not_part_of_the_fingerprint(tmp_path):
    path = write(tmp_path, GOOD)
    chosen = read_recipe(path, ["export_task=sentence_reordering"])
    assert chosen.export_task == "sentence_reordering"
    assert chosen.fingerprint == read_recipe(path).fingerprint


WRONG = {
    "unknown key": (changed("lenght", to=3), 'lenght: unknown key; did you mean "length"'),
    "unknown nested key": (
        changed("optimizer", "beta", to=1),
        'optimizer.beta: unknown key; did you mean "betas"',
    ),
    "missing batch": (without("batch"), "batch: missing"),
    "missing tasks": (without("tasks"), "tasks: missing"),
    "missing stages": (without("stages"), "stages: missing"),
    "no tasks": (changed("tasks", to={}), "tasks: empty"),
    "batch without unit": (changed("batch", to="4096"), "batch: expected `393216 tokens`"),
    "batch a number": (changed("batch", to=64), "batch"),
    "batch no whole rows": (changed("batch", to="1000 tokens"), "use 1024 tokens"),
    "batch of nothing": (changed("batch", to="0 rows"), "'0 rows' is smaller than 1"),
    "batch of no tokens": (changed("batch", to="0 tokens"), "smaller than one row of 128 tokens"),
    "length too short": (changed("length", to=4), "length: expected 8 or more, got 4"),
    "length a word": (changed("length", to="long"), "length"),
    "length beyond positions": (
        changed("length", to=256),
        "backbone.max_positions allows only 128",
    ),
    "lr zero": (changed("optimizer", "lr", to=0), "optimizer.lr"),
    "lr a word": (changed("optimizer", "lr", to="fast"), "optimizer.lr"),
    "betas": (changed("optimizer", "betas", to=[0.9, 1.5]), "optimizer.betas"),
    "one beta": (changed("optimizer", "betas", to=[0.9]), "optimizer.betas"),
    "no eps": (
        changed("optimizer", "eps", to=0),  # 0 / 0 for a weight that has had no gradient yet
        "optimizer.eps: expected a number above 0, got 0",
    ),
    "kind of optimizer": (changed("optimizer", "kind", to="sgd"), "optimizer.kind"),
    "schedule": (changed("schedule", "kind", to="sine"), "schedule.kind"),
    "noam without warmup": (changed("schedule", "kind", to="noam"), "schedule.warmup"),
    "negative warmup": (changed("schedule", "warmup", to=-1), "schedule.warmup"),
    "held out all": (changed("held_out", to=1.0), "held_out: expected a number below 1, got 1.0"),
    "source unknown": (
        changed("tasks", "knowledge_masking", "source", to="texts"),
        "tasks.knowledge_masking.source: no 'texts' in `sources`; did you mean \"text\"",
    ),
    "source missing": (changed("tasks", "knowledge_masking", to={}), "source: missing"),
    "source without corpus": (changed("sources", "text", to={}), "sources.text"),
    "source of both kinds": (
        changed("sources", "text", to={"corpus": "a", "mix": {"b": 1}}),
        "sources.text",
    ),
    "source of no kind and a tokenizer": (
        changed("sources", "text", to={"tokenizer": "vocab.txt"}),
        "sources.text: give one of `corpus: FOLDER`",
    ),
    "ernie without tokenizer": (
        changed("sources", "text", to={"ernie": "files.txt"}),
        "sources.text: `ernie: FILELIST` and `tokenizer: vocab.txt` go together",
    ),
    "tokenizer with a corpus": (
        changed("sources", "text", to={"corpus": "a", "tokenizer": "vocab.txt"}),
        "go together",
    ),
    "export of an unknown task": (
        changed("export_task", to="knowledge_maskin"),
        "export_task: no 'knowledge_maskin' in `tasks`; did you mean \"knowledge_masking\"",
    ),
    "export of a task where no task has an embedding": (
        changed("backbone", to={"preset": "tiny", "max_positions": 128, "task_types": 0})
        | {"export_task": "knowledge_masking"},
        "export_task: backbone.task_types is 0",
    ),
    "negative weight": (changed("sources", "text", to={"mix": {"b": -1}}), "mix.b"),
    "task not found": (
        changed("tasks", "knowlege_masking", to={"source": "text"}),
        "no task 'knowlege_masking'; did you mean \"knowledge_masking\"",
    ),
    "task's key": (
        changed("tasks", "knowledge_masking", "unit", to=["word"]),
        'tasks.knowledge_masking.unit: unknown key; did you mean "units"',
    ),
    "task's value": (
        changed("tasks", "knowledge_masking", "rate", to=2),
        "rate: expected a number below 1, got 2",
    ),
    "task's unit": (
        changed("tasks", "knowledge_masking", "units", to=["letter"]),
        "tasks.knowledge_masking.units",
    ),
    "task's name": (
        changed("tasks", "a + b", to={"source": "text"}),
        "letters, digits, spaces, _ and -",
    ),
    "task is a word": (changed("tasks", "knowledge_masking", to="yes"), "expected keys"),
    "module not found": (
        changed("tasks", "mine", to={"kind": "no_such_module.Task", "source": "text"}),
        "cannot import 'no_such_module'",
    ),
    "not a task": (
        changed("tasks", "mine", to={"kind": "json.JSONDecoder", "source": "text"}),
        "not a subclass of palm_ds.data.tasks.task.Task",
    ),
    "table settings of a corpus": (
        changed("sources", "text", to={"corpus": "a", "read": {"simplify": True}}),
        "sources.text: read: is for a `table` or `reader`",
    ),
    "a new head that is another task's": (
        changed(
            "tasks",
            "a",
            to={"kind": "knowledge_masking", "source": "text", "share": "knowledge_masking"}
            | {"new_head": True},
        ),
        "tasks.a.new_head: its head belongs to tasks.knowledge_masking; set it there",
    ),
    "a batch of a task behind another": (
        changed(
            "tasks",
            to={
                "sentence_reordering": {"source": "text"},
                "knowledge_masking": {"source": "text", "batch": 4},
            },
        )
        | {"stages": [{"sentence_reordering + knowledge_masking": 3}], "batch": "8 examples"},
        "tasks.knowledge_masking.batch: 4, but 'sentence_reordering + knowledge_masking' has the",
    ),
    "shares with nobody": (
        changed("tasks", "knowledge_masking", "share", to="nobody"),
        "tasks.knowledge_masking.share",
    ),
    "shares with itself": (
        changed("tasks", "knowledge_masking", "share", to="knowledge_masking"),
        "tasks.knowledge_masking.share: names the task itself; remove it",
    ),
    "shares with a sharing task": (
        changed(
            "tasks",
            to={
                name: {"kind": "knowledge_masking", "source": "text", "share": share}
                for name, share in {"knowledge_masking": "", "a": "knowledge_masking"}.items()
            }
            | {
                "b": {"kind": "knowledge_masking", "source": "text", "share": "a"},
                "sentence_reordering": {"source": "text"},
            },
        ),
        "tasks.b.share: 'a' uses the head of 'knowledge_masking'; write 'knowledge_masking'",
    ),
    "shares a head of another kind": (
        changed(
            "tasks",
            "distance",
            to={"kind": "sentence_distance", "source": "text", "share": "knowledge_masking"},
        ),
        "tasks.distance.share: 'knowledge_masking' is another kind of task (KnowledgeMasking, not "
        "SentenceDistance)",
    ),
    "two classes on another head of two classes": (
        changed(
            "tasks",
            to={
                "knowledge_masking": {"source": "text"},
                "sentence_reordering": {"source": "text"},
                "sentence_order": {"source": "text"},
                "next": {
                    "kind": "next_sentence_prediction",
                    "source": "text",
                    "share": "sentence_order",
                },
            },
        ),
        "tasks.next.share: 'sentence_order' is another kind of task",
    ),
    "shares a head of fewer classes": (
        changed(
            "tasks",
            "more",
            to={
                "kind": "sentence_reordering",
                "source": "text",
                "most": 4,
                "share": "sentence_reordering",
            },
        ),
        "tasks.more.most: 4, but the head is that of tasks.sentence_reordering, whose most is 3",
    ),
    "share in a circle": (
        changed(
            "tasks",
            to={
                "a": {"kind": "knowledge_masking", "source": "text", "share": "b"},
                "b": {"kind": "knowledge_masking", "source": "text", "share": "a"},
            },
        )
        | {"stages": [{"a": 3}]},
        "tasks.a.share: a -> b -> a: none of them has a head",
    ),
    "a group in the wrong order": (
        changed("stages", to=[{"knowledge_masking + sentence_reordering": 3}]),
        "write 'sentence_reordering + knowledge_masking'",
    ),
    "a group in the wrong order by always": (
        changed(
            "stages",
            to={"joint": ["knowledge_masking"], "steps": 3, "always": "sentence_reordering"},
        ),
        "write 'sentence_reordering + knowledge_masking'",
    ),
    "a group of tasks that all build their texts": (
        changed("tasks", "sentence_distance", to={"source": "text"})
        | {"stages": [{"sentence_distance + sentence_reordering + knowledge_masking": 3}]},
        "sentence_reordering labels only examples that it builds itself, and the first task of a "
        "group builds them; write 'sentence_distance + knowledge_masking' and "
        "'sentence_reordering + knowledge_masking'",
    ),
    "a user's task that builds its texts": (
        changed("tasks", "own", to={"source": "text", "kind": f"{__name__}.BuildsOnly"})
        | {"stages": [{"knowledge_masking + own": 3}]},
        "write 'own + knowledge_masking'",
    ),
    "a group without weight": (
        changed("tasks", "knowledge_masking", "weight", to=0),
        "stages: 'knowledge_masking' would train nothing: the `weight` of its tasks is 0",
    ),
    "a weight below 0": (
        changed("tasks", "knowledge_masking", "weight", to=-1),
        "weight: expected 0 or more, got -1",
    ),
    "an optimizer of its own in steps of many tasks": (
        changed("tasks", "knowledge_masking", "optimizer", to={"lr": 1e-3}),
        "tasks.knowledge_masking.optimizer: its stages need `mix: step` or `turns`",
    ),
    "tasks of a group that train other parameters": (
        changed("tasks", "knowledge_masking", "trains", to=["heads.*"])
        | {"stages": [{"sentence_reordering + knowledge_masking": 3, "mix": "turns"}]},
        "tasks.knowledge_masking.trains: differs from that of tasks.sentence_reordering, which "
        "trains in the same steps; make them equal",
    ),
    "betas of an optimizer of one's own": (
        changed("tasks", "knowledge_masking", "optimizer", to={"betas": [0.5, 0.9]})
        | {"stages": [{"knowledge_masking": 3, "mix": "step"}]}
        | {"optimizer": {"kind": "torch.optim.SGD", "weight_decay": 0.1}},
        "tasks.knowledge_masking.optimizer.betas: not used by torch.optim.SGD",
    ),
    "decay where there is none": (
        changed("tasks", "knowledge_masking", "optimizer", to={"weight_decay": 0.1})
        | {"stages": [{"knowledge_masking": 3, "mix": "step"}], "optimizer": {"weight_decay": 0}},
        "tasks.knowledge_masking.optimizer.weight_decay: optimizer.weight_decay is 0",
    ),
    "a length of yes": (changed("length", to=True), "length: expected a whole number, got true"),
    "three betas": (
        changed("optimizer", "betas", to=[0.9, 0.9, 0.9]),
        "optimizer.betas: expected 2 values, got [0.9, 0.9, 0.9]",
    ),
    "folds of no table": (
        changed("sources", "text", "folds", to={"count": 3, "held_out": 1}),
        "sources.text: folds: needs `table`, whose rows it splits",
    ),
    "no sources": (changed("sources", to={}), "no 'text' in `sources`; known: none"),
    "a row before the first": (
        changed("tasks", "knowledge_masking", "task_id", to=-7),
        "tasks.knowledge_masking.task_id: expected -1 or more, got -7",
    ),
    "a data set that none can be": (
        changed("datasets", to=["my texts"]),
        "datasets: expected data sets of the hub as owner/name, got 'my texts'",
    ),
    "a mask rate without masks": (
        changed("stages", to=[{"order": 3}])
        | {"tasks": {"order": {"kind": "sentence_order", "source": "text"}}}
        | {"evaluate": {"mask_rate": 0.15}},
        "evaluate.mask_rate: no task masks tokens at a rate; remove it",
    ),
    "queries within windows": (
        changed("stages", to=[{"next": 3}])
        | {"tasks": {"next": {"kind": "cross_attention_masked_lm", "source": "text"}}}
        | {"backbone": {"preset": "modern-tiny", "max_positions": 128}},
        "tasks.next: modernbert has windows of attention, and this task's queries or masks stand "
        "far from what they attend to; use an encoder without windows",
    ),
    "n-grams asked for within windows": (
        changed("stages", to=[{"grams": 3}])
        | {
            "tasks": {
                "grams": {
                    "kind": "explicit_ngram_masking",
                    "source": "text",
                    "lexicon": "x",
                    "comprehensive": True,
                }
            }
        }
        | {"backbone": {"preset": "modern-tiny", "max_positions": 128}},
        "use an encoder without windows, or set comprehensive: false",
    ),
    "a mask rate of all tokens": (
        changed("evaluate", to={"mask_rate": 1}),
        "evaluate.mask_rate: expected a number below 1, got 1",
    ),
    "best checkpoints of which few are evaluated": (
        changed("save", to={"best": 2, "every": 100}),
        "save.best: compares checkpoints that are evaluated, but save.every is 100 and "
        "evaluate.every 0; make the first a multiple of the second",
    ),
    "a weight that is no number": (
        changed("tasks", "knowledge_masking", "weight", to=float("nan")),
        "tasks.knowledge_masking.weight: expected a finite number, got NaN",
    ),
    "lr that is no number": (
        changed("optimizer", "lr", to=float("nan")),
        "optimizer.lr: expected a finite number, got NaN",
    ),
    "stage of unknown task": (
        changed("stages", to={"joint": ["knowledge_maskin"], "steps": 3}),
        'did you mean "knowledge_masking"',
    ),
    "preset": (changed("backbone", "preset", to="ernie"), "backbone.preset"),
    "presets": (changed("backbone", "preset", to=["tiny"]), "backbone.preset"),
    "more segments than rows": (
        changed("backbone", "token_types", to=2),
        "tasks.sentence_reordering: its texts have 3 segments, but backbone.token_types is 2",
    ),
    "two origins": (changed("extend", to="runs/a") | {"init_from": "runs/b"}, "leave one out"),
    "heads and width": (changed("backbone", "num_heads", to=3), "heads"),
    "too many tasks for the table": (changed("backbone", "task_types", to=1), "task_types is 1"),
    "nonfinite": (changed("nonfinite", to="ignore"), "nonfinite"),
    "keep nothing": (changed("save", "keep", to=0), "save.keep"),
    "a list": ("- a\n- b\n", 'expected keys and values, got ["a", "b"]'),
    "not YAML": ("a: [1, 2\nb: 3\n", "not valid YAML"),
    "a key twice": ("seed: 1\nseed: 2\n", ':2: not valid YAML: duplicate key "seed"'),
    "empty": ("", "expected keys and values"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_recipe_is_one_clear_line(tmp_path, case):
    values, message = WRONG[case]
    path = write(tmp_path, values)
    with pytest.raises(UserError) as error:
        read_recipe(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr", "expected key=value"),
        ("=3", "expected key=value"),
        ("seed.a=3", "`seed` is not a section"),
        ("optimizer.lr=[1", "not valid YAML"),
        ("optimizer.rate=3", "optimizer.rate: unknown key"),
    ],
)
def test_wrong_overrides(tmp_path, override, message):
    values = changed("seed", to=1)
    with pytest.raises(UserError) as error:
        read_recipe(write(tmp_path, values), [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_users_task_with_a_label_may_come_second(tmp_path):
    values = changed("tasks", "own", to={"source": "text", "kind": f"{__name__}.LabelsToo"})
    values["stages"] = [{"knowledge_masking + own": 3}]
    assert read_recipe(write(tmp_path, values)).curriculum.steps == 3


def test_tasks_that_are_not_trained_are_named(tmp_path):
    values = changed("tasks", "knowledge_masking", "weight", to=0)
    values["tasks"]["idle"] = {"source": "text", "kind": "sentence_order"}
    values["tasks"]["words"] = {
        "source": "text",
        "kind": "knowledge_masking",
        "share": "knowledge_masking",
    }
    values["stages"] = [{"sentence_reordering + knowledge_masking": 3}]
    recipe = read_recipe(write(tmp_path, values))
    assert idle_tasks(recipe.built_tasks, recipe.curriculum.task_groups) == [
        "note: tasks.idle is not trained: it is in no stage",
        "note: tasks.knowledge_masking is not trained: its weight is 0",
        "note: tasks.words is not trained: it is in no stage",
    ]


def test_more_steps_than_anyone_trains(tmp_path):
    values = changed("stages", to=[{"knowledge_masking": 10**15}])
    recipe = read_recipe(write(tmp_path, values))
    with pytest.raises(UserError, match="1,000,000,000,000,000 steps in all; at most"):
        assert recipe.curriculum


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "given", [{"token_types": 3}, {"task_types": 4, "token_types": 4, "dropout": 0.0}]
)
def test_the_encoder_of_init_from_with_more_types(given, tmp_path):
    shape = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=37)
    BertModel(BertConfig(**shape, intermediate_size=24)).save_pretrained(tmp_path / "bert")
    values = changed("backbone", to=given) | {"init_from": str(tmp_path / "bert")}
    config = read_recipe(write(tmp_path, values)).backbone_config
    assert (config.hidden_size, config.num_layers, config.num_heads) == (16, 3, 2)
    assert config.task_types == given.get("task_types", 0)
    assert config.token_types == given["token_types"]
    assert config.dropout == given.get("dropout", 0.1)


def test_a_size_is_a_set_of_overrides(tmp_path: Path) -> None:
    """Before those of the command line, wherever it stands among them; the last one counts."""
    file = tmp_path / "recipe.yaml"
    sizes = {"large": {"optimizer.lr": 2e-5, "batch": "8 rows"}, "small": {"length": 64}}
    file.write_text(yaml.safe_dump({"batch": "4 rows", "optimizer": {"clip": 1.0}, "sizes": sizes}))
    assert read_values(file) == {"batch": "4 rows", "optimizer": {"clip": 1.0}}
    large = {"batch": "8 rows", "optimizer": {"clip": 1.0, "lr": 2e-5}}
    assert read_values(file, ["size=large"]) == large
    assert read_values(file, ["batch=2 rows", "size=small", "size=large"]) == {
        **large,
        "batch": "2 rows",
    }
    with pytest.raises(UserError, match=r"recipe.yaml: size=huge: no such size; known: large, sma"):
        read_values(file, ["size=huge"])
    file.write_text("batch: 4 rows\n")
    with pytest.raises(UserError, match=r"size=large: no such size; the recipe has no `sizes`"):
        read_values(file, ["size=large"])
    file.write_text("sizes: [large]\n")
    with pytest.raises(UserError, match=r"sizes: expected \{size: \{key: value\}\}"):
        read_values(file, ["size=large"])
