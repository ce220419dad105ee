"""The scores of the next token from one dense, uncached pass: ERNIE-GEN's equations, or UNIMO's,
which have no queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from palm_ds.model.attention.dense import plain_attention
from palm_ds.model.attention.plan import AttentionPlan
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.generation.cached_decoder import Prompt, TargetFormat
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, PackedText

FORMAT = TargetFormat(begin=1, query=4, end=2, token_type=3)
NEXT = TargetFormat(begin=1, query=None, end=4, token_type=1)


def small_encoder(vocab_size: int = 12, *, seed: int = 1, spread: float = 0.3) -> Encoder:
    """With weights so large that scores differ clearly."""
    torch.manual_seed(seed)
    config = EncoderConfig(
        vocab_size=vocab_size, hidden_size=16, num_layers=2, num_heads=2, max_positions=64,
        init_range=spread,
    )  # fmt: skip
    return build_encoder(config).eval()


def small_model(vocab_size: int = 12, *, seed: int = 1) -> tuple[Encoder, MaskedLMHead]:
    encoder = small_encoder(vocab_size, seed=seed)
    head = MaskedLMHead(encoder).eval()
    with torch.no_grad():
        head.bias.normal_(std=0.5)
    return encoder, head


def prompt(source: Sequence[int], *, number: int = 0, task_id: int = 0) -> Prompt:
    """A source of one segment, and the target's positions after it."""
    ids = np.array(source, np.int64)
    text = PackedText(input_ids=ids, token_type_ids=np.zeros_like(ids), task_id=task_id)
    return Prompt(source=text, position=len(ids), number=number)


def next_scores(
    encoder: Encoder,
    head: MaskedLMHead,
    given: Prompt,
    target: Sequence[int],
    frame: TargetFormat = FORMAT,
) -> torch.Tensor:
    """(vocabulary,) the scores of the token after `target`, which starts with [CLS]."""
    source, many = given.source, len(given.source.input_ids)
    ids = [*source.input_ids.tolist(), *target, *([] if frame.query is None else [frame.query])]
    total = len(ids)
    kinds = [*source.token_type_ids.tolist(), *[frame.token_type] * (total - many)]
    places = [*range(many), *range(given.position, given.position + total - many)]
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[:, :many] = True
    mask[many:, many:] = torch.ones(total - many, total - many).tril() > 0
    as_row = lambda values: torch.tensor([values])  # noqa: E731
    batch = Batch(
        input_ids=as_row(ids),
        position_ids=as_row(places),
        token_type_ids=as_row(kinds),
        task_ids=torch.full((1, total), source.task_id),
        sequence_ids=torch.zeros(1, total, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, total], dtype=torch.int32),
    )
    plan = AttentionPlan(kernel="plain", compute=plain_attention, mask=mask[None, None])
    with torch.no_grad():
        return head.logits(encoder.read(batch, [plan] * len(encoder.layers))[0, -1:])[0]
