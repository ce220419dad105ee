"""Running two sides: equal models are found equal, and every kind of difference is detected."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import wordpiece
from palm_ds.weights.convert import parity as proof
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo, TensorEntry
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds
from palm_ds.weights.formats.tensor_files import in_memory_entry
from palm_ds.weights.weights_folder import export_hf
from tests.helpers.noisy_model import noisy_model
from tests.helpers.small_configs import SMALL, bert_of, letters, roberta_of

CONFIG = replace(SMALL, vocab_size=30)
BERT = bert_of(CONFIG)
ROBERTA = roberta_of(CONFIG)
HEADS = {
    "masked_words": HeadInfo(kind="masked_words", pooled=False),
    "next_sentence": HeadInfo(kind="classes", classes=2),
    "tags": HeadInfo(kind="classes", classes=4, pooled=False),
}
WORDS = letters("t")

PADDED_AT_1 = wordpiece(["[CLS]", "[PAD]", "[SEP]", "[MASK]", "[UNK]", *"abcdefgh"], lower=True)


def model(config: EncoderConfig = CONFIG) -> Model:
    return noisy_model(config, "masked_words", {"next_sentence": (2, True), "tags": (4, False)})


def contents(
    config: EncoderConfig = CONFIG, state: Mapping[str, torch.Tensor] | None = None
) -> CheckpointContents:
    state = model(config).state_dict() if state is None else state
    entries: dict[str, TensorEntry] = {name: in_memory_entry(name, x) for name, x in state.items()}
    return CheckpointContents(
        path=Path("here"), format="test", config=config, entries=entries, heads=HEADS
    )


@pytest.mark.parametrize("config", [CONFIG, BERT, ROBERTA], ids=["ernie", "bert", "roberta"])
@pytest.mark.parametrize("task_id", [0, 2])
def test_our_encoder_and_transformers_agree(
    config: EncoderConfig, task_id: int, tmp_path: Path
) -> None:
    if task_id and not config.task_types:
        pytest.skip("has no tasks")
    export_hf(model(config), tmp_path / "hf", config=config, task_id=task_id)
    written = huggingface.open_contents(tmp_path / "hf")
    ours = contents(config)
    inputs = inputs_for(ours, written, PADDED_AT_1 if config is ROBERTA else WORDS)
    found = compare(in_palm_ds(ours, task_id=task_id), in_transformers(written), inputs)
    assert found.passed and found.worst.largest < 1e-5
    names = {each.name for each in found.differences}
    assert {"embeddings", "layer 1", "layer 2", "pooled", "head masked_words"} <= names
    assert ("head next_sentence" in names) == (config is not ROBERTA)
    assert {each.kind for each in found.differences} == {"random", "real"}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> CheckpointContents:
    state = dict(model().state_dict())
    state[name] = change(state[name])
    return contents(state=state)


MISTAKES = {
    "eps": lambda: contents(
        replace(CONFIG, layer_norm_eps=1e-12 if CONFIG.layer_norm_eps > 1e-6 else 1e-3)
    ),
    "activation": lambda: contents(replace(CONFIG, activation="relu")),
    "attention heads": lambda: contents(replace(CONFIG, num_heads=4)),
    "segments": lambda: changed("backbone.segment.weight", lambda x: x.flip(0)),
    "a matrix turned": lambda: changed("backbone.layers.1.project.weight", lambda x: x.T),
    "query and key": lambda: changed("backbone.layers.0.qkv.bias", lambda x: x.roll(16)),
    "one word": lambda: changed("backbone.word.weight", lambda x: x.roll(1, 0)),
    "positions": lambda: changed("backbone.position.weight", lambda x: x.roll(1, 0)),
    "pooler": lambda: changed("backbone.pooler.dense.bias", lambda x: x + 1e-3),
    "a head": lambda: changed("heads.masked_words.bias", lambda x: x + 1e-3),
    "tags": lambda: changed("heads.tags.out.weight", lambda x: x * 1.01),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_differences_are_detected(mistake: str) -> None:
    right, wrong = contents(), MISTAKES[mistake]()
    inputs = inputs_for(right, right, None)
    if mistake == "attention heads":
        with pytest.raises(UserError, match="has num_heads 4, but .* has 2"):
            compare(in_palm_ds(right), in_palm_ds(wrong), inputs)
        return
    if mistake == "eps":  # an eps counts where numbers are small
        small = {n: x * 0.01 if ".norm" not in n else x for n, x in model().state_dict().items()}
        right, wrong = contents(state=small), contents(wrong.config, small)
    found = compare(in_palm_ds(right), in_palm_ds(wrong), inputs)
    assert not found.passed, found
    assert compare(in_palm_ds(right), in_palm_ds(right), inputs).passed


def test_another_task_id_gives_other_outputs() -> None:
    ours = contents()
    inputs = inputs_for(ours, ours, None)
    assert not compare(in_palm_ds(ours), in_palm_ds(ours, task_id=1), inputs).passed


def test_nan_values_are_named() -> None:
    broken = changed("backbone.norm.bias", lambda x: x.index_fill(0, torch.tensor([3]), math.nan))
    inputs = inputs_for(contents(), broken, None)
    with pytest.raises(UserError, match=r"backbone\.norm\.bias: has values that are NaN"):
        compare(in_palm_ds(contents()), in_palm_ds(broken), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_weights_have_a_larger_tolerance(dtype: torch.dtype) -> None:
    exact = contents()
    half = contents(state={n: x.to(dtype) for n, x in model().state_dict().items()})
    inputs = inputs_for(exact, half, None)
    found = compare(in_palm_ds(exact), in_palm_ds(half), inputs)
    assert found.tolerance == proof.TOLERANCE[dtype]
    assert found.passed and found.worst.largest > 1e-5
    strict = compare(in_palm_ds(exact), in_palm_ds(half), inputs, tolerance=1e-5)
    assert not strict.passed


def test_a_tokenizer_of_another_model_is_refused() -> None:
    many = wordpiece([*WORDS.tokens(range(WORDS.size)), *(f"w{i}" for i in range(20))], lower=True)
    ours = contents()
    with pytest.raises(UserError, match="the token embeddings have 30 rows"):
        inputs_for(ours, ours, many, ["w18 a"])


def test_without_a_pooler_the_rest_is_compared() -> None:
    state = {n: x for n, x in model().state_dict().items() if ".pooler." not in n}
    ours = contents(state=state)
    found = compare(in_palm_ds(ours), in_palm_ds(ours), inputs_for(ours, ours, None))
    names = {each.name for each in found.differences}
    assert "pooled" not in names and "head next_sentence" not in names and "head tags" in names


def test_the_summary_of_a_comparison() -> None:
    ours = contents()
    same = compare(in_palm_ds(ours), in_palm_ds(ours), inputs_for(ours, ours, WORDS))
    assert str(same).startswith("no difference; palm_ds's encoder with test")
    assert same.record()["passed"] and same.record()["largest"] == 0
    other = in_palm_ds(changed("heads.tags.out.bias", lambda x: x + 0.5))
    found = compare(in_palm_ds(ours), other, inputs_for(ours, ours, WORDS))
    assert "(head tags" in str(found) and found.worst.largest == pytest.approx(0.5)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_the_memory_of_one_side_is_returned() -> None:
    """Including memory freed between live blocks, which glibc keeps."""
    pieces = [b"x" * 100_000 for _ in range(1000)]
    kept = pieces[::50]
    del pieces
    before = resident()
    with proof._releasing_memory():
        cycle = [b"x" * 50_000_000]
        cycle.append(cycle)
        del cycle
    assert resident() < before - 70_000_000
    assert len(kept) == 20


def resident() -> int:
    """Bytes of this process's memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("RssAnon"))
