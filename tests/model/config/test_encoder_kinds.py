"""Encoders are found by their names."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import class_of_kind, is_custom, known_kinds
from palm_ds.model.encoder import kinds
from palm_ds.model.encoder.encoder import Encoder, encoder_class
from palm_ds.model.encoder.kinds.bert import Bert
from palm_ds.model.encoder.kinds.cnn import CNN
from tests.helpers.word_encoders import KINDS


def test_every_encoder_has_a_name() -> None:
    own = set()
    for found in pkgutil.iter_modules(kinds.__path__, f"{kinds.__name__}."):
        classes = vars(importlib.import_module(found.name)).values()
        encoders = (
            each for each in classes if isinstance(each, type) and issubclass(each, Encoder)
        )
        own |= {each for each in encoders if each.__module__ == found.name}
    assert known_kinds() == tuple(sorted(known_kinds()))
    assert {class_of_kind(name, Encoder) for name in known_kinds()} == own
    assert len(own) == len(known_kinds()) and set(KINDS) < set(known_kinds())


def test_a_kind_is_a_name_or_a_class() -> None:
    assert class_of_kind("cnn", Encoder) is CNN
    assert encoder_class(EncoderConfig.from_dict({"kind": "cnn"})) is CNN
    assert not is_custom("cnn") and not is_custom("bert") and is_custom("my_module.Encoder")


def test_a_kind_has_its_own_defaults_unless_a_preset_is_named() -> None:
    small = EncoderConfig.from_dict({"kind": "bag_of_words"})
    assert (small.hidden_size, small.task_types, small.dropout) == (128, 0, 0.0)
    assert EncoderConfig.from_dict({"kind": "bag_of_words", "hidden_size": 64}).hidden_size == 64
    assert EncoderConfig.from_dict({"kind": "cnn", "preset": "mini"}).hidden_size == 256


def test_an_encoder_without_a_name_is_bert_as_in_earlier_recipes_and_weights() -> None:
    default = EncoderConfig.from_dict({"hidden_size": 24, "num_heads": 2})
    assert EncoderConfig.from_dict({"hidden_size": 24, "num_heads": 2, "kind": ""}) == default
    assert default.kind == "bert" and encoder_class(default) is Bert


def test_an_architecture_takes_only_its_own_values() -> None:
    with pytest.raises(UserError, match="backbone.options.a: unknown key; the class takes no opt"):
        encoder_class(EncoderConfig.from_dict({"options": {"a": 1}}))


def test_an_unknown_kind() -> None:
    with pytest.raises(UserError, match='no encoder "bilstmm"; did you mean "bilstm"'):
        EncoderConfig.from_dict({"kind": "bilstmm"})
