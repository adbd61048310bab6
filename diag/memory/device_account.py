"""A rank's memory as an out-of-memory text accounts for it, with the weights and the KV pool that
the log adds to it.

In: an `OomReading` and the facts printed before it. Out: the ledger of that device and the account
in one line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diag.memory import sizes
from diag.memory.budget_account import planned_parts
from diag.memory.entries import LABELS, close, entry, known_entries
from diag.memory.model import UNKNOWN, LedgerEntry, RankLedger, Sized, combine
from diag.memory.sizes import Setting, requested_bytes
from diag.terms import Origin
from diag.units import format_gib

if TYPE_CHECKING:
    from diag.facts.model import Facts
    from diag.facts.torch_oom import OomReading


def oom_ledger(
    facts: Facts, setting: Setting, rank: int | None, reading: OomReading
) -> tuple[RankLedger, str | None]:
    """The account of one out-of-memory text."""

    def logged(value: int | None) -> Sized:
        return Sized(value=value, origin=Origin.LOGGED, lines=(reading.line,))

    def derived(value: int | None) -> Sized:
        return Sized(value=value, origin=Origin.DERIVED, lines=(reading.line,))

    total = logged(reading.total)
    others, own = derived(reading.others), derived(reading.non_torch)
    own_label = "non-PyTorch memory of this process"
    if reading.non_torch is None and reading.others is None:
        own, own_label = derived(reading.outside_torch), "non-PyTorch memory and other processes"
    if reading.listed:
        others = logged(reading.others)
    entries = [
        *(known_entries(("other_processes", others)) if reading.others else []),
        *known_entries(("non_torch", own), label=own_label),
        *_torch_entries(facts, setting, rank, reading),
        *known_entries(("reserved_unallocated", logged(reading.reserved_unallocated))),
    ]
    entries.append(entry("free", logged(reading.free), wanted=reading.tried))
    ledger = close(facts, rank, total, entries)
    if ledger.device is None and reading.gpu is not None:
        ledger = replace(ledger, device=f"GPU {reading.gpu}")
    return ledger, _oom_formula(reading)


def _torch_entries(
    facts: Facts, setting: Setting, rank: int | None, reading: OomReading
) -> list[LedgerEntry]:
    """What PyTorch had allocated: weights, KV pool and private pools as far as known, the rest."""
    rest = Sized(value=reading.allocated, origin=Origin.LOGGED, lines=(reading.line,))
    if reading.allocated is None:
        whole = Sized(value=reading.process_in_use, lines=(reading.line,))
        return known_entries(("this_process", whole))
    entries: list[LedgerEntry] = []
    weights = _before(sizes.weights(facts, rank), reading.line)
    pool = _before(_planned_kv(facts, setting, rank), reading.line)
    private = Sized(value=reading.private_pools, lines=(reading.line,))
    after_weights = combine(rest, less=(weights,))
    if after_weights.value is not None and after_weights.value >= 0:
        entries += known_entries(("weights", weights))
        rest = after_weights
    if pool.known and entries and (pool.value or 0) > 0:
        placed = min(pool.value or 0, rest.value or 0)
        complete = placed == pool.value
        entries.append(
            entry(
                "kv_pool",
                replace(pool, value=placed) if complete else replace(rest, value=placed),
                wanted=None if complete else pool.value,
                label=None if complete else "KV pool, part placed",
            )
        )
        rest = combine(rest, less=(replace(pool, value=placed),))
    if private.value and private.value <= (rest.value or 0):
        # A sleep-mode pool holds weights and KV cache: it is then larger than what is left.
        entries += known_entries(("private_pools", private))
        rest = combine(rest, less=(private,))
    label = LABELS["torch_other"] if entries else "allocated by PyTorch"
    return [*entries, *known_entries(("torch_other", rest), label=label)]


def _planned_kv(facts: Facts, setting: Setting, rank: int | None) -> Sized:
    """The KV pool of the plan, by the smallest budget: all ranks get the same number of blocks."""
    budgets = [
        fact.value
        for fact in facts.all("profile.available_kv_cache")
        if isinstance(fact.value, (int, float)) and not isinstance(fact.value, bool)
    ]
    own = planned_parts(facts, setting, rank, requested_bytes(facts, setting, rank)).kv
    if own.value is None or own.origin is Origin.ASSUMED:
        return UNKNOWN
    return replace(own, value=min([own.value, *(round(value) for value in budgets)]))


def _before(size: Sized, line: int) -> Sized:
    """The size if it was printed before `line`, else unknown."""
    return size if size.lines and max(size.lines) <= line else UNKNOWN


def _oom_formula(reading: OomReading) -> str | None:
    """The account of an out-of-memory text in one line."""
    if reading.total is None or reading.free is None or reading.tried is None:
        return None
    own = []
    if reading.process_in_use is not None:
        own.append(f"{format_gib(reading.process_in_use)} this process")
    if reading.allocated is not None:
        idle = reading.reserved_unallocated or 0
        own.append(
            f"{format_gib(reading.allocated)} of it PyTorch, {format_gib(idle)} reserved and idle"
        )
    if reading.others:
        own.append(f"{format_gib(reading.others)} other processes")
    tail = f": {', '.join(own)}" if own else ""
    return (
        f"{format_gib(reading.tried)} GiB asked, {format_gib(reading.free)} free "
        f"of {format_gib(reading.total)} GiB{tail}"
    )
