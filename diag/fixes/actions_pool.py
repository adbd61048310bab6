"""Actions on the KV pool: the share, a pinned pool, the longest request, the type of the cache, more GPUs.

Each takes a Case and gives a Fix whose sum is computed from the log, or None when it makes no sense there.
"""

from __future__ import annotations

import math

from diag.facts.model import Value
from diag.fixes.case import Case
from diag.fixes.model import Change, Fix
from diag.fixes.window import (
    margin,
    missing,
    one_request,
    pool_bytes,
    request_shortfall,
)
from diag.release import in_range
from diag.terms import GmuVerdict, Safety
from diag.units import GIB, MIB, format_count, format_size

BLOCK = 16  # tokens; vLLM's usual block, and a divisor of the larger ones
# A fitting length below both of these says that the fixed parts fill the card, not that the context should be so short.
_SYMPTOM_TOKENS = 2048
_SYMPTOM_SHARE = 1 / 8
_PRINTED = GIB // 200  # half of the last printed digit
_SIXTEEN_BIT = ("auto", "bfloat16", "float16", "half", "none")


def size(amount: float) -> str:
    """Bytes for people."""
    return format_size(round(amount))


def _pool_line(case: Case, pool: float, tokens: float | None) -> str:
    """What to look for in the next log once the pool has changed."""
    if case.situation.engine == "V0":
        return 'look for "# GPU blocks" above 0 and no error about the longest request'
    found = f'look for "Available KV cache memory" of about {size(pool)}'
    return found + (
        f' and "GPU KV cache size" of about {format_count(tokens)} tokens' if tokens else ""
    )


def _pool_outlook(case: Case, pool: float) -> dict[str, Value]:
    """Tokens and full-length requests of a pool of `pool` bytes, where one request's bytes are known."""
    request, asked = one_request(case.numbers), case.numbers.asked_len
    outlook: dict[str, Value] = {"kv_pool_bytes": round(pool)}
    if request:
        outlook["concurrency"] = round(pool / request, 2)
        if asked:
            outlook["kv_tokens"] = int(pool / request * asked.value)
    return outlook


def _tokens(outlook: dict[str, Value]) -> float | None:
    tokens = outlook.get("kv_tokens")
    return float(tokens) if tokens is not None else None


# --- the share ------------------------------------------------------------------------------------------------


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
            verify=_pool_line(case, 0, None).replace(" of about 0 bytes", " above zero"),
            when_not=warn,
        )
    gain = (share - advice.current) * numbers.total.value
    fits, proof, pool = _raised(case, gain)
    headroom = (1 - share) * numbers.total.value
    outlook = _pool_outlook(case, pool) if pool else {}
    outlook["headroom_bytes"] = round(headroom)
    return case.fix(
        "raise_gmu",
        f"Raise the share to {share:g}",
        [change],
        fits=fits,
        proof=proof + _window_note(case) + case.share_note(),
        cost=f"headroom falls from {size((1 - advice.current) * numbers.total.value)} to {size(headroom)}",
        verify=_pool_line(case, pool, _tokens(outlook)) if pool else "",
        when_not=warn,
        predicted=outlook,
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
    outlook = _pool_outlook(case, pool - given) if pool is not None else {}
    outlook["headroom_bytes"] = round((1 - advice.suggested) * total.value)
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
    return case.fix(
        "lower_gmu",
        f"Lower the share to {advice.suggested:g}",
        [Change(flag="--gpu-memory-utilization", from_=advice.current, to=advice.suggested)],
        fits=fits,
        proof=proof + _window_note(case) + case.share_note(),
        cost=f"the KV pool shrinks by {size(given)}",
        safety=Safety.TRADEOFF,
        verify="the failed step passes"
        + (f"; {_pool_line(case, pool - given, _tokens(outlook))}" if pool else ""),
        when_not="the start then stops with a KV error: shorten the context instead",
        predicted=outlook,
        used=("gmu", "total", "tried", "free", "budget", "pool_tokens", "concurrency"),
    )


def _lower_by_some(case: Case) -> Fix:
    """The present share is unknown: say by how much."""
    lack, total = missing(case.numbers), case.numbers.total
    known = lack is not None and total is not None
    step = 0.03
    if lack is not None and total is not None:
        step = max(0.01, math.ceil((lack + margin(total.value)) / total.value * 100) / 100)
    return case.fix(
        "lower_gmu",
        f"Lower the share by {step:g}",
        [Change(action=f"lower --gpu-memory-utilization by {step:g} from its present value")],
        fits=True if known else None,
        proof=(
            f"{size(lack)} are missing; {step:g} of {size(total.value)} is {size(step * total.value)}"
            if lack is not None and total is not None
            else "The size of the failed request or of the card is not in the log; this is a usual first step."
        ),
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
        predicted={"requested_bytes": round(wanted)},
        used=("gmu", "total", "free_at_start"),
    )


# --- a pool set by hand ---------------------------------------------------------------------------------------


def set_pool_bytes(case: Case) -> Fix | None:
    """Enlarge or reduce a pinned pool to what the failure asks for."""
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
        to = math.ceil((request + _PRINTED) / MIB) * MIB
        fits, proof = (
            None,
            f"one request needs {size(request)}; whether the card has that much left is not checked",
        )
    elif lack is not None and numbers.total is not None:
        to = int((now - lack - margin(numbers.total.value)) / MIB) * MIB
        fits, proof = to > 0, f"frees {size(now - to)}; {size(lack)} are missing"
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
        verify=_pool_line(case, to, None),
        when_not="the card is not yours alone: nothing checks that a pinned pool fits",
        predicted=_pool_outlook(case, to),
        used=("needed", "available", "tried", "free"),
    )


def cpu_pool(case: Case) -> Fix | None:
    """More host memory for the KV pool of the CPU back end, in whole GiB."""
    if not case.situation.on_cpu or case.situation.pinned_by not in (
        None,
        "VLLM_CPU_KVCACHE_SPACE",
    ):
        return None
    if case.advice.verdict is GmuVerdict.RAISE:
        return None  # there the share sets the pool
    request, available = one_request(case.numbers), case.numbers.available
    spare = case.numbers.free_at_start
    if case.situation.facts.seen("profile.cpu_explicit_fail"):
        return _smaller_cpu_pool(case)
    to = math.ceil(request / GIB) if request else 8
    grows = (to * GIB - available.value) if available else None
    fits = spare.value >= grows if spare is not None and grows is not None else None
    return case.fix(
        "cpu_pool",
        f"Give the KV pool {to} GiB of host memory",
        [Change(env="VLLM_CPU_KVCACHE_SPACE", to=to)],
        fits=fits,
        proof=f"one request needs {size(request)}"
        if request
        else "the size of one request is not in the log",
        cost=f"{to} GiB of host memory per rank",
        verify='look for "GPU KV cache size" in the next log',
        when_not="the host, or the container's limit, has no such memory to spare",
        predicted=_pool_outlook(case, to * GIB) if request else None,
        used=("needed", "available", "free_at_start"),
    )


def _smaller_cpu_pool(case: Case) -> Fix | None:
    """The CPU pool asked for more than the node has free."""
    free = case.numbers.free_at_start
    if free is None or free.value < 2 * GIB:
        return None
    to = int(free.value / GIB) - 1
    return case.fix(
        "cpu_pool",
        f"Give the KV pool {to} GiB of host memory",
        [Change(env="VLLM_CPU_KVCACHE_SPACE", to=to)],
        fits=True,
        proof=f"{size(free.value)} of host memory were free",
        cost="fewer tokens in the cache",
        safety=Safety.TRADEOFF,
        verify='look for "GPU KV cache size" in the next log',
        when_not="other processes on the host need that memory",
        used=("free_at_start",),
    )


# --- one request ----------------------------------------------------------------------------------------------


def shorten_context(case: Case) -> Fix | None:
    """The longest request that fits: vLLM's own estimate, the tokens of the refused pool, or the linear share."""
    fitting = fitting_length(case)
    asked = case.numbers.asked_len
    if fitting is None or asked is None or fitting[0] >= asked.value or is_symptom(case):
        return None
    tokens, exact, source = fitting
    share = 1 - tokens / asked.value
    pool = case.numbers.available or case.numbers.budget
    return case.fix(
        "shorten_context",
        f"Limit the context to {format_count(tokens)} tokens",
        [Change(flag="--max-model-len", from_=int(asked.value), to=tokens)],
        fits=True if exact else None,
        proof=source,
        cost=f"context -{share:.0%}: longer requests are refused",
        safety=Safety.TRADEOFF,
        verify=_length_line(case, tokens),
        when_not="a new length compiles anew and can profile larger once: if it fails again, start once more unchanged",
        predicted={
            "max_model_len": tokens,
            **({"kv_pool_bytes": round(pool.value)} if pool else {}),
        },
        used=("needed", "available", "estimated_len", "capacity_tokens", "asked_len"),
    )


def _length_line(case: Case, tokens: int) -> str:
    if case.situation.engine == "V0":
        return f'look for "Maximum concurrency for {tokens} tokens per request" of at least 1'
    return f'look for "GPU KV cache size" of at least {format_count(tokens)} tokens'


def fitting_length(case: Case) -> tuple[int, bool, str] | None:
    """(tokens in whole blocks, whether that is exact, where it comes from); None when it can't be said."""
    numbers = case.numbers
    if numbers.estimated_len is not None:
        tokens = _whole_blocks(numbers.estimated_len.value)
        return (
            (
                tokens,
                True,
                f"vLLM's own estimate in the log: {format_count(numbers.estimated_len.value)} tokens",
            )
            if tokens
            else None
        )
    if numbers.capacity_tokens is not None:
        tokens = _whole_blocks(numbers.capacity_tokens.value)
        return (
            (
                tokens,
                True,
                f"the refused pool holds {format_count(numbers.capacity_tokens.value)} tokens",
            )
            if tokens
            else None
        )
    needed, available, asked = numbers.needed, numbers.available, numbers.asked_len
    if needed is None or available is None or asked is None or needed.value <= 0:
        return None
    share = (available.value - _PRINTED) / (needed.value + _PRINTED)
    tokens = _whole_blocks(asked.value * share)
    # Before the hybrid manager every layer's cache grew with the length, so the share is exact there.
    linear = in_range(case.situation.version, "<0.9.1") is True
    source = (
        f"{size(available.value)} of {size(needed.value)} is room for {format_count(tokens)} of "
        f"{format_count(asked.value)} tokens"
        + ("" if linear else ", if the whole cache grows with the length")
    )
    return (tokens, linear, source) if tokens > 0 else None


def is_symptom(case: Case) -> bool:
    """Whether the fitting length is so short that the fixed parts are the trouble, not the context."""
    fitting, asked = fitting_length(case), case.numbers.asked_len
    if fitting is None or asked is None:
        return False
    return fitting[0] < _SYMPTOM_TOKENS and fitting[0] < asked.value * _SYMPTOM_SHARE


def _whole_blocks(tokens: float) -> int:
    return int(tokens // BLOCK) * BLOCK


def fp8_kv(case: Case) -> Fix | None:
    """Half the bytes per token, where the cache is 16-bit and the pool is what binds."""
    if case.advice.verdict is GmuVerdict.LEAVE:
        return None  # the pool is not short
    dtype = str(case.now("kv_cache_dtype") or "auto").lower()
    if dtype not in _SIXTEEN_BIT or not case.gpu or not case.has_flag("--kv-cache-dtype"):
        return None
    request, pool = one_request(case.numbers), pool_bytes(case.numbers)
    shortfall = request_shortfall(case.numbers)
    if request is None and pool is not None and shortfall is not None:
        request = pool + shortfall.value
    if request is not None and pool is not None:
        halves = _all_of_it_halves(case)
        fits: bool | None = request / 2 + _PRINTED <= pool
        proof = f"needs {size(request / 2)} of {size(pool)}"
        if fits and not halves:
            fits, proof = None, proof + ", if the whole cache is in 16 bits now"
    else:
        fits, proof = _fp8_by_tokens(case)
    spelled = "fp8" if in_range(case.situation.version, ">=0.4.3") is not False else "fp8_e5m2"
    outlook: dict[str, Value] = {}
    if request and pool:
        outlook["concurrency"] = round(2 * pool / request, 2)
    return case.fix(
        "fp8_kv",
        "Keep the KV cache in 8 bits",
        [Change(flag="--kv-cache-dtype", from_=dtype, to=spelled)],
        fits=fits,
        proof=proof,
        cost="a little accuracy; some attention back ends are slower or refuse it",
        safety=Safety.CHANGES_RESULTS,
        verify='look for about twice the tokens in "GPU KV cache size"',
        when_not="the checkpoint already brings 8-bit KV scales, or the attention back end has no 8-bit kernels",
        predicted=outlook,
        used=("needed", "available", "budget", "capacity_tokens", "asked_len"),
    )


def _fp8_by_tokens(case: Case) -> tuple[bool | None, str]:
    asked, holds = case.numbers.asked_len, case.numbers.capacity_tokens
    if asked is None or holds is None:
        return None, "twice the tokens in the same pool; the sizes are not in the log"
    doubled = 2 * holds.value
    return (
        doubled >= asked.value,
        f"{format_count(doubled)} instead of {format_count(holds.value)} tokens, {format_count(asked.value)} needed",
    )


def _all_of_it_halves(case: Case) -> bool:
    """Whether the log shows a 16-bit cache and no state that stays as it is (Mamba, linear attention)."""
    if case.now("kv_cache_dtype") is None:
        return False
    return not any(
        "mamba" in event.row or "gdn" in event.row for event in case.situation.facts.events
    )


def more_gpus(case: Case) -> Fix | None:
    """The next power of two of tensor parallelism - if the machine has the GPUs."""
    if case.situation.on_cpu or case.advice.verdict is GmuVerdict.LEAVE:
        return None
    now = int(case.situation.setting_number("tensor_parallel_size") or 1)
    to = 1 << now.bit_length()
    each = "the weights and the KV cache of a GPU fall to about " + f"{now}/{to}"
    numbers = case.numbers
    if numbers.weights is not None:
        after = size(numbers.weights.value * now / to)
        each = f"weights per GPU go from {size(numbers.weights.value)} to about {after}"
    return case.fix(
        "more_gpus",
        f"Split the model over {to} GPUs, if there are as many",
        [Change(flag="--tensor-parallel-size", from_=now, to=to)],
        fits=None,
        proof=f"{each}; the log does not show how many GPUs are free",
        cost=f"{to} GPUs for one engine, and traffic between them",
        safety=Safety.TRADEOFF,
        verify="the weights line shows about half per rank",
        when_not=f"the machine has fewer than {to} free GPUs, or the attention heads do not divide by {to}",
        used=("weights",),
    )
