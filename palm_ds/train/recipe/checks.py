"""Checks of a recipe across its sections: tasks against sources, stages and the encoder.

All raise UserError. They need neither data nor processes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.keywords import default_of
from palm_ds.common.messages import counted
from palm_ds.data.stream.curriculum_spec import CurriculumSpec
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.tasks.task import CorpusTask, Task
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class, has_windows
from palm_ds.model.lora import LoraSettings, check_targets
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.optimizer.step_settings import TaskOptimizerSettings
from palm_ds.train.recipe.sections import BatchSize, EvaluateSettings, SaveSettings, SourceSettings
from palm_ds.train.recipe.stage_settings import StageSettings
from palm_ds.train.report.metrics_file import PAIRS, PROBE

_OF_STEPS = ("freeze", "trains", "optimizer")
"""Settings of a task for the steps that train it alone."""
_OF_HEAD = (
    *("dropout", "smoothing", "class_weights", "scale", "loss", "temperature", "margin"),
    *("pooling", "similarity", "matryoshka", "matryoshka_weights"),
    *("distillation", "distillation_share", "initial_bias"),
    *("query_regularizer_weight", "document_regularizer_weight", "regularizer_warmup"),
)
"""Settings of heads over tables, once for all tasks that share one. Those over a corpus may have
such a name for the task's own: the `temperature` of pseudo tokens."""


@dataclass(frozen=True, kw_only=True)
class TaskChecks:
    """The parts of a recipe that its tasks have to agree with."""

    tasks: Mapping[str, Task]
    sources: Mapping[str, SourceSettings]
    spec: CurriculumSpec
    encoder: EncoderConfig
    batch: BatchSize
    taught: bool = False
    """Whether a teacher labels texts, too."""
    drops: bool = True
    """Whether the encoder drops numbers in training."""

    def check_tasks(self) -> None:
        """Every task agrees with the source, head, batch, stages and encoder that it uses."""
        for name, task in self.tasks.items():
            self._check_task(name, task)

    def _check_task(self, name: str, task: Task) -> None:
        self._check_references(name, task)
        if task.batch and self.batch.unit != "examples":
            raise UserError(f"tasks.{name}.batch: needs the recipe's `batch` in examples as well")
        if task.displaces and has_windows(self.encoder):
            raise UserError(
                f"tasks.{name}: {self.encoder.kind} has windows of attention, and this task's "
                f"queries or masks stand far from what they attend to; use an encoder without "
                f"windows{task.without_displacement}"
            )
        if isinstance(task, CorpusTask) and task.needs_dropout and not self.drops:
            raise UserError(
                f"tasks.{name}: learns by dropout alone, but backbone.dropout and "
                "attention_dropout are 0; set backbone.dropout: 0.1"
            )
        slots = self.encoder.task_types
        if task.task_id >= max(slots, 1):
            raise UserError(
                f"tasks.{name}.task_id: {task.task_id}, but the task embedding has {slots} rows"
            )

    def _check_references(self, name: str, task: Task) -> None:
        """The source that a task reads, and the task whose head it shares."""
        if task.source not in self.sources:
            known = suggest(task.source, self.sources)
            raise UserError(f"tasks.{name}.source: no {task.source!r} in `sources`{known}")
        if task.share and task.share not in self.tasks:
            known = suggest(task.share, self.tasks)
            raise UserError(f"tasks.{name}.share: no {task.share!r} in `tasks`{known}")
        if task.share and task.reads == "corpus":  # that of a table depends on its rows
            task.with_head_of(self.tasks[task.share])
        for key in self._of_another_head(task) if task.share else ():
            raise UserError(
                f"tasks.{name}.{key}: its head belongs to tasks.{task.share}; set it there"
            )
        if (reads := self.sources[task.source].reads) != task.reads:
            raise UserError(
                f"tasks.{name}: reads a {task.reads}, but sources.{task.source} is a {reads}"
            )

    def _of_another_head(self, task: Task) -> Iterator[str]:
        """The settings of a head that a task without one has."""
        yield from (key for key in ("head_lr", "new_head") if getattr(task, key))
        owner, of_head = self.tasks[task.share], _OF_HEAD if task.reads == "table" else ()
        for field in (each for each in fields(task) if each.name in of_head):
            here, there = getattr(task, field.name), getattr(owner, field.name, None)
            # "balanced" is by the rows of each task
            if here not in (default_of(field), there) or here == "balanced":
                yield field.name

    def check_blends(self) -> None:
        """The tasks of a task group read one source, and the encoder has enough token types for
        it."""
        for task_group in self.spec.task_groups:
            shared = {self.tasks[name].source for name in tasks_of(task_group)}
            if len(shared) > 1:
                raise UserError(
                    f"stages: the tasks of {task_group!r} read different sources "
                    f"({', '.join(sorted(shared))}); the tasks of a task group label the same text"
                )
            first = self.tasks[tasks_of(task_group)[0]]
            typed = encoder_class(self.encoder).has_token_types(self.encoder)
            if typed and first.segments > self.encoder.token_types:
                raise UserError(
                    f"tasks.{first.name}: its texts have {first.segments} segments, but "
                    f"backbone.token_types is {self.encoder.token_types}"
                )
            self._check_labeled(task_group)
            self._check_weighted(task_group)
            self._check_batch(task_group)

    def check_stage_settings(self, weight_decay: float, settings: Sequence[StageSettings]) -> None:
        """What each stage has of its own fits the recipe and the stage's tasks."""
        for number, own in enumerate(settings):
            where = f"stages.{number}"
            if own.weight_decay is not None and not weight_decay:
                raise UserError(
                    f"{where}.weight_decay: optimizer.weight_decay is 0; give it a value"
                )
            groups = self.spec.groups_of(number)
            tasks = [self.tasks[name] for group in groups for name in tasks_of(group)]
            if own.rates and not any(task.rate_varies for task in tasks):
                raise UserError(f"{where}.rate: no task of this stage masks tokens at a rate")
            self._check_mixture(own.mixture or {}, f"{where}.mixture")
            mixed = any(self.sources[task.source].mix for task in tasks)
            if own.sampling_exponent is not None and not mixed:
                raise UserError(f"{where}.sampling_exponent: no task of this stage reads a `mix`")
        self._check_rope_bases("rope_base", [own.rope_base for own in settings])
        self._check_rope_bases("local_rope_base", [own.local_rope_base for own in settings])

    def check_turns(self, optimizer: OptimizerConfig) -> None:
        """Steps with settings of a task belong to that task, or to tasks that agree, and the
        recipe's optimizer has such settings."""
        for name, task in self.tasks.items():
            groups = {b: mix for b, mix in self.spec.mix_of.items() if name in tasks_of(b)}
            given = [
                key
                for key in _OF_STEPS
                if getattr(task, key) not in ((), [], TaskOptimizerSettings())
            ]
            if given and "batch" in groups.values():
                raise UserError(f"tasks.{name}.{given[0]}: its stages need `mix: step` or `turns`")
            for other in (other for b in groups for other in tasks_of(b)):
                self._check_agreed(name, other)
            _check_task_optimizer(f"tasks.{name}.optimizer", task.optimizer, optimizer)

    def _check_agreed(self, name: str, other: str) -> None:
        """Two tasks of a group train the same parameters alike."""
        for key in ("trains", "optimizer"):
            if getattr(self.tasks[name], key) != getattr(self.tasks[other], key):
                raise UserError(
                    f"tasks.{name}.{key}: differs from that of tasks.{other}, which trains in the "
                    "same steps; make them equal, or give each a task group of its own"
                )

    def _check_mixture(self, mixture: Mapping[str, Mapping[str, float]], where: str) -> None:
        """The weights are of corpora that the sources have."""
        for name, weights in mixture.items():
            if name not in self.sources:
                raise UserError(f"{where}: no {name!r} in `sources`{suggest(name, self.sources)}")
            known = self.sources[name].weights
            if self.sources[name].reads == "table" or len(known) < 2:
                raise UserError(f"{where}.{name}: sources.{name} is not a `mix` of corpora")
            for corpus in weights:
                if corpus not in known:
                    raise UserError(f"{where}.{name}: no corpus {corpus!r}{suggest(corpus, known)}")
            if not sum(weights.values()):
                raise UserError(f"{where}.{name}: has no weight above 0")

    def _check_rope_bases(self, key: str, bases: Sequence[float | None]) -> None:
        """The encoder has such a base, and ends with that of its configuration."""
        if not any(bases):
            return
        local = key == "local_rope_base"
        base = encoder_class(self.encoder).rope_base(self.encoder, local=local)
        if base is None:
            positions = "layers with windows and rotary positions" if local else "rotary positions"
            raise UserError(f"stages: {key}: {self.encoder.kind} has no {positions}")
        if bases[-1] not in (None, base):
            raise UserError(
                f"stages.{len(bases) - 1}.{key}: {bases[-1]:g}, but the weights are stored "
                f"with that of `backbone`, {base:g}; make them equal"
            )

    def _check_labeled(self, task_group: str) -> None:
        """Every task but the first can label examples that another one built."""
        names = tasks_of(task_group)
        builders = [name for name in names if not self.tasks[name].labels_others()]
        if set(builders) <= {names[0]}:
            return
        labeling = [name for name in names if name not in builders]
        right = [" + ".join([name, *labeling]) for name in builders]
        raise UserError(
            f"stages: {task_group!r}: {(builders if len(builders) == 1 else builders[1:])[0]} "
            "labels only examples that it builds itself, and the first task of a group builds "
            f"them; write {' and '.join(map(repr, right))}"
        )

    def _check_batch(self, task_group: str) -> None:
        """The first task says how many examples a step has."""
        first, *others = tasks_of(task_group)
        firsts = {tasks_of(each)[0] for each in self.spec.task_groups}
        for name in others:
            given = self.tasks[name].batch
            if given not in (0, self.tasks[first].batch) and name not in firsts:
                raise UserError(
                    f"tasks.{name}.batch: {given}, but {task_group!r} has the examples of its "
                    f"first task; set tasks.{first}.batch"
                )

    def _check_weighted(self, task_group: str) -> None:
        """A task group learns something."""
        if not self.taught and not any(self.tasks[task].weight for task in tasks_of(task_group)):
            raise UserError(
                f"stages: {task_group!r} would train nothing: the `weight` of its tasks is 0; "
                "raise it, or remove the task group"
            )


def _check_task_optimizer(
    where: str, own: TaskOptimizerSettings, optimizer: OptimizerConfig
) -> None:
    """The recipe's optimizer has what a task sets."""
    if own.weight_decay is not None and not optimizer.weight_decay:
        raise UserError(f"{where}.weight_decay: optimizer.weight_decay is 0; give it a value")
    for key in ("betas", "eps"):
        if getattr(own, key) is not None and not optimizer.takes_betas:
            raise UserError(f"{where}.{key}: not used by {optimizer.kind}")


def idle_tasks(
    tasks: Mapping[str, Task], task_groups: Collection[str], taught: Collection[str] = ()
) -> list[str]:
    """One line for each task of a recipe that its stages do not train; `taught`: by a teacher."""
    trained = {name for task_group in task_groups for name in tasks_of(task_group)}
    owners = {tasks[name].share for name in trained}
    idle = {name: "it is in no stage" for name in tasks if name not in trained | owners}
    idle |= {name: "its weight is 0" for name in trained - {*taught} if not tasks[name].weight}
    return [f"note: tasks.{name} is not trained: {why}" for name, why in sorted(idle.items())]


def check_export_task(name: str, tasks: Collection[str], encoder: EncoderConfig) -> None:
    """`export_task` names a task, and the encoder has a task embedding."""
    if name and name not in tasks:
        raise UserError(f"export_task: no {name!r} in `tasks`{suggest(name, tasks)}")
    if name and not encoder.task_types:
        raise UserError("export_task: backbone.task_types is 0, there are no task embeddings")


def check_mask_rate(evaluate: EvaluateSettings, tasks: Mapping[str, Task]) -> None:
    """With `evaluate.mask_rate`, some task masks tokens at a rate."""
    if evaluate.mask_rate is not None and not any(task.rate_varies for task in tasks.values()):
        raise UserError("evaluate.mask_rate: no task masks tokens at a rate; remove it")


def check_best_kept(
    save: SaveSettings, evaluate: EvaluateSettings, settings: Sequence[StageSettings]
) -> None:
    """With `save.best`, every checkpoint is evaluated; `settings`: those of the stages."""
    spans = {"evaluate.every": evaluate.every} | {
        f"stages.{number}.evaluate_every": own.evaluate_every
        for number, own in enumerate(settings)
        if own.evaluate_every is not None
    }
    for name, every in spans.items() if save.best else ():
        if not (save.every and every and save.every % every == 0):
            raise UserError(
                "save.best: compares checkpoints that are evaluated, but save.every is "
                f"{save.every} and {name} {every}; make the first a multiple of the second"
            )


def check_evaluation_sets(
    sources: Mapping[str, SourceSettings], evaluate: EvaluateSettings
) -> None:
    """No evaluation set has the name of what else is evaluated."""
    taken = {PROBE: evaluate.probe and "probe", PAIRS: evaluate.pairs and "pairs"}
    for name, source in sources.items():
        for title in source.evaluation_sets:
            if key := taken.get(title):
                raise UserError(
                    f"sources.{name}.evaluation_sets.{title}: the scores of `evaluate.{key}` have "
                    "this name; give the set another"
                )


def check_data_set_names(names: Collection[str]) -> None:
    """Each can be a data set of the hub."""
    for name in names:
        if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", name):
            raise UserError(f"datasets: expected data sets of the hub as owner/name, got {name!r}")


def check_lora(settings: LoraSettings, init_from: str, extend: str, encoder: EncoderConfig) -> None:
    """There are weights to adapt, and their encoder has such matrices."""
    if extend:
        raise UserError(
            "lora, extend: LoRA adapts weights that stay fixed; start from that run's weights with "
            "`init_from`"
        )
    if not init_from:
        raise UserError("lora: needs `init_from`, the weights that it adapts")
    check_targets(encoder_class(encoder), encoder, settings)


def assign_task_ids(tasks: Mapping[str, Task], slots: int) -> dict[str, int]:
    """The row of the task embedding that each task uses: its own `task_id`; otherwise rows are
    numbered in the recipe's order, and tasks over tables get row 0. Tasks that share a head share
    its row. All are 0 if the encoder has no task embedding (`slots` is 0)."""
    ids: dict[str, int] = {}
    for name, task in tasks.items():
        if not task.share:
            given = task.task_id if task.task_id >= 0 or task.reads == "corpus" else 0
            ids[name] = (given if given >= 0 else len(ids)) if slots else 0
    if slots:
        _move_from_chosen_rows(ids, [tasks[name] for name in ids if tasks[name].reads == "corpus"])
    if slots and max(ids.values(), default=0) >= slots:
        raise UserError(
            f"tasks: {counted(len(ids), 'task')} with a task embedding, but backbone.task_types is "
            f"{slots}; raise it, or give tasks the same `task_id`"
        )
    for name, task in tasks.items():
        if task.share and task.share not in ids:
            raise UserError(f"tasks.{name}.share: {_owner_instead(name, tasks)}")
    shared = {name: ids[task.share] for name, task in tasks.items() if task.share}
    for name, row in shared.items() if slots else ():
        _check_shared_row(tasks[name], row)
    return ids | shared


def _check_shared_row(task: Task, row: int) -> None:
    """Raises UserError if a task that uses the row of another asks for one of its own. Of a table,
    0 may be what a run of an earlier version stored for none."""
    if task.task_id not in (-1, row) and (task.task_id or task.reads == "corpus"):
        raise UserError(
            f"tasks.{task.name}.task_id: {task.task_id}, but it uses the task embedding of "
            f"tasks.{task.share}, row {row}; set it there, or remove `share`"
        )


def _move_from_chosen_rows(ids: dict[str, int], corpus_tasks: Sequence[Task]) -> None:
    """A numbered task whose row another task has as its `task_id` gets the first that is free."""
    chosen = {task.task_id for task in corpus_tasks}
    for task in corpus_tasks:
        if task.task_id < 0 and ids[task.name] in chosen:
            taken = {*ids.values()}
            ids[task.name] = next(row for row in itertools.count() if row not in taken)


def _owner_instead(name: str, tasks: Mapping[str, Task]) -> str:
    """Problem with the `share` of a task that names one without a head of its own."""
    chain = [name]
    while (following := tasks[chain[-1]].share) and following not in chain:
        chain.append(following)
    if following == name and len(chain) == 1:
        return "names the task itself; remove it, and the task has a head of its own"
    if following:
        return f"{' -> '.join([*chain, following])}: none of them has a head; remove one `share`"
    return f"{chain[1]!r} uses the head of {chain[-1]!r}; write {chain[-1]!r}"
