"""Two starts side by side: which term explains the failure, which setting or release is behind it."""

from __future__ import annotations

import pytest
from log_samples import GIB, INIT_FAILED, MAX_LEN, NO_BLOCKS, SERVING, core, start, traceback

from diag.compare import compare
from diag.errors import UsageError
from diag.pipeline import diagnose, diagnose_pair
from diag.report.comparison import Comparison, Explained, TermChange


def begun(
    version: str = "0.13.0", *, weights: float = 15.2683, length: int = 32768, **args: object
) -> str:
    text = start(version, str({"model": "Qwen/Qwen3-8B", **args}))
    lengthened = text.replace("max_seq_len=32768", f"max_seq_len={length}")
    return lengthened.replace("15.2683", str(weights))


def pool_of(size: float) -> str:
    return core(f"Available KV cache memory: {size} GiB", "INFO", "gpu_worker.py:375")


def good(
    version: str = "0.13.0", *, pool: float = 4.6, often: float = 1.02, extra: str = "", **args
):
    length = args.get("length", 32768)
    lines = [
        begun(version, **args),
        extra,
        pool_of(pool),
        core(f"Maximum concurrency for {length:,} tokens per request: {often}x", "INFO"),
        core("Graph capturing finished in 3 secs, took 0.57 GiB", "INFO"),
        SERVING,
    ]
    return "\n".join(filter(None, lines)) + "\n"


def too_long(version: str = "0.13.0", *, need: float, pool: float, extra: str = "", **args) -> str:
    length = args.get("length", 32768)
    refusal = MAX_LEN.replace("163840", str(length)).replace("15.00", f"{need:.2f}")
    refusal = refusal.replace("13.62", f"{pool:.2f}").replace("148752", "12000")
    lines = [
        begun(version, **args),
        extra,
        pool_of(pool),
        core(refusal),
        f"(APIServer pid=1) {INIT_FAILED}",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def compared(one: str, other: str, **options) -> Comparison:
    return compare(
        diagnose(one, attempt="good", name="good.log", **options),
        diagnose(other, name="bad.log", **options),
    )


def causes(found: Comparison) -> list[str]:
    return [row.term for row in found.terms if row.explains]


def behind(found: Comparison) -> list[str]:
    return [row.name for row in (*found.settings, *found.environment) if row.explains]


def term(found: Comparison, name: str) -> TermChange:
    return next(row for row in found.terms if row.term == name)


# --- which term -------------------------------------------------------------------------------------------------


def test_a_longer_context_explains_a_request_that_does_not_fit():
    bad = too_long(need=22.5, pool=21.7, length=163840)
    found = compared(good(pool=21.77, often=4.84), bad)
    assert found.explained is Explained.BY_ONE
    assert causes(found) == ["need"]
    assert behind(found) == ["--max-model-len"]
    # 21.77 / 4.84 = 4.50 GiB a request before
    assert term(found, "need").good.bytes == pytest.approx(4.498 * GIB, rel=1e-3)
    assert term(found, "need").change == pytest.approx(18.0 * GIB, rel=1e-3)
    assert found.missing_bytes == pytest.approx(0.8 * GIB, rel=1e-3)
    assert "--max-model-len 32,768 -> 163,840" in found.verdict


def test_heavier_weights_explain_it_and_the_adapters_are_behind_it():
    bad = too_long(need=4.5, pool=1.97, weights=17.9, enable_lora=True)
    found = compared(good(), bad, gpu="L4")
    assert causes(found) == ["weights"]
    assert behind(found) == ["--enable-lora"]
    assert next(row for row in found.settings if row.name == "--enable-lora").good_default


def test_a_pool_that_shrank_is_named_when_its_parts_are_not_in_the_logs():
    bad = too_long(need=4.5, pool=0.9, gpu_memory_utilization=0.75)
    found = compared(good(), bad)
    assert causes(found) == ["pool"]
    assert behind(found) == ["--gpu-memory-utilization"]
    assert "0.9 (default) -> 0.75" in found.verdict


def test_another_process_explains_a_refused_start():
    free = core(
        "Free memory on device (78.5/79.15 GiB) on startup. Desired GPU memory utilization is "
        "(0.9, 71.23 GiB).",
        "INFO",
    )
    refusal = core(
        "ValueError: Free memory on device (12.31/79.15 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.23 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )
    bad = "\n".join([*begun().splitlines()[:-1], refusal]) + "\n"
    found = compared(good(extra=free), bad)
    assert causes(found) == ["before"]
    assert found.missing_bytes == pytest.approx((71.23 - 12.31) * GIB, rel=1e-6)
    assert "Another process" in found.verdict


def test_a_larger_pool_explains_a_step_that_found_no_room():
    oom = traceback(
        ("v1/worker/gpu_model_runner.py", "execute_model"),
        ("model_executor/models/qwen3.py", "forward"),
        error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity "
        "of 23.57 GiB of which 200.00 MiB is free. Including non-PyTorch memory, this process has 23.36 GiB memory in "
        "use. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 164.00 MiB is reserved by PyTorch but "
        "unallocated.",
    )
    bad = good(pool=6.9, often=1.5, gpu_memory_utilization=0.98) + "\n".join(map(core, oom)) + "\n"
    found = compared(good(), bad)
    assert causes(found) == ["pool"]
    assert found.missing_bytes == pytest.approx(700 * 1024**2, rel=1e-3)
    # The card is the same, and only the out-of-memory text prints its size.
    assert term(found, "total").change == 0


def test_a_setting_that_pulls_the_other_way_is_not_behind_it():
    bad = too_long(need=4.5, pool=0.9, gpu_memory_utilization=0.95, max_num_seqs=1024)
    found = compared(good(gpu_memory_utilization=0.9), bad)
    assert causes(found) == ["pool"]
    assert "--gpu-memory-utilization" not in behind(found)


def test_two_terms_together():
    bad = too_long(need=6.5, pool=1.9, weights=17.9, length=47000)
    found = compared(good(), bad, gpu="L4")
    # 2.63 GiB of weights and 1.99 GiB of need, 4.60 missing
    assert found.explained is Explained.TOGETHER
    assert causes(found) == ["weights", "need"]


def test_no_term_is_blamed_without_numbers():
    killed = "\n".join([*begun().splitlines()[:-1], "Killed"]) + "\n"
    found = compared(good(), killed)
    assert found.explained is Explained.NO_NUMBERS
    assert not causes(found)


def test_two_good_starts_need_no_explanation():
    found = compared(good(), good("0.14.0"))
    assert found.explained is Explained.NOT_NEEDED
    assert [row.name for row in found.environment] == ["vLLM"]


# --- releases ---------------------------------------------------------------------------------------------------


def test_a_release_that_charges_the_graphs_explains_a_smaller_pool():
    estimate = core("Estimated CUDA graph memory: 1.22 GiB total", "INFO")
    bad = too_long("0.21.0", need=4.5, pool=4.1, extra=estimate)
    found = compared(good("0.19.1"), bad, gpu="L4")
    assert causes(found) == ["graphs"]
    assert term(found, "graphs").good.bytes == 0
    assert [row.id for row in found.releases if row.explains] == ["graphs-charged"]
    assert not any(row.gone for row in found.releases)
    share = next(row for row in found.settings if row.name == "--gpu-memory-utilization")
    assert (share.good, share.bad, share.good_default, share.bad_default) == (0.9, 0.92, True, True)
    assert not share.explains
    assert "the release does" in found.verdict


def test_going_back_turns_the_changes_round():
    bad = "\n".join([begun("0.8.5"), pool_of(-0.3), core(NO_BLOCKS)]) + "\n"
    found = compared(good("0.21.0"), bad)
    assert causes(found) == ["pool"]
    assert {row.gone for row in found.releases} == {True}
    assert "own-budget" in {row.id for row in found.releases if row.explains}


# --- what differs -----------------------------------------------------------------------------------------------


def test_an_unprinted_setting_is_its_default_or_unknown():
    found = compared(good(max_num_seqs=64), too_long(need=22.5, pool=21.7, length=163840), gpu="L4")
    row = next(row for row in found.settings if row.name == "--max-num-seqs")
    assert (row.good, row.bad, row.bad_default) == (64, 256, True)


def test_flags_and_variables_without_a_fact_come_from_the_commands():
    one = "VLLM_USE_FLASHINFER_MOE_FP8=1 vllm serve Qwen/Qwen3-8B --port 8000 --attention-backend FLASHINFER"
    other = "HF_TOKEN=hf_secret vllm serve Qwen/Qwen3-8B --port 9000 --api-key k --attention-backend FLASH_ATTN"
    found = compare(
        diagnose(good(), attempt="good", launch=one),
        diagnose(too_long(need=22.5, pool=21.7, length=163840), launch=other),
    )
    changed = {row.name: (row.good, row.bad) for row in found.settings}
    assert changed["--attention-backend"] == ("FLASHINFER", "FLASH_ATTN")
    assert changed["VLLM_USE_FLASHINFER_MOE_FP8"] == ("1", None)
    assert not {"--port", "--api-key", "HF_TOKEN"} & set(changed)


def test_the_first_log_may_have_failed_too():
    bad = too_long(need=22.5, pool=21.7, length=163840)
    found = compared(bad, bad)
    assert any("failed too" in note for note in found.notes)
    assert found.explained is Explained.NO_NUMBERS


# --- two starts in one log --------------------------------------------------------------------------------------


def test_the_last_good_start_is_held_against_the_last_failed_one():
    bad = too_long(need=22.5, pool=21.7, length=163840)
    one, other = diagnose_pair(bad + good(pool=21.77, often=4.84) + bad + bad)
    assert (one.source.attempt, other.source.attempt) == (2, 4)
    assert causes(compare(one, other)) == ["need"]


@pytest.mark.parametrize(
    ("text", "lacking"),
    [(good(), "failed"), (too_long(need=22.5, pool=21.7), "went through")],
    ids=["only good", "only failed"],
)
def test_a_log_without_both_says_what_it_lacks(text, lacking):
    with pytest.raises(UsageError, match=lacking):
        diagnose_pair(text)


def test_the_good_log_is_read_at_its_good_start():
    bad = too_long(need=22.5, pool=21.7, length=163840)
    assert diagnose(good() + bad, attempt="good").source.attempt == 1
    assert diagnose(good() + bad).source.attempt == 2


def test_the_card_of_one_log_is_not_taken_for_the_other_that_names_its_own(examples):
    found = compare(
        diagnose(examples / "healthy.log", attempt="good"), diagnose(examples / "kv-max-len.log")
    )
    device = next(term for term in found.terms if term.term == "total")
    assert device.good.bytes == pytest.approx(44.39 * GIB, rel=1e-3)  # printed: "/44.39 GiB"
    assert device.bad.bytes == pytest.approx(
        79.09 * GIB, rel=1e-3
    )  # what vLLM reports on an A100 80GB
