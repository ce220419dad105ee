"""A small model whose values are all noise, so that mix-ups are noticed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.multi_task_model import Model


def noisy_model(
    config: EncoderConfig, words: str, classes: Mapping[str, tuple[int, bool]]
) -> Model:
    """A masked-LM head `words`, and {name: (classes, whether it reads whole texts)}."""
    torch.manual_seed(5)
    backbone = build_encoder(config)
    heads: dict[str, torch.nn.Module] = {words: MaskedLMHead(backbone)}
    for name, (number, pooled) in classes.items():
        heads[name] = ClassHead(config.hidden_size, number, pooled=pooled)
    net = Model(backbone, heads, {name: name for name in heads})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net
