"""Hosts that differ are named before a step is trained; in distributed/ with real processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from palm_ds.common.errors import UserError
from palm_ds.train.preflight import HostFacts, check_same, model_state_bytes
from palm_ds.train.run_folder import RunSpec


def host(name: str, **facts: str) -> HostFacts:
    return HostFacts(host=name, facts=facts)


def test_equal_hosts_pass() -> None:
    check_same([host("a", torch="2.6"), host("a", torch="2.6"), host("b", torch="2.6")])


def test_what_differs_is_named_with_its_hosts() -> None:
    found = [host("a", torch="2.6", data="x"), host("b", torch="2.5", data="x"), host("c")]
    wanted = "torch: 2.6 on a, 2.5 on b, missing on c; data: x on a and b, missing on c. Make"
    with pytest.raises(UserError, match=f"the hosts of this run differ: {wanted}"):
        check_same(found)


def test_many_hosts_and_differences_are_cut_short() -> None:
    facts = {f"f{number}": "1" for number in range(9)}
    many = [host(f"h{number}", **facts) for number in range(20)]
    with pytest.raises(UserError, match=r"1 on h0 and h1 and h2 and 17 more.* \(and 5 more\)"):
        check_same([*many, host("other")])


@pytest.mark.parametrize(
    ("stage", "precision", "offloads", "wanted"),
    [
        (0, "fp32", False, 16),
        (1, "fp32", False, 8 + 2),
        (1, "bf16", False, 4 + 3),
        (2, "bf16", False, 2 + 0.5 + 3),
        (3, "bf16", False, 4),
        (3, "bf16", True, 1),
    ],
)
def test_model_state_by_stage(stage: int, precision: str, offloads: bool, wanted: float) -> None:
    """Bytes of a parameter, on each of four processes."""
    config = SimpleNamespace(stage=stage, precision=precision, offloads=offloads)
    run = cast(RunSpec, SimpleNamespace(ds_config=config))
    assert model_state_bytes(run, 1000, world=4) == 1000 * wanted
