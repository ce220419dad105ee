"""ModernBERT's encoder under the heads and in the rows of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from tests.helpers.hf_names import from_names
from tests.helpers.modernbert import modernbert

CONFIG = EncoderConfig.from_dict(
    {
        "kind": "modernbert",
        "vocab_size": 64,
        "hidden_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 72,
        "max_positions": 320,
        "init_range": 0.2,
        "options": {"window": 4},
    }
)
FORMS = ("plain", "sdpa", "tiles")


def text(size: int, seed: int = 0) -> PackedText:
    ids = np.random.default_rng(seed).integers(3, 64, size)
    return PackedText(input_ids=ids, token_type_ids=np.zeros(size, np.int64))


def encoder_of(attention: str = "plain", config: EncoderConfig = CONFIG) -> Any:
    torch.manual_seed(0)
    return build_encoder(config, Kernels(attention=attention)).eval()


@pytest.mark.parametrize("attention", FORMS)
def test_a_text_is_the_same_in_a_packed_row(attention: str) -> None:
    """Positions begin anew, and no window crosses from one text to the next."""
    texts = [text(n, seed) for seed, n in enumerate((37, 1, 20, 30))]
    encoder = encoder_of(attention)
    packed = encoder(Batch.from_rows([texts], length=96, pad=0))[0]
    start = 0
    for each in texts:
        size = len(each.input_ids)
        alone = encoder(Batch.from_rows([[each]], length=size, pad=0))[0]
        torch.testing.assert_close(packed[start : start + size], alone, atol=1e-5, rtol=1e-5)
        start += size


def test_rotary_positions_are_relative_within_a_text() -> None:
    """Without a restart outputs stay, as attention is confined to a text."""
    encoder = encoder_of()
    batch = Batch.from_rows([[text(20), text(30, 1)]], length=50, pad=0)
    moved = replace(batch, position_ids=torch.arange(50)[None])
    torch.testing.assert_close(encoder(moved), encoder(batch), atol=1e-5, rtol=1e-5)
    swapped = replace(batch, position_ids=torch.arange(50)[None] * 2)
    assert not torch.allclose(encoder(swapped), encoder(batch), atol=1e-3)


@pytest.mark.parametrize("local", [False, True])
def test_another_rotary_base_is_that_of_an_encoder_made_with_it(local: bool) -> None:
    options = {"window": 4, "local_rotary_base" if local else "global_rotary_base": 20.0}
    wanted = encoder_of(config=replace(CONFIG, options=options))
    batch = Batch.from_rows([[text(20), text(30, 1)]], length=50, pad=0)
    encoder = encoder_of()
    assert not torch.allclose(encoder(batch), wanted(batch), atol=1e-3)
    encoder.set_rope_base(20.0, local=local)
    assert torch.equal(encoder(batch), wanted(batch))


@pytest.mark.parametrize(
    ("ending", "values"),
    [
        ("ForTokenClassification", {}),
        ("ForSequenceClassification", {"classifier_pooling": "cls"}),
        ("ForSequenceClassification", {"classifier_pooling": "mean"}),
    ],
)
def test_a_classifier_has_the_loss_and_gradients_of_transformers(
    ending: str, values: dict[str, Any]
) -> None:
    its = modernbert(ending, num_labels=3, **values)
    pooled, mean = ending == "ForSequenceClassification", values.get("classifier_pooling") == "mean"
    options = {"window": 4, "text_pooling": "mean" if mean else "cls"}
    config = replace(CONFIG, options=options)
    head = ClassHead(48, 3, pooled=pooled)
    model = Model(encoder_of(config=config), {"classifier": head}, {"task": "classifier"}).eval()
    state, lost = from_names(its.state_dict(), "modernbert")
    assert not lost
    model.load_state_dict(state)
    batch = Batch.from_rows([[text(30)], [text(11, 1)]], length=30, pad=0)
    real = batch.sequence_ids >= 0
    labels = torch.tensor([2, 0]) if pooled else torch.where(real, batch.input_ids % 3, -100)
    places = torch.tensor([0, 30]) if pooled else real.flatten().nonzero().flatten()
    targets = labels if pooled else labels.flatten()[places]
    batch.labels["task"] = places, targets
    loss = model(batch)["task"].loss_sum / len(targets)
    expected = its(batch.input_ids, real.long(), labels=labels).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    pairs = [
        (head.out.weight, its.classifier.weight),
        (model.backbone.pooler.get_parameter("dense.weight"), its.head.dense.weight),
        (model.backbone.word.weight, its.model.embeddings.tok_embeddings.weight),
    ]
    for mine, other in pairs:
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_matrices_that_add_to_the_stream_start_smaller() -> None:
    layer = encoder_of(config=replace(CONFIG, hidden_size=192, num_layers=8)).layers[1]
    ratio = (layer.contract.weight.std() / layer.expand.weight.std()).item()
    assert ratio == pytest.approx(16**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "backbone.options.window: expected a number above 0, got 0"),
        ({"global_every": 0}, "backbone.options.global_every: expected a number above 0, got 0"),
        (
            {"local_rotary_base": 0.5},
            "backbone.options.local_rotary_base: expected a number above 1, got 0.5",
        ),
        ({"text_pooling": "max"}, "text_pooling"),
        ({"windows": 3}, "windows"),
    ],
)
def test_options_that_no_encoder_has_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_encoder(replace(CONFIG, options=options))
