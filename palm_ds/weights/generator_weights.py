"""Weights of generators: read from a folder of their own, and taken out of a model's.

    folder      backbone.*                       heads.masked_words.*
    model       heads.NAME.generator.encoder.*   heads.NAME.generator.words.*

Embeddings that generator and discriminator share are in the model once, as the discriminator's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.encoder.shared_embeddings import TABLES, merged_tables, split_tables
from palm_ds.model.heads.replaced_tokens import Generator
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.huggingface.architecture import MASKED_WORDS
from palm_ds.weights.weights_folder import check_finite, check_same, check_shapes

_BACKBONE, _WORDS = "backbone.", f"heads.{MASKED_WORDS}."
_BELOW = tuple(f"{_BACKBONE}{name}." for name in (*TABLES, "norm"))


def load_generator(contents: CheckpointContents, model: Model, head: str) -> str:
    """Start the generator of a head from an opened checkpoint with one masked-LM head, after the
    discriminator has its weights; returns a line about it. Raises UserError if it does not fit; the
    model is then unchanged."""
    folder, generator = contents.path, model.generators[head]
    check_same(contents.config, generator.encoder.config, folder)
    if len(contents.masked_lm_heads) != 1:
        found = ", ".join(contents.masked_lm_heads) or "none"
        raise UserError(f"{folder}: a generator has exactly one masked-LM head; this has {found}")
    state = _renamed(contents, head)
    own, names = merged_tables(model.state_dict()), model.state_dict()
    if generator.sharing == "shared":
        state = _without_shared(state, own, contents, head)
    prefix = f"heads.{head}.generator."
    if missing := [x for x in own if x.startswith(prefix) and x not in state]:
        raise UserError(f"{folder}: incomplete, it has no {missing[0]} ({len(missing)} missing)")
    check_shapes(own, state, folder)
    check_finite(state, folder)
    taken = {name: values for name, values in state.items() if name in own}
    model.load_state_dict(split_tables({**own, **taken}, names))
    return f"weights: {len(taken)} parameters of the generator from {folder}"


def _renamed(contents: CheckpointContents, head: str) -> dict[str, torch.Tensor]:
    """The values under the names of a head's generator; a pooler is left out."""
    prefix, words = f"heads.{head}.generator.", f"heads.{contents.masked_lm_heads[0]}."
    renamed = {}
    for name, entry in contents.entries.items():
        if name.startswith(_BACKBONE) and not name.startswith(f"{_BACKBONE}pooler."):
            renamed[f"{prefix}encoder.{name.removeprefix(_BACKBONE)}"] = entry.read().float()
        elif name.startswith(words):
            renamed[f"{prefix}words.{name.removeprefix(words)}"] = entry.read().float()
    return renamed


def _without_shared(
    state: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    contents: CheckpointContents,
    head: str,
) -> dict[str, torch.Tensor]:
    """The values without those shared with the discriminator. Raises UserError if the
    discriminator's differ."""
    prefix, rest = f"heads.{head}.generator.encoder.", dict(state)
    for shared in [name for name in own if name.startswith(_BELOW)]:
        name = prefix + shared.removeprefix(_BACKBONE)
        values = rest.pop(name, None)
        if values is not None and not torch.equal(values, own[shared].cpu().float()):
            raise UserError(
                f"{contents.path}: its embeddings are not those of the discriminator ({shared} "
                f"differs); set tasks.{head}.embedding_sharing to gradient_disentangled or none"
            )
    return rest


def generator_state(
    state: Mapping[str, torch.Tensor], generator: Generator, head: str
) -> dict[str, torch.Tensor]:
    """The generator of a head out of a model's weights, as a model of its own."""
    prefix = f"heads.{head}.generator."
    renamed = {}
    if generator.sharing == "shared":
        renamed = {name: values for name, values in state.items() if name.startswith(_BELOW)}
    for name, values in state.items():
        if name.startswith(prefix):
            part, rest = name.removeprefix(prefix).split(".", 1)
            renamed[(_BACKBONE if part == "encoder" else _WORDS) + rest] = values
    return renamed


def why_no_folder(generator: Generator) -> str:
    """The reason a generator cannot be written as a Hugging Face folder; empty if it can."""
    encoder, config = generator.encoder, generator.encoder.config
    if not encoder.hf:
        return f"Hugging Face has no {config.kind} encoder"
    if _width(config) != encoder.word.embedding_dim:
        return f"its embeddings are wider than its layers, which no other {config.kind} allows"
    return ""


def _width(config: EncoderConfig) -> int:
    return encoder_class(config).embedding_width(config)
