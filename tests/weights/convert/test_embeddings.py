"""Tables that grow and shrink: existing inputs give the same outputs, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.shared_embeddings import EmbeddingSharing, merged_tables, split_tables
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.replaced_tokens import Generator, ReplacedTokenHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.convert.embeddings import (
    POSITIONS,
    WORDS,
    ResizedState,
    add_token_rows,
    pad_vocab,
    resizable_names,
    resize_positions,
)
from tests.helpers.small_configs import SMALL, roberta_of

CONFIG = replace(SMALL, vocab_size=40)
ROBERTA = roberta_of(CONFIG)
DOCUMENTS = replace(CONFIG, kind="ernie_doc", task_types=0)
UNTIED = replace(CONFIG, tie_word_embeddings=False)
BIASES = ("heads.one.bias", "heads.two.bias")
USED = 37  # of the 40 rows


def net(config: EncoderConfig, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    backbone = build_encoder(config)
    heads: dict[str, torch.nn.Module] = {
        "one": MaskedLMHead(backbone),
        "two": MaskedLMHead(backbone),
        "order": ClassHead(16, 40, pooled=True),  # as many classes as there are words
    }
    model = Model(backbone, heads, {name: name for name in heads}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rebuilt(changed: ResizedState) -> Model:
    model = Model(
        backbone := build_encoder(changed.config),
        {
            "one": MaskedLMHead(backbone),
            "two": MaskedLMHead(backbone),
            "order": ClassHead(16, 40, pooled=True),
        },
        {"one": "one", "two": "two", "order": "order"},
    )
    model.load_state_dict(changed.state)
    return model.eval()


@torch.no_grad()
def outputs(model: Model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows and masked-word logits of a text."""
    hidden = model.backbone(batch_of(ids, model.backbone.config.pad))[0]
    return hidden, model.heads["one"].logits(hidden)  # type: ignore[operator]


def batch_of(ids: list[int], pad: int) -> Batch:
    row = np.array(ids)
    text = Example(input_ids=row, token_type_ids=row * 0, source_offsets=row, annotations={})
    return collate([[(text, 0)]], length=len(ids), pad=pad)


def assert_the_same(before: Model, after: Model, ids: list[int], words: int) -> None:
    (old, old_logits), (new, new_logits) = outputs(before, ids), outputs(after, ids)
    assert torch.equal(old, new)
    torch.testing.assert_close(old_logits[:, :words], new_logits[:, :words], atol=1e-6, rtol=0)


IDS = [5, 6, 36, 8, 9, 5]


# ---- words ----


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, UNTIED], ids=["ernie", "roberta", "untied"])
@pytest.mark.parametrize("multiple", [1, 8, 37, 64])
def test_another_number_of_rows(config: EncoderConfig, multiple: int) -> None:
    model = net(config)
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    changed = pad_vocab(state, config, used=USED, multiple=multiple)
    size = {1: 37, 8: 40, 37: 37, 64: 64}[multiple]
    assert changed.config == replace(config, vocab_size=size)
    assert changed.state[WORDS].shape == (size, 16)
    assert {len(changed.state[name]) for name in BIASES} == {size}
    assert changed.state["heads.order.out.bias"] is state["heads.order.out.bias"]
    assert_the_same(model, rebuilt(changed), IDS, USED)
    assert all(torch.equal(before[name], value) for name, value in state.items())
    assert f"40 rows, now {size}, a multiple of {multiple}" in changed.summary


def test_padding_rows_take_no_probability() -> None:
    model = net(CONFIG)
    state = model.state_dict()
    for name in BIASES:
        state[name][3] = -30.0
    changed = pad_vocab(state, CONFIG, used=USED, multiple=64)
    assert changed.state["heads.one.bias"][40:].eq(-30).all()
    _, logits = outputs(rebuilt(changed), IDS)
    assert logits.softmax(-1)[:, 40:].sum() < 1e-8
    drawn = changed.state[WORDS][40:]
    assert 0 < drawn.abs().max() <= 2 * CONFIG.init_range
    again = pad_vocab(state, CONFIG, used=USED, multiple=64)
    other = pad_vocab(state, CONFIG, used=USED, multiple=64, seed=1)
    assert torch.equal(drawn, again.state[WORDS][40:])
    assert not torch.equal(drawn, other.state[WORDS][40:])


@pytest.mark.parametrize("config", [CONFIG, ROBERTA, UNTIED], ids=["ernie", "roberta", "untied"])
def test_new_tokens_in_free_rows_and_beyond(config: EncoderConfig) -> None:
    model = net(config)
    state = model.state_dict()
    rows = {4: [], 37: [6, 8], 38: [], 39: [9], 40: [5, 5, 6], 41: []}
    changed = add_token_rows(state, config, rows, used=USED)
    assert changed.config.vocab_size == 42
    assert_the_same(model, rebuilt(changed), IDS, 4)
    tables = [name for name in state if name == WORDS or name.endswith(".decoder")]
    assert len(tables) == (1 if config.tie_word_embeddings else 3)
    for name in (*tables, *BIASES):
        old, new = state[name], changed.state[name]
        torch.testing.assert_close(new[37], (old[6] + old[8]) / 2)
        assert torch.equal(new[39], old[9])
        torch.testing.assert_close(new[40], (2 * old[5] + old[6]) / 3)
        kept = [i for i in range(37) if i != 4]
        assert torch.equal(new[kept], old[kept])
    drawn = changed.state[WORDS][[4, 38, 41]]
    assert len(torch.unique(drawn, dim=0)) == 3 and drawn.abs().max() <= 2 * config.init_range
    mean = state["heads.two.bias"][:USED].mean()
    torch.testing.assert_close(changed.state["heads.two.bias"][41], mean)
    assert "6 added, 3 initialized as the mean of others, 3 at random" in changed.summary
    assert "1 in rows of unused tokens, 3 in free rows beyond the vocabulary" in changed.summary
    assert changed.summary.endswith("40 rows, now 42")


def test_growing_and_trimming_restores_the_table() -> None:
    state = net(replace(CONFIG, vocab_size=USED)).state_dict()
    config = replace(CONFIG, vocab_size=USED)
    grown = pad_vocab(state, config, used=USED, multiple=64)
    back = pad_vocab(grown.state, grown.config, used=USED)
    assert back.config == config
    assert all(torch.equal(value, back.state[name]) for name, value in state.items())


def test_half_precision_is_kept_and_no_head_is_needed() -> None:
    state = {WORDS: net(CONFIG).state_dict()[WORDS].bfloat16()}
    changed = add_token_rows(state, CONFIG, {40: [5, 6], 41: []}, used=USED)
    fitted = pad_vocab(changed.state, changed.config, used=42, multiple=64)
    assert fitted.state[WORDS].dtype == torch.bfloat16 and fitted.state[WORDS].shape == (64, 16)
    assert torch.equal(fitted.state[WORDS][:37], state[WORDS][:37])


@pytest.mark.parametrize("sharing", ["shared", "gradient_disentangled", "none"])
def test_a_generator_is_resized_with_its_discriminator(sharing: EmbeddingSharing) -> None:
    """Both compute the same as before for old tokens at old positions."""
    model = detector(CONFIG, sharing)
    state = merged_tables(model.state_dict())
    needed = resizable_names(state)
    tables = [f"heads.rtd.generator.encoder.{name}.weight" for name in ("word", "position")]
    own = [] if sharing == "shared" else tables
    assert {*needed} == {WORDS, POSITIONS, "heads.rtd.generator.words.bias", *own}
    changed = add_token_rows({x: state[x] for x in needed}, CONFIG, {40: [5, 6], 41: []}, used=USED)
    changed = pad_vocab(changed.state, changed.config, used=42, multiple=64)
    changed = resize_positions(changed.state, changed.config, 30)
    grown = detector(changed.config, sharing)
    names = grown.state_dict()
    grown.load_state_dict(split_tables({**state, **changed.state}, names))
    batch = batch_of(IDS, CONFIG.pad)
    with torch.no_grad():
        for one, other in ((model, grown), (generator_of(model), generator_of(grown))):
            assert torch.equal(one.backbone(batch), other.backbone(batch))
        rows = torch.randn(3, 16)
        before, after = (generator_of(x).heads["words"].logits(rows) for x in (model, grown))
    torch.testing.assert_close(before, after[:, :40], atol=1e-6, rtol=0)


def detector(config: EncoderConfig, sharing: EmbeddingSharing) -> Model:
    """An encoder that detects what its generator replaces."""
    torch.manual_seed(2)
    backbone = build_encoder(config)
    generator = Generator(config, backbone, sharing=sharing)
    model = Model(backbone, {"rtd": ReplacedTokenHead(backbone, generator)}, {"rtd": "rtd"}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def generator_of(model: Model) -> Model:
    generator = model.generators["rtd"]
    return Model(generator.encoder, {"words": generator.words}, {"words": "words"}).eval()


# ---- positions ----


@pytest.mark.parametrize("config", [CONFIG, ROBERTA], ids=["ernie", "roberta"])
@pytest.mark.parametrize("longest", [1, 6, 20, 21, 40, 47])
def test_tiled_and_truncated_positions(config: EncoderConfig, longest: int) -> None:
    model = net(config)
    state = model.state_dict()
    changed = resize_positions(state, config, longest)
    offset = config.position_offset
    assert changed.config == replace(config, max_positions=longest + offset)
    assert changed.config.max_length == longest
    old, new = state[POSITIONS], changed.state[POSITIONS]
    assert torch.equal(new[:offset], old[:offset])
    for i in range(longest):
        assert torch.equal(new[offset + i], old[offset + i % 20])
    assert_the_same(model, rebuilt(changed), IDS[:longest], 40)
    assert f"positions: 20, now {longest}" in changed.summary


@pytest.mark.parametrize("config", [CONFIG, ROBERTA], ids=["ernie", "roberta"])
def test_interpolated_positions(config: EncoderConfig) -> None:
    state, offset = net(config).state_dict(), config.position_offset
    double = resize_positions(state, config, 40, how="interpolate").state[POSITIONS]
    old = state[POSITIONS]
    assert torch.equal(double[:offset], old[:offset])
    assert torch.equal(double[offset::2], old[offset:])  # a text with a gap after every token
    torch.testing.assert_close(double[offset + 1], (old[offset] + old[offset + 1]) / 2)
    assert torch.equal(double[-1], old[-1])
    odd = resize_positions(state, config, 33, how="interpolate")
    table = odd.state[POSITIONS].clamp(old[offset:].min(), old[offset:].max())
    assert torch.equal(table[offset:], odd.state[POSITIONS][offset:])
    assert "train further" in odd.summary and outputs(rebuilt(odd), [5] * 33)[0].isfinite().all()


@torch.no_grad()
def test_interpolated_positions_contain_the_old_ones() -> None:
    model = net(CONFIG)
    stretched = rebuilt(resize_positions(model.state_dict(), CONFIG, 60, how="interpolate"))
    batch = batch_of(IDS, 0)
    wide = replace(batch, position_ids=batch.position_ids * 3)
    assert torch.equal(model.backbone(batch), stretched.backbone(wide))


# ---- mistakes ----


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in net(CONFIG).state_dict().items() if key != name}


def with_bias(size: int) -> dict[str, torch.Tensor]:
    return net(CONFIG).state_dict() | {"heads.two.bias": torch.zeros(size)}


WRONG = {
    "no word table": (lambda: pad_vocab(without(WORDS), CONFIG, used=37), f"{WORDS}: is missing"),
    "no positions": (
        lambda: resize_positions(without(POSITIONS), CONFIG, 30),
        f"{POSITIONS}: is missing",
    ),
    "another config": (
        lambda: pad_vocab(without(""), replace(CONFIG, vocab_size=41), used=37),
        r"has shape \(40, 16\), the config expects 41",
    ),
    "other positions": (
        lambda: resize_positions(without(""), replace(CONFIG, max_positions=19), 30),
        r"has shape \(20, 16\), the config expects 19",
    ),
    "a bias of another size": (
        lambda: pad_vocab(with_bias(39), CONFIG, used=37),
        "heads.two.bias: has 39 values for 40 tokens",
    ),
    "a larger vocabulary": (
        lambda: pad_vocab(without(""), CONFIG, used=41),
        "has 40 rows, which do not fit a vocabulary of 41",
    ),
    "trimming all": (lambda: pad_vocab(without(""), CONFIG, used=0), "a vocabulary of 0"),
    "no multiple": (
        lambda: pad_vocab(without(""), CONFIG, used=37, multiple=0),
        "must be from 1 to 65,536",
    ),
    "a mean of nothing": (
        lambda: add_token_rows(without(""), CONFIG, {37: [5, 38]}, used=37),
        "token 37: cannot be initialized from row 38; the vocabulary has 37 tokens",
    ),
    "a row before the first": (
        lambda: add_token_rows(without(""), CONFIG, {-1: []}, used=37),
        "row numbers start at 0",
    ),
    "no length": (lambda: resize_positions(without(""), CONFIG, 0), "from 1 to 131,072, got 0"),
    "distances": (
        lambda: resize_positions(net(DOCUMENTS).state_dict(), DOCUMENTS, 30),
        "ernie_doc reads documents of any length, in windows of 20 tokens with a memory",
    ),
    "no such way": (
        lambda: resize_positions(without(""), CONFIG, 30, how="tiles"),
        'no method "tiles"; did you mean "tile"',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_clear_line(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_tables_lists_the_needed_parameters() -> None:
    assert resizable_names(net(CONFIG).state_dict()) == [WORDS, POSITIONS, *BIASES]
