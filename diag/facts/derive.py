"""Values that follow from logged ones by subtraction: what is missing, what others hold, what lies idle.

In: Facts as collected. Out: the same with derived facts added. Each derived fact carries the line of the text it
was read from, so that several out-of-memory texts in one log stay apart. A missing part gives no fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from diag.facts.model import Fact, Facts, Value
from diag.facts.torch_oom import OomReading, read_ooms
from diag.terms import Origin

_SLEEPS = 3  # readings that make a trend
_SAME = 0.03  # two printed sizes of one thing
_NEARLY_FULL = 70  # percent of the pool; the next full-length request does not fit
_MOST = 0.6  # of the processes listed
_ALIKE = 0.10  # processes within ten percent of each other hold "about the same"


def derive(facts: Facts) -> Facts:
    """Facts with the derived ones added."""
    table = {name: list(values) for name, values in facts.table.items()}
    derived = (_differences, _oom, _budget, _cards, _pool_bound, _asleep)
    for fact in (fact for how in derived for fact in how(facts)):
        table.setdefault(fact.name, []).append(fact)
    return replace(facts, table={name: tuple(values) for name, values in table.items()})


_DIFFERENCES: tuple[tuple[str, str, str], ...] = (
    ("kv.shortfall", "kv.needed", "kv.available"),
    ("device.shortfall", "device.requested", "device.free_at_start"),
    ("device.taken_at_start", "device.total", "device.free_at_start"),
    ("profile.grown", "profile.final_free", "profile.initial_free"),
)


def _differences(facts: Facts) -> Iterator[Fact]:
    """Left minus right where one line prints both."""
    for name, left, right in _DIFFERENCES:
        by_line = {fact.line: fact for fact in facts.all(right)}
        for first in facts.all(left):
            second = by_line.get(first.line)
            if second is not None:
                value = float(first.value) - float(second.value)
                yield replace(first, name=name, value=round(value), origin=Origin.DERIVED)


def _budget(facts: Facts) -> Iterator[Fact]:
    """Weights above the requested memory of the same rank: nothing could be left for the KV cache."""
    for weights in facts.all("weights.memory"):
        requested = facts.get("device.requested", rank=weights.rank)
        if requested is not None:
            value = int(weights.value) - int(requested.value)
            yield replace(weights, name="weights.over_budget", value=value, origin=Origin.DERIVED)


def _oom(facts: Facts) -> Iterator[Fact]:
    """The arithmetic of each out-of-memory text, and growth from the first to the last of a rank."""
    lowest: dict[int | None, OomReading] = {}
    printed = {("oom.process_in_use", fact.line) for fact in facts.all("oom.process_in_use")}
    for reading in read_ooms(facts):
        for name, unit, value_of in _OF_READING:
            value = value_of(reading)
            if value is not None and (name, reading.line) not in printed:
                yield _derived(reading, name, unit, value=value)
        first = lowest.setdefault(reading.rank, reading)
        growth = _less(reading.allocated, first.allocated)
        if growth is not None and first is not reading and first.gpu == reading.gpu:
            yield _derived(reading, "oom.growth", "bytes", value=growth)


def _derived(reading: OomReading, name: str, unit: str, *, value: Value) -> Fact:
    return Fact(
        name=name,
        value=value,
        unit=unit,
        line=reading.line,
        rank=reading.rank,
        origin=Origin.DERIVED,
    )


def _equal_neighbours(reading: OomReading) -> int | None:
    """How many other processes hold about the same: the other ranks' contexts on one card."""
    sizes = sorted(reading.listed)
    alike = max((sum(1 for s in sizes if abs(s - t) <= _ALIKE * t) for t in sizes), default=None)
    return alike if alike and alike >= _MOST * len(sizes) else None


_OF_READING: tuple[tuple[str, str, Callable[[OomReading], int | float | bool | None]], ...] = (
    ("oom.process_in_use", "bytes", lambda r: r.process_in_use),
    ("oom.non_torch", "bytes", lambda r: r.non_torch),
    ("oom.others", "bytes", lambda r: r.others or None),
    ("oom.short", "bytes", lambda r: _less(r.tried, r.free)),
    ("oom.fragmented", "bool", lambda r: r.fragmented),
    ("oom.free_exceeds_tried", "bool", lambda r: r.free_exceeds_tried),
    ("oom.others_share", "ratio", lambda r: _share(r.others, r.total)),
    ("oom.non_torch_share", "ratio", lambda r: _share(r.non_torch, r.total)),
    ("oom.outside_share", "ratio", lambda r: _share(r.outside_torch, r.total)),
    ("oom.tried_share", "ratio", lambda r: _share(r.tried, r.total)),
    ("oom.allocated_share", "ratio", lambda r: _share(r.allocated, r.total)),
    ("oom.idle_of_device", "ratio", lambda r: _share(r.reserved_unallocated, r.total)),
    ("oom.idle_share", "ratio", lambda r: _share(r.reserved_unallocated, r.tried)),
    ("oom.private_share", "ratio", lambda r: _share(r.private_pools, r.total)),
    ("oom.equal_neighbours", "count", _equal_neighbours),
)


def _cards(facts: Facts) -> Iterator[Fact]:
    """How far the GPUs of an nvidia-smi table differ."""
    used = facts.all("nvsmi.used")
    if len(used) > 1:
        sizes = [int(fact.value) for fact in used]
        spread = max(sizes) - min(sizes)
        yield replace(used[0], name="nvsmi.spread", value=spread, origin=Origin.DERIVED)


def _asleep(facts: Facts) -> Iterator[Fact]:
    """Memory still in use while asleep: its growth from one sleep to the next, and whether an error lists it."""
    kept = facts.all("sleep.in_use")
    sizes = [int(fact.value) for fact in kept]
    for rank in {fact.rank for fact in kept}:
        own = [fact for fact in kept if fact.rank == rank]
        values = [int(fact.value) for fact in own]
        if len(own) >= _SLEEPS and values == sorted(values):
            growth = values[-1] - values[0]
            yield replace(own[-1], name="sleep.growth", value=growth, origin=Origin.DERIVED)
    for reading in read_ooms(facts):
        if any(abs(size - other) <= _SAME * size for size in sizes for other in reading.listed):
            yield _derived(reading, "oom.sleeper", "bool", value=True)


def _pool_bound(facts: Facts) -> Iterator[Fact]:
    """More requests wait than run, and no more run than fit at full length: the pool limits the server."""
    fits = facts.number("kv.max_concurrency")
    if fits is None:
        return
    for event in facts.seen("serve.stats_v1", "serve.stats_v1_early", "serve.stats_v0"):
        running, waiting, usage = (
            event.values.get(name) for name in ("running_count", "waiting_count", "kv_usage_pct")
        )
        if not (isinstance(running, int) and isinstance(waiting, int) and isinstance(usage, float)):
            continue
        if 1 <= running <= min(waiting, fits + 0.5) and usage >= _NEARLY_FULL:
            number = event.line.number
            yield Fact(
                name="serving.pool_bound",
                value=True,
                unit="bool",
                line=number,
                origin=Origin.DERIVED,
            )
            return


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _less(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right
