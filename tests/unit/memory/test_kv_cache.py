"""KV cache sizes against hand calculation and lines of real logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.memory.kv_cache import (
    DS_MLA_FP8_BYTES,
    Attention,
    LayerGroup,
    bytes_per_token,
    fitting_length,
    held_tokens,
    kv_bytes_per_token,
    kv_element_bytes,
    local_kv_heads,
    max_concurrency,
    mla_bytes_per_token,
    pool_blocks,
    pool_tokens,
    request_bytes,
)
from diag.units import GIB, KIB


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        # 32 layers, 8 KV heads, head 128, 16 bit: 128 KiB a token
        ({"layers": 32, "kv_heads": 8, "head_size": 128, "dtype_bytes": 2}, 128 * KIB),
        ({"layers": 32, "kv_heads": 8, "head_size": 128, "dtype_bytes": 1}, 64 * KIB),
        ({"layers": 32, "kv_heads": 8, "head_size": 128, "dtype_bytes": 2, "tp": 4}, 32 * KIB),
        # more ranks than heads: replicated, no further saving
        ({"layers": 28, "kv_heads": 4, "head_size": 128, "dtype_bytes": 2, "tp": 8}, 28 * 512),
        # 64 layers over 3 stages: the largest holds 22
        (
            {"layers": 64, "kv_heads": 8, "head_size": 128, "dtype_bytes": 2, "pp": 3},
            22 * 4096,
        ),
        # float32 scales for K and V of each head
        (
            {"layers": 1, "kv_heads": 8, "head_size": 128, "dtype_bytes": 1, "scale_bytes": 8},
            8 * (256 + 8),
        ),
        # narrower values
        (
            {"layers": 1, "kv_heads": 1, "head_size": 192, "head_size_v": 128, "dtype_bytes": 2},
            640,
        ),
    ],
)
def test_bytes_per_token(shape, size):
    assert kv_bytes_per_token(**shape) == size


def test_pool_of_a_real_log():
    # Qwen3-Coder-30B: 48 layers, 4 KV heads, head 128, 16 bit; 13.84 GiB gave 151,216 tokens
    token = kv_bytes_per_token(layers=48, kv_heads=4, head_size=128, dtype_bytes=2)
    assert pool_tokens(round(13.84 * GIB), token) == pytest.approx(151_216, abs=100)


def test_pool_of_a_real_log_with_eight_ranks():
    # 27B on one H100: 94,784 tokens in 9,318,930,329 bytes at 16 tokens a block
    assert pool_blocks(9_318_930_329, 98_304) == 5924
    assert pool_tokens(9_318_930_329, 98_304) == 94_784


def test_mla_is_not_split():
    assert mla_bytes_per_token(layers=61, dtype_bytes=2) == 61 * 576 * 2
    packed = mla_bytes_per_token(layers=61, dtype_bytes=1, packed_bytes=DS_MLA_FP8_BYTES)
    assert packed == 61 * 656


@pytest.mark.parametrize(
    ("dtype", "model", "size"),
    [
        ("auto", "torch.bfloat16", 2),
        ("auto", "float32", 4),
        (None, "half", 2),
        ("fp8_e5m2", None, 1),
        ("fp8", "bfloat16", 1),
        ("nvfp4", None, 0.5625),
        ("auto", None, None),
        ("auto", "auto", None),
        ("turbo", None, None),
    ],
)
def test_element_sizes(dtype, model, size):
    assert kv_element_bytes(dtype, model) == size


def test_heads_are_never_less_than_one():
    assert [local_kv_heads(8, tp) for tp in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("attention", "window", "step", "tokens"),
    [
        (Attention.FULL, None, 8192, 32768),
        (Attention.SLIDING, 1024, 2048, 3071),
        (Attention.SLIDING, 1024, 65536, 32768),
        (Attention.SLIDING, 1024, None, 32768),
        (Attention.CHUNKED, 8192, 8192, 16384),
    ],
)
def test_tokens_a_layer_keeps(attention, window, step, tokens):
    assert held_tokens(32768, attention, window, step) == tokens


def test_context_parallel_divides_the_tokens():
    assert held_tokens(32768, context_parallel=4) == 8192


def test_request_of_a_hybrid_model():
    groups = (
        LayerGroup(token_bytes=1000),
        LayerGroup(token_bytes=2000, attention=Attention.SLIDING, window=1024),
        LayerGroup(token_bytes=5_000_000, attention=Attention.STATE),
    )
    # 3071 tokens are 192 blocks, and one more for the window's edge
    expected = 32768 * 1000 + 193 * 16 * 2000 + 5_000_000
    assert request_bytes(groups, 32768, max_num_batched_tokens=2048) == expected


def test_concurrency():
    # "Maximum concurrency for 4,096 tokens per request": 23,460 blocks of 16 tokens
    assert max_concurrency(23_460, 4096) == pytest.approx(91.64, abs=0.005)


def test_fitting_length_of_a_refusal():
    needed, available = 10 * GIB, round(6.10 * GIB)
    assert fitting_length(available, needed, 40_960) == 24_976
    assert bytes_per_token(needed, 40_960) == 262_144


@pytest.mark.parametrize(
    ("available", "length"), [(0, 0), (-5, 0), (1, 0), (10 * GIB, 40_960), (11 * GIB, 40_960)]
)
def test_fitting_length_at_the_ends(available, length):
    assert fitting_length(available, 10 * GIB, 40_960) == length


@given(
    st.integers(1, 200 * GIB),
    st.integers(1, 200 * GIB),
    st.integers(1, 2_000_000),
    st.sampled_from([1, 16, 32, 64, 128]),
)
def test_fitting_length_fits(available, needed, asked, block):
    length = fitting_length(available, needed, asked, block)
    assert 0 <= length <= asked
    blocks_asked = -(-asked // block)
    assert (length // block) * needed <= available * blocks_asked or length == asked
    assert length % block == 0 or length == asked


@pytest.mark.parametrize("bad", [{"layers": 0}, {"kv_heads": 0}, {"tp": 0}, {"head_size": -1}])
def test_counts_below_one_are_refused(bad):
    good = {"layers": 1, "kv_heads": 1, "head_size": 64, "dtype_bytes": 2}
    with pytest.raises(ValueError, match="at least 1"):
        kv_bytes_per_token(**{**good, **bad})
