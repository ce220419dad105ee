"""Where a trainer's encoder comes from: `palm.Backbone`.

Not a module with weights: those are built, and loaded, when training begins, each time anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.plugins import classes_to_names
from palm_ds.model.config import EncoderConfig
from palm_ds.weights.download import downloader
from palm_ds.weights.weights_folder import backbone_config_from, tokenizer_in


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """An encoder to start from: a checkpoint, or numbers alone."""

    folder: str = ""
    """A checkpoint of any format."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Without one: the keys of a recipe's `backbone`."""
    tokenizer: str = ""
    """A vocabulary; empty: that of the checkpoint."""

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, tokenizer: str | Path = "", path: str | Path = "."
    ) -> Backbone:
        """A folder of weights (a run, an export, a Hugging Face, Paddle, DeepSpeed or TensorFlow
        checkpoint), or a name to download to `path`/pretrain: one of PaddlePALM's, as
        ERNIE-v2-en-base, or `org/name` on the Hugging Face hub."""
        folder = Path(name)
        if not folder.exists():
            try:
                folder = downloader.download(str(name), path=path)
            except UserError as error:
                raise UserError(f"no such folder, and none was downloaded: {error}") from None
        if not tokenizer and tokenizer_in(folder) is None:
            raise UserError(f"{folder}: there is no vocabulary with it; name one: tokenizer=FILE")
        return cls(folder=str(folder), tokenizer=str(tokenizer))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, *, tokenizer: str | Path
    ) -> Backbone:
        """First weights drawn by the seed. `config`: numbers as a recipe's `backbone` has them
        (`kind` may be a class of one's own), or as ERNIE, PALM and Hugging Face call them, or a
        JSON file of these."""
        if not isinstance(config, Mapping):
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        numbers = EncoderConfig.from_dict(classes_to_names(config))  # type: ignore[arg-type]
        return cls(config=asdict(numbers), tokenizer=str(tokenizer))

    @property
    def max_length(self) -> int:
        """Tokens of the longest row that it reads."""
        if self.folder:
            return backbone_config_from(Path(self.folder)).max_length
        return EncoderConfig.from_dict(self.config).max_length

    def values(self) -> dict[str, Any]:
        """What it says in a recipe."""
        return {"init_from": self.folder} if self.folder else {"backbone": dict(self.config)}
