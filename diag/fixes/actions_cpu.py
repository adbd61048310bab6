"""Actions on the KV pool of the CPU back end, which is host memory of the node and sized by hand or by the share.

From 0.20.0 on a size given by hand must be free on the node when the pool is made, and VLLM_CPU_KVCACHE_SPACE goes
before --kv-cache-memory-bytes (vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py).
"""

from __future__ import annotations

import math

from diag.fixes.case import Case
from diag.fixes.model import Change, Fix
from diag.fixes.sums import outlook, size
from diag.fixes.window import one_request
from diag.terms import GmuVerdict, Safety
from diag.units import GIB

_FLAG = "--kv-cache-memory-bytes"
_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_KEPT_FREE = GIB  # bytes left beside the pool for what a request needs
_FIRST_TRY = 4 * GIB  # the default pool of releases that had a fixed one
_LOOK = 'look for "GPU KV cache size" in the next log'


def cpu_pool(case: Case) -> Fix | None:
    """A KV pool of another size, where a size of its own sets it or can set it."""
    situation = case.situation
    if not situation.on_cpu or situation.pinned_by == "--num-gpu-blocks-override":
        return None
    if situation.subtype in ("kv.no_blocks", "kv.max_len_exceeds"):
        return _larger(case)
    if situation.facts.seen("profile.cpu_explicit_fail"):
        return _what_is_free(case)
    if situation.subtype in ("kv.alloc_oom", "host.oom_killed", "kv.preemption"):
        return _other_half(case)
    return None


def _larger(case: Case) -> Fix | None:
    """Room for one request; without its size a quarter of the node."""
    if case.advice.verdict is GmuVerdict.RAISE:
        return None  # there the share sets the pool
    request, available = one_request(case.numbers), case.numbers.available
    spare, total = case.numbers.free_at_start, case.numbers.total
    if request is not None:
        to, proof = request, f"one request needs {size(request)}"
    elif total is not None:
        to = max(GIB, math.floor(min(2 * _FIRST_TRY, total.value / 4) / GIB) * GIB)
        proof = f"a quarter of the {size(total.value)} there are; the size of one request is not in the log"
    else:
        to, proof = _FIRST_TRY, "the size of one request is not in the log"
    to = math.ceil(to / GIB) * GIB
    grows = to - available.value if available else None
    return case.fix(
        "cpu_pool",
        f"Give the KV pool {size(to)} of host memory",
        [_change(case, to)],
        fits=spare.value >= grows if spare is not None and grows is not None else None,
        proof=proof,
        cost=f"{size(to)} of host memory per rank",
        verify=_LOOK,
        when_not="the host, or the container's limit, has no such memory to spare",
        predicted=outlook(case, pool=to),
        used=("needed", "available", "free_at_start", "total"),
    )


def _what_is_free(case: Case) -> Fix | None:
    """The pool that was asked for is larger than what the node has free."""
    free = case.numbers.free_at_start
    if free is None or free.value < 2 * _KEPT_FREE:
        return None
    to = math.floor((free.value - _KEPT_FREE) / GIB) * GIB
    return _smaller(case, to, fits=True, proof=f"{size(free.value)} of host memory were free")


def _other_half(case: Case) -> Fix | None:
    """Twice the pool when requests are put back for it, else half of it."""
    now = _present(case)
    if case.situation.subtype == "kv.preemption":
        if now is None or case.situation.pinned_by is None:
            return None
        return case.fix(
            "cpu_pool",
            f"Give the KV pool {size(2 * now)} of host memory",
            [_change(case, 2 * now)],
            fits=None,
            proof="twice the pool; what the load needs varies",
            cost=f"{size(now)} more host memory per rank",
            verify=_LOOK,
            when_not="the host, or the container's limit, has no such memory to spare",
        )
    if now is None:
        return _smaller(case, GIB, fits=None, proof="on the CPU back end the pool is host memory")
    if now < 2 * GIB:
        return None  # another setting has to give
    to = math.floor(now / 2 / GIB) * GIB
    proof = f"half the {size(now)} of now; how much there is room for is not in the log"
    return _smaller(case, to, fits=None, proof=proof)


def _smaller(case: Case, to: int, *, fits: bool | None, proof: str) -> Fix:
    return case.fix(
        "cpu_pool",
        f"Give the KV pool {size(to)} of host memory",
        [_change(case, to)],
        fits=fits,
        proof=proof,
        cost="fewer tokens in the cache",
        safety=Safety.TRADEOFF,
        verify=_LOOK,
        when_not="other processes on the host need that memory",
        predicted=outlook(case, pool=to),
        used=("free_at_start", "budget"),
    )


def _present(case: Case) -> int | None:
    """Bytes of the pool as planned or as set by hand."""
    planned = case.numbers.budget
    set_to = case.situation.setting_number("kv_cache_memory_bytes")
    if planned is not None and planned.value > 0:
        return round(planned.value)
    return round(set_to) if set_to and case.situation.pinned_by == _FLAG else None


def _change(case: Case, to: int) -> Change:
    """By the setting in use; whole GiB for the variable."""
    if case.situation.pinned_by == _FLAG:
        now = case.situation.setting_number("kv_cache_memory_bytes")
        return Change(flag=_FLAG, from_=round(now) if now else None, to=to)
    return Change(env=_VARIABLE, to=math.floor(to / GIB))
