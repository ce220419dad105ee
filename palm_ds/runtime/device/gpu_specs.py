"""Peak figures of GPUs by their makers' data sheets: the denominator of MFU.

Matrix products in TFLOP/s without sparsity (many data sheets print twice as much, with it), memory
in GB, its bandwidth in GB/s. fp16 and bf16 accumulate in fp32, which halves the fp16 figure of
GeForce cards. A card that is not here has no peak: nothing is guessed.

    V100, T4                     data sheets "NVIDIA V100" (2020) and "NVIDIA T4" (2019)
    A10, A40, A100               data sheets "NVIDIA A10", "A40", "A100" (2021, 2022)
    RTX 3090, RTX 4090           white papers "GA102" (appendix A) and "Ada" (appendix A)
    L4, L40S                     data sheets "NVIDIA L4", "NVIDIA L40S" (2023), halved
    H100 SXM, PCIe, NVL          data sheet "NVIDIA H100" (2024), halved; PCIe: its 2023 edition
    H200, H200 NVL               data sheet "NVIDIA H200" (2024), halved
    B200                         data sheet "NVIDIA HGX B200" (2025), an eighth of the board, halved
    MI250, MI250X, MI300X        data sheets "AMD Instinct" of each; torch sees the two halves of an
                                 MI250 as two devices, so a half is what is listed
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palm_ds.common.errors import UserError, suggest

TERA = 1e12


@dataclass(frozen=True)
class Card:
    """A GPU. Rates in TFLOP/s; 0 means that it has no fast product in that type."""

    name: str
    pattern: str
    """Regular expression of what the driver calls it, without the maker."""
    fp16: float
    bf16: float
    tf32: float
    fp32: float
    memory: float
    """GB; of the largest edition, if the driver's name does not tell."""
    bandwidth: float
    """GB/s of its memory."""
    link: float = 0.0
    """GB/s to its neighbors in a host, in one direction (NVLink, Infinity Fabric, else PCIe)."""

    def peak(self, precision: str, *, tf32: bool = True) -> float | None:
        """FLOP/s in fp32, bf16 or fp16 (fp32: with TF32 if allowed and there); None if it has no
        such products."""
        rate = getattr(self, precision)
        if precision == "fp32" and tf32 and self.tf32:
            rate = self.tf32
        return rate * TERA if rate else None


CARDS = (
    # name, driver's name, fp16, bf16, TF32, fp32, memory, bandwidth, link
    Card("V100", r"V100-SXM\d.*", 125, 0, 0, 15.7, 32, 900, 150),
    Card("V100 PCIe", r"V100-PCIE.*", 112, 0, 0, 14, 32, 900, 16),
    Card("T4", r"T4", 65, 0, 0, 8.1, 16, 320, 16),
    Card("A10", r"A10", 125, 125, 62.5, 31.2, 24, 600, 32),
    Card("A40", r"A40", 149.7, 149.7, 74.8, 37.4, 48, 696, 32),
    Card("A100 40GB", r"A100-SXM4-40GB", 312, 312, 156, 19.5, 40, 1555, 300),
    Card("A100 PCIe 40GB", r"A100-PCIE-40GB", 312, 312, 156, 19.5, 40, 1555, 32),
    Card("A100", r"A100-SXM4-80GB", 312, 312, 156, 19.5, 80, 2039, 300),
    Card("A100 PCIe", r"A100(-| )(PCIE-80GB|80GB PCIe)", 312, 312, 156, 19.5, 80, 1935, 32),
    Card("RTX 3090", r"GeForce RTX 3090", 71, 71, 35.6, 35.6, 24, 936, 32),
    Card("RTX 4090", r"GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6, 24, 1008, 32),
    Card("L4", r"L4", 121, 121, 60, 30.3, 24, 300, 32),
    Card("L40S", r"L40S", 362, 362, 183, 91.6, 48, 864, 32),
    Card("H100", r"H100 80GB HBM3|H100 SXM5.*", 989.4, 989.4, 494.7, 66.9, 80, 3350, 450),
    Card("H100 PCIe", r"H100 PCIe", 756, 756, 378, 51.2, 80, 2039, 64),
    Card("H100 NVL", r"H100 NVL", 835.5, 835.5, 417.5, 60, 94, 3900, 300),
    Card("H200", r"H200", 989.4, 989.4, 494.7, 66.9, 141, 4800, 450),
    Card("H200 NVL", r"H200 NVL", 835.5, 835.5, 417.5, 60, 141, 4800, 450),
    Card("B200", r"B200", 2250, 2250, 1125, 75, 180, 7700, 900),
    Card("MI250", r"Instinct MI250", 181, 181, 0, 45.3, 64, 1638, 200),
    Card("MI250X", r"Instinct MI250X", 191.5, 191.5, 0, 47.9, 64, 1638, 200),
    Card("MI300X", r"Instinct MI300X", 1307.4, 1307.4, 653.7, 163.4, 192, 5300, 448),
)


def find_card(device_name: str) -> Card | None:
    """The card that a driver names so ("NVIDIA A100-SXM4-80GB"); None if it is not in the table.
    Part of a card (MIG) is not in it."""
    bare = re.sub(r"^((NVIDIA|Tesla|AMD)\s+)+", "", device_name.strip())
    return next((card for card in CARDS if re.fullmatch(card.pattern, bare)), None)


def card_named(name: str, where: str) -> Card:
    """The card with this short name, as a user writes it. Raises UserError, starting with
    `where`."""
    names = {card.name.lower(): card for card in CARDS}
    wanted = re.sub(r"\s+|-", " ", name.strip().lower()).removesuffix(" sxm")
    if wanted not in names:
        known = [card.name for card in CARDS]
        raise UserError(f'{where}: no card "{name}"{suggest(name, known)}')
    return names[wanted]
