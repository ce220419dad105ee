"""The states of packed rows are those that transformers computes of each text; layers, widths and
heads that do not fit are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.distillation.distillation import Distillation
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.inputs.batch import Batch, PackedText
from tests.helpers.hf_names import from_names

SIZES: dict[str, Any] = {"token_types": 2, "task_types": 0, "max_positions": 16, "vocab_size": 40}


def encoder(**sizes: int) -> Encoder:
    values = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, **SIZES, **sizes}
    return build_encoder(EncoderConfig(**values)).eval()


def settings(**sections: Any) -> TeacherSettings:
    return parse(TeacherSettings, {"path": "x", **sections}, "teacher")


def packed(lengths: list[list[int]]) -> Batch:
    rng = np.random.default_rng(0)
    rows = [
        [
            PackedText(input_ids=rng.integers(5, 40, size), token_type_ids=np.zeros(size, np.int64))
            for size in row
        ]
        for row in lengths
    ]
    return Batch.from_rows(rows, length=12, pad=0)


def test_states_are_those_of_transformers() -> None:
    sizes: Any = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    reference = BertModel(
        BertConfig(**sizes, intermediate_size=64, max_position_embeddings=16)
    ).eval()
    own = encoder()
    state = from_names(reference.state_dict(), "bert")[0]
    own.load_state_dict({n.removeprefix("backbone."): x for n, x in state.items()}, strict=False)
    batch = packed([[5, 4], [12]])
    wanted = WantedStates(embeddings=True, hidden=(1, 2), qkv=(2,))
    with recorded(own, wanted) as states, torch.no_grad():
        own(batch)
    for row, first, size in ((0, 0, 5), (0, 5, 4), (1, 0, 12)):
        at = slice(first, first + size)
        with torch.no_grad():
            found = reference(batch.input_ids[row : row + 1, at], output_hidden_states=True)
            keys = reference.encoder.layer[1].attention.self.key(found.hidden_states[1])
        mine = states.embeddings, states.hidden[1], states.hidden[2]
        for ours, theirs in zip(mine, found.hidden_states, strict=True):
            assert ours is not None
            torch.testing.assert_close(ours[row, at], theirs[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(states.qkv[2][row, at, 16:32], keys[0], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        own(batch)  # outside, nothing is recorded
    assert set(states.hidden) == {1, 2} and not own.layers[0]._forward_hooks


def test_a_student_of_other_sizes_learns_from_every_part() -> None:
    """Each sum is 0 for the teacher itself; padding does not count."""
    student, teacher = encoder(hidden_size=8, num_layers=1), encoder(num_layers=3)
    sections: dict[str, Any] = {
        "hidden_states": {},
        "attention": {},
        "relations": {"heads": 4, "pairs": ["qk", "vv"]},
        "embeddings": {"loss": "cosine"},
    }
    module = Distillation(settings(**sections), student, teacher.config)
    assert module.maps["hidden_states"] == [(1, 3)] == module.maps["relations"]
    assert {name for name, _ in module.named_parameters()} == {
        f"{part}.{name}" for part in ("hidden_states", "embeddings") for name in ("weight", "bias")
    }
    batch = packed([[5, 4], [3]])
    with recorded(student, module.student) as ours, recorded(teacher, module.teacher) as theirs:
        student(batch), teacher(batch)
    losses = module(ours, theirs, batch)
    assert set(losses) == set(sections) and all(float(x.detach()) > 0 for x in losses.values())
    with torch.no_grad():
        for states in (ours, theirs):
            for tensor in (*states.hidden.values(), *states.qkv.values()):
                tensor[batch.sequence_ids < 0] = 7.0
    for name, loss in module(ours, theirs, batch).items():
        torch.testing.assert_close(loss, losses[name])
    itself = Distillation(settings(**sections), teacher, teacher.config)
    with recorded(teacher, itself.student) as own:
        teacher(batch)
    assert all(abs(float(x.detach())) < 1e-6 for x in itself(own, own, batch).values())


@pytest.mark.parametrize(
    ("sections", "sizes", "message"),
    [
        ({"hidden_states": {"layers": {3: 1}}}, {}, "3 is not a layer of the student, which has 2"),
        ({"attention": {"layers": {1: 9}}}, {}, "9 is not a layer of the teacher, which has 2"),
        ({"attention": {}}, {"num_heads": 4}, "use teacher.relations, which has heads of its own"),
        ({"relations": {"heads": 3}}, {}, "3 does not divide the student's width, 16"),
    ],
)
def test_what_does_not_fit(sections, sizes, message) -> None:
    with pytest.raises(UserError, match=message):
        Distillation(settings(**sections), encoder(), encoder(**sizes).config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "names none; give `path: RUN`"),
        ({"path": "a", "models": {"b": {"path": "c"}}}, "gives path and models"),
        (
            {"models": {"b": {"path": "c"}}, "heads": {"x": "y"}},
            "heads: are those of `path`; each of `models` has",
        ),
        ({"path": "a", "relations": {"pairs": ["qx"]}}, "expected two letters of q, k and v"),
        (
            {"path": "a", "logits": {"temperature": 0}},
            "teacher.logits.temperature: expected a number above 0, got 0",
        ),
        (
            {"path": "a", "logits": {"temperature": 1e6}},
            "teacher.logits.temperature: expected at most 100, got 1000000.0",
        ),
        ({"path": "a", "logits": {"top_k": 5, "loss": "mse"}}, "top_k: needs `loss: kl`"),
        ({"path": "a", "logits": {"tempreature": 1}}, "did you mean"),
        ({"file": "a", "hidden_states": {}}, "hidden_states needs a model"),
        ({"models": {"b": {"path": "c"}}, "states_of": "d"}, "no 'd' in `models`"),
    ],
)
def test_wrong_settings(values, message) -> None:
    with pytest.raises(UserError, match=message):
        parse(TeacherSettings, values, "teacher")
