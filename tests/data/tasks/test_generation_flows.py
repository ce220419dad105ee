"""Sources, targets and queries: by hand, and against separate passes of the paper's equations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example, build_input, collate
from palm_ds.data.tasks.generation_flows import FlowOptions, random_spans, same_head
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokens import SpecialTokens, TokenSpan
from tests.helpers.three_flows import Text, losses

PAD, UNK, CLS, SEP, MASK, ATTN, NOISE = range(7)
VOCABULARY = SpecialTokens(
    size=40, pad=PAD, cls=CLS, sep=SEP, mask=MASK, unk=UNK, regular=np.arange(7, 40)
)
BOTH = replace(VOCABULARY, attn=ATTN, noise=NOISE)
TARGET = np.array([CLS, 21, 22, 23, SEP])
SPANS = np.array([0, 1, 1, 2])  # 21 | 22 23 | [SEP]


def source(*texts: list[int]) -> Example:
    return build_input(
        [TokenSpan(7 * n, np.array(text)) for n, text in enumerate(texts)], VOCABULARY
    )


def built(
    options: FlowOptions, *texts: list[int], vocabulary: SpecialTokens = VOCABULARY
) -> tuple[Example, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return options.assemble(source(*texts), TARGET, SPANS, vocabulary, rng)


def test_an_example_by_hand() -> None:
    example, (where, targets) = built(FlowOptions(noise_rate=0.0, word_weight=0.5), [11, 12])
    assert example.input_ids.tolist() == [CLS, 11, 12, SEP, CLS, 21, 22, 23, SEP, *[MASK] * 8]
    assert example.token_type_ids.tolist() == [0] * 4 + [3] * 13
    assert example.source_offsets.tolist() == [-1, 0, 1, -1, *[-1] * 13]
    assert example.position_ids is not None and example.visibility is not None
    assert example.position_ids.tolist() == [*range(9), 5, 6, 7, 8, 5, 6, 7, 8]
    assert example.visibility.limit.tolist() == [
        0, 0, 0, 0, 1, 2, 3, 4, 5,  # source and target
        1, 2, 3, 4,  # word by word: what comes before each
        1, 2, 2, 4,  # span by span: what comes before its span
    ]  # fmt: skip
    assert where.tolist() == list(range(9, 17))
    assert targets.tolist() == [[t, f] for f in (0, 1) for t in (21, 22, 23, SEP)]


def test_next_tokens_by_hand() -> None:
    """UNIMO's examples: no queries, no noise, and positions that begin again with the target."""
    options = FlowOptions(decoder="next_token", end="mask", positions="restart", target_segment=1)
    example, (where, targets) = built(options, [11, 12])
    assert example.input_ids.tolist() == [CLS, 11, 12, SEP, *TARGET]
    assert example.token_type_ids.tolist() == [0] * 4 + [1] * 5
    assert example.position_ids is not None and example.visibility is not None
    assert example.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    for side in (example.visibility.order, example.visibility.limit):
        assert side.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert where.tolist() == [4, 5, 6, 7] and targets.tolist() == [21, 22, 23, SEP]
    assert (options.end_token(VOCABULARY), options.query_token(VOCABULARY)) == (MASK, None)
    assert options.query_count(np.array([5])).tolist() == [0]
    with pytest.raises(UserError, match="t.word_weight: 0.5, but with decoder: next_token"):
        FlowOptions(decoder="next_token", word_weight=0.5).check_flows("t")


@pytest.mark.parametrize(("weight", "limits"), [(1.0, [1, 2, 3, 4]), (0.0, [1, 2, 2, 4])])
def test_a_flow_without_weight_has_no_queries(weight: float, limits: list[int]) -> None:
    options = FlowOptions(noise_rate=0.0, word_weight=weight)
    example, (where, targets) = built(options, [11])
    assert example.visibility is not None
    assert example.visibility.limit[-4:].tolist() == limits and len(example) == 3 + 5 + 4
    assert where.tolist() == [8, 9, 10, 11] and targets.tolist() == [21, 22, 23, SEP]
    assert options.query_count(np.array([5, 2])).tolist() == [4, 1]


def test_positions_restart_as_in_ernie_s_reader() -> None:
    options = FlowOptions(positions="restart", noise_rate=0.0)
    example, _ = built(options, [11, 12], [13])
    assert example.token_type_ids[:6].tolist() == [0, 0, 0, 0, 1, 1]
    assert example.position_ids is not None
    assert example.position_ids.tolist() == [0, 1, 2, 3, 1, 2, *range(5), 1, 2, 3, 4]


def test_noise_is_in_the_context_and_never_in_the_labels() -> None:
    rng, target = np.random.default_rng(0), np.array([CLS, *[21] * 4000, SEP])
    options = FlowOptions(noise_rate=0.3)
    example, (_, labels) = options.assemble(source([11]), target, np.arange(4001), VOCABULARY, rng)
    context = example.input_ids[4 : 4 + 4000]
    assert example.input_ids[3] == CLS and (labels[:-1] == 21).all()
    assert abs((context != 21).mean() - 0.3 * 32 / 33) < 0.03 and context.min() >= 7
    assert len(np.unique(context)) == 33
    noisy = replace(options, noise="token")
    example, _ = noisy.assemble(source([11]), target, np.arange(4001), BOTH, rng)
    assert set(example.input_ids[4:4004]) == {21, NOISE}


@pytest.mark.parametrize(
    ("query", "vocabulary", "token"),
    [("auto", VOCABULARY, MASK), ("auto", BOTH, ATTN), ("mask", BOTH, MASK), ("attn", BOTH, ATTN)],
)
def test_queries_are_attn_tokens_where_there_are_any(
    query: str, vocabulary: SpecialTokens, token: int
) -> None:
    options = FlowOptions(query=query)  # type: ignore[arg-type]
    example, (where, _) = built(options, [11], vocabulary=vocabulary)
    assert (example.input_ids[where] == token).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_rate": 1.2}, "noise_rate: expected at most 1, got 1.2"),
        ({"word_weight": -0.1}, "word_weight: expected 0 or more, got -0.1"),
        ({"smoothing": 1.0}, "smoothing: expected a number below 1, got 1.0"),
        ({"target_segment": -1}, "target_segment: expected 0 or more, got -1"),
        ({"query": "attn"}, r"tasks.t.query: the vocabulary has no \[ATTN\]; use mask"),
        ({"noise": "token"}, r"tasks.t.noise: the vocabulary has no \[NOISE\]; use random"),
    ],
)
def test_settings_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FlowOptions(**changes).check_vocabulary(VOCABULARY, "tasks.t")


def test_a_head_is_shared_with_what_writes_alike() -> None:
    same_head(FlowOptions(), FlowOptions(noise_rate=0.1), "tasks.t")
    with pytest.raises(UserError, match="`smoothing` and `word_weight` must be"):
        same_head(FlowOptions(), FlowOptions(smoothing=0.1), "tasks.t")
    with pytest.raises(UserError, match="does not write texts"):
        same_head(FlowOptions(), object(), "tasks.t")


def test_random_spans_have_every_length() -> None:
    spans = random_spans(3000, 3, np.random.default_rng(0))
    sizes = np.bincount(spans)[:-1]
    assert (np.diff(spans) >= 0).all() and len(spans) == 3000
    np.testing.assert_allclose(np.bincount(sizes)[1:] / len(sizes), 1 / 3, atol=0.04)


@dataclass(frozen=True, kw_only=True)
class Case:
    texts: tuple[list[int], ...]
    target: list[int]
    spans: list[int]


CASES = [
    Case(texts=([11, 12, 13],), target=[21, 22, 23, 24, SEP], spans=[2, 1, 1, 1]),
    Case(texts=([11], [14, 15]), target=[30, 31, 32, SEP], spans=[3, 1]),
]


@pytest.mark.parametrize("attention", ["plain", "tiles", "sdpa"])
@pytest.mark.parametrize("positions", ["continuous", "restart"])
def test_one_packed_forward_is_the_three_flows_of_the_paper(attention: str, positions: str) -> None:
    torch.manual_seed(1)
    config = EncoderConfig(
        vocab_size=40, hidden_size=16, num_layers=3, num_heads=2, token_types=4, task_types=0
    )
    encoder = build_encoder(config, Kernels(attention=attention, masked_lm_loss="chunked"))
    options = FlowOptions(noise_rate=0.5, word_weight=0.5, positions=positions)  # type: ignore[arg-type]
    head = options.head(encoder)
    model = Model(encoder, {"t": head}, {"t": "t"}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    rows, expected = [], 0.0
    for seed, case in enumerate(CASES):
        target = np.array([CLS, *case.target])
        spans = np.repeat(np.arange(len(case.spans)), case.spans)
        rng = np.random.default_rng(seed)
        example, example.labels["t"] = options.assemble(
            source(*case.texts), target, spans, BOTH, rng
        )
        rows.append([(source([17] * 5), 0), (example, 0)])  # an ordinary text in the row, too
        many, added = len(source(*case.texts)), len(target)
        assert example.position_ids is not None
        parts = [example.input_ids, example.position_ids, example.token_type_ids]
        given, context = (
            Text(*(torch.from_numpy(part[inside]) for part in parts))
            for inside in (slice(many), slice(many, many + added))
        )
        original = torch.tensor(case.target)
        found = losses(encoder, head, given, context, original, case.spans, ATTN)
        expected += sum(found) * len(original)
    batch = collate(rows, length=40, pad=PAD)
    output = model(batch)["t"]
    assert batch.count("t") == 2 * (5 + 4)
    assert float(output.loss_sum.detach()) == pytest.approx(expected, rel=1e-5)
