"""`palm.Backbone`: where the encoder of a trainer comes from.

Every trainer builds and loads its own weights when training starts; a backbone itself loads them
when it is called on texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from palm_ds.api.save_model import push_saved, save_pretrained
from palm_ds.common.config import read_json
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.keywords import documents
from palm_ds.common.plugins import classes_to_names
from palm_ds.inference.embedder import (
    Embedder,
    EmbeddingSettings,
    open_embedder,
    with_settings,
)
from palm_ds.model.config import EncoderConfig
from palm_ds.runtime.processes import device_named
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.train.finished_run import weights_of
from palm_ds.weights.download import downloader
from palm_ds.weights.weights_folder import backbone_config_from, tokenizer_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from palm_ds.api.keywords import EmbeddingKeywords


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

    @documents(EmbeddingSettings)
    def __call__(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]] | torch.Tensor,
        *,
        device: str = "cpu",
        **settings: Unpack[EmbeddingKeywords],
    ) -> torch.Tensor | list[torch.Tensor]:
        """The vectors (texts, hidden) float32 of texts, or of ids with their special tokens; with
        `tokens=True` a list of (tokens, hidden). The weights are loaded at the first call. Raises
        UserError."""
        embedder = self._embedder(device, _settings(settings))
        ids = _ids(texts, embedder)
        if embedder.settings.tokens:
            return [torch.from_numpy(found) for found in embedder.embed_tokens(ids)]
        return torch.from_numpy(embedder.embed_ids(ids))

    def _embedder(self, device: str, settings: EmbeddingSettings) -> Embedder:
        """An embedder with these settings; all on a device share the weights."""
        self._with_weights()
        found = self._embedders.get(device, {})
        if settings not in found and found:
            found[settings] = with_settings(next(iter(found.values())), settings)
        elif settings not in found:
            tokenizer = load_tokenizer(self.tokenizer) if self.tokenizer else None
            made = open_embedder(
                self.folder, settings, device=device_named(device), tokenizer=tokenizer
            )
            found = self._embedders[device] = {settings: made}
        return found[settings]

    @cached_property
    def _embedders(self) -> dict[str, dict[EmbeddingSettings, Embedder]]:
        return {}

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the encoder, with its masked-word head if it has one, as a folder that
        transformers' Auto classes open. Raises UserError."""
        return save_pretrained(self._with_weights(), folder)

    def push_to_hub(
        self, name: str, *, private: bool = False, token: str | None = None, revision: str = ""
    ) -> str:
        """`save_pretrained` to the repository `name` of the Hugging Face hub; returns its
        address. Raises UserError or TemporaryError."""
        return push_saved(
            self.save_pretrained, name, private=private, token=token, revision=revision
        )

    def _with_weights(self) -> Path:
        if not self.folder:
            raise UserError("this backbone has no weights yet; train it, or use from_pretrained")
        return weights_of(Path(self.folder))

    def values(self) -> dict[str, Any]:
        """The recipe keys for this encoder."""
        return {"init_from": self.folder} if self.folder else {"backbone": dict(self.config)}


def _settings(given: Mapping[str, Any]) -> EmbeddingSettings:
    known = [each.name for each in fields(EmbeddingSettings)]
    for name in given:
        if name not in known:
            raise UserError(f"{name}: no such setting{suggest(name, known)}")
    layers = given.get("layers", (-1,))
    layers = (layers,) if isinstance(layers, int) else tuple(layers)
    return EmbeddingSettings(**{**given, "layers": layers})


def _ids(texts: Any, embedder: Embedder) -> list[np.ndarray]:
    """The ids of texts, or the given ids without padding at the end, checked."""
    rows = [texts] if isinstance(texts, str) else list(texts)
    if any(isinstance(row, str) for row in rows):
        for number, row in enumerate(rows):
            if not isinstance(row, str):
                raise UserError(f"text {number}: expected a text like the others, got {row!r:.60}")
        return embedder.encode(rows)
    return [_checked_ids(row, f"text {number}", embedder) for number, row in enumerate(rows)]


def _checked_ids(row: object, where: str, embedder: Embedder) -> np.ndarray:
    pad, size = embedder.tokenizer.vocabulary.pad, embedder.encoder.config.vocab_size or 0
    longest = embedder.encoder.config.max_length
    wanted = f"{where}: expected 1 to {longest} ids from 0 to {size - 1}"
    try:
        given = np.asarray(row)
    except ValueError:  # lists of different lengths
        raise UserError(f"{wanted}, got {row!r:.60}") from None
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise UserError(f"{wanted}, got {row!r:.60}")
    ids = given[: int(np.flatnonzero(given != pad).max(initial=-1)) + 1]
    if not 0 < len(ids) <= longest or ids.min() < 0 or ids.max() >= size:
        raise UserError(wanted)
    return ids.astype(np.int64)
