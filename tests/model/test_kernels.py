"""Every form of every operation against the plain one, over awkward shapes; and the choice."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.attention import TILE, attend, plan_attention
from palm_ds.model.batch import Batch
from palm_ds.model.encoder import EncoderConfig
from palm_ds.model.kernels import (
    IMPLEMENTATIONS,
    Kernels,
    add_dropout,
    choose_kernels,
    keep_mask,
    keep_rate,
    layer_norm,
    word_loss,
)

CPU = torch.device("cpu")
CONFIG = EncoderConfig(vocab_size=50)
TOLERANCE = {torch.float32: dict(atol=2e-5, rtol=1e-4), torch.bfloat16: dict(atol=5e-2, rtol=5e-2)}


def batch_of(rows: list[list[int]], length: int) -> Batch:
    """Only what attention reads: blocks of these sizes, padding after them."""
    block, sizes = torch.full((len(rows), length), -1), []
    for r, row in enumerate(rows):
        ids = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row, dtype=torch.int64))
        block[r, : len(ids)] = ids
        sizes += [*row, length - sum(row)] if sum(row) < length else row
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    nothing = torch.zeros_like(block)
    return Batch(nothing, nothing, nothing, nothing, block, starts, max(sizes), {})


SHAPES = [
    ([[7]], 7, 1, 3),
    ([[1]], 1, 1, 1),
    ([[3, 1, 4], [1, 5], []], 9, 2, 5),
    ([[2 * TILE + 3], [TILE, TILE, 1], [TILE + 1, 1, 1, 1, TILE - 1]], 2 * TILE + 3, 3, 8),
    ([[1] * 31, [31], [30]], 31, 4, 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["sdpa", "tiles"])
@pytest.mark.parametrize(("rows", "length", "heads", "head_width"), SHAPES)
def test_attention(
    rows: list[list[int]], length: int, heads: int, head_width: int, form: str, dtype: torch.dtype
) -> None:
    batch = batch_of(rows, length)
    torch.manual_seed(length)
    width = heads * head_width
    qkv = torch.randn(len(rows), length, 3 * width).to(dtype)
    upstream = torch.randn(len(rows), length, width).to(dtype)
    results = []
    for which in ("plain", form):
        x = qkv.clone().requires_grad_()
        out = attend(x, plan_attention(batch, which), num_heads=heads)
        out.backward(upstream)
        results.append((out.detach(), x.grad))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[dtype])


@pytest.mark.parametrize(("rows", "length", "heads", "head_width"), SHAPES)
def test_attention_without_gradients(
    rows: list[list[int]], length: int, heads: int, head_width: int
) -> None:
    batch, qkv = batch_of(rows, length), torch.randn(len(rows), length, 3 * heads * head_width)
    learning = attend(qkv, plan_attention(batch, "tiles"), num_heads=heads)
    with torch.no_grad():
        plan = plan_attention(batch, "tiles")
        assert plan.form == ("sdpa" if length <= TILE else "tiles")
        torch.testing.assert_close(
            attend(qkv, plan, num_heads=heads), learning, atol=2e-5, rtol=1e-4
        )


def test_tiled_attention_passes_gradcheck() -> None:
    batch = batch_of([[3, 2], [4]], 6)
    plan = plan_attention(batch, "tiles")
    torch.manual_seed(0)
    qkv = torch.randn(2, 6, 3 * 4, dtype=torch.float64, requires_grad=True)

    def seeded(dropout: float):  # noqa: ANN202
        def attention(x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(4)  # the same mask every time, so that it is a function
            return attend(x, plan, num_heads=2, dropout=dropout)

        return attention

    assert torch.autograd.gradcheck(seeded(0.4), qkv)


@pytest.mark.parametrize("form", ["plain", "sdpa", "tiles"])
def test_attention_dropout_keeps_the_mean(form: str) -> None:
    batch = batch_of([[5, 3]] * 600, 8)
    torch.manual_seed(0)
    qkv = torch.randn(1, 8, 3 * 4).expand(600, 8, 12).contiguous()
    plan = plan_attention(batch, form)
    exact = attend(qkv, plan, num_heads=1)[0]
    dropped = attend(qkv, plan, num_heads=1, dropout=0.3)
    assert (dropped[0] - dropped[1]).abs().max() > 0.01
    error = dropped.std(0) / 600**0.5
    assert ((dropped.mean(0) - exact).abs() < 5 * error + 1e-6).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1000, 777)])
def test_keep_mask_has_the_rate(shape: tuple[int, ...], rate: float) -> None:
    torch.manual_seed(1)
    mask = keep_mask(torch.empty(shape), rate)
    assert mask.shape == shape and set(mask.unique().tolist()) <= {0.0, 1.0}
    assert abs(keep_rate(rate) - (1 - rate)) < 1e-5
    if mask.numel() > 1000:
        error = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(mask.mean().item() - keep_rate(rate)) < 5 * error
        quarters = mask.flatten()[: mask.numel() // 4 * 4].view(-1, 4)  # one draw makes four
        assert (quarters.mean(0) - keep_rate(rate)).abs().max() < 10 * error
        assert torch.corrcoef(quarters.T).fill_diagonal_(0).abs().max() < 0.01


@pytest.mark.parametrize("form", ["plain", "bits"])
def test_dropout(form: str) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(40, 60, requires_grad=True), torch.randn(40, 60, requires_grad=True)
    out = add_dropout(x, y, 0.25, form)
    upstream = torch.randn(40, 60)
    out.backward(upstream)
    change = (out - x).detach()
    dropped = change == 0
    assert 0.15 < dropped.float().mean() < 0.35
    torch.testing.assert_close(change[~dropped], y.detach()[~dropped] / 0.75, atol=1e-5, rtol=1e-5)
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, upstream)
    torch.testing.assert_close(y.grad, torch.where(dropped, 0.0, upstream / 0.75))
    assert torch.equal(add_dropout(x, y, 0.0, form), x + y)


@pytest.mark.parametrize("form", ["chunked", "linear_cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "width", "words"), [(1, 1, 2), (5, 7, 3), (131, 16, 101), (300, 9, 64)]
)
def test_word_loss(n: int, width: int, words: int, dtype: torch.dtype, form: str) -> None:
    if form == "linear_cross_entropy" and not hasattr(F, form):
        pytest.skip(f"torch {torch.__version__} has no {form}")
    torch.manual_seed(n)
    targets = torch.randint(0, words, (n,))
    made = [torch.randn(*shape).to(dtype) for shape in ((n, width), (words, width), (words,))]
    results = []
    for which in ("plain", form):
        leaves = [x.clone().requires_grad_() for x in made]
        loss, correct = word_loss(*leaves, targets, which)
        assert loss.dtype == torch.float32 and loss.ndim == 0
        (loss * 0.01).backward()
        results.append((loss.detach() / n, correct, *(x.grad for x in leaves)))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[dtype])


def test_chunked_word_loss_survives_large_scores_and_needs_no_gradient() -> None:
    rows, table = torch.full((3, 2), 100.0), torch.tensor([[100.0, 100.0], [-100.0, 0.0]])
    targets = torch.tensor([0, 1, 0])
    loss, correct = word_loss(rows, table, torch.zeros(2), targets, "chunked")
    assert not loss.requires_grad and correct == 2
    assert loss.item() == pytest.approx(30000.0)  # 100 * 200 + 100 * 100, for the second row


def test_forms_of_the_backward_pass_can_be_left_out() -> None:
    """A frozen word table wants no gradient."""
    rows, table = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3)
    loss, _ = word_loss(rows, table, torch.zeros(6), torch.arange(4), "chunked")
    loss.backward()
    assert rows.grad is not None and table.grad is None


# ---- choosing ----


def choose(device: str = "cpu", dtype: torch.dtype = torch.float32, **requested: str):  # noqa: ANN201
    return choose_kernels(requested, device=device, dtype=dtype, config=CONFIG)


def test_a_cpu_gets_forms_for_cpus_and_a_line_for_each_operation() -> None:
    kernels, lines = choose()
    assert kernels == Kernels(
        attention="tiles", word_loss="chunked", layer_norm="torch", dropout="bits", compile="off"
    )
    assert [line.split(":")[0] for line in lines] == [field.name for field in fields(Kernels)]
    assert lines[0] == "attention: tiles (varlen: needs CUDA)"


def test_fp16_keeps_its_gradients_after_the_scaling() -> None:
    assert choose(dtype=torch.float16)[0].word_loss == "plain"
    with pytest.raises(UserError, match="fp16"):
        choose(dtype=torch.float16, word_loss="chunked")


def test_what_is_asked_for_is_what_runs() -> None:
    for operation, forms in IMPLEMENTATIONS.items():
        plain = forms[-1].name
        kernels, lines = choose(**{operation: plain})
        assert getattr(kernels, operation) == plain
        assert f"{operation}: {plain} (asked for)" in lines


@pytest.mark.parametrize(
    ("operation", "form", "words"),
    [
        ("attention", "varlen", "CUDA"),
        ("layer_norm", "apex", "CUDA"),
        ("word_loss", "liger", "CUDA"),
        ("attention", "flash", "no form"),
        ("atention", "plain", 'did you mean "attention"'),
        ("dropout", "bit", 'did you mean "bits"'),
    ],
)
def test_what_cannot_run_is_an_error(operation: str, form: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(**{operation: form})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_layer_norm_is_the_definition(eps: float) -> None:
    norm = layer_norm(9, eps, "torch")
    with torch.no_grad():
        norm.weight.normal_()  # type: ignore[union-attr]
        norm.bias.normal_()  # type: ignore[union-attr]
    x = torch.randn(4, 9)
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(norm(x), scaled * norm.weight + norm.bias)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "length", "heads", "head_width"), SHAPES[2:])
def test_varlen_attention(rows: list[list[int]], length: int, heads: int, head_width: int) -> None:
    batch = batch_of(rows, length).to("cuda")
    width = heads * 8 * head_width
    qkv = torch.randn(len(rows), length, 3 * width, device="cuda", dtype=torch.bfloat16)
    plain = attend(qkv, plan_attention(batch, "plain"), num_heads=heads)
    varlen = attend(qkv, plan_attention(batch, "varlen"), num_heads=heads)
    torch.testing.assert_close(varlen, plain, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_gpu_gets_forms_for_gpus() -> None:
    kernels, _ = choose("cuda", torch.bfloat16)
    assert (kernels.attention, kernels.dropout) == ("sdpa", "plain")
