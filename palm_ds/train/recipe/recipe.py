"""A recipe: one YAML file with everything that decides what a run learns.

recipe.yaml + a.b=c overrides ──read_recipe──> Recipe ──resolved──> plain mapping (recipe.yaml of
                                                                    the run folder; --print_config)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from palm_ds.common.config import override, parse, parse_override, read_yaml
from palm_ds.common.errors import UserError
from palm_ds.common.files import fingerprint
from palm_ds.common.settings import Rate, Settings
from palm_ds.data.stream.curriculum_spec import CurriculumSpec, parse_stages
from palm_ds.data.stream.stages import Curriculum, StepInfo, tasks_of
from palm_ds.data.stream.windows import DocumentSettings
from palm_ds.data.tasks.task import Task, build
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import is_custom, shipped_class
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.model.encoder.encoder import encoder_class, memory_shape
from palm_ds.model.lora import LoraSettings
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.train.recipe.checks import (
    TaskChecks,
    assign_task_ids,
    check_best_kept,
    check_data_set_names,
    check_evaluation_sets,
    check_export_task,
    check_lora,
    check_mask_rate,
)
from palm_ds.train.recipe.custom_metrics import OwnMetrics, import_metrics
from palm_ds.train.recipe.documents import check_documents
from palm_ds.train.recipe.lr_schedule import LRSchedule
from palm_ds.train.recipe.sections import (
    BatchSize,
    EvaluateSettings,
    LogSettings,
    SaveSettings,
    SourceSettings,
    SpikeSettings,
)
from palm_ds.train.recipe.stage_settings import StagePlan, StepSettings
from palm_ds.train.report.trackers import TrackSettings
from palm_ds.weights.formats.foreign_config import read_encoder_config
from palm_ds.weights.model_folder import encoder_config

_RATES = {"dropout", "attention_dropout", "init_range"}
_OVER_INIT_FROM = {"kind", "options", "task_types", "token_types", *_RATES}
"""Keys of `backbone` that may stand alone: all others are then those of `init_from`."""
_EXPORTED = ("export_task", "export_family", "export_heads", "export_onnx", "datasets")
NOT_LEARNED = ("evaluate", "save", "log", "track", *_EXPORTED)
"""Keys that do not affect what is learned; a run may be resumed with other values of them."""
CHANGEABLE = ("optimizer.lr", "optimizer.clip", "nonfinite", "loss_spike", "failure_limit")
"""Keys that a run that has not finished may be resumed with other values of; that is recorded."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Everything that decides what is learned. How it is computed (ZeRO, precision, micro-batches)
    is set in a DeepSpeed file; no setting is in both."""

    seed: int = 1
    """Determines initial weights, data order, masks and dropout."""
    backbone: dict[str, Any] = field(default_factory=dict)
    """The encoder: `preset: NAME`, any hyperparameters (the keys of `backbone`, below), or both.
    Empty, or with only `task_types`, `token_types` or dropout: that of `init_from`."""
    length: Annotated[int, Field(ge=8)] = 512
    """Tokens of a packed row, or of a window of a document."""
    documents: DocumentSettings | None = None
    """How an encoder with memories (`kind: ernie_doc`) reads documents, window by window; such an
    encoder reads nothing else. Default: the defaults of `documents`, below."""
    batch: str
    """Size of a step over all processes: `393216 tokens` or `768 rows`; or `32 examples` of each
    task group, packed into as few rows as possible."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated."""
    lora: LoraSettings | None = None
    """Train only LoRA adapters and the heads, with the encoder's weights frozen: `{rank: 8,
    alpha: 16, targets: [query, value]}`. Needs `init_from`, and the package peft. Default: train
    all weights."""
    schedule: LRSchedule = LRSchedule()
    """How the learning rate changes over the run."""
    sources: dict[str, SourceSettings]
    """{name: {corpus: FOLDER} or {table: FILE}}: the texts, under names that `tasks` refer to."""
    held_out: Rate = 0.01
    """Share of the documents of each corpus, and of the rows of each table, that is held out of
    training for evaluation."""
    tasks: dict[str, dict[str, Any]]
    """{name: {kind, source, ...}}: the tasks. `kind` is one of those under `tasks.NAME`, below
    (default: the task's name), or `module.Class`; the other keys are the settings of that kind."""
    stages: Any
    """Steps of each task group in each stage: {continual | joint | alternate | sequential: [group,
    ...], steps: B} or a list of {group: steps}; more under `stages`, below."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do about a non-finite loss or gradient, which never reaches the weights: `stop` the
    run, `skip` the step, or `rollback` to the last checkpoint from before the losses rose and leave
    out the data of the steps since then."""
    loss_spike: SpikeSettings = SpikeSettings()
    """What to do when the loss of a task jumps."""
    failure_limit: NonNegativeInt = 5
    """The run stops after more than this many non-finite steps (`nonfinite: skip`) or rollbacks in
    a row."""
    teacher: TeacherSettings | None = None
    """Distillation: train on the outputs of larger models for the same texts too, as in `{path:
    RUN}` (docs/distillation.md)."""
    init_from: str = ""
    """A run or checkpoint whose weights to start from. Only the weights: the schedule starts at
    step 0."""
    init_layers: list[int] | None = None
    """The layers of `init_from` with which to initialize this encoder's layers, in order: `[0, 5,
    11]`; `num_layers` is then their number. `[]`: the embeddings alone. Default: all layers."""
    extend: str = ""
    """A run to continue from its newest checkpoint, with its weights, optimizer state and position
    in the data, by a recipe that adds a task or a corpus (`--extend`)."""
    export_task: str = ""
    """The task whose task embedding is used where no task is named: in `hf/`, and by default in
    fine-tuning. Default: the task that trains text embeddings, else the first masked-LM task."""
    export_family: Literal["bert", "ernie"] = "bert"
    """The model type of `hf/` if the encoder has task embeddings. bert: the row of `export_task`
    (or of the exported head's task) is added to the token type embeddings, which every program can
    open. ernie: all rows are kept. Without task embeddings `hf/` is a Bert or Roberta model."""
    export_heads: bool = False
    """Also write `hf_heads/TASK/`, a Hugging Face folder for each task over a table whose head has
    a class in transformers. In a run with several heads, `hf/` holds the encoder alone."""
    export_onnx: tuple[Literal["fp32", "fp16", "int8"], ...] | None = None
    """Files of `hf/onnx/`: always model.onnx (fp32), and those named here. Needs palm_ds[onnx].
    Default: fp32, if that is installed and the weights are below 2 GB. `[]`: none."""
    datasets: tuple[str, ...] = ()
    """Data sets on the hub, as `owner/name`, to name in the model card of `hf/`. It lists those of
    hf:// sources and of rows loaded by the package `datasets` anyway."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation on held-out data."""
    save: SaveSettings = SaveSettings()
    """When to save checkpoints, and which to keep."""
    log: LogSettings = LogSettings()
    """Log lines."""
    track: TrackSettings = TrackSettings()
    """Experiment trackers: `{wandb: {project: mine}}`, `{mlflow: {experiment: mine}}`,
    `{trackio: {project: mine}}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise UserError("tasks: empty; name at least one")
        if self.init_layers is not None and not self.init_from:
            raise UserError("init_layers: needs `init_from`, whose layers they are")
        if self.extend and self.init_from:
            raise UserError("extend, init_from: a run starts from one of the two; leave one out")
        _ = self.batch_size, self.curriculum_spec.task_groups  # these check themselves
        encoder_class(self.backbone_config)
        if self.lora:
            check_lora(self.lora, self.init_from, self.extend, self.backbone_config)
        checks = TaskChecks(
            tasks=self.built_tasks,
            sources=self.sources,
            spec=self.curriculum_spec,
            encoder=self.backbone_config,
            batch=self.batch_size,
            taught=self.teacher is not None,
            drops=_drops(self.backbone_config, self.lora),
        )
        checks.check_tasks()
        check_export_task(self.export_task, self.tasks, self.backbone_config)
        check_data_set_names(self.datasets)
        check_best_kept(self.save, self.evaluate, self.stage_plan.written)
        check_mask_rate(self.evaluate, self.built_tasks)
        check_evaluation_sets(self.sources, self.evaluate)
        _check_amounts(self)
        checks.check_blends()
        check_documents(checks, self.stage_plan, self.documents, _packed_only(self))
        checks.check_stage_settings(self.optimizer.weight_decay, self.stage_plan.written)
        checks.check_turns(self.optimizer)
        _ = self.schedule_in_steps  # checks itself

    @cached_property
    def documents_read(self) -> DocumentSettings | None:
        """`documents` of an encoder with memories; None for any other."""
        return (
            (self.documents or DocumentSettings())
            if memory_shape(self.backbone_config)[1]
            else None
        )

    @cached_property
    def batch_size(self) -> BatchSize:
        """`batch` as a number of rows or examples."""
        return BatchSize.parse(self.batch, self.length)

    @property
    def rows(self) -> int:
        """Rows of a step, over all processes; 0 if `batch` counts examples."""
        return self.batch_size.number if self.batch_size.unit == "rows" else 0

    @property
    def examples(self) -> int:
        """Examples of each task group in a step; 0 if `batch` counts rows."""
        return self.batch_size.number if self.batch_size.unit == "examples" else 0

    def examples_of(self, task_group: str) -> int:
        """Examples of this task group in a step: its first task's `batch`, or the recipe's."""
        return self.built_tasks[tasks_of(task_group)[0]].batch or self.examples

    @property
    def head_lr_scales(self) -> dict[str, float]:
        """{parameter pattern: multiplier of the learning rate} for tasks with a `head_lr`."""
        return {
            f"heads.{name}.*": task.head_lr / self.optimizer.lr
            for name, task in self.built_tasks.items()
            if task.head_lr
        }

    def lr_scale(self, at: StepInfo) -> float:
        """The multiplier of `optimizer.lr` at a step."""
        stage, steps = self.stage_plan.settings[at.stage], self.curriculum.steps
        factor = stage.schedule_scale(at, schedule=self.schedule_in_steps, steps=steps)
        own = self.step_settings.optimizer(at).lr or stage.lr
        return factor if own is None else factor * own / self.optimizer.lr

    def decay_scale(self, at: StepInfo) -> float:
        """The multiplier of `optimizer.weight_decay` at a step."""
        parts = (self.step_settings.optimizer(at), self.stage_plan.settings[at.stage])
        given = [part.weight_decay for part in parts if part.weight_decay is not None]
        return given[0] / self.optimizer.weight_decay if given else 1.0

    @cached_property
    def step_settings(self) -> StepSettings:
        return StepSettings(self.stage_plan.settings, self.built_tasks)

    @cached_property
    def stage_plan(self) -> StagePlan:
        """The stages with what each has of its own."""
        return StagePlan(parse_stages(self.stages, list(self.tasks)), self.length, self.batch)

    @property
    def curriculum_spec(self) -> CurriculumSpec:
        """The stages as written, validated."""
        return self.stage_plan.spec

    @property
    def curriculum(self) -> Curriculum:
        """The stages in steps. Raises UserError if that needs the data: see
        train.resolve.resolve."""
        return self.stage_plan.curriculum

    @cached_property
    def schedule_in_steps(self) -> LRSchedule:
        """The schedule with amounts in steps."""
        return self.schedule.in_steps(self.stage_plan.usual_size if self.rows else None)

    def plan_table(self) -> str:
        """The plan as a table, with tokens and warm-up steps."""
        warmups = self.schedule_in_steps.warmups(self.curriculum, self.stage_plan.schedules)
        return self.curriculum.table(
            tokens=self.stage_plan.tokens if self.rows else (), warmups=warmups
        )

    @cached_property
    def built_tasks(self) -> dict[str, Task]:
        return {name: build(name, values) for name, values in self.tasks.items()}

    @cached_property
    def own_metrics(self) -> OwnMetrics:
        """The functions of `evaluate.metrics`. Raises UserError for one that cannot be imported."""
        return import_metrics(self.evaluate.metrics, self.built_tasks)

    @cached_property
    def backbone_config(self) -> EncoderConfig:
        """The encoder's hyperparameters; `vocab_size` is open if the corpus determines it."""
        config = read_encoder_config(self.backbone)
        for name, task in self.built_tasks.items():
            if (longest := task.longest_text(self.stage_plan.longest)) > config.max_length:
                what = f"length: rows of {longest} tokens"
                if longest != self.stage_plan.longest:
                    what = f"tasks.{name}.max_length: {longest}"
                raise UserError(
                    f"{what}, but backbone.max_positions allows only {config.max_length}"
                )
        return config

    @cached_property
    def task_ids(self) -> dict[str, int]:
        """The row of the task embedding that each task uses: one that its texts train."""
        ids = assign_task_ids(self.built_tasks, self.backbone_config.task_types)
        return {task: ids[self.curriculum_spec.leaders.get(task, task)] for task in ids}

    def resolved(self) -> dict[str, Any]:
        """The recipe as a plain mapping with all defaults filled in."""
        plain = asdict(self)
        plain["backbone"] = asdict(self.backbone_config)
        plain["tasks"] = {
            name: {"kind": self.tasks[name].get("kind", name)}
            | {k: v for k, v in asdict(task).items() if k != "name"}
            for name, task in self.built_tasks.items()
        }
        return json.loads(json.dumps(plain, default=list))

    def learned(self) -> dict[str, Any]:
        """The part of the resolved recipe that determines the loss curve."""
        return {k: v for k, v in self.resolved().items() if k not in NOT_LEARNED}

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.learned())


def _check_amounts(recipe: Recipe) -> None:
    """Raises UserError for tokens of steps whose tokens are unknown, or differ, and for passes of
    steps whose examples are unknown."""
    for key, section in (("evaluate", recipe.evaluate), ("save", recipe.save)):
        if section.passes and not recipe.examples:
            raise UserError(f"{key}.passes: needs a `batch` in examples, such as `32 examples`")
    if recipe.examples and recipe.curriculum_spec.counts_tokens:
        raise UserError(
            "stages: counted in tokens, but `batch` is in examples; use steps, sequences or epochs"
        )
    if recipe.schedule.counts_tokens and recipe.stage_plan.own_sizes:
        raise UserError(
            "schedule: in tokens, but a stage has a length or batch of its own; give amounts in "
            "steps, or stages schedules of their own"
        )


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file with `a.b=c` overrides; the only reader of recipes. Raises UserError with
    the file and the key."""
    return make_recipe(read_values(path, overrides), str(path))


def read_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The contents of a recipe file with the overrides applied. `sizes: {large: {a.b: c}}` of a
    file is what `size=large` overrides, before the others. Raises UserError."""
    values = read_yaml(path)
    sizes = values.pop("sizes", {})
    pairs = [parse_override(text) for text in overrides]
    chosen = [value for key, value in pairs if key == "size"]
    own = [pair for name in chosen[-1:] for pair in _of_size(sizes, name, str(path))]
    for key, value in [*own, *(pair for pair in pairs if pair[0] != "size")]:
        override(values, key, value)
    return values


def _of_size(sizes: object, name: object, where: str) -> list[tuple[str, Any]]:
    """The overrides of one of a recipe's `sizes`."""
    if not isinstance(sizes, Mapping) or not all(isinstance(x, Mapping) for x in sizes.values()):
        raise UserError(f"{where}: sizes: expected {{size: {{key: value}}}}")
    if name not in sizes:
        known = f"; known: {', '.join(sizes)}" if sizes else "; the recipe has no `sizes`"
        raise UserError(f"{where}: size={name}: no such size{known}")
    return list(sizes[name].items())


def make_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Make a recipe from a mapping; `where` names its file in errors. If it has no encoder of its
    own, it gets that of `init_from`."""
    try:
        recipe = parse(Recipe, _with_generators(_with_encoder(values)), "")
        _ = recipe.task_ids  # checks itself
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return recipe


def _with_generators(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with the sizes of the generators that tasks start from, which are then stored:
    their folders are read once."""
    tasks = values.get("tasks")
    if not isinstance(tasks, Mapping):
        return values
    changed = {}
    for name, task in tasks.items():
        own = task.get("generator") if isinstance(task, Mapping) else None
        if isinstance(own, Mapping) and own.get("path") and not own.get("hidden_size"):
            try:
                config = encoder_config(str(own["path"]))
            except UserError as error:
                raise UserError(f"tasks.{name}.generator.path: {error}") from None
            sizes = {
                "num_layers": config.num_layers,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.feed_forward_size,
                "num_heads": config.num_heads,
            }
            changed[name] = {**task, "generator": {**own, **sizes}}
    return {**values, "tasks": {**tasks, **changed}} if changed else values


def _with_encoder(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with the encoder of `init_from`, if it has none, or only a class, dropout, task
    or token types for it, or sizes of one with some of its layers."""
    given, chosen = values.get("backbone") or {}, values.get("init_layers")
    start = values.get("init_from")
    if not start or not isinstance(given, Mapping) or "preset" in given:
        return values
    if not given.keys() <= _OVER_INIT_FROM and chosen is None:
        return values
    shipped = shipped_class(given.get("kind"))
    if chosen is not None and shipped and not shipped.takes_layers:
        return values
    try:
        config = encoder_config(str(start))
    except UserError as error:
        raise UserError(f"init_from: {error}") from None
    kind = given.get("kind", config.kind)
    if kind != config.kind and not is_custom(kind):
        return values
    start_class = shipped_class(config.kind)
    shares = start_class is not None and start_class.sharing_options
    own = chosen if isinstance(chosen, list) and not shares else []
    sizes = {"num_layers": len(own)} if own else {}
    merged = {**asdict(config), **sizes, **given}
    if kind == config.kind and isinstance(given.get("options"), Mapping):
        merged["options"] = {**config.options, **given["options"]}
    return {**values, "backbone": merged}


def _drops(config: EncoderConfig, lora: LoraSettings | None) -> bool:
    """Whether an encoder drops numbers in training; of a user's it is not known."""
    rates = config.dropout, config.attention_dropout, lora.dropout if lora else 0.0
    return any(rates) or is_custom(config.kind)


def _packed_only(recipe: Recipe) -> dict[str, bool]:
    """{key: whether it is given} of what is for texts in packed rows alone."""
    return {
        "teacher": recipe.teacher is not None,
        "optimizer.fgm": recipe.optimizer.fgm > 0,
        "evaluate.pairs": bool(recipe.evaluate.pairs),
        "evaluate.probe": recipe.evaluate.probe is not None,
    }
