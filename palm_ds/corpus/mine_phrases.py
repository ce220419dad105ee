"""Mines phrases from the corpus: pairs of words that occur together more often than by chance.

Pairs of adjacent words are counted over a sample (the beginning of every work unit), separately
for Chinese and for words in letters, and kept if they are frequent and their normalized pointwise
mutual information (Bouma 2009),

    npmi(a, b) = log(p(ab) / (p(a) p(b))) / -log p(ab),   from -1 to 1,

is high. Counts are integers, so the result does not depend on the order in which they are added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from palm_ds.common.atomic import write_file_atomically
from palm_ds.corpus.analyzer import chinese_tagger, find_segmenter
from palm_ds.corpus.executors import ParallelMap
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.work_dir import COLLOCATIONS, PreparationJob, load_dropped, load_job
from palm_ds.corpus.worker import WorkUnitReader
from palm_ds.text import chinese as chinese
from palm_ds.text.chinese import find_simplifier
from palm_ds.text.tokenizer import segmenter_in
from palm_ds.text.word_features import Flag, is_han, word_flags
from palm_ds.text.word_lists import word_lists
from palm_ds.text.words import GrowableArray, WordIndex, split_words

Number: TypeAlias = Callable[[str, int], "str | int"]
"""Maps a word and its flags to the word as counted, to -1 if it is never part of a phrase, or to 0
if it is not of this language."""
_CONTENT = frozenset("abijlnstvz")  # adjectives, nouns, names, verbs, idioms: jieba's first letters
_MAX_PAIRS = 4_000_000  # in memory; above that, rare pairs are dropped


@dataclass
class CooccurrenceCounts:
    """Counts of words and of adjacent pairs, in lower case; `total` counts all words."""

    total: int
    words: Counter[str]
    pairs: Counter[tuple[str, str]]


def sample_texts(folder: Path, job: PreparationJob, unit: int) -> Iterator[str]:
    """The texts at the beginning of a work unit that are not dropped: its share of the job's
    sample."""
    share, taken = job.sample_bytes // len(job.units), 0
    dropped = load_dropped(folder, unit)
    for record in WorkUnitReader(job, unit, watched=False, dropped=dropped):
        if taken > share:
            return
        text = record.text
        taken += len(text.encode("utf-8"))
        yield text


def count_pairs(task: tuple[str, int]) -> list[CooccurrenceCounts]:
    """Counts the sample of a work unit, `task` = (folder of the job, unit), for each language.
    Pairs seen only once are dropped."""
    job = load_job(Path(task[0]))
    options = job.text
    segment = find_segmenter(options, segmenter_in(Path(task[0]) / "tokenizer"))
    simplify = find_simplifier() if options.simplify else str
    counters = _counters(options)
    table = WordIndex()
    for text in sample_texts(Path(task[0]), job, task[1]):
        numbers = table.numbers(split_words(simplify(text), segment))
        flags = [word_flags(word, options.language) for word in table.new]
        for counter in counters:
            counter.learn(table.new, flags)
            counter.count(numbers)
        table.new = []
    return [counter.counts() for counter in counters]


class _Counter:
    """Counts words and adjacent pairs of one language."""

    def __init__(self, number: Number, gap: int) -> None:
        self.number, self.gap = number, gap
        self.names = WordIndex()  # words in lower case without white space
        self.of_word = GrowableArray(
            np.int64
        )  # index in `names` + 1; -1: never in a phrase; 0: other
        self.apart = GrowableArray(
            bool
        )  # whether white space separates the word from the previous one
        self.words, self.pairs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self.total = 0

    def learn(self, words: Sequence[str], flags: Sequence[int]) -> None:
        """Adds new words of the index, in its order."""
        numbers = [self.number(word, flag) for word, flag in zip(words, flags, strict=True)]
        self.of_word.extend(
            [self.names[number] + 1 if isinstance(number, str) else number for number in numbers]
        )
        self.apart.extend([bool(flag & self.gap) for flag in flags])

    def count(self, numbers: np.ndarray) -> None:
        """Counts the words of a text, given as numbers in the index."""
        mined = self.of_word.array[numbers]
        first, second = mined[:-1], mined[1:]
        both = (first > 0) & (second > 0) & ~self.apart.array[numbers[1:]]
        self.total += int((mined != 0).sum())
        self.words.append(mined[mined > 0])
        self.pairs.append(first[both] << 32 | second[both])

    def counts(self) -> CooccurrenceCounts:
        names = ["", *self.names]
        singles = {names[k]: n for k, n in _count(self.words)}
        twice = {(names[k >> 32], names[k & 0xFFFFFFFF]): n for k, n in _count(self.pairs) if n > 1}
        return CooccurrenceCounts(self.total, Counter(singles), Counter(twice))


def _count(values: list[np.ndarray]) -> Iterator[tuple[int, int]]:
    different, times = np.unique(np.concatenate(values), return_counts=True)
    return zip(different.tolist(), times.tolist(), strict=True)


def _counters(options: TextOptions) -> list[_Counter]:
    """One counter per language. Pairs of words in letters may span white space but not an empty
    line; Chinese pairs may not span white space."""
    function_words = word_lists(options.language).function_words
    letters = [_Counter(_lettered(function_words), Flag.BLANK)] if options.capitals_name else []
    tag = chinese_tagger() if options.chinese else None
    return letters + ([_Counter(_chinese(tag), Flag.SPACE)] if tag else [])


def _lettered(function_words: Collection[str]) -> Number:
    """Words in letters but for those that combine with everything."""

    def number(word: str, flags: int) -> str | int:
        if not flags & Flag.LETTER:
            return 0
        core = word.lstrip().lower()
        return -1 if core in function_words or len(core) < 2 else core

    return number


def _chinese(tag: Callable[[str], str]) -> Number:
    """Content words by their part of speech in jieba's dictionary."""

    def number(word: str, flags: int) -> str | int:
        core = word.lstrip()
        if not flags & Flag.HAN or not is_han(core[:1]):
            return 0
        if core in chinese.FUNCTION_WORDS or tag(core)[:1] not in _CONTENT:
            return -1
        return core

    return number


def select_collocations(
    counts: CooccurrenceCounts, options: TextOptions
) -> list[tuple[str, str, int, float]]:
    """Selects the collocations: (word, word, count, npmi)."""
    collocations = []
    for (a, b), n in counts.pairs.items():
        if n < options.collocation_count or a == b:
            continue
        together = n / counts.total
        alone = counts.words[a] / counts.total * counts.words[b] / counts.total
        npmi = math.log(together / alone) / -math.log(together) if together < 1 else 1.0
        if npmi >= options.collocation_npmi:
            collocations.append((a, b, n, npmi))
    return collocations


def add_counts(whole: CooccurrenceCounts, part: CooccurrenceCounts) -> None:
    """Adds the counts of a work unit; drops the rarest pairs if there are too many, to bound
    memory."""
    whole.total += part.total
    whole.words.update(part.words)
    whole.pairs.update(part.pairs)
    least = 2
    while len(whole.pairs) > _MAX_PAIRS:
        least += 1
        whole.pairs = Counter({k: n for k, n in whole.pairs.items() if n >= least})


def mine_phrases(folder: Path, job: PreparationJob, run: ParallelMap) -> None:
    """Mines the job's sample and writes collocations.tsv."""
    tasks = ((str(folder), number) for number in range(len(job.units)))
    count = job.text.capitals_name + job.text.chinese
    languages = [CooccurrenceCounts(0, Counter(), Counter()) for _ in range(count)]
    for parts in run(count_pairs, tasks):
        for whole, part in zip(languages, parts, strict=True):
            add_counts(whole, part)
    rows = [row for whole in languages for row in select_collocations(whole, job.text)]
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    lines = [f"{a}\t{b}\t{n}\t{npmi:.4f}" for a, b, n, npmi in rows]
    write_file_atomically(
        folder / COLLOCATIONS, "\n".join(["first\tsecond\tcount\tnpmi", *lines]) + "\n"
    )


def all_sample_texts(folder: Path, job: PreparationJob) -> Iterator[str]:
    """The sample texts of all work units, in order."""
    return (text for unit in range(len(job.units)) for text in sample_texts(folder, job, unit))
