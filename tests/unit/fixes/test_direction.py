from __future__ import annotations

from dataclasses import replace

import pytest
from fix_samples import situation
from hypothesis import given
from hypothesis import strategies as st

from diag.facts.model import Fact, Facts
from diag.fixes.direction import advise_gmu
from diag.terms import GmuVerdict as V
from diag.terms import Phase
from diag.units import GIB

OOM = "torch.OutOfMemoryError: CUDA out of memory."
GMU = "config.gpu_memory_utilization"


def oom(tried: float, free: float, total: float, **more: object) -> dict[str, object]:
    return {"oom.tried": tried, "oom.free": free, "oom.total": total, **more}


@pytest.mark.parametrize(
    ("subtype", "facts", "options", "verdict"),
    [
        pytest.param(
            "kv.max_len_exceeds",
            {"kv.needed": 10.0, "kv.available": 6.1, "device.total": 79.15, GMU: 0.9},
            {},
            V.RAISE,
            id="one request short, the card has it",
        ),
        pytest.param(
            "kv.max_len_exceeds",
            {"kv.needed": 24.0, "kv.available": 3.18, "device.total": 23.6, GMU: 0.9},
            {},
            V.CANNOT_HELP,
            id="shortfall above the rest of the card",
        ),
        pytest.param(
            "kv.max_len_exceeds",
            {"kv.needed": 1.34, "kv.available": 0.3, GMU: 0.97},
            {},
            V.CANNOT_HELP,
            id="share already at the top",
        ),
        pytest.param(
            "kv.max_len_exceeds",
            {"kv.asked_len": 163840, "kv.capacity_tokens": 13360},
            {"engine": "V0", "version": "0.5.4"},
            V.CANNOT_HELP,
            id="twelvefold pool wanted",
        ),
        pytest.param(
            "kv.max_len_exceeds",
            {"kv.asked_len": 8192, "kv.capacity_tokens": 4752},
            {"engine": "V0", "version": "0.7.2"},
            V.NOT_ENOUGH_FACTS,
            id="tokens only",
        ),
        pytest.param(
            "kv.max_len_exceeds",
            {"kv.needed": 4.2, "kv.available": 4.0, "config.kv_cache_memory_bytes": 4 << 30},
            {},
            V.CANNOT_HELP,
            id="pool pinned by hand",
        ),
        pytest.param(
            "kv.no_blocks",
            {},
            {"text": "No available memory for the cache blocks"},
            V.RAISE,
            id="bare error",
        ),
        pytest.param(
            "kv.no_blocks",
            {"profile.available_kv_cache": -2.14, "device.total": 79.1, GMU: 0.9},
            {},
            V.RAISE,
            id="budget below zero",
        ),
        pytest.param("kv.no_blocks", {GMU: 0.97}, {}, V.CANNOT_HELP, id="bare error at the top"),
        pytest.param(
            "kv.no_blocks",
            {},
            {"backend": "cpu", "version": "0.12.0"},
            V.CANNOT_HELP,
            id="cpu pool has its own knob",
        ),
        pytest.param(
            "kv.free_below_target",
            {"device.free_at_start": 19.4, "device.total": 23.65, GMU: 0.92},
            {"phase": Phase.INIT_DEVICE},
            V.LOWER,
            id="nearly free",
        ),
        pytest.param(
            "kv.free_below_target",
            {"device.free_at_start": 7.34, "device.total": 139.72, GMU: 0.9},
            {"phase": Phase.INIT_DEVICE},
            V.CANNOT_HELP,
            id="owned by another process",
        ),
        pytest.param(
            "kv.preemption",
            {"serving.kv_usage_max": 99.1},
            {"phase": Phase.SERVING},
            V.RAISE,
            id="pool full",
        ),
        pytest.param(
            "kv.preemption",
            {"serving.kv_usage_max": 60.0},
            {"phase": Phase.SERVING},
            V.LEAVE,
            id="pool not full",
        ),
        pytest.param(
            "act.prefill", oom(0.5, 0.15, 15.77), {"phase": Phase.SERVING}, V.LOWER, id="serving"
        ),
        pytest.param(
            "act.profile_run",
            oom(3.5, 1.4, 23.6),
            {"phase": Phase.PROFILE},
            V.CANNOT_HELP,
            id="profile run",
        ),
        pytest.param(
            "act.multimodal_encoder",
            oom(2.0, 0.9, 23.7),
            {"phase": Phase.PROFILE},
            V.CANNOT_HELP,
            id="encoder profiled",
        ),
        pytest.param(
            "act.multimodal_encoder",
            oom(2.0, 0.9, 23.7),
            {"phase": Phase.SERVING},
            V.LOWER,
            id="encoder while serving",
        ),
        pytest.param(
            "act.sampler_warmup",
            oom(1.74, 0.58, 23.57),
            {"phase": Phase.SAMPLER_WARMUP},
            V.LOWER,
            id="sampler",
        ),
        pytest.param(
            "weights.too_big",
            oom(0.27, 0.15, 22.0),
            {"phase": Phase.WEIGHT_LOAD},
            V.CANNOT_HELP,
            id="weights",
        ),
        pytest.param(
            "weights.load_peak",
            {},
            {"text": "Failed core proc(s): {}"},
            V.NOT_ENOUGH_FACTS,
            id="weights by guess",
        ),
        pytest.param(
            "graph.capture_oom",
            oom(0.15, 0.04, 22.0),
            {"phase": Phase.GRAPH_CAPTURE},
            V.LOWER,
            id="capture",
        ),
        pytest.param(
            "graph.capture_oom",
            {},
            {"text": "If you are running out of memory, consider decreasing"},
            V.NOT_ENOUGH_FACTS,
            id="advice text is no failure",
        ),
        pytest.param(
            "graph.capture_oom",
            oom(1, 0.5, 22.0),
            {"sites": ("graph_profile",)},
            V.CANNOT_HELP,
            id="graph estimate",
        ),
        pytest.param(
            "tp.nccl_oom", {}, {"text": "Cuda failure 2 'out of memory'"}, V.LOWER, id="nccl"
        ),
        pytest.param(
            "tp.custom_allreduce", {}, {"text": "'invalid argument'"}, V.LEAVE, id="ipc fault"
        ),
        pytest.param("host.shm", {}, {"text": "Bus error"}, V.LEAVE, id="host"),
        pytest.param(
            "look.illegal_access", {}, {"text": "illegal memory access"}, V.LEAVE, id="look-alike"
        ),
        pytest.param(
            "look.other",
            {},
            {"text": "Device 0 OOM 18446744073707737660 / 1"},
            V.CANNOT_HELP,
            id="vgpu",
        ),
        pytest.param(
            "alloc.wake_up", {}, {"phase": Phase.SLEEP_WAKE, "text": OOM}, V.LOWER, id="wake up"
        ),
        pytest.param(
            "alloc.fragmentation",
            oom(5.84, 4.54, 79.18, **{"oom.allocated": 65.08, "oom.reserved_unallocated": 7.43}),
            {"phase": Phase.SERVING},
            V.CANNOT_HELP,
            id="live memory inside the share",
        ),
        pytest.param("unknown", {}, {}, V.NOT_ENOUGH_FACTS, id="unknown"),
    ],
)
def test_verdict(subtype, facts, options, verdict):
    assert advise_gmu(situation(subtype, facts, **options)).verdict is verdict


def test_raise_window_of_one_request():
    # 3.90 GiB missing on 79.15 GiB: 0.90 + 3.90 / 79.15 = 0.9493, so 0.95; 1.5 GiB stay outside: 0.98.
    facts = {"kv.needed": 10.0, "kv.available": 6.1, "device.total": 79.15, GMU: 0.9}
    advice = advise_gmu(situation("kv.max_len_exceeds", facts))
    assert (advice.lower_bound, advice.suggested, advice.upper_bound) == (0.95, 0.95, 0.98)


def test_free_memory_at_start_caps_the_raise():
    facts = {
        "kv.needed": 7.0,
        "kv.available": 6.1,
        "device.total": 80.0,
        "device.free_at_start": 73.0,
        GMU: 0.9,
    }
    # 73 GiB free less graphs (1 GiB) is 0.90 of the card: nothing left to raise to.
    assert advise_gmu(situation("kv.max_len_exceeds", facts)).verdict is V.CANNOT_HELP


def test_lower_window_keeps_one_request():
    # Pool 2.97 GiB at 1.2157 requests: one needs 2.443 GiB, 0.527 GiB may go: 0.98 - 0.527 / 22.36 = 0.956.
    facts = {
        "oom.tried": 136 / 1024,
        "oom.free": 120.88 / 1024,
        "oom.total": 22.36,
        "profile.available_kv_cache": 2.97,
        "kv.pool_tokens": 150745,
        "kv.asked_len": 124000,
        GMU: 0.98,
    }
    advice = advise_gmu(
        situation("graph.capture_oom", facts, version="0.29.0", phase=Phase.GRAPH_CAPTURE)
    )
    assert (advice.lower_bound, advice.upper_bound) == (0.96, 0.97)
    assert advice.suggested == 0.96


def test_others_charged_raises_by_their_part():
    # 0.7.3 V1 charges the first server's 9.6 of 48 GiB: 0.2 becomes 0.4.
    facts = {"device.total": 48.0, "device.free_at_start": 38.4, GMU: 0.2}
    advice = advise_gmu(situation("kv.no_blocks", facts, version="0.7.3"))
    assert (advice.verdict, advice.suggested) == (V.RAISE, 0.4)


def test_the_fullest_of_equal_cards_decides_for_the_free_memory_check():
    """54.34 of 79.18 GiB free on one card allow 0.68, the 53.76 on another only 0.67."""
    case = situation("kv.free_below_target", {GMU: 0.92}, phase=Phase.INIT_DEVICE)
    sizes = [(40, 0, 79.18, 54.34), (70, 3, 79.18, 53.76), (90, 1, 40.0, 10.0)]
    table = dict(case.facts.table)
    for name, part in (("device.total", 2), ("device.free_at_start", 3)):
        table[name] = tuple(
            Fact(name=name, value=round(row[part] * GIB), unit="bytes", line=row[0], rank=row[1])
            for row in sizes
        )
    found = advise_gmu(replace(case, facts=Facts(table=table, problems=case.facts.problems)))
    assert (found.verdict, found.upper_bound, found.suggested) == (V.LOWER, 0.67, 0.66)


@pytest.mark.parametrize(
    ("facts", "unified"),
    [
        ({"device.total": 119.7}, True),  # a GB10 whose name the log does not print
        ({"device.total": 119.7, "device.name": "NVIDIA H200"}, False),
        ({"device.total": 79.2}, False),
        ({"device.total": 124.0}, False),  # no known device has that much
        ({}, False),
    ],
)
def test_memory_that_cpu_and_gpu_share_is_known_by_name_or_size(facts, unified):
    assert situation("kv.no_blocks", facts).unified_memory is unified


def test_shared_memory_is_never_filled_to_the_last_percent():
    """5 GiB more of 119.7 would be 0.95, but the operating system lives there too."""
    facts = {"device.total": 119.7, GMU: 0.90, "kv.needed": 15.0, "kv.available": 10.0}
    found = advise_gmu(situation("kv.max_len_exceeds", facts))
    assert (found.verdict, found.upper_bound) == (V.CANNOT_HELP, 0.92)
    plain = advise_gmu(situation("kv.max_len_exceeds", {**facts, "device.total": 79.2}))
    assert (plain.verdict, plain.suggested) == (V.RAISE, 0.97)


@pytest.mark.parametrize(
    ("holds", "verdict", "share"),
    [(3664, V.RAISE, 0.95), (2400, V.NOT_ENOUGH_FACTS, None), (500, V.CANNOT_HELP, None)],
)
def test_a_pool_a_little_too_small_is_worth_a_little_more_share(holds, verdict, share):
    facts = {"kv.asked_len": 4096, "kv.capacity_tokens": holds}
    case = situation("kv.max_len_exceeds", facts, version="0.2.7", engine="V0")
    found = advise_gmu(case)
    assert (found.verdict, found.suggested) == (verdict, share)


def test_pool_allocation_lowers_to_what_is_there():
    # 44.56 GiB card, others hold what free and PyTorch leave: (0.55 + 27.93) / 44.56 = 0.639.
    facts = oom(1.63, 0.55, 44.56, **{"oom.allocated": 27.91, "oom.reserved": 27.93})
    advice = advise_gmu(
        situation("kv.alloc_oom", facts, version="0.4.3", engine="V0", phase=Phase.KV_ALLOC)
    )
    assert (advice.verdict, advice.upper_bound, advice.suggested) == (V.LOWER, 0.63, 0.62)


@pytest.mark.parametrize(
    ("subtype", "facts", "options", "words"),
    [
        (
            "kv.max_len_exceeds",
            {"kv.needed": 10.0, "kv.available": 6.1, "device.total": 80.0, GMU: 0.9},
            {},
            ("wrong direction", "8.00 GiB"),
        ),
        (
            "act.prefill",
            oom(0.5, 0.1, 80.0, **{GMU: 0.9}),
            {"phase": Phase.SERVING},
            ("works but gives up",),
        ),
        (
            "kv.free_below_target",
            {"device.free_at_start": 23.0, "device.total": 64.0, GMU: 0.85},
            {},
            ("not low enough", "0.35"),
        ),
        ("host.shm", {}, {}, ("changes nothing",)),
    ],
)
def test_popular_advice_is_judged(subtype, facts, options, words):
    said = " ".join(advise_gmu(situation(subtype, facts, **options)).popular)
    assert all(word in said for word in words)


SUBTYPES = [
    "kv.max_len_exceeds",
    "kv.no_blocks",
    "kv.free_below_target",
    "kv.alloc_oom",
    "act.prefill",
]
sizes = st.floats(min_value=-1, max_value=300, allow_nan=False)


@given(
    subtype=st.sampled_from([*SUBTYPES, "graph.capture_oom", "kv.preemption"]),
    share=st.floats(min_value=0.01, max_value=1.0),
    facts=st.dictionaries(
        st.sampled_from(
            [
                "device.total",
                "device.free_at_start",
                "kv.needed",
                "kv.available",
                "profile.available_kv_cache",
                "oom.tried",
                "oom.free",
                "oom.total",
                "oom.allocated",
            ]
        ),
        sizes,
    ),
)
def test_suggestion_is_inside_its_window_and_moves_with_the_verdict(subtype, share, facts):
    advice = advise_gmu(situation(subtype, {**facts, GMU: share}, text=OOM))
    if advice.suggested is None:
        return
    assert 0 < advice.suggested <= 1
    assert advice.lower_bound is None or advice.suggested >= advice.lower_bound
    assert advice.upper_bound is None or advice.suggested <= advice.upper_bound
    if advice.verdict is V.RAISE:
        assert advice.suggested > share - 1e-9
    elif advice.verdict is V.LOWER:
        assert advice.suggested < share + 0.01
    else:
        pytest.fail("only raise and lower suggest a value")
