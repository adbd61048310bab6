"""The checks a start passes or fails: weights, free memory, KV blocks, length, headroom beside the share.

In: the terms of a plan and its pool. Out: `Check` values: passed, failed, or open because the estimates' range decides.
"""

from __future__ import annotations

import math

from diag.memory.plan_model import Check, Deployment, Pool, Term
from diag.units import format_gib


def start_checks(
    deployment: Deployment,
    terms: tuple[Term, ...],
    requested: int,
    budget: tuple[int, int, int],
    pool: Pool | None,
    length: int,
) -> tuple[Check, ...]:
    """Every check in start-up order. `budget`: expected, lowest, highest bytes for the pool."""
    found = [_load_check(deployment, terms)]
    if deployment.era.free_check:
        found.append(_free_check(deployment, terms, requested))
    if pool is None:
        return tuple(found)
    middle, low, high = budget
    found.append(
        Check(
            name="KV blocks",
            ok=_judge(low, high, 0),
            why=f"{format_gib(requested)} requested leave {format_gib(middle)} GiB for the KV pool",
        )
    )
    needed = pool.request_bytes
    if deployment.length is None:
        ok = None if pool.longest_low < 1 <= pool.longest else pool.longest >= 1
        why = f"the longest length that fits is {pool.longest:,} tokens"
    else:
        ok = _judge(low, high, needed)
        why = f"one request of {length:,} tokens needs {format_gib(needed)} of {format_gib(middle)} GiB"
    found.append(Check(name="length", ok=ok, why=why))
    found.append(_headroom_check(deployment, terms, requested))
    return tuple(found)


def _judge(low: int, high: int, needed: int) -> bool | None:
    """Whether a size is surely enough, surely too small, or neither."""
    if low > 0 and low >= needed:
        return True
    return False if high <= 0 or high < needed else None


def _load_check(deployment: Deployment, terms: tuple[Term, ...]) -> Check:
    """The weights and the context must fit the card at all."""
    parts = tuple(
        item
        for item in terms
        if item.term in ("context", "collectives", "weights", "other_processes")
    )
    taken = sum(item.bytes for item in parts)
    down, upward = spread(parts)
    ok = _judge(deployment.total - upward, deployment.total + down, taken)
    weights = next(item for item in terms if item.term == "weights")
    return Check(
        name="weights",
        ok=ok,
        why=f"{format_gib(weights.bytes)} GiB of weights, {format_gib(taken)} with context and others, "
        f"on {format_gib(deployment.total)} GiB",
    )


def _free_check(deployment: Deployment, terms: tuple[Term, ...], requested: int) -> Check:
    """Free memory at start must reach the requested share."""
    names = (
        "context",
        "other_processes",
        *(() if deployment.era.counts_nccl else ("collectives",)),
    )
    taken = tuple(item for item in terms if item.term in names)
    free = deployment.total - sum(item.bytes for item in taken)
    down, upward = spread(taken)
    return Check(
        name="free memory",
        ok=_judge(free - upward, free + down, requested),
        why=f"{deployment.gmu:.4g} x {format_gib(deployment.total)} = {format_gib(requested)} GiB asked, "
        f"about {format_gib(free)} free",
    )


def _headroom_check(deployment: Deployment, terms: tuple[Term, ...], requested: int) -> Check:
    """What is outside of the share must have room beside it: graphs before they were planned, the context."""
    outside = tuple(item for item in terms if not item.charged)
    room = deployment.total - requested
    if deployment.kv_bytes is not None:
        charged = sum(item.bytes for item in terms if item.charged)
        room = deployment.total - charged - deployment.kv_bytes
    taken = sum(item.bytes for item in outside)
    down, upward = spread(outside)
    words = ", ".join(item.label for item in outside) or "nothing"
    return Check(
        name="headroom",
        ok=_judge(room - upward, room + down, taken) if outside else True,
        why=f"{format_gib(room)} GiB beside the share for about {format_gib(taken)} GiB ({words})",
    )


def spread(terms: tuple[Term, ...]) -> tuple[int, int]:
    """How far a sum of terms can be lower and higher: the parts are independent, their squares add."""
    down = math.sqrt(sum((item.bytes - item.low) ** 2 for item in terms))
    upward = math.sqrt(sum((item.high - item.bytes) ** 2 for item in terms))
    return round(down), round(upward)
