"""The arithmetic behind the verdict: how far gpu_memory_utilization can go up, and how far down it must or may go.

In: the numbers of a failure. Out: shares of total memory, two decimals, rounded to the safe side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diag.fixes.situation import Known, Numbers, Situation
from diag.units import GIB, MIB

HIGHEST = 0.98  # above it the CUDA context alone no longer fits on any card
HIGHEST_UNKNOWN_CARD = 0.97
HIGHEST_UNIFIED = 0.92  # the operating system and the page cache live in the same memory
_CONTEXT = GIB // 2  # CUDA context and libraries of one process on an empty card
_GRAPHS = GIB  # CUDA graphs where nothing is logged; usually 0.3-3 GiB
_GRAPHS_SHARE = 0.05  # a small card holds a small model, whose graphs are smaller
_SLACK = 256 * MIB  # for growth of collectives and the allocator
_PRINTED = (
    GIB // 80
)  # two sizes printed with two decimals, and a step of the card's, are off by that much at most


def floor2(share: float) -> float:
    """Rounded down to two decimals.

    >>> floor2(0.8997), floor2(0.9)
    (0.89, 0.9)
    """
    return math.floor(share * 100 + 1e-6) / 100


def ceil2(share: float) -> float:
    """Rounded up to two decimals.

    >>> ceil2(0.9271), ceil2(0.95)
    (0.93, 0.95)
    """
    return math.ceil(share * 100 - 1e-6) / 100


def margin(total: float) -> float:
    """Bytes to keep spare beyond the request that failed: 1 % of the card, at least 256 MiB."""
    return max(float(_SLACK), 0.01 * total)


def upper_end(situation: Situation, numbers: Numbers) -> float:
    """The highest share worth setting: what is free at the start, less what the release does not plan for."""
    if numbers.total is None:
        return HIGHEST_UNIFIED if situation.unified_memory else HIGHEST_UNKNOWN_CARD
    total = numbers.total.value
    if situation.on_cpu:
        free = numbers.free_at_start
        return floor2(free.value / total) if free else 0.95
    room = total - _CONTEXT
    if numbers.free_at_start is not None and not situation.charges_others:
        room = min(room, numbers.free_at_start.value)
    highest = HIGHEST_UNIFIED if situation.unified_memory else HIGHEST
    return max(0.0, min(highest, floor2((room - _unplanned(situation, numbers)) / total)))


def _unplanned(situation: Situation, numbers: Numbers) -> float:
    """Bytes used later that the budget does not hold: CUDA graphs before 0.20, and a little slack."""
    if situation.charges_graphs or situation.setting_on("enforce_eager"):
        return float(_SLACK)
    if numbers.graph_memory is not None:
        return numbers.graph_memory.value + _SLACK
    total = numbers.total.value if numbers.total else _GRAPHS / _GRAPHS_SHARE
    return min(float(_GRAPHS), _GRAPHS_SHARE * total)


def request_shortfall(numbers: Numbers) -> Known | None:
    """KV bytes missing for one full-length request; None when the log gives no bytes."""
    if numbers.needed is not None and numbers.available is not None:
        return Known(numbers.needed.value - numbers.available.value, line=numbers.needed.line)
    pool, capacity, asked = numbers.budget, numbers.capacity_tokens, numbers.asked_len
    if pool is None or capacity is None or asked is None or capacity.value <= 0 or pool.value <= 0:
        return None
    return Known(pool.value * (asked.value / capacity.value - 1), line=capacity.line)


def needed_share(numbers: Numbers, shortfall: float) -> float | None:
    """The lowest share that makes up for `shortfall` bytes; None without share or total."""
    if numbers.gmu is None or numbers.total is None:
        return None
    return ceil2(numbers.gmu.value + (shortfall + _PRINTED) / numbers.total.value)


def room_for_this_process(numbers: Numbers) -> float | None:
    """Bytes this process holds through PyTorch or could still get; None without an out-of-memory text."""
    if numbers.free is None or numbers.allocated is None:
        return None
    idle = numbers.reserved_idle.value if numbers.reserved_idle else 0.0
    return numbers.free.value + numbers.allocated.value + idle


def missing(numbers: Numbers) -> float | None:
    """Bytes the failed request lacked (0 when enough was free); None without the text's numbers."""
    if numbers.tried is None or numbers.free is None:
        return None
    return max(0.0, numbers.tried.value - numbers.free.value)


def pool_bytes(numbers: Numbers) -> float | None:
    """The KV pool as planned; None when unknown or negative."""
    pool = numbers.budget or numbers.available
    return pool.value if pool is not None and pool.value > 0 else None


def one_request(numbers: Numbers) -> float | None:
    """KV bytes of one full-length request, from the pool and how many fit into it."""
    if numbers.needed is not None:
        return numbers.needed.value
    pool = pool_bytes(numbers)
    if pool is None:
        return None
    if numbers.concurrency is not None and numbers.concurrency.value > 0:
        return pool / numbers.concurrency.value
    if (
        numbers.pool_tokens is not None
        and numbers.asked_len is not None
        and numbers.pool_tokens.value > 0
    ):
        return pool * numbers.asked_len.value / numbers.pool_tokens.value
    return None


def lower_end(numbers: Numbers) -> float | None:
    """The lowest share whose pool still holds one full-length request; None when the log does not say."""
    pool, request = pool_bytes(numbers), one_request(numbers)
    if (
        numbers.gmu is None
        or numbers.total is None
        or pool is None
        or request is None
        or request > pool
    ):
        return None
    return ceil2(numbers.gmu.value - (pool - request - _PRINTED) / numbers.total.value)


@dataclass(frozen=True, slots=True)
class Window:
    """Ends of the window for lowering, and the share to try."""

    lower: float | None
    upper: float | None
    suggested: float | None
    starved: bool = False  # the suggested share leaves less than one full-length request


def lower_by_room(numbers: Numbers) -> Window:
    """How far down so that the failed request finds room; ends None where numbers are missing."""
    if numbers.gmu is None or numbers.total is None:
        return Window(None, None, None)
    share, total, lack = numbers.gmu.value, numbers.total.value, missing(numbers)
    low = lower_end(numbers)
    if lack is None:
        target = floor2(share - 0.05)
        return _window(low, floor2(share - 0.01), target)
    upper = min(floor2(share - lack / total), floor2(share - 0.01))
    return _window(low, upper, min(upper, floor2(share - (lack + margin(total)) / total)))


def lower_to_what_is_there(numbers: Numbers) -> Window:
    """As `lower_by_room` for the allocation of the pool itself, which others on the card leave too little for."""
    window, room = lower_by_room(numbers), room_for_this_process(numbers)
    tried, free = numbers.tried, numbers.free
    if (
        numbers.total is not None
        and free is not None
        and tried is not None
        and free.value >= tried.value
    ):
        # Free by the driver's word and still refused: the real limit is what was in use then (APUs, quotas).
        room = numbers.total.value - free.value
    if room is None or numbers.total is None or numbers.gmu is None:
        return window
    total = numbers.total.value
    there = floor2(room / total)
    if there >= numbers.gmu.value or there <= 0.02:
        return window
    upper = there if window.upper is None else min(window.upper, there)
    return _window(window.lower, upper, min(upper, floor2(room / total - 0.01)))


def _window(low: float | None, upper: float, target: float) -> Window:
    """Keep the target inside; a lower end above the upper one means the pool ends up under one request."""
    upper, target = max(0.01, upper), max(0.01, target)
    if low is None:
        return Window(None, upper, target)
    if low > upper:
        return Window(None, upper, target, starved=True)
    return Window(low, upper, max(low, target))
