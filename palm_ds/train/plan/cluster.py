"""The GPUs that a plan is for: `8 to 1024 x H100, 8 per host, 400 Gb/s, 35 %`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palm_ds.common.errors import UserError
from palm_ds.runtime.device.gpu_specs import Card, card_named

EFFICIENCY = 0.30
"""Share of a card's peak that the layers reach, unless the plan says another: an assumption. Open
trainers of base-size encoders report 25 %, MLPerf's hand-made BERT-large about 50 % (H100)."""
PER_HOST = 8
_GPUS = re.compile(r"(?P<first>[\d,]+)(\s+to\s+(?P<last>[\d,]+))?\s*(x|\*)\s*(?P<card>\S.*)", re.I)
_PER_HOST = re.compile(r"(?P<number>\d+)\s+per\s+(host|node)", re.I)
_NETWORK = re.compile(r"(?P<number>\d+(\.\d+)?)\s*Gb/s(\s+per\s+(?P<each>host|node|GPU))?", re.I)
_SHARE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*%")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs and the network between their hosts."""

    gpus: int
    card: Card
    per_host: int = PER_HOST
    network: float = 0.0
    """Bytes/s of a host in one direction; 0 for one host."""
    efficiency: float = EFFICIENCY

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.per_host)

    @property
    def rate(self) -> float:
        """Bytes/s that each GPU of a ring over all of them can send. The rings of a host share its
        network and send each byte over it once."""
        link = self.card.link * 1e9
        return link if self.hosts == 1 else min(link, self.network)

    def __str__(self) -> str:
        network = f", {8 * self.network / 1e9:g} Gb/s per host" if self.network else ""
        return f"{self.gpus:,} x {self.card.name}, {self.per_host} per host{network}"


def parse_clusters(text: str) -> list[Cluster]:
    """The clusters of a plan; `8 to 1024 x` is a list that doubles. Raises UserError."""
    values: dict[str, float] = {}
    gpus: re.Match[str] | None = None
    for part in filter(None, (part.strip() for part in re.split(r",(?!\d{3})", text))):
        if match := _GPUS.fullmatch(part):
            gpus = match
        elif match := _PER_HOST.fullmatch(part):
            values["per_host"] = int(match["number"])
        elif match := _NETWORK.fullmatch(part):
            values["network"] = float(match["number"]) * 1e9 / 8
            values["per_gpu"] = (match["each"] or "host").lower() == "gpu"
        elif match := _SHARE.fullmatch(part):
            values["efficiency"] = float(match["number"]) / 100
        else:
            raise _wrong(f'cannot read "{part}"')
    if gpus is None:
        raise _wrong("no GPUs")
    return _clusters(gpus, values)


def _clusters(gpus: re.Match[str], values: dict[str, float]) -> list[Cluster]:
    card = card_named(gpus["card"], "plan")
    first = int(gpus["first"].replace(",", ""))
    last = int((gpus["last"] or gpus["first"]).replace(",", ""))
    per_host = int(values.get("per_host", PER_HOST))
    efficiency = values.get("efficiency", EFFICIENCY)
    if not (0 < first <= last and per_host and 0 < efficiency <= 1):
        raise _wrong("numbers must be above 0, and the share of peak at most 100 %")
    network = values.get("network", 0.0) * (per_host if values.get("per_gpu") else 1)
    if last > per_host and not network:
        raise _wrong(f"{last} GPUs are {-(-last // per_host)} hosts, and their network is missing")
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return [
        Cluster(
            gpus=count,
            card=card,
            per_host=per_host,
            network=network if count > per_host else 0.0,
            efficiency=efficiency,
        )
        for count in counts
    ]


def _wrong(reason: str) -> UserError:
    return UserError(
        f"plan: {reason}; write for example `64 x H100, 8 per host, 400 Gb/s per host, 35 %` "
        "(the share of peak), or `8 to 1024 x H100, ...`"
    )
