"""Sizes of the KV cache: pure arithmetic, no log and no model file.

In: layer counts, heads, element sizes, or the sizes a log printed. Out: bytes per token, blocks,
tokens, the longest length that fits. Formulas are those of vLLM's KV cache specs, rewritten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

DEFAULT_BLOCK_SIZE = 16
DS_MLA_FP8_BYTES = 656  # per token and layer: fp8 latent, its scales and the 16-bit rotary part


class Attention(str, Enum):
    """How a layer keeps its past."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"  # Mamba and linear attention: one state per sequence, whatever its length


def ceil_div(amount: int, unit: int) -> int:
    """`amount / unit`, rounded up. Raises: ValueError if `unit` is below 1."""
    if unit < 1:
        raise ValueError(f"unit must be at least 1, got {unit}")
    return -(-amount // unit)


def local_kv_heads(kv_heads: int, tp: int) -> int:
    """KV heads one rank keeps: split over `tp`, and replicated once there are more ranks than
    heads.

    >>> local_kv_heads(8, 4), local_kv_heads(2, 8)
    (2, 1)
    """
    _positive(kv_heads=kv_heads, tp=tp)
    return max(1, ceil_div(kv_heads, tp))


def kv_bytes_per_token(  # noqa: PLR0913 - the terms of one product
    *,
    layers: int,
    kv_heads: int,
    head_size: int,
    dtype_bytes: float,
    tp: int = 1,
    pp: int = 1,
    head_size_v: int | None = None,
    scale_bytes: int = 0,
) -> int:
    """Bytes of KV cache that one token takes on one rank, full attention (MHA or GQA).

    Args: layers that keep a KV cache, of the whole model (count); kv_heads of the whole model
        (count); head_size of the keys (elements); dtype_bytes (bytes per element, see
        `kv_element_bytes`); tp, pp (ranks, stages; the largest stage decides); head_size_v when
        values are narrower (elements); scale_bytes per head and token for K and V together.
    Returns: bytes per token per rank. Raises: ValueError if a count is below 1.

    >>> kv_bytes_per_token(layers=32, kv_heads=8, head_size=128, dtype_bytes=2, tp=2)
    65536
    """
    _positive(layers=layers, head_size=head_size, pp=pp)
    per_head = (head_size + (head_size_v or head_size)) * dtype_bytes + scale_bytes
    return round(ceil_div(layers, pp) * local_kv_heads(kv_heads, tp) * per_head)


def mla_bytes_per_token(
    *,
    layers: int,
    dtype_bytes: float,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    pp: int = 1,
    packed_bytes: int | None = None,
) -> int:
    """Bytes per token on one rank for latent attention (MLA): one shared vector, not split by
    tensor parallelism.

    `packed_bytes` replaces the product for packed layouts (`DS_MLA_FP8_BYTES`).
    Raises: ValueError if a count is below 1.

    >>> mla_bytes_per_token(layers=61, dtype_bytes=2)
    70272
    """
    _positive(layers=layers, kv_lora_rank=kv_lora_rank, pp=pp)
    per_layer = (
        packed_bytes if packed_bytes is not None else (kv_lora_rank + rope_dim) * dtype_bytes
    )
    return round(ceil_div(layers, pp) * per_layer)


def kv_element_bytes(kv_cache_dtype: str | None, model_dtype: str | None = None) -> float | None:
    """Bytes of one cached number for a `--kv-cache-dtype`; "auto" follows the model's dtype. None:
    not known.

    >>> kv_element_bytes("fp8_e4m3"), kv_element_bytes("auto", "bfloat16"), kv_element_bytes("auto")
    (1, 2, None)
    """
    name = (kv_cache_dtype or "auto").lower().removeprefix("torch.")
    if name == "auto":
        if not model_dtype or model_dtype.lower() == "auto":
            return None
        name = model_dtype.lower().removeprefix("torch.")
    if name.startswith(("fp8", "float8", "int8")):
        return 1
    if name in ("half", "float16", "bfloat16", "fp16", "bf16"):
        return 2
    if name in ("float", "float32", "fp32"):
        return 4
    if name.startswith("nvfp4"):
        return 0.5 + 1 / 16  # 4-bit numbers and one 8-bit scale for each 16 of them
    return None


def held_tokens(
    length: int,
    attention: Attention = Attention.FULL,
    window: int | None = None,
    max_num_batched_tokens: int | None = None,
    context_parallel: int = 1,
) -> int:
    """Tokens a layer must keep for one request of `length` tokens.

    A sliding window keeps its window and the tokens of one step, chunked local attention its chunk
    and one step; without the step size the whole length is taken. Raises: ValueError if a count is
    below 1.
    """
    _positive(length=length, context_parallel=context_parallel)
    share = ceil_div(length, context_parallel)
    if (
        attention in (Attention.FULL, Attention.STATE)
        or window is None
        or max_num_batched_tokens is None
    ):
        return share
    past = window - 1 if attention is Attention.SLIDING else window
    return min(past + max_num_batched_tokens, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of one kind: `token_bytes` is what one token takes in all of them together on one
    rank.

    For `STATE` layers it is the size of one sequence's state instead.
    """

    attention: Attention = Attention.FULL
    token_bytes: int
    window: int | None = None


def request_bytes(
    groups: tuple[LayerGroup, ...],
    length: int,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_num_batched_tokens: int | None = None,
) -> int:
    """KV bytes on one rank that one request of `length` tokens can need, in whole blocks.

    >>> request_bytes((LayerGroup(token_bytes=131072),), 4096)
    536870912
    """
    total = 0
    for group in groups:
        if group.attention is Attention.STATE:
            total += group.token_bytes
            continue
        tokens = held_tokens(length, group.attention, group.window, max_num_batched_tokens)
        blocks = ceil_div(tokens, block_size)
        if group.attention is Attention.SLIDING and tokens < length:
            blocks += 1  # the window need not start at a block's edge
        total += blocks * block_size * group.token_bytes
    return total


def pool_blocks(budget: int, token_bytes: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Whole KV blocks in `budget` bytes; 0 for a negative budget."""
    _positive(token_bytes=token_bytes, block_size=block_size)
    return max(0, budget // (token_bytes * block_size))


def pool_tokens(budget: int, token_bytes: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Tokens that `budget` bytes hold, in whole blocks."""
    return pool_blocks(budget, token_bytes, block_size) * block_size


def max_concurrency(blocks: int, length: int, block_size: int = DEFAULT_BLOCK_SIZE) -> float:
    """Requests of `length` tokens that fit at once, full attention."""
    _positive(length=length, block_size=block_size)
    return blocks / ceil_div(length, block_size)


def bytes_per_token(needed_bytes: int, asked_len: int) -> float:
    """Bytes per token on one rank, from the need printed for `asked_len` tokens. Full attention."""
    _positive(asked_len=asked_len)
    return needed_bytes / asked_len


def fitting_length(
    available: int, needed: int, asked: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> int:
    """Longest length whose KV cache fits `available` bytes when `asked` tokens need `needed` bytes;
    whole blocks.

    Linear: right for full attention, too low for hybrid models (prefer the length that vLLM
    prints). Never above `asked`.

    >>> fitting_length(available=6549825126, needed=10737418240, asked=40960)
    24976
    """
    _positive(needed=needed, asked=asked, block_size=block_size)
    if available >= needed:
        return asked
    if available <= 0:
        return 0
    blocks = math.floor(available * ceil_div(asked, block_size) / needed)
    return min(asked, blocks * block_size)


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
