"""What all verdicts share: how one is made, whether the KV pool was there yet, and the verdicts without a direction."""

from __future__ import annotations

import re
from collections.abc import Callable

from diag.fixes.model import GmuAdvice
from diag.fixes.situation import Numbers, Situation
from diag.terms import GmuVerdict, Phase

OOM_TEXT = re.compile(
    r"(?<!running )out of memory|outofmemory|memoryerror|not enough gpu memory|allocationfailure|device not ready"
    r"|failed to allocate|\bOOM\b",
    re.IGNORECASE,
)
BEFORE_POOL = (Phase.INIT_DEVICE, Phase.WEIGHT_LOAD)
_AFTER_POOL = (Phase.GRAPH_CAPTURE, Phase.SAMPLER_WARMUP, Phase.SERVING, Phase.SLEEP_WAKE)

Judge = Callable[[Situation, Numbers], GmuAdvice]


def advice_of(
    numbers: Numbers,
    verdict: GmuVerdict,
    why: str,
    *,
    lower: float | None = None,
    upper: float | None = None,
    suggested: float | None = None,
) -> GmuAdvice:
    """A verdict with the present share filled in."""
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
    if situation.phase in _AFTER_POOL or "error loading program" in situation.text.lower():
        return True  # XLA loads its programs once the pool is placed
    if situation.subtype == "tp.nccl_oom" and "init_device" not in situation.sites:
        return (
            None  # collectives make buffers whenever they are first used; only a frame tells when
        )
    return False if situation.phase in BEFORE_POOL else None


def needs_oom_text(judge: Judge) -> Judge:
    """Only a text that says memory ran out supports a direction; without one the facts don't suffice."""

    def judged(situation: Situation, numbers: Numbers) -> GmuAdvice:
        if numbers.tried is None and not OOM_TEXT.search(situation.text):
            return advice_of(
                numbers,
                GmuVerdict.NOT_ENOUGH_FACTS,
                "The log shows no request that failed for memory, so nothing says that the share is too large.",
            )
        return judge(situation, numbers)

    return judged


def pool_set_by_hand(situation: Situation, numbers: Numbers) -> GmuAdvice | None:
    """The pool does not follow the share at all: pinned bytes, forced blocks, the CPU back end's own variable."""
    knob = situation.pinned_by
    if knob is None:
        return None
    return advice_of(
        numbers,
        GmuVerdict.CANNOT_HELP,
        f"The KV pool is set by {knob} and does not follow gpu_memory_utilization: change that instead.",
    )


def before_pool(situation: Situation, numbers: Numbers) -> GmuAdvice:
    """The verdict for a failure that no share could have prevented: the pool comes later."""
    place = (
        "while the weights are loaded"
        if situation.phase is Phase.WEIGHT_LOAD
        else "before the KV pool exists"
    )
    return advice_of(
        numbers,
        GmuVerdict.CANNOT_HELP,
        f"It failed {place}. The share only sizes the pool that would come afterwards and limits nothing here.",
    )


def cannot(why: str) -> Judge:
    """A judge that always says the share cannot help."""
    return lambda _, numbers: advice_of(numbers, GmuVerdict.CANNOT_HELP, why)


def leave(why: str) -> Judge:
    """A judge that always says the share plays no part."""
    return lambda _, numbers: advice_of(numbers, GmuVerdict.LEAVE, why)
