"""Advice that is often given in public and wrong: each with a small log in which a user would be tempted.

The wrong change is never among the fixes, and the answer says of it that it does not help, and why.
"""

from __future__ import annotations

import re

import pytest
from log_samples import INIT_FAILED, MAX_LEN, NO_BLOCKS, SERVING, core, planned, start, traceback

from diag.pipeline import diagnose
from diag.report.model import Diagnosis
from diag.terms import GmuVerdict, Outcome

GMU = "--gpu-memory-utilization"
ENDS = f"(APIServer pid=1) {INIT_FAILED}"


def args(**given: object) -> str:
    return str({"model": "Qwen/Qwen3-8B", **given})


def log(*lines: str) -> str:
    return "\n".join([*lines, ENDS]) + "\n"


def before_weights(**given: object) -> str:
    return "\n".join(start(args=args(**given)).splitlines()[:-1])


def oom(tried: str, free: str, *, idle: str = "64.00 MiB", allocated: str = "22.50 GiB") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        f"23.57 GiB of which {free} is free. Including non-PyTorch memory, this process has 23.40 GiB memory in use. "
        f"Of the allocated memory {allocated} is allocated by PyTorch, and {idle} is reserved by PyTorch but "
        "unallocated."
    )


def failed_in(*frames: tuple[str, str], error: str) -> list[str]:
    return [core(text) for text in traceback(*frames, error=error)]


LOADING = failed_in(
    ("v1/worker/gpu_worker.py", "load_model"),
    ("model_executor/model_loader/base_loader.py", "load_model"),
    ("model_executor/layers/linear.py", "create_weights"),
    error=oom("594.00 MiB", "171.00 MiB"),
)
PROFILING = failed_in(
    ("v1/worker/gpu_worker.py", "determine_available_memory"),
    ("v1/worker/gpu_model_runner.py", "profile_run"),
    ("model_executor/models/qwen2_5_vl.py", "get_multimodal_embeddings"),
    error=oom("8.00 GiB", "2.10 GiB"),
)
SAMPLER = [
    core(
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
    )
]
PREFILL = failed_in(
    ("v1/engine/core.py", "run_busy_loop"),
    ("v1/worker/gpu_model_runner.py", "execute_model"),
    ("model_executor/models/qwen3.py", "forward"),
    error=oom("900.00 MiB", "200.00 MiB", idle="1.20 GiB", allocated="20.10 GiB"),
)
SHORT = core(
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.10 GiB). Based on the available memory, the estimated "
    "maximum model length is 22560. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
    "initializing the engine."
)
HELD = core(
    "ValueError: Free memory on device (12.31/79.15 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.23 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
COLD = core("torch.compile takes 41.22 s in total", "INFO", "monitor.py:34")
SMI_ONE = (
    "| N/A   61C    P0             88W /  300W |   23112MiB /  24564MiB |     77%      Default |"
)


def changes(found: Diagnosis) -> list[tuple[str, object, object]]:
    return [
        (change.flag or change.env or change.action or "", change.from_, change.to)
        for fix in found.fixes
        for change in fix.changes
    ]


def names(found: Diagnosis) -> set[str]:
    return {name for name, _, _ in changes(found)}


def shares(found: Diagnosis) -> list[float]:
    return [float(to) for name, _, to in changes(found) if name == GMU]


def refused(found: Diagnosis, change: str) -> bool:
    """Whether the answer says of a change that it does not help."""
    return any(re.search(change, item.change) and item.why for item in found.not_helpful)


# --- the share in the wrong direction ---------------------------------------------------------------------------


def test_weights_that_do_not_fit_need_no_smaller_share():
    found = diagnose(log(before_weights(), *LOADING))
    assert found.diagnosis.subtype.startswith("weights.")
    assert GMU not in names(found)
    assert refused(found, f"lower {GMU}")


def test_a_pool_without_blocks_needs_no_smaller_share():
    budget = core("Available KV cache memory: -1.30 GiB", "INFO", "gpu_worker.py:375")
    found = diagnose(log(start(), budget, core(NO_BLOCKS)), gpu="A100-80GB")
    assert [share > 0.9 for share in shares(found)] == [True]
    assert refused(found, f"lower {GMU}")


def test_a_share_that_is_at_the_top_is_not_raised_further():
    given = {"gpu_memory_utilization": 0.97}
    found = diagnose(log(start(args=args(**given)), core(NO_BLOCKS)), gpu="L4")
    assert found.gmu.verdict is GmuVerdict.CANNOT_HELP
    assert GMU not in names(found)
    assert refused(found, f"raise {GMU}")


def test_a_card_that_another_process_holds_needs_no_larger_share():
    found = diagnose(log(before_weights(), HELD))
    assert GMU not in names(found)  # 12.31 of 79.15 GiB are free: a share of that holds no model
    assert refused(found, f"raise {GMU}")


def test_an_engine_that_failed_for_a_hidden_reason_gets_no_share():
    died = (
        "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
        "See stack trace (above) for the root cause."
    )
    found = diagnose(f"{core('EngineCore encountered a fatal error.')}\n{died}\n")
    assert found.outcome is Outcome.UNKNOWN
    assert GMU not in names(found)
    assert refused(found, f"set {GMU} 0.80")


# --- more and fewer GPUs ----------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_not_split():
    # 14 heads, 2 KV heads: 2 ranks are possible, 4 are not.
    model = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "tensor_parallel_size": 2}
    found = diagnose(log(start(args=args(**model)).replace("Qwen/Qwen3-8B", model["model"])
                         .replace("tensor_parallel_size=1", "tensor_parallel_size=2"), SHORT))  # fmt: skip
    assert ("--tensor-parallel-size", 2, 4) not in changes(found)
    assert refused(found, "--tensor-parallel-size 4")


def test_gpus_that_are_not_there_are_not_used():
    found = diagnose(log(SMI_ONE, before_weights(), *LOADING))
    assert "--tensor-parallel-size" not in names(found)
    assert refused(found, "--tensor-parallel-size 2")


def test_a_collective_that_fails_is_no_reason_for_one_gpu():
    ranks = start(args=args(tensor_parallel_size=4)).replace(
        "parallel_size=1", "parallel_size=4", 1
    )
    nccl = core(
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error, NCCL "
        "version 2.27.3. Last error: Cuda failure 2 'out of memory'"
    )
    found = diagnose(log(ranks, nccl))
    assert found.diagnosis.subtype == "tp.nccl_oom"
    assert "--tensor-parallel-size" not in names(found)
    assert refused(found, "--tensor-parallel-size 1")


# --- the length -------------------------------------------------------------------------------------------------


def test_the_length_that_the_log_prints_is_taken_in_place_of_2048():
    found = diagnose(log(start(), SHORT))
    lengths = [to for name, _, to in changes(found) if name == "--max-model-len"]
    assert lengths == [22560]
    assert refused(found, "--max-model-len 2048")


@pytest.mark.parametrize(
    ("lines", "subtype"),
    [(PROFILING, "act.multimodal_encoder"), (SAMPLER, "act.sampler_warmup")],
    ids=["image profile", "sampler"],
)
def test_a_shorter_context_does_not_shrink_a_step(lines, subtype):
    model = {"model": "Qwen/Qwen2.5-VL-7B-Instruct"}
    found = diagnose(log(start(args=args(**model)), *lines))
    assert found.diagnosis.subtype == subtype
    assert "--max-model-len" not in names(found)
    assert refused(found, "lower --max-model-len")


def test_hints_of_a_cold_compile_are_not_chased():
    found = diagnose(log(start(), COLD, SHORT))
    assert any("start again with the same settings" in name for name in names(found))
    assert refused(found, "follow each new hint")


# --- the allocator and the cache --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"enable_sleep_mode": True},
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
    ],
    ids=["sleep mode", "NIXL"],
)
def test_expandable_segments_stay_off_where_they_clash(given):
    found = diagnose(log(start(args=args(**given)), planned(), SERVING, *PREFILL))
    assert found.diagnosis.family.value in ("activation_spike", "allocator_transient")
    assert not any("ALLOC_CONF" in name for name in names(found))
    assert refused(found, "expandable_segments")


def test_expandable_segments_are_offered_where_nothing_clashes():
    found = diagnose(log(start(), planned(), SERVING, *PREFILL))
    assert any("ALLOC_CONF" in name for name in names(found))


@pytest.mark.parametrize("lines", [LOADING, PROFILING], ids=["weights", "profile run"])
def test_a_smaller_cache_is_no_cure_where_no_pool_is_short(lines):
    found = diagnose(log(before_weights(), *lines))
    assert "--kv-cache-dtype" not in names(found)
    assert refused(found, "--kv-cache-dtype") or found.diagnosis.subtype.startswith("act.multi")


# --- what only looks like GPU memory ----------------------------------------------------------------------------

TRITON = core(
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 163840, Hardware limit: 101376. "
    "Reducing block sizes or `num_stages` may help."
)
ILLEGAL = core("RuntimeError: CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("line", [TRITON, ILLEGAL], ids=["triton", "illegal access"])
def test_a_kernel_fault_is_no_lack_of_memory(line):
    found = diagnose(log(start(), planned(), SERVING, line))
    assert found.outcome is Outcome.OTHER_FAILURE
    assert not names(found) & {GMU, "--max-model-len", "--max-num-seqs"}
    assert refused(found, GMU)


def test_a_killed_process_ran_out_of_no_gpu_memory():
    killed = "bash: line 1:  4242 Killed                  vllm serve Qwen/Qwen3-8B"
    found = diagnose(f"{before_weights()}\n{killed}\ncontainer exited with code 137\n")
    assert found.diagnosis.family.value == "host_memory"
    assert GMU not in names(found)
    assert refused(found, f"change {GMU}")


def test_the_cpu_back_end_gets_its_own_knob():
    lines = [
        "INFO 01-09 11:20:03 [__init__.py:216] Automatically detected platform cpu.",
        start(version="0.12.0").replace(
            "quantization=None", "quantization=None, device_config=cpu"
        ),
        core("Available KV cache memory: 4.00 GiB", "INFO", "cpu_worker.py:120"),
        SHORT.replace("3.10 GiB", "4.00 GiB"),
    ]
    found = diagnose(log(*lines), launch="VLLM_CPU_KVCACHE_SPACE=4 vllm serve Qwen/Qwen3-8B")
    assert "VLLM_CPU_KVCACHE_SPACE" in names(found)
    assert GMU not in names(found)
    assert refused(found, f"change {GMU}")


# --- words that only contain the sign ---------------------------------------------------------------------------


PROMPT = (
    "INFO 01-09 11:20:40 [logger.py:39] Received request cmpl-7: prompt: 'Why do I see "
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB?'"
)


@pytest.mark.parametrize(
    "line",
    [
        core("Loading weights for the bloom-room-zoom checkpoint", "INFO"),
        core("The request was not out of memory budget, scheduling it", "INFO"),
        "  --oom-score INTEGER  how readily the kernel kills this process when out of memory",
        PROMPT,
    ],
    ids=["a part of a word", "a negation", "the help of an option", "an old log in a prompt"],
)
def test_a_word_alone_makes_no_failure(line):
    found = diagnose(f"{start()}\n{line}\n{planned()}\n{SERVING}\n")
    assert found.outcome is Outcome.HEALTHY
    assert found.diagnosis is None
    assert not found.fixes


def test_the_printed_hint_is_followed_only_as_far_as_it_is_right():
    # The message itself says "try increasing gpu_memory_utilization", here for 1.4 GiB more on a card of 24 GB.
    found = diagnose(log(start(), core(MAX_LEN)), gpu="L4")
    assert GMU not in names(
        found
    )  # 1.38 GiB are missing; the most that such a card allows gives 0.66
    assert refused(found, f"lower {GMU}")
