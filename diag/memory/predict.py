"""What vLLM will do with a card, before it is started: every memory term, the KV pool, whether it starts.

In: a `ModelShape` and a `Deployment`. Out: a `Plan` with each term's bytes, range and source, the KV pool, and the three
start-up checks judged with those ranges. The budget is the era's own formula (`eras.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from packaging.version import Version

from diag.memory import estimates
from diag.memory.eras import Era
from diag.memory.estimates import Estimate, within
from diag.memory.kv_cache import ceil_div
from diag.memory.kv_layout import KvLayout, kv_layout
from diag.memory.quantization import Quantization
from diag.memory.shapes import ModelShape
from diag.memory.weights import Weights, weights_bytes
from diag.release import as_release
from diag.units import format_gib

KEPT_BESIDE_WEIGHTS = (
    1.003  # buffers that loading leaves beside the checkpoint's tensors, fitted to logs
)
_KEPT_NEWER, _NEWER = 1.009, Version("0.19.0")
_SYMMETRIC_FROM = Version("0.11.0")
DEFAULT_LENGTH = 8192
_V0_IMAGE_TOKENS = 1225


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """How the model is to be served, all defaults resolved. Sizes in bytes, lengths in tokens.

    `length` None: as long as fits ("auto"). `used` is what other processes hold on each card. `instances` share one card.
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


def predict(shape: ModelShape, deployment: Deployment) -> Plan:
    """The plan of one deployment.

    Raises: UsageError when the model can't be divided so, or a dtype is not known.
    """
    weights = weights_bytes(
        shape,
        dtype=deployment.dtype,
        quantization=deployment.quantization,
        tp=deployment.tp,
        pp=deployment.pp,
        expert_ranks=deployment.tp * deployment.dp if deployment.expert_parallel else None,
        language_only=deployment.language_only,
    )
    terms = _terms(shape, deployment, weights)
    requested = math.ceil(deployment.total * deployment.gmu)
    layout = kv_layout(
        shape,
        version=deployment.version,
        engine=deployment.engine,
        kv_dtype=deployment.kv_dtype,
        dtype=deployment.dtype,
        tp=deployment.tp,
        pp=deployment.pp,
        block_size=deployment.block_size,
        step=deployment.step,
        hybrid=deployment.hybrid,
    )
    own = deployment.length or shape.context or DEFAULT_LENGTH
    budget = _budget(deployment, terms, requested)
    pool = None if layout is None else _pool(layout, budget, deployment, shape)
    length = own if pool is None or deployment.length else max(1, pool.longest)
    checks = _checks(shape, deployment, terms, requested, budget, pool, length)
    return Plan(
        shape=shape,
        deployment=deployment,
        weights=weights,
        terms=terms,
        requested=requested,
        pool=pool,
        layout=layout,
        length=length,
        checks=checks,
        notes=(*shape.notes, *_notes(shape, deployment, layout)),
    )


# --- terms ------------------------------------------------------------------------------------------------------


def _terms(shape: ModelShape, deployment: Deployment, weights: Weights) -> tuple[Term, ...]:
    era, ranks = deployment.era, deployment.tp * deployment.pp
    symmetric = deployment.version is None or as_release(deployment.version) >= _SYMMETRIC_FROM
    met = max(ranks, deployment.dp if shape.experts else 1)
    talk = estimates.collectives(met, deployment.capability, symmetric=symmetric)
    found = [
        _term("context", "CUDA context", estimates.context(), charged=era.counts_context),
        _term("collectives", "collectives", talk, charged=era.counts_nccl),
        _term("weights", "weights", _loaded(deployment, weights), charged=True),
        _term("peak_activation", "peak activation", _activation(shape, deployment), charged=True),
        _term(
            "non_torch",
            "non-torch memory",
            estimates.non_torch(ranks, early=era.engine == "V0"),
            charged=True,
        ),
    ]
    if deployment.used or deployment.instances > 1:
        held = _others(deployment, found)
        found.insert(
            0, _term("other_processes", "other processes", held, charged=era.counts_others)
        )
    if not deployment.eager and not shape.pooling:
        sizes = estimates.capture_sizes(
            deployment.version, deployment.engine, deployment.seqs, largest=deployment.graph_top
        )
        graphs = estimates.graphs(shape, sizes=sizes, tp=deployment.tp)
        found.append(_term("cuda_graphs", "CUDA graphs", graphs, charged=deployment.graphs_charged))
    return tuple(item for item in found if item.bytes or item.high)


def _term(name: str, label: str, size: Estimate, *, charged: bool) -> Term:
    return Term(
        term=name,
        label=label,
        bytes=size.bytes,
        low=size.low,
        high=size.high,
        source=size.source,
        charged=charged,
    )


def _loaded(deployment: Deployment, weights: Weights) -> Estimate:
    newer = deployment.version is None or as_release(deployment.version) >= _NEWER
    value = weights.total * (_KEPT_NEWER if newer else KEPT_BESIDE_WEIGHTS)
    size = within(value, weights.error_pct, weights.source)
    if not deployment.offload:
        return size
    away = min(deployment.offload, size.bytes)
    return Estimate(
        bytes=size.bytes - away,
        low=max(0, size.low - away),
        high=size.high - away,
        source=f"{size.source}, less {format_gib(away)} GiB in host memory",
    )


def _activation(shape: ModelShape, deployment: Deployment) -> Estimate:
    rows = deployment.seqs
    if deployment.engine == "V0" and shape.multimodal:
        rows = max(
            1, deployment.step // _V0_IMAGE_TOKENS
        )  # V0 profiles as many requests as images fit
    text = estimates.activation(
        shape,
        version=deployment.version,
        step=deployment.step,
        seqs=rows,
        tp=deployment.tp,
        draft_tokens=deployment.draft_tokens,
    )
    tower = (
        estimates.encoder(shape) if deployment.encoder and not deployment.language_only else None
    )
    if tower is None or tower.bytes <= text.bytes:
        return text
    return Estimate(
        bytes=tower.bytes, low=text.low, high=max(tower.high, text.high), source=tower.source
    )


def _others(deployment: Deployment, own: list[Term]) -> Estimate:
    """What else is on the card: as given, and the instances that started before."""
    outside = sum(item.bytes for item in own if not item.charged)
    each = math.ceil(deployment.total * deployment.gmu) + outside
    value = deployment.used + (deployment.instances - 1) * each
    words = ["as given"] if deployment.used else []
    if deployment.instances > 1:
        words.append(
            f"{deployment.instances - 1} more like this one, each with its share and context"
        )
    return Estimate(bytes=value, low=value, high=value, source=" and ".join(words))


# --- the pool -----------------------------------------------------------------------------------------------------


def _spread(terms: tuple[Term, ...]) -> tuple[int, int]:
    """How far a sum of terms can be lower and higher: the parts are independent, their squares add."""
    down = math.sqrt(sum((item.bytes - item.low) ** 2 for item in terms))
    upward = math.sqrt(sum((item.high - item.bytes) ** 2 for item in terms))
    return round(down), round(upward)


def _budget(
    deployment: Deployment, terms: tuple[Term, ...], requested: int
) -> tuple[int, int, int]:
    """Bytes for the KV pool: expected, lowest, highest. Can be negative."""
    if deployment.kv_bytes is not None:
        return deployment.kv_bytes, deployment.kv_bytes, deployment.kv_bytes
    charged = tuple(item for item in terms if item.charged)
    down, upward = _spread(charged)
    middle = requested - sum(item.bytes for item in charged)
    return middle, middle - upward, middle + down


def _pool(
    layout: KvLayout, budget: tuple[int, int, int], deployment: Deployment, shape: ModelShape
) -> Pool:
    middle, low, high = budget
    most = deployment.length or shape.context or DEFAULT_LENGTH
    longest = layout.longest(middle, max(most, shape.context or most))
    length = most if deployment.length else max(1, longest)
    return Pool(
        bytes=middle,
        low=low,
        high=high,
        token_bytes=layout.token_bytes,
        tokens=layout.tokens(middle, length),
        concurrency=layout.concurrency(middle, length),
        request_bytes=layout.request_bytes(length),
        longest=longest,
        longest_low=layout.longest(low, max(most, shape.context or most)),
    )


# --- checks -------------------------------------------------------------------------------------------------------


def _checks(  # noqa: PLR0913, PLR0917 - the parts of the plan
    shape: ModelShape,
    deployment: Deployment,
    terms: tuple[Term, ...],
    requested: int,
    budget: tuple[int, int, int],
    pool: Pool | None,
    length: int,
) -> tuple[Check, ...]:
    found = [_load_check(deployment, terms)]
    if deployment.era.free_check:
        found.append(_free_check(deployment, terms, requested))
    if pool is None:
        return tuple(found)
    middle, low, high = budget
    found.append(
        Check(
            name="KV blocks",
            ok=_judge(low, high, 0),
            why=f"{format_gib(requested)} requested leave {format_gib(middle)} GiB for the KV pool",
        )
    )
    needed = pool.request_bytes
    if deployment.length is None:
        ok = None if pool.longest_low < 1 <= pool.longest else pool.longest >= 1
        why = f"the longest length that fits is {pool.longest:,} tokens"
    else:
        ok = _judge(low, high, needed)
        why = f"one request of {length:,} tokens needs {format_gib(needed)} of {format_gib(middle)} GiB"
    found.append(Check(name="length", ok=ok, why=why))
    found.append(_headroom_check(deployment, terms, requested))
    return tuple(found)


def _judge(low: int, high: int, needed: int) -> bool | None:
    """Whether a size is surely enough, surely too small, or neither."""
    if low > 0 and low >= needed:
        return True
    return False if high <= 0 or high < needed else None


def _load_check(deployment: Deployment, terms: tuple[Term, ...]) -> Check:
    """The weights and the context must fit the card at all."""
    parts = tuple(
        item
        for item in terms
        if item.term in ("context", "collectives", "weights", "other_processes")
    )
    taken = sum(item.bytes for item in parts)
    down, upward = _spread(parts)
    ok = _judge(deployment.total - upward, deployment.total + down, taken)
    weights = next(item for item in terms if item.term == "weights")
    return Check(
        name="weights",
        ok=ok,
        why=f"{format_gib(weights.bytes)} GiB of weights, {format_gib(taken)} with context and others, "
        f"on {format_gib(deployment.total)} GiB",
    )


def _free_check(deployment: Deployment, terms: tuple[Term, ...], requested: int) -> Check:
    """Free memory at start must reach the requested share."""
    names = (
        "context",
        "other_processes",
        *(() if deployment.era.counts_nccl else ("collectives",)),
    )
    taken = tuple(item for item in terms if item.term in names)
    free = deployment.total - sum(item.bytes for item in taken)
    down, upward = _spread(taken)
    return Check(
        name="free memory",
        ok=_judge(free - upward, free + down, requested),
        why=f"{deployment.gmu:.4g} x {format_gib(deployment.total)} = {format_gib(requested)} GiB asked, "
        f"about {format_gib(free)} free",
    )


def _headroom_check(deployment: Deployment, terms: tuple[Term, ...], requested: int) -> Check:
    """What is outside of the share must have room beside it: graphs before they were planned, the context."""
    outside = tuple(item for item in terms if not item.charged)
    room = deployment.total - requested
    if deployment.kv_bytes is not None:
        charged = sum(item.bytes for item in terms if item.charged)
        room = deployment.total - charged - deployment.kv_bytes
    taken = sum(item.bytes for item in outside)
    down, upward = _spread(outside)
    words = ", ".join(item.label for item in outside) or "nothing"
    return Check(
        name="headroom",
        ok=_judge(room - upward, room + down, taken) if outside else True,
        why=f"{format_gib(room)} GiB beside the share for about {format_gib(taken)} GiB ({words})",
    )


def _notes(shape: ModelShape, deployment: Deployment, layout: KvLayout | None) -> tuple[str, ...]:
    found: list[str] = []
    if layout is not None and layout.as_full:
        found.append(
            "This release keeps every layer's whole past: the model's windows save no memory."
        )
    if layout is not None and layout.padding_layers:
        found.append(
            f"{layout.padding_layers} padding layers fill up unequal groups of the KV cache."
        )
    if deployment.kv_bytes is not None:
        found.append("A pinned KV size is not checked against free memory by vLLM.")
    if deployment.length and shape.context and deployment.length > shape.context:
        found.append(
            f"The model's own limit is {shape.context:,} tokens; vLLM refuses more by default."
        )
    if (
        ceil_div(shape.kv_heads or 1, deployment.tp) * deployment.tp > shape.kv_heads > 0
        and not shape.latent
    ):
        found.append(
            f"{shape.kv_heads} KV heads on {deployment.tp} ranks: each rank keeps a copy, more ranks save no KV."
        )
    return tuple(found)
