"""Single sizes out of the facts: totals, requested memory, KV budget and need, each with its source.

In: `Facts` of one start attempt and what is known of the release. Out: `Sized` values; unknown is a
`Sized` without value. A rank's own value wins; else the one printed without a rank; else the least
favourable of the other ranks, as derived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from diag.memory.eras import Era, default_gpu_memory_utilization, era_of
from diag.memory.model import UNKNOWN, Sized, combine
from diag.terms import Origin

if TYPE_CHECKING:
    from diag.facts.model import Fact, Facts

Pick = Callable[[Iterable[int]], int]
_MOST: Pick = max
_LEAST: Pick = min
_LEAST_DIFFERENCE = 0.00995
_MOST_RANKS = 512  # a log is hostile data: rank numbers are what it claims


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A share with its origin and lines; `value` None: unknown."""

    value: float | None = None
    origin: Origin = Origin.LOGGED
    lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known beside the facts: release, engine, assumptions for what the log lacks."""

    version: Version | None = None
    engine: str | None = None
    era: Era | None = None
    assumed_total: int | None = None
    assumed_gmu: float | None = None

    @property
    def formula_era(self) -> Era | None:
        """The era given, or that of the release."""
        return self.era or era_of(self.version, self.engine)


def printed(facts: Facts, name: str, rank: int | None = None, *, pick: Pick = _MOST) -> Sized:
    """A fact as bytes for one rank (see the module's order of preference)."""
    found = [fact for fact in facts.all(name) if _number(fact) is not None]
    own = [fact for fact in found if fact.rank == rank]
    if rank is not None and own:
        return _as_sized(own[0])
    shared = [fact for fact in found if fact.rank is None]
    if shared:
        return _picked(shared, pick)
    if not found:
        return UNKNOWN
    borrowed = _picked(found, pick)
    return Sized(value=borrowed.value, origin=_weaker(borrowed.origin), lines=borrowed.lines)


def weights(facts: Facts, rank: int | None = None) -> Sized:
    """Weights of a rank. V0 prints target and draft model apart: both are added."""
    found = [fact for fact in facts.all("weights.memory", rank=rank) if _number(fact) is not None]
    if rank is None:
        found = [fact for fact in found if fact.rank is None]
    both = len(found) == 2 and facts.text("vllm.engine") == "V0"
    if both and facts.text("config.speculative") not in (None, "None", "False"):
        return combine(_as_sized(found[0]), plus=(_as_sized(found[1]),))
    return printed(facts, "weights.memory", rank)


def free_at_start(facts: Facts, rank: int | None = None) -> Sized:
    """Free memory at the start-up check; of several devices without a rank the fullest one."""
    free = printed(facts, "device.free_at_start", rank, pick=_LEAST)
    return free if free.known else printed(facts, "profile.initial_free", rank, pick=_LEAST)


def total_bytes(facts: Facts, rank: int | None = None, *, assumed: int | None = None) -> Sized:
    """Total of a rank's device: printed, of an OOM text, requested / share, assumed, or estimated."""
    for name in ("device.total", "oom.total"):
        total = _beside_free(facts, name, rank)
        if total.value is not None and total.value > 0:
            return total
    requested = _beside_free(facts, "device.requested", rank)
    gmu = facts.get("config.gpu_memory_utilization", rank=rank)
    share = None if gmu is None else _float(gmu)
    if requested.value is not None and share:
        return Sized(
            value=round(requested.value / share),
            origin=Origin.DERIVED,
            lines=_merge(requested.lines, () if gmu is None else _lines(gmu)),
        )
    if assumed is not None:
        return Sized(value=assumed, origin=Origin.ASSUMED)
    return _total_by_graph_share(facts, rank)


def gmu_of(facts: Facts, setting: Setting = Setting(), rank: int | None = None) -> Ratio:
    """`gpu_memory_utilization`: printed, given, or the default of the release."""
    fact = facts.get("config.gpu_memory_utilization", rank=rank)
    share = None if fact is None else _float(fact)
    if fact is not None and share is not None and 0 < share <= 1:
        return Ratio(value=share, origin=fact.origin, lines=_lines(fact))
    value = setting.assumed_gmu
    if value is None:
        value = default_gpu_memory_utilization(setting.version)
    return Ratio(value=value, origin=Origin.ASSUMED)


def requested_bytes(facts: Facts, setting: Setting = Setting(), rank: int | None = None) -> Sized:
    """Requested memory (total x share): printed, or computed and rounded up as vLLM does."""
    logged = _beside_free(facts, "device.requested", rank)
    if logged.known:
        return logged
    total = total_bytes(facts, rank, assumed=setting.assumed_total)
    gmu = gmu_of(facts, setting, rank)
    if total.value is None or gmu.value is None:
        return UNKNOWN
    assumed = Origin.ASSUMED in (total.origin, gmu.origin)
    return Sized(
        value=math.ceil(total.value * gmu.value),
        origin=Origin.ASSUMED if assumed else Origin.DERIVED,
        lines=_merge(total.lines, gmu.lines),
    )


def kv_available(facts: Facts, rank: int | None = None) -> Sized:
    """Bytes of the KV budget: of the rank's profile line, else of the refusal. Can be negative."""
    logged = printed(facts, "profile.available_kv_cache", rank, pick=_LEAST)
    return logged if logged.known else printed(facts, "kv.available", rank, pick=_LEAST)


def kv_needed(facts: Facts, rank: int | None = None) -> Sized:
    """KV bytes of one full-length request: printed, or for V0 budget x asked / capacity tokens."""
    logged = printed(facts, "kv.needed", rank)
    if logged.known:
        return logged
    budget = kv_available(facts, rank)
    asked, capacity = (
        facts.get("kv.asked_len", rank=rank),
        facts.get("kv.capacity_tokens", rank=rank),
    )
    if budget.value is None or asked is None or capacity is None:
        return UNKNOWN
    length, tokens = _number(asked), _number(capacity)
    if not length or not tokens or tokens < 0 or budget.value < 0:
        return UNKNOWN
    return Sized(
        value=round(budget.value * length / tokens),
        origin=Origin.DERIVED,
        lines=_merge(budget.lines, _lines(asked), _lines(capacity)),
    )


def ranks_of(facts: Facts) -> tuple[int | None, ...]:
    """Ranks that printed a size of their own, in order; (None,) when none did."""
    names = ("weights.", "profile.", "device.", "oom.", "graph.", "kv.", "host.")
    found = {fact.rank for fact in facts if fact.rank is not None and fact.name.startswith(names)}
    return tuple(sorted(found)[:_MOST_RANKS]) or (None,)


def _beside_free(facts: Facts, name: str, rank: int | None) -> Sized:
    """A fact of the start-up check; without a rank, the one on the line of the fullest device."""
    if rank is None:
        free = printed(facts, "device.free_at_start", None, pick=_LEAST)
        beside = [fact for fact in facts.all(name) if fact.line in free.lines]
        if free.known and beside and _number(beside[0]) is not None:
            return _as_sized(beside[0])
    return printed(facts, name, rank)


def _total_by_graph_share(facts: Facts, rank: int | None) -> Sized:
    """The total within about 1 %: graph estimate / (share - equivalent share without graphs).

    vLLM prints both shares to four decimals; a difference below 0.01 is too coarse.
    """
    estimate = printed(facts, "profile.graph_estimate", rank)
    share = facts.get("config.gpu_memory_utilization", rank=rank)
    without = facts.get("profile.gmu_without_graphs", rank=rank)
    if estimate.value is None or share is None or without is None:
        return UNKNOWN
    high, low = _float(share), _float(without)
    if high is None or low is None or high - low < _LEAST_DIFFERENCE or estimate.value <= 0:
        return UNKNOWN
    return Sized(
        value=round(estimate.value / (high - low)),
        origin=Origin.ASSUMED,
        lines=_merge(estimate.lines, _lines(share), _lines(without)),
    )


def _picked(found: list[Fact], pick: Pick) -> Sized:
    wanted = pick(value for fact in found if (value := _number(fact)) is not None)
    return _as_sized(next(fact for fact in found if _number(fact) == wanted))


def _as_sized(fact: Fact) -> Sized:
    return Sized(value=_number(fact), origin=fact.origin, lines=_lines(fact))


def _weaker(origin: Origin) -> Origin:
    return Origin.DERIVED if origin is Origin.LOGGED else origin


def _number(fact: Fact) -> int | None:
    value = _float(fact)
    return None if value is None else round(value)


def _float(fact: Fact) -> float | None:
    if isinstance(fact.value, (str, bool)) or not math.isfinite(fact.value):
        return None
    return float(fact.value) if isinstance(fact.value, float) else fact.value


def _lines(fact: Fact) -> tuple[int, ...]:
    return () if fact.line is None else (fact.line,)


def _merge(*groups: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({line for group in groups for line in group}))
