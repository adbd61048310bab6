from __future__ import annotations

import pytest
from fix_samples import situation

from diag.fixes.direction import advise_gmu
from diag.fixes.model import Fix
from diag.fixes.planner import plan_fixes
from diag.terms import Phase, Safety
from diag.units import GIB

GMU = "config.gpu_memory_utilization"
FAR = {  # 16 GiB for a request of 65,536 tokens, of which 6.1 are there
    "kv.needed": 16.0,
    "kv.available": 6.1,
    "kv.asked_len": 65536,
    "device.total": 79.15,
    "config.kv_cache_dtype": "auto",
    GMU: 0.9,
}
STARVED = {  # a pool of 4 GiB for requests of 3.81; 2 GiB asked for, 0.3 free
    "oom.tried": 2.0,
    "oom.free": 0.3,
    "oom.total": 23.57,
    "oom.allocated": 21.0,
    "oom.reserved_unallocated": 0.1,
    "profile.available_kv_cache": 4.0,
    "kv.max_concurrency": 1.05,
    "config.max_model_len": 32768,
    "config.kv_cache_dtype": "auto",
    GMU: 0.9,
}


def plan(subtype: str, facts: dict[str, object], **options: object) -> tuple[Fix, ...]:
    case = situation(subtype, facts, **options)
    return plan_fixes(case, advise_gmu(case))[0]


def several(fixes: tuple[Fix, ...]) -> dict[str, Fix]:
    return {fix.id: fix for fix in fixes if len(fix.changes) > 1 and "+" in fix.id}


def settings_of(fix: Fix) -> dict[str, object]:
    return {change.flag: change.to for change in fix.changes}


def test_eight_bits_and_a_larger_share_where_neither_is_enough():
    fixes = plan("kv.max_len_exceeds", FAR, command="vllm serve m --gpu-memory-utilization 0.9")
    fix = fixes[0]
    # 16 / 2 = 8 GiB; 8 - 6.1 = 1.9 of 79.15 is 0.024, so 0.93
    assert settings_of(fix) == {"--kv-cache-dtype": "fp8", "--gpu-memory-utilization": 0.93}
    assert fix.fits is True
    assert fix.safety is Safety.CHANGES_RESULTS
    assert "8.00 GiB" in fix.proof
    assert "2.37 GiB" in fix.proof  # 0.03 x 79.15
    assert fix.cost == "a little accuracy; headroom falls to 5.54 GiB"
    assert fix.predicted["kv_pool_bytes"] == pytest.approx((6.1 + 0.03 * 79.15) * GIB, abs=2)
    assert fix.predicted["concurrency"] == 1.06
    assert fix.predicted["headroom_bytes"] == pytest.approx(0.07 * 79.15 * GIB, abs=2)
    assert fix.command == "vllm serve m --gpu-memory-utilization 0.93 --kv-cache-dtype fp8"


def test_no_combination_when_one_change_is_enough():
    fixes = plan("kv.max_len_exceeds", {**FAR, "kv.needed": 9.0})
    assert next(fix.id for fix in fixes if fix.fits) == "raise_gmu"
    assert not several(fixes)


def test_a_larger_share_and_the_length_it_holds_when_the_printed_length_is_a_symptom():
    # 1,000 of 65,536 tokens fit into 0.3 GiB; the share gives up to 0.08 x 79.15 = 6.3 GiB more.
    facts = {**FAR, "kv.available": 0.3, "kv.needed": 19.6, "kv.estimated_max_len": 1000}
    fixes = plan("kv.max_len_exceeds", {**facts, "config.enforce_eager": True}, version="0.21.0")
    assert list(several(fixes)) == ["raise_gmu+shorten_context"]
    changed = settings_of(fixes[0])
    gain = (changed["--gpu-memory-utilization"] - 0.9) * 79.15
    assert 20_000 < changed["--max-model-len"] <= 1000 * (0.3 + gain) / 0.3
    assert fixes[0].predicted["max_model_len"] == changed["--max-model-len"]


def test_three_changes_when_two_are_not_enough():
    # 8 bits: 20 needed; the top of the window gives 0.08 x 79.15 = 6.3 of the 13.9 missing, the host the rest.
    facts = {**FAR, "kv.needed": 40.0, "weights.memory": 16.0}
    fixes = plan("kv.max_len_exceeds", facts, version="0.21.0")
    assert list(several(fixes)) == ["fp8_kv+raise_gmu+offload_weights"]
    changed = settings_of(fixes[0])
    assert changed["--cpu-offload-gb"] == 8
    assert 6.1 + (changed["--gpu-memory-utilization"] - 0.9) * 79.15 + 8 >= 20.0


def test_host_memory_that_is_not_there_is_not_used():
    facts = {**FAR, "kv.needed": 40.0, "weights.memory": 16.0, "host.ram_available": 6.0}
    fixes = plan("kv.max_len_exceeds", facts, version="0.21.0")
    assert fixes
    assert all("--cpu-offload-gb" not in settings_of(fix) for fix in fixes)


def test_smaller_steps_and_a_smaller_share_when_the_share_alone_starves_the_pool():
    # Even 256 tokens would not fit into what is free; 0.01 less share gives 0.24 GiB.
    facts = {
        **STARVED,
        "oom.free": 0.01,
        "config.max_num_batched_tokens": 4096,
        "kv.max_concurrency": 1.2,
    }
    fixes = plan("act.prefill", facts, phase=Phase.SERVING)
    fix = fixes[0]
    changed = settings_of(fix)
    assert set(changed) == {"--max-num-batched-tokens", "--gpu-memory-utilization"}
    given = (0.9 - changed["--gpu-memory-utilization"]) * 23.57
    assert 2.0 * changed["--max-num-batched-tokens"] / 4096 <= 0.01 + given
    assert 4.0 - given >= 4.0 / 1.2
    assert fix.predicted["concurrency"] >= 1


def test_a_smaller_share_and_a_shorter_context_when_the_pool_would_hold_no_request():
    fixes = plan("act.lora", {**STARVED, "config.model": "Qwen/Qwen3-8B", "config.max_num_batched_tokens": 256},
                 phase=Phase.SERVING)  # fmt: skip
    fix = next(iter(several(fixes).values()))
    changed = settings_of(fix)
    left = 4.0 - (0.9 - changed["--gpu-memory-utilization"]) * 23.57
    assert 4.0 / 1.05 * changed["--max-model-len"] / 32768 <= left
    assert fix.fits is True


def test_a_share_that_starves_the_pool_does_not_say_that_it_fits():
    fixes = plan("act.lora", STARVED, phase=Phase.SERVING)
    lower = next(fix for fix in fixes if fix.id == "lower_gmu")
    assert lower.fits is None
    assert "one request" in lower.proof


def test_a_budget_below_zero_is_closed_by_share_and_graphs_together():
    facts = {
        "profile.available_kv_cache": -6.0,
        "profile.graph_estimate": 2.0,
        "device.total": 79.15,
        "weights.memory": 1.0,
        GMU: 0.9,
    }
    fixes = plan("kv.no_blocks", facts, version="0.21.0")
    fix = next(fix for fix in fixes if "+" in fix.id)
    assert settings_of(fix) == {"--enforce-eager": True, "--gpu-memory-utilization": 0.97}
    assert fix.fits is None  # the size of one request is not in the log
    assert "not in the log" in fix.proof
