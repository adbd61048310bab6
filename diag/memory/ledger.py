"""The memory ledger: where every byte of each device went, by the formula of the release's era.

In: the facts of one start attempt, the release and the engine. Out: a `Ledger`, per rank either the
plan (weights, peak activation, KV pool, what the share leaves outside), the start-up check, the
account of an out-of-memory text, or the host RAM of the CPU back end. The known entries and the
unexplained remainder are exactly the total.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diag.facts.torch_oom import OomReading, read_ooms
from diag.memory import sizes
from diag.memory.budget_account import plan_ledger, start_ledger
from diag.memory.device_account import oom_ledger
from diag.memory.entries import LABELS, close, entry, known_entries
from diag.memory.model import UNKNOWN, Ledger, LedgerEntry, RankLedger, Sized, combine
from diag.memory.sizes import Setting, kv_available, printed, requested_bytes
from diag.units import format_gib

if TYPE_CHECKING:
    from packaging.version import Version

    from diag.facts.model import Facts
    from diag.memory.eras import Era

HOST = "host"

# Where a failing term is found when the log does not set it apart.
_STANDS_FOR = {
    "peak_activation": ("peak_activation_and_non_torch", "torch_other"),
    "cuda_graphs": ("private_pools", "torch_other"),
    "kv_pool": ("torch_other", "free"),
    "weights": ("torch_other",),
    "private_pools": ("cuda_graphs", "torch_other"),
    "reserved_unallocated": ("torch_other",),
    "collectives": ("non_torch", "peak_activation_and_non_torch", "torch_other"),
    "context": ("non_torch", "other_processes"),
    "non_torch": ("peak_activation_and_non_torch", "context"),
    "other_processes": ("context", "free"),
    "outside": ("free",),
}
# The failed request would not have added to these.
_NOT_OURS = ("other_processes", "context", "reserved_unallocated")


def build_ledger(
    facts: Facts,
    *,
    version: Version | None,
    engine: str | None,
    assumed_total: int | None = None,
    assumed_gmu: float | None = None,
    era: Era | None = None,
    oom_line: int | None = None,
) -> Ledger:
    """The ledger of every rank that printed sizes of its own, else of one rank without a number.

    Args: version and engine of the log, None when unknown; assumed_total (bytes) and assumed_gmu
        for what the log does not print; era when it is known without a version; oom_line picks
        the out-of-memory text to account for, else the first one of each rank.
    """
    setting = Setting(
        version=version,
        engine=engine,
        era=era,
        assumed_total=assumed_total,
        assumed_gmu=assumed_gmu,
    )
    if _on_host(facts):
        return _host_ledger(facts)
    letter = setting.formula_era
    readings = read_ooms(facts)
    built = [
        _rank_ledger(facts, setting, rank, _reading(readings, rank, oom_line))
        for rank in sizes.ranks_of(facts)
    ]
    if built[0][0].rank is not None:
        unranked = _reading(readings, None, oom_line)
        built += _unranked_ooms(facts, setting, unranked, [item for item, _ in built])
    formula = _pick_formula(built)
    return Ledger(
        era=None if letter is None else letter.value,
        formula=formula,
        ranks=tuple(ledger for ledger, _ in built),
    )


def mark_failed(ledger: Ledger, term: str, *, rank: int | None = None) -> Ledger:
    """A copy with the failing term flagged, on `rank` or on all ranks.

    A term the log does not set apart is flagged on the entry that holds it; one that the log has
    no number for is added as unknown. After an out-of-memory
    text the entry also gets `wanted`: its size plus the failed request.
    """
    return replace(
        ledger,
        ranks=tuple(
            _mark(item, term) if rank is None or item.rank in (rank, None) else item
            for item in ledger.ranks
        ),
    )


def _mark(ledger: RankLedger, term: str) -> RankLedger:
    terms = {item.term for item in ledger.entries}
    names = (term, *_STANDS_FOR.get(term, ()), "this_process", "free")
    found = next((name for name in names if name in terms), None)
    free = ledger.entry("free")
    asked = None if free is None or ledger.entry("outside") is not None else free.wanted

    def flagged(item: LedgerEntry) -> LedgerEntry:
        wanted = item.wanted
        if wanted is None and asked is not None and item.term not in _NOT_OURS:
            wanted = asked + (item.bytes or 0)
        return replace(item, failed=True, wanted=wanted)

    if found is None and ledger.entries and term in LABELS:
        unknown = replace(entry(term, UNKNOWN), failed=True)
        return replace(ledger, entries=(*ledger.entries, unknown))
    entries = tuple(flagged(item) if item.term == found else item for item in ledger.entries)
    return replace(ledger, entries=entries)


# --- one rank ---------------------------------------------------------------------------------


def _rank_ledger(
    facts: Facts, setting: Setting, rank: int | None, reading: OomReading | None
) -> tuple[RankLedger, str | None]:
    """The account of an out-of-memory text, the start-up check or the plan, whichever came last."""
    if reading is not None:
        return oom_ledger(facts, setting, rank, reading)
    free = printed(facts, "device.free_at_start", rank, pick=min)
    requested = requested_bytes(facts, setting, rank)
    loaded = sizes.weights(facts, rank).known or kv_available(facts, rank).known
    short = free.value is not None and requested.value is not None and free.value < requested.value
    if free.known and (short or not loaded):
        return start_ledger(facts, setting, rank)
    return plan_ledger(facts, setting, rank)


def _reading(
    readings: tuple[OomReading, ...], rank: int | None, oom_line: int | None
) -> OomReading | None:
    """The out-of-memory text of a rank: the chosen line, else its first with a device total."""
    found = [item for item in readings if item.rank == rank and item.total is not None]
    chosen = [item for item in found if item.line == oom_line]
    return next(iter(chosen or found), None)


def _unranked_ooms(
    facts: Facts, setting: Setting, reading: OomReading | None, known: list[RankLedger]
) -> list[tuple[RankLedger, str | None]]:
    """An out-of-memory text without a rank where other lines have one; repeats are left out."""
    if reading is None:
        return []
    for item in known:
        free = item.entry("free")
        if free is not None and (free.bytes, free.wanted) == (reading.free, reading.tried):
            return []
    return [oom_ledger(facts, setting, None, reading)]


# --- the CPU back end ---------------------------------------------------------------------------


def _on_host(facts: Facts) -> bool:
    return facts.text("config.backend") == "cpu" or facts.get("host.node_total") is not None


def _host_ledger(facts: Facts) -> Ledger:
    """Host RAM of the CPU back end: one ledger per rank that printed its node, else one."""
    built = [_host_rank(facts, rank) for rank in sizes.ranks_of(facts)]
    return Ledger(era=HOST, formula=_pick_formula(built), ranks=tuple(item for item, _ in built))


def _host_rank(facts: Facts, rank: int | None) -> tuple[RankLedger, str | None]:
    total = printed(facts, "host.node_total", rank)
    free = printed(facts, "host.node_available", rank, pick=min)
    wanted = printed(facts, "host.wanted", rank)
    if free.known:
        used = combine(total, less=(free,))
        entries = known_entries(("other_processes", used), label="in use on the node")
        entries.append(entry("free", free, wanted=wanted.value))
        formula = None
        if free.value is not None and wanted.value is not None:
            there = format_gib(free.value)
            formula = f"{format_gib(wanted.value)} GiB wanted; {there} GiB are available"
    else:
        entries, formula = _host_plan(facts, rank, total, wanted)
    return replace(close(facts, rank, total, entries), device="host RAM"), formula


def _host_plan(
    facts: Facts, rank: int | None, total: Sized, wanted: Sized
) -> tuple[list[LedgerEntry], str | None]:
    """The KV pool in host RAM, beside what the worker used before it."""
    weights = sizes.weights(facts, rank)
    non_kv = printed(facts, "profile.non_kv", rank)
    besides = combine(non_kv, less=(weights,)) if weights.known else non_kv
    kv = kv_available(facts, rank)
    if not kv.known:
        kv = printed(facts, "config.kv_cache_memory_bytes")
    needed = sizes.kv_needed(facts, rank)
    entries = [
        *known_entries(("weights", weights)),
        *known_entries(("peak_activation_and_non_torch", besides), label="other non-KV use"),
    ]
    if kv.known or needed.known:
        entries.append(entry("kv_pool", kv, wanted=needed.value))
    entries += known_entries(
        ("outside", combine(total, less=(wanted,))), label="outside the requested memory"
    )
    if kv.value is None or total.value is None:
        return entries, None
    pool = format_gib(kv.value)
    if wanted.value is not None and non_kv.value is not None:
        split = f"{format_gib(wanted.value)} GiB requested; - {format_gib(non_kv.value)} in use"
        return entries, f"{split} = {pool} GiB for the KV pool"
    return entries, f"{pool} of {format_gib(total.value)} GiB host RAM for the KV pool"


def _pick_formula(built: list[tuple[RankLedger, str | None]]) -> str | None:
    """The line of the rank with the least room; an out-of-memory text or a refused start first."""

    def room(pair: tuple[RankLedger, str | None]) -> tuple[int, int]:
        ledger = pair[0]
        free = ledger.entry("free")
        item = free or ledger.entry("kv_pool")
        size = item.bytes if item is not None and item.bytes is not None else 1 << 62
        return (0 if free is not None else 1, size)

    usable = [pair for pair in built if pair[1] is not None]
    return min(usable, key=room)[1] if usable else None
