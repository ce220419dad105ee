"""One table lists the differences between the architectures of BERT's shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.huggingface.architecture import NEXT_SENTENCE
from palm_ds.weights.formats.huggingface.families import (
    FAMILIES,
    architecture_of,
    family_of,
)
from palm_ds.weights.formats.huggingface.target import family_to_write

CONFIG = EncoderConfig(
    vocab_size=11, hidden_size=8, num_layers=1, num_heads=2, max_positions=10, task_types=0
)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (CONFIG, "bert"),
        (replace(CONFIG, task_types=3), "ernie"),
        (replace(CONFIG, position_offset=2, pad=1), "roberta"),
        (replace(CONFIG, position_offset=2, pad=1, task_types=3), ""),
        (replace(CONFIG, position_offset=3, pad=1), ""),
    ],
)
def test_an_encoder_has_the_architecture_that_computes_the_same(
    config: EncoderConfig, kind: str
) -> None:
    assert family_of(config) == kind


def test_a_family_that_is_named_computes_the_same() -> None:
    """Positions of BERT's shape can be moved, and PaddleNLP's tables of ErnieGram be written."""
    moved = replace(CONFIG, position_offset=3, pad=1)
    assert family_to_write(moved, "bert") == "bert"
    gram = replace(CONFIG, kind="ernie_gram", options={"relative_positions": "added"})
    assert family_to_write(gram, "ernie_gram") == "ernie_gram"
    mpnet = replace(CONFIG, kind="mpnet", position_offset=2, pad=1)
    assert family_to_write(replace(mpnet, task_types=3), "mpnet") == "mpnet"
    for wanted in ("", "mpnet"):
        with pytest.raises(UserError, match="always has 32 relative_buckets"):
            family_to_write(replace(mpnet, options={"relative_buckets": 8}), wanted)


OF_THE_HUB = {"neobert", "new", "ernie_doc", "ernie_gram", "ernie_m", "unimo"}
"""Model types that only code of the hub or PaddleNLP has."""


def test_each_architecture_has_its_class_in_transformers() -> None:
    for name, family in FAMILIES.items():
        assert hasattr(transformers, family.class_name("Model")) != (name in OF_THE_HUB), name
        if name in OF_THE_HUB:
            continue
        model = getattr(transformers, f"{family.class_prefix}Model")
        assert model.config_class.model_type == name
        has_pair = hasattr(transformers, f"{family.class_prefix}ForNextSentencePrediction")
        assert has_pair == (family.pair_head == NEXT_SENTENCE)
        assert bool(family.pair_head) == (
            hasattr(transformers, f"{family.class_prefix}ForPreTraining") and name != "electra"
        )


def test_ids_of_published_tokenizers_are_not_taken_for_granted() -> None:
    """transformers warns of ids outside the vocabulary; EuroBERT's [MASK] must be a number."""
    for name in FAMILIES.keys() - OF_THE_HUB:
        values = transformers.AutoConfig.for_model(name).to_dict()
        keys = {f"{role}_token_id" for role in ("bos", "cls", "eos", "sep")}
        large = {key for key in keys & values.keys() if (values[key] or 0) > 1000}
        assert large <= set(architecture_of(name).published_ids), name
