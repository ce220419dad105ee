"""The one interface of pretraining and fine-tuning tasks.

    source ──items──> table of items ──layout──> which tokens, how long ──example──> Example
                                                       |                                |
                     (from the index alone, vectorised)          label (each of a blend) ──> labels

A task is one file. It is found by the file's name in palm_ds/pretrain or palm_ds/tasks, or by the
dotted name of a class in a person's own module. Nothing is registered.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import nn

from palm_ds.common import rng as keyed
from palm_ds.common.config import parse
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.plugins import import_class, name_of
from palm_ds.data.corpus_source import Source
from palm_ds.data.example import Example, arrange
from palm_ds.data.stored_prediction import StoredPrediction
from palm_ds.data.task_with_data import Rows, TaskWithData
from palm_ds.weights.formats.huggingface.target import HeadTaken

if TYPE_CHECKING:
    from palm_ds.model.encoder import Encoder

_PADDLEPALM = {"reuse_head_with": "share", "set_as_aux": "auxiliary"}
"""PaddlePALM's words for keys of tasks."""
_PACKAGES = ("palm_ds.pretrain", "palm_ds.tasks")
_NOT_ARRANGING = (
    "name",
    "source",
    "weight",
    "share",
    "task_id",
    "head_lr",
    "freeze",
    "batch",
    "auxiliary",
)
"""Settings that never change which examples a task makes of a row."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Arranges items into examples, labels them, owns a head.

    The n-th example of a task is a pure function of the seed, the task and n: `layout` gets its
    uniform draws, `example` and `label` a generator keyed by n. `layout` decides everything that
    the length depends on, so that rows can be packed before any example is built.
    """

    name: str
    source: str
    """Which of the recipe's `sources` the task reads."""
    weight: float = 1.0
    """What the task's loss counts for in the sum over tasks."""
    share: str = ""
    """Use the head and the task embedding of this other task (for example: the same masked words
    in another stage, chosen by another strategy; or one head for the data of two domains)."""
    task_id: int = -1
    """The row of the task embedding its texts get. -1: tasks over corpora get one each, in the
    recipe's order; those over tables the row of `init_from`'s `export_task`, or 0."""
    head_lr: float = 0.0
    """Peak learning rate of its head; 0: the optimizer's `lr`."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that this task's steps leave as they are (`backbone.layers.0.*`); its
    stages need `mix: step`."""
    batch: int = 0
    """Examples of a step, where `batch` counts in examples; 0: as many as that says."""
    auxiliary: bool = False
    """It is there to help the others: its scores decide nothing."""

    reads: ClassVar[Literal["corpus", "table"]] = "corpus"
    """What its source is."""

    columns: ClassVar[Mapping[str, Any]] = {}
    """Columns the corpus must have: {name: function(document) -> one value a token}; the function
    lets `palm-ds corpus annotate` make the column."""
    segments: ClassVar[int] = 1
    """How many texts of an example it tells apart by the segment embedding."""
    class_names: ClassVar[Sequence[str]] = ()
    """What its classes are called, where they have names."""
    draws: ClassVar[int] = 0
    """How many uniform draws `layout` needs an item."""
    edits_text: ClassVar[bool] = False
    """Whether `label` changes the tokens of an example. Predicting, such a task has a pass of the
    encoder of its own, and is asked by name unless nothing else can be."""
    prediction_key: ClassVar[str] = ""
    """The entry of a prediction that sums it up (`label`, `value`, `text`): what a file with one
    column of predictions holds."""

    def marks(self) -> tuple[str, ...]:
        """The corpus columns that are read into examples."""
        return tuple(self.columns)

    def required_units(self) -> tuple[str, ...]:
        """Annotations of which the corpus must have at least one unit; the recipe names them in
        `units`."""
        return ()

    def items(self, source: Source, room: int) -> np.ndarray:
        """(items, any) int64: one row an item; `room` is the longest an example may be.

        By default passages that fill the room: consecutive tokens of one document, [CLS] and
        [SEP] counted; the last of a document is shorter."""
        return passages(source, room - 2)

    def training_items(self, source: Source, room: int) -> np.ndarray:
        """Those of `items` that are trained on; all, by default. Evaluation and prediction read
        every item."""
        return self.items(source, room)

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: Source, room: int
    ) -> np.ndarray:
        """(n, any) int64 for n items and (n, draws) numbers in [0, 1): the exact length of each
        example in column 0; in column 1 by how many tokens it could be longer; then whatever
        `example` wants to know.

        Free space at the end of a row is handed to an example that could be longer: what `example`
        gets in column 0 has grown by up to column 1, and the example must have just that length.
        """
        start, end, document = items.T
        length = end - start + 2
        return np.column_stack([length, np.minimum(room - length, start - document), end])

    def example(self, layout: np.ndarray, source: Source, rng: np.random.Generator) -> Example:
        """Arrange one item. Called for the first task of a blend only. By default a passage; one
        that is given more room begins earlier in its document."""
        length, _, end = layout
        return arrange([source.read(end - length + 2, end)], source.vocabulary)

    def label(self, example: Example, source: Source, rng: np.random.Generator) -> None:
        """Add `example.labels[self.name]`; may edit the ids. Called for every task of a blend, in
        their order, after `example` of the first."""
        return

    @abstractmethod
    def head(self, backbone: Encoder) -> nn.Module:
        """The module over rows of the backbone's output (palm_ds/model/heads.py)."""

    def baseline(self, targets: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """The loss and the accuracy, one a target, of knowing nothing of the text: what the
        report calls chance. NaN where a task has no such notion."""
        nothing = np.full(len(targets), np.nan)
        return nothing, nothing

    def about(self, source: Source) -> str:
        """A line for the beginning of a run: what the task found in its source; or nothing."""
        return ""

    def settled(self, source: Any) -> Task:
        """The task with what it learns of its training data before anything is trained, such as
        the names of its classes: what a recipe may leave open and a run folder has to hold."""
        return self

    def like(self, origin: Task) -> Task:
        """The task with what it takes over of the one whose head it shares (`share`), settled
        already. Raises UserError where it cannot use that head."""
        return self

    def check(self, source: Any, *, labelled: bool) -> None:
        """Raises UserError, with the row's place, where a row of its table cannot be used;
        `labelled`: labels are wanted (training, evaluation), else none need be there."""
        return

    def decode(self, scores: np.ndarray, example: Example, source: Any) -> dict[str, Any]:
        """What the scores (labels of the example, any) float32 of its head say of one example, as
        JSON."""
        raise UserError(f"tasks.{self.name}: its predictions are not for people")

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: Any
    ) -> dict[int, dict[str, Any]]:
        """{item: prediction} of {item: what was decoded of each of its examples, in order}. By
        default an item is one example."""
        return {item: dict(found[0]) for item, found in pieces.items()}

    def metrics(self, predictions: Mapping[int, dict[str, Any]], source: Any) -> dict[str, float]:
        """{metric: value} of predictions beside what the source has as labels; the first is the
        one that counts. Empty where a task has none but loss and accuracy."""
        return {}

    def tables(
        self, predictions: Mapping[int, dict[str, Any]], source: Any
    ) -> dict[str, list[list[Any]]]:
        """{title: rows of cells, the first the heads}: what the report shows of the predictions
        beside `metrics`, small (which classes are taken for which, scores of each kind of tag)."""
        return {}

    def class_name(self, label: int) -> str:
        """The display name of a class (palm-ds inspect)."""
        return self.class_names[label] if self.class_names else str(label)

    @classmethod
    def on(
        cls,
        *,
        train: Rows | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        **settings: Any,
    ) -> TaskWithData:
        """The task on rows to train and evaluate on, for palm.Trainer; `settings` are its own keys.

        `columns` {role: column} and the other keys of a source's `read` say how files are read
        (docs/finetuning.md); without `train` it reads the rows of the task it is blended with."""
        kind = kind_of(cls)
        return TaskWithData(
            kind=kind,
            name=name or kind.rpartition(".")[2].lower(),
            train=train,
            dev=dev,
            read={**(read or {}), **({"columns": dict(columns)} if columns else {})},
            mix_ratio=mix_ratio,
            settings={_PADDLEPALM.get(key, key): value for key, value in settings.items()},
        )

    # ---- what commands ask of a fine-tuning task ----

    def label_roles(self) -> tuple[str, ...]:
        """The columns of a table that hold its labels."""
        return ()

    def describe_rows(self, source: Any, room: int) -> str:
        """A line about a table for the beginning of a run; `room`: the most tokens of an
        example."""
        return f"{self.name}: {len(source):,} rows"

    def cut_rows(self, source: Any, room: int) -> int:
        """How many rows are too long to be read whole."""
        return 0

    def arrangement_key(self) -> str:
        """The same for tasks that make the same examples of a row: they share one pass of the
        encoder when predicting."""
        settings = {k: v for k, v in asdict(self).items() if k not in _NOT_ARRANGING}
        return repr((type(self), settings))

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        """A prediction in one cell: its `prediction_key`, or nothing for an empty prediction."""
        value = prediction.get(self.prediction_key, "")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return " ".join(text.split())

    def prediction_files(
        self, predictions: Mapping[int, dict[str, Any]], source: Any
    ) -> dict[str, Any]:
        """{ending: content} of files to write beside the predictions: texts, or JSON."""
        return {}

    def score_rows(self, source: Any, predictions: Sequence[StoredPrediction]) -> dict[str, float]:
        """`metrics` of predictions that were read from a file, one for each row of `source`, which
        has no tokenizer. Raises UserError."""
        return self.metrics(dict(enumerate(map(self.read_prediction, predictions))), source)

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        """A prediction as `metrics` takes it. Raises UserError."""
        if not self.prediction_key:
            return dict(stored.values)
        return {**stored.values, self.prediction_key: stored.value(self.prediction_key)}

    def hf_export(self) -> HeadTaken | None:
        """The transformers head that computes what this task's head does; None: there is none."""
        return None


def passages(source: Source, size: int) -> np.ndarray:
    """(passages, 3) start, end, start of the document: every document cut every `size` tokens.

    What is left at the end of a document, when longer than half of `size`, is cut once more at a
    drawn place: texts of 0.5 to 1 rows would fit beside nothing. (The later piece gets its
    beginning back where the row has room.)"""
    count = -(-(source.ends - source.starts) // size)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    start = np.repeat(source.starts, count) + number * size
    rest_start = source.starts + (count - 1) * size
    rest = source.ends - rest_start
    draw = keyed.uniform(keyed.key("passage"), rest_start, 1)[:, 0]
    cut = rest_start + (rest * (0.25 + 0.5 * draw)).astype(np.int64)
    start = np.sort(np.concatenate([start, cut[(rest > size / 2) & (rest < 0.97 * size)]]))
    document = np.searchsorted(source.starts, start, side="right") - 1
    following = np.append(start[1:], source.ends[-1:])
    end = np.minimum(following, source.ends[document])
    return np.column_stack([start, end, source.starts[document]])


def guess(targets: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The loss and the accuracy, one a target, of one who knows how often each class was counted
    and nothing else; one is added to each count."""
    share = (counts + 1) / (counts + 1).sum()
    return -np.log(share[targets]), (targets == share.argmax()).astype(float)


def build(name: str, values: Mapping[str, Any]) -> Task:
    """A task from its entry in the recipe: `kind` (by default the name) and the task's own keys."""
    where = f"tasks.{name}"
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected keys such as `source: ...`, got {values!r}")
    if "+" in name:
        raise UserError(f"{where}: a task's name cannot hold a +")
    kind = values.get("kind", name)
    fields = {key: value for key, value in values.items() if key != "kind"}
    if "name" in fields:
        raise UserError(f"{where}.name: the task's name is its key in `tasks`; remove this")
    return parse(find(kind, where), {"name": name, **fields}, where)


def find(kind: str, where: str = "kind") -> type[Task]:
    """The task class of a kind: a file of palm_ds/pretrain or palm_ds/tasks, or `module.Class`."""
    if not isinstance(kind, str):
        raise UserError(f"{where}.kind: expected a task's name, got {kind!r}")
    known = known_kinds()
    if kind in known:
        return _task_class(importlib.import_module(known[kind]))
    if "." not in kind:
        raise UserError(f"{where}.kind: no task {kind!r}{suggest(kind, known)} (or module.Class)")
    return import_class(kind, Task, f"{where}.kind")


def kind_of(task: type[Task]) -> str:
    """The name of a task's class in a recipe. Raises UserError if it could not be found again."""
    kinds = {module: kind for kind, module in known_kinds().items()}
    return kinds.get(task.__module__) or name_of(task)


def known_kinds() -> dict[str, str]:
    """{kind: module} of every task that comes with palm_ds."""
    found = {}
    for package_name in _PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.ispkg:  # `shared` and `metrics` are no tasks
                found[module.name] = f"{package_name}.{module.name}"
    return found


def _task_class(module: Any) -> type[Task]:
    for value in vars(module).values():
        mine = isinstance(value, type) and value.__module__ == module.__name__
        if mine and issubclass(value, Task):
            return value
    raise AssertionError(f"{module.__name__} holds no Task")
