"""Converts a checkpoint of any format to ONNX files, and compares them with it before publishing.

    open the source ──> graph ──> model.onnx ──> fp16, int8 ──> run both on texts ──> rename
                                                                      └─> delete

The sources run in their own library where that can (transformers), else in palm_ds's encoder; the
files in ONNX Runtime, on padded batches and on single texts, from 2 tokens to the most that the
encoder reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.atomic import write_folder_atomically, write_new_folder
from palm_ds.common.errors import UserError, need_extra, suggest
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import nan_to_null
from palm_ds.common.version import __version__
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.convert import mapping_report
from palm_ds.weights.convert.convert import check_strict, check_target, notes_on, opened, task_row
from palm_ds.weights.convert.mapping_report import ConversionReport
from palm_ds.weights.convert.onnx_parity import GraphComparison
from palm_ds.weights.convert.options import OnnxOptions
from palm_ds.weights.convert.parity import ParityReport
from palm_ds.weights.convert.source import locate, read_documents
from palm_ds.weights.formats.contents import CheckpointContents, read_tokenizer
from palm_ds.weights.formats.huggingface.architecture import MASKED_WORDS, PAIR_HEADS
from palm_ds.weights.formats.huggingface.families import served_family
from palm_ds.weights.formats.huggingface.plan import plan
from palm_ds.weights.formats.huggingface.read import CONFIG
from palm_ds.weights.formats.huggingface.sentence_transformers import write_modules
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.onnx.description import DESCRIPTION, FILES, FOLDER, OnnxDescription
from palm_ds.weights.formats.onnx.graph import plan_graph
from palm_ds.weights.formats.open import open_checkpoint

FAR, ENOUGH, MUCH = 0.3, 0.9, 0.02
"""Warned of: a larger difference relative to the largest value (at least 1), a smaller share of
equal predictions, a larger change of a task's main score relative to the source's."""
SOURCE = "source"
"""The source among the scores."""
Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""{task: {metric: {`source` or a precision: value}}}"""


@dataclass(frozen=True, kw_only=True)
class OnnxRun:
    """Facts about the run of a checkpoint that the checkpoint does not state."""

    allowed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """{head with a CRF: (tags + 2, tags) bool, the transitions of its decoding}; others: all."""
    score: Callable[[Path, OnnxDescription, Sequence[str]], Scores] | None = None
    """Scores the files of a folder, of these precisions, on labeled rows, before they are
    published."""


@dataclass(frozen=True, kw_only=True)
class OnnxFile:
    """A written graph, and how far its outputs are from the source's."""

    precision: str
    name: str
    bytes: int
    parity: ParityReport | None
    agreement: Mapping[str, float] = field(default_factory=dict)
    """{head: share of the texts or tokens with the same prediction}"""
    form: str = ""
    """How an int8 file is quantized."""

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        about = {"precision": self.precision, "bytes": self.bytes}
        about |= {"form": self.form} if self.form else {}
        compared = self.parity.record() if self.parity else None
        return about | {"parity": compared, "agreement": dict(self.agreement)}


@dataclass(frozen=True, kw_only=True)
class OnnxResult:
    """Result of a conversion to ONNX."""

    source: Path
    target: Path
    format: str
    description: OnnxDescription
    report: ConversionReport
    files: tuple[OnnxFile, ...]
    scores: Scores
    notes: tuple[str, ...]

    @property
    def warnings(self) -> list[str]:
        """Notes on what a smaller file loses, if that is much."""
        warnings = [
            f"{file.name}: {worst.name} differs by {worst.largest:.2g}, with values up to "
            f"{worst.scale:.3g}; score it on labeled rows (--score)"
            for file in self.files
            if file.parity and (worst := file.parity.worst).largest > FAR * max(worst.scale, 1.0)
        ]
        warnings += [
            f"{file.name}: {share:.0%} of the predictions of {head} equal the source's"
            for file in self.files
            for head, share in file.agreement.items()
            if share < ENOUGH
        ]
        for task, metrics in self.scores.items():
            metric, values = next(iter(metrics.items()))
            warnings += [
                f"{FILES[name]}: {metric} of {task}: {value:.4f}; the source: {values[SOURCE]:.4f}"
                for name, value in values.items()
                if abs(value - values[SOURCE]) > MUCH * max(abs(values[SOURCE]), 1e-9)
            ]
        return warnings

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "source": str(self.source),
            "target": str(self.target),
            "format": self.format,
            "to": "onnx",
            **self.report.record(),
            "notes": list(self.notes),
            "graph": self.description.record(),
            "files": {file.name: file.record() for file in self.files},
            "scores": nan_to_null(self.scores),
            "warnings": self.warnings,
        }


def convert_to_onnx(
    source: str | Path,
    target: str | Path,
    options: OnnxOptions | None = None,
    *,
    of_run: Callable[[CheckpointContents], OnnxRun] | None = None,
    **opening: Any,
) -> OnnxResult:
    """Write a folder of ONNX files that give the outputs of a checkpoint.

    `of_run`: adds what the run of the opened checkpoint knows.
    `opening`: options of the source's format. Raises UserError, and writes nothing, if a package is
    missing, the encoder cannot be exported, or a file's outputs differ by too much.
    """
    check_installed()
    source, target, options = Path(source), Path(target), options or OnnxOptions()
    check_target(source, target)
    opening = {name: value for name, value in opening.items() if value is not None}
    path, origin = locate(source, options.revision)
    contents = opened(path, **opening)
    contents = replace(contents, origin=origin) if origin else contents
    run = of_run(contents) if of_run else OnnxRun()
    job = _plan_job(contents, options, run.allowed, plain=not opening.keys() - {"tokenizer"})
    if options.strict:
        check_strict(contents, job.report)
    files: list[OnnxFile] = []
    scored: dict[str, Mapping[str, Mapping[str, float]]] = {}

    def write(part: Path) -> None:
        (part / FOLDER).mkdir()
        files.extend(_write_files(job, part / FOLDER))
        if run.score is not None:
            made = run.score(part, job.description, [file.precision for file in files])
            scored.update(made)
        _write_rest(job, part, files, scored)

    write_new_folder(target, write)
    return OnnxResult(
        source=source,
        target=target,
        format=contents.format,
        description=job.description,
        report=job.report,
        files=tuple(files),
        scores=scored,
        notes=(*contents.all_notes, *job.notes),
    )


def check_installed(what: str = "ONNX") -> None:
    """Raises UserError, which begins with `what` needs them, if a package is missing."""
    need_extra(what, "onnx", "onnx", "onnxscript", "onnxruntime")


def add_onnx(
    folder: Path, precisions: Sequence[str] = (), *, verify: bool = True
) -> tuple[OnnxFile, ...]:
    """Write onnx/ into a Hugging Face folder: the encoder, the pooling, and the classification head
    if it has one. Raises UserError, and leaves the folder as it was."""
    check_installed()
    contents = open_checkpoint(folder)
    usual = {
        name: head
        for name, head in contents.heads.items()
        if name not in (MASKED_WORDS, *PAIR_HEADS)
    }
    options = OnnxOptions(precisions=tuple(precisions), verify=verify)
    job = _plan_job(replace(contents, heads=usual), options, {}, plain=True)
    files: list[OnnxFile] = []

    def write(part: Path) -> None:
        files.extend(_write_files(job, part))
        _write_description(job, folder, files, {})

    write_folder_atomically(folder / FOLDER, write)
    return tuple(files)


@dataclass(frozen=True, kw_only=True)
class _OnnxJob:
    """A planned conversion."""

    contents: CheckpointContents
    description: OnnxDescription
    options: OnnxOptions
    tokenizer: Tokenizer | None
    report: ConversionReport
    notes: tuple[str, ...]
    allowed: Mapping[str, torch.Tensor]
    plain: bool
    """Opened without options that another library would not know."""

    @property
    def precisions(self) -> list[str]:
        return ["fp32", *(x for x in FILES if x in self.options.precisions and x != "fp32")]


def _plan_job(
    contents: CheckpointContents,
    options: OnnxOptions,
    allowed: Mapping[str, torch.Tensor],
    *,
    plain: bool,
) -> _OnnxJob:
    from palm_ds.weights.formats.onnx.write import OPSETS

    for precision in options.precisions:
        if precision not in FILES:
            raise UserError(f"precision: no {precision!r}{suggest(precision, FILES)}")
    if options.opset not in OPSETS:
        raise UserError(f"opset: {options.opset}; expected {OPSETS[0]} to {OPSETS[-1]}")
    tokenizer = read_tokenizer(contents)
    row = task_row(contents, options.task) if options.task else None
    planned = plan_graph(contents, options.heads, opset=options.opset, task_id=row)
    report = mapping_report.of_contents(contents)
    lacking = {name for name in planned.skipped if name.startswith("heads.")}
    mapped = tuple(precision for precision in report.mapped if precision.name not in lacking)
    skipped = {
        source_name: why
        for name, why in planned.skipped.items()
        for source_name in contents.entries[name].source_names
    }
    report = replace(report, mapped=mapped, skipped={**contents.skipped, **skipped})
    return _OnnxJob(
        contents=contents,
        description=planned.description,
        options=options,
        tokenizer=tokenizer,
        report=report,
        notes=(*planned.notes, *notes_on(contents, tokenizer, "onnx")),
        allowed=allowed,
        plain=plain,
    )


# ---- files ----


def _write_files(job: _OnnxJob, folder: Path) -> list[OnnxFile]:
    """Write and compare the graphs. Raises UserError for one that differs by too much."""
    from palm_ds.weights.formats.onnx.write import write_fp16, write_fp32

    compare = _comparison(job) if job.options.verify else None
    source = folder / FILES["fp32"]
    write_fp32(job.contents, job.description, source, job.allowed)
    files = [_file("fp32", source, compare)]
    for precision in job.precisions[1:]:
        path = folder / FILES[precision]
        if precision == "fp16":
            write_fp16(source, path, job.description)
            files.append(_file(precision, path, compare))
        else:
            files.append(_best_int8(source, path, compare))
    return files


def _comparison(job: _OnnxJob) -> GraphComparison:
    return GraphComparison(
        job.contents,
        job.description,
        tokenizer=job.tokenizer,
        texts=job.options.texts,
        allowed=job.allowed,
        plain=job.plain,
    )


def _file(precision: str, path: Path, compare: GraphComparison | None) -> OnnxFile:
    """A written file. Raises UserError if its outputs differ by more than the tolerance."""
    size = sum(x.stat().st_size for x in path.parent.glob(f"{path.name}*"))
    file = OnnxFile(precision=precision, name=path.name, bytes=size, parity=None)
    if compare is None:
        return file
    report = compare.checked(path, precision)
    return replace(file, parity=report, agreement=compare.agreement(path))


def _best_int8(source: Path, path: Path, compare: GraphComparison | None) -> OnnxFile:
    """Write the int8 file in the form that differs least from the source."""
    from palm_ds.weights.formats.onnx.write import INT8_FORMS, write_int8

    distances: dict[float, Any] = {}
    for form in reversed(INT8_FORMS):
        write_int8(source, path, form)
        distances[compare.distance(path) if compare else len(distances)] = form
    best = distances[min(distances)]
    if best is not INT8_FORMS[0]:
        write_int8(source, path, best)
    return replace(_file("int8", path, compare), form=best.name)


def _write_rest(job: _OnnxJob, part: Path, files: Sequence[OnnxFile], scores: Scores) -> None:
    """The tokenizer, config.json, sentence-transformers' files, documents and the description."""
    contents, longest = job.contents, job.description.max_length
    write_json(part / CONFIG, _config_json(job))
    write_modules(contents.extras.files, part, max_length=longest, dtype=torch.float32)
    if job.tokenizer is not None:
        stated = job.tokenizer.kept.config.get("model_max_length", longest)
        job.tokenizer.of_length(min(stated, longest)).save(part)
    _write_description(job, part, files, scores)
    read_documents(contents.path).write(part)


def _write_description(
    job: _OnnxJob, folder: Path, files: Sequence[OnnxFile], scores: Scores
) -> None:
    about = {
        **job.description.record(),
        "made_by": f"palm_ds {__version__}",
        "files": {f"{FOLDER}/{file.name}": file.record() for file in files},
        "scores": scores,
    }
    write_json(folder / DESCRIPTION, nan_to_null(about))


def _config_json(job: _OnnxJob) -> Mapping[str, Any]:
    """The config.json that transformers would read, without the task embedding, which is in the
    graph; of an encoder that it lacks palm_ds's own."""
    contents, heads = job.contents, job.description.heads
    classes = [name for name, head in heads.items() if head.kind == "classes"]
    for head in (classes[0] if len(classes) == 1 else "", ""):
        try:
            family = served_family(contents.config) if contents.config.task_types else ""
            target = ExportOptions(family=family, head=head, task_id=job.description.task_id)
            made = plan(contents.entries, contents.config, contents.heads, target, contents.extras)
            return made.config_json
        except UserError:
            continue
    return asdict(contents.config)
