"""The CRF compared with enumeration of all taggings, and with a loop over sentences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from palm_ds.model.heads.crf import CRF, CRFHead, crf_nll, tag_log_probs, viterbi

LENGTHS = ([1], [4], [3, 1, 5, 2, 5], [1, 1, 1], [5, 4, 3, 2, 1])


def made(lengths: list[int], tags: int, seed: int = 0, dtype=torch.float32):
    """Emissions, transitions, tags, groups."""
    torch.manual_seed(seed)
    rows = sum(lengths)
    groups = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (
        torch.randn(rows, tags, dtype=dtype) * 2,
        torch.randn(tags + 2, tags, dtype=dtype),
        torch.randint(tags, (rows,)),
        groups,
    )


def score(emissions: torch.Tensor, transitions: torch.Tensor, tags: tuple[int, ...]) -> float:
    """The score of one sentence by the formula."""
    total = float(transitions[0, tags[0]]) + float(transitions[1, tags[-1]])
    total += sum(float(emissions[t, tag]) for t, tag in enumerate(tags))
    return total + sum(float(transitions[2 + a, b]) for a, b in itertools.pairwise(tags))


def every(emissions: torch.Tensor, transitions: torch.Tensor) -> dict[tuple[int, ...], float]:
    """{tags: score} of all taggings of one sentence."""
    rows, tags = emissions.shape
    ways = itertools.product(range(tags), repeat=rows)
    return {way: score(emissions, transitions, way) for way in ways}


def each_sentence(lengths: list[int], rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(lengths))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("tags", [1, 2, 4])
def test_losses_equal_enumeration(lengths: list[int], tags: int) -> None:
    emissions, transitions, gold, groups = made(lengths, tags)
    found = crf_nll(emissions, transitions, gold, groups)
    for loss, mine, right in zip(
        found, each_sentence(lengths, emissions), each_sentence(lengths, gold), strict=True
    ):
        ways = every(mine, transitions)
        total = math.log(sum(map(math.exp, ways.values())))
        assert float(loss) == pytest.approx(total - ways[tuple(right.tolist())], abs=1e-4)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_decoding_equals_enumeration(lengths: list[int]) -> None:
    emissions, transitions, _, groups = made(lengths, 4, seed=1)
    best = viterbi(emissions, transitions, groups)
    for mine, found in zip(
        each_sentence(lengths, emissions), each_sentence(lengths, best), strict=True
    ):
        ways = every(mine, transitions)
        assert tuple(found.tolist()) == max(ways, key=lambda way: ways[way])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_marginals_equal_enumeration(lengths: list[int]) -> None:
    emissions, transitions, _, groups = made(lengths, 3, seed=2)
    shares = tag_log_probs(emissions, transitions, groups).exp()
    for mine, found in zip(
        each_sentence(lengths, emissions), each_sentence(lengths, shares), strict=True
    ):
        expected = torch.zeros_like(found)
        for way, total in every(mine, transitions).items():
            for t, tag in enumerate(way):
                expected[t, tag] += math.exp(total)
        torch.testing.assert_close(found, expected / expected.sum(1, keepdim=True))


def one_by_one(emissions, transitions, gold, lengths):
    """The sum of losses by a loop over sentences, times and tags."""
    losses = []
    for mine, right in zip(emissions.split(lengths), gold.split(lengths), strict=True):
        ahead = [transitions[0, tag] + mine[0, tag] for tag in range(mine.shape[1])]
        for now in mine[1:]:
            ahead = [
                torch.logsumexp(
                    torch.stack([ahead[a] + transitions[2 + a, b] for a in range(len(ahead))]), 0
                )
                + now[b]
                for b in range(len(ahead))
            ]
        total = torch.logsumexp(torch.stack(ahead) + transitions[1], 0)
        own = transitions[0, right[0]] + transitions[1, right[-1]]
        own = own + sum(mine[t, tag] for t, tag in enumerate(right))
        own = own + sum(transitions[2 + a, b] for a, b in itertools.pairwise(right))
        losses.append(total - own)
    return torch.stack(losses)


def test_long_ragged_sentences_and_gradients_equal_a_plain_loop() -> None:
    lengths = [1, 40, 7, 2, 19, 40, 3]
    emissions, transitions, gold, groups = made(lengths, 5, seed=3)
    emissions.requires_grad_()
    transitions.requires_grad_()
    found = crf_nll(emissions, transitions, gold, groups)
    expected = one_by_one(emissions, transitions, gold, lengths)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    mine = torch.autograd.grad(found.sum(), [emissions, transitions])
    theirs = torch.autograd.grad(expected.sum(), [emissions, transitions])
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_the_emissions_is_marginals_minus_targets() -> None:
    emissions, transitions, gold, groups = made([6, 1, 9], 4, seed=4)
    emissions.requires_grad_()
    loss = crf_nll(emissions, transitions, gold, groups).sum()
    (gradient,) = torch.autograd.grad(loss, [emissions])
    shares = tag_log_probs(emissions, transitions, groups).exp()
    right = torch.nn.functional.one_hot(gold, 4)
    torch.testing.assert_close(gradient, shares - right, atol=1e-5, rtol=1e-4)


def test_without_transitions_a_crf_is_a_softmax_per_row() -> None:
    emissions, _, gold, groups = made([3, 5, 1], 4, seed=5)
    nothing = torch.zeros(6, 4)
    expected = torch.nn.functional.cross_entropy(emissions, gold, reduction="sum")
    torch.testing.assert_close(crf_nll(emissions, nothing, gold, groups).sum(), expected)
    assert torch.equal(viterbi(emissions, nothing, groups), emissions.argmax(1))
    torch.testing.assert_close(tag_log_probs(emissions, nothing, groups), emissions.log_softmax(1))


def test_sentences_are_independent() -> None:
    emissions, transitions, gold, groups = made([2, 30, 5], 4, seed=6)
    alone = crf_nll(emissions[:2], transitions, gold[:2], groups[:2])
    together = crf_nll(emissions, transitions, gold, groups)
    torch.testing.assert_close(alone[0], together[0])


def test_half_precision_is_summed_in_fp32() -> None:
    emissions, transitions, gold, groups = made([300], 3, seed=7)
    half, also = (emissions * 40).half(), transitions.half()
    found = crf_nll(half, also, gold, groups)
    full = crf_nll(half.float(), also.float(), gold, groups)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, full)


def test_forbidden_transitions_are_not_decoded() -> None:
    emissions, transitions, _, groups = made([6, 1, 4, 4, 3], 3, seed=8)
    allowed = torch.ones(5, 3, dtype=torch.bool)
    allowed[0, 2] = allowed[2 + 0, 2] = allowed[1, 0] = (
        False  # 2 not first, not after 0; 0 not last
    )
    crf = CRF(3, allowed)
    crf.transitions.data.copy_(transitions)
    found, _ = crf(emissions, groups)
    for mine, tags in zip(
        emissions.split([6, 1, 4, 4, 3]), found.split([6, 1, 4, 4, 3]), strict=True
    ):
        ways = {
            way: total
            for way, total in every(mine, transitions).items()
            if way[0] != 2 and way[-1] != 0 and (0, 2) not in itertools.pairwise(way)
        }
        assert tuple(tags.tolist()) == max(ways, key=lambda way: ways[way])
    assert "allowed" not in crf.state_dict()


def test_the_head_counts_sentences_and_returns_tags_and_marginals() -> None:
    torch.manual_seed(9)
    head = CRFHead(8, 3).eval()
    head.crf.transitions.data.normal_()
    rows, groups = torch.randn(9, 8), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    scores = head.logits(rows, groups)
    assert scores.shape == (9, 4)
    torch.testing.assert_close(scores[:, 1:].exp().sum(1), torch.ones(9))
    best = scores[:, 0].long()
    one_wrong = best.clone()
    one_wrong[4] = (best[4] + 1) % 3
    assert int(head(rows, best, groups).correct) == 3
    assert int(head(rows, one_wrong, groups).correct) == 2


def test_a_crf_learns_from_the_order_of_tags() -> None:
    torch.manual_seed(10)
    head = CRFHead(4, 2)  # a row says nothing; tags alternate, and begin with 1
    rows, groups = torch.zeros(35, 4), torch.arange(5).repeat_interleave(7)
    tags = (torch.arange(7).repeat(5) + 1) % 2
    optimizer = torch.optim.Adam(head.parameters(), 0.1)
    for _ in range(60):
        optimizer.zero_grad()
        head(rows, tags, groups).loss_sum.backward()
        optimizer.step()
    assert torch.equal(head.logits(rows, groups)[:, 0].long(), tags)
