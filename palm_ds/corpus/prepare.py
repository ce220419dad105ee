"""Prepares a corpus from raw text: plans work units, writes their shards, publishes the folder.

    prepare("data/wiki", ["wiki/*.jsonl.gz"], PrepareOptions(train="wordpiece", vocab_size=30522))

An interrupted run leaves OUT.partial; the same command resumes from its finished shards. OUT itself
appears atomically, complete. Its bytes depend on the input and the options, not on workers,
machines or interruptions.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console

from palm_ds.common.atomic import check_new_folder, move_into_place, naming
from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.common.files import make_folder
from palm_ds.common.messages import counted
from palm_ds.common.remote_files import RemoteFolder, is_url
from palm_ds.common.settings import Settings
from palm_ds.corpus import work_dir
from palm_ds.corpus.annotations import DEFAULT_ANNOTATIONS, INPUT_ANNOTATIONS, find_annotation
from palm_ds.corpus.collect_labels import collect_labels
from palm_ds.corpus.corpus_folder import check_writable, open_folder, upload, work_folder
from palm_ds.corpus.executors import ParallelMap, check_mpi, open_executor, report_progress
from palm_ds.corpus.input.discover import find_inputs, split_into_units, unit_bytes
from palm_ds.corpus.manifest import NAME as MANIFEST
from palm_ds.corpus.manifest import Manifest, check_files, read_manifest
from palm_ds.corpus.mine_phrases import all_sample_texts, mine_phrases
from palm_ds.corpus.options import InputOptions, ScreenOptions, TextOptions, restored
from palm_ds.corpus.progress_bar import show_progress
from palm_ds.corpus.rejected import gather_rejected, report
from palm_ds.corpus.screening.duplicates import import_rensa
from palm_ds.corpus.screening.quality import find_filter
from palm_ds.corpus.screening.screen import COUNTS, screen
from palm_ds.corpus.worker import WorkUnitReader, write_shard
from palm_ds.corpus.writer import ShardSummary, finish_corpus, smallest_unsigned
from palm_ds.text.chinese import find_simplifier
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.text.train_tokenizer import check_training, train_tokenizer

log = logging.getLogger(__name__)

_MB = 1 << 20
_SHARDS, _SMALLEST, _LARGEST = 256, 4 * _MB, 384 * _MB
"""The input becomes 256 shards, none smaller than 4 and none larger than 384 MiB of input (some 90
million tokens of English, 130 million of Chinese)."""
_UNSPACED = (
    "note: %.0f %% of the characters are in a script without spaces between words (Thai, Lao, "
    "Khmer or Burmese), of which each token counts as a word; SentencePiece learns tokens that "
    "come close to words, and WordPiece takes more than 100 letters without a space for an "
    "unknown word"
)
_UNKNOWN = (
    "note: %.0f %% of the tokens are unknown words or characters (%s); use a tokenizer that was "
    "made for such text, or a larger --vocab_size"
)
_FEW_UNSPACED, _FEW_UNKNOWN = 0.01, 0.05  # shares below which there is no note


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Settings, option="--"):
    """The options of `prepare`."""

    text: TextOptions = field(default_factory=TextOptions)
    input: InputOptions = field(default_factory=InputOptions)
    tokenizer: str | None = None  # a file or folder; else one is trained
    train: str | None = None  # wordpiece or sentencepiece
    vocab_size: int = 30_522
    annotations: tuple[str, ...] = ()  # in addition to the four defaults
    screen: ScreenOptions = field(default_factory=ScreenOptions)
    not_in: tuple[str, ...] = ()  # inputs of which the corpus must have no copies
    strict: bool = False
    shard_mb: PositiveFloat | None = None  # of input; None: a 256th of it, from 4 to 384
    sample_mb: PositiveFloat = 64.0  # of text, for training and mining
    workers: PositiveInt = 1
    mpi: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tokenizer is None) == (self.train is None):
            raise UserError("give either --tokenizer PATH or --train wordpiece|sentencepiece")
        if self.train is not None:
            check_training(self.train, self.vocab_size)
        elif self.vocab_size != type(self).vocab_size:
            raise UserError("--vocab_size: is of a tokenizer to --train; --tokenizer has its own")
        if self.not_in and self.screen.dedup is None:
            raise UserError("--not_in: give --dedup too (exact, near or a similarity)")
        if self.screen.near:
            import_rensa()
        for name in self.screen.filters:
            find_filter(name)
        if self.input.structure == "ernie":
            self._check_ernie()
        for name in self.annotations:
            if name in INPUT_ANNOTATIONS and self.input.structure not in INPUT_ANNOTATIONS[name]:
                formats = " and ".join(INPUT_ANNOTATIONS[name])
                raise UserError(f"--annotation {name}: comes with --format {formats}")

    def _check_ernie(self) -> None:
        """Lines of ids need their tokenizer, and text options do not apply to them."""
        if self.tokenizer is None:
            raise UserError("--format ernie: the lines contain ids; give their --tokenizer")
        if self.screen.active:
            raise UserError("--format ernie: the lines contain ids; remove --dedup and --filter")
        if replace(self.text, language="mixed", collocations=True) != TextOptions():
            raise UserError(
                "--format ernie: the lines contain ids, not text; remove --lower, --simplify, "
                "--newline, --segmenter, lexicons and --no_collocations"
            )


def prepare(
    out: str | Path,
    inputs: Sequence[str],
    options: PrepareOptions,
    *,
    console: Console | None = None,
) -> Manifest:
    """Prepares the corpus, resumes an interrupted run, or finds it complete; returns its manifest.
    `console` shows a progress bar and the table of rejected records."""
    console = console or Console(quiet=True)
    if not str(out):
        raise UserError("OUT: empty; name a new folder for the corpus")
    if is_url(out):
        return _prepare_remote(str(out), inputs, options, console)
    out = Path(out)
    if options.mpi:
        check_mpi()
    job = plan(inputs, options)
    if out.is_file() or out.is_dir() and any(out.iterdir()):
        return _already_there(out, job)
    check_new_folder(out)
    partial = out.with_name(out.name + ".partial")
    _check_unfinished(partial)
    with naming(out), work_dir.exclusive_lock(partial):
        manifest = _finished_before(partial, job)
        if manifest is None:
            _enter(partial, job)
            with _executing(partial, job, options, console) as (run, todo):
                manifest = _make(partial, job, options, run, todo)
        _publish(partial, out)
    report(console, out, manifest)
    return manifest


def _prepare_remote(
    url: str, inputs: Sequence[str], options: PrepareOptions, console: Console
) -> Manifest:
    """Prepares the corpus on this machine, then uploads it."""
    remote = RemoteFolder(url)
    if remote.exists(MANIFEST):
        manifest = open_folder(url).manifest
        _check_same(url, manifest, plan(inputs, options))
        log.info("%s is already complete: %d documents", url, manifest.documents)
        return manifest
    check_writable(remote)
    folder = work_folder(url)
    manifest = prepare(folder, inputs, options, console=console)
    upload(folder, remote, manifest)
    log.info("%s: complete", url)
    return manifest


def plan(inputs: Sequence[str], options: PrepareOptions) -> work_dir.PreparationJob:
    """Plans the job: inputs, work units and options, checked as far as possible before any work."""
    given = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    ids_alone = options.input.structure == "ernie"
    loses = options.text.lower or (given is not None and given.lower)
    annotations = _annotations(options, loses and not ids_alone)
    files, ignored = find_inputs(inputs, options.input)
    if ignored:
        some = ", ".join(ignored[:5]) + (" ..." if len(ignored) > 5 else "")
        log.info("skipped %d files of unknown types (%s)", len(ignored), some)
    total = sum(item.bytes for item in files)
    best = min(max(total / _SHARDS, _SMALLEST), _LARGEST)
    size = options.shard_mb * _MB if options.shard_mb else best
    units = split_into_units(files, options.input, size=max(1, int(size)))
    if not units:
        raise UserError(f"input {', '.join(inputs)}: all files are empty")
    excluded = find_inputs(options.not_in, options.input)[0] if options.not_in else ()
    return work_dir.PreparationJob(
        text=options.text,
        input=options.input,
        tokenizer=_tokenizer_entry(options),
        annotations=annotations,
        strict=options.strict,
        sample_bytes=int(options.sample_mb * _MB),
        lexicons=work_dir.hash_lexicons(
            [*options.text.lexicon_phrase, *options.text.lexicon_entity]
        ),
        inputs=files,
        units=units,
        screen=options.screen,
        excluded=excluded,
        excluded_units=split_into_units(excluded, options.input, size=max(1, int(size))),
    )


def _tokenizer_entry(options: PrepareOptions) -> dict[str, Any]:
    if options.tokenizer is not None:
        return {
            "path": options.tokenizer,
            "sha256": work_dir.hash_tokenizer(Path(options.tokenizer)),
        }
    trained = {"train": options.train, "vocab_size": options.vocab_size}
    return {**trained, "lower": options.text.lower}


def _annotations(options: PrepareOptions, loses_capitals: bool) -> tuple[str, ...]:
    """The default annotations, `capital` if text is lower-cased, those the input gives, `heading`
    if it has titles, and the user's, each once."""
    structure = options.input.structure
    names = [*DEFAULT_ANNOTATIONS, *(["capital"] if loses_capitals else [])]
    names += [name for name, formats in INPUT_ANNOTATIONS.items() if structure in formats]
    names += [*(["heading"] if options.input.title_field else []), *options.annotations]
    short = [find_annotation(name)[0] for name in names]
    return tuple(name for i, name in enumerate(names) if short[i] not in short[:i])


def _already_there(out: Path, job: work_dir.PreparationJob) -> Manifest:
    """Returns the manifest of an existing corpus at OUT; raises UserError unless it is the same."""
    if not out.is_dir():
        raise UserError(f"{out}: is a file; name a new folder for the corpus")
    manifest = read_manifest(out)
    _check_same(out, manifest, job)
    check_files(out, manifest, hashes=False)
    log.info("%s is already complete: %d documents", out, manifest.documents)
    return manifest


def _check_same(out: str | Path, manifest: Manifest, job: work_dir.PreparationJob) -> None:
    """Raises UserError unless the job would give the same corpus."""
    there = {"inputs": list(manifest.inputs), **manifest.options}
    there.pop("labels", None)  # collected from the input, not an option
    if "input" in there:
        there["input"] = asdict(restored(InputOptions, there["input"]))
    now = {"inputs": job.input_entries(), **job.options()}
    there, now = json.loads(json.dumps([there, now]))
    if changes := differences(there, now):
        raise UserError(
            f"{out}: is a corpus with different options or inputs ({changes[0]}); choose another "
            "folder or remove it"
        )


def _check_unfinished(partial: Path) -> None:
    """Makes the working folder. Raises UserError if it is something else."""
    ours = {".lock", "parts"}
    known = any((partial / name).exists() for name in ("job.json", MANIFEST))
    if partial.exists() and not known and any(x.name not in ours for x in partial.iterdir()):
        raise UserError(f"{partial}: exists but is not an unfinished corpus; remove it")
    make_folder(partial)


def _enter(partial: Path, job: work_dir.PreparationJob) -> None:
    """Resumes the interrupted run of the same job. That of another job is discarded if it has
    finished no shard."""
    if (partial / "job.json").exists():
        if (change := work_dir.changed_option(partial, job)) and any(partial.glob("parts/*.json")):
            raise UserError(
                f"{partial}: was started with different options or inputs ({change}); repeat "
                "those, or remove it to start over"
            )
        if change:
            _empty(partial)
        else:
            log.info("continuing with %s", partial)
    (partial / "parts").mkdir(exist_ok=True)
    if not (partial / "job.json").exists():
        work_dir.save_job(partial, job)


def _empty(partial: Path) -> None:
    """Removes everything but the lock, which this process holds."""
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


@contextmanager
def _executing(
    partial: Path, job: work_dir.PreparationJob, options: PrepareOptions, console: Console
) -> Iterator[tuple[ParallelMap, list[int]]]:
    """Yields the executor and the numbers of unfinished work units, with a progress bar."""
    units = range(len(job.units))
    todo = [number for number in units if not work_dir.is_done(partial, number, len(units))]
    sizes = [unit_bytes(unit) for unit in job.units]
    done = sum(sizes) - sum(sizes[number] for number in todo)
    with (
        show_progress(console, sum(sizes), done) as watch,
        open_executor(workers=options.workers, mpi=options.mpi, watch=watch) as run,
    ):
        yield run, todo


def _make(
    partial: Path,
    job: work_dir.PreparationJob,
    options: PrepareOptions,
    run: ParallelMap,
    todo: list[int],
) -> Manifest:
    """Makes what is missing of tokenizer, collocations and shards, then index and manifest."""
    dropped = screen(partial, job, run) if job.screen.active else {}
    tokenizer = _tokenizer(partial, job, options)
    structure = job.input.structure
    options_found = {}
    if structure in ("pairs", "ernie"):
        options_found["labels"] = collect_labels(partial, job, run)
    wanted = job.text.collocations and structure != "ernie"
    if wanted and not (partial / work_dir.COLLOCATIONS).is_file():
        log.info("mining phrases")
        mine_phrases(partial, job, run)
    made = run(write_shard, ((str(partial), number) for number in todo))
    for number, text_bytes in zip(todo, made, strict=True):
        if options.mpi:  # local workers report progress themselves, more often
            report_progress(text_bytes, unit_bytes(job.units[number]))
    rejected = gather_rejected(partial, job)
    loaded = [work_dir.load_part(partial, number) for number in range(len(job.units))]
    parts = [part for part, _ in loaded]
    if not any(part.shard.documents for part in parts):
        raise _nothing(partial, job)
    _note_odd_text([state for _, state in loaded], parts, tokenizer)
    annotations = [find_annotation(name)[0] for name in job.annotations]
    return finish_corpus(
        partial,
        tokenizer,
        parts,
        annotations=annotations,
        ids_type=smallest_unsigned(tokenizer.size),
        rejected=rejected,
        dropped=dropped,
        options=json.loads(json.dumps({**job.options(), **options_found})),
        inputs=job.input_entries(),
    )


def _note_odd_text(
    states: Sequence[Mapping[str, Any]], parts: Sequence[ShardSummary], tokenizer: Tokenizer
) -> None:
    """Says if a part of the text is in scripts without spaces, or unknown to the tokenizer."""

    def share(name: str, total: int) -> float:
        return sum(state.get(name, 0) for state in states) / max(1, total)

    characters = sum(state.get("characters", 0) for state in states)
    unspaced = share("unspaced_characters", characters)
    unknown = share("unknown_tokens", sum(part.shard.tokens for part in parts))
    if unspaced >= _FEW_UNSPACED:
        log.info(_UNSPACED, 100 * unspaced)
    if unknown >= _FEW_UNKNOWN:
        log.info(_UNKNOWN, 100 * unknown, tokenizer.roles["unk"])


def _tokenizer(partial: Path, job: work_dir.PreparationJob, options: PrepareOptions) -> Tokenizer:
    """Loads or trains the tokenizer once; workers read it from the working folder."""
    folder = partial / "tokenizer"
    if folder.is_dir():
        return load_tokenizer(folder)
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        log.info("training a %s vocabulary", options.train)
        if next(all_sample_texts(partial, job), None) is None:
            raise _nothing(partial, job)
        texts = all_sample_texts(partial, job)
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


def _nothing(partial: Path, job: work_dir.PreparationJob) -> UserError:
    """Explains why there are no documents, and removes the working folder."""
    dropped = sum(len(work_dir.load_dropped(partial, number)) for number in range(len(job.units)))
    shutil.rmtree(partial, ignore_errors=True)
    if dropped:
        lost = counted(dropped, "document")
        return UserError(f"no documents: --dedup and --filter dropped {lost}, and none is left")
    total, first = 0, ""
    for number in range(len(job.units)):
        unit = WorkUnitReader(replace(job, strict=False), number, watched=False)
        for record in unit:
            unit.reject(record, "no tokens in this text")
        total, first = total + unit.rejections, first or unit.first
    if not total:
        return UserError(f"input {job.inputs[0].path or job.inputs[0].name}: has no documents")
    rejected = f"every line or row was rejected ({total} in all)"
    return UserError(f"no documents: {rejected}, the first at {first}")


def _finished_before(partial: Path, job: work_dir.PreparationJob) -> Manifest | None:
    """The manifest if an earlier run of the same job was stopped after writing it, before moving
    the folder. Raises UserError if it is of another job."""
    try:
        manifest = read_manifest(partial)
        check_files(partial, manifest, hashes=True)
    except UserError:
        return None
    _check_same(partial, manifest, job)
    return manifest


def _publish(partial: Path, out: Path) -> None:
    """Removes working files and moves the folder into place."""
    shutil.rmtree(partial / "parts", ignore_errors=True)
    for name in (
        "job.json",
        work_dir.LABELS,
        COUNTS,
        ".lock",
        *(p.name for p in partial.glob("*.tmp")),
    ):
        (partial / name).unlink(missing_ok=True)
    move_into_place(partial, out)
