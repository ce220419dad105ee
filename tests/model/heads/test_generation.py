"""The head of generated texts: a masked-LM head with another loss in training."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.encoder.encoder import EncoderConfig, build_encoder
from palm_ds.model.heads.generation import GenerationHead
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.kernels import Kernels

CONFIG = EncoderConfig(vocab_size=30, hidden_size=16, num_layers=1, num_heads=2)
ROWS, TOKENS = torch.randn(6, 16), torch.tensor([3, 4, 5, 3, 9, 29])
FLOWS = torch.tensor([0, 0, 0, 1, 1, 1])


def head(kernel: str = "chunked", **options) -> GenerationHead:
    torch.manual_seed(0)
    return GenerationHead(build_encoder(CONFIG, Kernels(masked_lm_loss=kernel)), **options)


def test_it_is_a_masked_lm_head_without_options() -> None:
    torch.manual_seed(0)
    plain = MaskedLMHead(build_encoder(CONFIG, Kernels(masked_lm_loss="chunked")))
    mine = head()
    assert mine.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(mine(ROWS, TOKENS).loss_sum, plain(ROWS, TOKENS).loss_sum)
    both = torch.stack([TOKENS, FLOWS], 1)
    assert torch.equal(mine(ROWS, both).loss_sum, plain(ROWS, TOKENS).loss_sum)
    assert head(weights=(1.0, 1.0)).weights == ()


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
def test_smoothing_and_weights_are_for_training_only(kernel: str) -> None:
    mine = head(kernel, smoothing=0.1, weights=(1.5, 0.5))
    both = torch.stack([TOKENS, FLOWS], 1)
    logits = mine.logits(ROWS)
    smooth = F.cross_entropy(logits, TOKENS, reduction="none", label_smoothing=0.1)
    expected = 1.5 * smooth[:3].sum() + 0.5 * smooth[3:].sum()
    torch.testing.assert_close(mine(ROWS, both).loss_sum, expected)
    plain = F.cross_entropy(logits, TOKENS, reduction="sum")
    torch.testing.assert_close(mine.eval()(ROWS, both).loss_sum, plain)


def test_the_loss_of_no_labels_is_finite() -> None:
    mine = head(smoothing=0.1, weights=(1.5, 0.5))
    target = mine.dummy_target(torch.device("cpu"))
    assert mine(torch.zeros(1, 16), target).loss_sum.isfinite()
