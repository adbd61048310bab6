"""What a plan is made of: the deployment asked about, its terms, its pool, its checks.

Plain data. Sizes in bytes, lengths in tokens; `low` and `high` are the range of an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from diag.memory.eras import Era
from diag.memory.kv_layout import KvLayout
from diag.memory.quantization import Quantization
from diag.memory.shapes import ModelShape
from diag.memory.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """How the model is to be served, all defaults resolved. Sizes in bytes, lengths in tokens.

    `length` None: as long as fits ("auto"). `used` is what other processes hold on each card; `instances` share one.
    """

    version: Version | None
    engine: str
    era: Era
    total: int
    gpu_name: str
    capability: str | None = None
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    gmu: float = 0.92
    length: int | None = None
    step: int = 2048
    seqs: int = 256
    dtype: str | None = None
    kv_dtype: str | None = None
    quantization: Quantization | None = None
    block_size: int | None = None
    eager: bool = False
    hybrid: bool = True
    language_only: bool = False
    encoder: bool = True
    estimate_graphs: bool | None = None  # None: as the release does
    graph_top: int | None = None  # largest captured batch
    kv_bytes: int | None = None
    offload: int = 0  # bytes of weights kept in host memory
    draft_tokens: int = 0
    used: int = 0
    instances: int = 1

    @property
    def graphs_charged(self) -> bool:
        """Whether the estimate of the graphs is taken off the pool."""
        chosen = self.era.graphs_charged if self.estimate_graphs is None else self.estimate_graphs
        return chosen and self.era.graphs_estimated and not self.eager


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of a card's memory. `charged`: taken off this instance's share before the KV pool."""

    term: str
    label: str
    bytes: int
    low: int
    high: int
    source: str
    charged: bool

    @property
    def error_pct(self) -> int | None:
        """Half the range in percent; None when it is exact."""
        if self.bytes <= 0 or self.low == self.high:
            return None
        return round(100 * max(self.bytes - self.low, self.high - self.bytes) / self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One of the start-up checks. `ok` None: within the range of the estimates. `why` is its sum in words."""

    name: str
    ok: bool | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The KV pool. Bytes with their range; tokens and concurrency as vLLM would print them."""

    bytes: int
    low: int
    high: int
    token_bytes: float
    tokens: int
    concurrency: float
    request_bytes: int
    longest: int
    longest_low: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The memory of the fullest rank. `starts` None: too close to call."""

    shape: ModelShape
    deployment: Deployment
    weights: Weights
    terms: tuple[Term, ...]
    requested: int
    pool: Pool | None  # None: the model keeps no KV cache
    layout: KvLayout | None
    length: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def starts(self) -> bool | None:
        """All checks pass, one fails, or it is too close to call."""
        answers = {check.ok for check in self.checks}
        return False if False in answers else None if None in answers else True

    def term(self, name: str) -> Term | None:
        """A term by its name."""
        return next((item for item in self.terms if item.term == name), None)
