"""Runs ONNX files in ONNX Runtime, on the CPU.

OnnxModel(path, description).run({"input_ids": ..., "attention_mask": ...})  -> {output: array}
in_onnx_runtime(contents, path, description)    the same as a side of a parity check
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

from palm_ds.common.errors import UserError, first_line
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.onnx.description import TOKENS, OnnxDescription
from palm_ds.weights.formats.onnx.graph import EMBEDDING, LAST, POOLED, TASKS, WORD_STARTS
from palm_ds.weights.formats.runnable import Outputs, RunnableCheckpoint, Texts


def no_telemetry() -> None:
    """Before `onnxruntime` is imported: from 1.29 on it reports to Microsoft, and keeps the number
    of the device in the user's home folder. ORT_DISABLE_TELEMETRY=0 allows it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class OnnxModel:
    """A graph that is loaded in ONNX Runtime."""

    def __init__(self, path: Path, description: OnnxDescription, threads: int = 0):
        """`threads`: as many as torch uses if 0. Raises UserError for a file that ONNX Runtime does
        not load."""
        no_telemetry()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or torch.get_num_threads()
        self.description = description
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its classes have no common one
            reason = first_line(error)
            raise UserError(f"{path}: ONNX Runtime cannot load it: {reason}") from None

    def run(
        self, values: Mapping[str, np.ndarray], outputs: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """All outputs, or those named, of arrays (batch, length) int64; inputs that are not given
        are 0 (`task_type_ids`: the graph's row; `word_mask`: every token)."""
        about = self.description
        ids = values["input_ids"]
        usual = {TASKS: np.full_like(ids, about.task_id), WORD_STARTS: values["attention_mask"]}
        given = {
            name: values.get(name, usual.get(name, np.zeros_like(ids))) for name in about.inputs
        }
        names = list(outputs or about.outputs)
        arrays = map(np.asarray, self.session.run(names, given))
        return dict(zip(names, arrays, strict=True))


def in_onnx_runtime(
    contents: CheckpointContents, path: Path, description: OnnxDescription, *, task_id: int
) -> RunnableCheckpoint:
    """A written graph as a side of a parity check; `contents` is what it was made from. `task_id`:
    given as `task_type_ids` where the graph takes them."""
    return RunnableCheckpoint(
        name=f"ONNX Runtime with {path.name}",
        contents=contents,
        open=lambda: _InOnnxRuntime(contents, OnnxModel(path, description), task_id),
    )


class _InOnnxRuntime:
    """A graph that is called with texts, under the names of palm_ds's encoder."""

    def __init__(self, contents: CheckpointContents, model: OnnxModel, task_id: int):
        self.contents, self.model, self.task_id = contents, model, task_id

    def __call__(self, texts: Texts) -> Outputs:
        about, real = self.model.description, texts.real.flatten()
        arrays = {
            name: torch.from_numpy(value)
            for name, value in self.model.run(
                {
                    "input_ids": texts.ids.numpy(),
                    "attention_mask": texts.real.long().numpy(),
                    "token_type_ids": texts.segments.numpy(),
                    TASKS: np.full(texts.ids.shape, self.task_id),
                    WORD_STARTS: word_starts(texts).numpy(),
                }
            ).items()
        }
        layer = "encoder" if about.custom else f"layer {self.contents.config.num_layers}"
        outputs = {layer: arrays[LAST].flatten(0, 1)[real]}
        outputs |= {"pooled": arrays[POOLED]} if POOLED in arrays else {}
        outputs |= {EMBEDDING: arrays[EMBEDDING]} if EMBEDDING in arrays else {}
        for name, head in about.heads.items():
            scores = [arrays[output] for output in head.outputs]
            whole = torch.stack(scores, -1) if len(scores) == 2 else scores[0]
            if head.reads == TOKENS:
                at = texts.at() if head.kind == "masked_words" else real
                whole = whole.flatten(0, 1)[at]
            outputs[f"head {name}"] = whole
            if head.tags:
                outputs[f"tags {name}"] = arrays[head.tags].flatten(0, 1)[real]
        return outputs


def word_starts(texts: Texts) -> torch.Tensor:
    """(texts, length): some tokens as the first of words, as in a tagged sentence: not the first
    and the last one, nor every third."""
    place = texts.real.long().cumsum(1)
    inside = texts.real & (place > 1) & (place < place.amax(1, keepdim=True))
    return (inside & (place % 3 != 0)).long()
