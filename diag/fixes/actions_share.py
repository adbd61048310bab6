"""Actions on the size of the KV pool: the share, a pinned pool.

Each takes a Case and gives a Fix whose sum is computed from the log, or None when it makes no sense there.
"""

from __future__ import annotations

import math

from diag.fixes.case import Case
from diag.fixes.model import Change, Fix
from diag.fixes.sums import PRINTED, outlook, pool_line, size, spare_after, starved, tokens_of
from diag.fixes.window import (
    margin,
    missing,
    one_request,
    pool_bytes,
    request_shortfall,
)
from diag.terms import Family, GmuVerdict, Safety
from diag.units import MIB

_LEAST_SHARE = 0.2  # a step down from less than this is not worth proposing


def raise_gmu(case: Case) -> Fix | None:
    """More share, inside the window of the verdict."""
    advice, numbers = case.advice, case.numbers
    if (
        advice.verdict is GmuVerdict.RAISE
        and case.situation.charges_others
        and advice.suggested is None
    ):
        return _raise_by_others(case)
    if advice.verdict is not GmuVerdict.RAISE or advice.suggested is None:
        return None
    share = advice.suggested
    change = Change(flag="--gpu-memory-utilization", from_=advice.current, to=share)
    warn = "another process needs the rest of the card, or graph capture or the sampler warm-up then runs out"
    if numbers.total is None or advice.current is None:
        return case.fix(
            "raise_gmu",
            f"Raise the share to {share:g}",
            [change],
            fits=None,
            proof="The direction is right; how much it gives depends on the card's size, which the log does not show.",
            cost="less headroom outside the pool",
            verify=pool_line(case, 0, None).replace(" of about 0 bytes", " above zero"),
            when_not=warn,
        )
    gain = (share - advice.current) * numbers.total.value
    fits, proof, pool = _raised(case, gain)
    headroom = (1 - share) * numbers.total.value
    predicted = outlook(case, pool=pool, share=share)
    return case.fix(
        "raise_gmu",
        f"Raise the share to {share:g}",
        [change],
        fits=fits,
        proof=proof + _window_note(case) + case.share_note(),
        cost=f"headroom falls from {size((1 - advice.current) * numbers.total.value)} to {size(headroom)}",
        verify=pool_line(case, pool, tokens_of(predicted)) if pool else "",
        when_not=warn,
        predicted=predicted,
        used=("gmu", "total", "free_at_start", "budget", "needed", "available", "capacity_tokens"),
    )


def _raise_by_others(case: Case) -> Fix:
    """The release charges other processes, and what they hold is not in the log."""
    return case.fix(
        "raise_gmu",
        "Raise the share by what other processes hold",
        [
            Change(
                action="add (memory others hold) / (total memory), from nvidia-smi, to --gpu-memory-utilization"
            )
        ],
        fits=None,
        proof="this release takes other processes' memory off its own share; how much that is the log does not show",
        cost="less headroom outside the pool",
        verify='look for a KV pool above zero ("# GPU blocks", "GPU KV cache size")',
        when_not="nothing else uses the card: raise it by 0.05 then",
    )


def _raised(case: Case, gain: float) -> tuple[bool | None, str, float | None]:
    """(fits, proof, pool) after the pool has grown by `gain` bytes."""
    numbers = case.numbers
    pool = numbers.available or numbers.budget
    if pool is None:
        return (
            None,
            f"The budget grows by {size(gain)}; the log does not say how much is missing",
            None,
        )
    after, request = pool.value + gain, one_request(numbers)
    if case.situation.subtype == "kv.preemption":
        return (
            None,
            f"the pool grows from {size(pool.value)} to {size(after)}; what the load needs varies",
            after,
        )
    shortfall = request_shortfall(numbers)
    if request is None and shortfall is not None:
        request = pool.value + shortfall.value
    if request is not None:
        return after >= request, f"{size(after)} of pool, {size(request)} needed", after
    if after <= 0:
        return False, f"The budget would still be {size(after)}.", after
    return (
        None,
        (
            f"The KV budget goes from {size(pool.value)} to {size(after)}; whether a request of full length fits is "
            "not in the log"
        ),
        after,
    )


def _window_note(case: Case) -> str:
    low, high = case.advice.lower_bound, case.advice.upper_bound
    if low is not None and high is not None:
        return f"; window {low:g}-{high:g}"
    return f"; at most {high:g}" if high is not None else ""


def lower_gmu(case: Case) -> Fix | None:
    """Less share, inside the window of the verdict."""
    advice, numbers = case.advice, case.numbers
    if advice.verdict is not GmuVerdict.LOWER:
        return None
    if case.situation.subtype == "kv.free_below_target":
        return _lower_to_free(case)
    lack, total = missing(numbers), numbers.total
    if advice.suggested is None or advice.current is None or total is None:
        return _lower_by_some(case)
    given = (advice.current - advice.suggested) * total.value
    pool = pool_bytes(numbers)
    after = None if pool is None else pool - given
    predicted = outlook(case, pool=after, share=advice.suggested) | spare_after(case, given=given)
    if lack is None or numbers.tried is None or numbers.free is None:
        fits, proof = (
            None,
            f"Frees {size(given)}; the size of the failed request is not in the log.",
        )
    else:
        found = numbers.free.value + given
        fits = found >= numbers.tried.value
        proof = f"{size(numbers.tried.value)} asked for; {size(numbers.free.value)} free + {size(given)} from the pool"
        if case.situation.subtype == "kv.alloc_oom":
            fits, proof = (
                None,
                proof + "; how many more pieces of the pool follow is not in the log",
            )
    if fits and (note := starved(case, after)):
        fits, proof = None, proof + note  # this failure goes, the next one comes
    held, asked = numbers.allocated, advice.suggested * total.value
    if fits and case.situation.family is Family.DEVICE_BASELINE and held and held.value > asked:
        fits = None
        proof = f"PyTorch alone holds {size(held.value)}, and this share asks for {size(asked)}: too little is left"
    return case.fix(
        "lower_gmu",
        f"Lower the share to {advice.suggested:g}",
        [Change(flag="--gpu-memory-utilization", from_=advice.current, to=advice.suggested)],
        fits=fits,
        proof=proof + _window_note(case) + case.share_note(),
        cost=f"the KV pool shrinks by {size(given)}",
        safety=Safety.TRADEOFF,
        verify="the failed step passes"
        + (f"; {pool_line(case, after, tokens_of(predicted))}" if after and after > 0 else ""),
        when_not="the start then stops with a KV error: shorten the context instead",
        predicted=predicted,
        used=("gmu", "total", "tried", "free", "budget", "pool_tokens", "concurrency"),
    )


def _lower_by_some(case: Case) -> Fix:
    """The window is unknown: a usual step down, from the present share or by how much."""
    lack, total = missing(case.numbers), case.numbers.total
    known = bool(lack) and total is not None
    step = 0.03
    if lack is not None and total is not None:
        step = max(0.01, math.ceil((lack + margin(total.value)) / total.value * 100) / 100)
    now = case.advice.current
    change = Change(action=f"lower --gpu-memory-utilization by {step:g} from its present value")
    if now is not None and now - step >= _LEAST_SHARE:
        change = Change(flag="--gpu-memory-utilization", from_=now, to=round(now - step, 2))
    return case.fix(
        "lower_gmu",
        f"Lower the share by {step:g}",
        [change],
        fits=True if known else None,
        proof=(
            f"{size(lack)} are missing; {step:g} of {size(total.value)} is {size(step * total.value)}"
            if lack and total is not None
            else f"As much was free as was asked for, so it was close; {step:g} of {size(total.value)} is "
            f"{size(step * total.value)} more room"
            if lack is not None and total is not None
            else "The size of the failed request or of the card is not in the log; this is a usual first step."
        )
        + (case.share_note() if change.flag else ""),
        cost="the KV pool shrinks by as much",
        safety=Safety.TRADEOFF,
        verify="the failed step passes",
        when_not="the start then stops with a KV error: shorten the context instead",
        used=("tried", "free", "total"),
    )


def _lower_to_free(case: Case) -> Fix | None:
    advice, numbers = case.advice, case.numbers
    if advice.suggested is None or numbers.total is None or numbers.free_at_start is None:
        return _lower_by_some(case)
    wanted = advice.suggested * numbers.total.value
    lost = (
        "the KV pool shrinks by as much as the share falls"
        if advice.current is None
        else f"the KV pool shrinks by {size((advice.current - advice.suggested) * numbers.total.value)}"
    )
    return case.fix(
        "lower_gmu",
        f"Lower the share to {advice.suggested:g}",
        [Change(flag="--gpu-memory-utilization", from_=advice.current, to=advice.suggested)],
        fits=wanted <= numbers.free_at_start.value,
        proof=(
            f"asks for {size(wanted)} of the {size(numbers.free_at_start.value)} that are free: this check passes"
        ),
        cost=lost,
        safety=Safety.TRADEOFF,
        verify="the start gets past the free-memory check",
        when_not="weights and the profile run need more than that: the next error is then about the KV cache",
        predicted={
            "requested_bytes": round(wanted),
            "headroom_bytes": round((1 - advice.suggested) * numbers.total.value),
        },
        used=("gmu", "total", "free_at_start"),
    )


def set_pool_bytes(case: Case) -> Fix | None:
    """Enlarge or reduce a pinned pool to what the failure asks for."""
    if case.situation.on_cpu:
        return None  # there the pool is host memory: `actions_cpu`
    if case.situation.pinned_by != "--kv-cache-memory-bytes" or not case.has_flag(
        "--kv-cache-memory-bytes"
    ):
        return None
    now = case.situation.setting_number("kv_cache_memory_bytes") or 0
    request, numbers = one_request(case.numbers), case.numbers
    lack = missing(numbers)
    if case.situation.subtype in ("kv.max_len_exceeds", "kv.no_blocks"):
        if request is None:
            return None
        to = math.ceil((request + PRINTED) / MIB) * MIB
        fits, proof = (
            None,
            f"one request needs {size(request)}; whether the card has that much left is not checked",
        )
    elif case.situation.subtype == "kv.preemption":
        to, fits, proof = int(now) * 2, None, "twice the pool; what the load needs varies"
    elif case.situation.subtype == "kv.alloc_oom" and lack is None:
        to, fits, proof = (
            int(now) // 2,
            None,
            "half the pool; how much there is room for is not in the log",
        )
    elif lack is not None and numbers.total is not None:
        to = int((now - lack - margin(numbers.total.value)) / MIB) * MIB
        fits, proof = to > 0, f"frees {size(now - to)}; {size(lack)} are missing"
        if note := starved(case, to):
            fits, proof = None, f"{proof}; the pool{note.removeprefix(', which')}"
    else:
        return None
    if to <= 0:
        return None
    return case.fix(
        "set_pool_bytes",
        f"Set the pinned KV pool to {size(to)}",
        [Change(flag="--kv-cache-memory-bytes", from_=int(now), to=to)],
        fits=fits,
        proof=proof,
        cost="less headroom outside the pool"
        if to > now
        else f"the KV pool shrinks by {size(now - to)}",
        safety=Safety.SAFE if to > now else Safety.TRADEOFF,
        verify=pool_line(case, to, None),
        when_not="the card is not yours alone: nothing checks that a pinned pool fits",
        predicted=outlook(case, pool=to) | spare_after(case, given=now - to),
        used=("needed", "available", "tried", "free"),
    )


def pin_measured_pool(case: Case) -> Fix | None:
    """A pool size that vLLM printed itself after it had measured the graphs too."""
    facts, pool = case.situation.facts, pool_bytes(case.numbers)
    if case.situation.pinned_by is not None or not case.has_flag("--kv-cache-memory-bytes"):
        return None
    grow = case.situation.subtype == "kv.preemption"
    to = facts.size("kv.suggested_full" if grow else "kv.suggested_fit")
    if pool is None or to is None or to <= 0 or (to > pool) is not grow:
        return None
    lack, tried, free = missing(case.numbers), case.numbers.tried, case.numbers.free
    fits: bool | None = None
    proof = f"vLLM measured it in this start, with the graphs; the pool is {size(pool)} now"
    if grow and case.advice.verdict is GmuVerdict.LEAVE:
        return None
    if not grow:
        if case.advice.verdict is not GmuVerdict.LOWER:
            return None
        if lack is not None and tried is not None and free is not None:
            fits = True if pool - to >= lack and not starved(case, to) else None
            proof += f"; {size(tried.value)} asked for, {size(free.value)} free + {size(pool - to)} from the pool"
    return case.fix(
        "pin_measured_pool",
        f"Set the KV pool to the {size(to)} that vLLM suggests",
        [Change(flag="--kv-cache-memory-bytes", to=to)],
        fits=fits,
        proof=proof,
        cost="less headroom outside the pool"
        if grow
        else f"the KV pool shrinks by {size(pool - to)}",
        safety=Safety.TRADEOFF,
        verify=pool_line(case, to, None),
        when_not="model, length or card change: the pool is then no longer measured, and nothing checks that it fits",
        predicted=outlook(case, pool=to) | spare_after(case, given=pool - to),
        used=("budget", "tried", "free"),
    )


def drop_override(case: Case) -> Fix | None:
    """Let the profile run size the pool in place of a forced number of blocks."""
    now = case.situation.setting_number("num_gpu_blocks_override")
    if not now:
        return None
    return case.fix(
        "drop_override",
        "Let vLLM size the pool itself",
        [Change(flag="--num-gpu-blocks-override", from_=int(now), to=None)],
        fits=None,
        proof=f"{int(now)} blocks are forced; without that the pool takes what the profile run leaves",
        cost="nothing, unless the small pool was meant",
        verify='look for "GPU KV cache size" in the next log',
        when_not="the number was chosen to leave memory for something else",
    )
