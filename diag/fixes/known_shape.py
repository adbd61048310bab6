"""Whether a model can be split further: its heads and cache by the built-in table of models, the GPUs by the log.

In: a Case. Out: counts and yes/no answers; None or False for a model that the table does not know.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from diag.fixes.case import Case
from diag.release import in_range

if TYPE_CHECKING:
    from diag.memory.shapes import ModelShape

_LARGEST_GROUP = 16  # GPUs of a tensor-parallel group
_TABLE_STEP = 6  # log lines from one GPU of an nvidia-smi table to the next
_ONE_MACHINE = 8  # GPUs of an ordinary machine


@lru_cache(maxsize=64)
def _of_name(name: str) -> ModelShape | None:
    from diag.memory.find_shape import from_table  # the table is read only when a sum needs it

    return from_table(name)


def shape_of(case: Case) -> ModelShape | None:
    """The shape of the model that the log or command names."""
    name = case.situation.setting_text("model")
    return _of_name(name[:300]) if name else None


def next_group(case: Case, now: int) -> int | None:
    """The next larger tensor-parallel size: a power of two where the heads divide by it.

    The next power of two for a model that is not known, None when no size up to 16 divides.
    """
    shape = shape_of(case)
    if shape is None or shape.heads <= 0:
        return 1 << now.bit_length()
    sizes = [size for size in range(now + 1, _LARGEST_GROUP + 1) if _divides(shape, size)]
    powers = [size for size in sizes if size & (size - 1) == 0]
    return next(iter(powers or [size for size in sizes if size <= _ONE_MACHINE]), None)


def divides(case: Case, size: int) -> bool | None:
    """Whether attention and KV heads divide over `size` ranks; None for a model that is not known."""
    shape = shape_of(case)
    return None if shape is None or shape.heads <= 0 else _divides(shape, size)


def _divides(shape: ModelShape, size: int) -> bool:
    """vLLM's own conditions: KV heads are split, or copied to a whole number of ranks each."""
    kv = shape.kv_heads
    return shape.heads % size == 0 and (kv <= 0 or kv % size == 0 or size % kv == 0)


def cache_is_split(case: Case, size: int) -> bool:
    """Whether the cache of a token is really smaller on each of `size` ranks; True when unknown."""
    shape = shape_of(case)
    if shape is None:
        return True
    return not shape.latent and (shape.kv_heads <= 0 or shape.kv_heads >= size)


def grows_linearly(case: Case) -> bool:
    """Whether half the length surely needs half the cache: every layer keeps every token.

    True before the hybrid manager of 0.9.1, and for known models without windows and states.
    """
    if in_range(case.situation.version, "<0.9.1") is True:
        return True
    shape = shape_of(case)
    if shape is None or not shape.cache:
        return False
    layers = shape.cache[0]
    other = (layers.state, layers.window, layers.cross_tokens)
    return not shape.hybrid and other == (None, None, None)


def tensor_ranks(case: Case) -> int:
    """The tensor-parallel size, 1 when the log shows none."""
    return max(1, int(case.situation.setting_number("tensor_parallel_size") or 1))


def gpus_shown(case: Case) -> int | None:
    """GPUs in the nvidia-smi tables of the log: rows of the largest block of neighbouring lines; None without one."""
    lines = [event.line.number for event in case.situation.facts.seen("nvsmi.gpu")]
    best = rows = 0
    last: int | None = None
    for line in lines:
        rows = rows + 1 if last is not None and line - last <= _TABLE_STEP else 1
        best, last = max(best, rows), line
    return best or None
