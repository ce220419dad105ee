"""Writes ONNX files: torch's exporter, half precision, and dynamic int8 of ONNX Runtime.

    PaddedModel ──torch.onnx──> model.onnx ─┬─ fp16: all but the CRF ─> model_fp16.onnx
                                            └─ int8: weights of matrices and embeddings

A file above 2 GB, the limit of protobuf, has its weights next to it, in FILE.data.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from palm_ds.common.errors import UserError, first_line
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.heads.crf import FORBIDDEN
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.expected_shapes import TRANSITIONS
from palm_ds.weights.formats.onnx.crf import add_viterbi
from palm_ds.weights.formats.onnx.description import OnnxDescription, metadata
from palm_ds.weights.formats.onnx.graph import WORD_STARTS, PaddedModel
from palm_ds.weights.formats.onnx.run import no_telemetry
from palm_ds.weights.formats.runnable import read_values

OPSETS = range(18, 24)
MOST_BYTES = 2 * 10**9
"""Weights of a file without external data."""


def write_fp32(
    contents: CheckpointContents,
    description: OnnxDescription,
    path: Path,
    allowed: Mapping[str, torch.Tensor],
) -> None:
    """Export a checkpoint. `allowed`: {head with a CRF: (tags + 2, tags) bool, the transitions of
    its decoding}. Raises UserError for a custom encoder that torch cannot export."""
    model = PaddedModel(contents, description).eval()
    try:
        with _quiet(), torch.no_grad():
            program = _exported(model, description)
    except Exception as error:  # of many types
        if not is_custom(contents.config.kind):
            raise
        reason = _first_line(error)
        raise UserError(
            f"{contents.path}: torch cannot export its encoder, {contents.config.kind}, to "
            f"ONNX: {reason}"
        ) from None
    _strip(program)
    program.model.metadata_props.update(metadata(description))
    size = sum(x.numel() * x.itemsize for x in model.state_dict().values())
    tagged = {name: head.tags for name, head in description.heads.items() if head.tags}
    if not tagged:
        program.save(path, external_data=size > MOST_BYTES)
        return
    if size > MOST_BYTES:
        raise UserError(
            f"{contents.path}: a CRF needs a file of less than 2 GB; --head leaves it out"
        )
    proto = program.model_proto
    for name, tags in tagged.items():
        values = read_values(contents, f"heads.{name}.{TRANSITIONS}")
        if name in allowed:
            values = values.masked_fill(~allowed[name], FORBIDDEN)
        (scores,) = description.heads[name].outputs
        add_viterbi(proto, scores, tags, values.numpy(), WORD_STARTS)
    save_graph(_ordered(proto, description.outputs), path)


def _exported(model: PaddedModel, description: OnnxDescription) -> torch.onnx.ONNXProgram:
    most = max(description.max_length, 3)
    length = min(7, most)
    ids = torch.arange(2 * length).view(2, length) % 3
    mask = (torch.arange(length) < torch.tensor([[length], [length - 2]])).long()
    values = {"input_ids": ids, "attention_mask": mask}
    names = model.traced_inputs
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=most)}
    program = torch.onnx.export(
        model,
        tuple(values.get(name, torch.zeros_like(ids)) for name in names),
        input_names=list(names),
        output_names=list(model.traced_outputs),
        dynamic_shapes=(tuple(shape for _ in names),),
        opset_version=description.opset,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program


def _strip(program: torch.onnx.ONNXProgram) -> None:
    """Remove the exporter's records of where in the source code each node is from."""
    graph = program.model.graph
    for each in (*graph.all_nodes(), *graph.initializers.values()):
        each.metadata_props.clear()
        each.doc_string = None
    for node in graph.all_nodes():
        for value in node.outputs:
            value.metadata_props.clear()


def _first_line(error: BaseException) -> str:
    """The reason below torch's own messages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's advice to its developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "root")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def _ordered(model: onnx.ModelProto, outputs: tuple[str, ...]) -> onnx.ModelProto:
    """The model with its outputs in this order."""
    by_name = {each.name: each for each in model.graph.output}
    kept = [
        onnx.ValueInfoProto.FromString(by_name[output].SerializeToString()) for output in outputs
    ]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return model


def save_graph(model: onnx.ModelProto, path: Path) -> None:
    """Save a graph, with its weights next to it if they are large."""
    large = sum(len(each.raw_data) for each in model.graph.initializer) > MOST_BYTES
    onnx.save_model(
        model,
        path,
        save_as_external_data=large,
        all_tensors_to_one_file=True,
        location=f"{path.name}.data",
    )


# ---- smaller files ----


def write_fp16(source: Path, path: Path, description: OnnxDescription) -> None:
    """Weights and computation in half precision; inputs and outputs as before."""
    no_telemetry()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(source)
    prefixes = tuple(f"{head.tags}." for head in description.heads.values() if head.tags)
    kept = [x.name for x in model.graph.node if prefixes and x.name.startswith(prefixes)]
    with _quiet():
        made = convert_float_to_float16(
            model,
            keep_io_types=True,
            disable_shape_infer=source.with_name(f"{source.name}.data").exists(),
            node_block_list=kept,
        )
    save_graph(made, path)


@dataclass(frozen=True, kw_only=True)
class Int8Form:
    """A way of quantizing weights. Both are exact on processors without VNNI, where products of
    8-bit by 8-bit signed numbers saturate."""

    name: str
    signed: bool
    embeddings: bool


INT8_FORMS = (
    Int8Form(name="7-bit signed weights per channel", signed=True, embeddings=True),
    Int8Form(name="8-bit unsigned weights per channel", signed=False, embeddings=True),
)


def write_int8(source: Path, path: Path, form: Int8Form) -> None:
    """Weights in int8; what they are multiplied by is quantized as it comes (dynamic)."""
    no_telemetry()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(
            source,
            path,
            op_types_to_quantize=["MatMul", "Gemm", *(["Gather"] if form.embeddings else [])],
            per_channel=True,
            reduce_range=form.signed,
            weight_type=QuantType.QInt8 if form.signed else QuantType.QUInt8,
            use_external_data_format=source.with_name(f"{source.name}.data").exists(),
        )
