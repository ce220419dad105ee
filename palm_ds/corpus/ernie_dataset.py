"""Reads ERNIE 1.0 pretraining files as a corpus, and writes a corpus to such a file.

corpus = open_ernie(Path("train_filelist"), Path("vocab.txt"), Path("train_filelist.corpus"))
write_ernie("data/wiki", "wiki.gz", length=128, seed=1)
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import move_into_place
from palm_ds.common.errors import UserError
from palm_ds.common.files import locked, sha256_of_file
from palm_ds.common.json_files import write_json
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.corpus.input.discover import find_inputs
from palm_ds.corpus.input.ernie_lines import LABELS, ernie_line
from palm_ds.corpus.options import InputOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.work_dir import hash_tokenizer

log = logging.getLogger(__name__)

_SOURCE = "source.json"
_DRAWS = 8  # candidates for a random second text
_SPECIALS = 3  # [CLS] first [SEP] second [SEP]


# ---- files to a corpus ----


def open_ernie(lines: str | Path, tokenizer: str | Path, folder: str | Path) -> Corpus:
    """Opens the corpus of a file of lines, or of a list of such files.

    It is prepared in `folder` the first time, and again if the files have changed. Other processes
    on the machine wait meanwhile. `folder` is either absent or complete.
    """
    folder = Path(folder)
    files = find_inputs([str(lines)], InputOptions(format="ernie"))[0]
    wanted = [_entry(Path(item.path), item.mask_word) for item in files]
    wanted.append(_entry(Path(tokenizer), 0))
    if (corpus := _fresh(folder, wanted)) is not None:
        return corpus
    try:
        with locked(folder.with_name(folder.name + ".lock")):
            corpus = _fresh(folder, wanted)
            if corpus is None:
                corpus = _make(folder, str(lines), str(tokenizer), wanted)
            return corpus
    except OSError as error:
        raise UserError(
            f"{lines}: its corpus cannot be written to {folder} ({error.strerror or error}); "
            f"prepare it elsewhere with palm-ds prepare OUT {lines} --format ernie --tokenizer "
            f"{tokenizer} and give OUT instead"
        ) from None


def _entry(path: Path, mask_word: int) -> dict[str, Any]:
    """Entry that identifies a file, apart from its contents."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    modified = max(p.stat().st_mtime_ns for p in [path, *path.rglob("*")])
    entry = {"name": path.name, "mask_word": mask_word, "modified": modified}
    return {**entry, "bytes": status.st_size, "path": str(path)}


def _with_contents(entry: dict[str, Any]) -> dict[str, Any]:
    path = Path(entry["path"])
    sha256 = hash_tokenizer(path) if path.is_dir() else sha256_of_file(path)
    return {**{k: v for k, v in entry.items() if k != "path"}, "sha256": sha256}


def _fresh(folder: Path, wanted: list[dict[str, Any]]) -> Corpus | None:
    """The existing corpus if it was prepared from these files, else None."""
    try:
        there = json.loads((folder / _SOURCE).read_text("utf-8"))
        corpus = open_corpus(folder)
    except (OSError, ValueError):  # a UserError is a ValueError
        return None
    if len(there) != len(wanted):
        return None
    keys = ("name", "mask_word", "bytes", "modified")
    pairs = list(zip(there, wanted, strict=True))
    if all(old.get(key) == new[key] for old, new in pairs for key in keys):
        return corpus
    now = [_with_contents(entry) for entry in wanted]
    same = ("mask_word", "sha256")
    pairs = list(zip(there, now, strict=True))
    if any(old.get(key) != new[key] for old, new in pairs for key in same):
        return None
    if os.access(folder, os.W_OK):  # same contents, but different dates or names
        _write_source(folder, now)
    return corpus


def _write_source(folder: Path, entries: list[dict[str, Any]]) -> None:
    write_json(folder / _SOURCE, entries)


def _make(folder: Path, lines: str, tokenizer: str, wanted: list[dict[str, Any]]) -> Corpus:
    """Prepares the corpus next to `folder` and moves it there."""
    new, old = (folder.with_name(folder.name + end) for end in (".new", ".old"))
    for rest in (new, new.with_name(new.name + ".partial"), old):
        shutil.rmtree(rest, ignore_errors=True)
    options = PrepareOptions(input=InputOptions(format="ernie"), tokenizer=tokenizer, workers=1)
    contents = [_with_contents(entry) for entry in wanted]  # hashed before they are read
    prepare(new, [lines], options)
    _write_source(new, contents)
    move_into_place(new, folder, aside=old)
    shutil.rmtree(old, ignore_errors=True)
    return open_corpus(folder)


# ---- a corpus to a file ----


def write_ernie(
    corpus: str | Path,
    file: str | Path,
    *,
    length: int | None = None,
    seed: int = 0,
) -> int:
    """Writes a corpus as ERNIE 1.0 lines, atomically; returns the number of lines.

    Pairs are written as they are, cut to `length` if given. Documents are split into runs of
    sentences, each cut in two; with probability one half the second text is replaced by one from
    another document.
    """
    source, file = open_corpus(corpus), Path(file)
    if file.suffix != ".gz":
        raise UserError(f"{file}: ERNIE reads only files named .gz; call it {file}.gz")
    if file.exists():
        raise UserError(f"{file}: already exists; give another name, or remove it")
    if length is not None and length < 8:
        raise UserError(f"--length {length}: must be at least 8")
    if "label" in source.annotations:
        texts = _ready_pairs(source, length)
    else:
        texts = _cut_documents(source, length or 512, seed)
    count = _write(file, source, texts)
    log.info("%s: %d lines", file, count)
    return count


_Pair = tuple[int, int, int, int, int]  # start and end of both texts in the corpus, label


def _write(file: Path, source: Corpus, pairs: Iterator[_Pair]) -> int:
    tokenizer, count = source.tokenizer(), 0
    ids = (tokenizer.backend.token_to_id(tokenizer.roles[role]) for role in ("cls", "sep"))
    cls, sep = (int(i or 0) for i in ids)
    partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as handle:
            for begin, end, other, last, label in pairs:
                first, second = (
                    (piece.ids, piece.annotations["word"])
                    for piece in (
                        source.read(begin, end, ["word"]),
                        source.read(other, last, ["word"]),
                    )
                )
                line = ernie_line(first, second, label, cls=cls, sep=sep)
                handle.write(line.encode() + b"\n")
                count += 1
        if not count:
            raise UserError(f"corpus {source.path}: no document has two sentences")
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _ready_pairs(source: Corpus, length: int | None) -> Iterator[_Pair]:
    """The pairs of a corpus of pairs."""
    names = source.manifest.options.get("labels", [])
    if not set(names) <= set(LABELS):
        some = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        raise UserError(
            f"corpus {source.path}: its labels are {some}; ERNIE's lines allow only 0 and 1 "
            "(next_sentence_label)"
        )
    numbers = source.take(source.document_starts[:-1], "label").tolist()
    for document, number in enumerate(numbers):
        first, last = source.first_sentence[document : document + 2].tolist()
        begin, middle, end = source.sentence_starts[first : first + 3].tolist()
        assert last - first == 2, f"document {document} of {source.path} is not a pair"
        most = end - begin if length is None else length - _SPECIALS
        left, right = truncate_pair(middle - begin, end - middle, most)
        yield begin, begin + left, middle, middle + right, int(names[number])


def _cut_documents(source: Corpus, length: int, seed: int) -> Iterator[_Pair]:
    """Pairs of adjacent texts and of texts of different documents, with equal probability. Texts
    are whole sentences, unless two sentences alone are too long."""
    if len(source) < 2:
        raise UserError(
            f"corpus {source.path}: has only one document; random texts need at least two"
        )
    seed, room = derive_key("write_ernie", seed), length - _SPECIALS
    starts = source.sentence_starts
    for document in range(len(source)):
        rng = keyed_generator(seed, document)
        at, last = source.first_sentence[document : document + 2].tolist()
        while last - at > 1:
            edges = starts[at : last + 1]
            fits = int(np.searchsorted(edges, edges[0] + room, side="right")) - 1
            sentences = min(max(fits, 2), last - at)
            cut = int(rng.integers(1, sentences))
            begin, middle, end = (int(edges[i]) for i in (0, cut, sentences))
            if rng.random() < 0.5:
                left, right = truncate_pair(middle - begin, end - middle, room)
                yield begin, begin + left, middle, middle + right, 1
                at += sentences
            else:
                room_left = max(room - (middle - begin), 1)
                other, stop = _elsewhere(source, document, end - middle, room_left, rng)
                left, right = truncate_pair(middle - begin, stop - other, room)
                yield begin, begin + left, other, other + right, 0
                at += cut  # the replaced text begins the next pair


def _elsewhere(
    source: Corpus, document: int, wanted: int, room: int, rng: np.random.Generator
) -> tuple[int, int]:
    """Start and end of a run of sentences of another document: of a few random ones, the one
    nearest to `wanted` tokens that is not over `room`. `wanted` is the length of the text it
    replaces, so that length does not give the label away."""
    runs = []
    for _ in range(_DRAWS):
        other = int(rng.integers(0, len(source) - 1))
        other += other >= document
        first, last = source.first_sentence[other : other + 2].tolist()
        edges = source.sentence_starts[int(rng.integers(first, last)) : last + 1]
        sizes = edges[1:] - edges[0]
        nearest = int(np.argmin(np.abs(sizes - wanted) + (sizes > room) * sizes[-1]))
        runs.append((int(edges[0]), int(edges[nearest + 1])))
    return min(runs, key=lambda run: (run[1] - run[0] > room, abs(run[1] - run[0] - wanted)))


def truncate_pair(first: int, second: int, most: int) -> tuple[int, int]:
    """Cuts two token counts, the longer one first, so that their sum is at most `most`."""
    left = min(first, max(most - second, (most + 1) // 2))
    return left, min(second, most - left)
