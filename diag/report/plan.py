"""A memory plan as text, Markdown or JSON.

In: a `Plan`, the changes and rows computed for it. Out: one string in the look of the other answers. Numbers carry
their range and their source; an estimate is called one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from diag import __version__
from diag.memory.plan_model import Check, Plan, Term
from diag.memory.plan_search import Change, Row
from diag.report.jsonout import dump
from diag.report.layout import BAD, BOLD, DIM, GOOD, Cell, Page
from diag.report.markdown import code, prose
from diag.report.safe import clean
from diag.units import GIB, format_gib, format_size

SCHEMA_VERSION = 1
_SHOWN_CHANGES = 3
_BAR = 12
_LEAST_SOURCE = 20  # cells beside the numbers; with less the source goes below
_FULL = "\u2588"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """All a renderer needs."""

    plan: Plan
    changes: tuple[Change, ...] = ()
    parallel: tuple[Row, ...] = ()  # best first; empty for one card
    sweep: tuple[Row, ...] = ()
    assumed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


# --- sentences ----------------------------------------------------------------------------------------------------


def verdict(plan: Plan) -> tuple[str, str]:
    """The answer in words: the first sentence, and the sum behind it."""
    failing = [check for check in plan.checks if check.ok is False]
    open_ones = [check for check in plan.checks if check.ok is None]
    if failing:
        return f"It will not start: {_failure(plan, failing[0])}.", failing[0].why
    if open_ones:
        return (
            f"Too close to call: {_failure(plan, open_ones[0])}, within the range of the estimates.",
            open_ones[0].why,
        )
    if plan.pool is None:
        return "It will start.", plan.checks[0].why
    if plan.deployment.length is None:
        return f"It will start with {plan.length:,} tokens of context.", plan.checks[-2].why
    return "It will start.", next(check.why for check in plan.checks if check.name == "length")


def _failure(plan: Plan, check: Check) -> str:
    if check.name == "weights" and plan.term("other_processes"):
        return "the weights do not fit beside what else is on the card"
    return _FAILS[check.name]


_FAILS = {
    "weights": "the weights do not fit the card",
    "free memory": "less is free at start than the share asks for",
    "KV blocks": "nothing is left for the KV pool",
    "length": "one request of full length does not fit the KV pool",
    "headroom": "what lies outside the share does not fit beside it",
}


def setting(plan: Plan) -> str:
    """Release, model, cards and division on one line."""
    own = plan.deployment
    shape = plan.shape
    cards = f"{own.gpus}x {own.gpu_name}" if own.gpus > 1 else own.gpu_name
    sizes = (("TP", own.tp), ("PP", own.pp))
    ranks = [f"{name} {size}" for name, size in sizes if size > 1]
    ranks += [f"{own.dp} replicas"] if own.dp > 1 else []
    ranks += [f"{own.instances} instances"] if own.instances > 1 else []
    form = own.quantization.method if own.quantization else shape.dtype
    parts = [
        f"vLLM {own.version} ({own.engine})",
        f"{clean(shape.name, 80)} ({form})",
        cards,
        *ranks,
    ]
    return ", ".join(parts)


def pool_lines(plan: Plan) -> list[tuple[str, str]]:
    """What the KV pool means: label and value."""
    pool, own = plan.pool, plan.deployment
    if pool is None or plan.layout is None:
        return [("KV cache", "none: the model keeps no past")]
    rows = [
        (
            "KV bytes a token",
            f"{format_size(round(pool.token_bytes))} a rank ({plan.layout.element_bytes:g} bytes a number)",
        )
    ]
    if plan.layout.state_bytes:
        rows.append(
            (
                "state of one request",
                f"{format_size(plan.layout.state_bytes)} a rank, whatever its length",
            )
        )
    rows.append(
        (
            "KV block",
            f"{plan.layout.block_size} tokens, {format_size(plan.layout.block_bytes)} a rank",
        )
    )
    if pool.bytes > 0:
        rows.append(
            (
                "KV tokens",
                f"{pool.tokens:,}" + (f" in each of {own.dp} replicas" if own.dp > 1 else ""),
            )
        )
        rows.append(("concurrency", f"{pool.concurrency:,.2f} requests of {plan.length:,} tokens"))
    limit = plan.shape.context
    tail = " (the model's own limit)" if limit and pool.longest >= limit else ""
    sure = f"; {pool.longest_low:,} for sure" if pool.longest_low < pool.longest else ""
    rows.append(("largest context", f"{pool.longest:,} tokens{tail}{sure}"))
    return rows


def _range(term: Term) -> str:
    pct = term.error_pct
    return "" if pct is None else f"\u00b1{pct} %" if pct else "\u00b1<1 %"


def _rows(plan: Plan) -> list[tuple[str, int, str, str, bool]]:
    """Terms of the card in order: label, bytes, range, source, charged."""
    found = [
        (term.label, term.bytes, _range(term), term.source, term.charged) for term in plan.terms
    ]
    if plan.pool is not None:
        spread = max(plan.pool.bytes - plan.pool.low, plan.pool.high - plan.pool.bytes)
        source = (
            "pinned"
            if plan.deployment.kv_bytes is not None
            else f"what {plan.deployment.gmu:.4g} of the card leaves"
        )
        width = f"\u00b1{spread / GIB:.2f}" if spread else "exact"
        found.append(("KV pool", plan.pool.bytes, width, source, True))
    known = sum(size for _, size, *_ in found if size > 0)
    found.append(("left over", plan.deployment.total - known, "", "headroom", False))
    return found


# --- text ---------------------------------------------------------------------------------------------------------


def render_text(report: PlanReport, *, width: int, color: bool, unicode: bool = True) -> str:
    """The plan for a terminal."""
    page = _Sheet(width, unicode=unicode)
    page.head(report.plan)
    page.changes(report)
    page.terms(report.plan)
    page.pool(report.plan)
    page.checks(report.plan)
    page.parallel(report)
    page.table(report.sweep)
    page.notes(report)
    return page.text(color=color)


class _Sheet(Page):
    """A page with the sections of a plan."""

    def head(self, plan: Plan) -> None:
        answer, why = verdict(plan)
        style = {True: GOOD, False: BAD, None: BOLD}[plan.starts]
        self.prose(answer, style=style)
        self.prose(setting(plan))
        self.blank()
        self.prose(_sentence(why))

    def changes(self, report: PlanReport) -> None:
        if not report.changes:
            return
        self.heading("Do one of these (least given up first)")
        for number, change in enumerate(report.changes[:_SHOWN_CHANGES], 1):
            sure = change.plan.starts
            self.line((f"  {number}  ", ""), (clean(change.flags, 200), BOLD))
            self.row(
                [("fits" if sure else "may fit", GOOD if sure else ""), (change.gives, "")],
                [7, self.prose_width - 14],
                indent=5,
            )
            self.row([("costs", ""), (change.costs, "")], [7, self.prose_width - 14], indent=5)

    def terms(self, plan: Plan) -> None:
        rank = "the fullest rank" if plan.deployment.tp * plan.deployment.pp > 1 else "the card"
        self.heading(f"Memory of {rank} (GiB of {format_gib(plan.deployment.total)})")
        rows = _rows(plan)
        label = max(cell_len(row[0]) for row in rows)
        top = max(1, *(row[1] for row in rows))
        bar = _BAR if self.table_width >= 78 else 0
        room = self.table_width - label - bar - 26
        for name, size, spread, source, charged in rows:
            mark = "" if charged or name == "left over" else "; outside the share"
            cells: list[Cell] = [(name, ""), (f"{format_gib(size):>7}", ""), (f"{spread:<7}", DIM)]
            widths = [label, 7, 7]
            if bar:
                cells.append((self._bar(size, top), ""))
                widths.append(bar)
            if room >= _LEAST_SOURCE:
                self.row([*cells, (source + mark, DIM)], [*widths, room], indent=2)
                continue
            self.row(cells, widths, indent=2)
            self.row([(source + mark, DIM)], [self.table_width - 4], indent=4)
        words = plan.deployment.era.formula
        self.prose(
            f"budget: {words} (era {plan.deployment.era.value})", indent=2, hanging=2, style=DIM
        )
        if len(plan.weights.parts) > 1:
            inside = ", ".join(
                f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in _largest(plan)
            )
            self.prose(f"weights: {inside}", indent=2, hanging=2, style=DIM)

    def _bar(self, size: int, top: int) -> str:
        cells = round(max(size, 0) * _BAR / top)
        return (_FULL if self.unicode else "#") * max(cells, 1 if size > 0 else 0)

    def pool(self, plan: Plan) -> None:
        self.heading("KV cache")
        self.pairs(pool_lines(plan))

    def checks(self, plan: Plan) -> None:
        self.heading("Start-up checks")
        words = {True: "passes", False: "fails", None: "open"}
        width = max(len(check.name) for check in plan.checks)
        for check in plan.checks:
            style = {True: "", False: BAD, None: BOLD}[check.ok]
            cells = [(check.name, ""), (words[check.ok], style), (check.why, "")]
            self.row(cells, [width, 6, self.prose_width - width - 12], indent=2)

    def parallel(self, report: PlanReport) -> None:
        if len(report.parallel) < 2:
            return
        self.heading("Ways to use the cards (best first)")
        for row in report.parallel:
            self.row([(row.label, ""), (_row_text(row), "")], [22, self.prose_width - 26], indent=2)

    def table(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self.heading("Settings (length, KV GiB, tokens, requests at once)")
        width = max(len(row.label) for row in rows)
        for row in rows:
            self.row(
                [(row.label, ""), (_row_text(row), "")],
                [width, self.prose_width - width - 4],
                indent=2,
            )

    def notes(self, report: PlanReport) -> None:
        texts = list(report.plan.notes)
        if report.assumed:
            texts.append(f"Defaults used: {', '.join(report.assumed)}.")
        if report.ignored:
            texts.append(f"Not looked at: {', '.join(clean(flag, 60) for flag in report.ignored)}.")
        texts.append(
            f"Shape: {clean(report.plan.shape.source, 120)}, {_params(report.plan)} parameters."
        )
        self.blank()
        for text in texts:
            self.prose(text, style=DIM, hanging=2)


def _params(plan: Plan) -> str:
    count = plan.shape.params
    return f"{count / 1e9:,.2f} billion" if count >= 10**9 else f"{count / 1e6:,.1f} million"


def _largest(plan: Plan) -> list[tuple[str, int]]:
    return sorted(plan.weights.parts, key=lambda part: -part[1])[:6]


def _row_text(row: Row) -> str:
    plan = row.plan
    if plan is None:
        return row.why
    if plan.pool is None:
        return _STARTS[plan.starts]
    if plan.pool.bytes <= 0:
        return f"{_STARTS[plan.starts]}: {format_gib(plan.pool.bytes)} GiB for the KV pool"
    text = f"{format_gib(plan.pool.bytes)} GiB, {plan.pool.tokens:,} tokens, {plan.pool.concurrency:,.1f}x"
    if plan.deployment.dp > 1:
        text += f" in each of {plan.deployment.dp}"
    return f"{_STARTS[plan.starts]}: {text}"


_STARTS = {True: "starts", False: "does not start", None: "too close"}


# --- Markdown -----------------------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def render_markdown(report: PlanReport) -> str:
    """The plan as Markdown with tables."""
    plan = report.plan
    answer, why = verdict(plan)
    parts = [f"**{prose(answer)}**", prose(setting(plan)), prose(_sentence(why))]
    if report.changes:
        lines = [
            f"{number}. {code(change.flags)}: {prose(change.gives)}; costs: {prose(change.costs)}"
            for number, change in enumerate(report.changes[:_SHOWN_CHANGES], 1)
        ]
        parts.append("\n".join(lines))
    rows = [
        f"| {prose(label)} | {format_gib(size)} | {spread} | {prose(source)} |"
        for label, size, spread, source, _ in _rows(plan)
    ]
    parts.append("\n".join(["| term | GiB | range | source |", "|---|--:|---|---|", *rows]))
    parts.append(
        "\n".join(f"- {prose(label)}: {prose(value)}" for label, value in pool_lines(plan))
    )
    parts.append(
        "\n".join(
            f"- {prose(check.name)}: {_CHECKED[check.ok]}; {prose(check.why)}"
            for check in plan.checks
        )
    )
    tables = [*(report.parallel if len(report.parallel) > 1 else ()), *report.sweep]
    if tables:
        lines = [f"| {prose(row.label)} | {prose(_row_text(row))} |" for row in tables]
        parts.append("\n".join(["| setting | result |", "|---|---|", *lines]))
    notes = [
        *plan.notes,
        *([f"Defaults used: {', '.join(report.assumed)}."] if report.assumed else []),
    ]
    if notes:
        parts.append("\n".join(f"- {prose(note)}" for note in notes))
    return "\n\n".join(parts) + "\n"


_CHECKED = {True: "passes", False: "fails", None: "open"}


# --- JSON ---------------------------------------------------------------------------------------------------------


def to_dict(report: PlanReport) -> dict[str, Any]:
    """The plan as plain data. Sizes are bytes; null is unknown."""
    plan, own = report.plan, report.plan.deployment
    answer, why = verdict(plan)
    return {
        "schema_version": SCHEMA_VERSION,
        "oomdoc_version": __version__,
        "starts": plan.starts,
        "verdict": answer,
        "why": why,
        "model": _model(plan),
        "deployment": {
            "vllm_version": str(own.version),
            "engine": own.engine,
            "era": own.era.value,
            "gpu": own.gpu_name,
            "gpus": own.gpus,
            "total_bytes": own.total,
            "tensor_parallel_size": own.tp,
            "pipeline_parallel_size": own.pp,
            "data_parallel_size": own.dp,
            "gpu_memory_utilization": own.gmu,
            "max_model_len": own.length,
            "max_num_batched_tokens": own.step,
            "max_num_seqs": own.seqs,
            "kv_cache_dtype": own.kv_dtype or "auto",
            "instances": own.instances,
        },
        "requested_bytes": plan.requested,
        "terms": [_term(term) for term in plan.terms],
        "weights_parts": dict(plan.weights.parts),
        "kv": _kv(plan),
        "checks": [_check(check) for check in plan.checks],
        "changes": [_change(change) for change in report.changes],
        "parallel": [_row(row) for row in report.parallel],
        "sweep": [_row(row) for row in report.sweep],
        "assumed": list(report.assumed),
        "ignored_flags": list(report.ignored),
        "notes": list(plan.notes),
    }


def render_json(report: PlanReport) -> str:
    """`to_dict` as text."""
    return dump(to_dict(report)) + "\n"


def _model(plan: Plan) -> dict[str, Any]:
    shape = plan.shape
    return {
        "name": shape.name,
        "source": shape.source,
        "params": shape.params,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "experts": shape.experts,
        "vocab": shape.vocab,
        "context": shape.context,
        "dtype": shape.dtype,
        "quantization": plan.deployment.quantization.method
        if plan.deployment.quantization
        else None,
    }


def _term(term: Term) -> dict[str, Any]:
    return {
        "term": term.term,
        "bytes": term.bytes,
        "low": term.low,
        "high": term.high,
        "charged": term.charged,
        "source": term.source,
    }


def _kv(plan: Plan) -> dict[str, Any] | None:
    pool, layout = plan.pool, plan.layout
    if pool is None or layout is None:
        return None
    return {
        "bytes": pool.bytes,
        "low": pool.low,
        "high": pool.high,
        "bytes_per_token": pool.token_bytes,
        "state_bytes": layout.state_bytes,
        "block_size": layout.block_size,
        "block_bytes": layout.block_bytes,
        "tokens": pool.tokens,
        "max_concurrency": round(pool.concurrency, 4),
        "request_bytes": pool.request_bytes,
        "length": plan.length,
        "largest_context": pool.longest,
        "largest_context_low": pool.longest_low,
    }


def _check(check: Check) -> dict[str, Any]:
    return {"name": check.name, "ok": check.ok, "why": check.why}


def _change(change: Change) -> dict[str, Any]:
    return {
        "change": change.flags,
        "starts": change.plan.starts,
        "gives": change.gives,
        "costs": change.costs,
        "kv": _kv(change.plan),
    }


def _row(row: Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "label": row.label,
        "starts": plan.starts if plan else False,
        "tensor_parallel_size": plan.deployment.tp if plan else None,
        "replicas": plan.deployment.dp if plan else None,
        "kv": _kv(plan) if plan else None,
        "why": row.why or None,
    }
