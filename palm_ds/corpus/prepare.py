"""Raw text to a corpus: plan the units, make their shards anywhere, put one folder in place.

    prepare("data/wiki", ["wiki/*.jsonl.gz"], Prepare(train="wordpiece", vocab_size=30522))

A run that is stopped, however hard, leaves OUT.partial; the same command goes on from its
finished shards. OUT itself appears in one step, whole. The bytes depend on the input and the
options, not on workers, machines or interruptions.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from palm_ds.common.atomic import move_into_place
from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.corpus.annotations import ALWAYS, GIVEN, find_mark
from palm_ds.corpus.collect_labels import gather_labels
from palm_ds.corpus.executors import Run, check_mpi, count, open_executor
from palm_ds.corpus.input.discover import cut, find_inputs, unit_bytes
from palm_ds.corpus.input.options import InputOptions, input_options
from palm_ds.corpus.manifest import Manifest, check_files, read_manifest
from palm_ds.corpus.mine_phrases import all_sample_texts, mine_into
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.progress_bar import progress
from palm_ds.corpus.work_dir import (
    COLLOCATIONS,
    LABELS,
    Job,
    difference,
    hash_lexicons,
    is_done,
    load_part,
    locked,
    part_file,
    save_job,
    tokenizer_hash,
)
from palm_ds.corpus.worker import UnitReader, is_lines, make_shard
from palm_ds.corpus.writer import finish, smallest_unsigned
from palm_ds.text.simplified import find_simplifier
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.text.train_tokenizer import train_tokenizer

log = logging.getLogger(__name__)

REJECTED = "rejected.jsonl"
_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """What a person chooses for a corpus."""

    text: TextOptions = field(default_factory=TextOptions)
    input: InputOptions = field(default_factory=InputOptions)
    tokenizer: str | None = None  # a file or folder; else one is trained
    train: str | None = None  # wordpiece or sentencepiece
    vocab_size: int = 30_522
    marks: tuple[str, ...] = ()  # beside the four that are always there
    strict: bool = False
    shard_mb: float | None = None  # of input; None: a 256th of it, from 4 to 128
    sample_mb: float = 64.0  # of text, for training and mining
    workers: int = 1
    mpi: bool = False

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train is None):
            raise UserError("give either --tokenizer PATH or --train wordpiece|sentencepiece")
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: must be at least 1")
        if self.shard_mb is not None and self.shard_mb <= 0:
            raise UserError(f"--shard_mb {self.shard_mb}: must be more than 0")
        if self.sample_mb <= 0:
            raise UserError(f"--sample_mb {self.sample_mb}: must be more than 0")
        if self.input.structure == "ernie":
            self._check_ernie()
        for name in self.marks:
            if name in GIVEN and self.input.structure not in GIVEN[name]:
                formats = " and ".join(GIVEN[name])
                raise UserError(f"--annotation {name}: comes with --format {formats}")

    def _check_ernie(self) -> None:
        """Lines of ids leave no choice of tokenizer, and none about text."""
        if self.tokenizer is None:
            raise UserError("--format ernie: the lines hold ids; give the --tokenizer of these ids")
        if replace(self.text, language="mixed", collocations=True) != TextOptions():
            raise UserError(
                "--format ernie: the lines hold ids, not text: --lower, --simplify, --newline, "
                "--segmenter, lexicons and collocations have no meaning"
            )


def prepare(
    out: str | Path,
    inputs: Sequence[str],
    options: Prepare,
    *,
    console: Console | None = None,
) -> Manifest:
    """Makes the corpus, continues making it, or finds it made; returns its manifest. `console`
    shows a progress bar and the table of rejected records."""
    console = console or Console(quiet=True)
    out = Path(out)
    if options.mpi:
        check_mpi()
    job = plan(inputs, options)
    if out.exists():
        return _already_there(out, job)
    partial = out.with_name(out.name + ".partial")
    _enter(partial, job)
    with locked(partial):
        manifest = _finished_before(partial)
        if manifest is None:
            with _executing(partial, job, options, console) as (run, todo):
                manifest = _make(partial, job, options, run, todo)
        _publish(partial, out)
    report(console, out, manifest)
    return manifest


def plan(inputs: Sequence[str], options: Prepare) -> Job:
    """Inputs, units and options as one job; checks all that can be checked before any work."""
    given = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    ids_alone = options.input.structure == "ernie"
    loses = options.text.lower or (given is not None and given.lower)
    marks = _marks(options, loses and not ids_alone)
    found, ignored = find_inputs(inputs, options.input)
    if ignored:
        some = ", ".join(ignored[:5]) + (" ..." if len(ignored) > 5 else "")
        log.info("left out, of unknown kinds: %d files (%s)", len(ignored), some)
    total = sum(item.bytes for item in found)
    size = options.shard_mb * _MB if options.shard_mb else min(max(total / 256, 4 * _MB), 128 * _MB)
    units = cut(found, options.input, size=max(1, int(size)))
    if not units:
        raise UserError(f"input {', '.join(inputs)}: all files are empty")
    return Job(
        text=options.text,
        input=options.input,
        tokenizer=_tokenizer_entry(options),
        marks=marks,
        strict=options.strict,
        sample_bytes=int(options.sample_mb * _MB),
        lexicons=hash_lexicons([*options.text.lexicon_phrase, *options.text.lexicon_entity]),
        inputs=found,
        units=units,
    )


def _tokenizer_entry(options: Prepare) -> dict[str, Any]:
    if options.tokenizer is not None:
        return {"path": options.tokenizer, "sha256": tokenizer_hash(Path(options.tokenizer))}
    lower = options.text.lower
    return {"train": options.train, "vocab_size": options.vocab_size, "lower": lower}


def _marks(options: Prepare, loses_capitals: bool) -> tuple[str, ...]:
    """The four, `capital` where capitals are lost, those the input gives, `heading` where it has
    titles, and the user's own, each once."""
    names = [*ALWAYS, *(["capital"] if loses_capitals else [])]
    names += [name for name, formats in GIVEN.items() if options.input.structure in formats]
    names += [*(["heading"] if options.input.title_field else []), *options.marks]
    short = [find_mark(name)[0] for name in names]
    return tuple(name for i, name in enumerate(names) if short[i] not in short[:i])


def _already_there(out: Path, job: Job) -> Manifest:
    """A corpus at OUT is the one asked for, or the command is refused."""
    manifest = read_manifest(out)
    there = {"inputs": list(manifest.inputs), **manifest.options}
    there.pop("labels", None)  # they are found, not given
    if "input" in there:
        there["input"] = asdict(input_options(there["input"]))
    now = {"inputs": job.input_entries(), **job.options()}
    there, now = json.loads(json.dumps([there, now]))
    if found := differences(there, now):
        raise UserError(
            f"{out} is a corpus made with other options or inputs ({found[0]}); choose another "
            "folder or remove it"
        )
    check_files(out, manifest, hashes=False)
    log.info("%s is complete already: %d documents", out, manifest.documents)
    return manifest


def _enter(partial: Path, job: Job) -> None:
    """Makes the working folder, or finds it as an earlier run of the same job left it."""
    if (partial / "job.json").exists():
        if found := difference(partial, job):
            raise UserError(
                f"{partial} was begun with other options or inputs ({found}); repeat those, or "
                "remove it to begin anew"
            )
        log.info("continuing with %s", partial)
    elif partial.exists() and any(p.name not in (".lock", "parts") for p in partial.iterdir()):
        raise UserError(f"{partial} is in the way and was not made here; remove it")
    (partial / "parts").mkdir(parents=True, exist_ok=True)
    if not (partial / "job.json").exists():
        save_job(partial, job)


@contextmanager
def _executing(
    partial: Path, job: Job, options: Prepare, console: Console
) -> Iterator[tuple[Run, list[int]]]:
    """What runs the work, and the units still to do, with the progress bar around them."""
    units = range(len(job.units))
    todo = [number for number in units if not is_done(partial, number, len(units))]
    sizes = [unit_bytes(unit) for unit in job.units]
    done = sum(sizes) - sum(sizes[number] for number in todo)
    with (
        progress(console, sum(sizes), done) as watch,
        open_executor(workers=options.workers, mpi=options.mpi, watch=watch) as run,
    ):
        yield run, todo


def _make(partial: Path, job: Job, options: Prepare, run: Run, todo: list[int]) -> Manifest:
    """Tokenizer, collocations, shards, index, manifest: whatever of them is not there yet."""
    tokenizer = _tokenizer(partial, job, options)
    structure = job.input.structure
    options_found = {}
    if structure in ("pairs", "ernie"):
        options_found["labels"] = gather_labels(partial, job, run)
    wanted = job.text.collocations and structure != "ernie"
    if wanted and not (partial / COLLOCATIONS).is_file():
        log.info("mining phrases")
        mine_into(partial, job, run)
    made = run(make_shard, ((str(partial), number) for number in todo))
    for number, text_bytes in zip(todo, made, strict=True):
        if options.mpi:  # other workers say more often how far they are
            count(text_bytes, unit_bytes(job.units[number]))
    rejected = _gather_rejected(partial, job)
    parts = [load_part(partial, number)[0] for number in range(len(job.units))]
    if not sum(part.shard.documents for part in parts):
        raise _nothing(partial, job)
    marks = [find_mark(name)[0] for name in job.marks]
    return finish(
        partial,
        tokenizer,
        parts,
        marks=marks,
        ids_type=smallest_unsigned(tokenizer.size),
        rejected=rejected,
        options=json.loads(json.dumps({**job.options(), **options_found})),
        inputs=job.input_entries(),
    )


def _tokenizer(partial: Path, job: Job, options: Prepare) -> Tokenizer:
    """Loaded or trained once, then read from the working folder by everyone."""
    folder = partial / "tokenizer"
    if folder.is_dir():
        return load_tokenizer(folder)
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        log.info("training a %s vocabulary", options.train)
        if next(all_sample_texts(job), None) is None:
            raise _nothing(partial, job)
        texts = all_sample_texts(job)
        tokenizer = train_tokenizer(
            map(find_simplifier(), texts) if job.text.simplify else texts,
            kind=str(options.train),
            vocab_size=options.vocab_size,
            lower=options.text.lower,
        )
    fresh = partial / "tokenizer.tmp"
    shutil.rmtree(fresh, ignore_errors=True)
    tokenizer.save(fresh)
    fresh.replace(folder)
    return tokenizer


def _gather_rejected(partial: Path, job: Job) -> int:
    """Writes rejected.jsonl, lines counted from the beginning of their file. How many there are."""
    total = 0
    before = [0] * len(job.inputs)  # lines of each input that earlier spans had
    temporary = partial / (REJECTED + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        for number, unit in enumerate(job.units):
            state = json.loads(part_file(partial, number, ".json").read_text("utf-8"))
            for entry in _rejected_of(partial, number):
                span = unit[entry.pop("span")]
                item = job.inputs[span.input]
                line = entry.pop("line")
                place = (
                    {"line": before[span.input] + line} if is_lines(item.kind) else {"row": line}
                )
                entry = {"file": entry["file"], **place, **entry}
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")
                total += 1
            for span, lines in zip(unit, state["lines"], strict=True):
                before[span.input] += lines
    temporary.replace(partial / REJECTED)
    return total


def _rejected_of(partial: Path, number: int) -> Iterator[dict[str, Any]]:
    with part_file(partial, number, ".rejected").open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def _nothing(partial: Path, job: Job) -> UserError:
    """Why there is not one document; the working folder is of no use then."""
    shutil.rmtree(partial, ignore_errors=True)
    total, first = 0, ""
    for number in range(len(job.units)):
        unit = UnitReader(replace(job, strict=False), number, watched=False)
        for record in unit:
            unit.reject(record, "no tokens in this text")
        total, first = total + unit.rejections, first or unit.first
    if not total:
        return UserError(f"input {job.inputs[0].path or job.inputs[0].name}: holds no documents")
    return UserError(f"not one document: all {total} lines or rows were rejected, first {first}")


def read_rejected(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of a corpus's rejected.jsonl."""
    with (folder / REJECTED).open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def _place(entry: dict[str, Any]) -> str:
    where = f"line {entry['line']}" if "line" in entry else f"row {entry['row']}"
    return f"{entry['file']}, {where}"


def _finished_before(partial: Path) -> Manifest | None:
    """The manifest, if an earlier run was stopped between writing it and moving the folder."""
    try:
        manifest = read_manifest(partial)
        check_files(partial, manifest, hashes=True)
    except UserError:
        return None
    return manifest


def _publish(partial: Path, out: Path) -> None:
    """Removes the traces of work and moves the folder into place."""
    shutil.rmtree(partial / "parts", ignore_errors=True)
    for name in ("job.json", LABELS, ".lock", *(p.name for p in partial.glob("*.tmp"))):
        (partial / name).unlink(missing_ok=True)
    move_into_place(partial, out)


def report(console: Console, out: Path, manifest: Manifest) -> None:
    """The summary: counts, and what was rejected and why."""
    counts = f"{manifest.documents} documents, {manifest.sentences} sentences"
    size = f"{manifest.tokens} tokens of {manifest.text_bytes / 1e6:.1f} MB of text"
    log.info("%s: %s, %s in %d shards", out, counts, size, len(manifest.shards))
    if manifest.rejected:
        console.print(rejected_table(out, manifest.rejected))


def rejected_table(folder: Path, total: int):
    """Reasons with how often and where first."""
    from rich.table import Table

    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for entry in read_rejected(folder):
        reason = entry["reason"].split(" at ")[0].split(";")[0]
        counts[reason] = counts.get(reason, 0) + 1
        first.setdefault(reason, _place(entry))
    table = Table("reason", "times", "first", title=f"{total} rejected, see {folder / REJECTED}")
    for reason, n in sorted(counts.items(), key=lambda row: (-row[1], row[0])):
        table.add_row(reason, str(n), first[reason])
    return table
