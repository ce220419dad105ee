"""Every kind of encoder has one loss curve as well, dropout included."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.small_encoders import TRANSFORMERS
from tests.helpers.word_encoders import KINDS

pytestmark = pytest.mark.distributed
THOROUGH = (*KINDS, "albert", "modernbert")
RESUMED = ("bilstm", "albert", "modernbert")
OTHERS = [kind for kind in TRANSFORMERS if kind not in ("bert", *THOROUGH)]


def check(found: dict[str, list[float]], runs: list[str], resumed: list[str]) -> None:
    for run in resumed:
        assert found[run] == found[run.removesuffix(":resumed")]  # bit for bit
    for run in runs:
        plain = found[run.split(":")[0]]
        assert plain[-1] < plain[0] - 0.01  # it learns, so that a difference would grow
        np.testing.assert_allclose(found[run], plain, rtol=1e-5, err_msg=run)


def test_losses_equal_a_plain_loop(run_distributed, tmp_path) -> None:
    """Each kind at one stage, in two processes; some are saved and resumed too."""
    kinds = [*THOROUGH, *OTHERS]
    stage = {kind: number % 4 for number, kind in enumerate(kinds)}
    runs = [f"{kind}:{stage[kind]}:8" for kind in sorted(kinds, key=stage.__getitem__)]
    resumed = [f"{kind}:{stage[kind]}:8:resumed" for kind in RESUMED if stage[kind] < 3]
    given = {"runs": [*resumed, *runs], "folder": tmp_path, "steps": 4}
    check(run_distributed("encoder_kinds.losses", given, launcher="fork").result, runs, resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("launcher", "micro"), [("fork", 4), ("python", 16)])
def test_under_every_stage(launcher: str, micro: int, run_distributed, tmp_path) -> None:
    """The other kinds at one stage each, in two processes."""
    stages = (0, 1, 2, 3) if launcher == "fork" else (0, 3)  # ZeRO 3 last: it changes its process
    others = {kind: 1 + number % 3 for number, kind in enumerate(OTHERS) if launcher == "fork"}
    runs = [
        f"{kind}:{stage}:{micro}"
        for stage in stages
        for kind in [*THOROUGH, *(kind for kind, its in others.items() if its == stage)]
    ]
    resumed = [f"{kind}:{stage}:{micro}:resumed" for stage in stages[:-1:2] for kind in THOROUGH]
    given = {"runs": [*resumed, *runs], "folder": tmp_path, "steps": 8}
    check(run_distributed("encoder_kinds.losses", given, launcher=launcher).result, runs, resumed)
