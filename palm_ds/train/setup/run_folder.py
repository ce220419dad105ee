"""The run folder: which recipe and data it belongs to, and the files that a run writes.

recipe.yaml and ds_config.json as resolved, changes.jsonl (settings changed since the start),
environment.json, metrics.jsonl, TensorBoard events, report.html, run.lock while it runs,
checkpoints/, weights/ (sharded_state) and hf/ (opens with AutoModel).
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.config import differences, read_yaml
from palm_ds.common.errors import UserError
from palm_ds.common.files import fingerprint
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import short_number
from palm_ds.common.remote_files import check_local
from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.stages import StepSize
from palm_ds.data.tasks.task import CorpusTask, TableTask
from palm_ds.engine import Engine
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.full_disk import PATIENCE_SECONDS, at_rank0, error_of, retried
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.processes import launch_env
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup
from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.processes.run_lock import RunLock, lock_run_folder
from palm_ds.runtime.zero.swap_folder import check_swap_room, prepare_swapping
from palm_ds.train.recipe.recipe import CHANGEABLE, NOT_LEARNED, Recipe, make_recipe
from palm_ds.train.report.environment import environment
from palm_ds.train.setup.build import AnyStream, build_stream
from palm_ds.train.setup.sources import Data, open_data
from palm_ds.weights.model_folder import fingerprint_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run: what is learned, how it is computed, where it is written."""

    recipe: Recipe
    ds_config: DSConfig
    folder: Path
    resumed_by: str = "run the same command again"
    """What a user does to resume it, for messages."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def best(self) -> Path:
        """The weights of the best evaluation (`evaluate.best`)."""
        return self.folder / "best"

    @property
    def heads_folder(self) -> Path:
        """A Hugging Face folder for each head (`export_heads`)."""
        return self.folder / "hf_heads"


def check_folder(run: RunSpec, data: Data) -> list[str]:
    """Raises UserError, with the differences, if the folder holds a run of another recipe or other
    data, or if it cannot be written; TemporaryError if its disk has become read-only. Returns the
    differences that a run may be resumed with."""
    file, saved = run.folder / "recipe.yaml", checkpoint.steps_in(run.checkpoints)
    check_writable(run.folder, begun=bool(saved))
    if not file.exists():
        if saved:
            raise UserError(f"{run.folder}: has checkpoints but no recipe.yaml; not a run folder")
        for output in (run.folder / name for name in ("weights", "hf", "best")):
            if output.is_dir() and any(output.iterdir()):
                raise UserError(
                    f"{output}: is of no run, as there is no {file}, and would be replaced; choose "
                    "another folder, or rename it"
                )
        return []
    before, now = _stored_recipe(file), _recipe_to_store(run, data)
    prints = before.pop("corpora"), now.pop("corpora")
    both = [name for name in prints[0] if name in prints[1]]  # others differ in the recipe itself
    changes = [f"the contents of {name}" for name in both if prints[0][name] != prints[1][name]]
    changes += differences(before, now)
    is_finished = bool(saved) and saved[0] >= _planned_steps(before)
    allowed = NOT_LEARNED if is_finished else (*NOT_LEARNED, *CHANGEABLE)
    changed = [line for line in changes if not _concerns(line, allowed)]
    if changed:
        more = f" (and {len(changed) - 4} more)" if len(changed) > 4 else ""
        finished = " finished" if is_finished else ""
        onward = f" (`init_from: {run.folder}` starts from its weights)" if finished else ""
        raise UserError(
            f"{run.folder}: holds a{finished} run of a different recipe: "
            f"{'; '.join(changed[:4])}{more}. Choose another folder{onward}, or restore the recipe "
            "and its data"
        )
    return changes


def _planned_steps(stored: Mapping[str, Any]) -> float:
    """The steps of a stored recipe's plan; infinity if this version cannot read it."""
    with suppress(UserError):
        return read_stages(stored["stages"], list(stored["tasks"])).steps
    return math.inf


def _concerns(difference: str, keys: Sequence[str]) -> bool:
    """Whether a difference is that of one of the keys, or below one."""
    key = difference.partition(":")[0]
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def record_changes(folder: Path, step: int, changes: Sequence[str]) -> str:
    """Add a line to changes.jsonl: with what other settings the run is resumed after `step` steps.
    Returns one for the log."""
    line = json.dumps({"step": step, "changes": list(changes)}, ensure_ascii=False)
    with (folder / "changes.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return f"changed from step {step + 1} on: {'; '.join(changes)}"


def check_writable(folder: Path, *, begun: bool = False) -> None:
    """Raises UserError unless the folder exists or can be created, and is writable; TemporaryError
    if a run that has `begun` there could write it then."""
    check_local(folder, "run_dir: ")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        what = "is a file" if existing == folder else f"{existing} is a file"
        raise UserError(f"run folder {folder}: {what}; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        read_only = begun and os.statvfs(existing).f_flag & os.ST_RDONLY
        why = f": {os.strerror(errno.EROFS)}" if read_only else ""
        raise error_of(f"run folder {folder}: {existing} cannot be written{why}")


def _stored_recipe(file: Path) -> dict[str, Any]:
    """The recipe and corpora of a run folder; keys added to palm_ds since have their defaults."""
    values = read_yaml(file)
    corpora = values.pop("corpora", {})
    with suppress(UserError):  # a task of another version or not importable: compared as written
        values = make_recipe(values, str(file)).resolved()
    return values | {"corpora": corpora}


def _recipe_to_store(run: RunSpec, data: Data) -> dict[str, Any]:
    """Record that a run folder is checked against: the recipe, and fingerprints of what it
    reads."""
    prints = data_fingerprints(run.recipe, data) | start_fingerprint(run, data)
    return run.recipe.resolved() | {"corpora": prints}


def start_fingerprint(run: RunSpec, data: Data) -> dict[str, str]:
    """{`init_from`: a short hash of the weights that the run starts from}, if they state hashes.
    After its first checkpoint, which holds all weights, the run reads them no more: they may change
    or be deleted, and the hash stays. What else it may read there is in docs/reliability.md."""
    start, file = run.recipe.init_from, run.folder / "recipe.yaml"
    if not start:
        return {}
    if file.is_file() and checkpoint.steps_in(run.checkpoints):
        stored = read_yaml(file).get("corpora", {}).get(start)
        return {start: stored} if stored else {}
    contents = data.start()
    return {start: fingerprint_of(contents)} if contents.hashes else {}


def data_fingerprints(recipe: Recipe, data: Data) -> dict[str, str]:
    """{corpus, table, teacher or file of a task: a short hash of its contents}."""
    prints = {folder: corpus_fingerprint(corpus) for folder, corpus in data.corpora.items()}
    prints |= {name: table.fingerprint for name, table in data.tables.items()}
    for task in recipe.built_tasks.values():
        prints |= task.file_contents() if isinstance(task, CorpusTask) else {}
    return prints | dict(data.teachers)


def corpus_fingerprint(corpus: Corpus) -> str:
    """A short hash of a corpus's contents, from the hashes in its manifest."""
    shards = {shard.name: corpus.manifest.files[shard.name] for shard in corpus.manifest.shards}
    return fingerprint([shards, dict(corpus.manifest.tokenizer)])


def lock_folder(run: RunSpec, group: ProcessGroup) -> RunLock:
    """`lock_run_folder`, once the disk has room. Collective."""
    locks: list[RunLock] = []
    lock = partial(lock_run_folder, run.folder, group=group)
    _until_written(lambda: _problem_of(lambda: locks.append(lock())), run, group)
    return locks[0]


def prepare_swap_folder(run: RunSpec, *, dry_run: bool) -> None:
    """`prepare_swapping`, once the disk of a run with checkpoints can be written; one that begins
    there is refused as a mistake."""
    prepare = partial(prepare_swapping, run.ds_config)
    if checkpoint.steps_in(run.checkpoints) and not dry_run:
        _until_written(partial(_problem_of, prepare), run, SINGLE_PROCESS)
    else:
        prepare()


def wait_for_swap_room(run: RunSpec, model: Model, processes: Processes) -> None:
    """`check_swap_room`, once the disk of the optimizer's files has room. Collective."""
    check = partial(check_swap_room, run.ds_config, model, processes)
    _until_written(partial(_problem_of, check), run, processes)


def _problem_of(check: Callable[[], None]) -> str:
    """The message of the UserError that it raises, or nothing."""
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def write_folder_together(run: RunSpec, engine: Engine, data: Data) -> None:
    """`write_folder` on rank 0, once the disk has room. Collective."""

    def attempt() -> str:
        engine.beat()
        return at_rank0(engine.processes, lambda: write_folder(run, engine.config, data))

    _until_written(attempt, run, engine.processes)


def _until_written(attempt: Callable[[], str], run: RunSpec, group: ProcessGroup) -> None:
    """Repeat `attempt`, as `retried` does, while the disk of a run with checkpoints is full: it
    waits as its saves do. That of a new run is refused at once, while somebody watches. Raises
    UserError or TemporaryError on all processes."""
    begun = group.gather(bool(checkpoint.steps_in(run.checkpoints)))[0]
    patience = PATIENCE_SECONDS if begun else 0.0
    say = partial(log.info, "%s")  # other ranks than 0 show warnings only
    if problem := retried(attempt, group=group, say=say, patience=patience):
        raise error_of(problem)


def write_folder(run: RunSpec, config: Mapping[str, Any], data: Data) -> None:
    """Write recipe.yaml, ds_config.json and environment.json, as resolved for this run."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run folder {run.folder}: cannot be made: {error.strerror}") from None
    text = yaml.safe_dump(_recipe_to_store(run, data), sort_keys=False, allow_unicode=True)
    write_file_atomically(run.folder / "recipe.yaml", text)
    write_json(run.folder / "ds_config.json", config)
    path = run.folder / "environment.json"
    resumed = bool(checkpoint.steps_in(run.checkpoints))
    write_json(path, environment(_first_start(path) if resumed else ""))


def _first_start(path: Path) -> str:
    """When a run started, from its environment.json; empty if that does not say so."""
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads(path.read_text(encoding="utf-8"))
        return str(about.get("started", "")) if isinstance(about, dict) else ""
    return ""


def restore_folder(run: RunSpec, config: Mapping[str, Any], data: Data) -> str:
    """Write these files again if somebody has moved or deleted them while the run trains, such as a
    file system that removes old ones: without them, its checkpoints cannot be resumed. Returns a
    line about it if it did."""
    recipe = run.folder / "recipe.yaml"
    with suppress(OSError, UserError):  # a full disk, for example: the checkpoint meets it as well
        if not recipe.exists():
            write_folder(run, config, data)
            return f"{recipe}: was moved or deleted while the run trains; it is written again"
    return ""


def overview(run: RunSpec, stream: AnyStream, model: Model, world: int) -> str:
    """A summary before training: the plan, the model, the batch, the size of an epoch."""
    recipe = run.recipe
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = f", {short_number(trained)} of them trained" if trained < parameters else ""
    micro, accumulation = run.ds_config.micro_batching(stream.rows, world)
    items = ", ".join(f"{dataset.name}: {dataset.num_items:,}" for dataset in stream.datasets)
    descriptions = dict.fromkeys(dataset.describe() for dataset in stream.datasets)
    return "\n".join(
        [
            *filter(None, descriptions),
            *table_summaries(stream),
            recipe.plan_table(),
            f"model: {short_number(parameters)} parameters{frozen}{_task_ids(recipe)}",
            f"step: {_step_size(recipe, stream)}; "
            f"{world} x {accumulation} x {micro} rows (processes, accumulation, micro-batch)",
            f"total: {_total(recipe, stream)}; examples of an epoch: {items}",
            f"ZeRO {run.ds_config.stage}, {run.ds_config.precision}; written to {run.folder}",
        ]
    )


def table_summaries(stream: AnyStream) -> list[str]:
    """For each task over a table: its rows, the count of each label, how many rows are truncated;
    and notes about the table."""
    lines: dict[str, None] = {}
    for dataset in stream.datasets:
        if isinstance(dataset.source, TableSource):
            tasks = [task for task in dataset.tasks if isinstance(task, TableTask)]
            lines |= {
                task.describe_rows(dataset.source, dataset.max_length): None for task in tasks
            }
            lines |= {f"{dataset.source.name}: {note}": None for note in dataset.source.table.notes}
    return list(lines)


def _task_ids(recipe: Recipe) -> str:
    return f"; task ids {recipe.task_ids}" if recipe.backbone_config.task_types else ""


def _step_size(recipe: Recipe, stream: AnyStream) -> str:
    if recipe.rows:
        return "; ".join(dict.fromkeys(map(_size_line, recipe.stage_plan.sizes)))
    examples = {recipe.examples_of(task_group) for task_group in stream.curriculum.task_groups}
    return f"{_range(examples)} examples in up to {stream.rows} rows of {recipe.length}"


def _size_line(size: StepSize) -> str:
    line = f"{size.rows} rows of {size.length}, {size.tokens:,} tokens"
    if not size.growth:
        return line
    growing = len(size.growth) * size.steps_each
    return f"{size.growth[0]} to {line}, growing over {growing:,} steps"


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _total(recipe: Recipe, stream: AnyStream) -> str:
    if recipe.rows:
        return f"{sum(recipe.stage_plan.tokens):,} tokens"
    return f"{sum(stream.consumed().values()):,} examples"


def complete_config(recipe: Recipe, ds_config: DSConfig) -> dict[str, Any]:
    """The sections that DeepSpeed gets for a resolved recipe."""
    world = launch_env.stated_processes()
    rows = max(size.rows for size in recipe.stage_plan.sizes)
    if recipe.examples:
        round_up_rows = partial(ds_config.round_up_rows, world=world)
        rows = build_stream(recipe, open_data(recipe), round_up_rows).rows
    return ds_config.deepspeed_config(rows=rows, world=world, clip=recipe.optimizer.clip)
