"""How far surface cues decide a pretraining task, without any understanding of its texts.

    python benchmarks/surface_cues.py launch/recipes/study/joint.yaml sources.text.corpus=CORPUS

For every task of a recipe over a corpus that gives a text one of several classes: the accuracy of
gradient-boosted trees on held-out examples, beside that of the most frequent class, from

    lengths    the number of segments, and the tokens of each
    surface    also the first and the last token of each segment, and whether it opens a quotation
               that it does not close, or closes one that it did not open

An encoder that is not better than `surface` may have learned nothing else. A task that `lengths`
decides gives its labels away.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import compute_on_cpu  # noqa: E402
from palm_ds.common.errors import UserError, exit_on_user_error  # noqa: E402
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset  # noqa: E402
from palm_ds.data.tasks.example import Example  # noqa: E402
from palm_ds.pretrain.shared.predictions import ClassPrediction  # noqa: E402
from palm_ds.text.tokenizer import Tokenizer  # noqa: E402
from palm_ds.train.recipe.recipe import Recipe, make_recipe, read_values  # noqa: E402
from palm_ds.train.setup.build import datasets_of  # noqa: E402
from palm_ds.train.setup.resolve import resolve  # noqa: E402
from palm_ds.train.setup.sources import Data, open_data  # noqa: E402

FREQUENT = 200
"""First and last tokens that are distinguished; all others are one."""
OPENING, CLOSING, EITHER = "“‘«「『", "”’»」』", '"'


class Sides(NamedTuple):
    """A task alone, over the training and over the held-out documents."""

    name: str
    training: TaskGroupDataset
    held_out: TaskGroupDataset


def sides_of(recipe: Recipe, data: Data) -> Iterator[Sides]:
    """Those of every such task, as the first of a task group. Raises UserError."""
    groups = recipe.curriculum.task_groups
    training, _ = datasets_of(recipe, groups, data.train, seed=recipe.seed)
    held_out, _ = datasets_of(recipe, groups, data.held_out, seed=0, fixed=True)
    for sides in zip(training, held_out, strict=True):
        task = sides[0].tasks[0]
        if isinstance(task, ClassPrediction) and task.of_texts:
            yield Sides(task.name, *(replace(side, tasks=side.tasks[:1]) for side in sides))


def segments(example: Example) -> list[np.ndarray]:
    """The ids of each segment, without special tokens."""
    ids, place = example.unmasked_ids, np.flatnonzero(example.source_offsets >= 0)
    return [ids[part] for part in np.split(place, np.flatnonzero(np.diff(place) > 1) + 1)]


def open_quotations(tokens: Sequence[str]) -> tuple[int, int, int]:
    """How many quotations a segment opens without closing them, how many it closes without opening
    them, and whether it has an odd number of marks that do either."""
    depth = lowest = 0
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        lowest = min(lowest, depth)
    return depth - lowest, -lowest, list(tokens).count(EITHER) % 2


def examples_of(dataset: TaskGroupDataset, count: int) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Segments and class of examples from all over an epoch, each at most once."""
    texts, labels, name = [], [], dataset.tasks[0].name
    numbers = np.unique(np.linspace(0, dataset.num_items - 1, count).astype(np.int64))
    for n, layout in zip(numbers.tolist(), dataset.layouts(numbers), strict=True):
        example = dataset.example(n, layout)
        texts.append(segments(example))
        labels.append(int(example.labels[name][1][0]))
    return texts, np.array(labels)


def features(
    texts: Sequence[Sequence[np.ndarray]], tokenizer: Tokenizer
) -> tuple[np.ndarray, list[int], list[int]]:
    """(texts, features), the columns of lengths and those of classes rather than numbers."""
    edges = Counter(int(ids[at]) for parts in texts for ids in parts for at in (0, -1))
    known = {id: n for n, (id, _) in enumerate(edges.most_common(FREQUENT))}
    table = np.full((len(texts), 1 + 6 * max(map(len, texts))), np.nan)
    for row, parts in zip(table, texts, strict=True):
        row[0] = len(parts)
        for n, ids in enumerate(parts):
            ends = [known.get(int(ids[at]), FREQUENT) for at in (0, -1)]
            quoted = open_quotations(tokenizer.tokens(ids))
            row[1 + 6 * n : 7 + 6 * n] = [len(ids), *ends, *quoted]
    firsts = range(1, table.shape[1], 6)
    return table, [0, *firsts], [column + at for column in firsts for at in (1, 2)]


def accuracy(table: np.ndarray, classes: Sequence[int], labels: np.ndarray, scored: int) -> float:
    """Of trees on the last `scored` rows, trained on the others."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    trees = HistGradientBoostingClassifier(learning_rate=0.05, max_iter=150, random_state=1)
    trees.set_params(categorical_features=list(classes))
    trees.fit(table[:-scored], labels[:-scored])
    return float(np.mean(trees.predict(table[-scored:]) == labels[-scored:]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--examples", type=int, default=20_000, help="to train trees on")
    parser.add_argument("--held_out", type=int, default=5_000, help="to score them on")
    args = parser.parse_args(arguments)
    recipe = make_recipe(read_values(args.recipe, args.overrides), args.recipe)
    if not recipe.held_out:
        raise UserError(f"{args.recipe}: held_out: 0 leaves nothing to score trees on; use 0.05")
    data = open_data(recipe)
    tasks = list(sides_of(resolve(recipe, data), data))
    if not tasks:
        raise UserError(f"{args.recipe}: no task group begins with a task that classifies texts")
    print(f"{'task':26} {'training':>8} {'held out':>8}  {'most frequent':>13}  lengths  surface")
    for name, *both in tasks:
        (texts, labels), (held_out, right) = map(examples_of, both, (args.examples, args.held_out))
        table, lengths, classes = features([*texts, *held_out], data.tokenizer)
        every, scored = np.append(labels, right), len(right)
        frequent = float(np.mean(right == np.bincount(labels).argmax()))
        by_length = accuracy(table[:, lengths], [], every, scored)
        by_surface = accuracy(table, classes, every, scored)
        shares = f"{frequent:13.1%}  {by_length:7.1%}  {by_surface:7.1%}"
        print(f"{name:26} {len(labels):8,} {scored:8,}  {shares}", flush=True)


if __name__ == "__main__":
    compute_on_cpu(1)
    with exit_on_user_error():
        main()
