"""The ledger against the numbers of real logs, and what must hold for any facts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from diag.facts.model import Fact, Facts
from diag.memory import sizes
from diag.memory.eras import Era
from diag.memory.ledger import build_ledger, mark_failed
from diag.memory.model import UNKNOWN, Sized, combine
from diag.memory.sizes import Setting
from diag.terms import Origin
from diag.units import GIB

UNITS = {
    "config.gpu_memory_utilization": "ratio",
    "profile.gmu_without_graphs": "ratio",
    "oom.gpu": "count",
    "device.name": "text",
}
PLAIN = ("tokens", "blocks", "count", "ratio", "text")
TOKEN_FACTS = ("kv.asked_len", "kv.capacity_tokens")


def fact(name, value, line=1, rank=None):
    unit = UNITS.get(name, "tokens" if name in TOKEN_FACTS else "bytes")
    if unit not in PLAIN:
        value = round(value * GIB)
    return Fact(name=name, value=value, unit=unit, line=line, rank=rank)


def facts_of(*rows):
    """Facts from (name, value in GiB or plain, line, rank)."""
    table = {}
    for row in rows:
        table.setdefault(row[0], []).append(fact(*row))
    return Facts(table={name: tuple(found) for name, found in table.items()})


def gib(size):
    return pytest.approx(size * GIB, abs=0.012 * GIB)


def terms(rank):
    return {entry.term: entry.bytes for entry in rank.entries}


def closes(rank):
    known = sum(entry.bytes for entry in rank.entries if entry.bytes is not None)
    return rank.total_bytes is None or known + rank.unexplained_bytes == rank.total_bytes


# --- plans of healthy logs: total, share, weights, activation, non-torch, graph estimate, KV budget ---


PLANS = [
    ("0.6.5", "V0", 21.95, 0.80, 6.47, 0.74, 0.33, None, 10.02),
    ("0.6.6.post1", "V0", 44.52, 0.90, 2.89, 1.40, 0.23, None, 35.55),
    ("0.9.2", "V0", 191.98, 0.80, 15.30, 14.63, 0.66, None, 122.99),
    ("0.10.2", "V1", 79.18, 0.90, 56.93, 5.58, 0.07, None, 8.68),
    ("0.22.0", "V1", 60.96, 0.60, 27.535, 0.26, 0.18, 0.84, 7.76),
    ("0.22.0", "V1", 60.96, 0.60, 27.535, 0.26, 0.18, 0.55, 8.04),
]


def plan_facts(total, share, weights, activation, non_torch, graphs, kv, *, leave_out=()):
    rows = [
        ("device.total", total, 10),
        ("config.gpu_memory_utilization", share, 10),
        ("weights.memory", weights, 20),
        ("profile.peak_activation", activation, 30),
        ("profile.non_torch", non_torch, 30),
        ("profile.available_kv_cache", kv, 40),
    ]
    if graphs is not None:
        rows.append(("profile.graph_estimate", graphs, 35))
    return facts_of(*(row for row in rows if row[0] not in leave_out))


@pytest.mark.parametrize("plan", PLANS)
def test_formula_reproduces_the_logged_budget(plan):
    version, engine, *numbers = plan
    facts = plan_facts(*numbers, leave_out=("profile.available_kv_cache",))
    rank = build_ledger(facts, version=Version(version), engine=engine).ranks[0]
    pool = rank.entry("kv_pool")
    assert pool.bytes == pytest.approx(numbers[-1] * GIB, abs=0.02 * GIB)
    assert pool.origin is Origin.DERIVED
    assert 10 in pool.lines
    assert 30 in pool.lines


@pytest.mark.parametrize("plan", PLANS)
def test_plan_leaves_nothing_unexplained(plan):
    version, engine, *numbers = plan
    ledger = build_ledger(plan_facts(*numbers), version=Version(version), engine=engine)
    (rank,) = ledger.ranks
    assert closes(rank)
    assert abs(rank.unexplained_bytes) < 0.02 * GIB
    assert rank.entry("outside").bytes == gib(numbers[0] * (1 - numbers[1]))
    assert all(entry.lines for entry in rank.entries)


def test_formula_in_words():
    facts = plan_facts(79.15, 0.90, 61.03, 2.90, 1.21, None, 6.10)
    ledger = build_ledger(facts, version=Version("0.8.5"), engine="V1")
    assert ledger.era == "D"
    assert ledger.formula == (
        "0.90 x 79.15 = 71.24 GiB requested; - 61.03 weights - 2.90 activation "
        "- 1.21 non-torch = 6.10 GiB for the KV pool"
    )


def test_one_missing_term_follows_from_the_formula():
    numbers = (79.18, 0.90, 56.93, 5.58, 0.07, None, 8.68)
    facts = plan_facts(*numbers, leave_out=("profile.non_torch",))
    rank = build_ledger(facts, version=Version("0.10.2"), engine="V1").ranks[0]
    assert rank.entry("non_torch").bytes == gib(0.07)
    assert rank.entry("non_torch").origin is Origin.DERIVED


def test_two_missing_terms_become_one_entry():
    numbers = (79.18, 0.90, 56.93, 5.58, 0.07, None, 8.68)
    facts = plan_facts(*numbers, leave_out=("profile.non_torch", "profile.peak_activation"))
    rank = build_ledger(facts, version=Version("0.10.2"), engine="V1").ranks[0]
    both = rank.entry("peak_activation_and_non_torch")
    assert both.bytes == gib(5.65)
    assert both.label == "activation and non-torch"
    assert rank.entry("peak_activation") is None
    shared = build_ledger(facts, version=Version("0.8.5"), engine="V1").ranks[0]
    assert "other processes" in shared.entry("peak_activation_and_non_torch").label


def test_consumed_memory_with_the_estimate_in_it():
    # A100 80GB: 57.26 consumed, 0.23 peak, 0.15 estimated, 13.84 left of 71.33
    facts = facts_of(
        ("device.total", 79.25, 106),
        ("device.free_at_start", 78.84, 106),
        ("device.requested", 71.33, 106),
        ("config.gpu_memory_utilization", 0.9, 8),
        ("weights.memory", 56.93, 76),
        ("profile.consumed", 57.26, 106),
        ("profile.peak_activation", 0.23, 106),
        ("profile.graph_estimate", 0.15, 85),
        ("profile.available_kv_cache", 13.84, 86),
        ("graph.pool_actual", 0.11, 105),
    )
    rank = build_ledger(facts, version=Version("0.27.1"), engine="V1").ranks[0]
    assert rank.entry("non_torch").bytes == gib(0.18)
    assert rank.entry("cuda_graphs").bytes == gib(0.11)
    assert rank.entry("context").bytes == gib(0.41)
    assert rank.entry("outside").bytes == gib(78.84 - 71.33 + 0.15 - 0.11)
    assert abs(rank.unexplained_bytes) < 0.02 * GIB


def test_graphs_live_outside_where_they_are_not_charged():
    facts = facts_of(
        ("device.total", 24, 1),
        ("config.gpu_memory_utilization", 0.9, 1),
        ("weights.memory", 10, 2),
        ("profile.available_kv_cache", 9.6, 3),
        ("graph.memory", 0.5, 4),
    )
    rank = build_ledger(facts, version=Version("0.12.0"), engine="V1").ranks[0]
    assert rank.entry("outside").bytes == gib(2.4 - 0.5)
    assert closes(rank)


def test_negative_graph_memory_is_no_measurement():
    facts = facts_of(("weights.memory", 10, 2), ("graph.memory", -0.22, 4))
    rank = build_ledger(facts, version=Version("0.12.0"), engine="V1").ranks[0]
    assert rank.entry("cuda_graphs") is None


def test_estimate_carries_its_error_range():
    facts = plan_facts(79.18, 0.92, 60, 3, 0.5, 2.0, 7.35)
    rank = build_ledger(facts, version=Version("0.22.0"), engine="V1").ranks[0]
    assert rank.entry("cuda_graphs").error_pct == pytest.approx(35)


def test_negative_budget_stays_visible():
    facts = facts_of(
        ("device.total", 24, 1),
        ("config.gpu_memory_utilization", 0.9, 1),
        ("weights.memory", 21, 2),
        ("profile.available_kv_cache", -0.30, 3),
    )
    rank = build_ledger(facts, version=Version("0.10.2"), engine="V1").ranks[0]
    assert rank.entry("kv_pool").bytes == gib(-0.30)
    assert closes(rank)


def test_refusal_for_one_request():
    facts = facts_of(
        ("weights.memory", 95.46, 108),
        ("profile.available_kv_cache", 8.72, 125),
        ("kv.needed", 18.35, 127),
        ("kv.available", 8.72, 127),
    )
    ledger = build_ledger(facts, version=Version("0.25.1"), engine="V1")
    pool = mark_failed(ledger, "kv_pool").ranks[0].entry("kv_pool")
    assert pool.failed
    assert pool.wanted == gib(18.35)
    assert pool.bytes == gib(8.72)
    assert ledger.ranks[0].total_bytes is None
    assert ledger.ranks[0].unexplained_bytes is None
    assert ledger.formula is None


def test_v0_refusal_prints_tokens_only():
    # 0.6.4: 23,648 tokens fit 2.89 GiB, 29,000 were asked
    facts = facts_of(
        ("profile.available_kv_cache", 2.89, 3),
        ("kv.asked_len", 29000, 5),
        ("kv.capacity_tokens", 23648, 5),
    )
    needed = sizes.kv_needed(facts)
    assert needed.value == gib(2.89 * 29000 / 23648)
    assert needed.origin is Origin.DERIVED
    assert needed.lines == (3, 5)


def test_torch_peak_holds_the_weights_in_064():
    facts = facts_of(
        ("device.total", 23.58, 2),
        ("config.gpu_memory_utilization", 0.90, 2),
        ("weights.memory", 14.9888, 1),
        ("profile.torch_peak", 17.98, 2),
        ("profile.non_torch", 0.35, 2),
        ("profile.available_kv_cache", 2.89, 2),
    )
    ledger = build_ledger(facts, version=Version("0.6.4"), engine="V0")
    (rank,) = ledger.ranks
    assert ledger.era == "D"
    assert rank.entry("peak_activation").bytes == gib(2.99)
    assert abs(rank.unexplained_bytes) < 0.02 * GIB


def test_budget_from_all_that_is_no_kv_cache():
    facts = facts_of(
        ("device.total", 80, 2),
        ("config.gpu_memory_utilization", 0.9, 2),
        ("profile.non_kv", 42, 3),
    )
    rank = build_ledger(facts, version=Version("0.12.0"), engine="V1").ranks[0]
    assert rank.entry("kv_pool").bytes == gib(30)


def test_assumed_card_and_share_are_marked():
    facts = facts_of(("weights.memory", 61.03, 9), ("profile.available_kv_cache", 6.10, 12))
    ledger = build_ledger(
        facts, version=Version("0.12.0"), engine="V1", assumed_total=round(79.15 * GIB)
    )
    (rank,) = ledger.ranks
    assert ledger.formula.startswith("0.90 x about 79.15 = 71.24 GiB requested; - 61.03 weights")
    assert rank.entry("outside").origin is Origin.ASSUMED
    assert rank.entry("outside").bytes == gib(7.915)
    assert rank.entry("peak_activation_and_non_torch").origin is Origin.ASSUMED
    assert rank.entry("weights").origin is Origin.LOGGED
    assert closes(rank)


def test_pinned_pool_is_not_taken_off_the_share():
    facts = facts_of(
        ("device.total", 80, 1),
        ("weights.memory", 20, 2),
        ("config.kv_cache_memory_bytes", 50, 1),
    )
    rank = build_ledger(facts, version=Version("0.12.0"), engine="V1").ranks[0]
    assert terms(rank) == {"weights": 20 * GIB, "kv_pool": 50 * GIB}
    assert rank.unexplained_bytes == 10 * GIB


# --- the start-up check --------------------------------------------------------------------------


def test_start_check():
    facts = facts_of(
        ("device.free_at_start", 19.40, 31),
        ("device.total", 23.65, 31),
        ("device.requested", 21.76, 31),
        ("config.gpu_memory_utilization", 0.92, 31),
    )
    ledger = build_ledger(facts, version=Version("0.22.1"), engine="V1")
    (rank,) = ledger.ranks
    assert terms(rank) == {"other_processes": gib(4.25), "free": gib(19.40)}
    assert rank.entry("free").wanted == gib(21.76)
    assert rank.unexplained_bytes == 0
    assert ledger.formula == "0.92 x 23.65 = 21.76 GiB wanted free; 19.40 GiB are free"
    failed = mark_failed(ledger, "other_processes").ranks[0].entry("other_processes")
    assert failed.failed
    assert failed.wanted is None


def test_start_check_takes_the_fullest_device():
    rows = []
    for line, free in ((47, 54.34), (70, 53.76), (92, 54.49)):
        rows += [("device.free_at_start", free, line), ("device.total", 79.18, line)]
        rows += [("device.requested", 72.84, line)]
    rank = build_ledger(facts_of(*rows), version=Version("0.23.0"), engine="V1").ranks[0]
    assert rank.entry("free").bytes == gib(53.76)
    assert rank.entry("free").lines == (70,)


# --- out-of-memory texts ---------------------------------------------------------------------------


def oom_rows(line=149, rank=None, **parts):
    return [(f"oom.{name}", size, line, rank) for name, size in parts.items()]


CAPTURE = oom_rows(
    tried=0.1094,
    total=79.19,
    free=0.0756,
    process_in_use=71.81,
    allocated=71.01,
    reserved_unallocated=0.0722,
    other_processes=7.29,
)


def test_out_of_memory_in_graph_capture():
    facts = facts_of(
        ("weights.memory", 3.9099, 44), ("profile.available_kv_cache", 66.87, 49), *CAPTURE
    )
    ledger = build_ledger(facts, version=Version("0.9.1"), engine="V1")
    (rank,) = ledger.ranks
    assert terms(rank) == {
        "other_processes": gib(7.29),
        "non_torch": gib(0.73),
        "weights": gib(3.91),
        "kv_pool": gib(66.87),
        "torch_other": gib(0.23),
        "reserved_unallocated": gib(0.07),
        "free": gib(0.08),
    }
    assert closes(rank)
    assert abs(rank.unexplained_bytes) < 0.05 * GIB
    entry = next(e for e in mark_failed(ledger, "cuda_graphs").ranks[0].entries if e.failed)
    assert entry.term == "torch_other"  # no private pools were printed
    assert entry.wanted == gib(0.23 + 0.11)


def test_out_of_memory_while_the_pool_is_placed():
    facts = facts_of(
        ("weights.memory", 20, 4),
        ("profile.available_kv_cache", 50, 6),
        *oom_rows(
            line=9,
            tried=1,
            total=80,
            free=0.5,
            process_in_use=61,
            allocated=60,
            reserved_unallocated=0.1,
        ),
    )
    rank = build_ledger(facts, version=Version("0.9.2"), engine="V1").ranks[0]
    pool = rank.entry("kv_pool")
    assert pool.bytes == gib(40)
    assert pool.wanted == gib(50)
    assert closes(rank)


def test_sizes_printed_after_the_failure_are_not_in_it():
    facts = facts_of(
        ("weights.memory", 20, 40), *oom_rows(line=9, tried=1, total=80, free=0.5, allocated=70)
    )
    rank = build_ledger(facts, version=Version("0.9.2"), engine="V1").ranks[0]
    assert rank.entry("weights") is None
    assert rank.entry("torch_other").label == "allocated by PyTorch"


def test_impossible_numbers_are_left_out():
    facts = facts_of(
        *oom_rows(tried=0.25, total=6.0, free=0.0, process_in_use=17179869184.0, allocated=12.43)
    )
    ledger = build_ledger(facts, version=Version("0.16.0"), engine="V1")
    assert terms(ledger.ranks[0]) == {"free": 0}
    assert ledger.ranks[0].unexplained_bytes == 6 * GIB


def test_a_sleep_mode_pool_is_not_counted_twice():
    facts = facts_of(
        ("weights.memory", 15, 4),
        ("profile.available_kv_cache", 50, 6),
        *oom_rows(line=9, tried=1, total=80, free=0.5, allocated=70, private_pools=65),
    )
    rank = build_ledger(facts, version=Version("0.12.0"), engine="V1").ranks[0]
    assert rank.entry("private_pools") is None
    assert rank.entry("torch_other").bytes == gib(5)


def test_the_chosen_text_is_accounted_for():
    facts = facts_of(
        *oom_rows(line=5, tried=1, total=80, free=70), *oom_rows(line=9, tried=2, total=80, free=1)
    )
    chosen = build_ledger(facts, version=None, engine=None, oom_line=9).ranks[0]
    assert chosen.entry("free").lines == (9,)
    first = build_ledger(facts, version=None, engine=None).ranks[0]
    assert first.entry("free").lines == (5,)


def test_a_text_without_rank_is_kept_beside_ranked_lines():
    facts = facts_of(("weights.memory", 10, 3, 0), ("weights.memory", 10, 4, 1), *CAPTURE)
    ranks = build_ledger(facts, version=Version("0.9.1"), engine="V1").ranks
    assert [rank.rank for rank in ranks] == [0, 1, None]


# --- host RAM ----------------------------------------------------------------------------------------


def test_cpu_back_end_start_check():
    facts = facts_of(
        ("host.node_total", 23.54, 50),
        ("host.node_available", 16.66, 50),
        ("host.wanted", 22.83, 50),
    )
    ledger = build_ledger(facts, version=Version("0.20.2"), engine="V1")
    (rank,) = ledger.ranks
    assert ledger.era == "host"
    assert rank.device == "host RAM"
    assert terms(rank) == {"other_processes": gib(6.88), "free": gib(16.66)}
    assert rank.entry("free").wanted == gib(22.83)
    assert ledger.formula == "22.83 GiB wanted; 16.66 GiB are available"


def test_cpu_back_end_without_a_pool():
    facts = facts_of(("host.node_total", 11.65, 37), ("profile.available_kv_cache", 0, 37))
    (rank,) = build_ledger(facts, version=Version("0.25.1"), engine="V1").ranks
    assert terms(rank) == {"kv_pool": 0}
    assert rank.unexplained_bytes == gib(11.65)


def test_cpu_back_end_plan():
    facts = facts_of(
        ("host.node_total", 23.54, 9),
        ("host.wanted", 21.65, 9),
        ("profile.non_kv", 2.40, 9),
        ("profile.available_kv_cache", 19.25, 9),
        ("weights.memory", 1.0, 5),
    )
    ledger = build_ledger(facts, version=Version("0.32.0"), engine="V1")
    (rank,) = ledger.ranks
    assert terms(rank) == {
        "weights": gib(1.0),
        "peak_activation_and_non_torch": gib(1.40),
        "kv_pool": gib(19.25),
        "outside": gib(1.89),
    }
    assert closes(rank)
    assert ledger.formula == ("21.65 GiB requested; - 2.40 in use = 19.25 GiB for the KV pool")


def test_text_without_the_allocation():
    facts = facts_of(*oom_rows(tried=3.5, total=23.64, free=1.42, other_processes=22.22))
    ledger = build_ledger(facts, version=Version("0.2.3"), engine="V0")
    assert terms(ledger.ranks[0]) == {"this_process": gib(22.22), "free": gib(1.42)}
    assert mark_failed(ledger, "peak_activation").ranks[0].entry("this_process").failed


# --- ranks -------------------------------------------------------------------------------------------


def test_each_rank_keeps_its_own_values():
    rows = []
    for rank, pool in enumerate((35.74, 35.65, 36.12)):
        rows += [("weights.memory", 27.67, rank, rank)]
        rows += [("profile.available_kv_cache", pool, 10 + rank, rank)]
    ledger = build_ledger(facts_of(*rows), version=Version("0.10.0"), engine="V1")
    assert [item.rank for item in ledger.ranks] == [0, 1, 2]
    assert [item.entry("kv_pool").bytes for item in ledger.ranks] == [
        gib(35.74),
        gib(35.65),
        gib(36.12),
    ]


def test_a_value_of_another_rank_is_derived():
    facts = facts_of(
        ("weights.memory", 27, 1, 0),
        ("weights.memory", 27, 2, 1),
        ("profile.available_kv_cache", 30, 3, 0),
    )
    ranks = build_ledger(facts, version=Version("0.12.0"), engine="V1").ranks
    assert [rank.entry("kv_pool").origin for rank in ranks] == [Origin.LOGGED, Origin.DERIVED]


def test_failure_on_one_rank_only():
    facts = facts_of(("weights.memory", 27, 1, 0), ("weights.memory", 27, 2, 1))
    ledger = build_ledger(facts, version=None, engine=None)
    marked = mark_failed(ledger, "weights", rank=1)
    assert [rank.entry("weights").failed for rank in marked.ranks] == [False, True]
    assert mark_failed(ledger, "no_such_term") == ledger


def test_era_given_without_a_version():
    ledger = build_ledger(Facts(), version=None, engine=None, era=Era.F)
    assert ledger.era == "F"


def test_nothing_known():
    ledger = build_ledger(Facts(), version=None, engine=None)
    assert ledger.era is None
    assert ledger.formula is None
    assert ledger.ranks[0].entries == ()
    assert ledger.ranks[0].unexplained_bytes is None


# --- sizes -------------------------------------------------------------------------------------------


def test_total_from_the_requested_memory():
    facts = facts_of(("device.requested", 71.26, 3), ("config.gpu_memory_utilization", 0.9, 1))
    total = sizes.total_bytes(facts)
    assert total.value == gib(79.18)
    assert total.origin is Origin.DERIVED
    assert total.lines == (1, 3)


def test_total_from_the_share_of_the_graphs():
    # GB10: "0.8900 is equivalent to 0.8690 without", 2.55 GiB estimated; such a device has 121.69
    facts = facts_of(
        ("profile.graph_estimate", 2.55, 3),
        ("config.gpu_memory_utilization", 0.89, 1),
        ("profile.gmu_without_graphs", 0.8690, 4),
    )
    total = sizes.total_bytes(facts)
    assert total.value == pytest.approx(121.69 * GIB, rel=0.01)
    assert total.origin is Origin.ASSUMED
    assert sizes.total_bytes(facts, assumed=5).value == 5


def test_a_small_share_of_the_graphs_is_too_coarse():
    facts = facts_of(
        ("profile.graph_estimate", 0.15, 3),
        ("config.gpu_memory_utilization", 0.9, 1),
        ("profile.gmu_without_graphs", 0.8981, 4),
    )
    assert sizes.total_bytes(facts) == UNKNOWN


def test_a_failed_term_without_a_number_is_shown_as_unknown():
    facts = facts_of(("weights.memory", 0.43, 21))
    ledger = build_ledger(facts, version=Version("0.8.3"), engine="V1")
    pool = mark_failed(ledger, "kv_pool").ranks[0].entry("kv_pool")
    assert pool.failed
    assert pool.bytes is None


def test_requested_is_rounded_up():
    facts = Facts(
        table={"device.total": (Fact(name="device.total", value=1001, unit="bytes", line=1),)}
    )
    assert sizes.requested_bytes(facts, Setting(assumed_gmu=0.5)).value == 501


def test_zero_total_is_unknown():
    # unified memory: "Total GPU Memory: 0 MB"
    assert sizes.total_bytes(facts_of(("device.total", 0, 3))) == UNKNOWN


def test_combine_needs_every_part():
    one = Sized(value=5, lines=(1,))
    assert combine(one, less=(UNKNOWN,)) == UNKNOWN
    assert combine(one, plus=(one,), less=(one, one)).value == 0
    assert combine(one, less=(Sized(value=1, origin=Origin.ASSUMED),)).origin is Origin.ASSUMED


# --- what must hold for any facts ---------------------------------------------------------------------

NAMES = (
    "device.total",
    "device.free_at_start",
    "device.requested",
    "weights.memory",
    "profile.peak_activation",
    "profile.non_torch",
    "profile.consumed",
    "profile.graph_estimate",
    "profile.available_kv_cache",
    "graph.memory",
    "graph.pool_actual",
    "kv.needed",
    "kv.available",
    "config.kv_cache_memory_bytes",
    "oom.tried",
    "oom.total",
    "oom.free",
    "oom.process_in_use",
    "oom.allocated",
    "oom.private_pools",
    "oom.reserved_unallocated",
    "oom.other_processes",
    "host.node_total",
    "host.node_available",
)
ANY_FACT = st.builds(
    fact,
    st.sampled_from(NAMES),
    st.integers(-5, 400).map(lambda number: number / 4),
    st.integers(1, 6),
    st.sampled_from([None, 0, 1, 2]),
)
VERSIONS = st.sampled_from(
    [None, "0.3.3", "0.6.4", "0.8.5", "0.10.2", "0.18.0", "0.22.0", "0.30.0"]
)


def tabled(rows):
    table = {}
    for row in rows:
        table.setdefault(row.name, []).append(row)
    return Facts(table={name: tuple(found) for name, found in table.items()})


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY_FACT, max_size=25), VERSIONS, st.sampled_from([None, 24 * GIB]))
def test_ledger_sums_to_the_total(rows, version, assumed):
    parsed = Version(version) if version else None
    ledger = build_ledger(tabled(rows), version=parsed, engine=None, assumed_total=assumed)
    for rank in ledger.ranks:
        assert closes(rank)
        assert (rank.unexplained_bytes is None) == (rank.total_bytes is None)
        assert len({entry.term for entry in rank.entries}) == len(rank.entries)
    for term in ("kv_pool", "weights", "cuda_graphs", "other_processes"):
        assert all(closes(rank) for rank in mark_failed(ledger, term).ranks)


RANK_SIZES = st.fixed_dictionaries(
    {
        "device.total": st.integers(20, 80),
        "weights.memory": st.integers(1, 40),
        "profile.available_kv_cache": st.integers(-5, 40),
        "profile.peak_activation": st.integers(0, 5),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RANK_SIZES, min_size=2, max_size=5), st.randoms())
def test_renaming_ranks_moves_their_ledgers(ranks, random):
    order = list(range(len(ranks)))
    random.shuffle(order)

    def ledger(names):
        rows = [
            fact(name, size, line=7, rank=names[at])
            for at, found in enumerate(ranks)
            for name, size in found.items()
        ]
        random.shuffle(rows)
        built = build_ledger(tabled(rows), version=Version("0.10.2"), engine="V1")
        return {rank.rank: rank for rank in built.ranks}

    plain, shuffled = ledger(list(range(len(ranks)))), ledger(order)
    for at, name in enumerate(order):
        assert plain[at].entries == shuffled[name].entries
        assert plain[at].unexplained_bytes == shuffled[name].unexplained_bytes
