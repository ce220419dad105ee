"""Conversion that proves itself.

    open the source ──> plan ──> write beside the target ──> open that ──> run both ──> rename
                                                                               └─> remove

Nothing is dropped without being named: an Account says what was mapped, created and left behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palm_ds import __version__
from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError, suggest
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.weights.convert import mapping_report as account
from palm_ds.weights.convert import parity as proof
from palm_ds.weights.convert.mapping_report import Account
from palm_ds.weights.convert.parity import Proof
from palm_ds.weights.formats.contents import Contents
from palm_ds.weights.formats.format import Export
from palm_ds.weights.formats.huggingface.model_card import Made
from palm_ds.weights.formats.huggingface.target import Target
from palm_ds.weights.formats.open import FORMATS, format_of, open_checkpoint
from palm_ds.weights.formats.runnable import RunnableCheckpoint, in_palm_ds

EXPORTS = {each.name: each.export for each in FORMATS if each.export}
TO = tuple(EXPORTS)
"""What can be written."""
_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person may ask of a conversion."""

    family: str = ""
    """ernie, bert or roberta; empty: what the encoder is."""
    task: str = ""
    """The task, or the row of the task embedding, that texts get; empty: the checkpoint's own."""
    head: str = ""
    """A head over classes to write, as the only one."""
    head_class: str = ""
    """The class of transformers that `head` becomes."""
    words: str = ""
    """The masked-word head to take along; empty: the first."""
    dtype: str = "float32"
    """float32, float16 or bfloat16; fp32, fp16 and bf16 are the same."""
    shard_size: str = "5GB"
    """Of a file of weights, before there are several."""
    strict: bool = False
    """Whether it is a mistake that something other than optimizer state stays behind."""
    texts: Sequence[str] = proof.TEXTS
    """Real texts, on which both sides run."""
    verify: bool = True
    """Whether both sides are run; without it nothing shows that the conversion is right."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did."""

    source: Path
    target: Path
    format: str
    to: str
    account: Account
    proof: Proof | None
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": str(self.source),
            "target": str(self.target),
            "format": self.format,
            "to": self.to,
            **self.account.record(),
            "notes": list(self.notes),
            "proof": self.proof.record() if self.proof else None,
        }


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "palm_ds",
    options: Options | None = None,
    **opening: Any,
) -> Converted:
    """Write a checkpoint of any format as another, and show that it computes the same.

    `opening`: options of the source's format (`eps`, `config`, `tokenizer`, ...). Raises UserError,
    and leaves nothing behind, where the source is damaged, something has no place that `strict`
    wants to have one, or the two sides are too far apart.
    """
    source, target, options = Path(source), Path(target), options or Options()
    if to not in TO:
        raise UserError(f'to: no "{to}"{suggest(to, TO)}')
    _check_target(source, target)
    opening = {name: value for name, value in opening.items() if value is not None}
    contents = opened(source, **opening)
    tokenizer = _tokenizer(contents)
    job = _job(contents, to, options)
    _check_strict(contents, job.account, options)
    found: list[Proof] = []

    def write(part: Path) -> None:
        _write(contents, job, part, tokenizer)
        if options.verify:
            found.append(_prove(contents, job, part, tokenizer, options, opening))
        if job.export.write_card:
            job.export.write_card(part, _made(contents, found))

    write_folder_atomically(target, write)
    return Converted(
        source=source,
        target=target,
        format=contents.format,
        to=to,
        account=job.account,
        proof=found[0] if found else None,
        notes=(*contents.notes, *_notes(contents, tokenizer)),
    )


def _write(contents: Contents, job: _Job, part: Path, tokenizer: Tokenizer | None) -> None:
    try:
        job.export.write(part, tokenizer)
    except UserError as error:
        where = "" if str(contents.path) in str(error) else f"{contents.path}: "
        raise UserError(f"{where}{error}") from None
    except OSError as error:
        raise UserError(f"{part}: cannot be written: {error.strerror}") from None


def opened(source: Path, *, tokenizer: str | Path | None = None, **opening: Any) -> Contents:
    """A checkpoint, with the tokenizer of choice. Raises UserError for an encoder of one's own,
    which no other side has."""
    found = _opened(source, tokenizer, **opening)
    if kind := found.config.kind:
        raise UserError(f"{source}: no format but palm_ds's has its encoder, {kind}")
    return found


def _opened(source: Path, tokenizer: str | Path | None, **opening: Any) -> Contents:
    if tokenizer is None:
        return open_checkpoint(source, **opening)
    if source.exists() and "tokenizer" in format_of(source).options:  # it checks the fingerprint
        return open_checkpoint(source, tokenizer=tokenizer, **opening)
    return replace(open_checkpoint(source, **opening), tokenizer=Path(tokenizer))


def verify_only(
    a: str | Path,
    b: str | Path,
    *,
    texts: Sequence[str] = proof.TEXTS,
    tolerance: float | None = None,
    **opening: Any,
) -> Proof:
    """Run two checkpoints of any formats on the same texts. `opening` is for the first. Heads of
    one name are compared, and heads that are the only ones of their kind."""
    opening = {name: value for name, value in opening.items() if value is not None}
    one, other = opened(Path(a), **opening), opened(Path(b))
    given = one if one.tokenizer is not None else other
    tokenizer = _tokenizer(given)
    asked = not opening.keys() <= {"tokenizer"}
    sides = (
        _side(one, _usual_task(one), plain=not asked),
        _side(other, _usual_task(other), plain=True),
    )
    inputs = proof.inputs_for(one, other, tokenizer, texts)
    return proof.compare(*sides, inputs, heads=_same_heads(one, other), tolerance=tolerance)


# ---- what is to be done ----


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A conversion, planned."""

    account: Account
    export: Export
    task_id: int


def _job(contents: Contents, to: str, options: Options) -> _Job:
    task_id = _task_id(contents, options.task)
    target = Target(
        family=options.family,
        task_id=task_id,
        head=options.head,
        head_class=options.head_class,
        words=options.words,
        dtype=_SHORT_DTYPES.get(options.dtype, options.dtype),
        most=_bytes(options.shard_size),
    )
    export = EXPORTS[to](contents, target)
    plan = export.plan
    made = account.of_contents(contents) if plan is None else account.of_plan(contents, plan)
    return _Job(account=made, export=export, task_id=task_id)


def _task_id(contents: Contents, task: str) -> int:
    """The row that a task's name, or a number, means."""
    slots = contents.config.task_types
    if not task:
        return _usual_task(contents)
    if not slots:
        raise UserError(f"task: {task!r}: {contents.path} has no task embedding")
    if task in contents.task_ids:
        return contents.task_ids[task]
    if not task.isdecimal():
        known = suggest(task, contents.task_ids) if contents.task_ids else ""
        raise UserError(f"task: no {task!r}{known or f'; name a row, 0 to {slots - 1}'}")
    if int(task) >= slots:
        raise UserError(f"task: row {task} of {slots} rows, 0 to {slots - 1}")
    return int(task)


def _usual_task(contents: Contents) -> int:
    if not contents.config.task_types:
        return 0
    return contents.task_ids.get(contents.export_task, 0)


def _bytes(size: str) -> int:
    """2GB -> 2000000000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]B)?", size.strip().upper())
    if found is None:
        raise UserError(f"shard_size: {size!r}: a number of bytes is wanted, such as 2GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


# ---- checks ----


def _check_target(source: Path, target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: is there already; name a folder that is not")
    if target.exists() and source.resolve() == target.resolve():
        raise UserError(f"{target}: is the source itself")
    for folder in target.absolute().parents:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{target}: {folder} is no folder")


def _check_strict(contents: Contents, account: Account, options: Options) -> None:
    if options.strict and account.lost:
        name, why = next(iter(account.lost.items()))
        more = f" (and {len(account.lost) - 1} more)" if len(account.lost) > 1 else ""
        raise UserError(f"{contents.path}: strict: {name} would be left behind: {why}{more}")


def _tokenizer(contents: Contents) -> Tokenizer | None:
    """The one that comes along. Raises UserError where it is another model's."""
    if contents.tokenizer is None:
        return None
    tokenizer = load_tokenizer(contents.tokenizer)
    words = contents.entries["backbone.word.weight"].shape[0]
    if tokenizer.size > words:
        raise UserError(
            f"{contents.tokenizer}: {tokenizer.size:,} words, the word table of {contents.path} "
            f"has {words:,} rows; it is another model's"
        )
    return tokenizer


def _notes(contents: Contents, tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return ["no tokenizer is with the weights; give one to have it written with them"]
    spare = contents.entries["backbone.word.weight"].shape[0] - tokenizer.size
    return [f"the word table has {spare:,} rows that no word of the tokenizer has"] if spare else []


# ---- proof ----


def _prove(
    contents: Contents,
    job: _Job,
    part: Path,
    tokenizer: Tokenizer | None,
    options: Options,
    opening: Mapping[str, Any],
) -> Proof:
    """Raises UserError where the two sides are too far apart."""
    written = open_checkpoint(part)  # with the numbers that whoever opens it will compute with
    sides = (
        _side(contents, job.task_id, plain=opening.keys() <= {"tokenizer"}),
        _side(written, job.export.task_id, plain=True),
    )
    inputs = proof.inputs_for(contents, written, tokenizer, options.texts)
    found = proof.compare(*sides, inputs, heads=_heads_as_written(contents, written, job))
    if not found.holds:
        raise UserError(
            f"{contents.path}: what was written does not compute the same, and was removed: {found}"
        )
    return found


def _side(contents: Contents, task_id: int, *, plain: bool) -> RunnableCheckpoint:
    """In the library that its format belongs to, if that can run it. `plain`: as the folder says,
    with no option given."""
    run = format_of(contents.path).run if plain else None
    return (run or in_palm_ds)(contents, task_id=task_id)


def _heads_as_written(contents: Contents, written: Contents, job: _Job) -> dict[str, str]:
    """{the source's head: what it is called in what was written}, by the tensors they share."""
    if job.export.plan is None:
        return {name: name for name in contents.heads}
    found = {}
    for ours, entry in written.entries.items():
        sources, _ = job.export.plan.mapped.get(entry.theirs[0], ((), ""))
        if ours.startswith("heads.") and sources:
            found[sources[0].split(".")[1]] = ours.split(".")[1]
    return found


def _same_heads(a: Contents, b: Contents) -> dict[str, str]:
    pairs = {name: name for name in a.heads if name in b.heads}

    def alone(contents: Contents, other: Contents) -> dict[tuple, str]:
        kinds: dict[tuple, list[str]] = {}
        for name, head in contents.heads.items():
            if name not in other.heads:
                kind = (head.kind, head.classes, head.kind == "classes" and head.pooled)
                kinds.setdefault(kind, []).append(name)
        return {kind: names[0] for kind, names in kinds.items() if len(names) == 1}

    mine, theirs = alone(a, b), alone(b, a)
    return pairs | {mine[kind]: theirs[kind] for kind in mine if kind in theirs}


def _made(contents: Contents, found: Sequence[Proof]) -> Made:
    worst = found[0].worst if found else None
    return Made(
        source=contents.path.name,
        format=contents.format,
        left=contents.left,
        difference=worst.largest if worst else None,
        tolerance=found[0].tolerance * max(worst.scale, 1.0) if worst else None,
        notes=contents.notes,
        program=f"palm_ds {__version__}",
    )
