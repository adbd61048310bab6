"""All rules against all problems of one attempt -> the root, other readings, and what only echoes the root.

A rule's priority says how much it knows: a line that names its own cause beats an exception with a telling traceback,
that beats a bare exception, and that beats a report that "something failed". Among equals the earliest line wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diag.facts.model import Facts, Problem
from diag.log.model import LogLine
from diag.rules.match import Context, LogText, check, evaluate
from diag.rules.schema import Reading, Rule
from diag.terms import Phase, RowRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A rule that holds, with the problem it holds for (None: the whole log) and the lines that say so."""

    rule: Rule
    problem: Problem | None
    confidence: float
    lines: tuple[LogLine, ...]
    phase: Phase | None
    readings: tuple[Reading, ...] = ()

    @property
    def line(self) -> LogLine | None:
        """The line to quote first."""
        if self.problem is not None:
            return self.problem.line
        return self.lines[0] if self.lines else None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: knows most first, then earliest."""
        number = self.problem.first_number if self.problem else self.line.number if self.line else 0
        return (-self.rule.priority, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the rules make of one attempt. `root` None: nothing matched."""

    root: Match | None
    others: tuple[Match, ...] = ()  # other subtypes, best first
    echoes: tuple[LogLine, ...] = ()  # lines that only report the root again
    failed: tuple[str, ...] = ()  # rules that broke, in words: the others have judged
    missing: tuple[str, ...] = ()  # facts that would let more rules decide


def judge(facts: Facts, rules: Iterable[Rule]) -> Verdict:
    """The verdict on one attempt. A rule that breaks is noted, and the rest goes on."""
    matches: list[Match] = []
    failed: list[str] = []
    text = LogText(facts.lines)
    for rule in rules:
        subjects: Sequence[Problem | None] = (
            facts.problems if rule.subject == "problem" else (None,)
        )
        try:
            applied = [_apply(rule, Context(facts, text, subject)) for subject in subjects]
        except Exception as error:  # noqa: BLE001 - one bad rule must not take the answer with it
            failed.append(
                f"The rule {rule.id} could not be tried ({type(error).__name__}: {error})."
            )
            continue
        matches.extend(match for match in applied if match is not None)
    matches.sort(key=lambda match: match.order)
    if not matches:
        return Verdict(root=None, failed=tuple(failed))
    root = matches[0]
    return Verdict(
        root=root,
        others=_other_readings(root, matches),
        echoes=_echoes(root, facts),
        failed=tuple(failed),
    )


def _apply(rule: Rule, context: Context) -> Match | None:
    problem = context.problem
    result = evaluate(rule.when, context)
    if not result.held:
        return None
    confidence = next(
        (a.confidence for a in rule.adjust if check(a.when, context).held), rule.confidence
    )
    readings = tuple(r for r in rule.readings if r.when is None or check(r.when, context).held)
    phase = problem.phase if problem and problem.phase and not rule.fixed_phase else rule.phase
    return Match(
        rule=rule,
        problem=problem,
        confidence=confidence,
        lines=result.lines,
        phase=phase,
        readings=readings,
    )


def _other_readings(root: Match, matches: Sequence[Match]) -> tuple[Match, ...]:
    """The best match of every other subtype about the same problem, or of a rule that knows as much."""
    others: dict[str, Match] = {}
    for match in matches:
        near = match.problem is root.problem or match.rule.priority >= root.rule.priority - 20
        if near and match.rule.name != root.rule.name and match.rule.name not in others:
            others[match.rule.name] = match
    return tuple(others.values())


def _echoes(root: Match, facts: Facts) -> tuple[LogLine, ...]:
    """Copies of the root, echo lines, and every problem after it."""
    start = root.line.number if root.line else 0
    lines: dict[int, LogLine] = {}
    if root.problem is not None:
        lines.update({line.number: line for line in root.problem.copies})
    for event in facts.events:
        if event.role is RowRole.ECHO and event.line.number > start:
            lines.setdefault(event.line.number, event.line)
    for problem in facts.problems:
        if problem is not root.problem and problem.line.number > start:
            lines.setdefault(problem.line.number, problem.line)
    return tuple(lines[number] for number in sorted(lines))
