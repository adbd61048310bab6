"""How an attempt went as a whole: where it ends, whether it was stopped on purpose, whether it went on after a problem.

In: Facts of one attempt. Out: attempt.* facts for rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diag.facts.model import Fact, Facts, Value
from diag.facts.problems import phase_marks
from diag.terms import Origin, RowRole

STOPPING = ("exec.shutdown_signal", "exec.shutdown_initiated", "exec.server_stopping")
GONE = ("exec.core_died", "exec.core_died2", "exec.mpclient_exit")
ALIVE = ("serve.stats_v1", "serve.stats_v0", "serve.stats_v1_early", "serve.http_ok")


def describe(facts: Facts, *, earlier_engine: bool) -> Facts:
    """Facts with attempt.* added. `earlier_engine`: a former engine of the same program was not closed."""
    found = {fact.name: (fact,) for fact in _course(facts, earlier_engine=earlier_engine)}
    return replace(facts, table={**facts.table, **found})


def _course(facts: Facts, *, earlier_engine: bool) -> Iterator[Fact]:
    marks = phase_marks(facts.events)
    if marks:
        yield _fact("attempt.ends_in", marks[-1][1].value, "text", marks[-1][0])
    yield _fact("attempt.earlier_engine", earlier_engine, "bool")
    first = min((p.first_number for p in facts.problems), default=None)
    stop = min((event.line.number for event in facts.seen(*STOPPING)), default=None)
    yield _fact(
        "attempt.stopped_first", stop is not None and (first is None or stop < first), "bool"
    )
    yield _fact("attempt.ended_well", _ended_well(facts), "bool")
    yield _fact("attempt.ends_killed", _ends_killed(facts), "bool")
    yield _fact("attempt.error_cut", _error_cut(facts), "bool")
    last = max((p.line.number for p in facts.problems if p.role is RowRole.CAUSE), default=None)
    alive = max((event.line.number for event in facts.seen(*ALIVE)), default=None)
    died = any(event.role is RowRole.ECHO for event in facts.events)
    yield _fact(
        "attempt.survived", bool(last and alive and alive > last and not died), "bool", alive
    )
    ranks = {line.rank for line in facts.lines if line.rank is not None}
    if ranks:
        yield _fact("log.ranks", len(ranks), "count")


def _error_cut(facts: Facts) -> bool:
    """The last problem is a traceback that breaks off, no request's, and nothing after it shows a server at work."""
    if not facts.problems or not facts.problems[-1].cut_off:
        return False
    if "request_handling" in facts.problems[-1].sites:
        return False
    last = facts.problems[-1].line.number
    if any(event.line.number < last for event in facts.seen(*STOPPING)):
        return False  # what breaks while the server is taken down
    return not any(event.line.number > last for event in facts.seen(*ALIVE))


def _ends_killed(facts: Facts) -> bool:
    """The shell's "Killed" as the last word, with no failure before that vLLM could have killed itself for."""
    spoken = [line for line in facts.lines if line.text.strip()]
    killed = facts.seen("os.killed")
    if not spoken or not killed or killed[-1].line.number < spoken[-1].number:
        return False
    return not any(
        p.role is RowRole.CAUSE and "os.killed" not in p.rows for p in facts.problems
    ) and not facts.seen("exec.fatal_signal")


def _ended_well(facts: Facts) -> bool:
    """An offline program closes its engine by ending: "died unexpectedly" is then its last line, and no failure."""
    spoken = [line for line in facts.lines if line.text.strip()]
    if not spoken or not facts.problems:
        return False
    offline = not any((line.speaker.process or "").startswith("APIServer") for line in spoken)
    first = facts.problems[0]
    gone = first.rows.intersection(GONE)
    return offline and bool(gone) and first.line.number >= spoken[-1].number


def _fact(name: str, value: Value, unit: str, line: int | None = None) -> Fact:
    return Fact(name=name, value=value, unit=unit, line=line, origin=Origin.DERIVED)
