"""Encoders by name: the classes in palm_ds/model/encoder/kinds, which are imported when needed.

backbone: {kind: bert}                               one of these
backbone: {kind: my_module.MyEncoder, preset: tiny}  a class of the user's
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from palm_ds.common.plugins import import_class

T = TypeVar("T")
_PACKAGE = "palm_ds.model.encoder.kinds"
_CLASSES = {
    "albert": "albert.Albert",
    "bag_of_words": "bag_of_words.BagOfWords",
    "bert": "bert.Bert",
    "bilstm": "bilstm.BiLSTM",
    "cnn": "cnn.CNN",
    "deberta_v2": "deberta_v2.DebertaV2",
    "distilbert": "bert.DistilBert",
    "electra": "bert.Electra",
    "ernie_doc": "ernie_doc.ErnieDoc",
    "ernie_gram": "bert.ErnieGram",
    "ernie_vil": "ernie_vil.ErnieVil",
    "eurobert": "eurobert.EuroBert",
    "gte": "rotary_bert.Gte",
    "jina_embeddings_v3": "rotary_bert.JinaEmbeddingsV3",
    "modernbert": "modernbert.ModernBert",
    "mpnet": "bert.MPNet",
    "neobert": "neobert.NeoBert",
    "nomic_bert": "rotary_bert.NomicBert",
    "unimo": "unimo.Unimo",
}


def known_kinds() -> tuple[str, ...]:
    """The encoders that come with palm_ds."""
    return tuple(_CLASSES)


def class_of_kind(kind: str, base: type[T]) -> type[T]:
    """The encoder class of a kind, a subclass of `base`. Raises UserError for a `module.Class` that
    is none."""
    if encoder := shipped_class(kind):
        return encoder
    return import_class(kind, base, "backbone.kind")


def shipped_class(kind: object) -> type[Any] | None:
    """The class of an encoder that comes with palm_ds; None for any other kind."""
    if not isinstance(kind, str) or kind not in _CLASSES:
        return None
    module, name = _CLASSES[kind].split(".")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)


def defaults_of_kind(kind: object) -> Mapping[str, Any]:
    """The hyperparameters of an encoder that comes with palm_ds; empty for any other."""
    encoder = shipped_class(kind)
    return encoder.defaults if encoder else {}


def is_custom(kind: str) -> bool:
    """Whether a kind is a class of the user's, about which palm_ds knows nothing."""
    return kind not in _CLASSES
