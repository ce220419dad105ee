"""Inputs and outputs of a folder's ONNX files: palm_ds_onnx.json, and `palm_ds` in their metadata.

inputs    input_ids, attention_mask, token_type_ids: (batch, length) int64
outputs   last_hidden_state (batch, length, hidden), pooler_output, sentence_embedding
          (batch, hidden), and those of the heads
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.model.pooling import Pooling
from palm_ds.weights.formats.tensor_files import read_json

DESCRIPTION = "palm_ds_onnx.json"
FOLDER = "onnx"
"""The folder of the graphs, where Optimum and transformers.js look for them."""
FILES = {"fp32": "model.onnx", "fp16": "model_fp16.onnx", "int8": "model_int8.onnx"}
"""{precision: the graph in FOLDER}"""
METADATA = "palm_ds"
_VERSION = 1

TEXTS, TOKENS, MEANS = "texts", "tokens", "means"


@dataclass(frozen=True, kw_only=True)
class OnnxHead:
    """A head in the graph."""

    outputs: tuple[str, ...]
    """`logits`, (batch, classes) or (batch, length, classes); for answers in a text `start_logits`
    and `end_logits`, (batch, length). In a graph of several heads they end in `_NAME`."""
    kind: str
    """`classes`, or `masked_words`: the scores of the vocabulary."""
    reads: str
    """`texts`, through the pooler; `means`, of the tokens of a text; or `tokens`."""
    labels: tuple[str, ...] = ()
    """Names of the classes, if known."""
    problem_type: str = ""
    """As in transformers: softmax (single_label_classification), a sigmoid for each class
    (multi_label_classification), or the number itself (regression)."""
    head_class: str = ""
    """The ending of the transformers class that does the same (`ForMultipleChoice`)."""
    task_id: int = 0
    """The row of the task embedding that the head was trained with."""
    tags: str = ""
    """With a CRF: the output (batch, length) int64 with the best tags of the words, -1 at the other
    tokens."""


@dataclass(frozen=True, kw_only=True)
class OnnxDescription:
    """The content of palm_ds_onnx.json."""

    opset: int
    inputs: tuple[str, ...]
    """All (batch, length) int64. `attention_mask`: 1 is a token, 0 is padding, on either side.
    `task_type_ids`: the row of the task embedding, given where heads were trained with different
    ones. `word_mask`: 1 at the first token of each word; only CRFs read it."""
    outputs: tuple[str, ...]
    hidden_size: int
    max_length: int
    """The most tokens of a text."""
    pad: int
    """The id of padding."""
    task_id: int = 0
    """The row of the task embedding that is part of the graph, without `task_type_ids`."""
    heads: Mapping[str, OnnxHead] = field(default_factory=dict)
    embedding: Pooling | None = None
    """How `sentence_embedding` is computed; None: the graph has none."""
    custom: bool = False
    """Whether the encoder is a user's class."""

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": _VERSION, **asdict(self)}


def read_description(folder: Path) -> OnnxDescription:
    """Read the palm_ds_onnx.json of a folder. Raises UserError."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{folder}: has no {DESCRIPTION}; palm-ds convert --to onnx writes it")
    values = read_json(path)
    if (version := values.pop("format", None)) != _VERSION:
        raise UserError(f"{path}: has format {version!r}; this version reads format {_VERSION}")
    known = {
        name: value
        for name, value in values.items()
        if name in OnnxDescription.__dataclass_fields__
    }
    return parse(OnnxDescription, known, str(path))


def metadata(description: OnnxDescription) -> dict[str, str]:
    """The description as metadata of a graph."""
    return {METADATA: json.dumps(description.record(), ensure_ascii=False)}
