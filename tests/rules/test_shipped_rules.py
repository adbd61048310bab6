"""The shipped catalogue and rules: what `oomdoc rules check` says, and every example of every rule as a test."""

from __future__ import annotations

import pytest

import diag
from diag.resources import data_dir
from diag.rules.check import check_all
from diag.rules.load import read_rules

RULES = read_rules(data_dir("rules"))
EXAMPLES = [
    pytest.param(rule, example, id=f"{rule.id}: {example.name}")
    for rule in RULES
    for example in rule.examples
]


def test_nothing_is_wrong_with_the_shipped_files():
    assert check_all() == []


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_an_example_gets_its_diagnosis(rule, example):
    """The whole pipeline on the example's log: missing means no match, noisy a false alarm."""
    found = diag.diagnose(
        f"{example.log}\n", vllm_version=example.vllm, launch=example.launch
    ).diagnosis
    if example.expect == "matched":
        assert found is not None, "missing: nothing was found"
        assert (found.family, found.subtype) == (rule.family, rule.name)
        if example.phase is not None:
            assert found.phase is example.phase
    else:
        assert found is None or found.subtype != rule.name, "noisy"


def test_every_subtype_of_the_taxonomy_has_a_rule():
    wanted = {
        "kv.no_blocks", "kv.max_len_exceeds", "kv.free_below_target", "kv.alloc_oom",
        "kv.profile_interference", "kv.preemption",
        "tp.nccl_oom", "tp.custom_allreduce", "tp.symm_mem", "tp.rank_imbalance", "tp.other",
        "act.profile_run", "act.prefill", "act.logits_logprobs", "act.sampler_warmup",
        "act.multimodal_encoder", "act.moe_workspace", "act.lora", "act.speculative", "act.other",
        "alloc.fragmentation", "alloc.leak_growth", "alloc.not_released", "alloc.wake_up", "alloc.other",
        "weights.too_big", "weights.load_peak", "weights.sharding",
        "graph.capture_oom",
        "base.other_process", "base.context_overhead", "base.mig_vgpu", "base.wsl_display",
        "host.oom_killed", "host.shm", "host.pinned_offload",
        "compile.autotune_oom",
        "look.triton_smem", "look.illegal_access", "look.nccl_timeout", "look.other",
        "unknown",
    }  # fmt: skip
    assert {rule.name for rule in RULES} == wanted
