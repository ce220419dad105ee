"""What shape each tensor of an encoder and its heads must have, to check a checkpoint by."""

from __future__ import annotations

from collections.abc import Mapping

from palm_ds.common.errors import UserError
from palm_ds.model.config import BackboneConfig
from palm_ds.weights.formats.contents import Contents, Head

Shape = tuple[int, ...]
TRANSITIONS = "crf.transitions"
"""What a head over classes has besides, where a CRF is over them: start, end, step by step."""


def backbone_shapes(config: BackboneConfig) -> dict[str, Shape]:
    """{our name: shape} of an encoder; its vocabulary is known."""
    assert config.vocab_size is not None
    width, inner = config.width, config.inner
    shapes: dict[str, Shape] = {
        "word.weight": (config.vocab_size, width),
        "position.weight": (config.positions, width),
        "segment.weight": (config.segments, width),
    }
    if config.task_slots:
        shapes["task.weight"] = (config.task_slots, width)
    shapes |= _norm("norm", width)
    for i in range(config.layers):
        shapes |= _linear(f"layers.{i}.qkv", 3 * width, width)
        shapes |= _linear(f"layers.{i}.project", width, width)
        shapes |= _norm(f"layers.{i}.attention_norm", width)
        shapes |= _linear(f"layers.{i}.expand", inner, width)
        shapes |= _linear(f"layers.{i}.contract", width, inner)
        shapes |= _norm(f"layers.{i}.output_norm", width)
    shapes |= _linear("pooler.dense", width, width)
    return {f"backbone.{name}": shape for name, shape in shapes.items()}


def head_shapes(name: str, head: Head, config: BackboneConfig) -> dict[str, Shape]:
    """{our name: shape} of a head."""
    assert config.vocab_size is not None
    prefix, width = f"heads.{name}", config.width
    if head.kind == "classes":
        steps: dict[str, Shape] = {f"{prefix}.{TRANSITIONS}": (head.classes + 2, head.classes)}
        return _linear(f"{prefix}.out", head.classes, width) | (steps if head.transitions else {})
    bias: dict[str, Shape] = {f"{prefix}.bias": (config.vocab_size,)}
    return _linear(f"{prefix}.dense", width, width) | _norm(f"{prefix}.norm", width) | bias


def checked(contents: Contents, called: Mapping[str, str] | None = None) -> Contents:
    """The contents, if the encoder (but for its pooler; one of somebody's own not at all) and each
    head is there whole and of the shape that the numbers say; raises UserError. `called`: {our
    name: what their file calls it}."""
    layers, tensors = contents.config.layers, len(contents.entries)
    if layers > tensors:  # before there are as many names as somebody wrote
        raise UserError(f"{contents.path}: incomplete: {layers} layers in {tensors} tensors")
    expected = {} if contents.config.kind else backbone_shapes(contents.config)
    for name, head in contents.heads.items():
        expected |= head_shapes(name, head, contents.config)
    for name, shape in expected.items():
        entry = contents.entries.get(name)
        if entry is None and not _may_lack(name, contents):
            name = (called or {}).get(name, name)
            raise UserError(f"{contents.path}: incomplete, it has no {name} {shape}")
        if entry is not None and entry.shape != shape:
            theirs = " + ".join(entry.theirs)
            raise UserError(
                f"{contents.path}: {theirs} gives {entry.shape}, {shape} is due by the "
                "configuration"
            )
    return contents


def _may_lack(name: str, contents: Contents) -> bool:
    """The pooler, as a whole."""
    pooler = "backbone.pooler.dense."
    return name.startswith(pooler) and not any(n.startswith(pooler) for n in contents.entries)


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
