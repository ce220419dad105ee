"""Compares the hosts of a run before it starts, and measures them if asked to (`--check`).

Processes with another version of the source, of a package or of the data would train another model
than the rest, without an error.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import palm_ds
from palm_ds.common.errors import UserError
from palm_ds.common.files import fingerprint, hash_of_text
from palm_ds.common.messages import byte_size
from palm_ds.runtime.checkpoint.writer import short_memory
from palm_ds.runtime.device.memory import free_host_memory, host_memory
from palm_ds.runtime.processes import measure
from palm_ds.runtime.processes.launchers import host_name
from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.zero.swap_folder import swap_buffer_bytes, swap_bytes
from palm_ds.train.plan.cluster import Cluster
from palm_ds.train.plan.memory import MemoryPlan, plan_memory
from palm_ds.train.plan.table import StageWork, plan_lines, stage_lines
from palm_ds.train.plan.work import ModelSize, StepWork
from palm_ds.train.report.environment import package_versions
from palm_ds.train.setup.limits import checkpoint_bytes, existing_part, free_bytes, needed_bytes
from palm_ds.train.setup.run_folder import RunSpec, data_fingerprints, start_fingerprint
from palm_ds.train.setup.sources import Data

_COMPARED = ("palm_ds", "torch", "deepspeed", "numpy", "pyarrow", "tokenizers", "safetensors")
_MAX_NAMED = 3
_SLOW_RATIO = 1.3
"""Times the median: a process that takes longer slows the others."""
_CLOCK_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts that must be the same for all processes, by name."""

    host: str
    facts: dict[str, str]


def facts_of(run: RunSpec, data: Data) -> HostFacts:
    """The facts of this process."""
    facts = {f"package {name}": value for name, value in package_versions(_COMPARED).items()}
    facts["source of palm_ds"] = _source_hash()
    facts["recipe"] = run.recipe.fingerprint
    facts["DeepSpeed file"] = fingerprint(dict(run.ds_config.sections))[:12]
    prints = data_fingerprints(run.recipe, data) | start_fingerprint(run, data)
    facts |= {f"contents of {name}": value for name, value in prints.items()}
    return HostFacts(host=host_name(), facts=facts)


def check_same(hosts: Sequence[HostFacts]) -> None:
    """Raises UserError, with hosts, unless all processes have the same facts."""
    names = dict.fromkeys(name for one in hosts for name in one.facts)
    lines = [line for name in names if (line := _difference(name, hosts))]
    if lines:
        more = f" (and {len(lines) - 4} more)" if len(lines) > 4 else ""
        raise UserError(
            f"the hosts of this run differ: {'; '.join(lines[:4])}{more}. Make them the same"
        )


def _difference(name: str, found: Sequence[HostFacts]) -> str:
    hosts: dict[str, dict[str, None]] = {}
    for one in found:
        hosts.setdefault(one.facts.get(name, "missing"), {})[one.host] = None
    if len(hosts) == 1:
        return ""
    return f"{name}: " + ", ".join(f"{value} on {_named(on)}" for value, on in hosts.items())


def _named(hosts: dict[str, None]) -> str:
    names = list(hosts)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return " and ".join(names[:_MAX_NAMED]) + more


def compare_hosts(run: RunSpec, data: Data, processes: Processes) -> None:
    """Raises UserError on all processes if hosts differ or do not share the run folder.
    Collective."""
    if processes.world == 1:
        return
    facts = processes.gather(facts_of(run, data))
    check_same(facts)
    seen = measure.sees_shared_folder(processes, existing_part(run.folder))
    blind = dict.fromkeys(one.host for one, sees in zip(facts, seen, strict=True) if not sees)
    if blind and seen[0]:  # otherwise rank 0 cannot write there, and says so later
        raise UserError(
            f"run folder {run.folder}: not the same folder on {_named(blind)} as on "
            f"{facts[0].host}; name one on a file system that all hosts share"
        )


def findings(
    run: RunSpec,
    processes: Processes,
    model: ModelSize,
    work: StepWork,
    plan_for: Sequence[Cluster],
    stages: Sequence[StageWork] = (),
) -> list[str]:
    """One line for each measured property of the machines, and the plans for others, with what the
    `stages` take there. Collective."""
    memory = plan_memory(model, work, run.ds_config, world=processes.world)
    lines = _measurements(run, processes, model, memory)
    lines += plan_lines(model, work, run.ds_config, plan_for)
    return lines + stage_lines(model, stages, run.ds_config, plan_for)


def _measurements(
    run: RunSpec, processes: Processes, model: ModelSize, memory: MemoryPlan
) -> list[str]:
    hosts = processes.gather(host_name())
    lines = [
        _host_line(hosts),
        _disk_line(run, model),
        _memory_line(processes.device, memory),
        _checkpoint_line(run, processes, model),
    ]
    if processes.world > 1:
        rate = measure.all_reduce_rate(processes)
        lines.append(f"network: {byte_size(rate)}/s per process in an all-reduce")
    if run.ds_config.swap_path:
        lines.append(_swap_line(run, model.trained / processes.world))
    lines += [_speed_line(hosts, measure.product_seconds(processes))]
    return lines + _clock_lines(hosts, measure.clocks(processes))


def _host_line(hosts: Sequence[str]) -> str:
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    return "hosts: " + ", ".join(f"{host} ({number})" for host, number in counts.items())


def _disk_line(run: RunSpec, model: ModelSize) -> str:
    needed, free = needed_bytes(run, model), free_bytes(run.folder)
    return f"disk: {byte_size(free)} free; the run writes {byte_size(needed)}"


def _memory_line(device: torch.device, plan: MemoryPlan) -> str:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = host_memory()
        used = 2.0 * plan.weights  # of buckets, a CPU holds only the pages that gradients fill
        plan = replace(plan, buffers=min(plan.buffers, used))
    parts = {
        "weights": plan.weights,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "DeepSpeed's buffers": plan.buffers,
        "activations": plan.activations + plan.working,
    }
    listed = ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items())
    return (
        f"memory of a process: about {byte_size(plan.total)} of {byte_size(memory)} (predicted: "
        f"{listed})"
    )


def _swap_line(run: RunSpec, values: float) -> str:
    """Describe what a process that trains `values` takes of the disk and of memory."""
    files, buffers = swap_bytes(values), swap_buffer_bytes(run.ds_config, values)
    return (
        f"optimizer state of a process: {byte_size(files)} in files under "
        f"{run.ds_config.swap_path}, {byte_size(buffers)} of locked memory for reading them, "
        f"{byte_size(4 * values)} for gradients"
    )


def _checkpoint_line(run: RunSpec, processes: Processes, model: ModelSize) -> str:
    """Whether there is memory for the copies from which checkpoints are written. Collective."""
    size = checkpoint_bytes(run, model)
    hosts = processes.gather((host_name(), size // processes.world, free_host_memory()))
    how = "copied to host memory and written while training continues"
    if not run.recipe.save.background:
        how = "written while training waits (save.background: false)"
    elif run.ds_config.swap_path:
        how = "written while training waits: optimizer state is in files"
    elif problem := short_memory(hosts):
        how = f"written while training waits: {problem}"
    return f"checkpoints: {byte_size(size)}, {how}"


def _speed_line(hosts: Sequence[str], seconds: Sequence[float]) -> str:
    median = statistics.median(seconds)
    rank = max(range(len(seconds)), key=lambda rank: seconds[rank])
    ratio = seconds[rank] / median
    slow = f"; SLOW: more than {_SLOW_RATIO} times" if ratio > _SLOW_RATIO else ""
    return f"speed: the slowest is rank {rank} on {hosts[rank]}, {ratio:.2f} times the median{slow}"


def _clock_lines(hosts: Sequence[str], ahead: Sequence[float]) -> list[str]:
    middle = statistics.median(ahead)
    off = {host: offset - middle for host, offset in zip(hosts, ahead, strict=True)}
    return [
        f"clock: {host} is {abs(offset):,.0f} s {'ahead' if offset > 0 else 'behind'}; runs do not "
        "depend on it, but times in logs do"
        for host, offset in off.items()
        if abs(offset) > _CLOCK_SECONDS
    ]


def _source_hash() -> str:
    folder = Path(palm_ds.__file__).parent
    files = sorted(folder.rglob("*.py"))
    text = "".join(f"{file.relative_to(folder)} {file.read_text('utf-8')}" for file in files)
    return hash_of_text(text)[:12]
