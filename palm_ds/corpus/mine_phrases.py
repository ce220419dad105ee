"""English phrases that the corpus itself shows: words that stand together more than by chance.

Pairs of neighbouring words are counted over a sample (the beginning of every unit) and kept if
they are frequent and their normalised pointwise mutual information (Bouma 2009),

    npmi(a, b) = log(p(ab) / (p(a) p(b))) / -log p(ab),   from -1 to 1,

is high. Counts are whole numbers and are added in any order: the result is always the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palm_ds.corpus.executors import Run
from palm_ds.corpus.manifest import replace_text
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.work_dir import COLLOCATIONS, Job, load_job
from palm_ds.corpus.worker import UnitReader
from palm_ds.text import english_lists as english
from palm_ds.text.word_features import BLANK, LETTER, flags_of
from palm_ds.text.words import Grown, WordTable, split_words

_MOST_PAIRS = 4_000_000  # in memory; beyond, those met once so far are forgotten


@dataclass
class Counts:
    """Words and pairs of words in lower case. `words` has all, not only those that pair."""

    total: int
    words: Counter[str]
    pairs: Counter[tuple[str, str]]


def sample_texts(job: Job, unit: int) -> Iterator[str]:
    """The texts at the beginning of a unit: its share of the job's sample."""
    share, taken = job.sample_bytes // len(job.units), 0
    for record in UnitReader(job, unit, watched=False):
        if taken > share:
            return
        text = record.text
        taken += len(text.encode("utf-8"))
        yield text


def count_pairs(task: tuple[str, int]) -> Counts:
    """Counts of the sample of a unit: (job's folder, unit). Pairs met but once are left out."""
    job = load_job(Path(task[0]))
    table = WordTable()
    lower = WordTable()  # words without their capitals and the white space before them
    of_word = Grown(
        np.int64
    )  # the word's number in `lower` from 1; -1: pairs with none; 0: no word
    begins = Grown(bool)  # a paragraph begins with the word
    words, pairs, total = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for text in sample_texts(job, task[1]):
        numbers = table.numbers(split_words(text))
        flags = [flags_of(word) for word in table.fresh]
        of_word.extend([_number(w, f, lower) for w, f in zip(table.fresh, flags, strict=True)])
        begins.extend([bool(f & BLANK) for f in flags])
        table.fresh = []
        found = of_word.array[numbers]
        first, second = found[:-1], found[1:]
        both = (first > 0) & (second > 0) & ~begins.array[numbers[1:]]
        total += int((found != 0).sum())
        words.append(found[found > 0])
        pairs.append(first[both] << 32 | second[both])
    names = ["", *lower]
    singles = {names[k]: n for k, n in _count(words)}
    twice = {(names[k >> 32], names[k & 0xFFFFFFFF]): n for k, n in _count(pairs) if n > 1}
    return Counts(total, Counter(singles), Counter(twice))


def _count(values: list[np.ndarray]) -> Iterator[tuple[int, int]]:
    different, times = np.unique(np.concatenate(values), return_counts=True)
    return zip(different.tolist(), times.tolist(), strict=True)


def _number(word: str, flags: int, lower: WordTable) -> int:
    if not flags & LETTER:
        return 0
    core = word.lstrip().lower()
    if core in english.FUNCTION_WORDS or len(core) < 2:
        return -1
    return lower[core] + 1


def mine(counts: Counts, options: TextOptions) -> list[tuple[str, str, int, float]]:
    """(word, word, count, npmi) of the collocations, the most frequent first."""
    found = []
    for (a, b), n in counts.pairs.items():
        if n < options.collocation_count or a == b:
            continue
        together = n / counts.total
        alone = counts.words[a] / counts.total * counts.words[b] / counts.total
        npmi = math.log(together / alone) / -math.log(together) if together < 1 else 1.0
        if npmi >= options.collocation_npmi:
            found.append((a, b, n, npmi))
    return sorted(found, key=lambda row: (-row[2], row[0], row[1]))


def add_counts(parts: Iterable[Counts]) -> Counts:
    """The sum; memory is bounded by forgetting rare pairs when there are too many."""
    whole = Counts(0, Counter(), Counter())
    for part in parts:
        whole.total += part.total
        whole.words.update(part.words)
        whole.pairs.update(part.pairs)
        least = 2
        while len(whole.pairs) > _MOST_PAIRS:
            least += 1
            whole.pairs = Counter({k: n for k, n in whole.pairs.items() if n >= least})
    return whole


def mine_into(folder: Path, job: Job, run: Run) -> None:
    """Writes collocations.tsv of the job's sample."""
    tasks = ((str(folder), number) for number in range(len(job.units)))
    counts = add_counts(run(count_pairs, tasks))
    rows = mine(counts, job.text)
    lines = [f"{a}\t{b}\t{n}\t{npmi:.4f}" for a, b, n, npmi in rows]
    replace_text(folder / COLLOCATIONS, "\n".join(["first\tsecond\tcount\tnpmi", *lines]) + "\n")


def all_sample_texts(job: Job) -> Iterator[str]:
    """The sample's texts of every unit, in order."""
    return (text for unit in range(len(job.units)) for text in sample_texts(job, unit))
