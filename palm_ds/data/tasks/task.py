"""The interface of pretraining and fine-tuning tasks.

    source ──items──> table of items ──layout──> which tokens, how long ──example──> Example
                                                       |                                |
           (from the index alone, vectorized)           labels <──label (each of the group)

A task is one file in palm_ds/pretrain or palm_ds/tasks, named in recipes by its file name, or a
user-defined class named `module.Class`. There is no registry. Tasks derive from CorpusTask or
TableTask, depending on what they read.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat
from torch import nn

from palm_ds.common.arguments import checks_arguments, instance_or_class
from palm_ds.common.config import Several, check_keys, parse
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.keywords import default_of
from palm_ds.common.plugins import import_class, name_of
from palm_ds.common.settings import Settings
from palm_ds.data.sources.corpus import CorpusSource, passages
from palm_ds.data.sources.row_inputs import COLUMNS, TUPLE_ROLES, Rows, Splits, train_and_dev
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.documents import ReadsDocuments, SourceT
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.interfaces import Exports, PredictionFiles, Serves
from palm_ds.data.tasks.task_with_data import TaskWithData
from palm_ds.runtime.optimizer.step_settings import TaskOptimizerSettings

if TYPE_CHECKING:
    from palm_ds.model.encoder.encoder import Encoder

MOST_EXAMPLES = 10**7
"""Of a step: more than any machine can hold."""

_PACKAGES = ("palm_ds.pretrain", "palm_ds.tasks")
_MAX_NAME_LENGTH = 80  # of a task
_TASK_NAME = re.compile(rf"\w[\w -]{{0,{_MAX_NAME_LENGTH - 1}}}(?<! )")
_PARENT_KEYS = ("name", "source")
"""Fields that a recipe has in other places than the task's keys."""
_NOT_INPUT = (
    *("name", "source", "weight", "share", "task_id", "head_lr", "freeze"),
    *("trains", "optimizer", "new_head", "batch", "auxiliary"),
)
"""Settings that never affect which examples a task makes of a row."""


@dataclass(frozen=True, kw_only=True)
class Task(Settings, Exports, ReadsDocuments[SourceT], ABC, Generic[SourceT]):
    """Turns items of a source into examples, labels them, and owns a head.

    The n-th example of a task is a pure function of the seed, the task and n: `layout` gets its
    uniform draws, `example` and `label` a generator keyed by n. `layout` decides everything the
    length depends on, so that rows can be packed before any example is built."""

    name: str = ""
    """Its key in the recipe's `tasks`, the name of its head and its scores."""
    source: str = ""
    """The entry of `sources` that the task reads."""
    weight: NonNegativeFloat = 1.0
    """Weight of the task's loss in the total loss."""
    share: str = ""
    """Another task whose head (with its settings) and task embedding to use: to choose masked words
    by another strategy in another stage, for example, or to train one head on two domains."""
    task_id: Annotated[int, Field(ge=-1)] = -1
    """Row of the task embedding for texts of task groups that begin with this task. -1: one
    for each corpus task, in order; for table tasks that of `init_from`'s `export_task`, or 0."""
    head_lr: NonNegativeFloat = 0.0
    """Peak learning rate of the task's head; 0: `optimizer.lr`."""
    freeze: Several[str] = ()
    """Patterns of parameters that this task's steps do not update (`backbone.layers.0.*`); its
    stages need `mix: step` or `turns`."""
    trains: Several[str] = ()
    """Patterns of the only parameters that these steps update (`heads.judge.*`); empty: all."""
    optimizer: TaskOptimizerSettings = TaskOptimizerSettings()
    """Settings of the optimizer in this task's steps: `{lr: 4.0e-4, betas: [0.5, 0.999]}`."""
    new_head: bool = False
    """Initialize a new head even if `init_from` has one of this name."""
    batch: Annotated[int, Field(ge=0, le=MOST_EXAMPLES)] = 0
    """Examples per step, if the recipe's `batch` is in examples; 0: the recipe's number."""
    auxiliary: bool = False
    """Supports others only: not in `evaluate.best: mean`, nor predicted unless it is named."""

    reads: ClassVar[Literal["corpus", "table"]]
    """The kind of its source."""
    rate_varies: ClassVar[bool] = False
    """Whether its setting `rate` may differ from stage to stage: only `label` uses it."""
    segments: ClassVar[int] = 1
    """Number of texts of an example that get segment embeddings of their own."""
    num_uniforms: ClassVar[int] = 0
    """Number of uniform draws per item that `layout` needs."""
    edits_text: ClassVar[bool] = False
    """Whether `label` changes the tokens of an example. When predicting, such a task gets its own
    pass of the encoder, and runs only if it is requested by name or nothing else can predict."""
    labels_last: ClassVar[bool] = False
    """Whether its labels depend on what other tasks have masked: it labels after them."""
    attends_partially: ClassVar[bool] = False
    """Whether its examples have a `visibility`, which not every attention kernel can take."""
    without_displacement: ClassVar[str] = ""
    """For an error message: the setting with which they do not."""
    shortens: ClassVar[bool] = False
    """Whether an example may be shorter than its layout says, which leaves room in its row."""
    changes_encoder: ClassVar[bool] = False
    """Whether `head` changes the encoder's embeddings: it is built before other heads."""
    head_settings: ClassVar[Sequence[str]] = ()
    """Settings of a corpus task that its head depends on; equal for tasks that share one."""
    tuple_roles: ClassVar[Sequence[str]] = TUPLE_ROLES
    """The roles of the elements of rows that are tuples (row_inputs.py)."""

    if not TYPE_CHECKING:  # an editor sees the fields alone

        def __new__(cls, *_: object, **settings: object) -> Task:
            """Raises UserError for a keyword that is no field."""
            check_keys(settings, [field_.name for field_ in fields(cls)], cls.__name__)
            return super().__new__(cls)

    @property
    def displaces(self) -> bool:
        """Whether tokens may stand in a row far from what they attend to, beyond windows."""
        return False

    @property
    def pseudo_tokens(self) -> float | None:
        """The temperature at which the encoder itself fills in the placeholders of its examples
        (model/heads/pseudo_tokens.py); None: they have none."""
        return None

    @property
    def where(self) -> str:
        """The path of the task in the recipe, for messages; without a name that of its class."""
        return f"tasks.{self.name}" if self.name else type(self).__name__

    def path_of(self, name: str) -> str:
        return f"{self.where}.{name}"

    # ---- examples ----

    def longest_text(self, length: int) -> int:
        """Most tokens of a sequence, in rows of `length` tokens."""
        return length

    @abstractmethod
    def items(self, source: SourceT, max_length: int) -> np.ndarray:
        """(items, any) int64: one row per item; `max_length` is the maximum of an example.

        Large corpora are read in windows, each of which is a source: the items of a document must
        not depend on the other documents, and rows must not refer to places in the source."""

    def training_items(self, source: SourceT, max_length: int) -> np.ndarray:
        """The `items` to train on, by default all; evaluation and prediction read every one."""
        return self.items(source, max_length)

    @abstractmethod
    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: SourceT, max_length: int
    ) -> np.ndarray:
        """(n,) layouts (data/tasks/example.py) of n items, given (n, num_uniforms) numbers in [0,
        1): the exact `length` of each example, by how many tokens it could be longer (`spare`), and
        whatever `example` needs.

        Free space at the end of a row is given to examples with `spare` tokens. The layout that
        `example` gets has grown accordingly, and the example must have exactly its length, unless
        the task `shortens`."""

    @abstractmethod
    def example(self, layout: np.void, source: SourceT, rng: np.random.Generator) -> Example:
        """Build the example of one layout. Called only for the first task of a task group."""

    def label(self, example: Example, source: SourceT, rng: np.random.Generator) -> None:
        """Add `example.labels[self.name]`; may edit the ids. Called for every task of a task group
        in order, after `example` of the first, for those that label last at the end."""

    @abstractmethod
    def head(self, backbone: Encoder) -> nn.Module:
        """The module that maps encoder outputs to losses and scores (model/heads/heads.py)."""

    def loss_weights(self) -> dict[str, float]:
        """{loss: weight} of its losses: that of its head, and those that its head has besides."""
        return {self.name: self.weight}

    @classmethod
    def labels_others(cls) -> bool:
        """Whether it labels examples that another task of its task group built. By default it does
        if it defines `label`; a task whose `label` needs its own `example` returns False."""
        return cls.label is not Task.label

    # ---- training ----

    def baseline(self, targets: np.ndarray, source: SourceT) -> tuple[np.ndarray, np.ndarray]:
        """Loss and accuracy per target of a baseline that ignores the text, which the report calls
        chance. NaN if the task has no such baseline."""
        nothing = np.full(len(targets), np.nan)
        return nothing, nothing

    def baseline_of(
        self, loss: str, targets: np.ndarray, source: SourceT
    ) -> tuple[np.ndarray, np.ndarray]:
        """The `baseline` of one of `loss_weights`."""
        return self.baseline(targets, source)

    def tallied(self, tallies: Mapping[str, float]) -> dict[str, Any]:
        """The `metrics`, `baseline_loss` and `baseline_accuracy` of a held-out score, as far as
        they follow from what a head of its counted in all held-out texts (`tallies`)."""
        return {}

    def describe(self, source: SourceT) -> str:
        """A line for the start of a run about what the task found in its source; may be empty."""
        return ""

    def resolved(self, source: SourceT) -> Task[SourceT]:
        """The task with all it infers from its training data, such as class names, to be stored."""
        return self

    def with_head_of(self, origin: Task) -> Task[SourceT]:
        """The task with the settings it adopts from the resolved task whose head it shares
        (`share`). Raises UserError if it cannot use that head: by default, unless both are of one
        kind, or one is derived from the other, with the same `head_settings`."""
        if not (isinstance(self, type(origin)) or isinstance(origin, type(self))):
            raise UserError(
                f"{self.where}.share: {origin.name!r} is another kind of task "
                f"({type(origin).__name__}, not {type(self).__name__})"
            )
        for key in self.head_settings:
            if (here := getattr(self, key)) != (there := getattr(origin, key, None)):
                raise UserError(
                    f"{self.where}.{key}: {here!r}, but the head is that of "
                    f"tasks.{origin.name}, whose {key} is {there!r}; they must be equal"
                )
        return self

    def own_token(self, number: int) -> str | Sequence[int]:
        """Some tokens, or a name, of an id below 0, if the task has such (palm-ds inspect)."""
        return ""

    def class_name(self, label: int) -> str:
        """The display name of a class (palm-ds inspect)."""
        return self.labels[label] if label < len(self.labels) else str(label)

    @instance_or_class
    @checks_arguments(
        "its settings are arguments of the task: {}(KEY=...).on(...)",
        columns=COLUMNS,
        read='{key: value}, such as {"delimiter": ";"}',
    )
    def on(
        self: Task | type[Task],
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        pass_examples: int = 0,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer. Called on the class, the
        task has its defaults.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        name: by default the task's own, or that of its kind.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.
        pass_examples: rows of a pass, of a function or class without an end (docs/finetuning.md).

        Raises UserError for a wrong setting of the task."""
        cls = self if isinstance(self, type) else type(self)
        kind, rows = kind_of(cls), train_and_dev(train, dev)
        task = _concrete(cls, f"{cls.__name__}.on")() if isinstance(self, type) else self
        name = name or task.name or kind.rpartition(".")[2].lower()
        check_task_name(name, f"{cls.__name__}.on: name")
        return TaskWithData(
            kind=kind,
            name=name,
            train=rows[0],
            dev=rows[1],
            read={**(read or {}), **({"columns": dict(columns)} if columns else {})},
            tuple_roles=cls.tuple_roles,
            mix_ratio=mix_ratio,
            pass_examples=pass_examples,
            settings=task.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """The keys of a recipe that make this task: its fields that differ from their defaults,
        without name and source. Raises UserError for a wrong value."""
        cls, own = type(self), _given_settings(self)
        parse(cls, own, cls.__name__)
        return {
            key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for key, value in own.items()
        }

    def input_key(self) -> str:
        """Equal for tasks that build the same examples from a row: when predicting, they share one
        pass of the encoder."""
        return repr((type(self), {k: v for k, v in asdict(self).items() if k not in _NOT_INPUT}))


def _given_settings(task: Task) -> dict[str, Any]:
    """The fields that differ from their defaults, without those that a recipe has elsewhere."""
    values = {one: getattr(task, one.name) for one in fields(task)}
    return {
        one.name: value
        for one, value in values.items()
        if one.name not in _PARENT_KEYS and value != default_of(one)
    }


@dataclass(frozen=True, kw_only=True)
class CorpusTask(Task[CorpusSource]):
    """A task over running text. By default its examples are passages."""

    reads: ClassVar[Literal["corpus", "table"]] = "corpus"
    columns: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Annotations the corpus must have: {name: function(document) -> one value per token}. The
    function lets `palm-ds corpus annotate` add the annotation."""
    needs_dropout: ClassVar[bool] = False
    """Whether it learns only from what dropout changes."""

    def annotations(self) -> tuple[str, ...]:
        """The annotations of the corpus that examples carry."""
        return tuple(self.columns)

    def required_units(self) -> tuple[str, ...]:
        """Annotations of which the corpus must have at least one unit; the recipe names them in
        `units`."""
        return ()

    def file_contents(self) -> Mapping[str, str]:
        """{file that it reads besides its corpus: a short hash of its content}; a run continues
        only with the same files."""
        return {}

    def input_key(self) -> str:
        return super().input_key() + "".join(self.file_contents().values())

    def check(self, source: CorpusSource, max_length: int) -> None:
        """Raises UserError if the source lacks what the task needs, such as a second document."""

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """Passages that fill the room: consecutive tokens of one document, [CLS] and [SEP]
        included; the last passage of a document is shorter."""
        return passages(source, max_length - 2)

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        start, end, document = items.T
        length = end - start + 2
        return layouts(length, np.minimum(max_length - length, start - document), end=end)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        """A passage; with more room it starts earlier in its document."""
        end = layout["end"]
        return build_input([source.read(end - layout["length"] + 2, end)], source.vocabulary)


@dataclass(frozen=True, kw_only=True)
class TableTask(Task[TableSource], PredictionFiles, Serves):
    """A task over rows of a table, which predicts something for each."""

    reads: ClassVar[Literal["corpus", "table"]] = "table"

    if not TYPE_CHECKING:  # as in Task

        def __new__(cls, *given: object, **settings: object) -> Task:
            """Raises UserError for rows, which `on` takes, and for a keyword that is no field."""
            if given or {"train", "dev"} & settings.keys():
                name = cls.__name__
                raise UserError(f"{name}: takes rows by {name}.on(train=..., dev=...)")
            return super().__new__(cls, **settings)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        """Raises UserError, with the row's place, if a row of its table cannot be used; with
        `labeled` (training, evaluation) every row must have a label."""

    def for_prediction(self) -> Self:
        """The task that builds the inputs of predictions: itself, unless it trains on others."""
        return self

    def labeled(self, source: TableSource) -> np.ndarray:
        """(rows,) bool: which rows have a label. A teacher alone labels the others."""
        return np.ones(len(source), bool)

    def check_step(self, source: TableSource, examples: int) -> None:
        """Raises UserError if steps of that many examples of its rows teach nothing."""

    def label_roles(self) -> tuple[str, ...]:
        """The table columns that hold its labels."""
        return ()

    def describe_rows(self, source: TableSource, max_length: int) -> str:
        """A line about a table for the start of a run; an example has at most `max_length`."""
        return f"{self.name}: {len(source):,} rows"

    def cut_rows(self, source: TableSource, max_length: int) -> int:
        """Number of rows that are truncated because they are too long."""
        return 0


def build(name: str, values: Mapping[str, Any]) -> Task:
    """The task of an entry of the recipe's `tasks`: `kind` (by default the name) and the task's own
    keys."""
    where = f"tasks.{name}"
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected keys such as `source: ...`, got {values!r}")
    check_task_name(name, "tasks")
    kind = values.get("kind", name)
    keys = {key: value for key, value in values.items() if key != "kind"}
    if "name" in keys:
        raise UserError(f"{where}.name: the task's name is its key in `tasks`; remove this")
    if not keys.get("source"):
        raise UserError(f"{where}.source: missing; name the entry of `sources` that the task reads")
    return parse(find(kind, where), {"name": name, **keys}, where)


def check_task_name(name: object, where: str) -> None:
    """Raises UserError for a name that cannot be part of a task group, of the names of a model's
    parameters, or of a file's name."""
    if not isinstance(name, str) or not _TASK_NAME.fullmatch(name):
        raise UserError(
            f"{where}: {str(name)[:60]!r}: a task's name has up to {_MAX_NAME_LENGTH} letters, "
            "digits, spaces, _ and -"
        )
    if hasattr(nn.ModuleDict(), name):
        raise UserError(f"{where}: {name!r}: torch's modules have this name; choose another")


def find(kind: str, where: str = "kind") -> type[Task]:
    """The task class of a kind: a file of palm_ds/pretrain or palm_ds/tasks, or `module.Class`."""
    if not isinstance(kind, str):
        raise UserError(f"{where}.kind: expected a task's name, got {kind!r}")
    known = known_kinds()
    if kind in known:
        return _task_class(importlib.import_module(known[kind]))
    if "." not in kind:
        raise UserError(f"{where}.kind: no task {kind!r}{suggest(kind, known)} (or module.Class)")
    return _concrete(import_class(kind, Task, f"{where}.kind"), f"{where}.kind: {kind!r}")


def _concrete(cls: type[Task], where: str) -> type[Task]:
    """The class itself. Raises UserError if it lacks a method of the interface."""
    if lacking := ", ".join(sorted(cls.__abstractmethods__)):
        raise UserError(
            f"{where} lacks {lacking}; derive it from palm.CorpusTask or palm.TextTask and define "
            "these methods"
        )
    return cls


def kind_of(task: type[Task]) -> str:
    """The name of a task class in recipes. Raises UserError if a recipe could not find it."""
    kinds = {module: kind for kind, module in known_kinds().items()}
    return kinds.get(task.__module__) or name_of(task)


@cache
def known_kinds() -> Mapping[str, str]:
    """{kind: module} of every task that comes with palm_ds."""
    kinds = {}
    for package_name in _PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.ispkg:  # `shared` and `metrics` are not tasks
                kinds[module.name] = f"{package_name}.{module.name}"
    return kinds


def fine_tuning_kinds() -> list[str]:
    """The kinds of tasks on tables that come with palm_ds."""
    return [kind for kind, module in known_kinds().items() if module.startswith(_PACKAGES[1])]


def _task_class(module: ModuleType) -> type[Task]:
    for value in vars(module).values():
        own = isinstance(value, type) and value.__module__ == module.__name__
        if own and issubclass(value, Task):
            return value
    raise AssertionError(f"{module.__name__} defines no Task")
