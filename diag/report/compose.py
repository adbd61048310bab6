"""Rule texts and facts -> sentences and evidence of the report.

In: the verdict of the rules and the facts. Out: title, summary with its numbers filled in, quoted lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from diag.facts.model import Fact, Facts, Value
from diag.report.model import Alternative, Evidence, Finding
from diag.rules.engine import Match, Verdict
from diag.terms import EvidenceRole, Family, Outcome, Phase
from diag.units import format_count, format_size

MAX_QUOTE = 600  # characters of a quoted line
MAX_CONFIRMATIONS = 4
MAX_ECHOES = 4
MAX_ALTERNATIVES = 4
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")


def format_value(value: Value, unit: str) -> str:
    """A fact as people read it: sizes in GiB, counts with thousands separators.

    >>> format_value(13958643712, "bytes"), format_value(40960, "tokens"), format_value(0.9, "ratio")
    ('13.00 GiB', '40,960', '0.9')
    """
    if isinstance(value, (str, bool)):
        return str(value)
    if unit == "bytes":
        return format_size(round(value))
    if unit in ("tokens", "blocks", "count"):
        return format_count(value)
    if unit == "pct":
        return f"{value:g} %"
    if unit == "x":
        return f"{value:g}x"
    return f"{value:.4g}"


def finding(verdict: Verdict, facts: Facts) -> Finding | None:
    """The diagnosis as the report carries it; None when no rule matched."""
    root = verdict.root
    if root is None:
        return None
    return Finding(
        family=root.rule.family,
        subtype=root.rule.name,
        phase=root.phase,
        rank=root.problem.rank if root.problem else None,
        confidence=root.confidence,
        title=root.rule.title,
        summary=summary(root, facts),
        line=root.line.number if root.line else None,
        evidence=evidence(verdict, facts),
        missing=root.rule.missing if root.confidence < 0.9 else (),
    )


def summary(match: Match, facts: Facts) -> str:
    """The first of the rule's texts whose numbers are all known."""
    for text in match.rule.summary:
        names = _PLACEHOLDER.findall(text)
        values = {name: _value_of(name, match, facts) for name in names}
        if None not in values.values():
            return _PLACEHOLDER.sub(lambda found, known=values: str(known[found[1]]), text)  # type: ignore[misc]
    return match.rule.title + "."


def _value_of(name: str, match: Match, facts: Facts) -> str | None:
    if name == "problem.text":
        return _first_lines(match.problem.text) if match.problem else None
    fact = _nearest_fact(name, match, facts)
    return None if fact is None else format_value(fact.value, fact.unit)


def _first_lines(text: str) -> str:
    """An exception's text on one line, bounded."""
    joined = " ".join(part.strip() for part in text.split("\n")[:3] if part.strip())
    return joined if len(joined) <= 300 else f"{joined[:297]}..."


def _nearest_fact(name: str, match: Match, facts: Facts) -> Fact | None:
    """A value printed on the problem's own lines, else of its rank, else the first."""
    found = facts.all(name)
    if match.problem is not None:
        numbers = {match.problem.line.number, *(e.line.number for e in match.problem.events)}
        own = next((fact for fact in found if fact.line in numbers), None)
        if own is not None:
            return own
        if name.startswith("oom."):
            return None  # another error's numbers prove nothing
        return facts.get(name, rank=match.problem.rank)
    return found[0] if found else None


def evidence(verdict: Verdict, facts: Facts) -> tuple[Evidence, ...]:
    """Quoted lines: the cause, what confirms it, what only repeats it; each line once, in log order."""
    root = verdict.root
    if root is None:
        return ()
    quoted: dict[int, Evidence] = {}

    def quote(number: int, text: str, role: EvidenceRole) -> None:
        quoted.setdefault(number, Evidence(line=number, text=text.strip()[:MAX_QUOTE], role=role))

    if root.line is not None:
        quote(root.line.number, root.line.text, EvidenceRole.CAUSE)
    for line in root.lines[:MAX_CONFIRMATIONS]:
        role = EvidenceRole.CONFIRMATION if root.problem else EvidenceRole.CAUSE
        quote(line.number, line.text, role)
    confirming = [event.line for event in facts.seen(*root.rule.confirm)]
    for line in confirming[:MAX_CONFIRMATIONS]:
        quote(line.number, line.text, EvidenceRole.CONFIRMATION)
    for line in verdict.echoes[:MAX_ECHOES]:
        quote(line.number, line.text, EvidenceRole.ECHO)
    return tuple(quoted[number] for number in sorted(quoted))


def _is_rest(name: str) -> bool:
    """Whether it is the class of what fits no other one of its family, or of any."""
    return name == "unknown" or name.endswith(".other")


def alternatives(verdict: Verdict) -> tuple[Alternative, ...]:
    """Other readings: those the rule names, then other rules that hold for the same problem.

    A rule for whatever no other explains says nothing new beside one that names the class.
    """
    root = verdict.root
    if root is None:
        return ()
    found: dict[str, Alternative] = {}
    for reading in root.readings:
        found[reading.subtype] = Alternative(
            family=reading.family,
            subtype=reading.subtype,
            confidence=round(min(reading.confidence, root.confidence), 2),
            why=reading.why,
        )
    named = not _is_rest(root.rule.name)
    for match in verdict.others:
        if named and _is_rest(match.rule.name):
            continue
        if match.rule.name not in found:
            found[match.rule.name] = Alternative(
                family=match.rule.family,
                subtype=match.rule.name,
                confidence=round(min(match.confidence, root.confidence) / 2, 2),
                why=match.rule.title + ".",
            )
    ranked = sorted(found.values(), key=lambda item: -item.confidence)
    return tuple(ranked[:MAX_ALTERNATIVES])


def outcome(verdict: Verdict, facts: Facts) -> Outcome:
    """What the attempt is about as a whole."""
    root = verdict.root
    if root is None:
        well = reached_serving(facts) and not facts.flag("attempt.error_cut")
        return Outcome.HEALTHY if well else Outcome.UNKNOWN
    if root.rule.family is Family.LOOKALIKE:
        return Outcome.OTHER_FAILURE
    return Outcome.UNKNOWN if root.rule.family is Family.UNKNOWN else Outcome.MEMORY_FAILURE


_READY = ("startup.complete", "serve.stats_v1", "serve.stats_v0", "serve.stats_v1_early")
_NEARLY = (
    "startup.server",
    "graph.init_done",
    "graph.done",
    "graph.done_v0",
    "sleep.cumem_freed",
    "sleep.freed",
)


def reached_serving(facts: Facts) -> bool:
    """The server serves, or everything a start needs memory for is done."""
    return bool(facts.flag("startup.complete") or facts.seen(*_READY, *_NEARLY))


def headline(result: Outcome, facts: Facts, found: Finding | None) -> str:
    """One or two sentences for a log without a memory failure; "" when the finding speaks for itself."""
    if result is Outcome.HEALTHY:
        return _healthy(facts)
    if result is Outcome.OTHER_FAILURE and found is not None:
        where = f" (line {found.line})" if found.line else ""
        return f"Not a memory failure{where}: {found.summary}"
    if result is Outcome.UNKNOWN and found is None:
        return _cannot_tell(facts)
    return ""


def _healthy(facts: Facts) -> str:
    ready = facts.seen(*_READY)
    since = f": serving since line {ready[0].line.number}" if ready else ": start-up went through"
    parts = []
    pool, tokens = facts.get("profile.available_kv_cache"), facts.get("kv.pool_tokens")
    if pool is not None:
        parts.append(f"KV pool {format_value(pool.value, 'bytes')}")
    if tokens is not None:
        parts.append(f"{format_value(tokens.value, 'tokens')} tokens")
    many, length = facts.get("kv.max_concurrency"), facts.get("config.max_model_len")
    if many is not None and length is not None:
        parts.append(f"{many.value:g} requests of {format_count(float(length.value))} tokens")
    detail = f" {', '.join(parts)}." if parts else ""
    return f"Healthy start{since}.{detail} Nothing to do."


def _cannot_tell(facts: Facts) -> str:
    cut = next((p for p in reversed(facts.problems) if p.cut_off), None)
    if cut is not None:
        last = cut.frames[-1]
        place = last.file.replace("\\", "/").rsplit("/", 1)[-1]
        where = f"{place}, {last.function}" if last.function else place
        return (
            f"Cannot tell yet. A traceback breaks off at line {cut.line.number} ({where}): "
            "its last line, the error itself, is not in the log."
        )
    ends = facts.text("attempt.ends_in")
    if ends is not None:
        return (
            f"Cannot tell yet. The log ends {Phase(ends).label} and shows no failure up to there."
        )
    given_up = facts.seen("os.cancelled")
    if given_up:
        return (
            f"Cannot tell yet. CancelledError (line {given_up[0].line.number}) only says that something was given up; "
            "why is not in the log."
        )
    if facts.events:
        return "Cannot tell yet. The log holds no failure and stops before the start is complete."
    return "Cannot tell. No line of this input is known from vLLM or what it runs on."


def next_steps(result: Outcome, found: Finding | None, known: Sequence[str]) -> tuple[str, ...]:
    """Commands that get what is missing, for an answer that is not sure."""
    if result is not Outcome.UNKNOWN and (found is None or found.confidence >= 0.6):
        return ()
    if found is None and not known:
        return (
            "docker logs NAME > vllm.log 2>&1      (the server's own output, from its first line)",
            "kubectl logs POD --previous > vllm.log      (the container that crashed)",
        )
    return (
        "dmesg -T | grep -i -E 'killed process|oom'      (host)",
        "kubectl describe pod POD | grep -A3 'Last State'      (Kubernetes)",
        "the log again with VLLM_LOGGING_LEVEL=DEBUG, from the first line on",
    )
