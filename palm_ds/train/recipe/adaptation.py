"""The recipe that continues an encoder on more text (DAPT, Gururangan et al. 2020).

    adaptation_recipe("models/encoder", config, open_corpus("data/mine"), None, AdaptOptions())

10 passes over the text in about 1,000 steps. A step has 4,096 to 131,072 tokens, so a small corpus
gets fewer steps (100 at least), and a large one more, or at 10,000 steps fewer passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.settings import InnerShare, Settings
from palm_ds.corpus.manifest import COUNTED_ANNOTATIONS

if TYPE_CHECKING:  # `palm-ds adapt --help` needs the options alone, without torch
    from palm_ds.corpus.store import Corpus
    from palm_ds.model.config.config import EncoderConfig

_PASSES, _USUAL_STEPS = 10, 1_000
_STEPS, _STEP_TOKENS = (100, 10_000), (4_096, 131_072)
"""At least and at most."""
_LENGTHS = (64, 1_024)
"""Of a row. A longer one costs more and changes little of what words mean."""
_HELD_OUT, _HELD_OUT_DOCUMENTS = (0.01, 0.1), 200
_EVALUATED, _ROWS_OF_ONE = (100, 1_000), 50
"""Texts of each task: one for so many rows, with which five evaluations of three tasks take a tenth
of the training; at least and at most."""
_SAVE_STEPS = 20
"""At least so many between two checkpoints."""
_MIN_DOCUMENTS, _MIN_SENTENCES = 40, 4
"""Tasks over sentences need held-out documents, too, and several sentences in each."""
_MODERN_RATE = 0.3
"""At which ModernBERT, Ettin and mmBERT were trained."""
_SENTENCE_WEIGHT = 0.1
"""Of tasks over sentences. Their gradients are the largest: with equal weights they cost words more
than they give (docs/study.md)."""


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(Settings, option="--"):
    """Settings of an adaptation; the rest follows from the texts and the encoder."""

    general_share: InnerShare = 0.2
    """Share of the tokens that are general text."""
    steps: PositiveInt | None = None
    """Steps to train (10 passes over the text, in 100 to 10,000 steps)."""
    lr: InnerShare = 5e-5
    """Peak learning rate."""


def adaptation_recipe(
    start: str, encoder: EncoderConfig, own: Corpus, general: Corpus | None, options: AdaptOptions
) -> dict[str, Any]:
    """The keys of a recipe that trains `start`, whose config is `encoder`, on the tokens of `own`
    and of `general`."""
    share = options.general_share if general else 0.0
    length = row_length(own, encoder)
    rows, steps = step_counts(own.manifest.tokens / (1 - share), length)
    steps = options.steps or steps
    tasks = _tasks(encoder, [own, *([general] if general else [])])
    groups = _shares(list(tasks), steps)
    return {
        "init_from": start,
        "length": length,
        "batch": f"{rows * length} tokens",
        "optimizer": {
            "lr": options.lr,
            "betas": [0.9, 0.98],
            "weight_decay": 0.01,
            "clip": 1.0,
        },
        "schedule": {"kind": "wsd", "warmup": 0.1, "decay": 0.5},
        "sources": {"text": _source(own, general, share)},
        "held_out": held_out_share(own),
        "tasks": dict(islice(tasks.items(), len(groups))),  # a few steps are for the first alone
        "stages": [groups],
        "evaluate": {"every": max(steps // 5, 1), "examples": _evaluated(rows * steps)},
        "save": {"every": max(steps // 10, _SAVE_STEPS), "keep": 2},
        "export_onnx": [],  # the folder goes back as it came
    }


def row_length(corpus: Corpus, encoder: EncoderConfig) -> int:
    """Tokens of a row: the least power of two that 95 % of the documents fit in, within the limits
    of the encoder."""
    tokens = float(np.quantile(np.diff(corpus.document_starts), 0.95))
    whole = 1 << int(np.ceil(np.log2(tokens + corpus.vocabulary.around(1))))
    return min(max(whole, _LENGTHS[0]), _LENGTHS[1], encoder.max_length)


def step_counts(tokens: float, length: int) -> tuple[int, int]:
    """(rows of a step, steps) to read that many tokens. Rows are a power of two, so that processes
    share them evenly."""
    wanted = _PASSES * tokens
    size = min(max(wanted / _USUAL_STEPS, _STEP_TOKENS[0]), _STEP_TOKENS[1])
    rows = 1 << round(np.log2(max(size / length, 1)))
    steps = round(wanted / (rows * length))
    return rows, min(max(steps, _STEPS[0]), _STEPS[1])


def _evaluated(rows: int) -> int:
    least, most = _EVALUATED
    return min(max(rows // _ROWS_OF_ONE, least), most)


def held_out_share(corpus: Corpus) -> float:
    """About 200 documents, from 1 % to 10 % of all."""
    share = _HELD_OUT_DOCUMENTS / corpus.manifest.documents
    return round(min(max(share, _HELD_OUT[0]), _HELD_OUT[1]), 3)


def _source(own: Corpus, general: Corpus | None, share: float) -> dict[str, Any]:
    if general is None:
        return {"corpus": str(own.path)}
    return {"mix": {str(own.path): round(1 - share, 6), str(general.path): share}}


def _tasks(encoder: EncoderConfig, corpora: list[Corpus]) -> Mapping[str, dict[str, Any]]:
    """Masking by the units that all corpora have, first; the tasks over sentences, if all corpora
    and the encoder have what these need."""
    from palm_ds.model.encoder.encoder import encoder_class

    units = [unit for unit in COUNTED_ANNOTATIONS if all(_has(unit, corpus) for corpus in corpora)]
    masking: dict[str, Any] = {"source": "text", "units": units or ["token"]}
    if encoder.kind == "modernbert":
        masking["rate"] = _MODERN_RATE
    tasks = {"knowledge_masking": masking}
    typed = encoder_class(encoder).has_token_types(encoder)
    segments = encoder.token_types if typed else 3
    if segments >= 2 and all(map(_has_sentences, corpora)):
        weighted = {"source": "text", "weight": _SENTENCE_WEIGHT}
        tasks["sentence_distance"] = weighted
        tasks["sentence_reordering"] = {**weighted, "most": min(segments, 3)}
    return tasks


def _shares(tasks: Sequence[str], steps: int) -> dict[str, int]:
    """Steps of each task group. Each task over sentences, with masks in its texts, has a quarter:
    those texts are of the same domain, so every step teaches its words."""
    masking, *pairs = tasks
    quarter = steps // 4
    groups = {f"{pair} + {masking}": quarter for pair in pairs if quarter}
    return {masking: steps - sum(groups.values()), **groups}


def _has(unit: str, corpus: Corpus) -> bool:
    return unit in corpus.annotations and corpus.count_spans(unit) > 0


def _has_sentences(corpus: Corpus) -> bool:
    size = corpus.manifest
    several = size.sentences >= _MIN_SENTENCES * size.documents
    return several and size.documents >= _MIN_DOCUMENTS
