"""Elements and heads of the KV cache; whole layouts are in test_shapes.py."""

from __future__ import annotations

import pytest

from diag.memory.kv_cache import kv_element_bytes, local_kv_heads


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


@pytest.mark.parametrize(("heads", "tp"), [(0, 1), (8, 0)])
def test_counts_below_one_are_refused(heads, tp):
    with pytest.raises(ValueError, match="at least 1"):
        local_kv_heads(heads, tp)
