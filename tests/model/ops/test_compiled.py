"""torch.compile of the model: whole layers, no compilation after the first batches, same numbers.

Most tests stop after tracing (backend "eager"), which needs no compiler and takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import EncoderLayer
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, choose_kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.compiled import CompiledRegion, padded_positions, padded_rows
from tests.helpers.own_encoder import PreNorm
from tests.model.test_multi_task_model import text

CONFIG = EncoderConfig(
    vocab_size=50,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    max_positions=64,
    dropout=0.2,
    attention_dropout=0.2,
)
COMPILED = Kernels(masked_lm_loss="chunked", dropout="counter", compile="on")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about itself as it compiles


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines of the log since the last call."""
    caplog.set_level(logging.INFO, "palm_ds.model.ops.compiled")

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return lines


def model(
    kernels: Kernels,
    kind: type[TransformerEncoder] = TransformerEncoder,
    config: EncoderConfig = CONFIG,
) -> Model:
    torch.manual_seed(4)
    backbone = kind(config, kernels)
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(16, 6, pooled=True, dropout=0.4)}
    return Model(backbone, heads, {"a": "words", "b": "order"})


def batch(labels: int, seed: int = 1) -> Batch:
    marked = {"a": (list(range(labels)), [7] * labels), "b": ([0], [5])}
    rows = [[(text(20, **marked), 0), (text(9 + seed), 0)], [(text(40 - seed), 0)]]
    return replace(collate(rows, length=64, pad=0), dropout_key=seed)


def losses_and_grads(net: Model, count: int = 20) -> tuple[torch.Tensor, list[Any]]:
    """Over batches with other label counts."""
    losses = []
    for seed in range(count):
        outputs = net(batch(seed * 7 % 20, seed))
        losses.append(torch.stack([each.loss_sum for each in outputs.values()]).sum())
        losses[-1].backward()
    return torch.stack(losses).detach(), [p.grad for p in net.parameters()]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("attention", "kind", "recompute"),
    [
        pytest.param("plain", TransformerEncoder, False, marks=pytest.mark.exhaustive),
        ("tiles", TransformerEncoder, True),
        ("sdpa", PreNorm, False),
    ],
)
def test_twenty_batches_compile_each_size_once(
    attention: str,
    kind: type[TransformerEncoder],
    recompute: bool,
    compiled: Callable[[], list[str]],
) -> None:
    """All layers share a graph; the last one has others, since it is computed where labels are: 0
    to 16 labels are one size, 17 to 19 another. Masks are those of the uncompiled layers."""
    config = replace(CONFIG, attention_dropout=0.0) if attention == "sdpa" else CONFIG
    eager = replace(COMPILED, attention=attention, compile="off")
    results = []
    for kernels in (eager, replace(eager, compile="on")):
        torch.manual_seed(4)
        backbone = kind(config, kernels, recompute=recompute)
        net = Model(backbone, {"words": MaskedLMHead(backbone)}, {"a": "words"})
        results.append(losses_and_grads(net))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    lines = compiled()
    assert sum("layers compiled" in line for line in lines) == 3, lines
    assert sum("embeddings compiled" in line for line in lines) == 1, lines
    assert sum("masked-LM loss compiled" in line for line in lines) == 1, lines
    assert any("(no earlier graph fits: at is None)" in line for line in lines), lines
    assert not any("uncompiled" in line for line in lines), lines


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("attention", ["plain", "tiles"])
def test_batches_with_queries_compile_once_more(
    attention: str, compiled: Callable[[], list[str]]
) -> None:
    """Who sees whom is a tensor, so that all such batches share a graph."""
    results = []
    for state in ("off", "on"):
        net = model(replace(COMPILED, attention=attention, compile=state))
        losses = []
        for seed in (1, 2, 3, 4):
            each = batch(4, seed)
            order = torch.arange(64, dtype=torch.int32).remainder(seed + 5).expand(2, 64)
            if seed % 2:
                each = replace(each, visibility=torch.stack([order, order]))
            losses.append(torch.stack([x.loss_sum for x in net(each).values()]).sum())
        torch.stack(losses).sum().backward()
        results.append((losses, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    lines = compiled()
    assert not any("uncompiled" in line for line in lines), lines
    most = 2 if attention == "tiles" else 4
    assert 1 <= sum("layers compiled" in line for line in lines) <= most, lines


class Printing(EncoderLayer):
    def forward(self, x: torch.Tensor, plan: Any, at: torch.Tensor | None = None) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, plan, at)


class Talkative(TransformerEncoder):
    def layer(self, number: int) -> nn.Module:
        return Printing(self.config, self.kernels)


@pytest.mark.usefixtures("traced")
def test_layers_that_cannot_be_compiled_whole_run_as_they_are(
    compiled: Callable[[], list[str]],
) -> None:
    plain, found = (
        losses_and_grads(model(replace(COMPILED, compile=state), Talkative), 2)
        for state in ("off", "on")
    )
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    lines = [line for line in compiled() if "layers" in line]
    assert len(lines) == 1 and lines[0].startswith("compile: layers run uncompiled: ")


@pytest.mark.usefixtures("traced")
def test_errors_of_a_compiled_function_are_its_own() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with pytest.raises(RuntimeError, match="shapes"):
        CompiledRegion("part").wrap(wrong)(torch.ones(2, 3))


def test_padding_has_few_sizes_and_no_position_twice() -> None:
    at = torch.tensor([5, 5, 9])
    assert padded_positions(at, 64).tolist() == [5, 5, 9, 0, 1, 2, 3, 4]
    assert {len(padded_positions(torch.arange(n), 100)) for n in range(1, 51)} == {13, 26, 39, 52}
    assert {padded_rows(n) for n in range(1, 5000)} == {64, 512, 2048}


@pytest.mark.slow
@pytest.mark.exhaustive  # a minute, of the C++ compiler
def test_compiled_code_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler itself, which takes most of the time: so only one layer."""
    from torch._inductor import config as inductor

    monkeypatch.setattr(inductor, "compile_threads", 1)  # others would import torch first
    config = replace(CONFIG, num_layers=1)
    requested = {"compile": "on"}
    try:
        kernels, _ = choose_kernels(requested, device="cpu", dtype=torch.float32, config=CONFIG)
    except UserError as error:
        pytest.skip(str(error))
    plain, found = (
        losses_and_grads(model(k, config=config), 2)
        for k in (replace(kernels, compile="off"), kernels)
    )
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
