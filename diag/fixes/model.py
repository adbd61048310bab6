"""What this package hands on: the verdict on gpu_memory_utilization, changes, fixes, and changes that won't help.

Plain data, carried by the report as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diag.facts.model import Value
from diag.terms import GmuVerdict, Safety


@dataclass(frozen=True, slots=True, kw_only=True)
class GmuAdvice:
    """Which way gpu_memory_utilization helps. Shares of total memory, 0..1; None: unknown."""

    verdict: GmuVerdict
    current: float | None
    lower_bound: float | None
    upper_bound: float | None
    suggested: float | None
    why: str
    popular: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting to change: exactly one of `flag`, `env`, `action` is set. `to` None: remove it."""

    flag: str | None = None
    env: str | None = None
    action: str | None = None
    from_: Value | None = None
    to: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change with the sum behind it. `fits` None: the log has too few numbers to say."""

    id: str
    title: str
    changes: tuple[Change, ...]
    fits: bool | None
    proof: str
    predicted: Mapping[str, Value] = field(default_factory=dict)
    cost: str = ""
    safety: Safety = Safety.SAFE
    verify: str = ""
    when_not: str = ""
    command: str | None = None
    lines_used: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHelpful:
    """A tempting change that does not help here, with the reason."""

    change: str
    why: str
