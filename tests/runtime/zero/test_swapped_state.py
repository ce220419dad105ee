"""What palm_ds does around DeepSpeed's swapper, with a disk that is a dict. The swapper itself is
tested in distributed/test_swapped.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer.state import ADAM, OptimizerStateSpec
from palm_ds.runtime.zero.swapped_state import forget_moments, guard_swapping, in_memory, is_swapped


class Swapper:
    """As DeepSpeed's: a tensor that is not in memory is empty."""

    swap_folder = "/disk"

    def __init__(self, weights: torch.Tensor):
        self.disk = {"0_1": [weights.clone()]}
        self.swap_params_info = {
            "0_1": SimpleNamespace(
                tensors=[flat("0_1")], has_state_tensors=True, unswapped_gradients={}
            )
        }

    def _get_param_swap_info(self, parameter: Any) -> Any:
        info = self.swap_params_info[parameter.ds_id]
        info.get_compute_tensors = lambda: info.tensors
        return info

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: object = None) -> None:
        for tensor, stored in zip(
            self.swap_params_info[parameter.ds_id].tensors, self.disk[parameter.ds_id], strict=True
        ):
            tensor.data = stored.clone()

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        tensors = self.swap_params_info[parameter.ds_id].tensors
        self.disk[parameter.ds_id] = [tensor.detach().clone() for tensor in tensors]
        self.release(parameter)

    def release(self, parameter: Any) -> None:
        for tensor in self.swap_params_info[parameter.ds_id].tensors:
            tensor.data = torch.empty(0)


class Zero:
    """ZeRO 3's optimizer with one group on the disk and one that is too small."""

    swap_optimizer = True

    def __init__(self, spec: OptimizerStateSpec = ADAM):
        weights = torch.tensor([1.0, -2.0, float("nan")])
        self.optimizer_swapper = Swapper(weights)
        self.swapped = self.optimizer_swapper.swap_params_info["0_1"].tensors[0]
        self.small = flat("2_2", torch.ones(2))
        self.fp32_partitioned_groups_flat = [self.swapped, self.small]
        self.fp16_partitioned_groups_flat = [weights.bfloat16(), torch.ones(2).bfloat16()]
        self.optimizer = SimpleNamespace(state_spec=spec)

    def _swappable_optimizer_subgroup(self, group: int) -> bool:
        return group == 0

    def _optimizer_states_and_gradient_swap_in(self, group: int) -> None:
        self.optimizer_swapper.swap_in_optimizer_state(self.swapped)

    def _optimizer_states_and_gradient_swap_out(self, group: int) -> None:
        self.optimizer_swapper.swap_out_optimizer_state(self.swapped, async_swap=False)

    def _release_swap_buffers(self, group: int) -> None:
        self.optimizer_swapper.release(self.swapped)


def flat(ds_id: str, values: torch.Tensor | None = None) -> Any:
    tensor: Any = torch.empty(0) if values is None else values
    tensor.ds_id = ds_id
    return tensor


def test_only_what_is_written_stays() -> None:
    zero = Zero()
    guard_swapping(zero)
    assert is_swapped(zero, zero.swapped) and not is_swapped(zero, zero.small)
    with in_memory(zero, zero.swapped):
        zero.swapped[0] = 5.0
    assert zero.swapped.numel() == 0
    with in_memory(zero, zero.swapped, write=True):
        assert zero.swapped[0] == 1.0
        zero.swapped[0] = 7.0
    with in_memory(zero, zero.swapped), in_memory(zero, zero.small):
        assert zero.swapped[0] == 7.0 and zero.small.numel() == 2


def test_nothing_is_swapped_without_files() -> None:
    for zero in (None, SimpleNamespace(swap_optimizer=False)):
        guard_swapping(zero)
        tensor = torch.ones(1)
        assert not is_swapped(zero, tensor)
        with in_memory(zero, tensor, write=True):
            assert tensor == 1
        forget_moments(zero, tensor)


def test_a_disk_that_returns_something_else_ends_the_run() -> None:
    zero = Zero()
    guard_swapping(zero)
    zero.optimizer_swapper.disk["0_1"][0][1] = -2.0000002
    with (
        pytest.raises(UserError, match="^/disk: what was read is not what was written"),
        in_memory(zero, zero.swapped),
    ):
        pass


def test_a_disk_that_never_had_the_weights_ends_the_run() -> None:
    zero = Zero()
    zero.optimizer_swapper.disk["0_1"][0].zero_()
    with pytest.raises(UserError, match="what was read is not what was written"):
        guard_swapping(zero)


def test_gradients_stay_in_host_memory() -> None:
    zero = Zero()
    guard_swapping(zero)
    swapper: Any = zero.optimizer_swapper
    swapper.swap_out_gradients(
        parameter=zero.swapped, gradient_offsets=[0, 2], gradient_tensors=[torch.ones(2)] * 2
    )
    kept = swapper.swap_params_info["0_1"].unswapped_gradients
    assert list(kept) == [0, 2] and kept[2].tolist() == [1.0, 1.0]


def test_moments_are_forgotten() -> None:
    zero = Zero()
    info = zero.optimizer_swapper.swap_params_info["0_1"]
    info.tensors.append(torch.zeros(3))
    forget_moments(zero, zero.swapped)
    assert info.tensors == [zero.swapped] and not info.has_state_tensors


def test_moments_must_be_fp32() -> None:
    spec = OptimizerStateSpec(moments={"exp_avg": torch.bfloat16}, step=0)
    message = "optimizer.kind: SimpleNamespace keeps 'exp_avg' in bfloat16, .* \"cpu\" instead"
    with pytest.raises(UserError, match=message):
        guard_swapping(Zero(spec))
