"""Checks a custom encoder before training.

    backbone: {preset: tiny, kind: my_module.PreNorm, options: {scale: 0.5}}

A custom encoder is a subclass of palm_ds.model.encoder.encoder.Encoder, most often of the
transformer. Running it on a few texts
shows whether it keeps that class's contract; a violation would otherwise surface late or never, as
a worse loss curve or as different results under another ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from palm_ds.common.errors import UserError, named_line
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.encoder.encoder import Encoder, build_encoder, encoder_class
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import prefix_lm

_VOCAB_SIZE = 64
_TOLERANCE = 1e-4


def check_custom_encoder(config: EncoderConfig, partial_tasks: Sequence[str] = ()) -> None:
    """Raises UserError if the class named by `kind` breaks the contract of an encoder: wrong
    shapes, texts of a row that see one another, unused parameters; with `partial_tasks`, tasks with
    texts whose tokens do not all attend to one another, also tokens that see what is hidden from
    them. An encoder that comes with palm_ds is tried too if it has no attention."""
    if encoder_class(config).is_specified() and not is_custom(config.kind):
        return
    where = f"backbone.kind: {config.kind}"
    vocab_size = max(_VOCAB_SIZE, config.pad + 1)
    try:
        encoder = build_encoder(replace(config, vocab_size=vocab_size)).eval()
        if problem := _problem(encoder):
            raise UserError(f"{where}: {problem}")
        if partial_tasks and _sees_hidden(encoder):
            raise UserError(
                f"{where}: tokens of a text see others that tasks.{partial_tasks[0]} hides from "
                "them; such a task needs attention that follows the plan of its batch"
            )
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        raise UserError(f"{where}: fails in a trial: {named_line(error)}") from error


def _problem(encoder: Encoder) -> str:
    """The first violation, or nothing."""
    length = min(encoder.config.max_length, 12)
    sizes = [length // 2, length // 4, length // 3]  # of three texts, the first two in one row
    packed, alone = _batch(sizes, length, [[0, 1], [2]]), _batch(sizes, length, [[1]])
    out = encoder(packed)
    expected = (2, length, encoder.hidden_size)
    if out.shape != expected:
        return f"returns the shape {tuple(out.shape)} for {expected[:2]} tokens, not {expected}"
    if not out.isfinite().all():
        return "returns NaN or infinity; vectors of padding must be finite too"
    at = torch.tensor([sizes[0], length, length + 1])
    flat = out.flatten(0, 1)
    selected = encoder(packed, at)
    if selected.shape != (3, encoder.hidden_size) or _differ(selected, flat[at]):
        return "with positions `at` it must return (positions, hidden), the same rows as without"
    if _differ(encoder(alone)[0, : sizes[1]], out[0, sizes[0] : sum(sizes[:2])]):
        return "the vectors of a text depend on the other texts in its row"
    (flat.sum() + encoder.pooler(flat[:1]).sum()).backward()
    unused = [name for name, p in encoder.named_parameters() if p.grad is None]
    count = f"{len(unused)} unused parameters"
    return f"{unused[0]} is not used in the forward pass ({count}); remove it" if unused else ""


def _sees_hidden(encoder: Encoder) -> bool:
    """Whether a token that is read from left to right changes those before it."""
    length = min(encoder.config.max_length, 12)
    outs = []
    for last in (1, 2):
        ids = np.append(np.arange(length - 1), last)
        text = PackedText(
            input_ids=ids,
            token_type_ids=np.zeros(length, np.int64),
            visibility=prefix_lm(2, length - 2),
        )
        outs.append(encoder(Batch.from_rows([[text]], length=length, pad=0))[0, :-1])
    return _differ(*outs)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > _TOLERANCE * other.abs().max().clamp(min=1))


def _batch(sizes: Sequence[int], length: int, rows: Sequence[Sequence[int]]) -> Batch:
    """Random texts of these sizes; `rows` lists the texts of each row."""
    texts = []
    for number, size in enumerate(sizes):
        ids = np.random.default_rng(number).integers(0, _VOCAB_SIZE, size)
        texts.append(PackedText(input_ids=ids, token_type_ids=np.zeros(size, np.int64)))
    return Batch.from_rows([[texts[n] for n in row] for row in rows], length=length, pad=0)
