"""The decoding of a CRF in a graph finds the best of all tag sequences."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
import torch

from palm_ds.model.heads.crf import viterbi
from palm_ds.weights.formats.onnx.crf import viterbi_graph

RNG = np.random.default_rng(3)


def decoded(emissions: np.ndarray, words: np.ndarray, transitions: np.ndarray) -> np.ndarray:
    import onnxruntime

    graph = viterbi_graph(transitions, 18)
    onnx.checker.check_model(graph, full_check=True)
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    return np.asarray(session.run(None, {"emissions": emissions, "word_mask": words})[0])


def score(tags: tuple[int, ...], emissions: np.ndarray, transitions: np.ndarray) -> float:
    steps = sum(transitions[2 + a, b] for a, b in zip(tags, tags[1:], strict=False))
    ends = transitions[0, tags[0]] + transitions[1, tags[-1]]
    return ends + steps + sum(emissions[t, tag] for t, tag in enumerate(tags))


def test_it_finds_the_best_sequence_of_all() -> None:
    transitions = RNG.normal(size=(5, 3)).astype(np.float32) * 2
    emissions = RNG.normal(size=(4, 7, 3)).astype(np.float32)
    words = np.array([[0, 1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0], [1] * 7])
    found = decoded(emissions, words, transitions)
    for row, mask, tags in zip(emissions, words.astype(bool), found, strict=True):
        own = row[mask]
        best = max(product(range(3), repeat=len(own)), key=lambda t: score(t, own, transitions))
        assert tuple(tags[mask]) == best
        assert (tags[~mask] == -1).all()


@pytest.mark.parametrize(("texts", "length"), [(1, 1), (1, 2), (3, 60)])
def test_it_equals_ours(texts: int, length: int) -> None:
    transitions = RNG.normal(size=(9, 7)).astype(np.float32)
    transitions[RNG.random(transitions.shape) < 0.2] = -1e4
    emissions = RNG.normal(size=(texts, length, 7)).astype(np.float32)
    words = (RNG.random((texts, length)) < 0.7).astype(np.int64)
    words[:, 0] = 1
    found = decoded(emissions, words, transitions)
    at = words.astype(bool)
    groups = torch.from_numpy(np.nonzero(at)[0])
    wanted = viterbi(torch.from_numpy(emissions[at]), torch.from_numpy(transitions), groups)
    assert (found[at] == wanted.numpy()).all()


def test_a_text_without_words_has_no_tags() -> None:
    found = decoded(
        np.ones((2, 4, 3), np.float32), np.eye(2, 4, dtype=np.int64) * [[1], [0]], np.zeros((5, 3))
    )
    assert found.tolist() == [[0, -1, -1, -1], [-1] * 4]
