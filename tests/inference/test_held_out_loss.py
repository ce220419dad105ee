"""The masked-token loss of a model on a corpus, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForMaskedLM

from palm_ds.common.errors import UserError
from palm_ds.corpus.store import open_corpus
from palm_ds.inference.held_out_loss import RATE, masked_batches, masked_lm_loss
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import load_tokenizer, wordpiece
from palm_ds.weights.weights_folder import export_hf
from tests.helpers.small_corpus import write_small_corpus


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a Hugging Face folder of a model of its tokenizer."""
    folder = tmp_path_factory.mktemp("held_out")
    write_small_corpus(folder / "corpus")
    tokenizer = open_corpus(folder / "corpus").tokenizer()
    torch.manual_seed(1)
    sizes: Any = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 32}
    config = EncoderConfig(vocab_size=tokenizer.size, init_range=0.3, **sizes)
    backbone = build_encoder(config)
    heads = {"masked_words": MaskedLMHead(backbone)}
    model = Model(backbone, heads, {"masked_words": "masked_words"})
    export_hf(model, folder / "hf", config=config, tokenizer=tokenizer)
    return folder


def test_it_is_that_of_transformers(place: Path) -> None:
    corpus = open_corpus(place / "corpus")
    loss = masked_lm_loss(TrainedModel.open(place / "hf"), corpus, examples=40, length=32)
    reference = AutoModelForMaskedLM.from_pretrained(place / "hf").eval()
    total, right, count, real = 0.0, 0.0, 0, 0
    for batch in masked_batches(corpus, examples=40, length=32, rows=1):
        at, targets = next(iter(batch.labels.values()))
        for sequence in range(int(batch.sequence_ids.max()) + 1):
            inside = (batch.sequence_ids == sequence).flatten()
            places = inside.nonzero().flatten()
            with torch.no_grad():
                ids = batch.input_ids.flatten()[places][None]
                types = batch.token_type_ids.flatten()[places][None]
                logits = reference(input_ids=ids, token_type_ids=types).logits[0]
            own = inside[at]
            mine = logits[torch.searchsorted(places, at[own])]
            total += float(F.cross_entropy(mine, targets[own], reduction="sum"))
            right += float((mine.argmax(-1) == targets[own]).sum())
            count, real = count + int(own.sum()), real + len(places) - 2
    assert loss.tokens == count and abs(count / real - RATE) < 0.02
    assert loss.nats == pytest.approx(total / count, abs=1e-5)
    assert loss.accuracy == pytest.approx(right / count)
    assert loss.perplexity == pytest.approx(torch.tensor(loss.nats).exp().item(), rel=1e-5)


def test_batches_do_not_matter_and_held_out_texts_are_others(place: Path) -> None:
    model, corpus = TrainedModel.open(place / "hf"), open_corpus(place / "corpus")
    every = masked_lm_loss(model, corpus, length=32)
    small = masked_lm_loss(replace(model, batch_tokens=32), corpus, length=32)
    assert small.tokens == every.tokens and small.nats == pytest.approx(every.nats, abs=1e-6)
    held = masked_lm_loss(model, corpus, length=32, held_out=0.2)
    assert 0 < held.tokens < every.tokens / 2


def test_another_tokenizer_is_refused(place: Path, tmp_path: Path) -> None:
    tokens = load_tokenizer(place / "hf").tokens(range(5))
    model = replace(
        TrainedModel.open(place / "hf"), given_tokenizer=wordpiece([*tokens, "a", "b"], lower=True)
    )
    with pytest.raises(UserError, match="prepared with a tokenizer other than that of"):
        masked_lm_loss(model, open_corpus(place / "corpus"))
