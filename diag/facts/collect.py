"""One start attempt -> Facts: events by the catalogue, config by the argument parsers, problems, derived values.

Every rank keeps its own values, in log order. A resolved engine configuration comes before what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from diag.facts import args
from diag.facts.catalogue import Catalogue, catalogue
from diag.facts.course import describe
from diag.facts.derive import derive
from diag.facts.model import Event, Fact, Facts
from diag.facts.problems import gather, phase_marks
from diag.log.model import Attempt, LogLine
from diag.terms import Origin

MAX_EVENTS = 200_000
MAX_VALUES = 2_000  # values of one fact that are kept

_KEEP_HIGHEST = (
    "serving.kv_usage_max",
    "serving.waiting_max",
    "serving.running_max",
    "serving.preemptions",
)


class _Table:
    """Facts by name, bounded."""

    def __init__(self) -> None:
        self.facts: dict[str, list[Fact]] = {}

    def add(self, fact: Fact) -> None:
        """Append a fact, or replace the highest so far where only that matters."""
        known = self.facts.setdefault(fact.name, [])
        if fact.name in _KEEP_HIGHEST:
            if not known or float(fact.value) > float(known[0].value):
                known[:] = [fact]
            return
        if len(known) < MAX_VALUES:
            known.append(fact)

    def settle(self, facts: Iterable[Fact]) -> None:
        """Put resolved values in the place of those asked for."""
        for fact in facts:
            self.facts[fact.name] = [fact]


def collect(
    attempt: Attempt,
    *,
    launch: str | None = None,
    earlier_engine: bool = False,
    known: Catalogue | None = None,
) -> Facts:
    """All facts of one attempt.

    `launch` is a command line that adds what the log does not print; `earlier_engine` says that a former engine of
    the same program was not closed.
    """
    known = known or catalogue()
    events = find_events(attempt.lines, known)
    table = _Table()
    resolved: list[Fact] = []
    for event in events:
        for fact in _facts_of(event, known):
            table.add(fact)
        settings = args.from_event(event)
        if event.row in args.RESOLVED_ROWS:
            resolved = resolved or settings
        else:
            for fact in settings:
                table.add(fact)
    table.settle(resolved)
    command = launch or args.command_in(attempt.lines)
    if command:
        origin = Origin.ASSUMED if launch else Origin.LOGGED
        for fact in args.from_command(command, origin=origin):
            if fact.name not in table.facts:
                table.add(fact)
        table.add(Fact(name="config.command", value=command, unit="text", origin=origin))
    problems = gather(attempt.lines, events, phase_marks(events))
    facts = Facts(
        table={name: tuple(values) for name, values in table.facts.items()},
        events=events,
        problems=problems,
        lines=attempt.lines,
    )
    return describe(derive(facts), earlier_engine=earlier_engine)


def find_events(lines: Sequence[LogLine], known: Catalogue) -> tuple[Event, ...]:
    """Catalogue rows on the lines, in log order."""
    return tuple(islice(known.events(lines), MAX_EVENTS))


def _facts_of(event: Event, known: Catalogue) -> Iterable[Fact]:
    """The facts that a row's `facts:` mapping makes of its groups; a group written `=text` is a constant."""
    for name, group in known.by_id[event.row].facts.items():
        value = group[1:] if group.startswith("=") else event.values.get(group)
        if value is None:
            continue
        unit = known.registry[name]["unit"]
        if unit == "bool":
            value = str(value).lower() not in ("false", "0", "none")
        yield Fact(name=name, value=value, unit=unit, line=event.line.number, rank=event.line.rank)
