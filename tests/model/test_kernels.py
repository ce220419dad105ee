"""The choice of kernels, and LayerNorm."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.attention import choice as attention_choice
from palm_ds.model.attention import choice as attention_trial
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.kernels import (
    IMPLEMENTATIONS,
    Environment,
    Kernels,
    choose_kernels,
    layer_norm,
)

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
    assert lines[0] == "attention: tiles"


def test_fp16_gradients_are_computed_in_chunks_by_our_own_loss_only() -> None:
    assert choose(dtype=torch.float16)[0].masked_lm_loss == "chunked"
    with pytest.raises(UserError, match="fp16"):
        choose(dtype=torch.float16, masked_lm_loss="linear_cross_entropy")


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
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(norm(x), scaled * norm.weight + norm.bias)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"device": torch.device("cpu")}, "slower on CPUs"),
        ({"fixed_shapes": False}, "batches differ in length"),
        ({"layer_norm": "triton"}, 'cannot take layer_norm: "triton"'),
        ({"zero_stage": 3}, "ZeRO 3 gathers weights inside the layers"),
        ({"states_read": True}, "a teacher's hidden states, attention, relations"),
    ],
)
def test_what_speaks_against_compiling(changes: dict[str, object], message: str | None) -> None:
    gpu = Environment(device=torch.device("cuda"), dtype=torch.bfloat16, config=CONFIG)
    environment = replace(gpu, **changes)  # type: ignore[arg-type]
    (on, _) = IMPLEMENTATIONS["compile"]
    objection = on.not_preferred(environment)
    if changes.keys() & {"zero_stage", "states_read"}:
        objection = on.unavailable(environment)
    assert message in objection if message and objection else objection is None is message


def test_compiled_layers_take_torch_s_layer_norm_only() -> None:
    compiled = Environment(
        device=torch.device("cuda"), dtype=torch.bfloat16, config=CONFIG, compile="on"
    )
    for each in IMPLEMENTATIONS["layer_norm"][:-1]:
        assert each.unavailable(compiled) == 'compile: "on" fuses torch\'s'
    with pytest.raises(UserError, match="ZeRO 3"):
        choose_kernels(
            {"compile": "on"}, device="cpu", dtype=torch.float32, config=CONFIG, zero_stage=3
        )


HALF, FULL = (torch.float16, torch.bfloat16), (torch.float32,)
V100, T4, A100, H100 = (7, 0), (7, 5), (8, 0), (9, 0)


def attention_on(
    monkeypatch: pytest.MonkeyPatch,
    card: tuple[int, int],
    dtype: torch.dtype,
    config: EncoderConfig = CONFIG,
    **requested: str,
) -> tuple[str, str]:
    """The attention chosen on a card of this compute capability, and its log line. Nothing runs
    there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card)
    monkeypatch.setattr(attention_choice, "_installed", lambda module: module == "triton")
    monkeypatch.setattr(attention_trial, "attention_failure", lambda *_: None)
    requested = {"compile": "off", **requested}
    kernels, lines = choose_kernels(requested, device="cuda", dtype=dtype, config=config)
    return kernels.attention, lines[0]


@pytest.mark.parametrize(
    ("cards", "dtypes", "dropout", "chosen"),
    [
        ((A100, H100), (*HALF, *FULL), "auto", "triton"),
        ((A100, H100), (*HALF, *FULL), "counter", "triton"),
        ((A100, H100), HALF, "plain", "varlen"),
        ((A100, H100), FULL, "plain", "sdpa"),
        ((V100, T4), (*HALF, *FULL), "auto", "sdpa"),
        ((V100, T4), (*HALF, *FULL), "plain", "sdpa"),
        ((V100, T4), (*HALF, *FULL), "counter", "plain"),
    ],
)
def test_attention_on_a_gpu(
    cards: tuple[tuple[int, int], ...],
    dtypes: tuple[torch.dtype, ...],
    dropout: str,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for card in cards:
        for dtype in dtypes:
            attention, line = attention_on(monkeypatch, card, dtype, dropout=dropout)
            assert attention == chosen
            dense = "holds a mask of length x length per row" in line
            assert dense == (chosen in ("sdpa", "plain"))


def test_attention_without_dropout_takes_any_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    still = EncoderConfig(vocab_size=50, attention_dropout=0.0)
    for dropout in ("plain", "counter"):
        chosen = attention_on(monkeypatch, H100, torch.bfloat16, still, dropout=dropout)[0]
        assert chosen == "triton"
        for kernel in ("triton", "varlen"):
            requested = {"attention": kernel, "dropout": dropout}
            assert attention_on(monkeypatch, H100, torch.bfloat16, still, **requested)[0] == kernel


@pytest.mark.parametrize(
    ("card", "config", "kernel", "message"),
    [
        (T4, {}, "varlen", "needs compute capability 8.0"),
        (T4, {}, "triton", 'its masks are those of dropout: "counter"'),
        (T4, {"attention_dropout": 0.0}, "triton", "needs compute capability 8.0"),
        (H100, {"num_heads": 4}, "triton", "its masks"),
        (H100, {"num_heads": 3, "attention_dropout": 0.0}, "triton", "most 128; it is 256"),
        (H100, {"num_heads": 64}, "varlen", "a multiple of 8; it is 12"),
        (H100, {}, "varlen_fa3", "does not support dropout; attention_dropout is 0.1"),
        (A100, {"attention_dropout": 0.0}, "varlen_fa3", "needs Hopper"),
        (H100, {"attention_dropout": 0.0}, "varlen_fa3", "flash_attn_interface is not installed"),
        (T4, {"attention_dropout": 0.0}, "varlen_fa4", "needs Hopper or Blackwell"),
        (H100, {"attention_dropout": 0.0}, "varlen_fa4", "flash_attn.cute is not installed"),
    ],
)
def test_attention_that_cannot_run_on_a_gpu_says_why(
    card: tuple[int, int],
    config: dict[str, float],
    kernel: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = EncoderConfig.from_dict({"vocab_size": 50, **config})
    with pytest.raises(UserError) as caught:
        attention_on(monkeypatch, card, torch.bfloat16, encoder, attention=kernel, dropout="plain")
    assert message in str(caught.value)


@pytest.mark.parametrize(("dtype", "dropout"), [(torch.bfloat16, 0.0), (torch.float32, 0.1)])
def test_a_run_that_hides_tokens_gets_attention_that_can(
    dtype: torch.dtype, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, attention_dropout=dropout)
    attention_on(monkeypatch, H100, dtype, config)  # a card that has all of them
    chosen = {}
    for tasks in ((), ("titles", "headlines")):
        requested = {"compile": "off", "dropout": "counter" if tasks else "plain"}
        kernels, lines = choose_kernels(
            requested, device="cuda", dtype=dtype, config=config, partial_tasks=tasks
        )
        chosen[tasks] = kernels.attention
    assert list(chosen.values()) == ["triton" if not dropout else "sdpa", "triton"]
    for kernel in ("varlen", "varlen_fa3", "varlen_fa4"):
        with pytest.raises(UserError) as caught:
            choose_kernels(
                {**requested, "attention": kernel},
                device="cuda",
                dtype=dtype,
                config=config,
                partial_tasks=("titles",),
            )
        assert "tokens of a text from one another, which tasks.titles needs" in str(caught.value)


def test_attention_that_fails_its_trial_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch's operators for CUDA fail for real: the tensors of this card are on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: H100)
    reason = attention_trial.attention_failure("varlen", on_cpu(CONFIG, torch.bfloat16))
    assert reason is not None and reason.startswith("does not run here (")
    assert "\n" not in reason


def test_attention_may_fail_its_trial_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an assertion inside a compiler."""

    def fail(*_: object) -> float:
        raise AssertionError

    monkeypatch.setattr(attention_trial, "_largest_difference", fail)
    reason = attention_trial.attention_failure("triton", on_cpu(CONFIG, torch.bfloat16))
    assert reason == "does not run here (AssertionError)"


def on_cpu(config: EncoderConfig, dtype: torch.dtype, **others: Any) -> Environment:
    return Environment(device=torch.device("cpu"), dtype=dtype, config=config, **others)


@pytest.mark.parametrize("tasks", [(), ("titles",)])
@pytest.mark.parametrize("dropout", ["plain", "counter"])
def test_a_trial_compares_with_the_plain_attention(
    dropout: str, tasks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EncoderConfig(vocab_size=50, hidden_size=32, num_heads=2)
    half, single = (
        on_cpu(config, dtype, dropout=dropout, partial_tasks=tasks)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert attention_trial.attention_failure("tiles", half) is None
    wrong = lambda qkv, *_, **__: qkv[..., :32] * 1.1  # noqa: E731
    real = attention_trial.attend
    monkeypatch.setattr(
        attention_trial,
        "attend",
        lambda qkv, plan, **options: (real if plan.kernel == "plain" else wrong)(
            qkv, plan, **options
        ),
    )
    reason = attention_trial.attention_failure("tiles", single)
    assert reason is not None and reason.startswith("computes other numbers here than plain")


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", ["plain", "counter"])
@pytest.mark.parametrize("dtype", [*HALF, *FULL])
def test_a_gpu_gets_kernels_for_gpus(dtype: torch.dtype, dropout: str) -> None:
    kernels, lines = choose("cuda", dtype, dropout=dropout)
    expected = "triton" if dropout == "counter" else "varlen" if dtype in HALF else "sdpa"
    old = torch.cuda.get_device_capability() < A100
    assert old or kernels.attention == expected, lines
