"""Sections of a recipe: sources, evaluation, checkpoints, logging, and the batch size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Settings, one_of
from palm_ds.data.reader import TableSettings
from palm_ds.data.sources.folds import FoldSettings
from palm_ds.data.tasks.task import MOST_EXAMPLES
from palm_ds.model.pooling import POOLINGS

SPIKE_MARGIN = 10
"""Steps between a checkpoint and a spike that it is free of: weights are bad before the loss."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """A table to evaluate on in addition to the validation rows."""

    table: str | list[str]
    """As a source's `table`."""
    read: TableSettings | None = None
    """How to read it. Default: as the source's rows."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings(Settings):
    """Origin of a source's text: one prepared corpus, a mixture of corpora, ERNIE 1.0's own data
    files, or a table of rows."""

    corpus: str = ""
    """Folder of a corpus made by palm-ds prepare, or its URL (s3://, gs://, hf://, https://)."""
    mix: dict[str, PositiveFloat] = field(default_factory=dict)
    """{folder or URL: weight}: several corpora, sampled by weight, in the unit of `batch`: by their
    shares of the tokens, or with a batch in examples of the examples."""
    sampling_exponent: NonNegativeFloat = 0.0
    """With `mix`: multiplies each weight by the number of tokens of its corpus to this power. 0:
    the weights as given; 1: in proportion to size; 0.3 to 0.7: small corpora, such as rare
    languages, more often than that (XLM's alpha)."""
    ernie: str = ""
    """A file that lists ERNIE 1.0's pretraining files. They are converted to a corpus next to it,
    FILE.corpus, on first use."""
    table: str | list[str] = ""
    """A file of rows, several files, a pattern such as `data/*.tsv`, or a folder saved by
    `datasets` (docs/finetuning.md)."""
    reader: str = ""
    """A function or class of your own, `module.name`, that yields rows without end
    (docs/finetuning.md)."""
    pass_examples: NonNegativeInt = 0
    """With `reader`, required: rows that count as one epoch."""
    read: TableSettings = TableSettings()
    """With `table` or `reader`: how to read the rows."""
    tokenizer: str = ""
    """With `ernie`, required: the vocab.txt of its token ids. With `table` or `reader`: the
    tokenizer for its texts (default: that of `init_from`)."""
    validation: str | list[str] = ""
    """Another corpus (with `ernie`: another list; with `table` or `reader`: another table) to
    evaluate on. Nothing of the source itself is then held out; of a reader nothing ever is."""
    folds: FoldSettings | None = None
    """With `table`: cross-validation, which holds out one of several folds of its rows instead of a
    `held_out` share (`palm-ds suite` trains on all of them in turn)."""
    evaluation_sets: dict[str, EvaluationSet] = field(default_factory=dict)
    """With `table`: {name: {table: FILE}}: more tables to evaluate on, such as `test`. Each is
    reported separately, as `task (name)`; only `validation` decides which weights are best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.corpus, self.mix, self.ernie, self.table, self.reader)
        if sum(map(bool, given)) != 1:
            raise UserError(
                "give one of `corpus: FOLDER`, `mix: {FOLDER: weight, ...}`, `ernie: FILELIST`, "
                "`table: FILE` and `reader: module.function`"
            )
        self._check_reader()
        if self.reads == "corpus" and bool(self.ernie) != bool(self.tokenizer):
            raise UserError("`ernie: FILELIST` and `tokenizer: vocab.txt` go together")
        if self.reads == "corpus" and self.read != TableSettings():
            raise UserError(
                "read: is for a `table` or `reader`; `palm-ds prepare` read the corpus; remove it"
            )
        if self.sampling_exponent and not self.mix:
            raise UserError("sampling_exponent: needs `mix`, several corpora")
        if self.folds and not self.table:
            raise UserError("folds: needs `table`, whose rows it splits")
        if self.folds and self.validation:
            raise UserError("folds, validation: both name the rows to evaluate on; remove one")
        if self.evaluation_sets and not (self.reads == "table" and self.validation):
            raise UserError("evaluation_sets: needs a table as `validation`, to which it adds more")

    def _check_reader(self) -> None:
        """A pass is known, and rows are as many as are read."""
        if bool(self.reader) != bool(self.pass_examples):
            raise UserError("`reader: module.function` and `pass_examples: N` go together")
        for key, value in (("drop", self.read.drop), ("bad_rows", self.read.bad_rows == "skip")):
            if self.reader and value:
                raise UserError(f"read.{key}: a reader leaves out rows itself; remove it")

    @property
    def weights(self) -> dict[str, float]:
        """{folder: weight} of the corpora. The corpus of `ernie` is made when it is opened."""
        return self.mix or {self.corpus or f"{self.ernie}.corpus": 1.0}

    @property
    def validation_folder(self) -> str:
        """The corpus to evaluate on; empty if documents of the source are held out instead."""
        if not isinstance(self.validation, str):
            raise UserError("validation: a corpus has one validation folder, not several")
        return f"{self.validation}.corpus" if self.ernie and self.validation else self.validation

    @property
    def reads(self) -> Literal["table", "corpus"]:
        """The kind of source that tasks get."""
        return "table" if self.table or self.reader else "corpus"


def sampling_weights(
    weights: Mapping[str, float], tokens: Mapping[str, int], exponent: float
) -> dict[str, float]:
    """The weights of corpora times their {corpus: tokens} to a power, as shares of 6 digits; as
    they are if the exponent is 0."""
    if not exponent:
        return dict(weights)
    most = max(tokens[name] for name in weights)
    scaled = {name: value * (tokens[name] / most) ** exponent for name, value in weights.items()}
    return {name: float(f"{value / sum(scaled.values()):.6g}") for name, value in scaled.items()}


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Settings):
    """A linear classifier fitted to the vectors of labeled texts at every evaluation."""

    table: str | list[str]
    """Texts and their classes, as a source's `table`."""
    validation: str | list[str] = ""
    """A table to test the classifier on; default: a fifth of the rows of `table`."""
    read: TableSettings = TableSettings()
    """How to read both."""
    rows: Annotated[int, Field(ge=2)] = 2000
    """Maximum rows to fit on, and to test on; the sample is always the same."""
    pooling: Annotated[str, one_of(POOLINGS)] = "mean"
    """The vector of a text: mean, cls or max over those of its tokens."""


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(Settings):
    """Evaluation on held-out data: loss, perplexity and accuracy of every task."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end of each stage."""
    examples: NonNegativeInt | None = None
    """Maximum held-out examples of each task group over a corpus (default: 1,000), and rows of each
    table (default: all). The sample is always the same."""
    mask_rate: InnerShare | None = None
    """Share of the tokens of held-out texts that masking tasks predict. Default: a task's own
    `rate`, even in stages with another. Losses are then comparable within a run; with a fixed
    value, such as 0.15, also between runs with different rates."""
    best: str = ""
    """Metric that selects the final weights: `task.metric`, or `mean` over the first metric of each
    task that is not auxiliary. Empty: the weights of the last step. Higher is better, except for
    `loss`, `mse`, `rmse`, `mae`, `perplexity` and names that end with `_error` or `_loss`, unless
    they begin with `neg_`, `negative_` or `minus_` (as in scikit-learn)."""
    passes: bool = False
    """Also evaluate after each pass: an epoch of the first task group. Needs a `batch` in
    examples."""
    patience: NonNegativeInt = 0
    """With `best`: stop after this many evaluations without improvement; 0: never. Those before the
    compared tasks are all trained, which a later stage may begin with, do not count."""

    metrics: dict[str, list[str]] = field(default_factory=dict)
    """{task: [module.function, ...]}: metrics of your own, reported after the task's; one with the
    name of a task's metric replaces it. A function gets two lists, the predictions and the labels
    of the rows, and returns a number or {metric: number}."""
    pairs: str | list[str] = ""
    """Files or patterns of minimal pairs (docs/tasks.md), each a paradigm: every evaluation also
    reports how often the masked-LM head prefers the good sentence, as `task (minimal pairs)`."""
    pair_score: Literal["unmasked", "masked"] = "unmasked"
    """With `pairs`: the score of a sentence. unmasked: its mean loss as it is. masked: the sum of
    the losses of its tokens, each masked in turn, which takes a forward pass per token."""
    probe: ProbeSettings | None = None
    """A small labeled table: every evaluation also reports how well a linear classifier on the
    encoder's vectors predicts the classes, as `task (probe)` (docs/tasks.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience and not self.best:
            raise UserError("evaluate.patience: needs `best`, the metric to improve")

    @property
    def of_corpus(self) -> int:
        """Held-out examples of each task group over a corpus."""
        return 1000 if self.examples is None else self.examples


@dataclass(frozen=True, kw_only=True)
class SaveSettings(Settings):
    """Checkpoints."""

    every: NonNegativeInt = 1000
    """Steps between checkpoints; 0: only at the end."""
    passes: bool = False
    """Also save after each pass, as in `evaluate.passes`."""
    keep: PositiveInt = 3
    """Number of most recent checkpoints to keep, not counting those less than 10 steps older than
    the newest. While a loss spike lasts, no checkpoint from before it is deleted."""
    keep_every: NonNegativeInt = 10000
    """Also keep the first checkpoint of every span of this many steps, for good; 0: none."""
    best: NonNegativeInt = 0
    """Also keep this number of the best evaluated checkpoints, by `evaluate.best` or else the mean
    held-out loss, for `palm-ds merge --best`. Needs an `evaluate.every` that divides `every`."""
    background: bool = True
    """Write checkpoints while training continues, from a copy in host memory. If there is too
    little memory for the copy, training waits, as with false."""


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    """Log lines."""

    every: PositiveInt = 10
    """Steps between log lines. Each shows averages over these steps."""


@dataclass(frozen=True)
class BatchSize:
    """The size of a step over all processes: packed rows, or examples of each task group."""

    number: int
    unit: Literal["rows", "examples"]

    @classmethod
    def parse(cls, text: str, length: int) -> BatchSize:
        """Read `393216 tokens`, `768 rows` or `32 examples`; `length`: tokens of a row."""
        match = re.fullmatch(r"([\d_]+)\s*(tokens|rows|examples)", str(text).strip())
        if not match:
            raise UserError(
                f"batch: expected `393216 tokens`, `768 rows` or `32 examples`, got {text!r}"
            )
        number, unit = int(match[1].replace("_", "")), match[2]
        if unit == "tokens" and number % length:
            near = max(round(number / length), 1) * length
            raise UserError(
                f"batch: {number} tokens is not a multiple of `length` ({length}); use {near} "
                "tokens"
            )
        number = number // length if unit == "tokens" else number
        if number < 1:
            least = f"one row of {length} tokens" if unit == "tokens" else "1"
            raise UserError(f"batch: {text!r} is smaller than {least}")
        if number > MOST_EXAMPLES:
            raise UserError(f"batch: at most {MOST_EXAMPLES:,} {unit}, got {number:,}")
        return cls(number, "examples" if unit == "examples" else "rows")


@dataclass(frozen=True, kw_only=True)
class SpikeSettings(Settings):
    """Settings for jumps of a task's loss."""

    action: Literal["warn", "stop", "rollback"] = "warn"
    """`warn` in the log, `stop` the run, or `rollback` to the last checkpoint from before the spike
    and leave out the data of the steps since then. With any of them, weights that are ruined at
    the end, or after a spike of `window` steps, end the run with exit code 3 (or are rolled
    back)."""
    zscore: NonNegativeFloat = 20.0
    """Robust z-score above which a loss is a spike: its distance from the median, divided by the
    standard deviation as estimated from the median absolute deviation. 0: none is a spike."""
    window: Annotated[int, Field(ge=2)] = 100
    """Previous steps of the same stage with which a loss is compared."""
