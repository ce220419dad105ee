"""Checks a checkpoint against the shapes that its config implies.

The shapes come from the model itself, built without values on torch's "meta" device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from palm_ds.common.errors import UserError, first_line
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import Encoder, build_encoder, encoder_class
from palm_ds.model.encoder.kinds.bert import Bert
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.pooled import MultiLabelHead
from palm_ds.model.heads.replaced_tokens import ReplacedTokenHead
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo, check_names

Shape = tuple[int, ...]
TRANSITIONS = "crf.transitions"
"""The parameter that a classification head has in addition if a CRF is on top of it."""


def expected_shapes(config: EncoderConfig, heads: Mapping[str, HeadInfo]) -> dict[str, Shape]:
    """{palm_ds name: shape} of an encoder with these heads. A custom encoder is left out: only its
    class knows its shapes. Raises UserError if no tensor can have the sizes in `config`."""
    try:
        with on_meta():
            backbone = Bert(config) if is_custom(config.kind) else build_encoder(config)
            modules = {name: _head(head, backbone) for name, head in heads.items()}
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = first_line(error)
        raise UserError(f"no encoder can have the sizes of its configuration: {reason}") from None
    parts: dict[str, nn.Module] = {} if is_custom(config.kind) else {"backbone": backbone}
    parts |= {f"heads.{name}": module for name, module in modules.items()}
    return {
        f"{part}.{name}": tuple(tensor.shape)
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }


def _head(head: HeadInfo, backbone: Encoder) -> nn.Module:
    if head.kind == "masked_words":
        return MaskedLMHead(backbone)
    if head.kind == "replaced_tokens":
        return ReplacedTokenHead(backbone)
    width = backbone.match_width if head.outputs.images else backbone.config.hidden_size
    if head.hidden:
        return MultiLabelHead(width, head.classes, hidden_layer=head.hidden)
    return CRFHead(width, head.classes) if head.transitions else ClassHead(width, head.classes)


_MOST_SHARED = 1000
"""Layers of which some may share their weights, as ALBERT's do."""


def checked(
    contents: CheckpointContents, source_names: Mapping[str, str] | None = None
) -> CheckpointContents:
    """Return the contents if the encoder (a missing pooler is allowed) and each head are complete
    and have the shapes that the config implies; raise UserError otherwise. What such an encoder
    does not have is skipped. `source_names`: {palm_ds name: name in the file}, for messages."""
    names = {name for entry in contents.entries.values() for name in entry.source_names}
    check_names(contents.path, [*names, *contents.entries, *contents.skipped])
    config, tensors = contents.config, len(contents.entries)
    layers = config.num_layers
    if layers <= _MOST_SHARED and not is_custom(config.kind):
        layers = encoder_class(config).own_layers(config)
    if layers > tensors:  # checked before building a model with as many layers as the file claims
        what = f"its configuration has {layers} layers, but there are only {tensors} tensors"
        raise UserError(f"{contents.path}: incomplete: {what}")
    try:
        expected = expected_shapes(contents.config, contents.heads)
    except UserError as error:
        raise UserError(f"{contents.path}: {error}") from None
    for name, shape in expected.items():
        entry = contents.entries.get(name)
        if entry is None and not _may_lack(name, contents):
            name = (source_names or {}).get(name, name)
            raise UserError(f"{contents.path}: incomplete, it has no {name} {shape}")
        if entry is not None and entry.shape != shape:
            names = " + ".join(entry.source_names)
            raise UserError(
                f"{contents.path}: {names} has shape {entry.shape}, but the configuration expects "
                f"{shape}"
            )
    return contents if is_custom(config.kind) else _without_unread(contents, expected)


def _without_unread(
    contents: CheckpointContents, expected: Mapping[str, Shape]
) -> CheckpointContents:
    unread = {
        name: entry
        for name, entry in contents.entries.items()
        if name.startswith("backbone.") and name not in expected
    }
    if not unread:
        return contents
    sources = [source for entry in unread.values() for source in entry.source_names]
    why = "its configuration has no such part: the model ignores it"
    return replace(
        contents,
        entries={name: entry for name, entry in contents.entries.items() if name not in unread},
        skipped={**contents.skipped, **dict.fromkeys(sources, why)},
    )


POOLERS = ("backbone.pooler.", "backbone.region_pooler.")
"""Of texts, and of images."""


def _may_lack(name: str, contents: CheckpointContents) -> bool:
    """Whether the checkpoint may lack this parameter: only a pooler, and only all of it."""
    pooler = next((prefix for prefix in POOLERS if name.startswith(prefix)), None)
    return pooler is not None and not any(n.startswith(pooler) for n in contents.entries)
