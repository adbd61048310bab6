"""A fix that says it fits must cure the failure by the true sizes, of which a log prints two decimals only.

Each test draws a machine, prints its numbers as vLLM and torch do, asks for fixes, makes the changes of every fix that
says it fits, and looks by vLLM's own conditions whether the same failure would come again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fix_samples import situation
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diag.fixes.direction import advise_gmu
from diag.fixes.model import Fix
from diag.fixes.planner import plan_fixes
from diag.terms import Phase
from diag.units import GIB

GMU = "config.gpu_memory_utilization"
TOTALS = st.sampled_from([7.8, 14.58, 23.65, 44.39, 79.15, 139.81])
SHARES = st.integers(20, 97).map(lambda part: part / 100)
TINY = 1e-6  # GiB, for sums of floats


def sizes(low: float, high: float) -> st.SearchStrategy[float]:
    """True sizes in GiB, finer than what is printed."""
    return st.integers(round(low * 2**20), round(high * 2**20)).map(lambda part: part / 2**20)


def printed(size: float) -> float:
    return round(size, 2)


def printed_by_torch(size: float) -> float:
    """Torch prints hundredths of a MiB below one GiB."""
    return printed(size) if size >= 1 else round(size * 1024, 2) / 1024


def changes_of(fix: Fix) -> dict[str, object]:
    return {change.flag or change.env or "action": change.to for change in fix.changes}


def fitting(case) -> list[Fix]:
    return [fix for fix in plan_fixes(case, advise_gmu(case))[0] if fix.fits]


# --- one request does not fit the pool --------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """A plan: GiB, tokens. The cache has layers that keep all tokens and layers with a window."""

    total: float
    share: float
    pool: float
    full: float  # GiB a token
    windowed: float  # GiB a token
    window: int
    length: int
    graphs: float = 0.0
    offloaded: int = 0
    halved: bool = False

    def need(self, length: int | None = None) -> float:
        tokens = self.length if length is None else length
        size = self.full * tokens + self.windowed * min(tokens, self.window)
        return size / 2 if self.halved else size

    @property
    def starts(self) -> bool:
        return self.need() <= self.pool + TINY

    def longest(self) -> int:
        """What vLLM prints as the longest length that would fit."""
        low, high = 0, self.length
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.need(middle) <= self.pool else (low, middle - 1)
        return low

    def after(self, fix: Fix) -> Pool:
        found = self
        for flag, to in changes_of(fix).items():
            if flag == "--gpu-memory-utilization":
                gain = (to - found.share) * self.total
                found = replace(found, share=to, pool=found.pool + gain)
            elif flag == "--max-model-len":
                found = replace(found, length=to)
            elif flag == "--kv-cache-dtype":
                found = replace(found, halved=True)
            elif flag == "--cpu-offload-gb":
                more = to - found.offloaded
                found = replace(found, offloaded=to, pool=found.pool + more)
            elif flag == "--enforce-eager":
                found = replace(found, pool=found.pool + found.graphs, graphs=0.0)
            else:
                raise AssertionError(f"{fix.id} says it fits; this test does not know {flag}")
        return found


@st.composite
def pools(draw) -> Pool:
    total = draw(TOTALS)
    length = draw(st.integers(1024, 1_048_576))
    need = draw(sizes(0.1, 60))
    windowed = draw(st.sampled_from([0.0, 0.3, 0.8]))
    window = draw(st.sampled_from([128, 1024, 4096]))
    share = draw(SHARES)
    full_part = need * (1 - windowed) / length
    window_part = need * windowed / min(length, window)
    pool = min(draw(sizes(0.02, 50)), share * total)
    return Pool(total, share, pool, full_part, window_part, window, length, draw(sizes(0.05, 2)))


def refused(truth: Pool, *, version: str, estimate: bool, weights: float | None, ram: float | None):
    """What the log prints of a refused start."""
    facts = {
        "kv.needed": printed(truth.need()),
        "kv.available": printed(truth.pool),
        "kv.asked_len": truth.length,
        "device.total": truth.total,
        "config.kv_cache_dtype": "auto",
        GMU: truth.share,
        "profile.graph_estimate": printed(truth.graphs),
    }
    if estimate and truth.longest() > 0:
        facts["kv.estimated_max_len"] = truth.longest()
    if weights is not None:
        facts["weights.memory"] = weights
    if ram is not None:
        facts["host.ram_available"] = ram
    if truth.windowed == 0:
        facts["config.model"] = "Qwen/Qwen3-8B"  # a table entry without windows
    return situation("kv.max_len_exceeds", facts, version=version, phase=Phase.KV_ALLOC)


@settings(max_examples=150, deadline=None)
@given(
    truth=pools(),
    version=st.sampled_from(["0.11.0", "0.18.1", "0.21.0", "0.27.1"]),
    estimate=st.booleans(),
    weights=st.none() | st.sampled_from([3.2, 15.27, 61.03]),
    ram=st.none() | st.sampled_from([4.0, 30.0, 500.0]),
)
def test_one_request_fits_after_any_fix_that_says_so(truth, version, estimate, weights, ram):
    assume(not truth.starts and printed(truth.pool) > 0)
    case = refused(truth, version=version, estimate=estimate, weights=weights, ram=ram)
    for fix in fitting(case):
        after = truth.after(fix)
        assert after.starts, (fix.id, fix.proof, after.need(), after.pool)
        assert after.share <= 1
        if ram is not None:
            assert after.offloaded <= ram


@settings(max_examples=60, deadline=None)
@given(truth=pools(), weights=st.none() | st.sampled_from([15.27, 61.03]))
def test_combinations_come_only_when_no_single_change_fits(truth, weights):
    assume(not truth.starts and printed(truth.pool) > 0)
    found = fitting(refused(truth, version="0.21.0", estimate=False, weights=weights, ram=None))
    several = [fix for fix in found if len(fix.changes) > 1]
    assert not several or len(several) == len(found)
    for fix in several:
        for change in fix.changes:
            alone = replace(fix, changes=(change,))
            # The shares and sizes of a combination are the least that it needs, so that a part never is enough.
            assert not truth.after(alone).starts or printed(truth.need() - truth.pool) <= 0.05


# --- a request that failed beside the pool ----------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A running engine: GiB. `tried` did not find room in `free`."""

    total: float
    share: float
    pool: float
    request: float  # KV of one full-length request
    length: int
    tried: float
    free: float
    idle: float
    work: int  # tokens or rows of the failed step
    expandable: bool = False

    @property
    def serves(self) -> bool:
        room = self.free + (self.idle if self.expandable else 0.0)
        # The request is known from a printed concurrency of two decimals: to half a percent.
        return self.tried <= room + TINY and self.request <= self.pool * 1.006

    def after(self, fix: Fix) -> Card:
        found = self
        for flag, to in changes_of(fix).items():
            if flag == "--gpu-memory-utilization":
                given = (found.share - to) * self.total
                found = replace(found, share=to, pool=found.pool - given, free=found.free + given)
            elif flag == "--kv-cache-memory-bytes":
                given = found.pool - to / GIB
                found = replace(found, pool=to / GIB, free=found.free + given)
            elif flag in ("--max-num-batched-tokens", "--max-num-seqs"):
                found = replace(found, work=to, tried=found.tried * to / found.work)
            elif flag == "--max-model-len":
                found = replace(found, length=to, request=found.request * to / found.length)
            elif flag == "--kv-cache-dtype":
                found = replace(found, request=found.request / 2)
            elif flag.endswith("ALLOC_CONF"):
                found = replace(found, expandable=True)
            else:
                raise AssertionError(f"{fix.id} says it fits; this test does not know {flag}")
        return found


@st.composite
def cards(draw) -> Card:
    total, share = draw(TOTALS), draw(SHARES)
    pool = share * total * draw(st.floats(0.1, 0.9))
    tried = draw(sizes(0.01, 8))
    return Card(
        total=total,
        share=share,
        pool=pool,
        request=pool / draw(st.floats(1.0, 20.0)),
        length=draw(st.integers(2048, 262_144)),
        tried=tried,
        free=tried * draw(st.floats(0.0, 0.99)),
        idle=draw(sizes(0, 2)),
        work=draw(st.sampled_from([256, 1024, 2048, 8192, 16384])),
    )


@settings(max_examples=150, deadline=None)
@given(
    truth=cards(),
    subtype=st.sampled_from(
        "act.prefill act.moe_workspace act.sampler_warmup act.logits_logprobs act.lora "
        "alloc.fragmentation tp.nccl_oom act.other".split()
    ),
    pinned=st.booleans(),
    suggested=st.none() | st.floats(0.3, 0.99),
)
def test_the_failed_request_fits_after_any_fix_that_says_so(truth, subtype, pinned, suggested):
    assume(printed_by_torch(truth.tried) > printed_by_torch(truth.free))
    facts = {
        "oom.total": truth.total,
        "oom.tried": printed_by_torch(truth.tried),
        "oom.free": printed_by_torch(truth.free),
        "oom.allocated": truth.share * truth.total,
        "oom.reserved_unallocated": printed_by_torch(truth.idle),
        "profile.available_kv_cache": printed(truth.pool),
        "kv.max_concurrency": round(truth.pool / truth.request, 2),
        "config.max_model_len": truth.length,
        "config.max_num_batched_tokens": truth.work,
        "config.max_num_seqs": truth.work,
        "config.kv_cache_dtype": "auto",
        "config.model": "Qwen/Qwen3-8B",
        GMU: truth.share,
    }
    if pinned:
        facts["config.kv_cache_memory_bytes"] = round(truth.pool * GIB)
    if suggested is not None:
        facts["kv.suggested_fit"] = round(truth.pool * suggested * GIB)
    phase = Phase.SAMPLER_WARMUP if subtype == "act.sampler_warmup" else Phase.SERVING
    for fix in fitting(situation(subtype, facts, version="0.13.0", phase=phase)):
        after = truth.after(fix)
        assert after.serves, (fix.id, fix.proof, after)


# --- other checks of a start ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(total=TOTALS, share=SHARES, part=st.floats(0.01, 0.999))
def test_the_free_memory_check_passes_after_any_fix_that_says_so(total, share, part):
    free = share * total * part
    facts = {"device.total": total, "device.free_at_start": printed(free), GMU: share}
    assume(printed(free) < share * total)
    for fix in fitting(situation("kv.free_below_target", facts, phase=Phase.INIT_DEVICE)):
        asked = changes_of(fix)
        if "--gpu-memory-utilization" in asked:
            assert asked["--gpu-memory-utilization"] * total <= free + TINY
        else:
            assert fix.id == "free_card"
            assert share * total <= total - min(total - free, 0.5) + TINY


@settings(max_examples=60, deadline=None)
@given(need=sizes(0.1, 60), part=st.floats(0.01, 0.99), ram=sizes(1, 200))
def test_a_larger_pool_in_host_memory_holds_the_request(need, part, ram):
    pool = need * part
    facts = {
        "kv.needed": printed(need),
        "kv.available": printed(pool),
        "kv.asked_len": 32768,
        "host.node_available": printed(ram),
        "host.node_total": 256,
    }
    assume(printed(pool) < printed(need))
    case = situation("kv.max_len_exceeds", facts, version="0.12.0", backend="cpu")
    for fix in fitting(case):
        asked = changes_of(fix)
        if "VLLM_CPU_KVCACHE_SPACE" in asked:
            to = asked["VLLM_CPU_KVCACHE_SPACE"]
            assert to >= math.floor(need)
            assert to + 0.01 >= need
            assert to - pool <= ram + 0.02
