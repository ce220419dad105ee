"""ERNIE-ViL's two streams: packed rows, texts without images, dropout by keys, mistakes. Its
numbers are compared with ERNIE's in tests/end_to_end/test_image_encoder_weights.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.kinds.ernie_vil import ErnieVil
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.pseudo_tokens import with_pseudo_tokens
from palm_ds.model.heads.replaced_tokens import Generator
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.regions import PackedRegions
from palm_ds.model.kernels import Kernels
from palm_ds.train.evaluate.probe import Probe

OPTIONS = {
    "region_size": 6,
    "image_hidden_size": 24,
    "image_heads": 2,
    "image_intermediate_size": 20,
    "co_hidden_size": 12,
    "co_heads": 3,
    "text_layers_before": [1, 2],
    "image_layers_before": [0, 1],
}
COUNTER = Kernels(attention="plain", dropout="counter")


def encoder_of(*, recompute: bool = False, kernels: Kernels = COUNTER, **options: Any) -> ErnieVil:
    torch.manual_seed(2)
    config = EncoderConfig.from_dict(
        {
            "kind": "ernie_vil",
            "vocab_size": 30,
            "hidden_size": 16,
            "num_layers": 3,
            "num_heads": 2,
            "init_range": 0.2,
            "options": {**OPTIONS, **options},
        }
    )
    encoder = build_encoder(config, kernels, recompute=recompute)
    assert isinstance(encoder, ErnieVil)
    return encoder


def text_of(tokens: int, regions: int, seed: int) -> PackedText:
    rng = np.random.default_rng(seed)
    places = tokens + regions
    image = PackedRegions(
        features=rng.normal(size=(regions, 6)),
        locations=rng.uniform(size=(regions, 5)),
        places=np.arange(tokens, places),
    )
    return PackedText(
        input_ids=rng.integers(5, 30, places),
        token_type_ids=np.zeros(places, np.int64),
        position_ids=np.concatenate([np.arange(tokens), np.zeros(regions, np.int64)]),
        regions=image if regions else None,
    )


TEXTS = [text_of(5, 3, 1), text_of(4, 0, 2), text_of(3, 4, 3)]
ROWS = [TEXTS[:2], TEXTS[2:]]


def batch_of(rows: list[list[PackedText]], length: int = 14) -> Batch:
    return Batch.from_rows(rows, length=length, pad=0)


@pytest.mark.parametrize("attention", ["plain", "sdpa", "tiles"])
def test_a_text_in_a_row_is_that_text_alone(attention: str) -> None:
    encoder = encoder_of(kernels=Kernels(attention=attention)).eval()
    with torch.no_grad():
        row = encoder(batch_of([TEXTS], 22))[0]
        assert row.shape == (22, 24) and row.isfinite().all()
        start = 0
        for text in TEXTS:
            end = start + len(text.input_ids)
            alone = encoder(batch_of([[text]], len(text.input_ids) + 2))[0, : end - start]
            assert torch.allclose(row[start:end], alone, atol=1e-5)
            start = end
        at = torch.tensor([7, 0, 15])
        assert torch.equal(encoder(batch_of([TEXTS], 22), at), row[at])
    assert (row[:5, 16:] == 0).all() and (encoder.of_texts(row).shape[-1] == 16)


def test_tokens_read_regions_and_regions_tokens() -> None:
    encoder = encoder_of().eval()
    first = TEXTS[0]
    assert first.regions is not None
    other = replace(first.regions, features=first.regions.features + 1)
    changed = replace(first, input_ids=np.append(first.input_ids[:-4] + 1, first.input_ids[-4:]))
    with torch.no_grad():
        before, image, text = (
            encoder(batch_of([[x]]))[0] for x in (first, replace(first, regions=other), changed)
        )
    assert not torch.allclose(before[0], image[0], atol=1e-4)
    assert not torch.allclose(before[5], text[5], atol=1e-4)


def test_masks_follow_from_keys_and_recomputation_changes_nothing() -> None:
    """Of a batch of two rows, or two of one; all parameters have gradients, also without images."""
    gradients = []
    for recompute in (False, True):
        encoder = encoder_of(recompute=recompute).train()
        together = encoder(batch_of(ROWS).with_dropout_key(5))
        apart = [
            encoder(replace(batch_of([row]).with_dropout_key(5), first_row=number))
            for number, row in enumerate(ROWS)
        ]
        assert torch.allclose(together, torch.cat(apart), atol=1e-6)
        together.sum().backward()
        found = [x.grad for x in encoder.layers.parameters() if x.grad is not None]
        gradients.append(torch.cat([x.flatten() for x in found]))
    assert torch.equal(*gradients)
    encoder = encoder_of().train()
    encoder(batch_of([TEXTS[1:2]])).sum().backward()
    poolers = ("pooler.", "region_pooler.")
    lost = [
        x for x, y in encoder.named_parameters() if y.grad is None and not x.startswith(poolers)
    ]
    assert lost == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_layers_before": [1, 1]}, "must be ascending and equally many"),
        ({"image_layers_before": [0]}, "must be ascending and equally many"),
        ({"text_layers_before": [0, 1]}, "must end with 2, one less than num_layers"),
        ({"co_heads": 5}, "co_heads: 5 does not divide co_hidden_size"),
        ({"co_width": 5}, "co_width"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoder_of(**options)


def test_usual_places_and_heads_of_whole_texts() -> None:
    usual = encoder_of(text_layers_before=[], image_layers_before=[])
    assert usual.blocks == [(0, 0), (1, 1), (2, 2)] and len(usual.image_layers) == 3
    with pytest.raises(UserError, match="its pooler returns 12 values"):
        usual.pools(ClassHead(16, 2, pooled=True))
    assert encoder_of(co_hidden_size=16, co_heads=2).pools(ClassHead(16, 2, pooled=True))


def test_generators_guesses_and_probes_read_vectors_of_tokens() -> None:
    """Those of regions are wider, and all are padded to their width."""
    encoder, places = encoder_of(), torch.tensor([1, 2])
    batch = Batch.from_rows([[text_of(5, 0, 1)]], length=8, pad=0)
    generator = Generator(encoder.config, encoder, sharing="none")
    (sampled,) = generator(batch, [(places, torch.tensor([[5, 9], [6, 9]]))])
    assert len(sampled.tokens) == 2
    head = MaskedLMHead(encoder)
    assert with_pseudo_tokens(encoder, {"guess": head}, {"guess": 0.0}, batch) is not batch
    probe = cast(Probe, SimpleNamespace(pooling="mean"))
    assert Probe.vectors_of(probe, encoder, batch).shape == (0, 16)
