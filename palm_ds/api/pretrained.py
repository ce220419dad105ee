"""`palm.Backbone`: where the encoder of a trainer comes from.

Every trainer builds and loads its own weights when training starts; a backbone itself loads them
when it is called on texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch

from palm_ds.api.keywords import EmbeddingKeywords
from palm_ds.api.save_model import push_saved, save_pretrained
from palm_ds.api.text_vectors import TextVectors
from palm_ds.common.arguments import checks_arguments
from palm_ds.common.config import read_json
from palm_ds.common.errors import UserError
from palm_ds.common.keywords import documents
from palm_ds.common.plugins import classes_to_names
from palm_ds.common.summary import Summary
from palm_ds.inference.embedder import Embedder, EmbeddingSettings, Text
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.processes.processes import device_named
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.download import downloader
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.foreign_config import read_encoder_config
from palm_ds.weights.model_folder import encoder_config


@dataclass(frozen=True, kw_only=True, repr=False)
class Backbone(Summary):
    """An encoder to start from: a checkpoint, or hyperparameters with new weights."""

    folder: str = ""
    """A checkpoint of any format; empty: new weights."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Without a folder: the keys of a recipe's `backbone`."""
    tokenizer: str = ""
    """A vocabulary file or folder; empty: that of the checkpoint."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the opened weights, which cannot be pickled."""
        return {"folder": self.folder, "config": self.config, "tokenizer": self.tokenizer}

    def facts(self) -> dict[str, object]:
        new = f"new weights, {self.config.get('num_layers')} layers"
        where = {"folder": self.folder} if self.folder else {"config": new}
        return {**where, **({"tokenizer": self.tokenizer} if self.tokenizer else {})}

    @classmethod
    @checks_arguments()
    def from_pretrained(
        cls, name: str | Path, *, tokenizer: str | Path = "", path: str | Path = "."
    ) -> Backbone:
        """A backbone with the weights of a folder (a run, an export, a Hugging Face, Paddle,
        DeepSpeed or TensorFlow checkpoint), or of a name, which is downloaded to `path`/pretrain:
        one of PaddlePALM's, such as ERNIE-v2-en-base, or `org/name` on the Hugging Face hub. Raises
        UserError."""
        folder = Path(name)
        if not folder.exists():
            try:
                folder = downloader.download(str(name), path=path)
            except UserError as error:
                why = f"no such folder, and cannot be downloaded: {error}"
                raise UserError(f"{name}: {why}") from None
        backbone = cls(folder=str(folder), tokenizer=str(tokenizer))
        if not tokenizer and backbone._contents.tokenizer is None:
            raise UserError(f"{folder}: has no vocabulary; name one: tokenizer=FILE")
        return backbone

    @classmethod
    @checks_arguments()
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, *, tokenizer: str | Path
    ) -> Backbone:
        """A backbone with new weights, which follow from the trainer's seed. `config`: the keys of
        a recipe's `backbone` (`kind` may be a class of your own), or ERNIE's, PALM's or Hugging
        Face's names for them, or a JSON file with them. Raises UserError."""
        given = config if isinstance(config, Mapping) else read_json(config)
        numbers = read_encoder_config(classes_to_names(given))
        return cls(config=asdict(numbers), tokenizer=str(tokenizer))

    @property
    def max_length(self) -> int:
        """Maximum row length in tokens."""
        if self.folder:
            return encoder_config(self.folder).max_length
        return EncoderConfig.from_dict(self.config).max_length

    @documents(EmbeddingSettings)
    def __call__(
        self,
        texts: str | Sequence[Text] | Sequence[Sequence[int]] | torch.Tensor,
        *,
        device: str = "cpu",
        **settings: Unpack[EmbeddingKeywords],
    ) -> torch.Tensor | list[torch.Tensor]:
        """The vectors of texts, of pairs of texts (each embedded as one input), or of token ids
        with special tokens: (texts, hidden) float32; with `tokens=True` a list of (tokens, hidden);
        with splade a sparse tensor (texts, vocabulary). The weights are loaded at the first call.
        Raises UserError."""
        return self._vectors_on(device)(texts, settings)

    @documents(EmbeddingSettings)
    def words(
        self,
        texts: str | Sequence[Text],
        *,
        device: str = "cpu",
        **settings: Unpack[EmbeddingKeywords],
    ) -> list[dict[str, float]]:
        """The sparse vectors of texts as {token: weight}, the largest weight first. Raises
        UserError."""
        return self._vectors_on(device).words(texts, settings)

    def _vectors_on(self, device: str) -> TextVectors:
        _ = self._contents  # checks itself
        if device not in self._vectors:
            self._vectors[device] = TextVectors(open=partial(self._embedder, device))
        return self._vectors[device]

    def _embedder(self, device: str, settings: EmbeddingSettings) -> Embedder:
        tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else None
        opened = TrainedModel(
            contents=self._contents, device=device_named(device), given_tokenizer=tokenizer
        )
        return opened.embedder(settings)

    @cached_property
    def _vectors(self) -> dict[str, TextVectors]:
        """By device."""
        return {}

    @checks_arguments()
    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the encoder, with its masked-LM head if it has one, as a folder that transformers'
        Auto classes open. Raises UserError."""
        return save_pretrained(self._contents.path, folder)

    @checks_arguments()
    def push_to_hub(
        self, name: str, *, private: bool = False, token: str | None = None, revision: str = ""
    ) -> str:
        """`save_pretrained` to the repository `name` of the Hugging Face hub; returns its URL.
        Raises UserError, or TemporaryError if trying again may help."""
        return push_saved(
            self.save_pretrained, name, private=private, token=token, revision=revision
        )

    @cached_property
    def _contents(self) -> CheckpointContents:
        """The weights, opened once. Raises UserError."""
        if not self.folder:
            raise UserError("this backbone has no weights yet; train it, or use from_pretrained")
        return TrainedModel.open(self.folder).contents

    def values(self) -> dict[str, Any]:
        """The recipe keys for this encoder."""
        return {"init_from": self.folder} if self.folder else {"backbone": dict(self.config)}
