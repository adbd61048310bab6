"""Sums that several actions share: sizes as words, what a changed pool holds, the length that fits it."""

from __future__ import annotations

from diag.facts.model import Value
from diag.fixes.case import Case
from diag.fixes.known_shape import grows_linearly
from diag.fixes.window import one_request, pool_bytes
from diag.units import GIB, format_count, format_size

BLOCK = 16  # tokens; vLLM's usual block, and a divisor of the larger ones
# A fitting length below both of these says that the fixed parts fill the card, not that the context should be so short.
_SYMPTOM_TOKENS = 2048
_SYMPTOM_SHARE = 1 / 8
PRINTED = GIB // 200  # half of the last printed digit


def size(amount: float) -> str:
    """Bytes for people."""
    return format_size(round(amount))


def pool_line(case: Case, pool: float, tokens: float | None) -> str:
    """What to look for in the next log once the pool has changed."""
    if case.situation.engine == "V0":
        return 'look for "# GPU blocks" above 0 and no error about the longest request'
    found = f'look for "Available KV cache memory" of about {size(pool)}'
    return found + (
        f' and "GPU KV cache size" of about {format_count(tokens)} tokens' if tokens else ""
    )


def outlook(
    case: Case,
    *,
    pool: float | None = None,
    request: float | None = None,
    length: float | None = None,
    share: float | None = None,
) -> dict[str, Value]:
    """What the next start should show; a number the log does not allow is left out.

    Args: bytes of the pool and of one request, tokens of that request, share of the card - each after the change, and
        as it is now where it does not change.
    Returns: `kv_pool_bytes`, `concurrency` (requests of full length at once), `kv_tokens`, `headroom_bytes` (of the
        card, outside the share).
    """
    numbers = case.numbers
    pool = pool_bytes(numbers) if pool is None else pool
    request = one_request(numbers) if request is None else request
    if length is None and numbers.asked_len is not None:
        length = numbers.asked_len.value
    if share is None and numbers.gmu is not None and case.situation.pinned_by is None:
        share = numbers.gmu.value
    found: dict[str, Value] = {}
    if pool is not None:
        found["kv_pool_bytes"] = round(pool)
    if pool is not None and request:
        found["concurrency"] = round(pool / request, 2)
        if length:
            found["kv_tokens"] = int(pool / request * length)
    if share is not None and numbers.total is not None and not case.situation.on_cpu:
        found["headroom_bytes"] = round((1 - share) * numbers.total.value)
    return found


def spare_after(case: Case, *, given: float = 0.0, tried: float | None = None) -> dict[str, Value]:
    """`spare_bytes`: what stays free once the failed request has its place; empty when unknown or not enough."""
    numbers = case.numbers
    if numbers.tried is None or numbers.free is None:
        return {}
    asked = numbers.tried.value if tried is None else tried
    spare = round(numbers.free.value + given - asked)
    return {"spare_bytes": spare} if spare >= 0 else {}


def starved(case: Case, pool: float | None) -> str:
    """What to add to a sum whose pool no longer holds one full-length request; "" when it does or that is unknown."""
    request = one_request(case.numbers)
    if pool is None or request is None or pool >= request + 2 * PRINTED:
        return ""
    return f", which then holds {size(pool)}: not surely the {size(request)} of one request"


def tokens_of(outlook: dict[str, Value]) -> float | None:
    """Tokens of an outlook; None when unknown."""
    tokens = outlook.get("kv_tokens")
    return float(tokens) if tokens is not None else None


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
    share = (available.value - PRINTED) / (needed.value + PRINTED)
    tokens = _whole_blocks(asked.value * share)
    linear = grows_linearly(case)
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
    return is_short(fitting[0], asked.value)


def is_short(tokens: float, asked: float) -> bool:
    """Whether a length is far too short to be meant, in itself and beside what was asked for."""
    return tokens < _SYMPTOM_TOKENS and tokens < asked * _SYMPTOM_SHARE


def _whole_blocks(tokens: float) -> int:
    return int(tokens // BLOCK) * BLOCK
