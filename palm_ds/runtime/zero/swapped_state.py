"""The groups of parameters whose fp32 weights and moments ZeRO 3 keeps in files between steps
(`offload_optimizer.device: nvme`; docs/engine.md).

    in_memory(zero, tensor)               reads a group, for as long as the context lasts
    in_memory(zero, tensor, write=True)   and writes it again

Groups below 1 MB, and all of them without that setting, are always in memory; for them nothing here
has an effect. `tensor` is the flat one that the optimizer updates, `zero` DeepSpeed's ZeRO
optimizer (None under ZeRO 0).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.optimizer.state import ADAM, OptimizerStateSpec

_CORRUPTION_MESSAGE = (
    "{folder}: what was read is not what was written: the disk is full or failing, or its file "
    "system cannot do direct I/O; name another one in zero_optimization.offload_optimizer.nvme_path"
)


class _GroupTensor(Protocol):
    """DeepSpeed's tensor of a group."""

    ds_id: str


class _SwapInfo(Protocol):
    """Part of DeepSpeed's knowledge of a group in files."""

    tensors: list[torch.Tensor]
    has_state_tensors: bool
    unswapped_gradients: dict[int, torch.Tensor]

    def get_compute_tensors(self) -> list[torch.Tensor]: ...


class _Swapper(Protocol):
    """DeepSpeed's reader and writer of groups."""

    swap_folder: str
    swap_params_info: dict[str, _SwapInfo]
    swap_in_optimizer_state: Callable[..., None]
    swap_out_optimizer_state: Callable[..., None]
    swap_out_gradients: Callable[..., None]

    def _get_param_swap_info(self, parameter: _GroupTensor) -> _SwapInfo: ...


class _SwappingZero(Protocol):
    """Part of DeepSpeed's ZeRO 3 optimizer that is used here, in 0.19.8."""

    optimizer: torch.optim.Optimizer
    optimizer_swapper: _Swapper
    fp32_partitioned_groups_flat: list[torch.Tensor]
    fp16_partitioned_groups_flat: list[torch.Tensor]

    def _swappable_optimizer_subgroup(self, group: int) -> bool: ...

    def _optimizer_states_and_gradient_swap_in(self, group: int) -> None: ...

    def _optimizer_states_and_gradient_swap_out(self, group: int) -> None: ...

    def _release_swap_buffers(self, group: int) -> None: ...


def is_swapped(zero: object, tensor: torch.Tensor | None) -> bool:
    """Whether the group of a tensor is in files between steps."""
    return _group(_swapping(zero), tensor) is not None


@contextmanager
def in_memory(zero: object, tensor: torch.Tensor | None, *, write: bool = False) -> Iterator[None]:
    """A context in which the group of a tensor is in memory: the tensor, its moments and its last
    gradient. With `write`, what was changed is kept."""
    swapping = _swapping(zero)
    group = _group(swapping, tensor)
    if swapping is None or group is None:
        yield
        return
    swapping._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        if write:
            swapping._optimizer_states_and_gradient_swap_out(group)
        else:
            swapping._release_swap_buffers(group)


def forget_moments(zero: object, tensor: torch.Tensor) -> None:
    """Tell the swapper that a tensor has no moments any more."""
    swapping = _swapping(zero)
    if swapping is not None and _group(swapping, tensor) is not None:
        info = swapping.optimizer_swapper.swap_params_info[cast("_GroupTensor", tensor).ds_id]
        info.tensors = info.tensors[:1]
        info.has_state_tensors = False


def _swapping(zero: object) -> _SwappingZero | None:
    return cast("_SwappingZero", zero) if getattr(zero, "swap_optimizer", False) else None


def _group(zero: _SwappingZero | None, tensor: torch.Tensor | None) -> int | None:
    """The number of a tensor's group, None if it is always in memory."""
    if zero is None:
        return None
    tensors = zero.fp32_partitioned_groups_flat
    place = next((number for number, each in enumerate(tensors) if each is tensor), None)
    return place if place is not None and zero._swappable_optimizer_subgroup(place) else None


def guard_swapping(zero: object) -> None:
    """Make up for what DeepSpeed (0.19.8) leaves out if `zero` swaps. It does not look at the
    results of its reads and writes: after one that failed, it trains on with whatever is in memory.

    Gradients stay in host memory. DeepSpeed would read them to addresses that are not multiples of
    the disk's block size, which fails on most disks. What is read is compared, by sums, with what
    was written. Raises UserError if the disk does not give back the weights of now."""
    swapping = _swapping(zero)
    if swapping is None:
        return
    _check_moments(swapping.optimizer)
    swapper = swapping.optimizer_swapper
    itself, cls = weakref.proxy(swapper), type(swapper)  # no cycle: memory is free when released
    written: dict[str, list[int]] = {}

    def read(parameter: _GroupTensor, async_parameter: object = None) -> None:
        cls.swap_in_optimizer_state(itself, parameter, async_parameter)
        sums = _sums(itself, parameter)
        if written.setdefault(parameter.ds_id, sums) != sums:
            raise UserError(_CORRUPTION_MESSAGE.format(folder=itself.swap_folder))

    def write(parameter: _GroupTensor, async_swap: bool = False) -> None:
        written[parameter.ds_id] = _sums(itself, parameter)
        cls.swap_out_optimizer_state(itself, parameter, async_swap)

    def keep(
        parameter: _GroupTensor, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]
    ) -> None:
        kept = itself.swap_params_info[parameter.ds_id].unswapped_gradients
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            kept[offset] = gradient.to("cpu")

    swapper.swap_in_optimizer_state, swapper.swap_out_optimizer_state = read, write
    swapper.swap_out_gradients = keep
    for tensor, weights in zip(
        swapping.fp32_partitioned_groups_flat, swapping.fp16_partitioned_groups_flat, strict=True
    ):
        with in_memory(zero, tensor):
            expected = weights.to(tensor.device, torch.float32)
            if not torch.equal(tensor.nan_to_num(), expected.nan_to_num()):  # as padding is
                raise UserError(_CORRUPTION_MESSAGE.format(folder=swapper.swap_folder))


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    spec: OptimizerStateSpec = getattr(optimizer, "state_spec", ADAM)
    for name, dtype in spec.moments.items():
        if dtype != torch.float32:
            raise UserError(
                f"optimizer.kind: {type(optimizer).__name__} keeps {name!r} in "
                f"{str(dtype).removeprefix('torch.')}, but DeepSpeed writes float32 to files; "
                'offload to the "cpu" instead'
            )


def _sums(swapper: _Swapper, parameter: _GroupTensor) -> list[int]:
    """A sum over the bits of each tensor of a group that is in memory."""
    info = swapper._get_param_swap_info(parameter)
    return [int(_bits(each).sum(dtype=torch.int64)) for each in info.get_compute_tensors()]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int32)
