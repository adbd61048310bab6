"""What one element and one head of the KV cache take, and how a layer keeps its past; `kv_layout` puts it together."""

from __future__ import annotations

from enum import Enum

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


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
