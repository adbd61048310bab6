"""The input of every verdict and fix: one failure with its facts, and the numbers that can be read from it.

`read_numbers` gathers the sizes once; each keeps its log line and origin. A number that isn't there is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from packaging.version import Version

from diag.facts.args import from_command
from diag.facts.model import Fact, Facts, Problem
from diag.facts.torch_oom import OomReading, oom_lines, read_oom
from diag.memory.defaults import BatchLimits, batch_limits
from diag.memory.eras import Era, default_gpu_memory_utilization, era_of
from diag.memory.gpus import by_capacity, by_name
from diag.memory.sizes import total_bytes
from diag.release import in_range
from diag.terms import Family, Origin, Phase
from diag.units import GIB

_UNIFIED = re.compile(r"GB10|Jetson|Orin|Thor|GH200|gfx115\d|Strix Halo", re.IGNORECASE)
# Just below 2**64: a negative number printed unsigned.
_WRAPPED_COUNTER = re.compile(r"\b184467440737\d{8}\b")


@dataclass(frozen=True, slots=True)
class Known:
    """A number with its source."""

    value: float
    origin: Origin = Origin.LOGGED
    line: int | None = None
    default: bool = False  # the release's default; neither log nor command shows another


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A failure, named, with all that its start attempt says."""

    facts: Facts
    subtype: str
    family: Family
    phase: Phase | None = None
    version: Version | None = None
    engine: str | None = None  # "V0" | "V1"
    problem_line: int | None = None  # of the failing text
    rank: int | None = None
    command: str | None = None
    backend: str | None = None  # "cuda" "rocm" "cpu" "tpu" "npu" "xpu" ...
    wording_era: Era | None = None  # by the log's wordings, when it prints no release
    assumed_total: int | None = None  # bytes of the device, named by the user and not by the log

    @property
    def problem(self) -> Problem | None:
        """The problem on `problem_line`; None when that line is none."""
        for problem in self.facts.problems:
            if problem.line.number == self.problem_line:
                return problem
        return None

    @property
    def text(self) -> str:
        """The failing text, "" when unknown."""
        problem = self.problem
        if problem is not None:
            return problem.text
        return "\n".join(line.text for line in self.facts.lines if line.number == self.problem_line)

    @property
    def sites(self) -> frozenset[str]:
        """Named places of the failing traceback."""
        return self.problem.sites if self.problem else frozenset()

    @property
    def on_cpu(self) -> bool:
        """Whether the KV pool lives in host RAM."""
        return self.backend == "cpu"

    def setting(self, name: str) -> Fact | None:
        """The fact `config.NAME`, from the log or else from the command line."""
        found = self.facts.get(f"config.{name}")
        if found is None and self.command:
            for fact in from_command(self.command):
                if fact.name == f"config.{name}":
                    return fact
        return found

    def setting_number(self, name: str) -> float | None:
        """`setting` as a number; None when absent or not a number."""
        fact = self.setting(name)
        return None if fact is None or isinstance(fact.value, (str, bool)) else fact.value

    def setting_text(self, name: str) -> str | None:
        """`setting` as text; None when absent."""
        fact = self.setting(name)
        return None if fact is None else str(fact.value)

    def setting_on(self, name: str) -> bool | None:
        """`setting` as a truth value; None when absent."""
        fact = self.setting(name)
        return None if fact is None else fact.value is True

    @property
    def ranks(self) -> int:
        """GPUs of one engine as far as known, at least 1."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        product = 1
        for name in sizes:
            product *= max(1, int(self.setting_number(name) or 1))
        return product

    @property
    def era(self) -> Era | None:
        """How this release budgets; None when neither release nor wordings tell."""
        return era_of(self.version, self.engine) or self.wording_era

    @property
    def charges_others(self) -> bool:
        """Whether this release takes other processes' memory off the budget; False when unknown."""
        return self.era is not None and self.era.counts_others

    @property
    def charges_graphs(self) -> bool:
        """Whether the budget sets aside CUDA graph memory (0.20.0 on); False when unknown."""
        return self.era is not None and self.era.graphs_charged

    @property
    def expandable_segments(self) -> bool:
        """Whether the log or the command switches expandable segments on."""
        shown = f"{self.setting_text('allocator') or ''} {self.command or ''}".lower().replace(
            " ", ""
        )
        return (
            "expandable_segments:true" in shown
            or "expandable_segments: memory mapping" in self.text
        )

    def default_gmu(self) -> float | None:
        """The release's own default share (0.90, from 0.20.0 on 0.92); None when the release is unknown."""
        if self.version is None and self.era is not None:
            return self.era.default_gmu
        default = default_gpu_memory_utilization(self.version)
        return 0.9 if default is None and self.engine == "V0" else default

    @property
    def training(self) -> bool:
        """Whether a trainer's own step failed, not the engine that it drives."""
        engine = {"serving", "wake_up", "weight_load", "profile_run", "kv_tensors", "graph_capture"}
        return "trainer" in self.sites and not self.sites & engine

    @property
    def unified_memory(self) -> bool:
        """Whether CPU and GPU share the device's memory: by its name, without one by its size."""
        name = self.facts.text("device.name") or ""
        gpu = by_name(name) if name else None
        if name:
            return (gpu is not None and gpu.unified) or _UNIFIED.search(name) is not None
        total = total_bytes(self.facts, self.rank).value
        alike = by_capacity(total) if total is not None and not self.on_cpu else ()
        return bool(alike) and all(gpu.unified for gpu in alike)

    @property
    def wrapped_counter(self) -> bool:
        """Whether the failing text holds a negative size printed as a number just below 2**64."""
        return _WRAPPED_COUNTER.search(self.text) is not None

    @property
    def pinned_by(self) -> str | None:
        """The setting that fixes the KV pool in place of the share; None when the share decides."""
        variable = "VLLM_CPU_KVCACHE_SPACE"
        if self.on_cpu and re.search(rf"{variable}=0*[1-9]", self.command or ""):
            return variable  # it goes before the flag
        if self.setting_number("kv_cache_memory_bytes"):
            return "--kv-cache-memory-bytes"
        if self.setting_number("num_gpu_blocks_override"):
            return "--num-gpu-blocks-override"
        if not self.on_cpu:
            return None
        rows = ("profile.cpu_explicit", "profile.cpu_explicit_fail", "kv.no_blocks_cpu")
        old = in_range(self.version, "<0.20")  # there the CPU pool never followed the share
        return variable if self.facts.seen(*rows) or old else None

    def step_limit(self, name: str, total: float | None) -> Known | None:
        """max_num_batched_tokens or max_num_seqs: as logged, else the release's default for an API server."""
        fact = self.setting(name)
        if fact is not None and not isinstance(fact.value, (str, bool)):
            return Known(float(fact.value), fact.origin, fact.line)
        limits = self._default_limits(total)
        if limits is None:
            return None
        value = limits.tokens if name == "max_num_batched_tokens" else limits.seqs
        return None if value is None else Known(float(value), Origin.ASSUMED, default=True)

    def default_step_tokens(self, total: float | None) -> int | None:
        """The release's default max_num_batched_tokens for an API server; None when unknown."""
        limits = self._default_limits(total)
        return None if limits is None else limits.tokens

    def _default_limits(self, total: float | None) -> BatchLimits | None:
        return batch_limits(
            self.version,
            self.engine,
            total=None if total is None else round(total),
            device_name=self.facts.text("device.name"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The sizes of one failure. Bytes unless the name says otherwise; None: not in the log."""

    gmu: Known | None  # ratio
    total: Known | None
    free_at_start: Known | None
    weights: Known | None
    activation: Known | None
    graph_estimate: Known | None
    graph_memory: Known | None
    budget: Known | None  # KV pool as planned; can be negative
    needed: Known | None  # KV bytes of one full-length request
    available: Known | None  # KV bytes there were for it
    asked_len: Known | None  # tokens
    estimated_len: Known | None  # tokens, by vLLM itself
    capacity_tokens: Known | None  # tokens a refused V0 pool holds
    pool_tokens: Known | None
    concurrency: Known | None  # full-length requests that fit
    tried: Known | None
    free: Known | None  # when the request failed
    allocated: Known | None
    reserved_idle: Known | None  # reserved by PyTorch but unallocated
    in_use: Known | None  # by this process
    others: Known | None  # other processes
    outside: Known | None  # other processes and non-PyTorch memory together

    def lines(self, *names: str) -> tuple[int, ...]:
        """Log lines behind the named numbers, ascending."""
        found = {getattr(self, name).line for name in names if getattr(self, name) is not None}
        return tuple(sorted(line for line in found if line is not None))

    def named(self) -> dict[str, float]:
        """Every known number by its name: the closed set that texts may use."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: known.value for name, known in found.items() if known is not None}


def read_numbers(situation: Situation) -> Numbers:
    """The numbers of a failure: those printed nearest to the failing line, of the failing rank where it has its own."""
    near = _Near(situation)
    oom = _Torch(situation)
    budget = _smallest(situation, "profile.available_kv_cache")
    total = _total(situation, near)
    return Numbers(
        gmu=_gmu(situation, near),
        total=total,
        free_at_start=_free_at_start(situation, near),
        weights=_largest(situation, "weights.memory"),
        activation=near("profile.peak_activation"),
        graph_estimate=near("profile.graph_estimate"),
        graph_memory=near("graph.memory") or near("graph.pool_actual"),
        budget=budget,
        needed=near("kv.needed"),
        available=near("kv.available") or (budget if near("kv.needed") else None),
        asked_len=near("kv.asked_len") or near("config.max_model_len"),
        estimated_len=near("kv.estimated_max_len"),
        capacity_tokens=near("kv.capacity_tokens"),
        pool_tokens=near("kv.pool_tokens"),
        concurrency=near("kv.max_concurrency"),
        tried=oom("tried"),
        free=oom("free"),
        allocated=oom("allocated"),
        reserved_idle=oom("reserved_unallocated"),
        in_use=oom("process_in_use"),
        others=oom("others"),
        outside=oom("outside_torch"),
    )


class _Torch:
    """The parts of the out-of-memory text nearest to the failing line."""

    def __init__(self, situation: Situation) -> None:
        lines = oom_lines(situation.facts)
        failed = situation.problem_line
        line = min(lines, key=lambda at: 0 if failed is None else abs(at - failed), default=None)
        self.line = line
        self.reading: OomReading | None = None if line is None else read_oom(situation.facts, line)

    def __call__(self, part: str) -> Known | None:
        value = getattr(self.reading, part) if self.reading is not None else None
        origin = Origin.DERIVED if part in ("others", "outside_torch") else Origin.LOGGED
        return None if value is None else Known(float(value), origin, self.line)


class _Near:
    """Looks a fact up: of the failing rank first, then the one printed nearest to the failing line."""

    def __init__(self, situation: Situation) -> None:
        self.facts, self.rank = situation.facts, situation.rank
        self.line = situation.problem_line

    def __call__(self, name: str) -> Known | None:
        found = [fact for fact in self.facts.all(name) if not isinstance(fact.value, (str, bool))]
        if not found:
            return None
        best = min(found, key=self._distance)
        return Known(float(best.value), best.origin, best.line)

    def _distance(self, fact: Fact) -> tuple[bool, int]:
        apart = 0 if self.line is None or fact.line is None else abs(fact.line - self.line)
        # Numbers on the failing line itself are right whatever rank the fact was given.
        other_rank = fact.rank not in (None, self.rank) and self.rank is not None and apart > 0
        return other_rank, apart


def _pick(situation: Situation, name: str, *, largest: bool) -> Known | None:
    found = [fact for fact in situation.facts.all(name) if not isinstance(fact.value, (str, bool))]
    if not found:
        return None
    best = (max if largest else min)(found, key=lambda fact: float(fact.value))
    return Known(float(best.value), best.origin, best.line)


def _smallest(situation: Situation, name: str) -> Known | None:
    """The smallest rank's value: for the KV budget the smallest decides for all."""
    return _pick(situation, name, largest=False)


def _largest(situation: Situation, name: str) -> Known | None:
    return _pick(situation, name, largest=True)


def _free_at_start(situation: Situation, near: _Near) -> Known | None:
    """Free memory before loading. One share holds for all devices: of equal ones the fullest decides."""
    found = near("device.free_at_start") or near("host.node_available")
    totals = {fact.line: fact.value for fact in situation.facts.all("device.total")}
    if found is None or situation.subtype != "kv.free_below_target" or found.line not in totals:
        return found
    alike = [
        Known(float(fact.value), fact.origin, fact.line)
        for fact in situation.facts.all("device.free_at_start")
        if not isinstance(fact.value, (str, bool)) and totals.get(fact.line) == totals[found.line]
    ]
    return min([found, *alike], key=lambda known: known.value)


def _gmu(situation: Situation, near: _Near) -> Known | None:
    share = near("config.gpu_memory_utilization")
    if share is None and (fact := situation.setting("gpu_memory_utilization")):
        share = Known(float(fact.value), Origin.LOGGED, fact.line)
    if share is not None and 0 < share.value <= 1:
        return share
    requested, total = near("device.requested"), near("device.total")
    if requested is not None and total is not None and 0 < requested.value <= total.value:
        derived = round(requested.value / total.value, 2)
        return Known(derived, Origin.DERIVED, requested.line)
    default = situation.default_gmu()
    return None if default is None else Known(default, Origin.ASSUMED, default=True)


def _total(situation: Situation, near: _Near) -> Known | None:
    """Device memory: as printed, or requested / share. Host RAM of the node on the CPU back end."""
    if situation.on_cpu and (node := near("host.node_total")):
        return node
    for name in ("device.total", "oom.total"):
        known = near(name)
        if known is not None and known.value > 0:
            return known
    requested, share = near("device.requested"), near("config.gpu_memory_utilization")
    if requested is not None and share is not None and share.value > 0:
        return Known(requested.value / share.value, Origin.DERIVED, requested.line)
    if situation.assumed_total is not None:
        return Known(float(situation.assumed_total), Origin.ASSUMED)
    printed = situation.facts.get("device.name")
    gpu = by_name(str(printed.value)) if printed is not None else None
    if gpu is None or printed is None:
        estimate = total_bytes(situation.facts, situation.rank)  # from vLLM's own two shares
        return None if estimate.value is None else Known(float(estimate.value), estimate.origin)
    return Known(float(gpu.typical_bytes), Origin.ASSUMED, printed.line)


def smallest_card_for(shortfall: float, share: float) -> float:
    """Total bytes a card needs so that `share` of it makes up for `shortfall` bytes; infinite for no share."""
    return shortfall / share if share > 0 else float("inf")


def largest_card(situation: Situation) -> int:
    """Bytes of the largest device sold for the back end: TPU chips end at 192 GiB, GPUs at 288 GB."""
    return (192 if situation.backend == "tpu" else 288) * GIB
