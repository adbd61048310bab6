"""Actions on what one request or one GPU needs: the context, the type of the cache, more GPUs.

Each takes a Case and gives a Fix whose sum is computed from the log, or None when it makes no sense there.
"""

from __future__ import annotations

from diag.fixes.case import Case
from diag.fixes.known_shape import cache_is_split, divides, next_group
from diag.fixes.model import Change, Fix
from diag.fixes.sums import PRINTED, fitting_length, is_symptom, outlook, size
from diag.fixes.window import (
    one_request,
    pool_bytes,
    request_shortfall,
)
from diag.release import in_range
from diag.terms import GmuVerdict, Safety
from diag.units import format_count

_SIXTEEN_BIT = ("auto", "bfloat16", "float16", "half", "none")


def shorten_context(case: Case) -> Fix | None:
    """The longest request that fits: vLLM's own estimate, the tokens of the refused pool, or the linear share."""
    fitting = fitting_length(case)
    asked = case.numbers.asked_len
    if fitting is None or asked is None or fitting[0] >= asked.value or is_symptom(case):
        return None
    tokens, exact, source = fitting
    share = 1 - tokens / asked.value
    request = one_request(case.numbers)
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
            **outlook(case, request=request * tokens / asked.value if request else None, length=tokens),
        },
        used=("needed", "available", "estimated_len", "capacity_tokens", "asked_len"),
    )


def _length_line(case: Case, tokens: int) -> str:
    if case.situation.engine == "V0":
        return f'look for "Maximum concurrency for {tokens} tokens per request" of at least 1'
    return f'look for "GPU KV cache size" of at least {format_count(tokens)} tokens'


def fp8_kv(case: Case) -> Fix | None:
    """Half the bytes per token, where the cache is 16-bit and the pool is what binds."""
    if case.advice.verdict is GmuVerdict.LEAVE:
        return None  # the pool is not short
    dtype = str(case.now("kv_cache_dtype") or "auto").lower()
    if dtype not in _SIXTEEN_BIT or not case.gpu or not case.has_flag("--kv-cache-dtype"):
        return None
    request, pool = one_request(case.numbers), pool_bytes(case.numbers)
    if case.situation.subtype == "kv.preemption":
        request = None  # the load decides there, not one request
    shortfall = request_shortfall(case.numbers)
    if request is None and pool is not None and shortfall is not None:
        request = pool + shortfall.value
    if request is not None and pool is not None:
        halves = _all_of_it_halves(case)
        fits: bool | None = request / 2 + PRINTED <= pool
        proof = f"needs {size(request / 2)} of {size(pool)}"
        if fits and not halves:
            fits, proof = None, proof + ", if the whole cache is in 16 bits now"
    else:
        fits, proof = _fp8_by_tokens(case)
    spelled = "fp8" if in_range(case.situation.version, ">=0.4.3") is not False else "fp8_e5m2"
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
        predicted=outlook(case, request=request / 2 if request else None),
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
