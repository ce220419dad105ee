"""An encoder of one's own, tried before a run rests on it.

    backbone: {preset: tiny, kind: mine.PreNorm, options: {scale: 0.5}}

It is a subclass of palm_ds.model.encoder.Encoder. A pass over a few texts shows whether it keeps
to that one's contract; what it breaks would show late, or never, as a worse curve or other results
under another ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.batch import Batch, PackedText
from palm_ds.model.config import EncoderConfig
from palm_ds.model.encoder import Encoder, build_encoder

_WORDS = 64
_TOLERANCE = 1e-4


def check_custom_encoder(config: EncoderConfig) -> None:
    """Raises UserError where the class of `kind` does not do as an encoder: other shapes, texts of
    a row that see one another, parameters that take no part. Nothing without a `kind`."""
    if not config.kind:
        return
    where = f"backbone.kind: {config.kind}"
    words = max(_WORDS, config.pad + 1)
    try:
        backbone = build_encoder(replace(config, vocab_size=words)).eval()
        for why in _faults(backbone):
            raise UserError(f"{where}: {why}")
    except UserError:
        raise
    except Exception as error:  # whatever a class of somebody's raises
        text = (str(error).splitlines() or [""])[0]
        raise UserError(f"{where}: fails in a trial: {type(error).__name__}: {text}") from error


def _faults(backbone: Encoder) -> list[str]:
    """What is wrong with it, if anything."""
    longest = min(backbone.config.max_length, 12)
    sizes = [longest // 2, longest // 4, longest // 3]  # of texts, the first two in one row
    together, alone = _batch(sizes, longest, [[0, 1], [2]]), _batch(sizes, longest, [[1]])
    out = backbone(together)
    if out.shape != (2, longest, backbone.hidden_size):
        return [
            f"gives {tuple(out.shape)} for {(2, longest)} tokens of {backbone.hidden_size} numbers"
        ]
    if not out.isfinite().all():
        return ["gives NaN or infinite numbers; padding has to be finite too"]
    at = torch.tensor([sizes[0], longest, longest + 1])
    flat = out.flatten(0, 1)
    few = backbone(together, at)
    if few.shape != (3, backbone.hidden_size) or _differ(few, flat[at]):
        return ["with positions `at` it has to give (positions, hidden), the same rows as without"]
    if _differ(backbone(alone)[0, : sizes[1]], out[0, sizes[0] : sum(sizes[:2])]):
        return ["a text's vectors depend on the other texts of its row"]
    (flat.sum() + backbone.pooler(flat[:1]).sum()).backward()
    idle = [name for name, p in backbone.named_parameters() if p.grad is None]
    return [f"{idle[0]} takes no part ({len(idle)} parameters); remove it"] if idle else []


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > _TOLERANCE * other.abs().max().clamp(min=1))


def _batch(sizes: Sequence[int], length: int, rows: Sequence[Sequence[int]]) -> Batch:
    """Random texts of these sizes, row by row."""
    texts = []
    for number, size in enumerate(sizes):
        ids = np.random.default_rng(number).integers(0, _WORDS, size)
        texts.append(PackedText(ids=ids, segments=np.zeros(size, np.int64)))
    return Batch.from_rows([[texts[n] for n in row] for row in rows], length=length, pad=0)
