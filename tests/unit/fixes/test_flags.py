from __future__ import annotations

import pytest
from packaging.version import Version

from diag.fixes.flags import allocator_variable, flag_exists, known_flags, spelled, takes


@pytest.mark.parametrize(
    ("flag", "version", "known"),
    [
        ("--swap-space", "0.17.1", True),
        ("--swap-space", "0.18.0", False),
        ("--kv-cache-memory-bytes", "0.10.1", False),
        ("--kv-cache-memory-bytes", "0.10.2", True),
        ("--cuda-graph-sizes", "0.12.0", True),
        ("--cuda-graph-sizes", "0.13.0", False),
        ("--language-model-only", "0.16.0", False),
        ("--max-model-len", "0.2.7", True),
    ],
)
def test_flag_by_release(flag, version, known):
    assert flag_exists(flag, Version(version)) is known


def test_unknown_release_or_flag_gives_no_answer():
    assert flag_exists("--swap-space", None) is None
    assert flag_exists("--no-such-flag", Version("0.10.0")) is None


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.8.5", None),
        ("0.10.0", "--cuda-graph-sizes"),
        ("0.11.2", "--max-cudagraph-capture-size"),
        ("0.33.0", "--max-cudagraph-capture-size"),
        (None, "--max-cudagraph-capture-size"),
    ],
)
def test_largest_graph_is_spelled_by_release(version, name):
    assert spelled("largest_graph", Version(version) if version else None) == name


def test_allocator_variable_keeps_the_old_name_where_it_is_read():
    assert allocator_variable(None) == "PYTORCH_CUDA_ALLOC_CONF"
    assert allocator_variable(Version("0.20.0")) == "PYTORCH_ALLOC_CONF"


def test_every_flag_says_what_follows_it():
    assert {takes(flag) for flag in known_flags()} <= {"value", "switch", "list", "json"}
