"""Learns the weights of Chinese names (`palm_ds/text/chinese.py`) from labeled words.

    python tools/chinese_names/learn.py            writes palm_ds/text/chinese_name_weights.txt
    python tools/chinese_names/learn.py --folds 5  precision and recall on words that are held out

`words.txt` has a labeled word a line, `+` before a name and `-` before another word that jieba
calls one. They were labeled by one rule: a name is what English writes with a capital letter.
Logistic regression, with AdaGrad from zero: the same words give the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import rjieba

from palm_ds.corpus.analyzer import chinese_tagger
from palm_ds.text.chinese import WEIGHTS, features

WORDS = Path(__file__).with_name("words.txt")
DECAY = 0.3
STEPS = 300
THRESHOLD = 25  # hundredths of log-odds: three of four new words that are marked are names
LEAST = 10  # smaller weights are left out
HEADER = "# Weights in hundredths, learned by tools/chinese_names/learn.py from words.txt there.\n"


def read_words(file: Path = WORDS) -> list[tuple[str, bool]]:
    """The labeled words, in order."""
    lines = file.read_text("utf-8").split("\n")
    return [(line[1:].strip(), line[0] == "+") for line in lines if line[:1] in ("+", "-")]


def features_of(word: str) -> list[str]:
    """The features of a word with jieba's tag."""
    return features(word, chinese_tagger()(word), known=rjieba.has_word(word))


def learn(words: list[tuple[str, bool]]) -> dict[str, int]:
    """{feature: weight in hundredths}, without the smallest. Words that their characters place
    wrongly get a weight of their own, after all others are known: it explains nothing else."""
    known = [features_of(word) for word, _ in words]
    index: dict[str, int] = {}
    pairs = [
        (row, index.setdefault(name, len(index)))
        for row, names in enumerate(known)
        for name in names
        if not name.startswith("word ")
    ]
    rows, columns = np.array(pairs).T
    fitted = _fit(rows, columns, np.array([label for _, label in words], float))
    found = {name: round(100 * fitted[column]) for name, column in index.items()}
    found = {name: n - THRESHOLD * _is_tag(name) for name, n in found.items()}
    found = {name: n for name, n in found.items() if abs(n) >= LEAST}
    for (word, label), names in zip(words, known, strict=True):
        score = sum(found.get(name, 0) for name in names)
        if (score > 0) != label:
            found[f"word {word}"] = (THRESHOLD if label else -THRESHOLD) - score
    return found


def _is_tag(feature: str) -> bool:
    return feature.endswith((" known", " new"))


def _fit(rows: np.ndarray, columns: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(features,) weights of a logistic regression; `rows`, `columns`: (ones,) where the matrix of
    features is one."""
    weights = np.zeros(columns.max() + 1)
    squares = np.full(len(weights), 1e-8)
    for _ in range(STEPS):
        odds = np.bincount(rows, weights[columns], len(labels))
        error = 1 / (1 + np.exp(-odds)) - labels
        gradient = np.bincount(columns, error[rows], len(weights)) + DECAY * weights
        squares += gradient**2
        weights -= 0.5 * gradient / np.sqrt(squares)
    return weights


def held_out(words: list[tuple[str, bool]], folds: int) -> tuple[float, float]:
    """(precision, recall) over words that were not learned from."""
    fold = np.random.default_rng(0).integers(0, folds, len(words))
    found = np.zeros(len(words), bool)
    for k in range(folds):
        weights = learn([word for word, at in zip(words, fold, strict=True) if at != k])
        for i in np.flatnonzero(fold == k):
            found[i] = sum(weights.get(name, 0) for name in features_of(words[i][0])) > 0
    right = found & np.array([label for _, label in words])
    return right.sum() / found.sum(), right.sum() / sum(label for _, label in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folds", type=int, default=0, help="measure instead of writing")
    folds, words = parser.parse_args().folds, read_words()
    if folds:
        print("precision {:.3f}, recall {:.3f}".format(*held_out(words, folds)))
        return
    lines = [f"{name}\t{weight}\n" for name, weight in sorted(learn(words).items())]
    WEIGHTS.write_text(HEADER + "".join(lines), "utf-8")


if __name__ == "__main__":
    main()
