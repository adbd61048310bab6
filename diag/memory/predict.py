"""What vLLM will do with a card, before it is started: every memory term, the KV pool, whether it starts.

In: a `ModelShape` and a `Deployment`. Out: a `Plan` with each term's bytes, range and source, the KV pool, and the
start-up checks judged with those ranges. The budget is the era's own formula (`eras.py`).
"""

from __future__ import annotations

import math

from packaging.version import Version

from diag.memory import estimates
from diag.memory.estimates import Estimate, within
from diag.memory.kv_layout import KvLayout, kv_layout
from diag.memory.plan_model import Deployment, Plan, Pool, Term
from diag.memory.shapes import ModelShape
from diag.memory.start_checks import spread, start_checks
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
_FP8_BLOCK = 128


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
    checks = start_checks(deployment, terms, requested, budget, pool, length)
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
    tower = None
    if deployment.encoder and not deployment.language_only:
        tower = estimates.encoder(
            shape, step=deployment.step if deployment.engine == "V0" else None
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


def _budget(
    deployment: Deployment, terms: tuple[Term, ...], requested: int
) -> tuple[int, int, int]:
    """Bytes for the KV pool: expected, lowest, highest. Can be negative."""
    if deployment.kv_bytes is not None:
        return deployment.kv_bytes, deployment.kv_bytes, deployment.kv_bytes
    charged = tuple(item for item in terms if item.charged)
    down, upward = spread(charged)
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
    if deployment.tp > shape.kv_heads > 0 and not shape.latent:
        heads = f"{shape.kv_heads} KV heads on {deployment.tp} ranks"
        found.append(f"{heads}: each rank keeps a copy, more ranks save no KV.")
    width = shape.moe_intermediate or shape.intermediate
    method = deployment.quantization.method if deployment.quantization else ""
    if method == "fp8" and not deployment.expert_parallel and width % (_FP8_BLOCK * deployment.tp):
        found.append(
            f"FP8 checkpoints in blocks of {_FP8_BLOCK} do not divide by TP {deployment.tp} here; "
            "vLLM refuses them unless the experts are spread (--enable-expert-parallel)."
        )
    return tuple(found)
