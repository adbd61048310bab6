"""Which way gpu_memory_utilization helps for a failure: raise, lower, leave, cannot help, or not enough facts.

The share moves one border: the planned KV pool against unplanned headroom. Before the pool exists it limits nothing
(except the free-memory check); while the pool is planned, more share is more pool; once the pool exists, less share
is more room for everything else. The direction follows from that, the amount from the log's numbers.
"""

from __future__ import annotations

import re
from dataclasses import replace

from diag.fixes.advice import popular_advice
from diag.fixes.judge import (
    BEFORE_POOL,
    OOM_TEXT,
    Judge,
    advice_of,
    before_pool,
    cannot,
    leave,
    needs_oom_text,
    pool_exists,
)
from diag.fixes.judge_down import free_below, pool_alloc, profile_first, transient
from diag.fixes.judge_up import max_len, no_blocks, preemption
from diag.fixes.model import GmuAdvice
from diag.fixes.situation import Numbers, Situation, read_numbers
from diag.terms import GmuVerdict, Phase
from diag.units import format_size

_HANDLE = re.compile(
    r"cublasCreate|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC)", re.IGNORECASE
)


def advise_gmu(situation: Situation) -> GmuAdvice:
    """The verdict for one failure, with the window where the log gives the numbers. Never raises on odd facts."""
    numbers = read_numbers(situation)
    judge = _JUDGES.get(situation.subtype) or _FAMILY_JUDGES.get(
        situation.subtype.split(".", 1)[0], _unknown
    )
    advice = judge(situation, numbers)
    return replace(advice, popular=popular_advice(advice, numbers, situation.ranks))


def _weights(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Weights: no effect while loading; where the KV plan showed it, the plan's numbers decide."""
    if numbers.tried is None and ("kv_plan" in situation.sites or "cache blocks" in situation.text):
        return no_blocks(situation, numbers)
    if situation.sites & {"weight_load", "quantise", "create_weights"}:
        return before_pool(situation, numbers)
    return needs_oom_text(before_pool)(situation, numbers)


def _fragmentation(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Idle cache in pieces: the share helps only if the live memory itself has outgrown it."""
    if pool_exists(situation) is False or situation.phase is Phase.PROFILE:
        return before_pool(situation, numbers)
    total, live, tried, idle = (
        numbers.total,
        numbers.allocated,
        numbers.tried,
        numbers.reserved_idle,
    )
    share = numbers.gmu.value if numbers.gmu else 0.9
    others = numbers.others.value if numbers.others else 0.0
    if (
        total
        and live
        and tried
        and idle
        and others + live.value + tried.value <= share * total.value
    ):
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The {format_size(round(live.value))} in use and the {format_size(round(tried.value))} asked for stay "
            f"inside {share:g} of the card; {format_size(round(idle.value))} of idle cache in pieces fill it. The "
            "allocator setting cures that, not the share.",
        )
    return transient(situation, numbers)


def _wsl(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if situation.expandable_segments:
        return leave(
            "Expandable segments fail under WSL2 with memory to spare: gpu_memory_utilization plays no part."
        )(situation, numbers)
    return transient(situation, numbers)


def _baseline(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Another process or the context on the card: lower only once a pool competes with it."""
    if numbers.free_at_start is not None and situation.phase is Phase.INIT_DEVICE:
        return free_below(situation, numbers)
    placed = situation.sites & {"weight_load", "profile_run"}
    if numbers.tried is not None and numbers.allocated is not None and not placed:
        return pool_alloc(
            situation, numbers
        )  # PyTorch holds memory already: this is not the set-up
    if pool_exists(situation) is False or situation.phase is None:
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            "Memory that others hold is missing before anything is planned: free the device; no share gives it back.",
        )
    return pool_alloc(situation, numbers)


def _symmetric(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if "unhandled cuda error" in situation.text.lower() and not OOM_TEXT.search(situation.text):
        return advice_of(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "NCCL hides the CUDA code here; only NCCL_DEBUG=INFO tells whether memory was short.",
        )
    return leave(_NO_SHORTAGE)(situation, numbers)


def _collectives(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if numbers.tried is None and not OOM_TEXT.search(situation.text):
        return leave(_NO_SHORTAGE)(situation, numbers)
    return transient(situation, numbers)


def _lookalike(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if situation.wrapped_counter:
        return cannot(
            "The vGPU layer counts wrongly (a number just below 2**64 is a negative one): no share is small enough."
        )(situation, numbers)
    if _HANDLE.search(situation.text):
        return advice_of(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "A library handle could not be made: either the card was full or the library does not match. Free memory "
            "at that moment is not in the log.",
        )
    return leave("Nothing ran out of GPU memory here: gpu_memory_utilization plays no part.")(
        situation, numbers
    )


def _host(situation: Situation, numbers: Numbers) -> GmuAdvice:
    return leave("Host memory ran out, not GPU memory: gpu_memory_utilization plays no part.")(
        situation, numbers
    )


def _unknown(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if numbers.tried is not None and situation.phase in (*BEFORE_POOL, Phase.PROFILE):
        return before_pool(situation, numbers)
    return advice_of(
        numbers,
        GmuVerdict.NOT_ENOUGH_FACTS,
        "What failed is not clear from this log, so no direction can be given.",
    )


_NO_SHORTAGE = "Nothing ran out: the driver or the fabric refused a mapping. gpu_memory_utilization plays no part."

_JUDGES: dict[str, Judge] = {
    "kv.no_blocks": no_blocks,
    "kv.max_len_exceeds": max_len,
    "kv.free_below_target": free_below,
    "kv.alloc_oom": pool_alloc,
    "kv.preemption": preemption,
    "kv.profile_interference": cannot(
        "Memory on the device changed during the profile run (or the wrong device was measured). The share does not "
        "enter that check."
    ),
    "tp.custom_allreduce": leave(_NO_SHORTAGE),
    "tp.symm_mem": _symmetric,
    "tp.rank_imbalance": needs_oom_text(transient),
    "tp.nccl_oom": transient,
    "tp.other": _collectives,
    "act.profile_run": before_pool,
    "act.moe_workspace": transient,  # its autotuning runs after the pool is placed
    "act.sampler_warmup": transient,
    "alloc.fragmentation": _fragmentation,
    "alloc.not_released": cannot(
        "An earlier engine still holds its memory; a smaller share does not give that back."
    ),
    "alloc.leak_growth": cannot(
        "Memory grows with time: a smaller share only moves the failure to a later hour."
    ),
    "alloc.wake_up": transient,
    "base.other_process": _baseline,
    "base.context_overhead": _baseline,
    "base.wsl_display": _wsl,
    "base.mig_vgpu": lambda situation, numbers: (
        _lookalike(situation, numbers)
        if situation.wrapped_counter
        else advice_of(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "On a slice or vGPU the failing request is hidden behind the driver's own error; its size is not in the "
            "log.",
        )
        if numbers.tried is None
        else profile_first(situation, numbers)
    ),
    "graph.capture_oom": needs_oom_text(transient),
    "compile.autotune_oom": transient,
}
_FAMILY_JUDGES: dict[str, Judge] = {
    "act": profile_first,
    "alloc": profile_first,
    "weights": _weights,
    "host": _host,
    "look": _lookalike,
}
