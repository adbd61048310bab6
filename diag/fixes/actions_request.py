"""Actions on what one request or one GPU needs: the context, the type of the cache, more GPUs.

Each takes a Case and gives a Fix whose sum is computed from the log, or None when it makes no sense there.
"""

from __future__ import annotations

from fractions import Fraction

from diag.facts.model import Value
from diag.fixes.case import Case
from diag.fixes.known_shape import (
    cache_is_split,
    divides,
    gpus_shown,
    next_group,
    shape_of,
    tensor_ranks,
)
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
    counted, request = case.numbers.estimated_len or case.numbers.capacity_tokens, None
    pool, whole = pool_bytes(case.numbers), one_request(case.numbers)
    if counted is not None and pool is not None:
        request = pool * tokens / counted.value
    elif whole is not None:
        request = whole * tokens / asked.value
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
            **outlook(case, request=request, length=tokens),
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
    if not can_halve(case):
        return None
    one = request = one_request(case.numbers)
    pool = pool_bytes(case.numbers)
    if case.situation.subtype == "kv.preemption":
        request = None  # the load decides there, not one request
    shortfall = request_shortfall(case.numbers)
    if request is None and pool is not None and shortfall is not None:
        request = pool + shortfall.value
    if request is not None and pool is not None:
        one = request
        halves = cache_halves(case)
        fits: bool | None = request / 2 + 2 * PRINTED <= pool
        proof = f"needs {size(request / 2)} of {size(pool)}"
        if fits and not halves:
            fits, proof = None, proof + ", if the whole cache is in 16 bits now"
    else:
        fits, proof = _fp8_by_tokens(case)
    return case.fix(
        "fp8_kv",
        "Keep the KV cache in 8 bits",
        [fp8_change(case)],
        fits=fits,
        proof=proof,
        cost="a little accuracy; some attention back ends are slower or refuse it",
        safety=Safety.CHANGES_RESULTS,
        verify='look for about twice the tokens in "GPU KV cache size"',
        when_not="the checkpoint already brings 8-bit KV scales, or the attention back end has no 8-bit kernels",
        predicted=outlook(case, request=one / 2 if one else None),
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


def can_halve(case: Case) -> bool:
    """Whether an 8-bit cache can be offered: it is in 16 bits as far as known, and the platform has the flag."""
    dtype = str(case.now("kv_cache_dtype") or "auto").lower()
    return dtype in _SIXTEEN_BIT and case.gpu and case.has_flag("--kv-cache-dtype")


def fp8_change(case: Case) -> Change:
    """The setting for an 8-bit cache as this release spells it."""
    dtype = str(case.now("kv_cache_dtype") or "auto").lower()
    newer = in_range(case.situation.version, ">=0.4.3") is not False
    return Change(flag="--kv-cache-dtype", from_=dtype, to="fp8" if newer else "fp8_e5m2")


def cache_halves(case: Case) -> bool:
    """Whether the log shows a 16-bit cache, and nothing in it stays as it is (states, an index beside it)."""
    if case.now("kv_cache_dtype") is None:
        return False
    shape = shape_of(case)
    if shape is not None and any(group.state or group.extra_bytes for group in shape.cache):
        return False
    return not any(
        "mamba" in event.row or "gdn" in event.row for event in case.situation.facts.events
    )


def more_gpus(case: Case) -> Fix | None:
    """More tensor parallelism: over the GPUs of replicas that run already, else the next size that divides."""
    if case.situation.on_cpu or case.advice.verdict is GmuVerdict.LEAVE:
        return None
    now = tensor_ranks(case)
    replicas = int(case.situation.setting_number("data_parallel_size") or 1)
    if replicas > 1 and divides(case, now * replicas) is not False:
        return _one_engine(case, now, replicas)
    to = next_group(case, now)
    shown = gpus_shown(case)
    if to is None or (shown is not None and shown < to * _stages(case)):
        return None
    known = shown is not None
    return case.fix(
        "more_gpus",
        f"Split the model over {to} GPUs" + ("" if known else ", if there are as many"),
        [Change(flag="--tensor-parallel-size", from_=now, to=to)],
        fits=None,
        proof=_per_gpu(case, now, to)
        + (
            f"; nvidia-smi shows {shown}"
            if known
            else "; the log does not show how many GPUs are free"
        ),
        cost=f"{to} GPUs for one engine, and traffic between them",
        safety=Safety.TRADEOFF,
        verify="the weights line shows that much less per rank",
        when_not=f"the machine has fewer than {to} free GPUs, or the attention heads do not divide by {to}",
        predicted=_weights_outlook(case, now, to),
        used=("weights",),
    )


def _one_engine(case: Case, now: int, replicas: int) -> Fix:
    """The GPUs are there: each replica holds a whole copy of the model."""
    to = now * replicas
    return case.fix(
        "more_gpus",
        f"Make the {replicas} replicas one engine over {to} GPUs",
        [
            Change(flag="--tensor-parallel-size", from_=now, to=to),
            Change(flag="--data-parallel-size", from_=replicas, to=1),
        ],
        fits=None,
        proof=f"each of the {replicas} replicas holds the whole model; {_per_gpu(case, now, to)}",
        cost="one engine in place of several, and traffic between the GPUs",
        safety=Safety.TRADEOFF,
        verify="the weights line shows that much less per rank",
        when_not=f"the replicas run on different machines, or the attention heads do not divide by {to}",
        predicted=_weights_outlook(case, now, to),
        used=("weights",),
    )


def _per_gpu(case: Case, now: int, to: int) -> str:
    weights = case.numbers.weights
    text = f"weights and KV cache of a GPU fall to about {Fraction(now, to)}"
    if weights is not None:
        after = size(weights.value * now / to)
        text = f"weights per GPU go from {size(weights.value)} to about {after}"
    if not cache_is_split(case, to):
        text += "; the KV cache of a token stays as large on each GPU"
    return text


def _weights_outlook(case: Case, now: int, to: int) -> dict[str, Value]:
    weights = case.numbers.weights
    return {} if weights is None else {"weights_bytes": round(weights.value * now / to)}


def _stages(case: Case) -> int:
    return max(1, int(case.situation.setting_number("pipeline_parallel_size") or 1))


def more_stages(case: Case) -> Fix | None:
    """Pipeline stages where tensor parallelism has no next size: known models whose layers divide."""
    situation, shape = case.situation, shape_of(case)
    if shape is None or situation.on_cpu or case.advice.verdict is GmuVerdict.LEAVE:
        return None
    tensor = tensor_ranks(case)
    now = _stages(case)
    to = 2 * now
    shown = gpus_shown(case)
    if next_group(case, tensor) == 2 * tensor or shape.layers % to:
        return None
    if shown is not None and shown < to * tensor:
        return None
    return case.fix(
        "more_stages",
        f"Split the layers over {to} stages, if there are {to * tensor} GPUs",
        [Change(flag="--pipeline-parallel-size", from_=now, to=to)],
        fits=None,
        proof=f"{shape.heads} attention heads do not divide by {2 * tensor}, {shape.layers} layers divide by {to}; "
        + _per_gpu(case, now, to),
        cost=f"{to * tensor} GPUs for one engine; each request passes the stages one after another",
        safety=Safety.TRADEOFF,
        verify="the weights line of each stage shows about half",
        when_not="the machine has no more GPUs, or the model does not support pipeline stages",
        predicted=_weights_outlook(case, now, to),
        used=("weights",),
    )


def more_replicas(case: Case) -> Fix | None:
    """A second engine for the load, where the log shows that GPUs are left for it."""
    shown = gpus_shown(case)
    now = int(case.situation.setting_number("data_parallel_size") or 1)
    if shown is None or not case.has_flag("--data-parallel-size"):
        return None
    if case.advice.verdict is GmuVerdict.LEAVE or shown < 2 * now * case.situation.ranks:
        return None
    return case.fix(
        "more_replicas",
        f"Run {2 * now} replicas behind one address",
        [Change(flag="--data-parallel-size", from_=now, to=2 * now)],
        fits=None,
        proof=f"each replica brings a KV pool of its own; nvidia-smi shows {shown} GPUs, {now * case.situation.ranks} "
        "are used",
        cost="twice the GPUs",
        safety=Safety.TRADEOFF,
        verify="no more preemptions",
        when_not="the other GPUs belong to somebody else",
    )
