import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.device.gpu_specs import CARDS, card_named, find_card

DRIVER_NAMES = {
    "Tesla V100-SXM2-32GB": "V100",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla T4": "T4",
    "NVIDIA A10": "A10",
    "NVIDIA A40": "A40",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "AMD Instinct MI250X": "MI250X",
    "AMD Instinct MI300X": "MI300X",
}


@pytest.mark.parametrize("name", DRIVER_NAMES)
def test_drivers_names_lead_to_one_card(name: str) -> None:
    card = find_card(name)
    assert card is not None and card.name == DRIVER_NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "AMD Instinct MI250X / MI250",
        "cpu",
    ],
)
def test_nothing_is_guessed_for_cards_that_only_look_alike(name: str) -> None:
    assert find_card(name) is None


def test_peaks_depend_on_the_precision() -> None:
    h100, v100 = card_named("h100", "plan"), card_named("V100", "plan")
    assert h100.peak("bf16") == 989.4e12
    assert h100.peak("fp32") == 494.7e12 and h100.peak("fp32", tf32=False) == pytest.approx(66.9e12)
    assert v100.peak("bf16") is None and v100.peak("fp32") == 15.7e12


def test_an_unknown_card_names_the_known_ones() -> None:
    with pytest.raises(UserError, match='plan: no card "H10"; did you mean "H100"'):
        card_named("H10", "plan")


def test_fast_types_are_faster_than_slow_ones() -> None:
    for card in CARDS:
        assert card.fp16 >= max(card.bf16, card.tf32) and card.fp16 > card.fp32, card.name
        assert card.tf32 == 0 or card.tf32 >= card.fp32 and card.tf32 < card.bf16, card.name
