"""Entries and labels of the ledger, and a rank's ledger closed by its remainder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from diag.memory.model import LedgerEntry, RankLedger, Sized
from diag.memory.sizes import Setting, gmu_of
from diag.terms import Origin
from diag.units import format_gib

if TYPE_CHECKING:
    from diag.facts.model import Facts

LABELS = {
    "other_processes": "other processes",
    "context": "CUDA context, in use before start",
    "weights": "weights",
    "peak_activation": "peak activation",
    "non_torch": "non-torch memory",
    "peak_activation_and_non_torch": "activation and non-torch",
    "cuda_graphs": "CUDA graphs",
    "collectives": "collectives",
    "kv_pool": "KV pool",
    "private_pools": "private pools (CUDA graphs)",
    "torch_other": "other PyTorch memory",
    "this_process": "this process",
    "reserved_unallocated": "reserved by PyTorch, idle",
    "outside": "outside the share",
    "free": "free",
}


def entry(
    term: str, size: Sized, *, wanted: int | None = None, label: str | None = None
) -> LedgerEntry:
    """One entry, also of an unknown size."""
    return LedgerEntry(
        term=term,
        label=label or LABELS[term],
        bytes=size.value,
        origin=size.origin,
        lines=size.lines,
        wanted=wanted,
    )


def known_entries(
    *pairs: tuple[str, Sized], label: str | None = None, error_pct: float | None = None
) -> list[LedgerEntry]:
    """Entries of the known sizes only."""
    return [
        replace(entry(term, size, label=label), error_pct=error_pct)
        for term, size in pairs
        if size.known
    ]


def close(facts: Facts, rank: int | None, total: Sized, entries: list[LedgerEntry]) -> RankLedger:
    """The ledger with its remainder."""
    known = sum(item.bytes for item in entries if item.bytes is not None)
    name = facts.get("device.name", rank=rank)
    return RankLedger(
        rank=rank,
        device=None if name is None else str(name.value),
        total_bytes=total.value,
        entries=tuple(entries),
        unexplained_bytes=None if total.value is None else total.value - known,
    )


def outside_label(gmu: float | None) -> str:
    """What lies outside of the share, in words: "outside 0.90"."""
    return LABELS["outside"] if gmu is None else f"outside {_share(gmu)}"


def _share(gmu: float) -> str:
    return f"{gmu:.2f}" if round(gmu, 2) == round(gmu, 6) else f"{gmu:.4g}"


def share_text(facts: Facts, setting: Setting, rank: int | None, total: Sized) -> str:
    """The start of a formula, "0.90 x 79.15 = ", or "" when a part is unknown."""
    gmu = gmu_of(facts, setting, rank).value
    if gmu is None or total.value is None:
        return ""
    about = "about " if total.origin is Origin.ASSUMED else ""
    return f"{_share(gmu)} x {about}{format_gib(total.value)} = "
