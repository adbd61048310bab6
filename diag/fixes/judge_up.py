"""Failures of a pool that is too small: is there a larger share that makes up for it?"""

from __future__ import annotations

from diag.fixes.judge import advice_of, pool_set_by_hand
from diag.fixes.judge_down import free_below
from diag.fixes.model import GmuAdvice
from diag.fixes.situation import Numbers, Situation, largest_card, smallest_card_for
from diag.fixes.window import (
    HIGHEST_UNKNOWN_CARD,
    ceil2,
    needed_share,
    request_shortfall,
    upper_end,
)
from diag.terms import GmuVerdict
from diag.units import GIB, format_count, format_size

# A pool that had to grow by more than this factor is out of reach for the last tenth of any card.
_OUT_OF_REACH = 8
# One that has to grow by less than this is worth a try: 0.05 of the card is then a sixth or more of most pools.
_SMALL_GAP = 1.15
# Cards in wide use end here; above it only a few can help.
_COMMON_CARD = 141 * GIB


def no_blocks(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """No room for the pool at all: up by the deficit, or by what other processes are charged."""
    if advice := pool_set_by_hand(situation, numbers):
        return advice
    if situation.facts.seen("profile.cpu_auto_fail"):
        return free_below(situation, numbers)
    if (blocks := situation.facts.number("kv.state_blocks")) is not None:
        return _state_blocks(situation, numbers, blocks)
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
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The share is {share.value:g} already and nothing is left for the KV cache: the weights and the profile "
            "run must get smaller.",
        )
    # The bare error names no amount. Raising is still the right direction: the budget is share x total minus what
    # the model needs, and only the first grows with the share.
    upper = upper_end(situation, numbers)
    if situation.charges_others:
        return advice_of(
            numbers,
            GmuVerdict.RAISE,
            "Nothing of the share is left for the pool. This release takes the memory of other processes off its own "
            "share, so the share must hold theirs as well.",
            upper=upper,
        )
    return advice_of(
        numbers,
        GmuVerdict.RAISE,
        "Weights and the profile run leave nothing of the share, so only a larger share can give the pool room; "
        "by how much the log does not say.",
        upper=upper,
        suggested=_first_try(numbers, upper),
    )


def _state_blocks(situation: Situation, numbers: Numbers, blocks: float) -> GmuAdvice:
    """A pool with fewer state blocks than max_num_seqs: more share adds blocks, fewer sequences need none."""
    upper, share = upper_end(situation, numbers), numbers.gmu
    held = f"The pool holds {blocks:.0f} state blocks, fewer than max_num_seqs"
    if share is not None and not share.default and share.value >= upper - 0.01:
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"{held}, and the share is {share.value:g} already: lower --max-num-seqs to {blocks:.0f}.",
        )
    return advice_of(
        numbers,
        GmuVerdict.RAISE,
        f"{held}. A larger share adds blocks; --max-num-seqs {blocks:.0f} needs no larger share.",
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
    return advice_of(
        numbers,
        GmuVerdict.RAISE,
        f"This release takes the {format_size(round(others))} of other processes off its own share: "
        f"{share:g} + {others / total:.2f} of {format_size(round(total))} is needed for the same pool.",
        lower=low,
        upper=upper,
        suggested=low,
    )


def max_len(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """One full-length request does not fit the pool: up by what is missing."""
    if advice := pool_set_by_hand(situation, numbers):
        return advice
    shortfall = request_shortfall(numbers)
    if shortfall is not None and shortfall.value > 0:
        return _reach(situation, numbers, shortfall.value, "one full-length request")
    return _max_len_in_tokens(numbers, upper_end(situation, numbers))


def _max_len_in_tokens(numbers: Numbers, upper: float) -> GmuAdvice:
    """Only token counts are known: judge by how many times the pool would have to grow."""
    asked, holds = numbers.asked_len, numbers.capacity_tokens
    if asked is None or holds is None or holds.value <= 0:
        return advice_of(
            numbers,
            GmuVerdict.NOT_ENOUGH_FACTS,
            "A larger share enlarges the pool, but the log does not say how much is missing or how large the card is.",
        )
    factor = asked.value / holds.value
    if factor >= _OUT_OF_REACH:
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The pool holds {format_count(holds.value)} of {format_count(asked.value)} tokens: it would have to grow "
            f"{factor:.0f}-fold, more than the rest of any card gives.",
        )
    share = _first_try(numbers, upper)
    if factor <= _SMALL_GAP and share is not None:
        return advice_of(
            numbers,
            GmuVerdict.RAISE,
            f"The pool holds {format_count(holds.value)} of {format_count(asked.value)} tokens, {factor - 1:.0%} too "
            "few. A little more share usually gives that; how much is needed the log does not say.",
            upper=upper,
            suggested=share,
        )
    return advice_of(
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
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"{lack} are missing for {what}; going from {share:g} to {upper:g}, the most this card allows, gives "
            f"{gain}.",
            upper=upper,
        )
    spare = 0.02 if what == "the KV budget" else 0.0
    return advice_of(
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
    if size > largest_card(situation) or _too_much_else(numbers, share * size):
        verdict = GmuVerdict.CANNOT_HELP
        why = f"{lack} are missing for {what}; above {holder} no card that fits this log has that much left."
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
        return advice_of(numbers, verdict, why)
    return advice_of(numbers, verdict, why, upper=upper, suggested=upper if upper > share else None)


def _too_much_else(numbers: Numbers, requested: float) -> bool:
    """Whether a card of that size would mean more activation than weights of this size can cause."""
    pool = numbers.available or numbers.budget
    if numbers.weights is None or pool is None:
        return False
    return requested - pool.value - numbers.weights.value > max(3 * numbers.weights.value, 24 * GIB)


def preemption(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """Requests sent back for want of blocks: up, if the pool was full at all."""
    if advice := pool_set_by_hand(situation, numbers):
        return advice
    facts = situation.facts
    usage = facts.all("serving.kv_usage_max")
    full = max(
        (float(fact.value) for fact in usage if not isinstance(fact.value, (str, bool))),
        default=None,
    )
    counted = facts.number("serving.preemptions") or len(facts.seen("serve.preempt_v0"))
    if not counted and full is not None and full < 90:
        return advice_of(
            numbers,
            GmuVerdict.LEAVE,
            f"The KV pool was at most {full:.0f} % full and no preemption is logged: its size is not what holds "
            "requests back.",
        )
    upper = upper_end(situation, numbers)
    share = numbers.gmu.value if numbers.gmu else None
    if share is not None and share >= upper:
        return advice_of(
            numbers,
            GmuVerdict.CANNOT_HELP,
            f"The share is {share:g} already; more pool has to come from elsewhere.",
        )
    return advice_of(
        numbers,
        GmuVerdict.RAISE,
        "Requests are sent back because the KV pool is short; a larger share is a larger pool.",
        upper=upper,
        suggested=_first_try(numbers, upper),
    )
