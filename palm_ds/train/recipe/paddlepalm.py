"""The YAML files of PaddlePALM r0.3 (`Controller`) as a recipe.

    config.yaml, TASK.yaml of each task ──import_config──> a recipe's values; the lines that mean
                                                           something else here; the lines left out

As there, the config is passed on to every task and overrules its file. A line that is neither
carried over nor named would be a setting lost without a word, so every key that nothing has read is
reported with its file and line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from palm_ds.common.config import read_yaml
from palm_ds.common.errors import UserError
from palm_ds.train.recipe.recipe import make_recipe

_KINDS = {
    "cls": "classification",
    "match": "matching",
    "mrc": "reading",
    "mlm": "masked_words",
    "ner": "tagging",
}
"""{paradigm: kind of task}."""
_KEYS: Mapping[str, Mapping[str, tuple[str, type]]] = {
    "classification": {"dropout_prob": ("dropout", float)},
    "matching": {
        "learning_strategy": ("strategy", str),
        "margin": ("margin", float),
        "dropout_prob": ("dropout", float),
    },
    "reading": {
        "doc_stride": ("stride", int),
        "max_query_len": ("max_query", int),
        "max_answer_len": ("max_answer", int),
        "n_best_size": ("n_best", int),
        "with_negative": ("unanswerable", bool),
        "null_score_diff_threshold": ("null_threshold", float),
    },
    "tagging": {"use_crf": ("crf", bool), "dropout_prob": ("dropout", float)},
    "masked_words": {},
}
"""{kind: {PaddlePALM's key: its name here, and its type}}."""
_SCHEDULES = {"linear_warmup_decay": "linear", "noam_decay": "noam"}
_PRECISION = "precision is in the DeepSpeed file, such as zero1_bf16.json"
_PREDICTION = "predict by `palm-ds predict RUN --tasks TASK --input FILE --output DIR`"
_CLASSES = "classes are collected from the rows and saved with the weights"
_LEFT_OUT = {
    "use_gpu": "the launcher and CUDA_VISIBLE_DEVICES choose the devices",
    "use_cuda": "the launcher and CUDA_VISIBLE_DEVICES choose the devices",
    "do_lower_case": "text is lowercased if vocab.txt has no capital letters; otherwise put "
    '{"do_lower_case": ...} into a tokenizer_config.json next to it',
    "save_infermodel_every_n_steps": "every checkpoint and weights folder can predict; there is no "
    "inference graph to save",
    "pred_file": _PREDICTION,
    "pred_output_path": _PREDICTION,
    "pred_batch_size": _PREDICTION,
    "print_first_n": "`palm-ds inspect RECIPE` shows the rows of a step",
    "shuffle": "training rows are always shuffled, by the seed",
    "use_fp16": _PRECISION,
    "loss_scaling": _PRECISION,
    "label_map_config": _CLASSES,
    "n_classes": _CLASSES,
    "lr_scheduler": "PaddlePALM ignores it without a warmup_proportion, too",
}
"""{key: why a recipe has no counterpart}, for those that nothing has read."""


@dataclass(frozen=True, kw_only=True)
class ImportedConfig:
    """A recipe made of PaddlePALM's files."""

    values: dict[str, Any]
    """The recipe's keys."""
    save_path: str
    """PaddlePALM's output folder; empty if there is none."""
    changed: tuple[str, ...]
    """Lines that are carried over and mean something else here, as `file:line: key: why`."""
    left_out: tuple[str, ...]
    """Lines that are not carried over, likewise."""


def import_config(config: Path, folder: Path, init_from: str = "") -> ImportedConfig:
    """The recipe of a Controller's config and of the `TASK.yaml` in a folder. `init_from`:
    what load_pretrain was given, by default the folder that the config names.

    Raises UserError, with file and line, for files that are no such config, and for tasks that no
    kind of task here can be.
    """
    reader = _ConfigReader(_File.read(config))
    names = reader.names("task_instance", required=True)
    reader.tasks = {name: _File.read(folder / f"{name}.yaml") for name in names}
    named = _start(reader)
    if not (start := init_from or named):
        raise UserError(
            f"{config}: names no weights (pretrain_model_path or backbone_config_path); give what "
            "load_pretrain was given by --init_from"
        )
    sources, tasks = {}, {}
    for name in names:
        sources[name], tasks[name] = _task(reader, name, {start, named})
    _roles(reader, tasks)
    values: dict[str, Any] = {
        "seed": reader.number("random_seed", reader.number("seed", 1, int), int),
        "init_from": start,
        "length": _length(tasks),
        "batch": _batch(reader),
        "optimizer": _optimizer(reader),
        "schedule": _schedule(reader),
        "sources": sources,
        "held_out": 0,
        "tasks": tasks,
        "stages": _stages(reader, tasks),
        "save": {"every": _every(reader)},
        "log": {"every": reader.number("print_every_n_steps", 5, int)},
    }
    save_path = reader.text("save_path", "")
    _check(values, str(config))
    left_out = tuple(reader.left_out())
    return ImportedConfig(
        values=values, save_path=save_path, changed=tuple(reader.changed), left_out=left_out
    )


# ---- files ----


@dataclass(frozen=True)
class _Entry:
    """A key's value and its place, `file:line`."""

    value: Any
    place: str


@dataclass(frozen=True)
class _File:
    """The entries of a YAML file."""

    path: Path
    entries: Mapping[str, _Entry]

    @classmethod
    def read(cls, path: Path) -> _File:
        values = read_yaml(path)
        node = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
        assert isinstance(node, yaml.MappingNode)  # read_yaml raises otherwise
        places = [f"{path}:{key.start_mark.line + 1}" for key, _ in node.value]
        pairs = zip(values.items(), places, strict=True)
        return cls(path, {str(key): _Entry(value, place) for (key, value), place in pairs})


@dataclass
class _ConfigReader:
    """Values of the config and of tasks. It notes which entries were read."""

    config: _File
    tasks: Mapping[str, _File] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Places of the entries that were read."""
    changed: list[str] = field(default_factory=list)

    def entry(self, key: str, task: str = "") -> _Entry | None:
        """The entry of the config, which overrules that of the task."""
        own = self.tasks[task].entries.get(key) if task else None
        found = self.config.entries.get(key, own)
        if found is not None:
            self.used.add(found.place)
        if own is not None and own.place not in self.used and found is not None:
            self.used.add(own.place)
            if own.value != found.value:
                why = f"overruled by {found.place}, as in PaddlePALM"
                self.changed.append(f"{own.place}: {key}: {why}")
        return found

    def place(self, key: str, task: str = "") -> str:
        """File and line of an entry that is there."""
        entry = self.entry(key, task)
        assert entry is not None
        return entry.place

    def note(self, key: str, why: str, task: str = "") -> None:
        """A line that is there means something else here."""
        line = f"{self.place(key, task)}: {key}: {why}"
        self.changed += [line] if line not in self.changed else []

    def text(self, key: str, default: str | None = None, task: str = "") -> str:
        """A text; without default it must be given."""
        if (entry := self.entry(key, task)) is None:
            return _given(default, key, self.tasks[task] if task else self.config)
        return str(entry.value)

    def number(self, key: str, default: object, kind: type, task: str = "") -> Any:
        """A number or a truth value; without default (None) it must be given."""
        if (entry := self.entry(key, task)) is None:
            return _given(default, key, self.tasks[task] if task else self.config)
        return _converted(entry, key, kind)

    def names(self, key: str, *, required: bool = False) -> list[str]:
        """A list, or its items separated by commas; empty if it is not given. Those of a required
        one differ from one another."""
        if (entry := self.entry(key)) is None:
            return _given(None if required else [], key, self.config)
        value = entry.value
        items = value if isinstance(value, list) else str(value).replace(",", " ").split()
        if not items or (required and len(set(items)) < len(items)):
            raise UserError(f"{entry.place}: {key}: expected different names, got {value!r}")
        return [str(item) for item in items]

    def leave(self, key: str, task: str = "") -> None:
        """An entry that was read has no counterpart after all."""
        files = [self.config, *([self.tasks[task]] if task else [])]
        self.used -= {file.entries[key].place for file in files if key in file.entries}

    def left_out(self) -> list[str]:
        """The entries that nothing has read."""
        files = (self.config, *self.tasks.values())
        return [
            f"{entry.place}: {key}: {_LEFT_OUT.get(key, 'no key of PaddlePALM r0.3')}"
            for file in files
            for key, entry in file.entries.items()
            if entry.place not in self.used
        ]


def _given(default: object, key: str, file: _File) -> Any:
    if default is None:
        raise UserError(f"{file.path}: {key}: missing; it must be given")
    return default


def _converted(entry: _Entry, key: str, kind: type) -> Any:
    """A value of this type; YAML reads 3e-5 as text. Raises UserError."""
    value = entry.value
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        if kind is str:
            return str(value)
        number = float(value)
        if kind is int and number != int(number):
            raise ValueError
        return kind(number)
    except (KeyError, TypeError, ValueError, OverflowError):
        wanted = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
        raise UserError(f"{entry.place}: {key}: expected {wanted}, got {value!r}") from None


# ---- parts of a recipe ----


def _start(reader: _ConfigReader) -> str:
    """The folder of the weights: that of `pretrain_model_path` (without `params`), or of the
    encoder's config; empty if the config names neither."""
    _ = reader.entry("backbone")  # the folder says what it is
    weights = reader.text("pretrain_model_path", "")
    encoder = reader.text("backbone_config_path", "")
    if not (weights or encoder):
        return ""
    path = Path(weights) if weights else Path(encoder).parent
    return str(path.parent if path.name == "params" else path)


def _task(
    reader: _ConfigReader, name: str, folders: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The source and the task of TASK.yaml; `max_length` is its max_seq_len. `folders`: with
    weights, whose vocabulary is the default."""
    kind = _kind(reader, name)
    source: dict[str, Any] = {"table": reader.text("train_file", None, name)}
    if reader.number("for_cn", False, bool, name):
        if kind == "reading":
            why = "contexts keep their spaces, since answers have places in them"
            reader.note("for_cn", why, name)
        else:
            source["read"] = {"strip_spaces": True}
    vocabulary = reader.text("vocab_path", "", name)
    if vocabulary and Path(vocabulary) not in [Path(each) / "vocab.txt" for each in folders]:
        source["tokenizer"] = vocabulary
    task: dict[str, Any] = {"kind": kind, "source": name}
    for their_key, (ours, type_) in _KEYS[kind].items():
        if reader.entry(their_key, name):
            task[ours] = reader.number(their_key, None, type_, name)
    if kind == "classification":
        classes = reader.number("n_classes", None, int, name)
        task["labels"] = [str(number) for number in range(classes)]
    if not reader.number("shuffle", True, bool, name):
        reader.leave("shuffle", name)
    task["max_length"] = reader.number("max_seq_len", None, int, name)
    return source, task


def _length(tasks: Mapping[str, dict[str, Any]]) -> int:
    """Tokens of a row, in which the longest texts fit, or two pairs of them; `max_length` of a task
    stays where it is less."""
    rows = {
        name: task["max_length"] * (2 if task.get("strategy") == "pairwise" else 1)
        for name, task in tasks.items()
    }
    length = max(rows.values())
    for task in tasks.values():
        if task["max_length"] == length:
            del task["max_length"]
    return length


def _kind(reader: _ConfigReader, name: str) -> str:
    """The kind of task that a paradigm is. Raises UserError for other paradigms and readers."""
    paradigm = reader.text("paradigm", None, name)
    if (kind := _KINDS.get(paradigm)) is None:
        raise UserError(
            f"{reader.place('paradigm', name)}: paradigm: {paradigm!r} is none of "
            f"{', '.join(_KINDS)}; write it as a task of your own (docs/api.md)"
        )
    rows = reader.text("reader", None, name)
    if rows.removesuffix("4ernie") != paradigm:
        raise UserError(
            f"{reader.place('reader', name)}: reader: {rows!r} with the paradigm {paradigm!r}; "
            "here a task reads rows in its own way"
        )
    return kind


def _roles(reader: _ConfigReader, tasks: Mapping[str, dict[str, Any]]) -> None:
    """Sets which tasks are auxiliary and which share a head."""
    targets = _one_each(reader, "target_tag", tasks)
    heads = _one_each(reader, "task_reuse_tag", tasks)
    first: dict[str, str] = {}
    for number, (name, task) in enumerate(tasks.items()):
        own = reader.number("is_target", True, bool, name) if not targets else None
        if own is False or (targets and targets[number] == "0"):
            task["auxiliary"] = True
        host = first.setdefault(heads[number], name) if heads else name
        host = host if heads else reader.text("task_reuse_scope", name, name)
        if host != name:
            task["share"] = host
            task.pop("labels", None)
    if all(task.get("auxiliary") for task in tasks.values()):
        raise UserError(f"{reader.config.path}: target_tag: no task is a target")


def _one_each(reader: _ConfigReader, key: str, tasks: Mapping[str, Any]) -> Sequence[str]:
    values = reader.names(key)
    if values and len(values) != len(tasks):
        raise UserError(
            f"{reader.place(key)}: {key}: {len(values)} values for {len(tasks)} of task_instance"
        )
    return values


def _batch(reader: _ConfigReader) -> str:
    size = reader.number("batch_size", None, int)
    why = "PaddlePALM's is per card, a recipe's is of all processes: multiply it by their number"
    reader.note("batch_size", why)
    return f"{size} examples"


def _optimizer(reader: _ConfigReader) -> dict[str, Any]:
    """AdamW, which PaddlePALM's Adam with its decoupled decay is."""
    if reader.text("optimizer", "adam") != "adam":
        reader.leave("optimizer")
    decay = reader.number("weight_decay", 0.0, float)
    made = {"lr": reader.number("learning_rate", None, float), "weight_decay": decay, "clip": 1.0}
    if reader.number("use_ema", False, bool):
        made["ema"] = reader.number("ema_decay", None, float)
        reader.note("ema_decay", "here the averages are evaluated and saved")
    elif reader.entry("ema_decay"):
        reader.note("ema_decay", "without use_ema there are no averages")
    return made


def _schedule(reader: _ConfigReader) -> dict[str, Any]:
    """A constant rate without warm-up, as there."""
    warmup = reader.number("warmup_proportion", 0.0, float)
    if not warmup:
        return {"kind": "constant", "warmup": 0}
    name = reader.text("lr_scheduler", "linear_warmup_decay")
    if name not in _SCHEDULES:
        raise UserError(
            f"{reader.place('lr_scheduler')}: lr_scheduler: {name!r} is none of "
            f"{', '.join(_SCHEDULES)}; for another one see docs/api.md"
        )
    if name == "linear_warmup_decay":
        why = "here the rate decays from the end of the warm-up, without PaddlePALM's jump"
        reader.note("warmup_proportion", why)
    return {"kind": _SCHEDULES[name], "warmup": warmup}


def _stages(reader: _ConfigReader, tasks: Mapping[str, Mapping[str, Any]]) -> Any:
    """The epochs are those of the first target."""
    epochs = reader.number("num_epochs", None, float)
    ratios = _one_each(reader, "mix_ratio", tasks) or ["1"] * len(tasks)
    if len(tasks) == 1:
        return [{name: f"{epochs:g} epochs" for name in tasks}]
    main = next(name for name, task in tasks.items() if not task.get("auxiliary"))
    try:
        mix = {name: float(ratio) for name, ratio in zip(tasks, ratios, strict=True)}
    except ValueError:
        raise UserError(
            f"{reader.place('mix_ratio')}: mix_ratio: expected numbers, got {', '.join(ratios)}"
        ) from None
    sampler = {"mix_ratio": mix, "reference": main, "epochs": epochs}
    return {"joint": list(tasks), "mix": "step", "sampler": sampler}


def _every(reader: _ConfigReader) -> int:
    """Steps between checkpoints; PaddlePALM by default saves none."""
    steps = reader.number("save_every_n_steps", 0, int)
    return max(reader.number("save_ckpt_every_n_steps", steps, int), 0)


def _check(values: Mapping[str, Any], where: str) -> None:
    """Raises UserError if it is no recipe. The weights need not be here yet."""
    encoder = {"preset": "ernie-2.0-base", "max_positions": max(int(values["length"]), 512)}
    make_recipe({**values, "init_from": "", "backbone": encoder}, where)
