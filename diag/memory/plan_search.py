"""The smallest change that makes a plan start, the best tensor-parallel size, and tables over settings.

In: a `Plan` or the parts of one. Out: `Change` and `Row` values, each computed by `predict` with the setting changed:
nothing is suggested that was not calculated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diag.errors import UsageError
from diag.memory.plan_model import Deployment, Plan
from diag.memory.predict import predict
from diag.memory.quantization import named
from diag.memory.shapes import ModelShape
from diag.memory.weights import possible_tp
from diag.units import GIB, format_gib

_STEP = 0.01  # of the share
_MOST_PAIRS, _MOST_CARDS = 4, 8
_CLEAR = 32  # lengths are suggested in multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed setting: what to type, what it gives, what it costs; `plan` was computed with it."""

    flags: str
    gives: str
    costs: str
    plan: Plan
    maker: str = ""  # which setting it changes: two of a pair change two


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination of a table. `plan` None: it can't be divided so; `why` says it."""

    label: str
    plan: Plan | None
    why: str = ""

    @property
    def tokens(self) -> int:
        """KV tokens of all replicas."""
        if self.plan is None or self.plan.pool is None or self.plan.starts is False:
            return 0
        return self.plan.pool.tokens * self.plan.deployment.dp


def changes(plan: Plan) -> tuple[Change, ...]:
    """Single changes that make a plan start, least given up first; pairs when no single one does with these cards."""
    if plan.starts:
        return ()
    single = [change for change in _single(plan) if _better(change.plan, plan)]
    sure = [change for change in single if change.plan.starts]
    if any(change.plan.deployment.gpus <= plan.deployment.gpus for change in sure):
        return tuple(sure)
    pairs = [item for first in _single(plan) for item in _single(first.plan, after=first)]
    found = [
        change
        for change in pairs
        if change.plan.starts and change.plan.deployment.gpus <= plan.deployment.gpus
    ]
    found.sort(key=lambda change: -change.plan.length)  # least context given up first
    return (*found[:_MOST_PAIRS], *sure) or tuple(single[:_MOST_PAIRS])


def _better(new: Plan, old: Plan) -> bool:
    """It starts, or it is at least no longer certain to fail."""
    return new.starts is True or (old.starts is False and new.starts is None)


def _single(plan: Plan, after: Change | None = None) -> Iterator[Change]:
    makers = (_share, _seqs, _eager, _step, _cache_dtype, _length, _ranks, _format)
    for maker in makers:
        for made in maker(plan):
            change = replace(made, maker=maker.__name__)
            if after is None:
                yield change
            elif change.maker != after.maker:
                yield _joined(after, change)


def _joined(first: Change, second: Change) -> Change:
    """Two changes as one; the second was computed on top of the first."""
    both = f"{first.flags} {second.flags}".startswith("--") and second.flags.startswith("--")
    costs = dict.fromkeys(f"{first.costs}; {second.costs}".split("; "))  # each said once
    return replace(
        second,
        flags=f"{first.flags}{' ' if both else ', '}{second.flags}",
        costs="; ".join(costs),
    )


def _try(plan: Plan, flags: str, costs: str, changed: Deployment) -> Iterator[Change]:
    try:
        new = predict(plan.shape, changed)
    except UsageError:
        return
    if new.pool is not None:
        gives = f"pool {format_gib(new.pool.bytes)} GiB, {new.pool.tokens:,} tokens"
        if new.pool.concurrency >= 1:
            gives += f", {new.pool.concurrency:,.1f} requests of {new.length:,}"
    else:
        gives = "fits"
    yield Change(flags=flags, gives=gives, costs=costs, plan=new)


def _share(plan: Plan) -> Iterator[Change]:
    """The share raised or lowered to where every check passes: the value with the least change."""
    if plan.deployment.kv_bytes is not None:
        return
    gmu = plan.deployment.gmu
    values = [round(gmu + sign * step * _STEP, 2) for step in range(1, 90) for sign in (1, -1)]
    for value in values:
        if not 0.05 <= value <= 0.98:
            continue
        changed = replace(plan.deployment, gmu=value)
        if predict(plan.shape, changed).starts:
            costs = "less headroom for what is not planned" if value > gmu else "a smaller KV pool"
            yield from _try(plan, f"--gpu-memory-utilization {value:.2f}", costs, changed)
            return


def _seqs(plan: Plan) -> Iterator[Change]:
    for seqs in (256, 128, 64, 16):
        if seqs < plan.deployment.seqs:
            changed = replace(plan.deployment, seqs=seqs)
            if predict(plan.shape, changed).starts or seqs == 16:
                yield from _try(plan, f"--max-num-seqs {seqs}", "fewer requests at once", changed)
                return


def _step(plan: Plan) -> Iterator[Change]:
    for step in (4096, 2048, 1024):
        if step < plan.deployment.step:
            changed = replace(plan.deployment, step=step)
            if predict(plan.shape, changed).starts or step == 1024:
                yield from _try(plan, f"--max-num-batched-tokens {step}", "slower prompts", changed)
                return


def _eager(plan: Plan) -> Iterator[Change]:
    if not plan.deployment.eager and plan.term("cuda_graphs"):
        changed = replace(plan.deployment, eager=True)
        yield from _try(plan, "--enforce-eager", "slower decoding", changed)


def _cache_dtype(plan: Plan) -> Iterator[Change]:
    if plan.layout is not None and plan.layout.element_bytes > 1:
        changed = replace(plan.deployment, kv_dtype="fp8")
        yield from _try(
            plan, "--kv-cache-dtype fp8", "a little accuracy; output may differ", changed
        )


def _length(plan: Plan) -> Iterator[Change]:
    pool = plan.pool
    if pool is None or pool.longest_low < _CLEAR:
        return
    length = pool.longest_low // _CLEAR * _CLEAR
    if length < plan.length:
        less = 100 * (1 - length / plan.length)
        changed = replace(plan.deployment, length=length)
        yield from _try(plan, f"--max-model-len {length}", f"context -{less:.0f} %", changed)


def _ranks(plan: Plan) -> Iterator[Change]:
    """More ranks: of the cards at hand, else the fewest further cards that do."""
    own = plan.deployment
    for tp in possible_tp(plan.shape, max(own.gpus, _MOST_CARDS)):
        if tp <= own.tp:
            continue
        flags, changed = f"--tensor-parallel-size {tp}", replace(own, tp=tp, dp=1)
        if tp * own.pp <= own.gpus:
            changed = replace(changed, dp=max(1, own.gpus // (tp * own.pp)))
            yield from _try(plan, flags, "more cards for one replica", changed)
        elif own.instances == 1 and predict(plan.shape, changed).starts:
            changed = replace(changed, gpus=tp * own.pp)
            yield from _try(plan, f"{tp * own.pp} such cards with {flags}", "more cards", changed)
            return


def _format(plan: Plan) -> Iterator[Change]:
    if plan.deployment.quantization is not None:
        return
    for method, words in (
        ("fp8", "an FP8 checkpoint of the model"),
        ("awq", "a 4-bit checkpoint of the model"),
    ):
        changed = replace(plan.deployment, quantization=named(method))
        yield from _try(plan, words, "output may differ", changed)


def best_parallel(shape: ModelShape, deployment: Deployment) -> tuple[Row, ...]:
    """Every tensor-parallel size for the cards at hand, replicas filling the rest; best first.

    Best: it starts, then most KV tokens of all replicas together, then fewest ranks a replica.
    """
    rows: list[Row] = []
    for tp in possible_tp(shape, deployment.gpus):
        if deployment.gpus % tp:
            continue
        pp = 1
        changed = replace(deployment, tp=tp, pp=pp, dp=deployment.gpus // tp)
        rows.append(
            _row(
                shape,
                changed,
                f"TP {tp} x {deployment.gpus // tp} replica{'s' if tp < deployment.gpus else ''}",
            )
        )
    rank = {True: 0, None: 1, False: 2}
    return tuple(
        sorted(
            rows,
            key=lambda row: (
                rank[row.plan.starts] if row.plan else 3,
                -row.tokens,
                row.plan.deployment.tp if row.plan else 0,
            ),
        )
    )


def _row(shape: ModelShape, deployment: Deployment, label: str) -> Row:
    try:
        return Row(label=label, plan=predict(shape, deployment))
    except UsageError as error:
        return Row(label=label, plan=None, why=str(error))


def sweep(shape: ModelShape, deployment: Deployment) -> tuple[Row, ...]:
    """Lengths x tensor-parallel sizes x KV dtypes."""
    context = shape.context or 8192
    lengths = [
        length
        for length in (4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
        if length <= context
    ]
    if context not in lengths:
        lengths.append(context)
    dtypes = ("auto", "fp8")
    rows = []
    for tp in possible_tp(shape, deployment.gpus):
        if deployment.gpus % tp:
            continue
        for dtype in dtypes:
            for length in lengths:
                changed = replace(
                    deployment, tp=tp, dp=deployment.gpus // tp, kv_dtype=dtype, length=length
                )
                rows.append(_row(shape, changed, f"TP {tp}, KV {dtype}, {length:,}"))
    return tuple(rows)


def instance_share(shape: ModelShape, deployment: Deployment, instances: int) -> float:
    """The share that each of several instances on one card can have: context and unplanned parts left free."""
    alone = predict(shape, replace(deployment, instances=1))
    outside = sum(
        item.high for item in alone.terms if not item.charged and item.term != "other_processes"
    )
    each = (deployment.total - deployment.used) / instances - outside
    return max(0.01, math.floor(100 * each / deployment.total) / 100)


def share_of_limit(limit: int, deployment: Deployment) -> float:
    """The share that keeps one instance, with all outside of the share, within a limit in bytes.

    Raises: UsageError when nothing is left.
    """
    share = math.floor(1000 * limit / deployment.total) / 1000
    if not 0 < share <= 1:
        raise UsageError(
            f"--limit-gib {limit / GIB:.1f} is not within the card's {deployment.total / GIB:.1f} GiB"
        )
    return share
