"""Which documents are dropped before a corpus is made."""

from __future__ import annotations

from dataclasses import dataclass

from palm_ds.common.errors import UserError

_NEAR = 0.8


@dataclass(frozen=True, kw_only=True)
class ScreenOptions:
    """Options of the screening; by default nothing is dropped."""

    dedup: str | None = None  # exact: copies word for word; near (0.8), or a least similarity
    filters: tuple[str, ...] = ()  # names, or module:function

    def __post_init__(self) -> None:
        try:
            right = 0.5 <= self.similarity <= 1
        except ValueError:
            right = False
        if not right:
            raise UserError(f"--dedup {self.dedup}: must be exact, near, or a number from 0.5 to 1")

    @property
    def active(self) -> bool:
        return self.dedup is not None or bool(self.filters)

    @property
    def near(self) -> bool:
        """Whether near copies are dropped too."""
        return self.dedup not in (None, "exact")

    @property
    def similarity(self) -> float:
        """The least share of common shingles of near copies."""
        return {None: 1.0, "exact": 1.0, "near": _NEAR}.get(self.dedup) or float(str(self.dedup))
