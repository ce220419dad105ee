"""What distances add to scores: buckets, views, and the forms of attention that can."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.positions import log_buckets, mpnet_buckets, skewed
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, choose_kernels
from tests.model.encoder.test_transformer import texts

SMALL = EncoderConfig.from_dict(
    {"kind": "mpnet", "vocab_size": 64, "hidden_size": 48, "num_layers": 2, "num_heads": 4}
)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_place_gets_the_score_of_its_offset(length: int) -> None:
    scores = torch.randn(3, length, 2 * length)
    found = skewed(scores)
    for i in range(length):
        for j in range(length):
            assert torch.equal(found[:, i, j], scores[:, i, j - i + length - 1])


@pytest.mark.parametrize("buckets", [32, 16])
def test_buckets_are_those_of_transformers(buckets: int) -> None:
    offset = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(offset, num_buckets=buckets)
    assert torch.equal(mpnet_buckets(offset, buckets), expected)
    expected = make_log_bucket_position(offset, 8 * buckets, 512).long()
    assert torch.equal(log_buckets(offset, 8 * buckets, 512), expected)


def test_the_other_forms_of_attention_are_left_out_and_say_why() -> None:
    given = {"device": "cpu", "dtype": torch.float32, "config": SMALL, "score_biases": True}
    chosen, lines = choose_kernels({}, **given)
    assert chosen.attention == "plain"
    assert "tiles: adds nothing to the scores" in next(x for x in lines if "attention" in x)
    with pytest.raises(UserError, match='"tiles" cannot run here: adds nothing to the scores'):
        choose_kernels({"attention": "tiles"}, **given)
    encoder = build_encoder(SMALL, Kernels(attention="tiles"))
    with pytest.raises(UserError, match='attention: "tiles" adds nothing to the scores'):
        encoder(Batch.from_rows([texts((9,))], length=9, pad=1))
