"""The attention of torch for GPUs, walked without one: shapes, arguments, graphs. On device "meta":
fake CUDA tensors have neither indexing nor autograd in a torch without CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention as flash
from torch.utils._python_dispatch import TorchDispatchMode

from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import EncoderLayer
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import dropout_keys
from tests.model.attention.test_attention import batch_of

FORMS = ["varlen", "triton"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


class Calls(TorchDispatchMode):
    """The attention operators of torch that are called, with what they get besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.options: list[dict[str, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if "attention" in str(func):
            named = zip((each.name for each in func._schema.arguments), args, strict=False)
            given = {**dict(named), **(kwargs or {})}
            self.names.append(func._schema.name)
            plain = lambda x: not isinstance(x, torch.Tensor)  # noqa: E731
            self.options.append({name: x for name, x in given.items() if plain(x)})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", FORMS)
def test_forward_and_backward_on_no_device(kernel: str, dtype: torch.dtype) -> None:
    batch = batch_of([[3, 1, 4], [1, 5], []], 9).to("meta")
    qkv = torch.empty(3, 9, 3 * 96, dtype=dtype, device="meta", requires_grad=True)
    plan = plan_attention(batch, kernel, keys=dropout_keys(batch, 96))
    out = attend(qkv, plan, num_heads=4, dropout=0.1)
    assert (out.shape, out.dtype) == ((3, 9, 96), dtype)
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert (grad.shape, grad.dtype) == (qkv.shape, dtype)


@pytest.mark.parametrize("window", [None, 7])
def test_flash_attention_gets_the_window_the_dropout_and_the_row_length(window: int | None) -> None:
    batch = batch_of([[3, 1, 4], [1, 5], []], 9).to("meta")
    qkv = torch.empty(3, 9, 3 * 96, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plan = plan_attention(batch, "varlen")
    with Calls() as calls:
        attend(qkv, plan, num_heads=4, dropout=0.1, window=window).sum().backward()
    assert calls.names == ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]
    for options in calls.options:
        assert options["max_q"] == options["max_k"] == 9
        assert options["dropout_p"] == 0.1 and options["is_causal"] is False
        assert options["scale"] == 24**-0.5
        assert [options.get(f"window_size_{side}") for side in ("left", "right")] == [window] * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("kernel", FORMS)
def test_a_layer_is_compiled_once_as_one_graph_for_all_batches(kernel: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # importing it takes seconds

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    config = EncoderConfig(vocab_size=50, hidden_size=96, num_heads=4, intermediate_size=128)
    with torch.device("meta"):
        layer = EncoderLayer(config, Kernels(attention=kernel, dropout="counter"))
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=False)
    for batch in batches():
        keys = dropout_keys(batch, 96)
        plan = plan_attention(batch, kernel, compiled=True, keys=keys).for_layers(1)[0]
        x = torch.empty(*batch.input_ids.shape, 96, device="meta", requires_grad=True)
        compiled(x, plan).sum().backward()
    assert counter.frame_count == 1


def batches() -> Iterator[Batch]:
    """Of one shape, with 3 to 300 sequences, the longest of 1 to 100 tokens."""
    for row in ([100], [60, 40], [1] * 100, [3] * 33):
        yield batch_of([row, row, row], 100).to("meta")


def test_flash_attention_3_is_active_while_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handle:
        def remove(self) -> None:
            pass

    monkeypatch.setitem(flash._registry._FLASH_ATTENTION_IMPLS, "FA3", Handle)
    batch, active = batch_of([[3]], 3), flash.current_flash_attention_impl
    assert plan_attention(batch, "varlen_fa3").kernel == "varlen_fa3" and active() == "FA3"
    plan_attention(batch, "varlen_fa3")
    assert active() == "FA3"
    plan_attention(batch, "varlen")
    assert active() is None
