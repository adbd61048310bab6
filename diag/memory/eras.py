"""Which formula a vLLM release budgets GPU memory by, and its defaults that depend on the release
alone.

In: a comparable release and the engine generation, or only the traces a log leaves of them. Out: an
`Era`, the default `gpu_memory_utilization`, bounds of the release. Read from 46 releases 0.2.7 to
0.33.0; 0.6.4 is known from its log lines.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from diag.release import as_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from diag.facts.model import Facts
    from diag.log.model import LogLine

_V1_OPT_IN = Version("0.6.6")
_V1_DEFAULT = Version("0.8.0")
_V1_ONLY = Version("0.11.0")
_RAISED_DEFAULT = Version("0.19.2")  # builds after 0.19.1 charge the graphs and plan with 0.92


class Era(str, Enum):
    """One way of computing the KV budget. The value is the letter shown in reports."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"
    E = "E"
    F = "F"
    G = "G"
    H = "H"
    I = "I"  # noqa: E741 - the eras are named by letters

    @property
    def releases(self) -> str:
        """The releases it covers, in words."""
        return _RELEASES[self]

    @property
    def engine(self) -> str:
        """Engine generation it was written for: "V0" or "V1"."""
        return "V0" if self in (Era.A, Era.B, Era.C) else "V1"

    @property
    def formula(self) -> str:
        """The KV budget in words."""
        return _FORMULAS[self]

    @property
    def free_check(self) -> bool:
        """Start-up is refused when less than the requested memory is free."""
        return self in (Era.E, Era.F, Era.G, Era.H, Era.I)

    @property
    def counts_others(self) -> bool:
        """Memory of other processes is charged to this instance's share."""
        return self in (Era.A, Era.D)

    @property
    def counts_context(self) -> bool:
        """The CUDA context of this process is charged to the share."""
        return self in (Era.A, Era.D)

    @property
    def counts_nccl(self) -> bool:
        """NCCL's start-up buffers are charged to the share (later growth always is)."""
        return self in (Era.A, Era.B, Era.C, Era.D, Era.E)

    @property
    def graphs_estimated(self) -> bool:
        """An estimate of the CUDA graphs is made and printed."""
        return self in (Era.G, Era.H, Era.I)

    @property
    def graphs_charged(self) -> bool:
        """The estimate is taken off the KV budget by default."""
        return self in (Era.H, Era.I)

    @property
    def default_gmu(self) -> float:
        """Default `gpu_memory_utilization`."""
        return 0.92 if self.graphs_charged else 0.90


_RELEASES = {
    Era.A: "up to 0.3.3",
    Era.B: "0.4.0 to 0.6.3",
    Era.C: "0.6.5 to 0.10.2 (V0)",
    Era.D: "0.6.4 (V0), up to 0.9.0 (V1)",
    Era.E: "0.9.1 to 0.10.2 (V1)",
    Era.F: "0.11.0 to 0.17",
    Era.G: "0.18.0 to 0.19.1",
    Era.H: "0.20.0 to 0.26.0",
    Era.I: "after 0.26.0",
}
_FORMULAS = {
    Era.A: "requested - everything in use on the device after the profile run",
    Era.B: "requested - growth of the device's use since this process set up its context",
    Era.C: "requested - weights - peak activation - growth of non-torch memory",
    Era.D: "requested - torch's peak - everything else in use on the device",
    Era.E: "requested - weights - peak activation - growth of non-torch memory (NCCL included)",
    Era.F: "requested - weights - peak activation - growth of non-torch memory after NCCL",
    Era.G: "requested - weights - peak activation - growth of non-torch memory (graphs estimated)",
    Era.H: "requested - weights - peak activation - growth of non-torch memory - estimated graphs",
    Era.I: "requested - growth of the device's use - releasable peak activation - estimated graphs",
}
# First release of each era, newest first.
_V1_FROM = (
    (Version("0.26.1"), Era.I),
    (Version("0.19.2"), Era.H),
    (Version("0.18.0"), Era.G),
    (Version("0.11.0"), Era.F),
    (Version("0.9.1"), Era.E),
    (Version("0"), Era.D),
)
_V0_FROM = (
    (Version("0.6.5"), Era.C),
    (Version("0.6.4"), Era.D),
    (Version("0.4.0"), Era.B),
    (Version("0"), Era.A),
)
# Where the formula or a default of it changes: a range of releases inside one slot has one era per
# engine.
_BORDERS = sorted({release for release, _ in (*_V1_FROM, *_V0_FROM)} | {_V1_OPT_IN, _V1_DEFAULT})


def default_engine(version: Version | None) -> str | None:
    """Engine generation that a release starts by itself; None when the release is unknown."""
    if version is None:
        return None
    return "V1" if as_release(version) >= _V1_DEFAULT else "V0"


def era_of(version: Version | None, engine: str | None = None) -> Era | None:
    """The era of a release; an engine generation that the release does not have is overruled by the
    release.

    >>> from packaging.version import Version
    >>> era_of(Version("0.8.5"), "V1"), era_of(Version("0.8.5"), "V0"), era_of(Version("0.20.1"))
    (<Era.D: 'D'>, <Era.C: 'C'>, <Era.H: 'H'>)
    """
    if version is None:
        return None
    release = as_release(version)
    generation = engine if engine in ("V0", "V1") else default_engine(version)
    if release >= _V1_ONLY:
        generation = "V1"
    elif release < _V1_OPT_IN:
        generation = "V0"
    table = _V1_FROM if generation == "V1" else _V0_FROM
    return next(era for first, era in table if release >= first)


def era_within(low: Version | None, high: Version | None, engine: str | None = None) -> Era | None:
    """The era of all releases from `low` to below `high`; None when they differ."""
    if low is None and high is None:
        return None
    bottom = as_release(low) if low is not None else Version("0")
    points = [
        bottom,
        *(edge for edge in _BORDERS if edge > bottom and (high is None or edge < high)),
    ]
    eras = {era_of(point, engine) for point in points}
    return eras.pop() if len(eras) == 1 else None


def default_gpu_memory_utilization(version: Version | None) -> float | None:
    """Share of the total that a release plans with by default: 0.90 up to 0.19.1, then 0.92."""
    if version is None:
        return None
    return 0.92 if as_release(version) >= _RAISED_DEFAULT else 0.90


# --- evidence in the log when no version is printed
# --------------------------------------------------------------

_V1_SOURCES = frozenset(
    {
        "gpu_worker.py",
        "gpu_model_runner.py",
        "core.py",
        "core_client.py",
        "kv_cache_utils.py",
        "kv_cache_planning.py",
        "model_runner_v1.py",
        "worker_v1.py",
        "multiproc_executor.py",
        "cpu_worker.py",
        "tpu_worker.py",
        "loggers.py",
        "async_llm.py",
    }
)
_V0_SOURCES = frozenset(
    {
        "gpu_executor.py",
        "ray_gpu_executor.py",
        "multiproc_gpu_executor.py",
        "distributed_gpu_executor.py",
        "multiproc_worker_utils.py",
        "ray_distributed_executor.py",
        "executor_base.py",
        "async_llm_engine.py",
        "llm_engine.py",
        "worker.py",
        "model_runner.py",
        "metrics.py",
    }
)
_SHARED_SOURCES = frozenset(  # of both generations, or of forks: too weak to decide alone
    {
        "multiproc_executor.py",
        "ray_distributed_executor.py",
        "executor_base.py",
        "llm_engine.py",
        "model_runner.py",
    }
    | {"worker.py", "metrics.py", "loggers.py", "core.py"}
)
# Process names: engine generation and the releases that use them.
_SPEAKERS = (
    (re.compile(r"VllmWorkerProcess"), "V0", ">=0.4.3,<0.10.1"),
    (re.compile(r"RayWorkerVllm"), "V0", "<0.5"),
    (re.compile(r"VllmWorker"), "V1", ">=0.7.0,<0.10.1"),
    (re.compile(r"EngineCore_\d+"), "V1", ">=0.10.1,<0.10.2"),
    (re.compile(r"EngineCore_DP\d+"), "V1", ">=0.10.2"),
    (re.compile(r"EngineCore"), "V1", ">=0.18.0"),
    (re.compile(r"Worker(?:_(?:TP|PP|DP|EP|DCP|PCP)\d+)+"), "V1", ">=0.10.2"),
    (re.compile(r"APIServer(?:_\d+)?"), "V1", ">=0.10.1"),
)


def infer_engine(facts: Facts) -> str | None:
    """Engine generation by what the log shows: the logged one, process names, file names of lines,
    V0-only facts.

    None when nothing tells or the traces contradict each other.
    """
    logged = facts.text("vllm.engine")
    if logged in ("V0", "V1"):
        return logged
    for votes in (_speaker_votes(facts), _source_votes(facts, strict=True), _fact_votes(facts)):
        if len(votes) == 1:
            return next(iter(votes))
    votes = _source_votes(facts, strict=False)
    return next(iter(votes)) if len(votes) == 1 else None


def infer_release_range(
    facts: Facts, releases: Mapping[str, str]
) -> tuple[Version | None, Version | None]:
    """Bounds of the release from the wordings and process names of a log.

    `releases` maps catalogue row ids to the PEP 440 range of releases that print them. Returns
    (low, high): the release is at least `low` and below `high`. Rows that contradict the majority
    are left out; (None, None) when fewer than three in four agree.
    """
    ranges = [
        _bounds(releases[row])
        for row in sorted({event.row for event in facts.events} & set(releases))
    ]
    names = {line.speaker.process for line in _all_lines(facts)} - {None}
    for name in sorted(str(name) for name in names):
        hit = next((spec for pattern, _, spec in _SPEAKERS if pattern.fullmatch(name)), None)
        if hit is not None:
            ranges.append(_bounds(hit))
    known = [pair for pair in ranges if pair != (None, None)]
    return _intersect(known)


def _intersect(
    ranges: list[tuple[Version | None, Version | None]],
) -> tuple[Version | None, Version | None]:
    """The tightest bounds most ranges agree on."""
    if not ranges:
        return None, None
    points = sorted({low for low, _ in ranges if low is not None} | {Version("0")})
    holding = {point: [pair for pair in ranges if _covers(pair, point)] for point in points}
    best = max(points, key=lambda point: (len(holding[point]), point))
    kept = holding[best]
    if len(kept) * 4 < len(ranges) * 3:
        return None, None
    lows = [low for low, _ in kept if low is not None]
    highs = [high for _, high in kept if high is not None]
    return (max(lows) if lows else None), (min(highs) if highs else None)


def _covers(pair: tuple[Version | None, Version | None], point: Version) -> bool:
    low, high = pair
    return (low is None or low <= point) and (high is None or point < high)


def _bounds(spec: str) -> tuple[Version | None, Version | None]:
    """Lower end (inside) and upper end (outside) of a PEP 440 range; None: no such end."""
    lows: list[Version] = []
    highs: list[Version] = []
    try:
        for part in SpecifierSet(spec):
            wild = part.version.endswith(".*")
            version = Version(part.version.removesuffix(".*"))
            if part.operator in (">=", ">", "==", "~="):
                lows.append(version)
            if part.operator == "<":
                highs.append(version)
            elif part.operator in ("<=", "=="):
                highs.append(_next_release(version, wild=wild))
    except (InvalidSpecifier, InvalidVersion):
        return None, None
    return (max(lows) if lows else None), (min(highs) if highs else None)


def _next_release(version: Version, *, wild: bool) -> Version:
    """The release number after `version`; with `wild` after its whole series."""
    if wild:
        *head, last = version.release
        return Version(".".join(str(part) for part in (*head, last + 1)))
    return Version(f"{version.major}.{version.minor}.{version.micro + 1}")


def _all_lines(facts: Facts) -> Iterable[LogLine]:
    yield from facts.lines
    yield from (event.line for event in facts.events)


def _speaker_votes(facts: Facts) -> frozenset[str]:
    names = Counter(line.speaker.process for line in _all_lines(facts) if line.speaker.process)
    found = set()
    for name in names:
        hit = next((engine for pattern, engine, _ in _SPEAKERS if pattern.fullmatch(name)), None)
        if hit is not None:
            found.add(hit)
    return frozenset(found)


def _source_votes(facts: Facts, *, strict: bool) -> frozenset[str]:
    names = {(line.source or "").split(":")[0].rsplit("/", 1)[-1] for line in _all_lines(facts)}
    if strict:
        names -= _SHARED_SOURCES
    found = set()
    if names & _V1_SOURCES:
        found.add("V1")
    if names & _V0_SOURCES:
        found.add("V0")
    return frozenset(found)


def _fact_votes(facts: Facts) -> frozenset[str]:
    found = set()
    if facts.get("kv.cpu_blocks") or facts.get("kv.capacity_tokens"):
        found.add("V0")
    if facts.get("kv.needed") or facts.get("kv.pool_tokens"):
        found.add("V1")
    return frozenset(found)
