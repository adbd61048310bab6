"""Failures of a share that is too large: how much less leaves room for what failed?"""

from __future__ import annotations

from diag.fixes.judge import advice_of, before_pool, pool_exists, pool_set_by_hand
from diag.fixes.model import GmuAdvice
from diag.fixes.situation import Numbers, Situation
from diag.fixes.window import (
    Window,
    ceil2,
    floor2,
    lower_by_room,
    lower_to_what_is_there,
    margin,
    missing,
)
from diag.terms import GmuVerdict, Phase
from diag.units import format_size

# Less of the wanted memory free than this: another process owns the card, no share of the rest is useful.
_OWNED = 0.25


def free_below(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """The free-memory check at the start: down to what is free, unless another process owns the device."""
    if situation.facts.seen("profile.cpu_explicit_fail") and (
        advice := pool_set_by_hand(situation, numbers)
    ):
        return advice
    total, free, share = numbers.total, numbers.free_at_start, numbers.gmu
    if total is None or free is None or free.value > total.value:
        return _lower_without_sizes(numbers)
    wanted = share.value * total.value if share else None
    upper, sizes = (
        floor2(free.value / total.value),
        f"{format_size(round(free.value))} of {format_size(round(total.value))}",
    )
    if share is not None and free.value >= share.value * total.value:
        return _lower_without_sizes(numbers)  # the sizes belong to another device or attempt
    checkpoint = situation.facts.size("weights.checkpoint")
    if checkpoint is not None and checkpoint / situation.ranks > free.value:
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"Only {sizes} are free, less than the weights need: whoever holds the rest has to go first.",
        )
    if upper <= 0.02 or (wanted is not None and free.value < _OWNED * wanted):
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"Only {sizes} are free: something else owns this device, and a share that small holds no model. Free it "
            "first.",
        )
    target = max(0.01, floor2(free.value / total.value - 0.01))
    better = "Freeing the device is better where that can be done."
    if situation.unified_memory:
        better = "CPU and GPU share this memory: page cache and host processes count as used, so drop the cache first."
    return advice_of(
        numbers,
        GmuVerdict.LOWER,
        f"{sizes} are free, and the share must not ask for more: {upper:g} is the most. {better}",
        upper=upper,
        suggested=target,
    )


def _lower_without_sizes(numbers: Numbers) -> GmuAdvice:
    return advice_of(
        numbers,
        GmuVerdict.LOWER,
        "The share asks for more memory than is free at the start; the log does not give the two sizes.",
    )


def pool_alloc(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """The pool itself found no room: down to what this process can get."""
    if advice := pool_set_by_hand(situation, numbers):
        return advice
    window = lower_to_what_is_there(numbers)
    return _down(numbers, window, "the KV pool was planned larger than what this process can get")


def transient(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Memory asked for outside the pool: down if the pool is there, no effect before."""
    if pool_exists(situation) is False:
        return before_pool(situation, numbers)
    if advice := pool_set_by_hand(situation, numbers):
        return advice
    return _down(
        numbers, lower_by_room(numbers), "the KV pool has taken the room this request needs"
    )


def profile_first(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """As `transient`, for work that the profile run does too: in doubt the profile phase is before the pool."""
    if situation.phase is Phase.PROFILE:
        return before_pool(situation, numbers)
    if situation.training:
        return advice_of(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "A trainer's step failed: a smaller share helps it only if vLLM is on the same card and awake meanwhile.",
        )
    if situation.phase is None and not situation.sites and pool_exists(situation) is None:
        return advice_of(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "Nothing in the log says when it failed: before the KV pool exists the share has no effect, afterwards a "
            "smaller one helps.",
        )
    return transient(situation, numbers)


def _down(numbers: Numbers, window: Window, cause: str) -> GmuAdvice:
    sentence = cause[0].upper() + cause[1:]
    lack, tried, free = missing(numbers), numbers.tried, numbers.free
    if lack is not None and tried is not None and free is not None:
        sentence += (
            f": {format_size(round(tried.value))} asked for, {format_size(round(free.value))} free"
        )
    if lack == 0:
        sentence = (
            f"{format_size(round(tried.value)) if tried else 'Less'} asked for and "
            f"{format_size(round(free.value)) if free else 'more'} free: it was close, and more headroom helps"
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
    return advice_of(
        numbers,
        GmuVerdict.LOWER,
        sentence,
        lower=window.lower,
        upper=window.upper,
        suggested=window.suggested,
    )
