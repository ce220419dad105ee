"""A config.json with a value that no program writes is refused by its file and key."""

from __future__ import annotations

import json
import math

import pytest

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.huggingface.check_config import check_foreign_values

WRONG = {
    "text": ("hidden_size", "32", 'a whole number from 1 to 65,536, got "32"'),
    "a float": ("hidden_size", 32.0, "got 32.0"),
    "true": ("num_attention_heads", True, "got true"),
    "null": ("num_hidden_layers", None, "got null"),
    "zero": ("num_hidden_layers", 0, "from 1 to 1,000, got 0"),
    "negative": ("vocab_size", -1, "from 1 to 10,000,000, got -1"),
    "huge": ("vocab_size", 10**12, "got 1000000000000"),
    "of 400 digits": ("hidden_size", 10**400, r"got 1\d{56}\.\.\."),
    "infinite": ("max_position_embeddings", float("inf"), "got Infinity"),
    "a list": ("type_vocab_size", [2], r"got \[2\]"),
    "a padding token": ("pad_token_id", -5, "from 0 to 10,000,000, got -5"),
    "labels": ("num_labels", 10**9, "got 1000000000"),
    "NaN": ("layer_norm_eps", float("nan"), "a number above 0 and at most 1, got NaN"),
    "an infinite eps": ("layer_norm_eps", float("inf"), "got Infinity"),
    "an eps of text": ("layer_norm_eps", "1e-12", 'got "1e-12"'),
    "no deviation": ("initializer_range", -0.02, "a number above 0"),
    "all is dropped": ("hidden_dropout_prob", 1.0, "at least 0 and below 1, got 1.0"),
    "a rate": ("attention_probs_dropout_prob", "0.1", "at least 0 and below 1"),
    "a truth of text": ("use_task_id", "false", 'true or false, got "false"'),
    "a tie": ("tie_word_embeddings", None, "true or false, got null"),
    "an activation": ("hidden_act", {"name": "gelu"}, "text, got"),
    "a problem": ("problem_type", 3, "text, got 3"),
    "a list of labels": ("id2label", ["no", "yes"], "the names of the classes by number"),
    "labels by name": ("id2label", {"no": "0"}, "the names of the classes by number"),
    "labels of numbers": ("id2label", {"0": 1}, "the names of the classes by number"),
    "labels to text": ("label2id", {"no": "0"}, "the numbers of the classes by name"),
    "a command": ("hidden_act", ["\x9b2J"], r'got \["\\x9b2J"\]'),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_value_names_its_key(what: str) -> None:
    key, value, message = WRONG[what]
    values = json.loads(json.dumps({"model_type": "bert", key: value}))
    with pytest.raises(UserError, match=rf"^x/config.json: {key}: expected .*{message}") as caught:
        check_foreign_values(values, "x/config.json")
    assert str(caught.value).isprintable()


def test_configs_of_other_programs_are_accepted() -> None:
    check_foreign_values(
        {
            "vocab_size": 30522,
            "pad_token_id": None,
            "classifier_dropout": None,
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0,
            "use_task_id": True,
            "id2label": {"0": "no", "1": "ja"},
            "label2id": {"no": 0, "ja": 1},
            "anything": float("nan"),
        },
        "config.json",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("name", ["layer_norm_eps", "init_range"])
def test_encoder_settings_must_be_finite(name: str, value: float) -> None:
    wanted = "expected a number above 0" if math.isfinite(value) else "expected a finite number"
    with pytest.raises(UserError, match=f"{name}: {wanted}"):
        EncoderConfig.from_dict({name: value})
    with pytest.raises(UserError, match="dropout: expected a finite number"):
        EncoderConfig.from_dict({"dropout": float("nan")})


def test_numbers_in_json_are_not_text() -> None:
    assert EncoderConfig.from_dict({"hidden_size": "24"}).hidden_size == 24  # as YAML has 1e-5
    for wrong in ("24", True, 24.0):
        with pytest.raises(UserError, match="backbone.hidden_size: expected a whole number"):
            EncoderConfig.from_dict({"hidden_size": wrong}, strict=True)
