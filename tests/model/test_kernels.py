"""The choice of kernels, and LayerNorm."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.encoder import EncoderConfig
from palm_ds.model.kernels import IMPLEMENTATIONS, Kernels, choose_kernels, layer_norm

CONFIG = EncoderConfig(vocab_size=50)


def choose(device: str = "cpu", dtype: torch.dtype = torch.float32, **requested: str):  # noqa: ANN201
    return choose_kernels(requested, device=device, dtype=dtype, config=CONFIG)


def test_a_cpu_gets_kernels_for_cpus_and_a_line_per_operation() -> None:
    kernels, lines = choose()
    assert kernels == Kernels(
        attention="tiles",
        masked_lm_loss="chunked",
        layer_norm="torch",
        dropout="counter",
        compile="off",
    )
    assert [line.split(":")[0] for line in lines] == [field.name for field in fields(Kernels)]
    assert lines[0] == "attention: tiles (varlen: needs CUDA)"


def test_fp16_gradients_are_computed_after_loss_scaling() -> None:
    assert choose(dtype=torch.float16)[0].masked_lm_loss == "plain"
    with pytest.raises(UserError, match="fp16"):
        choose(dtype=torch.float16, masked_lm_loss="chunked")


def test_requested_kernels_are_used() -> None:
    for operation, implementations in IMPLEMENTATIONS.items():
        plain = implementations[-1].name
        kernels, lines = choose(**{operation: plain})
        assert getattr(kernels, operation) == plain
        assert f"{operation}: {plain} (requested)" in lines


@pytest.mark.parametrize(
    ("operation", "kernel", "message"),
    [
        ("attention", "varlen", "CUDA"),
        ("attention", "sdpa", 'does not take the masks of dropout: "counter"'),
        ("layer_norm", "apex", "CUDA"),
        ("masked_lm_loss", "liger", "CUDA"),
        ("attention", "flash", "no implementation"),
        ("atention", "plain", 'did you mean "attention"'),
        ("dropout", "count", 'did you mean "counter"'),
    ],
)
def test_unavailable_kernels_are_errors(operation: str, kernel: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(**{operation: kernel})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_sdpa_drops_with_torch_s_dropout_or_not_at_all() -> None:
    assert choose(attention="sdpa", dropout="plain")[0].attention == "sdpa"
    still = EncoderConfig(vocab_size=50, attention_dropout=0.0)
    requested = {"attention": "sdpa"}
    kernels, _ = choose_kernels(requested, device="cpu", dtype=torch.float32, config=still)
    assert (kernels.attention, kernels.dropout) == ("sdpa", "counter")


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_layer_norm_equals_its_definition(eps: float) -> None:
    norm = layer_norm(9, eps, "torch")
    with torch.no_grad():
        norm.weight.normal_()  # type: ignore[union-attr]
        norm.bias.normal_()  # type: ignore[union-attr]
    x = torch.randn(4, 9)
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(norm(x), scaled * norm.weight + norm.bias)


@pytest.mark.gpu
def test_a_gpu_gets_kernels_for_gpus() -> None:
    kernels, _ = choose("cuda", torch.bfloat16)
    assert (kernels.attention, kernels.dropout) == ("sdpa", "plain")
