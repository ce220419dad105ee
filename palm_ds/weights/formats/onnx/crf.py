"""Adds the decoding of a CRF to a graph: the best tags of the words (Viterbi), as two loops.

    logits (batch, length, tags), word_mask (batch, length)
        └─ Scan over time: the best score and where it came from ─ Scan back ─ tags (batch, length)

torch does not trace loops whose length is an input, so this part is written in ONNX's own text. A
token that is no word's first passes on what came before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper, parser

_VITERBI = """
<ir_version: 8, opset_import: ["": %(opset)d]>
viterbi (float[batch, length, tags] emissions, int64[batch, length] word_mask)
    => (int64[batch, length] tags)
{
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    time_axis = Constant<value_ints = [0]>()
    last_axis = Constant<value_ints = [-1]>()
    by_time = Transpose<perm = [1, 0, 2]>(emissions)
    mask_by_time = Transpose<perm = [1, 0]>(word_mask)
    column = Unsqueeze(mask_by_time, last_axis)
    is_word = Greater(column, zero)
    words = Cast<to = 7>(is_word)
    so_far = CumSum(words, zero)
    has_previous = Greater(so_far, one)
    total = ReduceSum<keepdims = 0>(by_time, time_axis)
    nothing = Sub(total, total)
    best, pointers = Scan<num_scan_inputs = 3, body = forward (
        float[b, t] before, float[b, t] now, bool[b, 1] word, bool[b, 1] further
    ) => (float[b, t] after, int64[b, t] pointer) {
        from_axis = Constant<value_ints = [1]>()
        to_axis = Constant<value_ints = [2]>()
        start_of_path = Unsqueeze(before, to_axis)
        paths = Add(start_of_path, step)
        reached = ReduceMax<keepdims = 0>(paths, from_axis)
        previous = ArgMax<axis = 1, keepdims = 0>(paths)
        reached_here = Where(further, reached, start)
        score = Add(reached_here, now)
        after = Where(word, score, before)
        moves = And(word, further)
        pointer = Where(moves, previous, same)
    }>(nothing, by_time, is_word, has_previous)
    ending = Add(best, end)
    last_tag = ArgMax<axis = 1, keepdims = 1>(ending)
    first_tag, path = Scan<
        num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
        body = backward (
            int64[b, 1] here, int64[b, t] back
        ) => (int64[b, 1] there, int64[b, 1] found) {
            there = GatherElements<axis = 1>(back, here)
            found = Identity(here)
        }
    >(last_tag, pointers)
    flat = Squeeze(path, last_axis)
    by_text = Transpose<perm = [1, 0]>(flat)
    none = Constant<value_int = -1>()
    wanted = Greater(word_mask, zero)
    tags = Where(wanted, by_text, none)
}
"""


def viterbi_graph(transitions: np.ndarray, opset: int) -> onnx.ModelProto:
    """(emissions, word_mask) -> tags. `transitions` (tags + 2, tags): see model/heads/crf.py."""
    graph = parser.parse_model(_VITERBI % {"opset": opset})
    start, end, step = np.split(transitions.astype(np.float32), [1, 2])
    values: dict[str, np.ndarray] = {"start": start, "end": end, "step": step[None]}
    values["same"] = np.arange(transitions.shape[1], dtype=np.int64)[None]
    graph.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in values.items()
    )
    return graph


def add_viterbi(
    model: onnx.ModelProto, emissions: str, tags: str, transitions: np.ndarray, word_mask: str
) -> None:
    """Give a model the output `tags`, decoded from its output `emissions`, and the input
    `word_mask`."""
    (opset,) = [each.version for each in model.opset_import if not each.domain]
    part, graph = viterbi_graph(transitions, opset).graph, model.graph
    shared = {"emissions": emissions, "word_mask": word_mask, "tags": tags}
    _rename(part, lambda name: shared.get(name, f"{tags}.{name}" if name else ""))
    for number, node in enumerate(part.node):
        node.name = f"{tags}.{number}"
    graph.node.extend(part.node)
    graph.initializer.extend(part.initializer)
    graph.output.extend(part.output)
    there = [each.name for each in graph.input]
    graph.input.extend(x for x in part.input if x.name not in (emissions, *there))


def _rename(graph: onnx.GraphProto, change: Callable[[str], str]) -> None:
    """Rename all values of a graph, and of the graphs within its nodes."""
    for each in (*graph.input, *graph.output, *graph.initializer):
        each.name = change(each.name)
    for node in graph.node:
        node.input[:] = map(change, node.input)
        node.output[:] = map(change, node.output)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, change)
