"""Converts checkpoints between formats and verifies the result by running both sides.

    open the source ──> plan ──> write to a temporary folder ──> open it ──> run both ──> rename
                                                                                 └─> delete

Every tensor is accounted for: a ConversionReport lists what was mapped, created and skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palm_ds.common.atomic import check_new_folder, write_new_folder
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import parse_bytes
from palm_ds.common.version import __version__
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.text.exported_tokenizer import only_here, other_inputs
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.convert import mapping_report, parity
from palm_ds.weights.convert.mapping_report import ConversionReport
from palm_ds.weights.convert.options import TEXTS, ConversionOptions
from palm_ds.weights.convert.parity import ParityReport
from palm_ds.weights.convert.source import SourceDocuments, locate, read_documents
from palm_ds.weights.formats.contents import CheckpointContents, read_tokenizer
from palm_ds.weights.formats.format import Export
from palm_ds.weights.formats.huggingface.model_card import Provenance
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.open import FORMATS, format_of, open_checkpoint
from palm_ds.weights.formats.runnable import RunnableCheckpoint, in_palm_ds
from palm_ds.weights.model_folder import ModelFolder

EXPORTS = {format_.name: format_.export for format_ in FORMATS if format_.export}
TO = tuple(EXPORTS)
"""The formats that can be written."""
_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NOT_SEEN = {"tokenizer", "untied_head"}
"""Options of opening that change nothing that the format's own library computes."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """Result of a conversion."""

    source: Path
    target: Path
    format: str
    to: str
    report: ConversionReport
    parity: ParityReport | None
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": str(self.source),
            "target": str(self.target),
            "format": self.format,
            "to": self.to,
            **self.report.record(),
            "notes": list(self.notes),
            "parity": self.parity.record() if self.parity else None,
        }


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "palm_ds",
    options: ConversionOptions | None = None,
    *,
    add: Callable[[Path], object] | None = None,
    **opening: Any,
) -> ConversionResult:
    """Convert a checkpoint of any format and verify that the result gives the same outputs.

    `source` is a path or, if there is none, the name of a repository on the Hugging Face hub, whose
    safetensors are downloaded. `add(folder)` adds files before the folder is published. `opening`:
    options of the source's format (`eps`, `config`, `tokenizer`, ...). Raises UserError, and writes
    nothing, if the source is damaged, `strict` is set and a tensor would be skipped, or the outputs
    differ by more than the tolerance.
    """
    source, target, options = Path(source), Path(target), options or ConversionOptions()
    if to not in TO:
        raise UserError(f'to: no format "{to}"{suggest(to, TO)}')
    check_target(source, target)
    opening = {name: value for name, value in opening.items() if value is not None}
    path, origin = locate(source, options.revision)
    contents = opened(path, **opening)
    if origin:
        contents = replace(contents, origin=origin, notes=(*contents.notes, f"from {origin}"))
    _check_encoder(contents, to)
    tokenizer = read_tokenizer(contents)
    plan = _plan_conversion(contents, to, options)
    if options.strict:
        check_strict(contents, plan.report)
    if options.verify and "eps" in opening:
        note = _change_by_eps(contents, tokenizer, options, opening)
        contents = replace(contents, notes=(*contents.notes, *note))
    reports: list[ParityReport] = []

    def write(part: Path) -> None:
        _write(contents, plan, part, tokenizer)
        if options.verify:
            reports.append(_verify(contents, plan, part, tokenizer, options, opening))
        documents = read_documents(contents.path)
        documents.write(part)
        if plan.export.write_card:
            plan.export.write_card(part, _provenance(contents, reports, documents))
        if add:
            add(part)

    write_new_folder(target, write)
    return ConversionResult(
        source=source,
        target=target,
        format=contents.format,
        to=to,
        report=plan.report,
        parity=reports[0] if reports else None,
        notes=(*contents.all_notes, *notes_on(contents, tokenizer, to)),
    )


def _write(
    contents: CheckpointContents, plan: _ConversionPlan, part: Path, tokenizer: Tokenizer | None
) -> None:
    try:
        plan.export.write(part, tokenizer)
    except UserError as error:
        where = "" if str(contents.path) in str(error) else f"{contents.path}: "
        raise UserError(f"{where}{error}") from None


def opened(
    source: Path, *, tokenizer: str | Path | None = None, **opening: Any
) -> CheckpointContents:
    """Open the weights that a path stands for, optionally with another tokenizer."""
    folder = ModelFolder.find(source)
    if tokenizer is None:
        return folder.open(**opening)
    if folder.path.exists() and "tokenizer" in format_of(folder.path).options:
        return folder.open(tokenizer=tokenizer, **opening)  # checks the fingerprint
    return replace(folder.open(**opening), tokenizer=Path(tokenizer))


def verify_only(
    a: str | Path,
    b: str | Path,
    *,
    texts: Sequence[str] = TEXTS,
    tolerance: float | None = None,
    **opening: Any,
) -> ParityReport:
    """Compare the outputs of two checkpoints of any formats on the same texts.

    `opening`: options for opening the first. Heads are paired by name, or by kind if each side has
    only one of that kind.
    """
    opening = {name: value for name, value in opening.items() if value is not None}
    one, other = opened(Path(a), **opening), opened(Path(b))
    given = one if one.tokenizer is not None else other
    tokenizer = read_tokenizer(given)
    asked = not opening.keys() <= _NOT_SEEN
    sides = (
        as_runnable(one, one.task_id, plain=not asked),
        as_runnable(other, other.task_id, plain=True),
    )
    inputs = parity.inputs_for(one, other, tokenizer, texts)
    return parity.compare(*sides, inputs, heads=parity.same_heads(one, other), tolerance=tolerance)


# ---- planning ----


@dataclass(frozen=True, kw_only=True)
class _ConversionPlan:
    """A planned conversion."""

    report: ConversionReport
    export: Export
    task_id: int


def _plan_conversion(
    contents: CheckpointContents, to: str, options: ConversionOptions
) -> _ConversionPlan:
    task_id = task_row(contents, options.task or _task_of(contents, options.head))
    target = ExportOptions(
        family=options.family,
        task_id=task_id,
        head=options.head,
        head_class=options.head_class,
        words=options.words,
        dtype=_SHORT_DTYPES.get(options.dtype, options.dtype),
        max_shard_bytes=parse_bytes(options.shard_size, "shard_size"),
    )
    export = EXPORTS[to](contents, target)
    plan = export.plan
    made = (
        mapping_report.of_contents(contents)
        if plan is None
        else mapping_report.of_plan(contents, plan)
    )
    return _ConversionPlan(report=made, export=export, task_id=task_id)


def task_row(contents: CheckpointContents, task: str) -> int:
    """Row of the task embedding for a task name or a row number."""
    slots = contents.config.task_types
    if not task:
        return contents.task_id
    if not slots:
        raise UserError(f"task: {task!r}: {contents.path} has no task embedding")
    if task in contents.task_ids:
        return contents.task_ids[task]
    if not task.isdecimal():
        known = suggest(task, contents.task_ids) if contents.task_ids else ""
        raise UserError(f"task: no task {task!r}{known or f'; give a row, 0 to {slots - 1}'}")
    if int(task) >= slots:
        raise UserError(f"task: no row {task}; the task embedding has rows 0 to {slots - 1}")
    return int(task)


def _task_of(contents: CheckpointContents, head: str) -> str:
    """The task that a head was trained for: its texts had that row of the task embedding."""
    return head if contents.config.task_types and head in contents.task_ids else ""


# ---- checks ----


def check_target(source: Path, target: Path) -> None:
    check_new_folder(target)
    if target.exists() and source.resolve() == target.resolve():
        raise UserError(f"{target}: is the source; choose another folder")


def _check_encoder(contents: CheckpointContents, to: str) -> None:
    config = contents.config
    encoder = encoder_class(config)
    paddle = encoder.paddle or encoder.region_size(config)
    held = encoder.hf or (paddle and to == "paddle")
    if not held and to != "palm_ds":
        raise UserError(
            f"{contents.path}: {to} has no {config.kind} encoder; convert to palm_ds"
            f"{' or paddle' if paddle else ''}"
        )


def check_strict(contents: CheckpointContents, report: ConversionReport) -> None:
    """Raises UserError if a tensor would be lost."""
    if report.lost:
        name, why = next(iter(report.lost.items()))
        more = f" (and {len(report.lost) - 1} more)" if len(report.lost) > 1 else ""
        raise UserError(f"{contents.path}: strict: {name} would be skipped: {why}{more}")


def notes_on(contents: CheckpointContents, tokenizer: Tokenizer | None, to: str) -> list[str]:
    if tokenizer is None:
        return ["the checkpoint has no tokenizer; give one to write it with the weights"]
    spare = contents.entries["backbone.word.weight"].shape[0] - tokenizer.size
    rows = [f"{spare:,} rows of the token embeddings have no token"] if spare else []
    others = other_inputs(tokenizer)
    return [
        *rows,
        *([others] if others else []),
        *(only_here(tokenizer) if to != "palm_ds" else ()),
    ]


# ---- parity ----


def _verify(
    contents: CheckpointContents,
    plan: _ConversionPlan,
    part: Path,
    tokenizer: Tokenizer | None,
    options: ConversionOptions,
    opening: Mapping[str, Any],
) -> ParityReport:
    """Compare the written checkpoint with its source. Raises UserError if the outputs differ by
    more than the tolerance."""
    written = open_checkpoint(part)  # with the config that its readers will compute with
    sides = (
        as_runnable(contents, plan.task_id, plain=opening.keys() <= _NOT_SEEN),
        as_runnable(written, plan.export.task_id, plain=True),
    )
    inputs = parity.inputs_for(contents, written, tokenizer, options.texts)
    report = parity.compare(*sides, inputs, heads=_heads_as_written(contents, written, plan))
    if not report.passed:
        raise UserError(
            f"{contents.path}: the converted model's outputs differ, so it was deleted: {report}"
        )
    return report


def _change_by_eps(
    contents: CheckpointContents,
    tokenizer: Tokenizer | None,
    options: ConversionOptions,
    opening: Mapping[str, Any],
) -> list[str]:
    """A note on how far outputs differ with a LayerNorm eps other than the checkpoint's."""
    rest = {name: value for name, value in opening.items() if name != "eps"}
    own = opened(contents.path, **rest)
    eps = own.config.layer_norm_eps
    if eps == contents.config.layer_norm_eps:
        return []
    inputs = parity.inputs_for(own, contents, tokenizer, options.texts)
    worst = parity.compare(in_palm_ds(own), in_palm_ds(contents), inputs).worst
    return [
        f"with its own LayerNorm eps, {eps:g}, its outputs differ by up to {worst.largest:.1e} "
        f"({worst.name}; values up to {worst.scale:.3g})"
    ]


def as_runnable(contents: CheckpointContents, task_id: int, *, plain: bool) -> RunnableCheckpoint:
    """The checkpoint run by its format's own library, if that can. `plain`: opened without options
    that the library would not know."""
    run = format_of(contents.path).run if plain else None
    return (run or in_palm_ds)(contents, task_id=task_id)


def _heads_as_written(
    contents: CheckpointContents, written: CheckpointContents, plan: _ConversionPlan
) -> dict[str, str]:
    """{head of the source: its name in the written checkpoint}, matched by their tensors."""
    if plan.export.plan is None:
        return {name: name for name in contents.heads}
    names = {}
    heads = {name: entry for name, entry in written.entries.items() if name.startswith("heads.")}
    for name, entry in heads.items():
        sources, _ = plan.export.plan.mapped.get(entry.source_names[0], ((), ""))
        if sources:
            names[sources[0].split(".")[1]] = name.split(".")[1]
    return names


def _provenance(
    contents: CheckpointContents, reports: Sequence[ParityReport], documents: SourceDocuments
) -> Provenance:
    worst = reports[0].worst if reports else None
    return Provenance(
        source=contents.origin or contents.path.name,
        format=contents.format,
        skipped=contents.skipped,
        difference=worst.largest if worst else None,
        tolerance=reports[0].tolerance * max(worst.scale, 1.0) if worst else None,
        notes=contents.notes,
        program=f"palm_ds {__version__}",
        license=documents.license,
        documents=tuple(documents.texts),
    )
