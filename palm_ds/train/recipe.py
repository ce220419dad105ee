"""A recipe: the one YAML that says what is learned. Read strictly, filled, comparable.

recipe.yaml + a.b=c overrides ──read──> Recipe ──resolve──> plain mapping (recipe.yaml of the run
                                                            folder; --print_config)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from palm_ds.common.config import override, parse, parse_override, read_yaml
from palm_ds.common.errors import UserError, suggest
from palm_ds.data.reader import TableSettings
from palm_ds.data.stages import Outline, Plan, StepInfo, parse_stages, tasks_of
from palm_ds.data.task import Task, build
from palm_ds.model.config import EncoderConfig
from palm_ds.model.encoder import encoder_class
from palm_ds.runtime.optimizer import OptimizerConfig
from palm_ds.train.lr_schedule import LRSchedule
from palm_ds.weights.formats.open import read_info

_ENCODER_CLASS = {"kind", "options"}  # keys of `backbone` that are not hyperparameters
NOT_LEARNED = ("evaluate", "save", "log", "export_task")
"""Keys that change nothing of what is learned: a run may be continued with others."""


def _not_negative(where: str, values: Any) -> None:
    for each in dataclasses.fields(values):
        if getattr(values, each.name) < 0:
            raise UserError(f"{where}.{each.name}: {getattr(values, each.name)} is negative")


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """A table to evaluate on beside the validation rows."""

    table: str | list[str]
    """As a source's `table`."""
    read: TableSettings | None = None
    """How it is read; by default as the source's rows."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Where a source's text comes from: one prepared corpus, a mixture of them, ERNIE 1.0's own
    data files, or a table of rows."""

    corpus: str = ""
    """Folder of a corpus made by palm-ds prepare."""
    mix: dict[str, float] = field(default_factory=dict)
    """{folder: weight}: several corpora, sampled by weight in tokens."""
    ernie: str = ""
    """A list of ERNIE 1.0's pretraining files. A corpus is made of them beside it, as FILE.corpus,
    when it is first read."""
    table: str | list[str] = ""
    """A file of rows, several of them, a pattern such as `data/*.tsv`, or a folder that `datasets`
    saved (docs/finetuning.md)."""
    read: TableSettings = TableSettings()
    """With `table`: how it is read."""
    tokenizer: str = ""
    """With `ernie`: the vocabulary its token ids are of, a vocab.txt. With `table`: the vocabulary
    its texts are read with; by default that of `init_from`."""
    validation: str | list[str] = ""
    """Another corpus (with `ernie`: another list; with `table`: another table) to evaluate on; then
    nothing of the source itself is held out."""
    evaluation_sets: dict[str, EvaluationSet] = field(default_factory=dict)
    """With `table`: {name: {table: FILE}}: more tables to evaluate on, such as `test`. Each is
    reported apart, as `task (name)`; `validation` alone decides which weights are best."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.corpus, self.mix, self.ernie, self.table))) != 1:
            raise UserError(
                "give one of `corpus: FOLDER`, `mix: {FOLDER: weight, ...}`, `ernie: FILELIST` and "
                "`table: FILE`"
            )
        if not self.table and bool(self.ernie) != bool(self.tokenizer):
            raise UserError("`ernie: FILELIST` and `tokenizer: vocab.txt` go together")
        if self.evaluation_sets and not (self.table and self.validation):
            raise UserError(
                "evaluation_sets: further tables beside `validation`; give `table` and `validation`"
            )
        for folder, weight in self.mix.items():
            if weight <= 0:
                raise UserError(f"mix.{folder}: the weight {weight} is not positive")

    @property
    def weights(self) -> dict[str, float]:
        """{folder: weight} of the corpora; the folder of `ernie` is made when it is opened."""
        return self.mix or {self.corpus or f"{self.ernie}.corpus": 1.0}

    @property
    def validation_folder(self) -> str:
        """The corpus to evaluate on; empty: documents held out of the source's own."""
        return f"{self.validation}.corpus" if self.ernie and self.validation else self._one_folder

    @property
    def _one_folder(self) -> str:
        if not isinstance(self.validation, str):
            raise UserError("validation: of a corpus it is one folder")
        return self.validation

    @property
    def reads(self) -> str:
        """What tasks see of it."""
        return "table" if self.table else "corpus"


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Validation on held-out documents: loss, perplexity and accuracy of every task."""

    every: int = 0
    """Steps between two evaluations; 0: at the end of each stage only."""
    examples: int = 1000
    """Held-out examples of every blend over corpora; of tables every row is evaluated."""
    best: str = ""
    """Whose weights a run ends with: `task.metric`, or `mean` of the first metric of every task
    that is not auxiliary, where it was best; empty: those of the last step. Loss counts the other
    way round."""
    patience: int = 0
    """With `best`: stop after so many evaluations without a better one; 0: never."""

    def __post_init__(self) -> None:
        for name in ("every", "examples", "patience"):
            if getattr(self, name) < 0:
                raise UserError(f"evaluate.{name}: {getattr(self, name)} is negative")
        if self.patience and not self.best:
            raise UserError("evaluate.patience: set `best` as well: better in what?")


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """Checkpoints."""

    every: int = 1000
    """Steps between two checkpoints; 0: at the end only."""
    keep: int = 2
    """How many of the newest checkpoints stay."""

    def __post_init__(self) -> None:
        _not_negative("save", self)
        if self.keep < 1:
            raise UserError("save.keep: at least 1 checkpoint must stay")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is shown and written while a run goes on."""

    every: int = 10
    """Steps between two lines; the numbers of the steps between are averaged."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"log.every: {self.every} is not a positive number of steps")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is learned. How the machine computes it (ZeRO, precision,
    micro-batches) stands in a ds_configs file; no number stands in both."""

    seed: int = 1
    """Decides weights, order, masks and dropout."""
    backbone: dict[str, Any] = field(default_factory=dict)
    """The encoder: `preset: NAME` and any of its numbers (the keys of `backbone`, below); empty:
    that of `init_from`."""
    length: int = 512
    """Tokens of a packed row."""
    batch: str
    """Of one step, over all processes: `393216 tokens` or `768 rows`; or `32 examples` of each
    blend, packed into as few rows as they need."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated."""
    schedule: LRSchedule = LRSchedule()
    """How the learning rate moves."""
    sources: dict[str, SourceSettings]
    """{name: {corpus: FOLDER} or {table: FILE}}: the texts, by names that tasks refer to."""
    held_out: float = 0.01
    """Share of every corpus's documents, and every table's rows, that is kept from training, for
    evaluation."""
    tasks: dict[str, dict[str, Any]]
    """{name: {kind, source, ...}}: the tasks; `kind` is a file of palm_ds/pretrain or palm_ds/tasks
    (by default the name) or `module.Class`; the other keys are the task's own."""
    stages: Any
    """Steps of each blend in each stage: {continual | joint | alternate | sequential: [blend, ...],
    steps: B} or a list of {blend: steps}; more under `stages`, below."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """When a loss or gradient is not finite (never applied to the weights): stop the run, skip the
    step, or go back to the last checkpoint and skip the steps that led there."""
    init_from: str = ""
    """A folder of weights to start from (weights only; the schedule starts anew)."""
    extend: str = ""
    """A run folder to start from with weights, optimizer state and place in the data, as its newest
    checkpoint has them; this recipe has a task or a corpus more (`--extend`)."""
    export_task: str = ""
    """The task whose task embedding texts get that say no other: row 0 of `hf/`, and the default of
    fine-tuning. By default the first task of masked words."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Validation on held-out documents."""
    save: SaveSettings = SaveSettings()
    """Checkpoints."""
    log: LogSettings = LogSettings()
    """What is shown."""

    def __post_init__(self) -> None:
        if self.length < 8:
            raise UserError(f"length: rows of {self.length} tokens are too short; at least 8")
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out: {self.held_out} is not a share from 0 to below 1")
        if not self.tasks:
            raise UserError("tasks: empty; name at least one")
        if self.extend and self.init_from:
            raise UserError("extend, init_from: a run starts from one of the two; leave one out")
        assert self.step_size and self.outline.blends and self.backbone_config  # each checks itself
        assert encoder_class(self.backbone_config)
        for name, task in self.built_tasks.items():
            self._check_task(name, task)
        if self.export_task and self.export_task not in self.tasks:
            known = suggest(self.export_task, self.tasks)
            raise UserError(f"export_task: no {self.export_task!r} in `tasks`{known}")
        if self.export_task and not self.backbone_config.task_types:
            raise UserError("export_task: backbone.task_types is 0, there are no task embeddings")
        if self.examples and self.outline.counts_tokens:
            raise UserError("stages: a step is so many examples; count in steps, sequences, epochs")
        for blend in self.outline.blends:
            shared = {self.built_tasks[name].source for name in tasks_of(blend)}
            if len(shared) > 1:
                raise UserError(
                    f"stages: the tasks of {blend!r} read different sources "
                    f"({', '.join(sorted(shared))}); a blend shares its text"
                )
            first = self.built_tasks[tasks_of(blend)[0]]
            if first.segments > self.backbone_config.token_types:
                raise UserError(
                    f"tasks.{first.name}: its texts have {first.segments} segments, but "
                    f"backbone.token_types is {self.backbone_config.token_types}"
                )

    def _check_task(self, name: str, task: Task) -> None:
        if task.source not in self.sources:
            known = suggest(task.source, self.sources)
            raise UserError(f"tasks.{name}.source: no {task.source!r} in `sources`{known}")
        if task.share and task.share not in self.tasks:
            known = suggest(task.share, self.tasks)
            raise UserError(f"tasks.{name}.share: no {task.share!r} in `tasks`{known}")
        if task.share and task.head_lr:
            raise UserError(
                f"tasks.{name}.head_lr: its head is that of tasks.{task.share}; set it there"
            )
        if (found := self.sources[task.source].reads) != task.reads:
            raise UserError(
                f"tasks.{name}: it reads a {task.reads}, but sources.{task.source} is a {found}"
            )
        if task.batch and not self.examples:
            raise UserError(f"tasks.{name}.batch: for this let `batch` count in examples as well")
        mixes = {mix for b, mix in self.outline.mix_of.items() if name in tasks_of(b)}
        if task.freeze and mixes != {"step"}:
            raise UserError(f"tasks.{name}.freeze: its stages need `mix: step`")
        if task.task_id >= max(self.backbone_config.task_types, 1):
            slots = self.backbone_config.task_types
            raise UserError(
                f"tasks.{name}.task_id: {task.task_id}, but the task embedding has {slots} rows"
            )

    @cached_property
    def step_size(self) -> tuple[int, str]:
        """What `batch` says: a number, and rows or examples."""
        match = re.fullmatch(r"([\d_]+)\s*(tokens|rows|examples)", str(self.batch).strip())
        if not match:
            raise UserError(
                f"batch: {self.batch!r} is not like `393216 tokens`, `768 rows` or `32 examples`"
            )
        number, unit = int(match[1].replace("_", "")), match[2]
        if unit == "tokens" and number % self.length:
            near = max(round(number / self.length), 1) * self.length
            raise UserError(
                f"batch: {number} tokens are no whole number of rows of length {self.length}; "
                f"take {near} tokens"
            )
        number = number // self.length if unit == "tokens" else number
        if number < 1:
            raise UserError(f"batch: {self.batch!r} holds not one row of length {self.length}")
        return number, "examples" if unit == "examples" else "rows"

    @property
    def rows(self) -> int:
        """Rows of a step, over all processes; 0 where it is so many examples."""
        number, unit = self.step_size
        return number if unit == "rows" else 0

    @property
    def examples(self) -> int:
        """Examples of a step, of each blend; 0 where it is so many rows."""
        number, unit = self.step_size
        return number if unit == "examples" else 0

    def examples_of(self, blend: str) -> int:
        """Examples of a step of this blend: as its first task has it, or the recipe."""
        return self.built_tasks[tasks_of(blend)[0]].batch or self.examples

    def lr_scale(self, at: StepInfo) -> float:
        """The multiplier of `optimizer.lr` at a step."""
        return self.schedule.scale(at, self.plan.steps)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all processes; 1 where a step is so many examples."""
        return self.rows * self.length or 1

    @cached_property
    def outline(self) -> Outline:
        """The stages as written, checked."""
        return parse_stages(self.stages, list(self.tasks))

    @cached_property
    def plan(self) -> Plan:
        """The stages in steps. Raises UserError where that takes the corpora: see
        train.resolve.resolve."""
        return self.outline.plan(self.step_tokens)

    def plan_table(self) -> str:
        """The plan, its tokens and its warm-ups, for a person."""
        tokens = self.step_tokens if self.rows else 0
        return self.plan.table(step_tokens=tokens, warmups=self.schedule.warmups(self.plan))

    @cached_property
    def built_tasks(self) -> dict[str, Task]:
        return {name: build(name, values) for name, values in self.tasks.items()}

    @cached_property
    def backbone_config(self) -> EncoderConfig:
        """The encoder's numbers; no vocabulary where the recipe leaves it to the corpus."""
        config = EncoderConfig.from_dict(self.backbone)
        if self.length > config.max_length:
            raise UserError(
                f"length: rows of {self.length} tokens, but backbone.max_positions gives only "
                f"{config.max_length}"
            )
        return config

    @cached_property
    def task_ids(self) -> dict[str, int]:
        """The row of the task embedding of each task: as it says, else in the recipe's order (tasks
        over tables: row 0), shared where the head is; 0 for all without a task embedding."""
        slots = self.backbone_config.task_types
        ids: dict[str, int] = {}
        for name, task in self.built_tasks.items():
            if not task.share:
                given = task.task_id if task.task_id >= 0 or task.reads == "corpus" else 0
                ids[name] = (given if given >= 0 else len(ids)) if slots else 0
        if slots and max(ids.values(), default=0) >= slots:
            raise UserError(f"tasks: {len(ids)} of them, but backbone.task_types is {slots}")
        shared = {name: task.share for name, task in self.built_tasks.items() if task.share}
        for name, other in shared.items():
            if other not in ids:
                raise UserError(f"tasks.{name}.share: {other!r} itself shares; name its origin")
            ids[name] = ids[other]
        return ids

    def resolved(self) -> dict[str, Any]:
        """The whole recipe as a plain mapping, every default filled in."""
        plain = asdict(self)
        plain["backbone"] = asdict(self.backbone_config)
        plain["tasks"] = {
            name: {"kind": self.tasks[name].get("kind", name)}
            | {k: v for k, v in asdict(task).items() if k != "name"}
            for name, task in self.built_tasks.items()
        }
        return json.loads(json.dumps(plain, default=list))

    def learned(self) -> dict[str, Any]:
        """What of the resolved recipe decides the loss curve."""
        return {k: v for k, v in self.resolved().items() if k not in NOT_LEARNED}

    @property
    def fingerprint(self) -> str:
        text = json.dumps(self.learned(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe file with `a.b=c` overrides: the only reader of recipes. Raises UserError that names
    the file and the key."""
    return make_recipe(read_values(path, overrides), str(path))


def read_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What stands in a recipe file, with the overrides in their places."""
    values = read_yaml(path)
    for text in overrides:
        key, value = parse_override(text)
        override(values, key, value)
    return values


def make_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A recipe from a mapping; `where` names its file in errors. Without an encoder of its own it
    gets that of `init_from`."""
    try:
        recipe = parse(Recipe, _with_encoder(values), "")
        assert recipe.task_ids  # checks itself
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return recipe


def _with_encoder(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with the encoder of `init_from`, if it names none or only a class for it."""
    given = values.get("backbone") or {}
    start = values.get("init_from")
    if not start or not isinstance(given, Mapping) or not given.keys() <= _ENCODER_CLASS:
        return values
    try:
        config = read_info(str(start)).backbone
    except UserError as error:
        raise UserError(f"init_from: {error}") from None
    return {**values, "backbone": {**asdict(config), **given}}
