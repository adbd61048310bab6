"""The KV pool of the CPU back end. What a first fix must be was tried on vLLM 0.32.0 (`scripts/prove_cpu.py`)."""

from __future__ import annotations

import pytest

from diag import diagnose
from diag.terms import GmuVerdict
from diag.units import GIB

KV_CHECK = "Available memory on node 0 ({free}/9.09 GiB) on kv cache allocation is less than requested memory for kv "
REFUSED_TEXT = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
)


def raised(file: str, function: str, error: str, process: str = "Worker pid=7") -> str:
    """A traceback as vLLM logs it."""
    prefix = f"({process}) ERROR 12-01 18:26:57 [core.py:1510] "
    frame = f'  File "/opt/v/vllm/{file}", line 1010, in {function}'
    return "".join(
        f"{prefix}{line}\n" for line in ("Traceback (most recent call last):", frame, error)
    )


def pool_set(size: str) -> str:
    where = "(Worker pid=7) INFO 12-01 18:26:56 [cpu_worker.py:208]"
    return f"{where} Explicitly set ({size}) GiB for KV cache on node 0.\n"


NO_BLOCKS = pool_set("0.0/9.09") + raised(
    "v1/core/kv_cache_utils.py",
    "_check_enough_kv_cache_memory",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    "EngineCore pid=6",
)
SHARE_TOO_SMALL = raised(
    "v1/worker/cpu_worker.py",
    "determine_available_memory",
    f"ValueError: {KV_CHECK.format(free=7.51)}(-0.3/0.29 GiB). Reduce CPU memory used by others.",
)
REFUSED = pool_set("4.0/12.21") + raised(
    "v1/worker/gpu_model_runner.py", "_allocate_kv_cache_tensors", REFUSED_TEXT
)
SCRATCH = (
    pool_set("0.5/13.59")
    + "(APIServer pid=5) INFO:     Application startup complete.\n"
    + raised(
        "model_executor/layers/logits_processor.py",
        "_get_logits",
        "RuntimeError: ScratchPadManager: aligned_alloc failed for size 4799913984",
    )
)


def above_ram(asked: str) -> str:
    return raised(
        "v1/worker/cpu_worker.py",
        "determine_available_memory",
        f"ValueError: {KV_CHECK.format(free=7.57)}({asked} GiB). Decrease --kv-cache-memory-bytes.",
    )


def answer(tail: str, more: str = "", launch: str | None = None):
    args = f"{{'model_tag': 'm', 'model': 'm'{more}}}"
    start = (
        f"(APIServer pid=5) INFO 12-01 18:26:50 [api_utils.py:286] non-default args: {args}\n"
        "(EngineCore pid=6) INFO 12-01 18:26:51 [core.py:112] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='m'\n"
    )
    return diagnose(start + tail, launch=launch)


def first_change(found):
    change = found.fixes[0].changes[0]
    return change.flag or change.env or change.action, change.to


def test_a_pool_of_nothing_gets_a_quarter_of_the_node():
    found = answer(NO_BLOCKS, launch="VLLM_CPU_KVCACHE_SPACE=0 vllm serve m")
    assert found.diagnosis.subtype == "kv.no_blocks"
    assert first_change(found) == ("VLLM_CPU_KVCACHE_SPACE", 2)  # 9.09 / 4, whole GiB


def test_a_pinned_pool_is_enlarged_by_its_own_flag():
    found = answer(NO_BLOCKS, more=", 'kv_cache_memory_bytes': 1000")
    assert first_change(found) == ("--kv-cache-memory-bytes", 2 * GIB)


def test_the_variable_goes_before_the_flag():
    launch = "VLLM_CPU_KVCACHE_SPACE=400 vllm serve m --kv-cache-memory-bytes 1000"
    found = answer(above_ram("400.0"), ", 'kv_cache_memory_bytes': 1000", launch)
    assert first_change(found) == ("VLLM_CPU_KVCACHE_SPACE", 6)


@pytest.mark.parametrize(
    ("more", "asked", "change"),
    [
        ("", "400.0", ("VLLM_CPU_KVCACHE_SPACE", 6)),  # 7.57 free, 1 kept
        (", 'kv_cache_memory_bytes': 28991029248", "27.0", ("--kv-cache-memory-bytes", 6 * GIB)),
    ],
)
def test_a_pool_above_the_memory_is_set_to_what_is_free(more, asked, change):
    found = answer(above_ram(asked), more)
    assert first_change(found) == change
    assert found.fixes[0].fits
    assert found.gmu.verdict is GmuVerdict.CANNOT_HELP  # the pool is set by hand
    assert "free_card" not in {fix.id for fix in found.fixes}  # an empty host would not do


def test_another_process_is_named_when_an_empty_host_would_do():
    found = answer(above_ram("8.0"))
    assert {"free_card", "cpu_pool"} <= {fix.id for fix in found.fixes}


def test_a_share_too_small_is_raised_though_others_use_the_host():
    found = answer(SHARE_TOO_SMALL, more=", 'gpu_memory_utilization': 0.032")
    assert first_change(found) == ("--gpu-memory-utilization", 0.09)


def test_a_refused_pool_is_halved():
    found = answer(REFUSED, more=", 'kv_cache_memory_bytes': 4294967296")
    assert found.diagnosis.subtype == "kv.alloc_oom"
    assert first_change(found) == ("--kv-cache-memory-bytes", 2 * GIB)


def test_the_rebuilt_command_has_the_variable_that_the_log_shows():
    found = answer(REFUSED)
    assert found.fixes[0].command == "VLLM_CPU_KVCACHE_SPACE=2 vllm serve m"
    assert first_change(found) == ("VLLM_CPU_KVCACHE_SPACE", 2)


def test_scratch_memory_of_a_cpu_kernel_is_memory():
    found = answer(SCRATCH, more=", 'max_num_batched_tokens': 16384")
    assert found.diagnosis.subtype == "act.logits_logprobs"
    assert first_change(found) == ("--max-num-batched-tokens", 2048)  # 4096 failed too
