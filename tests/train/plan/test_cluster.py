import pytest

from palm_ds.common.errors import UserError
from palm_ds.train.plan.cluster import EFFICIENCY, parse_clusters


def test_everything_that_can_be_said() -> None:
    [found] = parse_clusters("64 x H100, 4 per host, 400 Gb/s per host, 35 %")
    assert (found.gpus, found.per_host, found.hosts) == (64, 4, 16)
    assert found.card.name == "H100" and found.network == 50e9 and found.efficiency == 0.35
    assert str(found) == "64 x H100, 4 per host, 400 Gb/s per host"


def test_numbers_of_gpus_double() -> None:
    found = parse_clusters("8 to 1,024 x a100, 400 Gb/s per GPU")
    assert [each.gpus for each in found] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert found[0].network == 0 and found[1].network == 400e9
    assert found[0].efficiency == EFFICIENCY


def test_one_host_needs_no_network() -> None:
    [found] = parse_clusters("8 x H200")
    assert found.hosts == 1 and found.rate == 450e9


def test_the_network_is_the_narrow_place_between_hosts() -> None:
    [found] = parse_clusters("16 x H100, 400 Gb/s")
    assert found.rate == 50e9


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("16 x H100", "16 GPUs are 2 hosts, and their network is missing"),
        ("8 H100", 'cannot read "8 H100"'),
        ("400 Gb/s", "no GPUs"),
        ("8 x H1000", 'no card "H1000"; did you mean "H100"'),
        ("0 x H100", "numbers must be above 0"),
        ("8 x H100, 120 %", "at most 100 %"),
        ("8 x H100, fast", 'cannot read "fast"'),
    ],
)
def test_what_cannot_be_read_is_named(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"^plan: .*{reason}"):
        parse_clusters(text)
