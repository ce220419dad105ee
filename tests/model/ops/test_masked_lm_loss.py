"""Every masked-LM loss against the plain one, for awkward shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.ops import masked_lm_loss as module
from palm_ds.model.ops.masked_lm_loss import (
    masked_lm_loss,
    pad_vocabulary,
    smoothed_cross_entropy,
    smoothed_lm_loss,
)
from tests.helpers.fake_gpu import fake_gpu

TOLERANCE = {torch.float32: dict(atol=2e-5, rtol=1e-4), torch.bfloat16: dict(atol=5e-2, rtol=5e-2)}


@pytest.mark.parametrize("kernel", ["chunked", "chunked, padded", "linear_cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "hidden", "vocab"), [(1, 1, 2), (5, 7, 3), (131, 16, 101), (300, 9, 64)]
)
def test_equals_plain(n: int, hidden: int, vocab: int, dtype: torch.dtype, kernel: str) -> None:
    if kernel == "linear_cross_entropy" and not hasattr(F, kernel):
        pytest.skip(f"torch {torch.__version__} has no {kernel}")
    torch.manual_seed(n)
    targets = torch.randint(0, vocab, (n,))
    values = [torch.randn(*shape).to(dtype) for shape in ((n, hidden), (vocab, hidden), (vocab,))]
    results = []
    for which in ("plain", kernel):
        leaves = rows, *of_vocabulary = [x.clone().requires_grad_() for x in values]
        name, _, padded = which.partition(", ")
        if padded:  # as on GPUs
            of_vocabulary = list(pad_vocabulary(*of_vocabulary))
            assert len(of_vocabulary[0]) == -(-vocab // 64) * 64
        loss, correct = masked_lm_loss(rows, *of_vocabulary, targets, name)
        assert loss.dtype == torch.float32 and loss.ndim == 0
        (loss * 0.01).backward()
        results.append((loss.detach() / n, correct, *(x.grad for x in leaves)))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", ["plain", "chunked", "linear_cross_entropy"])
def test_many_labels_lose_nothing_in_bf16(kernel: str) -> None:
    if kernel == "linear_cross_entropy" and not hasattr(F, kernel):
        pytest.skip(f"torch {torch.__version__} has no {kernel}")
    torch.manual_seed(1)
    rows, embeddings = torch.randn(1000, 16).bfloat16(), torch.randn(4000, 16).bfloat16()
    targets = torch.randint(0, 4000, (1000,))
    wanted = F.cross_entropy(rows.double() @ embeddings.double().T, targets, reduction="sum")
    bias = torch.zeros(4000, dtype=torch.bfloat16)
    loss, _ = masked_lm_loss(rows, embeddings, bias, targets, kernel)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)


def test_chunked_masked_lm_loss_is_stable_for_large_scores_and_needs_no_gradient() -> None:
    rows, embeddings = torch.full((3, 2), 100.0), torch.tensor([[100.0, 100.0], [-100.0, 0.0]])
    targets = torch.tensor([0, 1, 0])
    loss, correct = masked_lm_loss(rows, embeddings, torch.zeros(2), targets, "chunked")
    assert not loss.requires_grad and correct == 2
    assert loss.item() == pytest.approx(30000.0)  # 100 * 200 + 100 * 100, for the second row


def test_frozen_embeddings_get_no_gradient() -> None:
    rows, embeddings = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3)
    loss, _ = masked_lm_loss(rows, embeddings, torch.zeros(6), torch.arange(4), "chunked")
    loss.backward()
    assert rows.grad is not None and embeddings.grad is None


def gradients(
    inputs: list[torch.Tensor], targets: torch.Tensor, kernel: str, scale: float
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    (masked_lm_loss(*leaves, targets, kernel)[0] * scale).backward()
    return [x.grad.float() / scale for x in leaves if x.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 65, 2049])
def test_padded_chunks_for_torch_compile_equal_plain(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    targets = torch.randint(0, 11, (n,))
    inputs = [torch.randn(*shape).to(dtype) for shape in ((n, 6), (11, 6), (11,))]
    shapes = set()

    def compiled(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        shapes.add(tuple(logits.shape))
        return module.smoothed_cross_entropy(logits, *rest)

    results = []
    for more in ((targets, "plain"), (targets, "chunked", compiled)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss, correct = masked_lm_loss(*leaves, *more)
        (loss * 0.5).backward()
        results.append((loss.detach() / n, correct, *(x.grad / n for x in leaves)))
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    torch.testing.assert_close(results[1], results[0], **tolerance)
    assert len(shapes) == 1


@pytest.mark.parametrize(("confidence", "scale"), [(0.0, 2.0**6), (4.0, 2.0**10), (8.0, 2.0**9)])
@pytest.mark.parametrize("size", [0.1, 1.0, 16.0])
def test_fp16_gradients_are_those_of_fp32(confidence: float, scale: float, size: float) -> None:
    """From guesses to sure predictions, whose errors fp16 cannot hold. The incoming gradient is
    the weight of a task, over its labels, times fp16's loss scale."""
    torch.manual_seed(1)
    targets = torch.arange(200) % 53
    embeddings = torch.randn(53, 32) * size
    rows = embeddings[targets] / embeddings.square().mean() * confidence / 16 + 0.01
    inputs = [x.half() for x in (rows, embeddings, torch.zeros(53))]
    exact = gradients([x.float() for x in inputs], targets, "plain", 1.0)
    found = gradients(inputs, targets, "chunked", scale)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()  # the logits are rounded to fp16


def test_gradients_of_1e_8_survive_fp16() -> None:
    targets = torch.zeros(64, dtype=torch.int64)
    rows, embeddings = torch.full((64, 1), 4.0), torch.tensor([[0.0], [-4.5]])
    inputs = [x.half() for x in (rows, embeddings, torch.zeros(2))]
    exact = gradients([x.float() for x in inputs], targets, "plain", 1.0)
    assert 1e-8 < exact[0].abs().max() < 1e-6
    found = gradients(inputs, targets, "chunked", 2.0**16)
    torch.testing.assert_close(found[0], exact[0], rtol=2e-3, atol=0)


def test_chunks_add_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 a sum over many chunks would stop growing; in fp16, overflow."""
    monkeypatch.setattr(module, "_CHUNK", 4)
    targets = torch.zeros(4096, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = [x.to(dtype) for x in (torch.ones(4096, 1), torch.zeros(2, 1), torch.zeros(2))]
        found = gradients(inputs, targets, "chunked", 1.0)
        assert found[1][:, 0].tolist() == [-2048.0, 2048.0]
        assert found[2].tolist() == [-2048.0, 2048.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", ["plain", "chunked"])
def test_shapes_on_a_gpu(dtype: torch.dtype, kernel: str) -> None:
    with fake_gpu():
        inputs = [torch.empty(*shape, dtype=dtype) for shape in ((9000, 8), (16, 8), (16,))]
        loss, correct = masked_lm_loss(*inputs, torch.empty(9000, dtype=torch.int64), kernel)
        assert (loss.dtype, loss.device.type) == (torch.float32, "cuda")
        assert (correct.dtype, correct.device.type) == (torch.int64, "cuda")
        error = torch.empty(4096, 16, dtype=dtype)
        bias_grad, piece = torch.empty(16), torch.empty(4096, 8, dtype=dtype)
        grads = module._Gradients()
        for _ in range(2):
            grads.add(piece, inputs[1], error, bias_grad)
        assert {x.dtype for x in grads.found(*inputs)} == {torch.float32}


def test_the_gradient_of_one_chunk_is_that_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: the product of one chunk is kept as it is, and scaled by an exact number."""
    torch.manual_seed(0)
    shapes = (6, 4), (9, 4), (9,)
    inputs, targets = [torch.randn(*shape).bfloat16() for shape in shapes], torch.arange(6)
    scale = torch.tensor(1 / 7).item()
    whole = gradients(inputs, targets, "chunked", scale)
    unscaled = gradients(inputs, targets, "chunked", 1.0)
    for kept, product in list(zip(whole, unscaled, strict=True))[:2]:
        assert torch.equal(kept, (product * scale).bfloat16().float() / scale)
    monkeypatch.setattr(module, "_CHUNK", 4)
    for kept, added in zip(whole, gradients(inputs, targets, "chunked", scale), strict=True):
        torch.testing.assert_close(kept, added, rtol=0.01, atol=0.01)


# ---- label smoothing and weights of flows, against torch's cross-entropy ----


def leaves_of(n: int, hidden: int, vocab: int) -> list[torch.Tensor]:
    torch.manual_seed(n)
    shapes = (n, hidden), (vocab, hidden), (vocab,)
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", ["plain", "chunked", "liger"])
@pytest.mark.parametrize("weights", [(), (1.6, 0.4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("n", "hidden", "vocab"), [(1, 3, 5), (131, 7, 33)])
def test_smoothing_equals_torch(
    n: int, hidden: int, vocab: int, smoothing: float, weights: tuple, kernel: str, compiled: bool
) -> None:
    """`compiled`: the chunks are padded, as for a compiled function."""
    leaves, others = leaves_of(n, hidden, vocab), leaves_of(n, hidden, vocab)
    tokens = torch.randint(0, vocab, (n,))
    flows = torch.arange(n) % 2
    logits = F.linear(*others)
    each = F.cross_entropy(logits, tokens, reduction="none", label_smoothing=smoothing)
    expected = (each * torch.tensor(weights or (1.0, 1.0))[flows]).sum()
    loss, correct = smoothed_lm_loss(
        *leaves,
        torch.stack([tokens, flows], 1) if weights else tokens,
        kernel,
        smoothing=smoothing,
        weights=weights,
        compiled=smoothed_cross_entropy if compiled else None,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert correct == (logits.argmax(-1) == tokens).sum()
    (loss * 0.1).backward()
    (expected * 0.1).backward()
    for mine, its in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smoothing_half_precision_loses_a_hundredth(dtype: torch.dtype) -> None:
    leaves = leaves_of(50, 8, 20)
    half = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    targets = torch.randint(0, 20, (50,))
    for values in (leaves, half):
        loss, _ = smoothed_lm_loss(*values, targets, "chunked", smoothing=0.1)
        loss.backward()
    for exact, rounded in zip(leaves, half, strict=True):
        assert exact.grad is not None and rounded.grad is not None
        error = (rounded.grad.float() - exact.grad).abs().max() / exact.grad.abs().max()
        assert error < 0.02
