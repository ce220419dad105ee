"""NeoBERT's published formulas and names, and folders of small ones with random norms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812

CONFIG: dict[str, Any] = {
    "model_type": "neobert",
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {"AutoModel": "model.NeoBERT"},
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "norm_eps": 1e-5,
    "vocab_size": 64,
    "max_length": 320,
    "pad_token_id": 0,
}


class Block(nn.Module):
    """A layer: queries and keys as complex numbers that are turned; the rows of `qkv` by head."""

    def __init__(self, about: dict[str, Any]):
        super().__init__()
        size, self.heads = about["hidden_size"], about["num_attention_heads"]
        inner = 8 * -(-int(2 * about["intermediate_size"] / 3) // 8)
        self.qkv, self.wo = (nn.Linear(size, n * size, bias=False) for n in (3, 1))
        self.ffn = nn.ModuleDict(
            {
                "w12": nn.Linear(size, 2 * inner, bias=False),
                "w3": nn.Linear(inner, size, bias=False),
            }
        )
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(size, about["norm_eps"]) for _ in range(2))

    def forward(self, x: torch.Tensor, seen: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).view(*x.shape[:2], self.heads, -1)
        query, key, value = parts.chunk(3, -1)
        query, key = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns).flatten(-2)
            for y in (query, key)
        )
        mixed = F.scaled_dot_product_attention(
            *(y.transpose(1, 2) for y in (query, key, value)), attn_mask=seen[:, None, None]
        )
        x = x + self.wo(mixed.transpose(1, 2).flatten(-2))
        activated, multiplier = self.ffn["w12"](self.ffn_norm(x)).chunk(2, -1)
        return x + self.ffn["w3"](F.silu(activated) * multiplier)


class NeoBERT(nn.Module):
    """The encoder, with the heads of a masked-LM and a classifying model."""

    def __init__(self, **values: Any):
        super().__init__()
        torch.manual_seed(3)
        self.about = about = CONFIG | values
        size, layers = about["hidden_size"], about["num_hidden_layers"]
        self.encoder = nn.Embedding(about["vocab_size"], size)
        self.transformer_encoder = nn.ModuleList(Block(about) for _ in range(layers))
        self.layer_norm = nn.RMSNorm(size, about["norm_eps"])
        self.decoder = nn.Linear(size, about["vocab_size"])
        self.dense, self.classifier = nn.Linear(size, size), nn.Linear(size, 3)
        for name, parameter in self.named_parameters():
            mean, deviation = (1.0, 0.3) if "norm" in name else (0.0, parameter.shape[-1] ** -0.5)
            nn.init.normal_(parameter, mean, deviation)

    def forward(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        size = self.about["hidden_size"] // self.about["num_attention_heads"]
        steps = 10_000.0 ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), steps)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        x = self.encoder(ids)
        for block in self.transformer_encoder:
            x = block(x, real, turns)
        return self.layer_norm(x)

    def masked_lm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(hidden)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.dense(hidden[:, 0])))

    def save(self, folder: Path, architecture: str = "NeoBERTLMHead") -> Path:
        """A folder of one of the published classes."""
        classifies = architecture == "NeoBERTForSequenceClassification"
        heads = ("dense.", "classifier.") if classifies else ("decoder.",)
        state = {}
        for name, x in self.state_dict().items():
            if name.startswith(heads):
                state[name] = x
            elif not name.startswith(("dense.", "classifier.", "decoder.")):
                state[f"model.{name}"] = x
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        named: dict[str, Any] = {"architectures": [architecture]}
        if classifies:
            named["id2label"] = {str(n): f"LABEL_{n}" for n in range(3)}
        (folder / "config.json").write_text(json.dumps(self.about | named))
        return folder
