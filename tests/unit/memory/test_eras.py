"""Which formula a release budgets by, and what a log without a version betrays."""

from __future__ import annotations

import pytest
from packaging.version import Version

from diag.facts.model import Event, Fact, Facts
from diag.log.model import LogLine, Speaker
from diag.memory.defaults import BatchLimits, batch_limits, default_of
from diag.memory.eras import (
    Era,
    default_engine,
    default_gpu_memory_utilization,
    era_of,
    era_within,
    infer_engine,
    infer_release_range,
)
from diag.release import parse_release
from diag.terms import RowRole
from diag.units import GIB


@pytest.mark.parametrize(
    ("version", "engine", "era"),
    [
        ("0.2.7", None, "A"),
        ("0.3.3", None, "A"),
        ("0.4.0.post1", None, "B"),
        ("0.6.3.post1", None, "B"),
        # 0.6.4: a log printed torch's peak plus the rest of the device, 21.22 - 17.98 - 0.35 = 2.89
        ("0.6.4.post1", "V0", "D"),
        ("0.6.5", None, "C"),
        ("0.7.3", "V1", "D"),
        ("0.7.3", None, "C"),
        ("0.8.5", None, "D"),
        ("0.8.5", "V0", "C"),
        ("0.8.5.dev274+g166d0ef40", "V1", "D"),
        ("0.9.0.1", "V1", "D"),
        ("0.9.1", "V1", "E"),
        ("0.9.1.dev287+g89b1388d8", "V1", "E"),
        ("0.10.2", "V0", "C"),
        ("0.10.2", None, "E"),
        ("0.11.0", "V0", "F"),  # V0 is gone: the release overrules
        ("0.13.0+faa43dbf.nv26.01", "V1", "F"),
        ("0.17.1", None, "F"),
        ("0.18.0", None, "G"),
        ("0.19.1", None, "G"),
        ("0.19.2rc1.dev206+g95995bbef", None, "H"),  # prints that graphs are charged
        ("0.20.0", None, "H"),
        ("0.26.0", None, "H"),
        ("0.26.1rc1.dev156+g0eec856cc", None, "I"),  # prints "consumed memory"
        ("0.33.0", None, "I"),
        ("0.1.dev18496+gd4e0675a7", "V1", None),  # a shallow clone's number says nothing
        (None, "V1", None),
    ],
)
def test_era_of_release(version, engine, era):
    found = era_of(parse_release(version), engine)
    assert (found.value if found else None) == era


@pytest.mark.parametrize(
    ("version", "share"), [("0.6.0", 0.90), ("0.19.1", 0.90), ("0.20.0", 0.92), ("0.33.0", 0.92)]
)
def test_default_share_changes_with_the_graph_charge(version, share):
    release = Version(version)
    assert default_gpu_memory_utilization(release) == share
    assert default_of("gpu_memory_utilization", release) == share
    era = era_of(release)
    assert era is not None
    assert era.default_gmu == share


def test_nothing_is_known_without_a_release():
    assert default_gpu_memory_utilization(None) is None
    assert default_engine(None) is None
    assert era_within(None, None) is None


def test_what_each_era_charges():
    assert [era.value for era in Era if era.counts_others] == ["A", "D"]
    assert [era.value for era in Era if era.free_check] == list("EFGHI")
    assert [era.value for era in Era if era.counts_nccl] == list("ABCDE")
    assert [era.value for era in Era if era.graphs_charged] == ["H", "I"]
    assert [era.value for era in Era if era.graphs_estimated] == ["G", "H", "I"]
    assert all(era.formula and era.releases for era in Era)


def test_engine_default_by_release():
    assert default_engine(Version("0.7.3")) == "V0"
    assert default_engine(Version("0.8.0rc1")) == "V1"


@pytest.mark.parametrize(
    ("low", "high", "engine", "era"),
    [
        ("0.9.1", "0.11.0", "V1", "E"),
        ("0.9.1", "0.11.1", "V1", None),
        ("0.11.0", "0.18.0", None, "F"),
        ("0.28", None, None, "I"),
        (None, "0.4", None, "A"),
        ("0.20", "0.19", None, "H"),  # an empty range leaves its lower end
    ],
)
def test_era_of_a_range(low, high, engine, era):
    found = era_within(Version(low) if low else None, Version(high) if high else None, engine)
    assert (found.value if found else None) == era


def event(row="x", *, process=None, source=None):
    line = LogLine(number=1, text="", speaker=Speaker(process=process), source=source)
    return Event(row=row, role=RowRole.INFO, phase=None, line=line, values={})


@pytest.mark.parametrize(
    ("events", "engine"),
    [
        ([event(process="EngineCore_DP0")], "V1"),
        ([event(process="VllmWorkerProcess")], "V0"),
        ([event(process="Worker_TP0_EP0")], "V1"),
        ([event(source="gpu_worker.py:298")], "V1"),
        ([event(source="gpu_executor.py:121")], "V0"),
        ([event(source="model_runner.py:1300")], "V0"),
        ([event(source="model_runner.py:1"), event(process="EngineCore")], "V1"),
        ([event(source="gpu_worker.py:1"), event(source="gpu_executor.py:1")], None),
        ([], None),
    ],
)
def test_engine_by_its_traces(events, engine):
    assert infer_engine(Facts(events=tuple(events))) == engine


def test_engine_as_logged_wins():
    fact = Fact(name="vllm.engine", value="V0", unit="text", line=1)
    facts = Facts(table={"vllm.engine": (fact,)}, events=(event(process="EngineCore"),))
    assert infer_engine(facts) == "V0"


def test_engine_by_cpu_blocks():
    fact = Fact(name="kv.cpu_blocks", value=2048, unit="blocks", line=1)
    assert infer_engine(Facts(table={"kv.cpu_blocks": (fact,)})) == "V0"


RELEASES = {
    "old": ">=0.4.3,<0.8",
    "kv": ">=0.9.1",
    "check": ">=0.9.1,<0.14",
    "consumed": ">=0.27",
    "exact": "==0.10.*",
    "bad": "later",
}


@pytest.mark.parametrize(
    ("rows", "low", "high"),
    [
        (["kv"], "0.9.1", None),
        (["kv", "check"], "0.9.1", "0.14"),
        (["exact", "kv"], "0.10", "0.11"),
        (["kv", "bad"], "0.9.1", None),
        (["unlisted"], None, None),
        (["old", "consumed"], None, None),  # contradictory: no majority
        ([], None, None),
    ],
)
def test_release_bounds_from_wordings(rows, low, high):
    facts = Facts(events=tuple(event(row) for row in rows))
    found = infer_release_range(facts, RELEASES)
    assert found == (Version(low) if low else None, Version(high) if high else None)


def test_one_odd_row_does_not_flip_the_bounds():
    releases = {f"r{n}": ">=0.9.1,<0.11" for n in range(4)} | {"odd": ">=0.30"}
    facts = Facts(events=tuple(event(row) for row in releases))
    assert infer_release_range(facts, releases) == (Version("0.9.1"), Version("0.11"))


def test_process_names_bound_the_release():
    facts = Facts(events=(event(process="EngineCore_0"), event(process="APIServer")))
    low, high = infer_release_range(facts, {})
    assert (low, high) == (Version("0.10.1"), Version("0.10.2"))
    assert era_within(low, high, "V1") is Era.E


@pytest.mark.parametrize(
    ("version", "total", "name", "server", "tokens", "seqs"),
    [
        ("0.8.0", None, "NVIDIA L4", True, 2048, 1024),
        ("0.8.0", None, "NVIDIA H100 80GB HBM3", False, 16384, 1024),
        ("0.11.0", 79.2, "NVIDIA H100 80GB HBM3", True, 8192, 1024),
        ("0.11.0", 79.2, "NVIDIA A100-SXM4-80GB", True, 2048, 256),
        ("0.11.0", 23.6, None, False, 8192, 256),
        ("0.30.0", 178.3, "NVIDIA B200", True, 16384, 1024),
    ],
)
def test_batch_limits(version, total, name, server, tokens, seqs):
    size = None if total is None else round(total * GIB)
    found = batch_limits(Version(version), "V1", total=size, device_name=name, server=server)
    assert found == BatchLimits(tokens=tokens, seqs=seqs)


def test_batch_limits_need_the_facts_they_rest_on():
    assert batch_limits(Version("0.11.0"), "V1", total=80 * GIB) is None  # A100 or not?
    assert batch_limits(None, "V1", total=24 * GIB) is None
