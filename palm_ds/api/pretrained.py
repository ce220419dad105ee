"""`palm.Backbone`: where the encoder of a trainer comes from.

It holds no weights: every trainer builds and loads its own when training starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palm_ds.common.config import read_json
from palm_ds.common.errors import UserError
from palm_ds.common.plugins import classes_to_names
from palm_ds.model.config import EncoderConfig
from palm_ds.weights.download import downloader
from palm_ds.weights.weights_folder import backbone_config_from, tokenizer_in


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """An encoder to start from: a checkpoint, or hyperparameters with new weights."""

    folder: str = ""
    """A checkpoint of any format."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Without a folder: the keys of a recipe's `backbone`."""
    tokenizer: str = ""
    """A vocabulary file or folder; empty: that of the checkpoint."""

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, tokenizer: str | Path = "", path: str | Path = "."
    ) -> Backbone:
        """From a folder of weights (a run, an export, a Hugging Face, Paddle, DeepSpeed or
        TensorFlow checkpoint), or from a name to download to `path`/pretrain: one of PaddlePALM's,
        such as ERNIE-v2-en-base, or `org/name` on the Hugging Face hub."""
        folder = Path(name)
        if not folder.exists():
            try:
                folder = downloader.download(str(name), path=path)
            except UserError as error:
                why = f"no such folder, and cannot be downloaded: {error}"
                raise UserError(f"{name}: {why}") from None
        if not tokenizer and tokenizer_in(folder) is None:
            raise UserError(f"{folder}: has no vocabulary; name one: tokenizer=FILE")
        return cls(folder=str(folder), tokenizer=str(tokenizer))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, *, tokenizer: str | Path
    ) -> Backbone:
        """With new weights, drawn from the trainer's seed. `config`: the keys of a recipe's
        `backbone` (`kind` may be a user-defined class), or ERNIE's, PALM's or Hugging Face's
        names for them, or a JSON file with them."""
        given = config if isinstance(config, Mapping) else read_json(config)
        numbers = EncoderConfig.from_dict(classes_to_names(given))
        return cls(config=asdict(numbers), tokenizer=str(tokenizer))

    @property
    def max_length(self) -> int:
        """Maximum row length in tokens."""
        if self.folder:
            return backbone_config_from(Path(self.folder)).max_length
        return EncoderConfig.from_dict(self.config).max_length

    def values(self) -> dict[str, Any]:
        """The recipe keys for this encoder."""
        return {"init_from": self.folder} if self.folder else {"backbone": dict(self.config)}
