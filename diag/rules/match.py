"""One condition against one problem and its attempt's facts: true, false or unknown, with the lines that say so."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from diag.errors import UnitError
from diag.facts.model import Fact, Facts, Problem, Value
from diag.log.model import LogLine
from diag.patterns import LINEAR, MAX_TEXT, found, position
from diag.resources import read_data
from diag.rules.schema import Condition, When
from diag.terms import RowRole
from diag.units import parse_size


@dataclass(frozen=True, slots=True)
class Result:
    """`held` None: unknown, because the facts named in `missing` are not in the log."""

    held: bool | None
    lines: tuple[LogLine, ...] = ()
    missing: tuple[str, ...] = ()


YES, NO = Result(True), Result(False)


class LogText:
    """All lines of an attempt as one text, so that a pattern is looked for once and not line by line."""

    def __init__(self, lines: Sequence[LogLine]) -> None:
        self._lines = lines
        self._found: dict[str, LogLine | None] = {}

    @cached_property
    def _parts(self) -> list[bytes]:
        texts = (line.text[:MAX_TEXT].replace("\n", " ") for line in self._lines)
        return [text.encode("utf-8", "replace") for text in texts]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(part) + 1 for part in self._parts)]

    @cached_property
    def _data(self) -> bytes:
        return b"\n".join(self._parts)

    def line_with(self, pattern: str) -> LogLine | None:
        """The first line that holds the pattern; `^` and `$` are the line's ends."""
        if pattern not in self._found:
            self._found[pattern] = self._search(pattern) if LINEAR else self._search_each(pattern)
        return self._found[pattern]

    def _search(self, pattern: str) -> LogLine | None:
        at = position(f"(?m){pattern}", self._data)
        return None if at is None else self._lines[bisect_right(self._starts, at) - 1]

    def _search_each(self, pattern: str) -> LogLine | None:
        """Line by line: without RE2 the time allowed is for one line."""
        return next((line for line in self._lines if found(pattern, line.text)), None)


@dataclass(frozen=True, slots=True)
class Context:
    """What conditions look at. `problem` is None for rules about the whole log."""

    facts: Facts
    text: LogText
    problem: Problem | None = None

    @property
    def own_numbers(self) -> frozenset[int]:
        """Numbers of the problem's own lines."""
        if self.problem is None:
            return frozenset()
        return frozenset({self.problem.line.number, *(e.line.number for e in self.problem.events)})


def evaluate(when: When, context: Context) -> Result:
    """The three lists of a rule together."""
    return conjunction(_parts(when, context))


def _parts(when: When, context: Context) -> Iterator[Result]:
    """Result by result: the first that is false ends the work."""
    yield from (check(condition, context) for condition in when.all)
    if when.any:
        yield any_of(when.any, context)
    yield from (negate(check(condition, context)) for condition in when.none)


def conjunction(parts: Iterable[Result]) -> Result:
    """Three-valued and: one false settles it."""
    lines: list[LogLine] = []
    missing: list[str] = []
    unknown = False
    for part in parts:
        if part.held is False:
            return NO
        unknown = unknown or part.held is None
        lines.extend(part.lines)
        missing.extend(part.missing)
    return Result(None if unknown else True, tuple(lines), tuple(missing))


def any_of(conditions: Iterable[Condition], context: Context) -> Result:
    """Three-valued or: one true settles it."""
    missing: list[str] = []
    unknown = False
    for condition in conditions:
        result = check(condition, context)
        if result.held:
            return result
        unknown = unknown or result.held is None
        missing.extend(result.missing)
    return Result(None, (), tuple(missing)) if unknown else NO


def negate(result: Result) -> Result:
    """An exclusion: what is not known to hold does not exclude. Its lines are no evidence."""
    return Result(not result.held, (), result.missing if result.held is None else ())


def check(condition: Condition, context: Context) -> Result:
    """One condition."""
    if condition.all is not None:
        return conjunction(check(part, context) for part in condition.all)
    if condition.any is not None:
        return any_of(condition.any, context)
    if condition.none is not None:
        return conjunction(negate(check(part, context)) for part in condition.none)
    if condition.seen is not None:
        events = context.facts.seen(*rows(condition.seen))
        return Result(True, tuple(event.line for event in events[:3])) if events else NO
    if condition.after is not None:
        start = context.problem.first_number if context.problem else 0
        events = context.facts.seen(*rows(condition.after))
        return YES if any(event.line.number < start for event in events) else NO
    if condition.log is not None:
        line = context.text.line_with(condition.log)
        return Result(True, (line,)) if line else NO
    if condition.fact is not None:
        return _compare(condition, context)
    return _about_problem(condition, context)


def _about_problem(condition: Condition, context: Context) -> Result:
    problem = context.problem
    if problem is None:
        return NO
    if condition.problem is not None:
        wanted = rows(condition.problem)
        lines = tuple(e.line for e in problem.events if e.row in wanted)
        return Result(True, lines[:1]) if lines else NO
    if condition.hint is not None:
        causes = (e for e in problem.events if e.role is RowRole.CAUSE)
        return YES if any(event.subtype in condition.hint for event in causes) else NO
    if condition.generic is not None:
        return YES if problem.exception and problem.role is RowRole.CAUSE else NO
    if condition.first is not None:
        return NO if _cause_before(problem, context.facts) else YES
    if condition.text is not None:
        return YES if found(condition.text, problem.text) else NO
    if condition.exception is not None:
        return YES if problem.exception in condition.exception else NO
    if condition.site is not None:
        return YES if problem.sites.intersection(condition.site) else NO
    if condition.phase is not None:
        return YES if problem.phase in condition.phase else NO
    return YES if found(condition.process or "", problem.line.speaker.process or "") else NO


def _cause_before(problem: Problem, facts: Facts) -> bool:
    """Whether a failure was stated before the problem."""
    return any(
        p.role is RowRole.CAUSE and p.first_number < problem.first_number for p in facts.problems
    )


@lru_cache(maxsize=512)
def rows(names: tuple[str, ...]) -> tuple[str, ...]:
    """Row ids with the groups of `rules/groups.yaml` ("@oom") put in their place."""
    groups = load_groups()
    return tuple(row for name in names for row in (groups[name[1:]] if name[0] == "@" else (name,)))


@lru_cache(maxsize=1)
def load_groups() -> dict[str, tuple[str, ...]]:
    """The shipped groups of rows."""
    body = read_data("rules/groups.yaml")["groups"]
    return {name: tuple(members) for name, members in body.items()}


_OPERATORS: dict[str, Callable[[Value, Value], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _compare(condition: Condition, context: Context) -> Result:
    """A fact against a value: true when it holds for any rank."""
    facts = context.facts.all(condition.fact or "")
    if condition.own:
        numbers = context.own_numbers
        facts = tuple(fact for fact in facts if fact.line in numbers)
    if condition.exists is not None:
        return YES if bool(facts) is condition.exists else NO
    if not facts:
        return Result(None, (), (condition.fact or "",))
    lines = {line.number: line for line in context.facts.lines} if facts[0].line else {}
    for fact in facts:
        if _holds(condition, fact):
            line = lines.get(fact.line or -1)
            return Result(True, (line,) if line else ())
    return NO


def _holds(condition: Condition, fact: Fact) -> bool:
    """Every comparison of the condition; values of different kinds never hold."""
    if condition.in_ is not None and fact.value not in [_like(v, fact) for v in condition.in_]:
        return False
    if condition.matches is not None and not found(condition.matches, str(fact.value)):
        return False
    for name, compare in _OPERATORS.items():
        wanted = getattr(condition, name)
        try:
            if wanted is not None and not compare(fact.value, _like(wanted, fact)):
                return False
        except TypeError:
            return False
    return True


def _like(wanted: Value, fact: Fact) -> Value:
    """The value of a rule in the fact's own type: "0 GiB" as bytes."""
    if fact.unit == "bytes" and isinstance(wanted, str):
        try:
            return parse_size(wanted)
        except UnitError:
            return wanted
    return wanted
