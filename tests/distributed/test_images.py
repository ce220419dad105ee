"""Texts with images have one loss curve, dropout included, whatever the processes, ZeRO stage and
micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]
RUNS = ("unimo:0:1", "ernie_vil:1:2", "unimo:2:4", "unimo:3:2", "ernie_vil:3:4")


@pytest.mark.parametrize("what", ["pretraining", "fine_tuning"])
def test_losses_equal_a_plain_loop(what: str, run_distributed) -> None:
    given = {"runs": list(RUNS), "steps": 4, "what": what}
    found = run_distributed("images.losses", given, launcher="fork").result
    for run in RUNS:
        plain = found[run.split(":")[0]]
        assert plain[-1] < plain[0] - 0.01
        np.testing.assert_allclose(found[run], plain, rtol=1e-5, err_msg=run)
