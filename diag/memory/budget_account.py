"""A rank's memory as vLLM plans it: the requested memory split by the era's formula, or the
start-up check.

In: facts of one rank and what is known of the release. Out: its ledger and the formula with the
numbers filled in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.memory import sizes
from diag.memory.entries import LABELS, close, entry, known_entries, outside_label, share_text
from diag.memory.model import UNKNOWN, RankLedger, Sized, combine
from diag.memory.sizes import Setting, gmu_of, kv_available, printed, requested_bytes, total_bytes
from diag.units import GIB, format_gib

if TYPE_CHECKING:
    from diag.facts.model import Facts
    from diag.memory.eras import Era

_AGREES = round(0.03 * GIB)  # three sizes printed to a hundredth of a GiB agree within this
_ESTIMATE_PCT = 35.0  # how far vLLM's graph estimate was off in healthy logs
_OWN_CONTEXT = round(1.5 * GIB)  # more than this in use before start is not our own context


def start_ledger(facts: Facts, setting: Setting, rank: int | None) -> tuple[RankLedger, str | None]:
    """The start-up check: free memory against the requested memory."""
    total = total_bytes(facts, rank, assumed=setting.assumed_total)
    free = printed(facts, "device.free_at_start", rank, pick=min)
    requested = requested_bytes(facts, setting, rank)
    used = combine(total, less=(free,))
    entries = [
        *known_entries(("other_processes", used)),
        entry("free", free, wanted=requested.value),
    ]
    formula = None
    if requested.value is not None and free.value is not None:
        share = share_text(facts, setting, rank, total)
        wanted, there = format_gib(requested.value), format_gib(free.value)
        formula = f"{share}{wanted} GiB wanted free; {there} GiB are free"
    return close(facts, rank, total, entries), formula


def plan_ledger(facts: Facts, setting: Setting, rank: int | None) -> tuple[RankLedger, str | None]:
    """The plan: the requested memory split by the era's formula, and what lies outside of it."""
    total = total_bytes(facts, rank, assumed=setting.assumed_total)
    requested = requested_bytes(facts, setting, rank)
    parts = planned_parts(facts, setting, rank, requested)
    before, outside = _outside_the_plan(facts, setting, rank, parts, total)
    used_before = "other_processes" if (before.value or 0) > _OWN_CONTEXT else "context"
    graphs = parts.captured if parts.captured.known else parts.graphs
    estimated = parts.graphs.known and not parts.captured.known
    entries = [
        *known_entries((used_before, before), ("weights", parts.weights)),
        *known_entries(("peak_activation", parts.activation), ("non_torch", parts.non_torch)),
        *known_entries(
            ("peak_activation_and_non_torch", parts.combined), label=parts.combined_label
        ),
        *known_entries(("cuda_graphs", graphs), error_pct=_ESTIMATE_PCT if estimated else None),
    ]
    needed = sizes.kv_needed(facts, rank)
    if parts.kv.known or needed.known:
        entries.append(entry("kv_pool", parts.kv, wanted=needed.value))
    label = outside_label(gmu_of(facts, setting, rank).value)
    entries += known_entries(("outside", outside), label=label)
    share = share_text(facts, setting, rank, total)
    return close(facts, rank, total, entries), _plan_formula(parts, share)


def _outside_the_plan(
    facts: Facts, setting: Setting, rank: int | None, parts: Parts, total: Sized
) -> tuple[Sized, Sized]:
    """What was in use before the start-up snapshot, and what the share leaves untouched.

    Captured graphs live outside the plan, except for the estimate that the plan set aside for them.
    """
    outside = combine(total, less=(parts.requested,))
    before = UNKNOWN
    era = setting.formula_era
    free = sizes.free_at_start(facts, rank)
    if outside.known and free.known and not (era is not None and era.counts_others):
        before = combine(total, less=(free,))
        outside = combine(outside, less=(before,))
    if parts.captured.known:
        planned = parts.graphs if parts.graphs.known else Sized(value=0)
        outside = combine(outside, plus=(planned,), less=(parts.captured,))
    return before, outside


@dataclass(slots=True, kw_only=True)
class Parts:
    """The terms of the budget formula of one rank, filled by `planned_parts`."""

    requested: Sized = UNKNOWN
    weights: Sized = UNKNOWN
    activation: Sized = UNKNOWN
    non_torch: Sized = UNKNOWN
    combined: Sized = UNKNOWN  # activation and non-torch together, when only their sum is known
    combined_label: str = LABELS["peak_activation_and_non_torch"]
    graphs: Sized = UNKNOWN  # the estimate, when it was taken off the budget
    captured: Sized = UNKNOWN  # what capture took in the end
    kv: Sized = UNKNOWN


def planned_parts(facts: Facts, setting: Setting, rank: int | None, requested: Sized) -> Parts:
    """The terms as printed, and those that the formula leaves over."""
    parts = Parts()
    parts.weights = sizes.weights(facts, rank)
    parts.activation = printed(facts, "profile.peak_activation", rank)
    parts.non_torch = printed(facts, "profile.non_torch", rank)
    parts.captured = _captured(facts, rank)
    estimate = printed(facts, "profile.graph_estimate", rank)
    pinned = printed(facts, "config.kv_cache_memory_bytes")
    parts.kv = kv_available(facts, rank)
    if pinned.value:
        parts.kv = pinned
        parts.graphs = UNKNOWN
        return parts
    parts.requested = requested
    if not parts.activation.known:
        # 0.6.4 prints torch's peak with the weights in it.
        peak = printed(facts, "profile.torch_peak", rank)
        parts.activation = combine(peak, less=(parts.weights,))
    consumed = printed(facts, "profile.consumed", rank)
    if not parts.non_torch.known and consumed.known:
        parts.non_torch = _non_torch_of(consumed, parts, requested, estimate)
    if estimate.known and _graphs_charged(setting.formula_era, parts, requested, estimate):
        parts.graphs = estimate
    if not parts.kv.known:
        non_kv = printed(facts, "profile.non_kv", rank)
        charged = parts.graphs if parts.graphs.known else Sized(value=0)
        parts.kv = combine(requested, less=(non_kv, charged))
    _derive_missing(parts, setting.formula_era)
    return parts


def _derive_missing(parts: Parts, era: Era | None) -> None:
    """Fill the one term (or the pair) that the formula leaves over."""
    graphs = parts.graphs if parts.graphs.known else Sized(value=0)
    less_weights = combine(parts.requested, less=(parts.weights, graphs))
    if not parts.kv.known:
        parts.kv = combine(less_weights, less=(parts.activation, parts.non_torch))
        return
    rest = combine(less_weights, less=(parts.kv,))
    if parts.activation.known and not parts.non_torch.known:
        parts.non_torch = combine(rest, less=(parts.activation,))
    elif parts.non_torch.known and not parts.activation.known:
        parts.activation = combine(rest, less=(parts.non_torch,))
    elif not parts.activation.known:
        parts.combined = rest
        if era is not None and era.counts_others:
            parts.combined_label = "activation, context, other processes"


def _non_torch_of(consumed: Sized, parts: Parts, requested: Sized, estimate: Sized) -> Sized:
    """Non-torch memory out of "consumed", which some builds print with the graph estimate in it."""
    apart = combine(consumed, less=(parts.weights,))
    left = combine(requested, less=(consumed, parts.activation, parts.kv))
    if left.value is None or estimate.value is None or abs(left.value) > _AGREES:
        return apart
    return combine(apart, less=(estimate,)) if estimate.value > _AGREES else apart


def _graphs_charged(era: Era | None, parts: Parts, requested: Sized, estimate: Sized) -> bool:
    """Whether the estimate was taken off the budget: by the numbers if all known, else by era."""
    terms = (parts.weights, parts.activation, parts.non_torch, parts.kv)
    left = combine(requested, less=terms).value
    if left is not None and estimate.value is not None and estimate.value > _AGREES:
        return abs(left - estimate.value) < abs(left)
    return era is None or era.graphs_charged


def _captured(facts: Facts, rank: int | None) -> Sized:
    """Memory that graph capture took; a negative difference is no measurement."""
    for name in ("graph.pool_actual", "graph.memory"):
        found = printed(facts, name, rank)
        if found.value is not None and found.value >= 0:
            return found
    return UNKNOWN


def _plan_formula(parts: Parts, share: str) -> str | None:
    """The budget with its numbers; None when a number is missing."""
    if parts.requested.value is None or parts.weights.value is None or parts.kv.value is None:
        return None
    terms = [
        (parts.weights, "weights"),
        (parts.activation, "activation"),
        (parts.non_torch, "non-torch"),
        (parts.combined, parts.combined_label),
        (parts.graphs, "graphs (estimated)"),
    ]
    taken = " ".join(
        f"- {format_gib(size.value)} {word}" for size, word in terms if size.value is not None
    )
    requested, pool = format_gib(parts.requested.value), format_gib(parts.kv.value)
    return f"{share}{requested} GiB requested; {taken} = {pool} GiB for the KV pool"
