"""Runs of tiny.py's model on the engine, one function a comparison.

A run is written `stage:precision` or `stage:precision:micro-batch`. ZeRO 3 comes last and plain
loops before it: it replaces F.linear in its process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from palm_ds.engine import Engine
from palm_ds.runtime.deepspeed.ds_config import make_ds_config, read_ds_config
from palm_ds.runtime.processes import measure
from palm_ds.runtime.processes.processes import start
from tests.distributed.tiny import (
    OPTIMIZER,
    REPORTS,
    ROWS,
    make_engine,
    make_model,
    plain_loop,
    train,
)


def losses(runs: list[str], steps: int = 8, dropout: float = 0.0) -> dict[str, Any]:
    """Losses of the same steps in each run, those with `:dropout` behind them with dropout, and in
    plain loops."""
    numbers = range(steps)
    rates = {"plain": 0.0} | ({"dropout": dropout} if dropout else {}) if REPORTS else {}
    results: dict[str, Any] = {name: plain_loop(numbers, dropout=p) for name, p in rates.items()}
    for run in runs:
        stage, precision, micro, *dropped = run.split(":")
        rate = dropout if dropped else 0.0
        engine = make_engine(int(stage), precision, int(micro), rate, scale_power=8)
        results[run] = train(engine, numbers)
        results["world"] = engine.world
    return results


def resume(folder: str, runs: list[str], resumed: bool = False) -> dict[str, Any]:
    """4 steps, saved after 2 in the foreground and in the background, or resumed from the latter;
    every run has its own folder. The checkpoint in the background exists after step 4 only."""
    results = {}
    for run in runs:
        stage, precision = run.split(":")
        place = Path(folder) / run.replace(":", "-")
        engine = make_engine(int(stage), precision, micro=4, dropout=0.1)
        state = {"step": 2, "note": run}
        if resumed:
            loaded = engine.load(place)
            assert loaded == state
        else:
            loaded = engine.load(place)
            assert loaded is None
            train(engine, range(2))
            foreground = engine.save(place / "foreground", state, step=2)
            started = engine.start_save(place, state, step=2)
            assert started
        found = train(engine, range(2, 4))
        norms = [engine.grad_norm, engine.loss_scale, engine.skipped_steps]
        weights = {k: v.double().sum().item() for k, v in engine.full_state_dict().items()}
        results[run] = [found, norms, weights]
        if not resumed:
            saved = engine.finish_save()
            one, other = ((x.path / "manifest.json").read_bytes() for x in (foreground, saved))
            assert one == other, run
    return results


def resize(folder: str, runs: dict[str, str], first: int, last: int) -> dict[str, list[float]]:
    """Each run resumes at step `first` from the checkpoint of its name, of other processes and
    another ZeRO stage, trains to step `last` and saves."""
    results = {}
    for name, run in runs.items():
        stage, precision = run.split(":")
        engine = make_engine(int(stage), precision, micro=4)
        state = engine.load(Path(folder) / name)
        assert (state or {"step": 0})["step"] == first, state
        results[name] = train(engine, range(first, last))
        engine.save(Path(folder) / name, {"step": last}, step=last)
    return results


def rollback(folder: str, stages: list[int]) -> dict[int, list[list[float]]]:
    """Save, continue, load the checkpoint into the same engine, and repeat the same steps."""
    results = {}
    for stage in stages:
        place = Path(folder) / f"stage{stage}"
        engine = make_engine(stage, micro=8, dropout=0.1)
        train(engine, range(2))
        engine.save(place, {"step": 2}, step=2)
        first = train(engine, range(2, 4))
        loaded = engine.load(place)
        assert loaded == {"step": 2}
        results[stage] = [train(engine, range(2, 4)), first]
    return results


def shipped(folder: str) -> dict[str, Any]:
    """A few steps, a save and a resume with each file in ds_configs."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[union-attr]
    files = (Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json")
    results = {}
    for config in sorted(map(read_ds_config, files), key=lambda each: (each.stage, each.path)):
        place = Path(folder) / Path(config.path).stem
        options: dict[str, Any] = {"ds_config": config, "optimizer": OPTIMIZER, "seed": 1}
        engine = Engine(make_model(), rows=ROWS, **options)
        train(engine, range(1))
        engine.save(place, {}, step=1)
        whole = train(engine, range(1, 3))
        engine = Engine(make_model(), rows=ROWS, **options)
        engine.load(place)
        results[place.name] = [whole, train(engine, range(1, 3)), engine.skipped_steps]
    return results


def preflight(folder: str) -> dict[str, Any]:
    """What the processes of one machine find when they compare and measure one another."""
    processes = start(make_ds_config({}))
    mine = Path(folder) / f"only_of_{processes.rank}"
    mine.mkdir()
    results = {
        "shared": measure.sees_shared_folder(processes, mine.parent),
        "rate": measure.all_reduce_rate(processes),
        "seconds": measure.product_seconds(processes),
        "clocks": measure.clocks(processes),
    }
    measure._SHARED_SECONDS = 0.2
    results["apart"] = measure.sees_shared_folder(processes, mine)
    return results | {"left": sorted(path.name for path in mine.parent.rglob(".shared*"))}


def hanging(done: str) -> dict[str, Any]:
    """Process 1 sleeps until the file `done` exists; how long does process 0 wait for it?"""
    processes = start(make_ds_config({"palm_ds": {"timeout_minutes": 0.05}}))
    groups = {"world": None, "group of DeepSpeed's making": dist.new_group()}
    processes.barrier()
    if processes.rank == 1:
        while not Path(done).exists():
            time.sleep(0.1)
        os._exit(0)
    results = {}
    for name, group in groups.items():
        begun = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            results[name] = time.monotonic() - begun, type(error).__name__
    Path(done).touch()
    dist.destroy_process_group()  # nobody will meet this process at the end
    return results
