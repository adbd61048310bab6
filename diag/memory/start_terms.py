"""The memory terms of one start by name, whether it came up or not, so that two starts can be put side by side.

In: facts of one start, what is known of the release, a rank. Out: sizes by term; a term that the log neither prints nor
lets compute is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from diag.memory import sizes
from diag.memory.budget_account import Parts, planned_parts
from diag.memory.model import UNKNOWN, Sized, combine
from diag.memory.sizes import Setting, requested_bytes, total_bytes
from diag.terms import Origin

if TYPE_CHECKING:
    from diag.facts.model import Facts
    from diag.facts.torch_oom import OomReading

LABELS = {
    "total": "device memory",
    "before": "in use before the start",
    "free_at_start": "free at the start",
    "requested": "requested (share x device)",
    "weights": "weights",
    "activation": "peak activation",
    "non_torch": "non-torch memory",
    "activation_and_non_torch": "activation and non-torch",
    "graphs": "CUDA graphs set aside",
    "captured": "CUDA graphs captured",
    "pool": "KV pool",
    "need": "KV need of one request",
    "others": "other processes",
    "tried": "request that failed",
    "free": "free at that moment",
}
"""Every term with its name for people, in the order of the sum."""


def start_terms(
    facts: Facts, setting: Setting, rank: int | None, reading: OomReading | None = None
) -> Mapping[str, Sized]:
    """The known terms of a rank; those of an out-of-memory text come from `reading`."""
    total = total_bytes(facts, rank, assumed=setting.assumed_total)
    requested = requested_bytes(facts, setting, rank)
    parts = planned_parts(facts, setting, rank, requested)
    free = sizes.free_at_start(facts, rank)
    found = {
        "total": total,
        "before": combine(total, less=(free,)),
        "free_at_start": free,
        "requested": requested,
        "weights": parts.weights,
        "activation": parts.activation,
        "non_torch": parts.non_torch,
        "activation_and_non_torch": parts.combined
        if parts.combined.known
        else combine(parts.activation, plus=(parts.non_torch,)),
        "graphs": _set_aside(parts, setting),
        "captured": parts.captured,
        "pool": parts.kv,
        "need": _need(facts, rank, parts.kv),
    }
    if reading is not None:
        found |= {
            name: Sized(value=value, lines=(reading.line,))
            for name, value in (
                ("others", reading.others),
                ("tried", reading.tried),
                ("free", reading.free),
            )
        }
    rest = found["activation_and_non_torch"].value
    if rest is not None and rest < 0:
        del found["activation_and_non_torch"]  # a remainder of sizes that do not belong together
    return {name: found[name] for name in LABELS if found.get(name, UNKNOWN).known}


def _set_aside(parts: Parts, setting: Setting) -> Sized:
    """Graphs taken off the pool; nothing in an era that does not plan for them."""
    era = setting.formula_era
    if not parts.graphs.known and era is not None and not era.graphs_charged:
        return Sized(value=0, origin=Origin.DERIVED)
    return parts.graphs


def _need(facts: Facts, rank: int | None, pool: Sized) -> Sized:
    """KV bytes of one full-length request: as refused, or the pool over the requests that it holds."""
    printed = sizes.kv_needed(facts, rank)
    if printed.known:
        return printed
    many = facts.get("kv.max_concurrency", rank=rank)
    count = None if many is None or isinstance(many.value, (str, bool)) else many.value
    if pool.value is None or pool.value <= 0 or not count or count <= 0:
        return UNKNOWN
    lines = {*pool.lines, *([many.line] if many is not None and many.line else [])}
    return Sized(value=round(pool.value / count), origin=Origin.DERIVED, lines=tuple(sorted(lines)))
