from __future__ import annotations

import pytest
from fix_samples import situation
from hypothesis import given
from hypothesis import strategies as st

from diag.errors import RuleFileError
from diag.fixes.direction import advise_gmu
from diag.fixes.model import Fix
from diag.fixes.planner import ACTIONS, fix_table, plan_fixes
from diag.fixes.table import load_table
from diag.terms import GmuVerdict, Phase, Safety
from diag.units import GIB

GMU = "config.gpu_memory_utilization"
QWEN = {
    "kv.needed": 10.0,
    "kv.available": 6.1,
    "kv.asked_len": 40960,
    "device.total": 79.15,
    "config.kv_cache_dtype": "auto",
    GMU: 0.9,
}
SUBTYPES = """
kv.no_blocks kv.max_len_exceeds kv.free_below_target kv.alloc_oom kv.profile_interference kv.preemption
tp.nccl_oom tp.custom_allreduce tp.symm_mem tp.rank_imbalance tp.other
act.profile_run act.prefill act.logits_logprobs act.sampler_warmup act.multimodal_encoder act.moe_workspace act.lora
act.speculative act.other
alloc.fragmentation alloc.leak_growth alloc.not_released alloc.wake_up alloc.other
weights.too_big weights.load_peak weights.sharding graph.capture_oom compile.autotune_oom
base.other_process base.context_overhead base.mig_vgpu base.wsl_display
host.oom_killed host.shm host.pinned_offload
look.triton_smem look.illegal_access look.nccl_timeout look.other unknown
""".split()


def plan(case):
    return plan_fixes(case, advise_gmu(case))


def by_id(fixes: tuple[Fix, ...]) -> dict[str, Fix]:
    return {fix.id: fix for fix in fixes}


def flags_of(fixes: tuple[Fix, ...]) -> set[str]:
    return {change.flag or change.env or "" for fix in fixes for change in fix.changes}


def test_every_failure_class_has_an_entry_of_its_own():
    assert set(fix_table().subtypes) == set(SUBTYPES)


@pytest.mark.parametrize("subtype", SUBTYPES)
@pytest.mark.parametrize("version", [None, "0.3.3", "0.8.5", "0.20.0", "0.33.0"])
def test_every_class_gets_a_fix_without_any_facts(subtype, version):
    fixes, _ = plan(situation(subtype, version=version, engine=None, backend=None))
    assert 1 <= len(fixes) <= 6
    assert all(fix.proof and fix.verify and fix.when_not and fix.cost for fix in fixes)
    assert all(fix.fits is not False for fix in fixes)


def test_the_classic_context_too_long():
    case = situation(
        "kv.max_len_exceeds", QWEN, version="0.8.5", command="vllm serve Qwen/Qwen3-32B"
    )
    fixes, useless = plan(case)
    found = by_id(fixes)
    assert [fix.id for fix in fixes if fix.fits] == ["raise_gmu", "shorten_context", "fp8_kv"]
    assert found["raise_gmu"].command == "vllm serve Qwen/Qwen3-32B --gpu-memory-utilization 0.95"
    # 6.10 + 0.05 x 79.15 = 10.06 GiB
    assert found["raise_gmu"].predicted["kv_pool_bytes"] == pytest.approx(10.0575 * GIB)
    assert found["raise_gmu"].predicted["headroom_bytes"] == pytest.approx(0.05 * 79.15 * GIB)
    assert "10.06 GiB" in found["raise_gmu"].proof
    # 6.10 / 10.00 x 40,960 = 24,985 tokens, in whole blocks and less the printed rounding
    assert found["shorten_context"].changes[0].to == 24944
    assert "-39%" in found["shorten_context"].cost
    assert "5.00 GiB" in found["fp8_kv"].proof
    assert found["fp8_kv"].safety is Safety.CHANGES_RESULTS
    assert found["fp8_kv"].predicted["concurrency"] == 1.22
    assert any(item.change.startswith("lower --gpu") and "0.79 GiB" in item.why for item in useless)


def test_vllms_own_estimate_is_taken_in_whole_blocks():
    facts = {
        "kv.needed": 3.05,
        "kv.available": 2.17,
        "kv.asked_len": 180000,
        "kv.estimated_max_len": 111461,
    }
    fixes, _ = plan(situation("kv.max_len_exceeds", facts))
    assert by_id(fixes)["shorten_context"].changes[0].to == 111456


def test_a_tiny_estimate_is_a_symptom_and_no_fix():
    facts = {
        "kv.needed": 1.8,
        "kv.available": 0.35,
        "kv.asked_len": 250000,
        "kv.estimated_max_len": 856,
    }
    fixes, useless = plan(situation("kv.max_len_exceeds", facts))
    assert "shorten_context" not in by_id(fixes)
    assert any("856" in item.change for item in useless)


def test_sampler_rows_are_cut_until_they_fit():
    # 1.74 GiB for 1024 rows: 256 rows take 0.435 of the 0.58 GiB free, 512 would take 0.87.
    facts = {
        "oom.tried": 1.74,
        "oom.free": 0.58,
        "oom.total": 23.57,
        "sampler.dummy_requests": 1024,
    }
    fixes, _ = plan(
        situation("act.sampler_warmup", facts, version="0.8.0", phase=Phase.SAMPLER_WARMUP)
    )
    assert fixes[0].changes[0].to == 256
    assert fixes[0].fits is True


def test_a_neighbour_is_freed_before_the_share_is_lowered():
    facts = {"device.free_at_start": 19.4, "device.total": 23.65, GMU: 0.92}
    fixes, useless = plan(
        situation("kv.free_below_target", facts, version="0.22.1", phase=Phase.INIT_DEVICE)
    )
    assert [fix.id for fix in fixes] == ["free_card", "lower_gmu", "one_after_another"]
    assert "4.25 GiB" in fixes[0].proof
    assert fixes[1].changes[0].to == 0.81
    assert useless[0].change == "raise --gpu-memory-utilization"


def test_a_display_is_no_reason_to_hunt_for_a_neighbour():
    # 1.2 GiB of a card are no engine: the share comes first.
    facts = {"device.free_at_start": 22.35, "device.total": 23.56, GMU: 0.95}
    fixes, _ = plan(
        situation("kv.free_below_target", facts, version="0.22.1", phase=Phase.INIT_DEVICE)
    )
    assert [fix.id for fix in fixes][:2] == ["lower_gmu", "free_card"]
    assert fixes[1].fits is None


def test_sequences_fit_the_state_blocks():
    facts = {"config.max_num_seqs": 1024, "kv.state_blocks": 614, GMU: 0.9}
    case = situation("kv.no_blocks", facts, version="0.25.1", phase=Phase.GRAPH_CAPTURE)
    fixes, useless = plan(case)
    assert fixes[0].id == "fewer_seqs"
    assert fixes[0].changes[0].to == 614
    assert fixes[0].fits is True
    assert advise_gmu(case).verdict is GmuVerdict.RAISE
    assert not any("fp8" in item.change for item in useless)


def test_an_empty_pool_is_not_filled_by_fewer_sequences():
    facts = {"config.max_num_seqs": 1024, GMU: 0.9}
    fixes, _ = plan(situation("kv.no_blocks", facts, version="0.25.1", phase=Phase.KV_ALLOC))
    assert "fewer_seqs" not in by_id(fixes)


def test_expandable_segments_only_against_fragmentation():
    idle = {
        "oom.tried": 0.1,
        "oom.free": 0.01,
        "oom.total": 31.3,
        "oom.allocated": 29,
        "oom.reserved_unallocated": 0.7,
    }
    full = {**idle, "oom.tried": 2.0}
    serving = {"phase": Phase.SERVING}
    assert "expandable_on" in by_id(plan(situation("act.prefill", idle, **serving))[0])
    fixes, useless = plan(situation("act.prefill", full, **serving))
    assert "expandable_on" not in by_id(fixes)
    assert any(item.change == "expandable_segments:True" for item in useless)


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        ({"config.enable_sleep_mode": True}, {}),
        (
            {},
            {"command": 'vllm serve m --kv-transfer-config \'{"kv_connector": "NixlConnector"}\''},
        ),
        ({}, {"lines": ("running under WSL",)}),
        ({"config.tensor_parallel_size": 2}, {"version": "0.8.5"}),
    ],
    ids=["sleep mode", "kv connector", "wsl", "custom all-reduce of old releases"],
)
def test_expandable_segments_never_where_they_break(facts, options):
    idle = {"oom.tried": 0.1, "oom.free": 0.01, "oom.total": 31.3, "oom.reserved_unallocated": 0.7}
    fixes, _ = plan(
        situation("alloc.fragmentation", {**idle, **facts}, phase=Phase.SERVING, **options)
    )
    assert "expandable_on" not in by_id(fixes)


def test_pinned_pool_is_changed_instead_of_the_share():
    facts = {
        "kv.needed": 4.11,
        "kv.available": 4.0,
        "kv.asked_len": 131072,
        "config.kv_cache_memory_bytes": 4 << 30,
    }
    fixes, _ = plan(situation("kv.max_len_exceeds", facts))
    assert "--gpu-memory-utilization" not in flags_of(fixes)
    assert by_id(fixes)["set_pool_bytes"].changes[0].to >= 4.11 * GIB


def test_cpu_backend_gets_its_own_knob():
    facts = {
        "kv.needed": 2.0,
        "kv.available": 1.0,
        "kv.asked_len": 131072,
        "kv.estimated_max_len": 65536,
    }
    fixes, _ = plan(situation("kv.max_len_exceeds", facts, version="0.12.0", backend="cpu"))
    found = by_id(fixes)
    assert found["cpu_pool"].changes[0].env == "VLLM_CPU_KVCACHE_SPACE"
    assert found["cpu_pool"].changes[0].to == 2
    assert not flags_of(fixes) & {"--gpu-memory-utilization", "--enforce-eager", "--cpu-offload-gb"}


def test_a_share_below_what_pytorch_holds_already_is_not_called_fitting():
    # 60.97 GiB, of which others hold 50.3: any share that fits what is left lies below the 10.24 GiB of PyTorch.
    facts = {"oom.tried": 0.02, "oom.free": 0.019, "oom.total": 60.97, "oom.allocated": 10.24}
    fixes, _ = plan(situation("base.other_process", facts | {GMU: 0.9}, version="0.7.3"))
    assert next(iter(fixes)).id == "free_card"
    assert not any(fix.fits for fix in fixes)


def test_a_full_host_tier_is_not_made_smaller():
    full, _ = plan(situation("host.pinned_offload", rows=("lmcache.no_memory",)))
    refused, _ = plan(situation("host.pinned_offload"))
    assert full[0].id == "larger_host_tier"
    assert "less_pinned" not in by_id(full)
    assert "less_pinned" in by_id(refused)


# --- advice seen in public that must never come back ----------------------------------------------------------

OOM = {"oom.tried": 0.3, "oom.free": 0.1, "oom.total": 23.6, "oom.allocated": 22.0, GMU: 0.9}


def shares(case) -> list[float]:
    changes = [change for fix in plan(case)[0] for change in fix.changes]
    return [float(change.to) for change in changes if change.flag == "--gpu-memory-utilization"]


@pytest.mark.parametrize("subtype", ["weights.too_big", "weights.load_peak", "weights.sharding"])
def test_no_share_for_weights(subtype):
    case = situation(subtype, OOM, phase=Phase.WEIGHT_LOAD, text="CUDA out of memory")
    assert shares(case) == []
    assert not {"--kv-cache-dtype", "--max-model-len"} & flags_of(plan(case)[0])


@pytest.mark.parametrize(
    "facts", [{}, {GMU: 0.9}, {GMU: 0.9, "profile.available_kv_cache": -0.5, "device.total": 80}]
)
def test_never_lower_for_missing_blocks(facts):
    assert [share > 0.9 for share in shares(situation("kv.no_blocks", facts))] == [True]


def test_never_raise_at_the_top():
    assert shares(situation("kv.no_blocks", {GMU: 0.97, "device.total": 24})) == []


def test_never_raise_when_another_process_holds_the_card():
    facts = {"device.free_at_start": 19.4, "device.total": 23.65, GMU: 0.92}
    assert shares(situation("kv.free_below_target", facts)) == [0.81]  # 19.4 / 23.65 is 0.820


@pytest.mark.parametrize("subtype", SUBTYPES)
def test_no_plan_lowers_tensor_parallelism_or_blindly_sets_080(subtype):
    fixes, _ = plan(
        situation(subtype, {**OOM, "config.tensor_parallel_size": 4}, text="out of memory")
    )
    for fix in fixes:
        for change in fix.changes:
            assert not (change.flag == "--tensor-parallel-size" and int(change.to) <= 4)
            assert not (change.flag == "--gpu-memory-utilization" and change.to == 0.8)
        if fix.id == "more_gpus":
            assert fix.fits is None
            assert "if there are" in fix.title


@pytest.mark.parametrize(
    "subtype", ["act.multimodal_encoder", "act.sampler_warmup", "act.profile_run", "act.prefill"]
)
def test_v1_activation_is_not_cured_by_a_shorter_context(subtype):
    assert "--max-model-len" not in flags_of(plan(situation(subtype, OOM, phase=Phase.PROFILE))[0])


@pytest.mark.parametrize(
    "subtype",
    [name for name in SUBTYPES if name.startswith(("look.", "host.", "tp.custom", "tp.symm"))],
)
def test_no_vram_settings_where_no_vram_was_short(subtype):
    fixes, _ = plan(situation(subtype, text="invalid argument"))
    assert not flags_of(fixes) & {
        "--gpu-memory-utilization",
        "--max-model-len",
        "--max-num-seqs",
        "--kv-cache-dtype",
    }


def test_wake_up_never_gets_expandable_segments():
    fixes, useless = plan(situation("alloc.wake_up", OOM, phase=Phase.SLEEP_WAKE))
    assert "expandable_on" not in by_id(fixes)
    assert any(item.change == "expandable_segments:True" for item in useless)


@pytest.mark.parametrize("subtype", ["kv.no_blocks", "kv.max_len_exceeds"])
def test_one_warm_restart_is_offered_after_a_cold_compile(subtype):
    cold = ("INFO [monitor.py:34] torch.compile takes 5.55 s in total",)
    assert "warm_restart" in by_id(plan(situation(subtype, {}, lines=cold))[0])
    assert "warm_restart" not in by_id(plan(situation(subtype, {}))[0])


def test_no_flag_that_the_release_does_not_know():
    fixes, _ = plan(situation("graph.capture_oom", OOM, version="0.8.5", phase=Phase.GRAPH_CAPTURE))
    assert not flags_of(fixes) & {"--max-cudagraph-capture-size", "--cuda-graph-sizes"}


# --- properties -----------------------------------------------------------------------------------------------

gib = st.integers(min_value=1, max_value=120 * 100).map(lambda hundredths: hundredths / 100)


@given(
    needed=gib,
    share=st.integers(1, 99).map(lambda part: part / 100),
    total=st.sampled_from([8.0, 15.77, 23.65, 79.15, 139.8]),
    asked=st.integers(min_value=32, max_value=1_048_576),
    part=st.floats(min_value=0.001, max_value=0.999),
)
def test_a_fix_that_fits_makes_the_need_smaller_than_the_pool(needed, share, total, asked, part):
    available = round(needed * part, 2)
    facts = {
        **QWEN,
        "kv.needed": needed,
        "kv.available": available,
        "device.total": total,
        GMU: share,
    }
    case = situation("kv.max_len_exceeds", {**facts, "kv.asked_len": asked}, version="0.8.5")
    advice = advise_gmu(case)
    for fix in plan_fixes(case, advice)[0]:
        if not fix.fits:
            continue
        change = fix.changes[0]
        if fix.id == "raise_gmu":
            assert needed <= available + (change.to - share) * total + 1e-6
            assert advice.verdict is GmuVerdict.RAISE
            assert share < change.to <= 1
        elif fix.id == "shorten_context":
            assert needed * change.to / asked <= available + 1e-9
            assert change.to % 16 == 0
        elif fix.id == "fp8_kv":
            assert needed / 2 <= available


# --- the table ------------------------------------------------------------------------------------------------


def test_a_wrong_table_names_every_problem(tmp_path):
    path = tmp_path / "fixes.yaml"
    path.write_text(
        """
schema: 1
steps:
  nothing: {title: t, proof: '{no_such}', cost: c, verify: v, when_not: w, only: [nowhere]}
not_helpful: {}
subtypes:
  kv.no_blocks: {fixes: [no_such_fix]}
""",
        encoding="utf-8",
    )
    with pytest.raises(RuleFileError) as error:
        load_table(frozenset(ACTIONS), path)
    said = "\n".join(error.value.problems)
    for part in ("no_such_fix", "nowhere", "{no_such}", "needs do or set", "no subtype uses it"):
        assert part in said


def test_a_forced_number_of_blocks_is_dropped():
    facts = {
        "kv.needed": 2.0,
        "kv.available": 1.0,
        "kv.asked_len": 131072,
        "config.num_gpu_blocks_override": 128,
    }
    case = situation(
        "kv.max_len_exceeds", facts, command="vllm serve m --num-gpu-blocks-override 128 --port 1"
    )
    fix = by_id(plan(case)[0])["drop_override"]
    assert fix.command == "vllm serve m --port 1"


def test_unlikely_card_is_not_assumed():
    # 5.32 GiB from 7 % need a 76 GiB card, which would mean 65 GiB of activation beside 8.49 GiB of weights.
    facts = {"profile.available_kv_cache": -5.32, "weights.memory": 8.49, GMU: 0.9}
    assert advise_gmu(situation("kv.no_blocks", facts)).verdict is GmuVerdict.CANNOT_HELP


COMPILED_COLD = ("Compiling a graph for dynamic shape takes 41.20 s",)


@pytest.mark.parametrize(
    ("facts", "offered"),
    [
        ({"profile.available_kv_cache": -0.4}, True),
        ({"profile.available_kv_cache": -5.32}, False),
        ({}, True),
    ],
)
def test_a_second_start_is_not_asked_for_when_much_is_missing(facts, offered):
    fixes, _ = plan(situation("kv.no_blocks", facts, lines=COMPILED_COLD))
    assert ("warm_restart" in by_id(fixes)) is offered


@pytest.mark.parametrize(
    ("weights", "budget", "offered"),
    [
        (8.49, -5.32, False),  # 8 GiB would be nearly all of them
        (30.0, -5.32, True),
        (0.43, None, False),
        (30.0, None, True),
    ],
)
def test_no_more_than_half_the_weights_go_to_the_host(weights, budget, offered):
    facts = {"weights.memory": weights, GMU: 0.98}
    if budget is not None:
        facts["profile.available_kv_cache"] = budget
    fixes, _ = plan(situation("kv.no_blocks", facts))
    assert ("offload_weights" in by_id(fixes)) is offered


def test_nobody_is_sent_away_from_a_card_that_this_process_holds_alone():
    facts = {
        "oom.tried": 0.11,
        "oom.total": 23.54,
        "oom.free": 0.08,
        "oom.process_in_use": 23.46,
        "oom.allocated": 22.90,
    }
    fixes, _ = plan(situation("kv.alloc_oom", {**facts, GMU: 0.9}, version="0.7.3", engine="V0"))
    assert "free_card" not in by_id(fixes)
    assert not any("0 bytes" in fix.proof for fix in fixes)
    shared = {**facts, GMU: 0.9, "oom.process_in_use": 19.0, "oom.allocated": 18.5}
    fixes, _ = plan(situation("kv.alloc_oom", shared, version="0.7.3", engine="V0"))
    # 23.54 - 0.08 - 19.00 GiB
    assert by_id(fixes)["free_card"].proof == "other processes hold 4.46 GiB"


def test_more_free_than_asked_for_is_not_called_missing():
    facts = {"oom.tried": 0.05, "oom.total": 23.56, "oom.free": 0.06, "oom.allocated": 22.31}
    case = situation("act.prefill", facts, phase=Phase.SERVING, version=None)
    fixes, _ = plan(case)
    lowered = by_id(fixes)["lower_gmu"]
    assert lowered.fits is None
    assert "missing" not in lowered.proof
    assert "0.06 GiB free" in advise_gmu(case).why or "61 MiB free" in advise_gmu(case).why


def test_an_unlogged_default_proves_nothing_about_a_step_of_a_server():
    """Half of 1,024 possible requests is not half of those that ran."""
    facts = {"oom.tried": 0.29, "oom.total": 79.33, "oom.free": 0.18, "oom.allocated": 69.9}
    case = situation("act.logits_logprobs", facts, phase=Phase.SERVING, version="0.8.5")
    fixes, _ = plan(case)
    assert [fix.id for fix in fixes if fix.fits] == ["lower_gmu"]
    logged = situation(
        "act.logits_logprobs",
        {**facts, "config.max_num_seqs": 512},
        phase=Phase.SERVING,
        version="0.8.5",
    )
    assert by_id(plan(logged)[0])["fewer_seqs"].fits


def test_old_engines_profile_a_whole_prompt_so_a_shorter_one_leaves_room_for_the_pool():
    facts = {"kv.asked_len": 32768}
    fixes, _ = plan(situation("kv.no_blocks", facts, version="0.2.0", engine="V0"))
    found = by_id(fixes)
    assert found["shorter_profile"].changes[0].to == 16384
    assert "32,768 tokens" in found["shorter_profile"].proof
    assert "chunk_prompts" not in found  # the flag came with 0.4
    fixes, _ = plan(situation("kv.no_blocks", facts, version="0.6.0", engine="V0"))
    assert "chunk_prompts" in by_id(fixes)
    fixes, _ = plan(situation("kv.no_blocks", facts, version="0.11.0", engine="V1"))
    assert "shorter_profile" not in by_id(fixes)


def test_used_up_swap_blocks_ask_for_more_of_them():
    case = situation("kv.preemption", version="0.5.0", engine="V0", rows=("serve.no_swap",))
    fixes, useless = plan(case)
    assert [fix.id for fix in fixes][:2] == ["more_swap", "fewer_sequences"]
    assert fixes[0].changes[0].to == 16
    assert "--swap-space 0" in {item.change for item in useless}
    fixes, _ = plan(situation("kv.preemption", version="0.5.0", engine="V0"))
    assert "more_swap" not in by_id(fixes)


@pytest.mark.parametrize(("ranks", "share"), [(1, "1/2"), (2, "1/2"), (8, "1/2")])
def test_what_more_gpus_leave_on_each_is_said_in_lowest_terms(ranks, share):
    facts = {"config.tensor_parallel_size": ranks}
    fixes, _ = plan(situation("weights.too_big", facts, phase=Phase.WEIGHT_LOAD))
    assert f"fall to about {share};" in by_id(fixes)["more_gpus"].proof


@pytest.mark.parametrize(
    ("facts", "version", "to"),
    [
        ({GMU: 0.95}, "0.9.1", 0.92),
        ({}, "0.9.1", 0.87),  # 0.90 is that release's default
        ({}, "0.22.0", 0.89),  # 0.92 is
        ({}, None, None),
    ],
)
def test_a_usual_step_down_is_a_value_where_the_present_share_is_known(facts, version, to):
    case = situation("act.sampler_warmup", facts, phase=Phase.SAMPLER_WARMUP, version=version)
    change = by_id(plan(case)[0])["lower_gmu"].changes[0]
    assert change.to == to
    assert (change.action is None) is (to is not None)


def test_a_smaller_share_is_not_refused_for_loading_when_an_engine_sleeps():
    _, useless = plan(situation("alloc.not_released", phase=Phase.SLEEP_WAKE))
    reasons = {item.change: item.why for item in useless}
    assert "weights load" not in reasons["lower --gpu-memory-utilization"]
