"""Which way gpu_memory_utilization helps for a failure: raise, lower, leave, cannot help, or not enough facts.

The share moves one border: the planned KV pool against unplanned headroom. Before the pool exists it limits nothing
(except the free-memory check); while the pool is planned, more share is more pool; once the pool exists, less share
is more room for everything else. The direction follows from that, the amount from the log's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from diag.fixes.advice import popular_advice
from diag.fixes.model import GmuAdvice
from diag.fixes.situation import (
    Numbers,
    Situation,
    largest_card,
    read_numbers,
    smallest_card_for,
)
from diag.fixes.window import (
    HIGHEST_UNKNOWN_CARD,
    Window,
    ceil2,
    floor2,
    lower_by_room,
    lower_to_what_is_there,
    margin,
    missing,
    needed_share,
    request_shortfall,
    upper_end,
)
from diag.terms import GmuVerdict, Phase
from diag.units import GIB, format_count, format_size

# A pool that had to grow by more than this factor is out of reach for the last tenth of any card.
_OUT_OF_REACH = 8
# Cards in wide use end here; above it only a few can help.
_COMMON_CARD = 141 * GIB
# Less of the wanted memory free than this: another process owns the card, no share of the rest is useful.
_OWNED = 0.25

_OOM_TEXT = re.compile(
    r"(?<!running )out of memory|outofmemory|memoryerror|not enough gpu memory|allocationfailure|device not ready"
    r"|failed to allocate|\bOOM\b",
    re.IGNORECASE,
)
_HANDLE = re.compile(
    r"cublasCreate|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC)", re.IGNORECASE
)

_BEFORE_POOL = (Phase.INIT_DEVICE, Phase.WEIGHT_LOAD)
_AFTER_POOL = (Phase.GRAPH_CAPTURE, Phase.SAMPLER_WARMUP, Phase.SERVING, Phase.SLEEP_WAKE)

Judge = Callable[[Situation, Numbers], GmuAdvice]


def advise_gmu(situation: Situation) -> GmuAdvice:
    """The verdict for one failure, with the window where the log gives the numbers. Never raises on odd facts."""
    numbers = read_numbers(situation)
    judge = _JUDGES.get(situation.subtype) or _FAMILY_JUDGES.get(
        situation.subtype.split(".", 1)[0], _unknown
    )
    advice = judge(situation, numbers)
    return replace(advice, popular=popular_advice(advice, numbers, situation.ranks))


def _advice(
    numbers: Numbers,
    verdict: GmuVerdict,
    why: str,
    *,
    lower: float | None = None,
    upper: float | None = None,
    suggested: float | None = None,
) -> GmuAdvice:
    return GmuAdvice(
        verdict=verdict,
        current=numbers.gmu.value if numbers.gmu else None,
        lower_bound=lower,
        upper_bound=upper,
        suggested=suggested,
        why=why,
    )


def pool_exists(situation: Situation) -> bool | None:
    """Whether the KV pool was already placed when it failed; None when the place isn't sure."""
    if situation.sites & {"profile_run", "graph_profile", "weight_load"} and not situation.sites & {
        "kernel_warmup",
        "graph_capture",
        "sampler_warmup",
        "serving",
    }:
        return False
    if situation.phase in _AFTER_POOL:
        return True
    return False if situation.phase in _BEFORE_POOL else None


# --- the pool is too small: up --------------------------------------------------------------------------------


def _no_blocks(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if advice := _pool_set_by_hand(situation, numbers):
        return advice
    if situation.facts.seen("profile.cpu_auto_fail"):
        return _free_below(situation, numbers)
    budget = numbers.budget
    if budget is not None and budget.value <= 0:
        return _reach(situation, numbers, -budget.value, "the KV budget")
    if situation.charges_others and (advice := _others_charged(situation, numbers)):
        return advice
    share = numbers.gmu
    if (
        share is not None
        and not share.default
        and share.value >= upper_end(situation, numbers) - 0.01
    ):
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The share is {share.value:g} already and nothing is left for the KV cache: the weights and the profile "
            "run must get smaller.",
        )
    # The bare error names no amount. Raising is still the right direction: the budget is share x total minus what
    # the model needs, and only the first grows with the share.
    upper = upper_end(situation, numbers)
    if situation.charges_others:
        return _advice(
            numbers,
            GmuVerdict.RAISE,
            "Nothing of the share is left for the pool. This release takes the memory of other processes off its own "
            "share, so the share must hold theirs as well.",
            upper=upper,
        )
    return _advice(
        numbers,
        GmuVerdict.RAISE,
        "Weights and the profile run leave nothing of the share, so only a larger share can give the pool room; "
        "by how much the log does not say.",
        upper=upper,
        suggested=_first_try(numbers, upper),
    )


def _first_try(numbers: Numbers, upper: float) -> float | None:
    """A share to try when the amount is unknown: 0.05 more than the logged one, 0.95 over an unlogged default."""
    share = numbers.gmu
    if share is None or share.default:
        return min(upper, 0.95) if share is None or share.value < upper else None
    return min(upper, ceil2(share.value + 0.05)) if share.value < upper else None


def _others_charged(situation: Situation, numbers: Numbers) -> GmuAdvice | None:
    """Releases that take other processes' memory off this one's share: up by what they hold."""
    if numbers.total is None or numbers.gmu is None:
        return None
    total, share = numbers.total.value, numbers.gmu.value
    others = numbers.others.value if numbers.others else None
    if others is None and numbers.free_at_start is not None:
        others = total - numbers.free_at_start.value
    if others is None or others < 0.02 * total:
        return None
    upper = upper_end(situation, numbers)
    low = ceil2(share + others / total)
    if low > upper:
        return None
    return _advice(
        numbers,
        GmuVerdict.RAISE,
        f"This release takes the {format_size(round(others))} of other processes off its own share: "
        f"{share:g} + {others / total:.2f} of {format_size(round(total))} is needed for the same pool.",
        lower=low,
        upper=upper,
        suggested=low,
    )


def _max_len(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if advice := _pool_set_by_hand(situation, numbers):
        return advice
    shortfall = request_shortfall(numbers)
    if shortfall is not None and shortfall.value > 0:
        return _reach(situation, numbers, shortfall.value, "one full-length request")
    return _max_len_in_tokens(numbers)


def _max_len_in_tokens(numbers: Numbers) -> GmuAdvice:
    """Only token counts are known: judge by how many times the pool would have to grow."""
    asked, holds = numbers.asked_len, numbers.capacity_tokens
    if asked is None or holds is None or holds.value <= 0:
        return _advice(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "A larger share enlarges the pool, but the log does not say how much is missing or how large the card is.",
        )
    factor = asked.value / holds.value
    if factor >= _OUT_OF_REACH:
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The pool holds {format_count(holds.value)} of {format_count(asked.value)} tokens: it would have to grow "
            f"{factor:.0f}-fold, more than the rest of any card gives.",
        )
    return _advice(
        numbers,
        GmuVerdict.NOT_ENOUGH_FACTS,
        f"The pool must grow {factor:.1f}-fold ({format_count(holds.value)} of {format_count(asked.value)} tokens). A "
        "larger share does that, but the log does not say how many GiB that is or how large the card is.",
    )


def _reach(situation: Situation, numbers: Numbers, shortfall: float, what: str) -> GmuAdvice:
    """Up by `shortfall` bytes if the card can give that."""
    upper, lack = upper_end(situation, numbers), format_size(round(shortfall))
    if numbers.total is None or numbers.gmu is None:
        return _reach_unknown_card(situation, numbers, shortfall, what)
    share, total = numbers.gmu.value, numbers.total.value
    low = needed_share(numbers, shortfall)
    gain = format_size(round(max(0.0, upper - share) * total))
    if low is None or low > upper:
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"{lack} are missing for {what}; going from {share:g} to {upper:g}, the most this card allows, gives "
            f"{gain}.",
            upper=upper,
        )
    spare = 0.02 if what == "the KV budget" else 0.0
    return _advice(
        numbers,
        GmuVerdict.RAISE,
        f"{lack} are missing for {what}; each 0.01 of {format_size(round(total))} gives "
        f"{format_size(round(0.01 * total))} more, so {low:g} is the least.",
        lower=low,
        upper=upper,
        suggested=max(low, min(upper, round(low + spare, 2))),
    )


def _reach_unknown_card(
    situation: Situation, numbers: Numbers, shortfall: float, what: str
) -> GmuAdvice:
    """The card or the share isn't in the log: how large would the card have to be?"""
    share = numbers.gmu.value if numbers.gmu else 0.9
    assumed = numbers.gmu is None or numbers.gmu.default
    upper = max(upper_end(situation, numbers), share)
    size = smallest_card_for(shortfall, HIGHEST_UNKNOWN_CARD - share)
    lack = format_size(round(shortfall))
    holder = f"{'the default of ' if assumed else ''}{share:g}"
    if size > largest_card(situation):
        verdict = GmuVerdict.CANNOT_HELP
        why = f"{lack} are missing for {what}; above {holder} no card has that much left."
    elif size > _COMMON_CARD:
        verdict = GmuVerdict.NOT_ENOUGH_FACTS
        why = (
            f"{lack} are missing for {what}; raising the share from {holder} gives that only on a card of "
            f"{size / GIB:.0f} GiB or more, and the log does not say which card it is."
        )
    else:
        verdict = GmuVerdict.RAISE
        why = (
            f"{lack} are missing for {what}; raising the share from {holder} gives that on a card of "
            f"{size / GIB:.0f} GiB or more. The log does not name the card's size."
        )
    if verdict is not GmuVerdict.RAISE:
        return _advice(numbers, verdict, why)
    return _advice(numbers, verdict, why, upper=upper, suggested=upper if upper > share else None)


def _pool_set_by_hand(situation: Situation, numbers: Numbers) -> GmuAdvice | None:
    """The pool does not follow the share at all: pinned bytes, forced blocks, the CPU back end's own variable."""
    knob = situation.pinned_by
    if knob is None:
        return None
    return _advice(
        numbers,
        GmuVerdict.CANNOT_HELP,
        f"The KV pool is set by {knob} and does not follow gpu_memory_utilization: change that instead.",
    )


def _preemption(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if advice := _pool_set_by_hand(situation, numbers):
        return advice
    facts = situation.facts
    usage = facts.all("serving.kv_usage_max")
    full = max(
        (float(fact.value) for fact in usage if not isinstance(fact.value, (str, bool))),
        default=None,
    )
    counted = facts.number("serving.preemptions") or len(facts.seen("serve.preempt_v0"))
    if not counted and full is not None and full < 90:
        return _advice(
            numbers,
            GmuVerdict.LEAVE,
            f"The KV pool was at most {full:.0f} % full and no preemption is logged: its size is not what holds "
            "requests back.",
        )
    upper = upper_end(situation, numbers)
    share = numbers.gmu.value if numbers.gmu else None
    if share is not None and share >= upper:
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The share is {share:g} already; more pool has to come from elsewhere.",
        )
    return _advice(
        numbers,
        GmuVerdict.RAISE,
        "Requests are sent back because the KV pool is short; a larger share is a larger pool.",
        upper=upper,
        suggested=_first_try(numbers, upper),
    )


# --- the share is more than there is: down --------------------------------------------------------------------


def _free_below(situation: Situation, numbers: Numbers) -> GmuAdvice:
    total, free, share = numbers.total, numbers.free_at_start, numbers.gmu
    if total is None or free is None:
        return _advice(
            numbers,
            GmuVerdict.LOWER,
            "The share asks for more memory than is free at the start; the log does not give the two sizes.",
        )
    wanted = share.value * total.value if share else None
    upper, sizes = (
        floor2(free.value / total.value),
        f"{format_size(round(free.value))} of {format_size(round(total.value))}",
    )
    checkpoint = situation.facts.size("weights.checkpoint")
    if checkpoint is not None and checkpoint / situation.ranks > free.value:
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"Only {sizes} are free, less than the weights need: whoever holds the rest has to go first.",
        )
    if upper <= 0.02 or (wanted is not None and free.value < _OWNED * wanted):
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"Only {sizes} are free: something else owns this device, and a share that small holds no model. Free it "
            "first.",
        )
    target = max(0.01, floor2(free.value / total.value - 0.01))
    better = "Freeing the device is better where that can be done."
    if situation.unified_memory:
        better = "CPU and GPU share this memory: page cache and host processes count as used, so drop the cache first."
    return _advice(
        numbers,
        GmuVerdict.LOWER,
        f"{sizes} are free, and the share must not ask for more: {upper:g} is the most. {better}",
        upper=upper,
        suggested=target,
    )


def _pool_alloc(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if advice := _pool_set_by_hand(situation, numbers):
        return advice
    window = lower_to_what_is_there(numbers)
    return _down(numbers, window, "the KV pool was planned larger than what this process can get")


def _transient(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Memory asked for outside the pool: down if the pool is there, no effect before."""
    if pool_exists(situation) is False:
        return _before_pool(situation, numbers)
    if advice := _pool_set_by_hand(situation, numbers):
        return advice
    return _down(
        numbers, lower_by_room(numbers), "the KV pool has taken the room this request needs"
    )


def _profile_first(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """As `_transient`, for work that the profile run does too: in doubt the profile phase is before the pool."""
    if situation.phase is Phase.PROFILE:
        return _before_pool(situation, numbers)
    return _transient(situation, numbers)


def _down(numbers: Numbers, window: Window, cause: str) -> GmuAdvice:
    sentence = cause[0].upper() + cause[1:]
    lack, tried, free = missing(numbers), numbers.tried, numbers.free
    if lack is not None and tried is not None and free is not None:
        sentence += (
            f": {format_size(round(tried.value))} asked for, {format_size(round(free.value))} free"
        )
    if window.upper is None and lack is not None and numbers.total is not None:
        step = ceil2((lack + margin(numbers.total.value)) / numbers.total.value)
        sentence += f". {step:g} less of {format_size(round(numbers.total.value))} frees that."
    elif window.upper is None or lack is None:
        sentence += (
            ". A smaller share leaves more headroom; 0.02 to 0.05 less is a usual first step."
        )
    else:
        sentence += (
            f". {window.upper:g} frees just that, {window.suggested:g} keeps a little spare."
        )
    if window.starved:
        sentence += (
            " The pool then holds less than one full-length request: lower --max-model-len as well."
        )
    return _advice(
        numbers,
        GmuVerdict.LOWER,
        sentence,
        lower=window.lower,
        upper=window.upper,
        suggested=window.suggested,
    )


def _needs_oom_text(judge: Judge) -> Judge:
    """Only a text that says memory ran out supports a direction; without one the facts don't suffice."""

    def judged(situation: Situation, numbers: Numbers) -> GmuAdvice:
        if numbers.tried is None and not _OOM_TEXT.search(situation.text):
            return _advice(
                numbers,
                GmuVerdict.NOT_ENOUGH_FACTS,
                "The log shows no request that failed for memory, so nothing says that the share is too large.",
            )
        return judge(situation, numbers)

    return judged


# --- the share has no part in it ------------------------------------------------------------------------------


def _before_pool(situation: Situation, numbers: Numbers) -> GmuAdvice:
    place = (
        "while the weights are loaded"
        if situation.phase is Phase.WEIGHT_LOAD
        else "before the KV pool exists"
    )
    return _advice(
        numbers,
        GmuVerdict.CANNOT_HELP,
        f"It failed {place}. The share only sizes the pool that would come afterwards and limits nothing here.",
    )


def _weights(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Weights: no effect while loading; where the KV plan showed it, the plan's numbers decide."""
    if numbers.tried is None and ("kv_plan" in situation.sites or "cache blocks" in situation.text):
        return _no_blocks(situation, numbers)
    return _needs_oom_text(_before_pool)(situation, numbers)


def _fragmentation(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Idle cache in pieces: the share helps only if the live memory itself has outgrown it."""
    if pool_exists(situation) is False or situation.phase is Phase.PROFILE:
        return _before_pool(situation, numbers)
    total, live, tried, idle = (
        numbers.total,
        numbers.allocated,
        numbers.tried,
        numbers.reserved_idle,
    )
    share = numbers.gmu.value if numbers.gmu else 0.9
    if total and live and tried and idle and live.value + tried.value <= share * total.value:
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The {format_size(round(live.value))} in use and the {format_size(round(tried.value))} asked for stay "
            f"inside {share:g} of the card; {format_size(round(idle.value))} of idle cache in pieces fill it. The "
            "allocator setting cures that, not the share.",
        )
    return _transient(situation, numbers)


def _wsl(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if situation.expandable_segments:
        return _leave(
            "Expandable segments fail under WSL2 with memory to spare: gpu_memory_utilization plays no part."
        )(situation, numbers)
    return _transient(situation, numbers)


def _baseline(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Another process or the context on the card: lower only once a pool competes with it."""
    if numbers.free_at_start is not None and situation.phase is Phase.INIT_DEVICE:
        return _free_below(situation, numbers)
    if pool_exists(situation) is False or situation.phase is None:
        return _advice(
            numbers,
            GmuVerdict.CANNOT_HELP,
            "Memory that others hold is missing before anything is planned: free the device; no share gives it back.",
        )
    return _pool_alloc(situation, numbers)


def _symmetric(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if "unhandled cuda error" in situation.text.lower() and not _OOM_TEXT.search(situation.text):
        return _advice(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "NCCL hides the CUDA code here; only NCCL_DEBUG=INFO tells whether memory was short.",
        )
    return _leave(_NO_SHORTAGE)(situation, numbers)


def _collectives(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if numbers.tried is None and not _OOM_TEXT.search(situation.text):
        return _leave(_NO_SHORTAGE)(situation, numbers)
    return _transient(situation, numbers)


def _lookalike(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if situation.wrapped_counter:
        return _cannot(
            "The vGPU layer counts wrongly (a number just below 2**64 is a negative one): no share is small enough."
        )(situation, numbers)
    if _HANDLE.search(situation.text):
        return _advice(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "A library handle could not be made: either the card was full or the library does not match. Free memory "
            "at that moment is not in the log.",
        )
    return _leave("Nothing ran out of GPU memory here: gpu_memory_utilization plays no part.")(
        situation, numbers
    )


def _host(situation: Situation, numbers: Numbers) -> GmuAdvice:
    return _leave("Host memory ran out, not GPU memory: gpu_memory_utilization plays no part.")(
        situation, numbers
    )


def _unknown(situation: Situation, numbers: Numbers) -> GmuAdvice:
    if numbers.tried is not None and situation.phase in (*_BEFORE_POOL, Phase.PROFILE):
        return _before_pool(situation, numbers)
    return _advice(
        numbers,
        GmuVerdict.NOT_ENOUGH_FACTS,
        "What failed is not clear from this log, so no direction can be given.",
    )


def _cannot(why: str) -> Judge:
    return lambda _, numbers: _advice(numbers, GmuVerdict.CANNOT_HELP, why)


def _leave(why: str) -> Judge:
    return lambda _, numbers: _advice(numbers, GmuVerdict.LEAVE, why)


_NO_SHORTAGE = "Nothing ran out: the driver or the fabric refused a mapping. gpu_memory_utilization plays no part."

_JUDGES: dict[str, Judge] = {
    "kv.no_blocks": _no_blocks,
    "kv.max_len_exceeds": _max_len,
    "kv.free_below_target": _free_below,
    "kv.alloc_oom": _pool_alloc,
    "kv.preemption": _preemption,
    "kv.profile_interference": _cannot(
        "Memory on the device changed during the profile run (or the wrong device was measured). The share does not "
        "enter that check."
    ),
    "tp.custom_allreduce": _leave(_NO_SHORTAGE),
    "tp.symm_mem": _symmetric,
    "tp.rank_imbalance": _needs_oom_text(_transient),
    "tp.nccl_oom": _transient,
    "tp.other": _collectives,
    "act.profile_run": _before_pool,
    "act.moe_workspace": _transient,  # its autotuning runs after the pool is placed
    "act.sampler_warmup": _transient,
    "alloc.fragmentation": _fragmentation,
    "alloc.not_released": _cannot(
        "An earlier engine still holds its memory; a smaller share does not give that back."
    ),
    "alloc.leak_growth": _cannot(
        "Memory grows with time: a smaller share only moves the failure to a later hour."
    ),
    "alloc.wake_up": _transient,
    "base.other_process": _baseline,
    "base.context_overhead": _baseline,
    "base.wsl_display": _wsl,
    "base.mig_vgpu": lambda situation, numbers: (
        _lookalike(situation, numbers)
        if situation.wrapped_counter
        else _advice(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "On a slice or vGPU the failing request is hidden behind the driver's own error; its size is not in the "
            "log.",
        )
        if numbers.tried is None
        else _profile_first(situation, numbers)
    ),
    "graph.capture_oom": _needs_oom_text(_transient),
    "compile.autotune_oom": _transient,
}
_FAMILY_JUDGES: dict[str, Judge] = {
    "act": _profile_first,
    "alloc": _profile_first,
    "weights": _weights,
    "host": _host,
    "look": _lookalike,
}
