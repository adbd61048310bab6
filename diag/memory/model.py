"""What the memory arithmetic hands on: sized values with their source, and the ledger of each device.

The report carries the ledger as it is. Sizes are whole bytes, None is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from diag.terms import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A size in bytes with its origin and the log lines it rests on. `value` None: unknown."""

    value: int | None = None
    origin: Origin = Origin.LOGGED
    lines: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


UNKNOWN = Sized(value=None, origin=Origin.ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One term of a device's memory.

    `bytes` None: unknown. `wanted` is the size this term would have needed to reach for the failed
    request. `error_pct` is the range of an estimate, plus or minus percent.
    """

    term: str
    label: str
    bytes: int | None
    origin: Origin
    lines: tuple[int, ...] = ()
    wanted: int | None = None
    error_pct: float | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """Memory of one device: the known entries plus `unexplained_bytes` are exactly `total_bytes`.

    `unexplained_bytes` is None when the total is unknown; it is negative when the terms claim more
    than there is.
    """

    rank: int | None
    device: str | None
    total_bytes: int | None
    entries: tuple[LedgerEntry, ...]
    unexplained_bytes: int | None

    def entry(self, term: str) -> LedgerEntry | None:
        """The entry of a term, or None."""
        return next((entry for entry in self.entries if entry.term == term), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Memory by rank. `era` is the formula's letter, "host" for the RAM of the CPU back end."""

    era: str | None
    formula: str | None
    ranks: tuple[RankLedger, ...] = ()


def combine(start: Sized, *, plus: tuple[Sized, ...] = (), less: tuple[Sized, ...] = ()) -> Sized:
    """`start + plus - less`; unknown when any part is. The only place where maybe-missing sizes are
    summed.

    The result is derived, or assumed when a part is; it rests on the lines of all parts.
    """
    total = start.value
    parts = (start, *plus, *less)
    for part, sign in ((start, 0), *((item, 1) for item in plus), *((item, -1) for item in less)):
        if total is None or part.value is None:
            return UNKNOWN
        total += sign * part.value
    assumed = any(part.origin is Origin.ASSUMED for part in parts)
    lines = tuple(sorted({line for part in parts for line in part.lines}))
    return Sized(value=total, origin=Origin.ASSUMED if assumed else Origin.DERIVED, lines=lines)
