"""Predict the objects, attributes and relations that a text names from its image (ERNIE-ViL, Yu et
al. 2021, section 3.2).

    a brown dog chases a cat      objects dog, cat; attribute brown (of dog); relation chases (of
                                  dog and cat)
    a [M] dog [M] a cat           attributes and relations are masked with their objects left in
    a brown [M] chases a cat      objects are masked elsewhere

Scene graphs come from the column `scene_graph`, made by a parser or by hand: positions in text_a,
in characters:

    {"objects": [[8, 11], [21, 24]], "attributes": [[2, 7, 0]], "relations": [[12, 18, 0, 1]]}

An attribute ends with the number of its object, a relation with those of both. ERNIE-ViL's own
parser and pretraining code were not released. As in the paper, the objects of a masked attribute or
relation are not masked; that masked objects are chosen among the others is our choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Share
from palm_ds.data.sources.source import unigram_frequencies
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import check_mask_rates, choose_units, mask_tokens, unigram_baseline
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.tasks.shared.image_text import ImageTextTask

GRAPH, TEXT = "scene_graph", "text_a"
KINDS = {"objects": 2, "attributes": 3, "relations": 4}
"""{kind of node: numbers that name one}"""


class SceneNode(NamedTuple):
    """An object, an attribute or a relation."""

    start: int
    """The first of its characters in the text."""
    end: int
    """The one after the last."""
    objects: tuple[int, ...]
    """The numbers of the objects that it is about."""


SceneGraph = Mapping[str, list[SceneNode]]


@dataclass(frozen=True, kw_only=True)
class SceneGraphPrediction(ImageTextTask):
    """Predicts masked objects, attributes and relations of a text."""

    rate: InnerShare = 0.3
    """Share of the objects, of the attributes and of the relations to predict; at least one of each
    that can be."""
    mask_rate: Share = 0.8
    """Share of their tokens replaced by [MASK]."""
    random_rate: Share = 0.1
    """Share of their tokens replaced by a random token; the rest stays unchanged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_rates(self.mask_rate, self.random_rate, self.where)
        if self.texts and self.texts[0] != TEXT:
            raise UserError(f"{self.where}.texts: the first must be {TEXT}, which graphs refer to")

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=labeled)
        source.need(GRAPH, self.where)
        self._graphs(source)

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        """No labels for the image of another row, or without a node."""
        if example.image not in (-1, example.item):
            return
        where = self._chosen(example, source, rng)
        if not len(where):
            return
        mask_tokens(
            example,
            self.name,
            where,
            source.vocabulary,
            rng,
            mask_rate=self.mask_rate,
            random_rate=self.random_rate,
        )

    def _chosen(
        self, example: Example, source: TableSource, rng: np.random.Generator
    ) -> np.ndarray:
        """(n,) the places of the tokens of the nodes to predict, ascending."""
        graph = self._graphs(source)[example.item]
        about = [
            node
            for kind in ("attributes", "relations")
            for node in self._some(graph[kind], len(graph[kind]), rng)
        ]
        kept = {number for node in about for number in node.objects}
        free = [x for number, x in enumerate(graph["objects"]) if number not in kept]
        nodes = about + self._some(free, len(graph["objects"]), rng)
        column = source.encoded(TEXT)
        spans = column.spans_of(example.item)
        inside = np.zeros(len(spans) + 1, bool)  # the last: no token of the text
        for node in nodes:
            inside[:-1] |= (spans[:, 0] < node.end) & (spans[:, 1] > node.start)
        place = column.place(example.item, example.source_offsets)
        ours = (example.source_offsets >= 0) & (place >= 0) & (place < len(spans))
        return np.flatnonzero(inside[np.where(ours, place, len(spans))])

    def _some(self, nodes: list[SceneNode], of: int, rng: np.random.Generator) -> list[SceneNode]:
        """Random ones: the share `rate` of `of` nodes, or all if there are fewer."""
        if not nodes:
            return []
        rate = min(self.rate * of / len(nodes), 1.0)
        taken = choose_units(np.arange(len(nodes)), rate, rng)
        return [node for node, chosen in zip(nodes, taken, strict=True) if chosen]

    def _graphs(self, source: TableSource) -> list[SceneGraph]:
        """The graph of each row. Raises UserError."""

        def read() -> list[SceneGraph]:
            rows = zip(source.column(GRAPH), source.column(TEXT), strict=True)
            return [
                _graph(value, text, f"{source.where(item)}: {GRAPH}")
                for item, (value, text) in enumerate(rows)
            ]

        return source.cached(GRAPH, read)

    def head(self, backbone: Encoder) -> MaskedLMHead:
        self.check_encoder(backbone)
        return MaskedLMHead(backbone)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """The unigram frequencies of the source's texts."""
        share = source.cached(
            "unigrams of text_a",
            lambda: unigram_frequencies([source.encoded(TEXT).ids], source.vocabulary.size),
        )
        return unigram_baseline(targets, share)


def _graph(value: object, text: str, where: str) -> SceneGraph:
    """A checked graph. Raises UserError, starting with `where`."""
    if not isinstance(value, Mapping) or not value.keys() <= KINDS.keys():
        raise UserError(
            f"{where}: expected {{objects: [[start, end]], attributes: [[start, end, object]], "
            f"relations: [[start, end, object, object]]}}, got {str(value)[:80]}"
        )
    graph = {}
    for kind, size in KINDS.items():
        rows = value.get(kind) or []
        for row in rows if isinstance(rows, Sequence) else [rows]:
            numbers = row if isinstance(row, Sequence) else ()
            if len(numbers) != size or not all(type(number) is int for number in numbers):
                raise UserError(f"{where}: {kind}: {row!r}: expected {size} whole numbers")
        graph[kind] = list(
            starmap(lambda start, end, *rest: SceneNode(start, end, tuple(rest)), rows)
        )
    for kind, nodes in graph.items():
        for node in nodes:
            if not 0 <= node.start < node.end <= len(text):
                raise UserError(
                    f"{where}: {kind}: characters {node.start} to {node.end} of a text of "
                    f"{len(text)}"
                )
            if any(not 0 <= number < len(graph["objects"]) for number in node.objects):
                raise UserError(
                    f"{where}: {kind}: object {max(node.objects)} of {len(graph['objects'])}, "
                    "counted from 0"
                )
    return graph
