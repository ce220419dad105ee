"""A tiny model with the names of a real one, and steps with random gradients."""

from __future__ import annotations

import torch
from torch import nn


class TiedModel(nn.Module):
    """Has the names of a real model, with token embeddings shared by a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.ModuleDict(
            {"word": nn.Embedding(10, 4), "dense": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
        )
        head = nn.ModuleDict({"dense": nn.Linear(4, 4)})
        head.register_parameter("words", self.backbone["word"].weight)  # type: ignore[arg-type]
        self.heads = nn.ModuleDict({"words": head, "order": nn.Linear(4, 3)})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[float]) -> None:
    for scale in gradients:
        for number, p in enumerate(model.parameters()):
            torch.manual_seed(number)
            p.grad = torch.randn_like(p) * scale
        optimizer.step()
