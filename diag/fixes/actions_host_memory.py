"""Actions on host memory: weights and KV blocks kept there, swap space, the limit of the container.

Each takes a Case and gives a Fix with its sum, or None when it makes no sense there. What goes to the host is checked
against the RAM that the log shows.
"""

from __future__ import annotations

import math

from diag.fixes.case import Case
from diag.fixes.model import Change, Fix
from diag.fixes.sums import PRINTED, outlook, size
from diag.fixes.window import missing, pool_bytes, request_shortfall
from diag.terms import GmuVerdict, Phase, Safety
from diag.units import GIB

_MOST_OFFLOAD = 16  # GiB; beyond that decoding only waits for the bus
_TAKEN = 0.5  # of the free host RAM: the rest is for loading, caches and other processes


def host_ram(case: Case) -> float | None:
    """Free host RAM in bytes, the least of what the log shows for host and container; None when it shows none."""
    names = ("host.ram_available", "host.cgroup_available")
    found = [
        fact.value
        for name in names
        for fact in case.situation.facts.all(name)
        if not isinstance(fact.value, (str, bool))
    ]
    return min(map(float, found), default=None)


def host_room(case: Case, per_gpu: float) -> bool | None:
    """Whether the host takes `per_gpu` GiB more for each rank; None when its free RAM is not in the log."""
    ram = host_ram(case)
    return None if ram is None else per_gpu * GIB * case.situation.ranks <= _TAKEN * ram


def host_note(case: Case) -> str:
    """What the log says about host RAM, to put behind a sum."""
    ram = host_ram(case)
    return "" if ram is None else f"; {size(ram)} of host RAM are free"


def offloaded_now(case: Case) -> float:
    """GiB of weights per GPU that are kept on the host already."""
    return round((case.situation.setting_number("cpu_offload") or 0) / GIB, 1)


def can_offload(case: Case) -> bool:
    """Whether weights can go to the host: a GPU with memory of its own, and a release that has the flag."""
    return case.gpu and case.has_flag("--cpu-offload-gb") and not case.situation.unified_memory


def most_offload(case: Case) -> int:
    """Whole GiB per GPU worth moving to the host: at most 16, half the weights, and what host RAM allows."""
    weights, ram = case.numbers.weights, host_ram(case)
    most = float(_MOST_OFFLOAD)
    if weights is not None:
        most = min(most, weights.value / 2 / GIB)
    if ram is not None:
        most = min(most, _TAKEN * ram / GIB / case.situation.ranks)
    return int(most)


def _whole(amount: float) -> int | float:
    """4.0 as 4, for people."""
    return int(amount) if amount == int(amount) else amount


def offload_weights(case: Case) -> Fix | None:
    """Some of the weights in host memory."""
    if not can_offload(case):
        return None
    if (
        case.situation.subtype.startswith("alloc.")
        and case.situation.phase is not Phase.WEIGHT_LOAD
    ):
        return None
    now = offloaded_now(case)
    lack, shortfall = missing(case.numbers), request_shortfall(case.numbers)
    budget, weights = case.numbers.budget, case.numbers.weights
    pool = case.numbers.available or budget
    fits: bool | None = None
    gained = 0
    to = max(4, math.ceil(now) * 2)
    proof = (
        "takes that much off each GPU; how much of the model was still to come is not in the log"
    )
    if shortfall is not None and shortfall.value > 0:
        more = math.ceil((shortfall.value + 2 * PRINTED) / GIB)
        to = math.ceil(now) + more
        if more > most_offload(case):
            return None
        fits = True if weights is not None else None
        proof = f"the pool gains {more} GiB; {size(shortfall.value)} are missing"
        gained = more * GIB
    elif budget is not None and budget.value < 0:
        to = math.ceil(now) + math.ceil(-budget.value / GIB) + 2
        if to - math.ceil(now) > most_offload(case):
            return None
        gained = (to - math.ceil(now)) * GIB
        proof = f"the budget of {size(budget.value)} gains that much"
    elif weights is not None and case.situation.phase is not Phase.WEIGHT_LOAD:
        if to - now > most_offload(case):
            return None
        proof = f"takes that much off the {size(weights.value)} of weights on each GPU"
    elif lack:
        proof += f" (at least {size(lack)})"
    if host_room(case, to - now) is False:
        return None
    return case.fix(
        "offload_weights",
        f"Keep {to} GiB of the weights in host memory",
        [Change(flag="--cpu-offload-gb", from_=_whole(now), to=to)],
        fits=fits,
        proof=proof + host_note(case),
        cost=f"decoding waits for the bus; {to} GiB of pinned host memory per GPU",
        safety=Safety.TRADEOFF,
        verify="the weights line shows that much less",
        when_not="the host is short of memory, or speed matters: a smaller checkpoint is better",
        predicted=outlook(case, pool=pool.value + gained) if pool and gained else None,
        used=("budget", "tried", "free"),
    )


def offload_kv(case: Case) -> Fix | None:
    """A tier in host RAM as large as the pool: requests that were sent back find their blocks there."""
    pool, ram = pool_bytes(case.numbers), host_ram(case)
    if not case.gpu or not case.has_flag("--kv-offloading-size") or case.now("kv_offloading_size"):
        return None
    if case.advice.verdict is GmuVerdict.LEAVE or pool is None or ram is None:
        return None
    to = math.floor(min(pool * case.situation.ranks, _TAKEN * ram) / GIB)
    if to < 1:
        return None
    return case.fix(
        "offload_kv",
        f"Keep up to {to} GiB of KV blocks in host memory",
        [Change(flag="--kv-offloading-size", to=to)],
        fits=None,
        proof=f"a request that was sent back is then copied in place of computed anew; the pool is {size(pool)}"
        + host_note(case),
        cost=f"{to} GiB of pinned host memory, traffic on the bus",
        safety=Safety.TRADEOFF,
        verify="preemptions cost less time; the pool on the GPU stays as large as it is",
        when_not="the pool itself must hold one full-length request: a tier on the host does not change that",
        predicted=outlook(case) | {"host_bytes": to * GIB},
        used=("budget",),
    )


def container_memory(case: Case) -> Fix | None:
    """A limit of the container that holds what was in use when it struck, and a shard more for each rank."""
    facts = case.situation.facts
    limit = facts.size("host.cgroup_limit")
    if limit is None or case.situation.on_cpu:
        return None
    reached = max(limit, facts.size("host.killed_rss") or 0, facts.size("weights.checkpoint") or 0)
    to = math.ceil((reached + 16 * GIB) / GIB)
    return case.fix(
        "container_memory",
        f"Raise the container's memory limit to {to} GiB",
        [
            Change(flag="--memory", to=f"{to}g"),
            Change(action=f"for the container (Kubernetes: resources.limits.memory {to}Gi)"),
        ],
        fits=None,
        proof=f"the limit is {size(limit)} and was reached; loading needs a shard per rank beside caches",
        cost="host memory",
        verify='dmesg -T | grep -i "killed process" stays empty',
        when_not="the host itself has no more memory",
    )


def less_swap(case: Case) -> Fix | None:
    """V0's pinned CPU block pool."""
    now = case.situation.setting_number("swap_space")
    # The refusal prints the sum over the GPUs of the host; it comes from every release that has the flag.
    refused = case.situation.facts.size("host.swap_space")
    known = case.situation.engine == "V0" or now is not None or refused is not None
    if not case.has_flag("--swap-space") or not known:
        return None
    if now is None and refused is not None:
        now = refused / max(case.situation.ranks, 1)
    shown = now / GIB if now is not None else 4.0
    if shown <= 1:
        return None
    ranks = case.situation.ranks
    return case.fix(
        "less_swap",
        "Reserve 1 GiB of CPU swap space",
        [Change(flag="--swap-space", from_=_whole(round(shown, 1)), to=1)],
        fits=None,
        proof=f"{shown:g} GiB are pinned for each of {ranks} GPU{'s' if ranks > 1 else ''}"
        + ("" if now is not None else " (the release's default)"),
        cost="preempted groups with several sequences have less room to swap to",
        safety=Safety.TRADEOFF,
        verify="the host keeps that much more memory free",
        when_not="requests use n > 1 or best_of: V0 can only swap those, and fails without the space",
    )
