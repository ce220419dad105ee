"""Reads and checks a DeepSpeed JSON file. It determines speed and memory, never the result.

    read_ds_config("ds_configs/zero2_bf16.json") -> DSConfig
    ds_config.deepspeed_config(rows=256, world=8, clip=1.0) -> the mapping for DeepSpeed

The file is DeepSpeed's own, without what belongs to the recipe (batch, optimizer, schedule,
clipping), plus a section "palm_ds" and a line "_about" that describes the file. Every "auto" is
resolved here, since DeepSpeed crashes on some and ignores others. Keys are checked against those
that the installed DeepSpeed reads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from palm_ds.common.config import override, parse, read_json, shorten
from palm_ds.common.errors import UserError, suggest
from palm_ds.runtime.deepspeed import refused_keys
from palm_ds.runtime.deepspeed.ds_config_check import (
    ConfigVerdict,
    kind_wanted,
    processes_now,
    validate_with_deepspeed,
)

_TEXTS = ("communication_data_type", "seq_parallel_communication_data_type", "log_level")

_MICRO_BATCH = 8
"""Rows of a micro-batch, at most, if nothing is known of the device."""
_WITH_CUDA_KERNELS = ("zero_quantized_weights", "zero_quantized_gradients")
"""Keys of ZeRO 3 that DeepSpeed has for GPUs only."""
_MAX_SCALE_POWER = 127
"""A loss scale is a number in fp32."""
_SWAPPED_VALUES = 100_000_000
"""Default of `sub_group_size` with optimizer state in files: buffers of 2 GB; with DeepSpeed's, of
20."""
_NO_PRINT = "{where}: steps_per_print has no effect; set `log.every` in the recipe"
_STAGE_1_FOR_0 = (
    "{where}: zero_optimization.stage 0 with {precision} runs as stage 1: the same losses with "
    "less memory (DeepSpeed's own stage 0 is wrong in {precision})"
)


@dataclass(frozen=True, kw_only=True)
class Comms:
    """Communication between processes."""

    shm_all_reduce: bool = False
    """On CPU, use DeepSpeed's shared-memory all-reduce. It is compiled at first use, leaves files
    in /dev/shm and, if killed, a lock that blocks later runs."""


@dataclass(frozen=True, kw_only=True)
class PalmSection:
    """The section "palm_ds" of a DeepSpeed file."""

    data_workers: NonNegativeInt = 0
    """Processes that prepare batches in advance; 0: the training process prepares them itself."""
    tf32: bool = False
    """fp32 on GPUs: round the inputs of matrix products to 10 bits of mantissa (TF32), which is
    several times faster. Off by default, since fp32 is what other precisions are compared with."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """{operation: implementation}, as in docs/model.md; "auto" or missing: the fastest."""
    comms: Comms = Comms()
    timeout_minutes: PositiveFloat = 30.0
    """Time that a process waits for the others before it gives up."""
    watchdog_minutes: NonNegativeFloat | None = None
    """End the process (exit code 42) if no step finishes within this time; 0: never. Default: 20
    times the slowest of the last 100 steps, at least 10 minutes."""
    peer_seconds: NonNegativeFloat = 30.0
    """End the process (exit code 42) if another one gives no sign of life for this time; 0:
    never."""


@dataclass(frozen=True, kw_only=True)
class DSConfig(PalmSection):
    """A checked DeepSpeed file."""

    path: str
    sections: Mapping[str, Any]
    """DeepSpeed's configuration except for what depends on the batch."""
    stage: int
    """ZeRO stage."""
    precision: Literal["fp32", "bf16", "fp16"]
    micro_rows: int | None = None
    """Rows of a micro-batch; None means that `micro_batching` chooses."""
    most_micro_rows: int = _MICRO_BATCH
    """The largest number that it chooses."""
    notes: tuple[str, ...] = ()
    """What to tell the user: keys that are carried out otherwise than written."""

    @property
    def fp16(self) -> bool:
        return self.precision == "fp16"

    def lowers_scale(self, scale: float) -> bool:
        """Whether fp16 may lower a loss scale of `scale`, for which it skips steps."""
        fp16 = self.sections.get("fp16", {})
        return self.fp16 and not fp16.get("loss_scale") and scale > fp16.get("min_loss_scale", 1)

    @property
    def watchdog_seconds(self) -> float | None:
        return None if self.watchdog_minutes is None else self.watchdog_minutes * 60

    @property
    def offloads(self) -> bool:
        """Whether the optimizer state is outside the GPU."""
        return self._offload.get("device", "none") != "none"

    @property
    def swap_path(self) -> Path | None:
        """The folder for optimizer state that is in files between steps; None if it is not."""
        return Path(self._offload["nvme_path"]) if self._offload.get("device") == "nvme" else None

    @property
    def for_gpus(self) -> list[str]:
        """Keys that only GPUs can carry out."""
        zero = self.sections.get("zero_optimization", {})
        return [key for key in _WITH_CUDA_KERNELS if self.stage == 3 and zero.get(key)]

    @property
    def _offload(self) -> Mapping[str, Any]:
        return self.sections.get("zero_optimization", {}).get("offload_optimizer") or {}

    def micro_batching(self, rows: int, world: int, *, shorter: int = 1) -> tuple[int, int]:
        """(rows per micro-batch, micro-batches per step) for `rows` per step on `world` processes;
        `shorter`: how many of these rows are as long as one of the longest. Raises UserError if the
        rows cannot be divided evenly."""
        if rows % world:
            raise UserError(
                f"{rows} rows per step cannot be divided evenly among {world} processes; "
                f"choose a `batch` that is a multiple of {world} rows"
            )
        share = rows // world
        micro = self.micro_rows or largest_divisor(share, self.most_micro_rows * shorter)
        if share % micro:
            raise UserError(
                f"{self.path}: train_micro_batch_size_per_gpu: {micro} rows do not divide the "
                f'{share} rows per process and step; use a divisor of {share}, or "auto"'
            )
        return micro, share // micro

    def round_up_rows(self, rows: int, world: int) -> int:
        """The smallest number of rows per step, at least `rows`, that `micro_batching` accepts; the
        same on every device."""
        share = -(-rows // world)
        micro = self.micro_rows or min(share, _MICRO_BATCH)
        return -(-share // micro) * micro * world

    def deepspeed_config(self, *, rows: int, world: int, clip: float) -> dict[str, Any]:
        """The final configuration. Clipping, overflow checks and batch sizes are always explicit,
        since DeepSpeed's defaults are surprising (it clips at 1.0)."""
        micro, accumulation = self.micro_batching(rows, world)
        config = copy.deepcopy(dict(self.sections))
        config |= {
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0 if self.checks_itself else float(clip),
            "zero_allow_untested_optimizer": True,  # none of palm_ds's is tested by DeepSpeed
            "zero_force_ds_cpu_optimizer": False,
        }
        if world == 1 and self.stage in (1, 2):
            # There is nothing to overlap with, and DeepSpeed would wait for the device.
            config.setdefault("zero_optimization", {})["overlap_comm"] = False
        # DeepSpeed's own measure of throughput waits for the device twice a step.
        config.setdefault("timers", {"throughput": {"enabled": False}})
        if self.precision == "bf16":
            config["bf16"] = {**config["bf16"], "check_grad_overflow": True}
        return config

    @property
    def checks_itself(self) -> bool:
        """Whether the optimizer itself must check for non-finite gradients: in ZeRO 0, where
        DeepSpeed does not."""
        return self.stage == 0


def largest_divisor(number: int, most: int) -> int:
    return next(k for k in range(min(number, most), 0, -1) if number % k == 0)


def read_ds_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> DSConfig:
    """Read and check a DeepSpeed file. `overrides` by dotted key, such as
    {"zero_optimization.stage": 2}, are applied before the checks."""
    path = Path(path)
    values = read_json(path)
    for key, value in (overrides or {}).items():
        override(values, key, value)
    return make_ds_config(values, where=str(path))


def make_ds_config(values: Mapping[str, Any], *, where: str = "deepspeed config") -> DSConfig:
    """A DSConfig from the parsed file; `where` names it in errors."""
    sections = copy.deepcopy(dict(values))
    sections.pop("_about", None)
    section = parse(PalmSection, sections.pop("palm_ds", {}), f"{where}: palm_ds", strict=True)
    micro_rows = _micro_rows(sections.pop("train_micro_batch_size_per_gpu", "auto"), where)
    _refuse(sections, where)
    _resolve_auto(sections, where)
    _check_kinds(sections, where)
    stage = _stage(sections, where)
    precision = _precision(sections, where)
    notes = [_NO_PRINT.format(where=where)] if "steps_per_print" in sections else []
    if stage == 0 and precision != "fp32":
        stage = sections["zero_optimization"]["stage"] = 1
        notes.append(_STAGE_1_FOR_0.format(where=where, precision=precision))
    ds_config = DSConfig(
        path=where,
        sections=sections,
        stage=stage,
        precision=precision,
        micro_rows=micro_rows,
        notes=tuple(notes),
        **vars(section),
    )
    _check_with_deepspeed(ds_config)
    return ds_config


def _micro_rows(value: object, where: str) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"{where}: train_micro_batch_size_per_gpu: expected rows of a micro-batch, 1 or more, "
            f'or "auto", got {shorten(value)}'
        )
    return value


def _refuse(sections: dict[str, Any], where: str) -> None:
    for key in list(sections):
        if key in refused_keys.OF_THE_RECIPE:
            if sections[key] == "auto":  # the recipe decides
                del sections[key]
                continue
            raise UserError(
                f"{where}: {key}: does not belong here; {refused_keys.OF_THE_RECIPE[key]}"
            )
        if key in refused_keys.NOT_WITH_US and sections[key] is not False:
            raise UserError(f"{where}: {key}: not supported; {refused_keys.NOT_WITH_US[key]}")


def _resolve_auto(values: dict[str, Any], where: str, path: str = "") -> None:
    """For ZeRO's sizes, "auto" means DeepSpeed's default; elsewhere it is an error."""
    for key in list(values):
        value, name = values[key], f"{path}{key}"
        if isinstance(value, dict):
            _resolve_auto(value, where, f"{name}.")
        elif value == "auto":
            if not name.startswith("zero_optimization.") or key == "stage":
                raise UserError(f'{where}: {name}: "auto" is not supported here; write a value')
            del values[key]


def _stage(sections: dict[str, Any], where: str) -> int:
    zero = sections.setdefault("zero_optimization", {})
    _expect_section(zero, f"{where}: zero_optimization")
    stage = zero.setdefault("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(
            f"{where}: zero_optimization.stage: expected 0, 1, 2 or 3, got {shorten(stage)}"
        )
    _check_offload(zero, stage, f"{where}: zero_optimization")
    for key, (unset, why) in refused_keys.NOT_IN_ZERO.items():
        if zero.get(key) not in (unset, None):
            raise UserError(f"{where}: zero_optimization.{key}: not supported; {why}")
    if zero.get("compute_grad_norm") is False:
        raise UserError(
            f"{where}: zero_optimization.compute_grad_norm: must be true; non-finite "
            "gradients are detected by the norm"
        )
    return stage


def _check_offload(zero: dict[str, Any], stage: int, where: str) -> None:
    for part in ("offload_optimizer", "offload_param"):
        values = zero.get(part)
        if stage == 0 and values:
            raise UserError(f"{where}.{part}: needs stage 1, 2 or 3, got 0")
        if stage < 3 and values and part == "offload_param":
            raise UserError(f"{where}.{part}: needs stage 3, got {stage}")
        if not isinstance(values, Mapping):
            continue
        if values.get("super_offload"):
            raise UserError(
                f"{where}.{part}.super_offload: not supported; {refused_keys.OWN_OPTIMIZER}"
            )
        if values.get("device") != "nvme":
            continue
        if part == "offload_param":
            raise UserError(
                f"{where}.{part}.device: palm_ds reads and sets weights in memory; "
                '"nvme" is not supported, use "cpu"'
            )
        if stage != 3:
            raise UserError(f'{where}.{part}.device: "nvme" needs stage 3, got {stage}')
        zero.setdefault("sub_group_size", _SWAPPED_VALUES)
        _check_swapping(values, f"{where}.{part}")


def _check_swapping(values: Mapping[str, Any], where: str) -> None:
    path, count = values.get("nvme_path"), values.get("buffer_count")
    if not isinstance(path, str) or not path:
        raise UserError(f'{where}.nvme_path: "nvme" needs a folder on a local disk')
    if isinstance(count, int) and count < 4:
        raise UserError(f"{where}.buffer_count: must be 4 or more, got {count}")
    for key, needed in (("pipeline_read", False), ("pipeline_write", False), ("ratio", 1.0)):
        if values.get(key, needed) != needed:
            raise UserError(f'{where}.{key}: not supported with "nvme"; remove it')


def _precision(sections: dict[str, Any], where: str) -> Literal["fp32", "bf16", "fp16"]:
    on = [name for name in ("fp16", "bf16") if _enabled(sections, name, where)]
    if len(on) == 2:
        raise UserError(f"{where}: fp16 and bf16 are both enabled; enable one")
    for name in on:
        _check_half(sections[name], f"{where}: {name}")
    for name in ("fp16", "bf16"):
        if name not in on:
            sections.pop(name, None)
    return "fp16" if "fp16" in on else "bf16" if "bf16" in on else "fp32"


def _check_half(values: Mapping[str, Any], where: str) -> None:
    if values.get("check_grad_overflow") is False:
        raise UserError(
            f"{where}.check_grad_overflow: must be true; steps with non-finite gradients are "
            "skipped by it"
        )
    power = values.get("initial_scale_power")
    if isinstance(power, int) and power > _MAX_SCALE_POWER:
        raise UserError(
            f"{where}.initial_scale_power: expected up to {_MAX_SCALE_POWER}, got {power}"
        )
    for key, why in refused_keys.NOT_IN_HALF.items():
        if values.get(key):
            raise UserError(f"{where}.{key}: not supported; {why}")


def _expect_section(value: object, what: str) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{what}: expected a section {{...}}, got {shorten(value)}")


def _enabled(sections: Mapping[str, Any], name: str, where: str) -> bool:
    values = sections.get(name, {})
    _expect_section(values, f"{where}: {name}")
    enabled = values.get("enabled", False)
    if not isinstance(enabled, bool):
        raise UserError(f"{where}: {name}.enabled: expected true or false, got {shorten(enabled)}")
    return enabled


def _trial(ds_config: DSConfig) -> ConfigVerdict:
    world = processes_now()  # DeepSpeed checks the batch size against them
    rows = (ds_config.micro_rows or 1) * world
    return validate_with_deepspeed(
        ds_config.deepspeed_config(rows=rows, world=world, clip=1.0), ds_config.sections
    )


def _check_with_deepspeed(ds_config: DSConfig) -> None:
    """Let DeepSpeed parse the file as it will later; keys it does not read are unknown to it."""
    verdict = _trial(ds_config)
    if verdict.problem:
        section = "" if verdict.named else _failing_section(ds_config)
        raise UserError(f"{ds_config.path}: {section}{verdict.problem}")
    for key in ds_config.sections:
        if key not in verdict.keys_read:
            known = (
                (verdict.keys_read | {"palm_ds"})
                - set(refused_keys.OF_THE_RECIPE)
                - set(refused_keys.NOT_WITH_US)
            )
            raise UserError(f"{ds_config.path}: {key}: unknown key{suggest(key, known)}")
        _check_kind(ds_config.sections[key], verdict.defaults.get(key), f"{ds_config.path}: {key}")
    for section, defaults in verdict.section_defaults.items():
        for key, value in ds_config.sections.get(section, {}).items():
            where = f"{ds_config.path}: {section}.{key}"
            if key not in defaults:
                raise UserError(f"{where}: unknown key{suggest(key, defaults)}")
            _check_kind(value, defaults[key], where)


def _check_kind(value: object, default: object, where: str) -> None:
    if wanted := kind_wanted(value, default):
        raise UserError(f"{where}: expected {wanted}, got {shorten(value)}")


def _failing_section(ds_config: DSConfig) -> str:
    """The section without which DeepSpeed accepts the file."""
    for key in ds_config.sections:
        rest = {k: v for k, v in ds_config.sections.items() if k != key}
        if key != ds_config.precision and not _trial(replace(ds_config, sections=rest)).problem:
            return f"{key}: "
    return ""


def _check_kinds(sections: Mapping[str, Any], where: str) -> None:
    """DeepSpeed accepts any value for its flags and numbers, and fails later."""
    for key, value in sections.items():
        if value is None or (isinstance(value, str) and key not in _TEXTS):
            raise UserError(
                f"{where}: {key}: expected a number, true, false or a section, got {shorten(value)}"
            )
    wanted = {"steps_per_print": "1 or more", "gradient_predivide_factor": "a number above 0"}
    for key, what in wanted.items():
        value = sections.get(key, 1)
        if isinstance(value, int | float) and not value > 0:
            raise UserError(f"{where}: {key}: expected {what}, got {shorten(value)}")
    if sections.get("zero_allow_untested_optimizer") is False:
        raise UserError(
            f"{where}: zero_allow_untested_optimizer: must be true; DeepSpeed has tested none of "
            "palm_ds's optimizers"
        )
