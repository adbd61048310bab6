"""Typed facts: what the catalogue found on the lines of one start attempt.

An Event is one catalogue row on one line. A Fact is one named value with its unit, rank, line and origin. A Problem
is something that went wrong: an exception chain with its frames, or a line that states a failure by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from diag.log.model import LogLine
from diag.terms import Origin, Phase, RowRole

Value: TypeAlias = int | float | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One named value. Sizes are whole bytes. `rank` None: engine-wide, or the log does not say."""

    name: str  # dotted, from `facts.names`
    value: Value
    unit: str  # "bytes" "tokens" "blocks" "count" "s" "ratio" "x" "pct" "text" "bool"
    line: int | None = None
    rank: int | None = None
    origin: Origin = Origin.LOGGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A catalogue row found on a line. `values` are its named groups, converted (sizes in bytes)."""

    row: str
    role: RowRole
    phase: Phase | None
    line: LogLine
    values: Mapping[str, Value]
    subtype: str | None = None  # the row's class hint, e.g. "kv.no_blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a Python traceback."""

    file: str
    lineno: int | None
    function: str
    number: int  # line of the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that went wrong, once: repeats by other ranks and second copies are folded into `copies`.

    `frames` run from the outermost call to the failing one; for a chain of exceptions ("During handling of ...") they
    are the frames of all its parts. `sites` are the named places of `rules/sites.yaml` the frames pass through.
    """

    line: LogLine  # the line that says it best: the exception text, or the event's line
    text: str  # exception text or message, wrapped lines joined
    exception: str | None  # last part of the class name, e.g. "OutOfMemoryError"
    role: RowRole
    phase: Phase | None
    frames: tuple[Frame, ...] = ()
    sites: frozenset[str] = frozenset()
    events: tuple[Event, ...] = ()  # catalogue rows on its lines
    copies: tuple[LogLine, ...] = ()
    first_number: int = 0  # first line of the traceback

    @property
    def cut_off(self) -> bool:
        """A traceback whose end, with the error itself, is not in the log."""
        return bool(self.frames) and not self.text

    @property
    def rows(self) -> frozenset[str]:
        """Ids of the catalogue rows that the problem's lines match."""
        return frozenset(event.row for event in self.events)

    @property
    def rank(self) -> int | None:
        """Rank of the process that printed it first."""
        return self.line.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that one attempt says."""

    table: Mapping[str, tuple[Fact, ...]] = field(default_factory=dict)  # by name, in log order
    events: tuple[Event, ...] = ()
    problems: tuple[Problem, ...] = ()  # in log order
    lines: tuple[LogLine, ...] = ()
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Fact]:
        for facts in self.table.values():
            yield from facts

    def all(self, name: str, *, rank: int | None = None) -> tuple[Fact, ...]:
        """Every value of a fact, or those of one rank."""
        found = self.table.get(name, ())
        return found if rank is None else tuple(fact for fact in found if fact.rank == rank)

    def get(self, name: str, *, rank: int | None = None) -> Fact | None:
        """The value to compute with: of `rank` if that rank printed one, else the first printed; None if absent."""
        found = self.table.get(name, ())
        if rank is not None:
            for fact in found:
                if fact.rank == rank:
                    return fact
        return found[0] if found else None

    def number(self, name: str, *, rank: int | None = None) -> float | None:
        """`get(...).value` as a number; None when absent or not a number."""
        fact = self.get(name, rank=rank)
        if fact is None or isinstance(fact.value, (str, bool)):
            return None
        return fact.value

    def size(self, name: str, *, rank: int | None = None) -> int | None:
        """`number` as whole bytes."""
        value = self.number(name, rank=rank)
        return None if value is None else round(value)

    def text(self, name: str) -> str | None:
        """`get(...).value` as text; None when absent."""
        fact = self.get(name)
        return None if fact is None else str(fact.value)

    def flag(self, name: str) -> bool | None:
        """`get(...).value` as a truth value; None when absent."""
        fact = self.get(name)
        return None if fact is None else bool(fact.value)

    def seen(self, *rows: str) -> tuple[Event, ...]:
        """Events of the given catalogue rows, in log order."""
        wanted = set(rows)
        return tuple(event for event in self.events if event.row in wanted)
