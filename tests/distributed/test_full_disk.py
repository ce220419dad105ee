"""The complete command on a disk that becomes full: nothing is lost, not even a line of its log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from palm_ds.runtime.checkpoint import checkpoint
from tests.distributed.test_commands import (
    MASKS,
    PRETRAIN,
    ROOT,
    SECONDS,
    records,
    write_machine,
    write_recipe,
)
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_disk import small_disk
from tests.helpers.warm_python import clear_away, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FULL_DISK = str(ROOT / "tests" / "distributed" / "full_disk.py")


def test_a_run_waits_for_space_and_ends_well(tmp_path: Path) -> None:
    write_small_corpus(tmp_path / "corpus")
    recipe = write_recipe(
        tmp_path,
        tmp_path / "corpus",
        tasks={MASKS: {"source": "text"}},
        stages=[{MASKS: 22}],
        held_out=0.0,
    )
    ds_config = write_machine(tmp_path, zero_optimization={"stage": 1})
    with small_disk(tmp_path / "disk", "6m") as disk:
        run = disk / "run"
        words = [FULL_DISK, PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run]
        programs = start_together(1, words, env={"PYTHONPATH": str(ROOT)})
        try:
            output = programs[0].communicate(timeout=SECONDS)[0]
        finally:
            clear_away(programs)
        assert programs[0].returncode == 0, output[-4000:]
        assert "Traceback" not in output
        # Tried again after each failure, which is seen a step later or more: at most once in each
        # of the steps 12 to 21 (the checkpoint of step 10 can fail too if it is being written).
        assert 1 <= output.count("not saved: ") <= 10
        assert "No space left on device" in output
        assert re.search(r"the last one is step_000000(05|10|15); tries again every 0.05 s", output)
        assert [record["step"] for record in records(run)] == list(range(1, 23))
        assert checkpoint.steps_in(run / "checkpoints")[0] == 22
        assert (run / "hf" / "model.safetensors").exists() and (run / "report.html").exists()
