"""Two or three changes together, for a failure that no single one cures: found by adding up what each one gives.

In: a Case. Out: Fixes with several changes whose sum proves that they suffice, least given up first. A combination of
which a part suffices is left out, and so is one whose sum the log's numbers do not allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from diag.fixes.actions_host_memory import can_offload, host_note, most_offload, offloaded_now
from diag.fixes.actions_request import cache_halves, can_halve, fp8_change
from diag.fixes.case import Case
from diag.fixes.known_shape import grows_linearly
from diag.fixes.model import Change, Fix
from diag.fixes.sums import BLOCK, PRINTED, is_short, outlook, pool_line, size, tokens_of
from diag.fixes.window import (
    ceil2,
    floor2,
    lower_end,
    margin,
    missing,
    one_request,
    pool_bytes,
    request_shortfall,
)
from diag.terms import GmuVerdict, Safety
from diag.units import GIB, format_count

MOST = 3  # combinations offered
_SLACK = 3 * PRINTED  # three printed sizes
_USABLE = 0.01  # of the card: a pool below that is none
_NEARLY_TOP = 0.95  # from here on a raise is not offered
_ORDER = {Safety.SAFE: 0, Safety.TRADEOFF: 1, Safety.CHANGES_RESULTS: 2}


@dataclass(frozen=True, slots=True)
class _Part:
    """One change of a combination, in the words of its sum."""

    name: str
    change: Change
    gives: str
    cost: str
    safety: Safety


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Pool and need (bytes) of one request of `length` tokens after the parts taken so far. `need` None: unknown."""

    pool: float
    need: float | None
    length: float | None
    share: float | None
    parts: tuple[_Part, ...] = ()

    def gap(self, case: Case) -> float:
        """Bytes still missing; not above 0 when it fits."""
        if self.need is not None:
            return self.need + _SLACK - self.pool
        total = case.numbers.total
        return (_USABLE * total.value if total else GIB / 4) - self.pool


_Lever = Callable[[Case, _State], "_State | None"]


def combined(case: Case) -> Iterator[Fix]:
    """Combinations that suffice, least given up first; none for a failure without numbers."""
    if case.situation.subtype in ("kv.max_len_exceeds", "kv.no_blocks"):
        yield from _for_the_pool(case)
    elif case.advice.verdict is GmuVerdict.LOWER and case.advice.suggested is not None:
        yield from _for_the_rest(case)


# --- a pool that is too small ---------------------------------------------------------------------------------


def _for_the_pool(case: Case) -> Iterator[Fix]:
    start = _start(case)
    if start is None or start.gap(case) <= 0 or case.situation.pinned_by is not None:
        return
    found: list[tuple[frozenset[str], _State]] = []
    for count in (1, 2, 3):
        for names in combinations(_LEVERS, count):
            if any(done <= set(names) for done, _ in found):
                continue
            state = _apply(case, start, names)
            if state is not None:
                found.append((frozenset(names), state))
    several = [state for names, state in found if len(names) > 1]
    for state in sorted(several, key=_given_up)[:MOST]:
        yield _pool_fix(case, start, state)


def _start(case: Case) -> _State | None:
    numbers = case.numbers
    pool = numbers.available or numbers.budget
    if pool is None:
        return None
    need = one_request(numbers)
    shortfall = request_shortfall(numbers)
    if need is None and shortfall is not None:
        need = pool.value + shortfall.value
    if need is None and case.situation.subtype == "kv.max_len_exceeds":
        return None
    return _State(
        pool=pool.value,
        need=need,
        length=numbers.asked_len.value if numbers.asked_len else None,
        share=numbers.gmu.value if numbers.gmu else None,
    )


def _apply(case: Case, state: _State, names: tuple[str, ...]) -> _State | None:
    """The state after the levers; None when one has nothing to do, or they do not suffice together."""
    for name in names:
        after = _LEVERS[name](case, state) if state.gap(case) > 0 else None
        if after is None:
            return None
        state = after
    return state if state.gap(case) <= 0 else None


def _given_up(state: _State) -> tuple[int, int, int]:
    """Worst part first, then how many parts, then all parts together."""
    ranks = [_ORDER[part.safety] for part in state.parts]
    return max(ranks), len(ranks), sum(ranks)


def _with(state: _State, part: _Part, **changes: float) -> _State:
    return replace(state, parts=(*state.parts, part), **changes)


def _halve(case: Case, state: _State) -> _State | None:
    if state.need is None or not can_halve(case) or not cache_halves(case):
        return None
    part = _Part(
        "fp8_kv",
        fp8_change(case),
        f"8 bits halve the need to {size(state.need / 2)}",
        "a little accuracy",
        Safety.CHANGES_RESULTS,
    )
    return _with(state, part, need=state.need / 2)


def _drop_graphs(case: Case, state: _State) -> _State | None:
    estimate = case.numbers.graph_estimate
    if estimate is None or not case.situation.charges_graphs or case.now("enforce_eager") is True:
        return None
    part = _Part(
        "enforce_eager",
        Change(flag="--enforce-eager", from_=False, to=True),
        f"no graphs give {size(estimate.value)}",
        "slower decoding",
        Safety.TRADEOFF,
    )
    return _with(state, part, pool=state.pool + estimate.value)


def _more_share(case: Case, state: _State) -> _State | None:
    """As much of the window as the gap asks for."""
    total, now, top = case.numbers.total, state.share, case.advice.upper_bound
    if total is None or now is None or top is None or now >= _NEARLY_TOP:
        return None
    if case.advice.verdict not in (GmuVerdict.RAISE, GmuVerdict.CANNOT_HELP):
        return None
    share = min(top, ceil2(now + state.gap(case) / total.value))
    if share < now + 0.01 - 1e-9:
        return None
    gain = (share - now) * total.value
    part = _Part(
        "raise_gmu",
        Change(flag="--gpu-memory-utilization", from_=now, to=share),
        f"a share of {share:g} gives {size(gain)}",
        f"headroom falls to {size((1 - share) * total.value)}",
        Safety.SAFE,
    )
    return _with(state, part, pool=state.pool + gain, share=share)


def _offload(case: Case, state: _State) -> _State | None:
    most = most_offload(case)
    if not can_offload(case) or case.numbers.weights is None:
        return None
    more = min(most, math.ceil(state.gap(case) / GIB))
    if more < 1:
        return None
    now = math.ceil(offloaded_now(case))
    part = _Part(
        "offload_weights",
        Change(flag="--cpu-offload-gb", from_=now, to=now + more),
        f"weights on the host give {more}.00 GiB{host_note(case).replace('; ', ' (', 1)}"
        + (")" if host_note(case) else ""),
        "decoding waits for the bus",
        Safety.TRADEOFF,
    )
    return _with(state, part, pool=state.pool + more * GIB)


def _shorten(case: Case, state: _State) -> _State | None:
    """The length that the pool of this state holds: vLLM's own count, scaled, or the linear share."""
    numbers, asked = case.numbers, state.length
    if asked is None or state.need is None or state.pool <= 0:
        return None
    tokens = asked * (state.pool - _SLACK) / state.need
    counted, before = numbers.estimated_len or numbers.capacity_tokens, pool_bytes(numbers)
    if counted is not None and before is not None and case.numbers.needed is not None:
        # Need grows with length ever more slowly (windows, states), so scaling up a count is on the safe side.
        factor = (state.pool - PRINTED) / (before + PRINTED)
        halved = case.numbers.needed.value / state.need
        tokens = counted.value * factor * halved
    elif not grows_linearly(case):
        return None
    length = int(tokens // BLOCK) * BLOCK
    if length <= 0 or length >= asked or is_short(length, asked):
        return None
    part = _Part(
        "shorten_context",
        Change(flag="--max-model-len", from_=int(asked), to=length),
        f"{format_count(length)} tokens need about {size(state.need * length / asked)}",
        f"context -{1 - length / asked:.0%}",
        Safety.TRADEOFF,
    )
    # The length is taken from the pool itself, so it fits by construction.
    return _with(state, part, need=state.pool - _SLACK, length=float(length))


# In the order in which they are applied: what is cheap to the exact amount comes after what is all or nothing.
_LEVERS: Mapping[str, _Lever] = {
    "fp8_kv": _halve,
    "enforce_eager": _drop_graphs,
    "raise_gmu": _more_share,
    "offload_weights": _offload,
    "shorten_context": _shorten,
}


def _pool_fix(case: Case, start: _State, state: _State) -> Fix:
    proof = f"pool {size(start.pool)}"
    if start.need is not None:
        proof += f", need {size(start.need)}"
    proof += "; " + "; ".join(part.gives for part in state.parts) + f": {size(state.pool)} of pool"
    if start.need is None:
        proof += ", whether one request of full length fits is not in the log"
    request = state.need
    if request is not None and any(part.name == "shorten_context" for part in state.parts):
        assert start.need is not None
        assert start.length is not None
        assert state.length is not None
        request = start.need * state.length / start.length
        if any(part.name == "fp8_kv" for part in state.parts):
            request /= 2
    predicted = outlook(
        case, pool=state.pool, request=request, length=state.length, share=state.share
    )
    if state.length != start.length and state.length is not None:
        predicted["max_model_len"] = int(state.length)
    return _join(
        case,
        state.parts,
        fits=True if start.need is not None else None,
        proof=proof,
        verify=pool_line(case, state.pool, tokens_of(predicted)),
        predicted=predicted,
    )


# --- a pool that leaves too little room for the rest ----------------------------------------------------------


def _for_the_rest(case: Case) -> Iterator[Fix]:
    """Lower the share no further than one request allows, and make the failed step smaller, or one request."""
    numbers = case.numbers
    request, pool, lack = one_request(numbers), pool_bytes(numbers), missing(numbers)
    if None in (numbers.gmu, numbers.total, request, pool, lack) or case.situation.pinned_by:
        return
    makers = (_smaller_step, _shorter_request, _halved_request)
    yield from [fix for fix in (maker(case) for maker in makers) if fix is not None][:MOST]


_STEP_BY = {
    "act.prefill": "max_num_batched_tokens",
    "act.moe_workspace": "max_num_batched_tokens",
    "act.sampler_warmup": "max_num_seqs",
    "act.logits_logprobs": "max_num_seqs",
}
_LEAST = {"max_num_batched_tokens": 256, "max_num_seqs": 8}


def _smaller_step(case: Case) -> Fix | None:
    """Halve the step until the share can be lowered enough without starving the pool."""
    numbers = case.numbers
    name, low = _STEP_BY.get(case.situation.subtype), lower_end(numbers)
    if name is None or low is None or case.situation.engine == "V0":
        return None
    total, gmu = numbers.total, numbers.gmu
    tried, free = numbers.tried, numbers.free
    assert total is not None
    assert gmu is not None
    assert tried is not None
    assert free is not None
    limit = case.situation.step_limit(name, total.value)
    rows = case.situation.facts.number("sampler.dummy_requests") if name == "max_num_seqs" else None
    now = int(rows or (limit.value if limit else 0))
    room = (gmu.value - low) * total.value
    if now <= _LEAST[name] or room <= 0:
        return None
    to = 1 << (now - 1).bit_length() - 1
    while to > _LEAST[name] and tried.value * to / now + margin(total.value) > free.value + room:
        to //= 2
    after = tried.value * to / now
    share = max(
        low, floor2(gmu.value - max(0.0, after + margin(total.value) - free.value) / total.value)
    )
    given = (gmu.value - share) * total.value
    if after > free.value + given or share > gmu.value - 0.01 + 1e-9:
        return None
    flag = "--" + name.replace("_", "-")
    slower = "slower prefill" if name == "max_num_batched_tokens" else "fewer requests at once"
    step = _Part(
        "smaller_step",
        Change(flag=flag, from_=now, to=to),
        f"{format_count(to)} of {format_count(now)} take about {size(after)} of {size(tried.value)}",
        slower,
        Safety.TRADEOFF,
    )
    return _lowered(case, share, step, after)


def _shorter_request(case: Case) -> Fix | None:
    """The share that the failed request asks for, and the length that the smaller pool still holds."""
    asked, share = case.numbers.asked_len, case.advice.suggested
    pool, request = _left(case, share), one_request(case.numbers)
    if asked is None or share is None or pool is None or request is None or pool >= request:
        return None
    length = int(asked.value * (pool - _SLACK) / request // BLOCK) * BLOCK
    if length <= 0 or is_short(length, asked.value) or not grows_linearly(case):
        return None
    part = _Part(
        "shorten_context",
        Change(flag="--max-model-len", from_=int(asked.value), to=length),
        f"{size(pool)} of pool stay, room for {format_count(length)} tokens",
        f"context -{1 - length / asked.value:.0%}",
        Safety.TRADEOFF,
    )
    return _lowered(case, share, part, None, length=length)


def _halved_request(case: Case) -> Fix | None:
    """The share that the failed request asks for, and a cache in 8 bits."""
    share = case.advice.suggested
    pool, request = _left(case, share), one_request(case.numbers)
    if (
        share is None
        or pool is None
        or request is None
        or not request / 2 + _SLACK <= pool < request
    ):
        return None
    if not can_halve(case) or not cache_halves(case):
        return None
    part = _Part(
        "fp8_kv",
        fp8_change(case),
        f"{size(pool)} of pool stay, one request in 8 bits needs {size(request / 2)}",
        "a little accuracy",
        Safety.CHANGES_RESULTS,
    )
    return _lowered(case, share, part, None, request=request / 2)


def _left(case: Case, share: float | None) -> float | None:
    """The pool at a lower share, where the failed request then finds its place."""
    numbers, pool = case.numbers, pool_bytes(case.numbers)
    if share is None or numbers.gmu is None or numbers.total is None or pool is None:
        return None
    given = (numbers.gmu.value - share) * numbers.total.value
    lack = missing(numbers)
    return pool - given if lack is not None and given >= lack and given < pool else None


def _lowered(
    case: Case,
    share: float,
    part: _Part,
    tried: float | None,
    *,
    length: int | None = None,
    request: float | None = None,
) -> Fix | None:
    numbers = case.numbers
    assert numbers.gmu is not None
    assert numbers.total is not None
    assert numbers.free is not None
    assert numbers.tried is not None
    given = (numbers.gmu.value - share) * numbers.total.value
    tried = numbers.tried.value if tried is None else tried
    one, asked = one_request(numbers), numbers.asked_len
    if length is not None and one is not None and asked is not None:
        request = one * length / asked.value
    pool = (pool_bytes(numbers) or 0) - given
    lower = _Part(
        "lower_gmu",
        Change(flag="--gpu-memory-utilization", from_=numbers.gmu.value, to=share),
        f"{size(numbers.free.value)} free + {size(given)} from the pool hold the {size(tried)} asked for",
        f"the KV pool shrinks by {size(given)}",
        Safety.TRADEOFF,
    )
    predicted = outlook(case, pool=pool, request=request, length=length, share=share)
    predicted["spare_bytes"] = round(numbers.free.value + given - tried)
    return _join(
        case,
        (part, lower),
        fits=True,
        proof="; ".join(item.gives for item in (part, lower)),
        verify=f"the failed step passes; {pool_line(case, pool, tokens_of(predicted))}",
        predicted=predicted,
    )


# --- both -----------------------------------------------------------------------------------------------------


_TITLES = {
    "fp8_kv": "an 8-bit cache",
    "enforce_eager": "no graphs",
    "raise_gmu": "a larger share",
    "lower_gmu": "a smaller share",
    "offload_weights": "weights on the host",
    "shorten_context": "a shorter context",
    "smaller_step": "smaller steps",
}


def _join(
    case: Case,
    parts: tuple[_Part, ...],
    *,
    fits: bool | None,
    proof: str,
    verify: str,
    predicted: Mapping[str, int | float | str | bool],
) -> Fix:
    """One Fix of several parts."""
    names = [_TITLES[part.name] for part in parts]
    title = f"{', '.join(names[:-1])} and {names[-1]} together"
    shared = any(part.change.flag == "--gpu-memory-utilization" for part in parts)
    return case.fix(
        "+".join(part.name for part in parts),
        title[0].upper() + title[1:],
        [part.change for part in parts],
        fits=fits,
        proof=proof + (case.share_note() if shared else ""),
        cost="; ".join(part.cost for part in parts),
        safety=max((part.safety for part in parts), key=_ORDER.__getitem__),
        verify=verify,
        when_not="one of them is out of the question: alone, each was computed and is not enough",
        predicted=predicted,
        used=("gmu", "total", "needed", "available", "budget", "tried", "free", "graph_estimate"),
    )
