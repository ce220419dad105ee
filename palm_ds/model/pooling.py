"""From token vectors to one vector of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from palm_ds.common.errors import UserError, suggest

POOLINGS = ("mean", "cls", "max")


@dataclass(frozen=True, kw_only=True)
class TextPooling:
    """Pooling of texts into vectors."""

    pooling: str = "mean"
    """mean, cls or max over the tokens of a text, special ones included."""
    normalize: bool = False
    """Scale vectors to length 1."""
    similarity: str = "cosine"
    """How two vectors are compared: cosine or dot."""
    max_length: int = 0
    """Tokens after which texts are truncated; 0: what the encoder reads."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """{name: what is put before a text}, such as `query` and `document`."""
    trained: bool = False
    """Whether the model was trained to give such vectors."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling: {self.pooling!r}{suggest(self.pooling, POOLINGS)}")
