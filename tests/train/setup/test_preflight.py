"""Hosts that differ are named before a step is trained; in distributed/ with real processes."""

from __future__ import annotations

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.train.plan.memory import MemoryPlan
from palm_ds.train.setup.preflight import HostFacts, _memory_line, check_same


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


def test_a_cpu_holds_only_the_part_of_a_bucket_that_gradients_fill() -> None:
    plan = MemoryPlan(
        weights=1e9, gradients=1e9, optimizer=3e9, buffers=8e9, activations=1e9, working=0
    )
    line = _memory_line(torch.device("cpu"), plan)
    assert line.startswith("memory of a process: about 8 GB of ") and "buffers 2 GB, " in line
