"""The sentences that every renderer shares: a Diagnosis goes in, short cleaned texts come out.

Nothing is laid out here: no colour, no wrapping, no Markdown. Results went through `safe.clean`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diag.report.model import (
    Change,
    Diagnosis,
    Environment,
    FactOut,
    Finding,
    Fix,
    GmuAdvice,
    KnownBug,
    LedgerEntry,
    RankLedger,
    Related,
    SourceInfo,
    Value,
)
from diag.report.safe import clean
from diag.terms import GmuVerdict, Origin, Outcome, Safety
from diag.units import GIB, format_count, format_gib, format_size

SHOWN_FIXES = 3
SHOWN_RELATED = 3
TITLE = 160
SUMMARY = 800
CHANGE = 400
_ALIKE = GIB // 20  # ranks whose terms differ by less share one picture


def title(finding: Finding) -> str:
    """The failure in words: "KV reservation: one request does not fit the KV pool"."""
    return f"{finding.family.label}: {_run_on(clean(finding.title, TITLE))}"


def _run_on(text: str) -> str:
    """A sentence as it goes on after a colon: an ordinary first word loses its capital."""
    first = text.split(" ", 1)[0]
    if first in _NAMES or (not first[1:].islower() and first != "A"):
        return text
    return text[:1].lower() + text[1:]


_NAMES = {"Ray", "Docker", "Kubernetes", "Triton", "Python", "Linux", "Marlin", "Mamba"}


def headline(diagnosis: Diagnosis) -> tuple[str, str]:
    """What a log without a finding is about: the first words, and the rest (may be empty)."""
    text = clean(diagnosis.headline, SUMMARY) or _OUTCOMES[diagnosis.outcome]
    match = _LEAD.match(text)
    return (match.group(1), match.group(2)) if match else (text, "")


_LEAD = re.compile(r"([^.:]{1,60}[.:])\s+(.*)")
_OUTCOMES = {
    Outcome.MEMORY_FAILURE: "A memory failure.",
    Outcome.OTHER_FAILURE: "Not a memory failure.",
    Outcome.HEALTHY: "Healthy.",
    Outcome.UNKNOWN: "Cannot tell yet.",
}


def environment(diagnosis: Diagnosis) -> str:
    """Release, model, device, rank, phase and line, as far as known; empty when nothing is."""
    env, finding = diagnosis.environment, diagnosis.diagnosis
    parts = [_release(env), _model(env.model), clean(env.device or "", 80)]
    known = any(parts)
    if not parts[0] and (known or finding is not None):
        parts[0] = "vLLM (release not in the log)"
    if finding is None:
        return ", ".join(filter(None, parts))
    if finding.rank is not None:
        parts.append(f"rank {finding.rank}")
    if finding.phase is not None:
        parts.append(finding.phase.label)
    line = f" (line {finding.line:,})" if finding.line is not None else ""
    return ", ".join(filter(None, parts)) + line


def _release(env: Environment) -> str:
    if env.vllm_version is None:
        return ""
    notes = [env.engine or "", "assumed" if env.vllm_origin is Origin.ASSUMED else ""]
    inside = ", ".join(filter(None, notes))
    return f"vLLM {clean(env.vllm_version, 40)}" + (f" ({clean(inside, 40)})" if inside else "")


def _model(model: str | None) -> str:
    """The last part of a hub id or path: enough for a heading; a cache folder's name for a snapshot."""
    name = clean(model or "", 200).rstrip("/")
    cached = re.search(r"models--[^/]*--([^/]+)/snapshots/", name)
    if cached:
        return clean(cached.group(1), 60)
    last = name.rsplit("/", 1)[-1]
    return clean(last, 12 if _HASH.fullmatch(last) else 60)


_HASH = re.compile(r"[0-9a-f]{40}")


def attempts(source: SourceInfo, *, failed: bool) -> str | None:
    """Which start of several this is: "Attempt 5 of 5 (4 earlier ones failed the same way)"."""
    if source.attempts <= 1:
        return None
    others = max(0, source.attempts_failed - (1 if failed else 0))
    same = max(0, source.attempts_same_failure - 1) if failed else 0
    last = source.attempt == source.attempts
    which = ("earlier one" if last else "other") + ("" if max(others, same) == 1 else "s")
    text = f"Attempt {source.attempt} of {source.attempts}"
    if same and same >= others:
        return f"{text} ({same} {which} failed the same way)"
    if others:
        tail = f", {same} the same way" if same else (" in another way" if failed else "")
        return f"{text} ({others} {which} failed{tail})"
    return text


def certainty(finding: Finding) -> str | None:
    """How sure the reading is, in words; None when it is certain."""
    if finding.certainty == "certain":
        return None
    if finding.certainty == "likely":
        return "This reading is likely, not certain."
    return "This reading is possible; the log does not prove it."


def missing(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What would make it surer, when it matters: the reading is open, or a fix is not computed."""
    finding = diagnosis.diagnosis
    if finding is None or not finding.missing:
        return ()
    open_fix = any(fix.fits is None for fix in diagnosis.fixes)
    if finding.certainty == "certain" and diagnosis.fixes and not open_fix:
        return ()
    return tuple(clean(item, 200) for item in finding.missing)


def alternative(family_title: str, subtype: str, confidence: float, why: str) -> str:
    """Another reading on one line."""
    level = "likely" if confidence >= 0.6 else "possible" if confidence >= 0.3 else "less likely"
    reason = clean(why)
    return f"{family_title} ({clean(subtype, 60)}), {level}" + (f": {reason}" if reason else "")


def change(item: Change) -> str:
    """What to type or do for one setting."""
    if item.action is not None:
        return clean(item.action, CHANGE)
    name = clean(item.flag or item.env or "", 80)
    if item.to is None or item.to is False:
        return f"without {name}" if item.flag else f"unset {name}"
    if item.flag:
        return name if item.to is True else f"{name} {clean(str(item.to), 120)}"
    return f"{name}={clean(str(item.to), 120)}"


def fix(item: Fix) -> str:
    """What to type for a fix: all its changes, or its title when it names none."""
    return " ".join(filter(None, map(change, item.changes))) or clean(item.title, CHANGE)


def fits(item: Fix) -> str:
    """The arithmetic's verdict in words; a step without a sum only has its reason."""
    if item.fits is None and all(part.action is not None for part in item.changes):
        return "why"
    return {True: "fits", False: "does not fit", None: "unknown"}[item.fits]


def cost(item: Fix) -> str:
    """What a fix costs; says so when the model's output may change."""
    text = clean(item.cost)
    if item.safety is Safety.CHANGES_RESULTS:
        return f"{text}; output may differ" if text else "output may differ"
    return text


def safety(item: Fix) -> str:
    """What a fix does to the service, in words."""
    return {
        Safety.SAFE: "memory only",
        Safety.TRADEOFF: "a trade-off: less context, concurrency or speed",
        Safety.CHANGES_RESULTS: "the model's output may differ",
    }[item.safety]


def candidates(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Fixes worth trying, in order: those that fit or may fit."""
    return tuple(item for item in diagnosis.fixes if item.fits is not False)


def insufficient(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Fixes that were checked and do not suffice."""
    return tuple(item for item in diagnosis.fixes if item.fits is False)


def fixes_heading(count: int) -> str:
    """The heading above the fixes."""
    return "Do this" if count == 1 else "Do one of these (least given up first)"


def gmu(advice: GmuAdvice) -> str:
    """The direction verdict for gpu_memory_utilization with its window."""
    now = f" from {advice.current:.2f}" if advice.current is not None else ""
    to = f" to {advice.suggested:.2f}" if advice.suggested is not None else ""
    text = {
        GmuVerdict.RAISE: f"raise it{now}{to}",
        GmuVerdict.LOWER: f"lower it{now}{to}",
        GmuVerdict.LEAVE: f"leave it{now.replace(' from', ' at')}",
        GmuVerdict.CANNOT_HELP: "no value of it alone helps here",
        GmuVerdict.NOT_ENOUGH_FACTS: "the log has too few numbers to say which way",
    }[advice.verdict]
    low, high = advice.lower_bound, advice.upper_bound
    if advice.verdict in (GmuVerdict.CANNOT_HELP, GmuVerdict.NOT_ENOUGH_FACTS):
        return text
    if low is not None and high is not None:
        return f"{text} (window {low:.2f}-{high:.2f})"
    if low is not None:
        return f"{text} (at least {low:.2f})"
    return f"{text} (at most {high:.2f})" if high is not None else text


def advises_gmu(diagnosis: Diagnosis) -> GmuAdvice | None:
    """The verdict when it belongs into the answer: a memory failure, and something to say."""
    advice = diagnosis.gmu
    if advice is None or diagnosis.outcome is not Outcome.MEMORY_FAILURE:
        return None
    empty = advice.verdict is GmuVerdict.NOT_ENOUGH_FACTS and not advice.why and not advice.popular
    return None if empty else advice


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks whose ledgers are alike; `ledger` is that of the one that failed, or the first."""

    ledger: RankLedger
    ranks: tuple[int | None, ...]


def rank_groups(diagnosis: Diagnosis) -> tuple[RankGroup, ...]:
    """Ledgers by likeness, the failed rank's group first."""
    failed = diagnosis.diagnosis.rank if diagnosis.diagnosis else None
    groups: list[list[RankLedger]] = []
    for ledger in sorted(
        diagnosis.ledger.ranks, key=lambda item: (item.rank != failed, not _has_failed(item))
    ):
        for group in groups:
            if _alike(group[0], ledger):
                group.append(ledger)
                break
        else:
            groups.append([ledger])
    return tuple(
        RankGroup(ledger=group[0], ranks=tuple(item.rank for item in group)) for group in groups
    )


def _has_failed(ledger: RankLedger) -> bool:
    return any(entry.failed for entry in ledger.entries)


def _alike(one: RankLedger, other: RankLedger) -> bool:
    def key(ledger: RankLedger) -> list[tuple[str, bool, str | None]]:
        return [(entry.term, entry.failed, ledger.device) for entry in ledger.entries]

    def near(left: int | None, right: int | None) -> bool:
        if left is None or right is None:
            return left is right
        return abs(left - right) <= _ALIKE

    return (
        key(one) == key(other)
        and near(one.total_bytes, other.total_bytes)
        and all(
            near(left.bytes, right.bytes) and near(left.wanted, right.wanted)
            for left, right in zip(one.entries, other.entries, strict=True)
        )
    )


def ranks(numbers: Sequence[int | None]) -> str:
    """Rank numbers as ranges: "rank 0", "ranks 0-3, 6"; empty when no number is known."""
    known = sorted(number for number in numbers if number is not None)
    spans: list[list[int]] = []
    for number in known:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(known) > 1 else ''} {text}" if known else ""


def ledger_heading(group: RankGroup, env: Environment) -> str:
    """The heading above a rank's terms: whose memory, which rank, of how much."""
    on_host = group.ledger.device == "host RAM"
    host = on_host or (env.backend or "").lower() == "cpu"
    parts = ["Host memory" if host else "GPU memory", ranks(group.ranks)]
    if len(group.ranks) > 1:
        parts[1] += " alike"
    device = clean(group.ledger.device or "", 60)
    parts.append("" if device in clean(env.device or "", 200) else device)
    total = group.ledger.total_bytes
    unit = f" (GiB of {format_gib(total)})" if total is not None else " (GiB)"
    return ", ".join(filter(None, parts)) + unit


def ledger_rows(ledger: RankLedger) -> tuple[LedgerEntry, ...]:
    """The terms, with what no term explains as the last one when it is known and not nothing."""
    rest = ledger.unexplained_bytes
    if rest is None or abs(rest) < GIB // 200:
        return ledger.entries
    if not ledger.entries:
        return ()  # one bar of nothing but "unexplained" tells nothing
    extra = LedgerEntry(term="unexplained", label="unexplained", bytes=rest, origin=Origin.DERIVED)
    return (*ledger.entries, extra)


def entry_state(entry: LedgerEntry) -> str:
    """What is special about a term: what was wanted of it, that it failed, how rough it is."""
    parts = []
    if entry.wanted is not None:
        parts.append(f"wanted {format_gib(entry.wanted)}")
    elif entry.failed:
        parts.append("failed here")
    if entry.bytes is None:
        parts.append("not in the log")
    elif entry.error_pct is not None:
        parts.append(f"estimated, \u00b1{entry.error_pct:.0f} %")
    elif entry.origin is Origin.ASSUMED:
        parts.append("assumed")
    return ", ".join(parts)


def entry_source(entry: LedgerEntry) -> str:
    """Where a term's number comes from."""
    if entry.lines:
        return line_numbers(entry.lines)
    return "computed" if entry.origin is Origin.DERIVED and entry.bytes is not None else ""


def line_numbers(lines: Iterable[int]) -> str:
    """At most three line numbers: "line 214", "lines 12, 201"."""
    found = sorted(set(lines))
    tail = ", ..." if len(found) > 3 else ""
    return f"line{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:3]))}{tail}"


def fact_value(fact: FactOut) -> str:
    """A fact's value for people, with its unit."""
    return _value(fact.value, fact.unit)


def _value(value: Value, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return clean(value, 200)
    if not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        return format_size(round(value))
    number = format_count(value) if isinstance(value, int) else f"{value:,.4g}"
    suffix = {"pct": " %", "x": "x", "ratio": "", "count": "", "text": "", "bool": ""}
    return f"{number}{suffix.get(unit, f' {unit}')}"


def fact_source(fact: FactOut) -> str:
    """Where a fact comes from: its line, or how it was got."""
    if fact.line is not None:
        return f"line {fact.line}"
    return fact.origin.value


def bug(item: KnownBug) -> str:
    """A known bug: its name, which releases have it, which one repairs it, what it does."""
    fixed = (
        f"repaired in {clean(item.fixed_in, 40)}" if item.fixed_in else "no release repairs it yet"
    )
    return f"{clean(item.id, 60)} (vLLM {clean(item.affected, 60)}; {fixed}): {clean(item.why)}"


def related(item: Related) -> str:
    """A thread, page or card: its title and why it is shown."""
    why = clean(item.why, 200)
    return clean(item.title, 200) + (f" (why: {why})" if why else "")
