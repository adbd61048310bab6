"""The shape of a failure rule (`rules/failures/<prefix>/<slug>.yaml`). Unknown keys are errors.

A rule names what it looks for in one problem (or in the whole log), and what to tell the user. The operators are
closed: no expressions, no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diag.schema import Strict
from diag.terms import Family, Phase

Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(Strict):
    """One test. Exactly one of the first group is given; `fact` goes with one comparison.

    An absent line is false, an absent fact unknown. Unknown spreads: one true settles `any`, one false settles `all`.
    `none` excludes: what is not known to hold does not exclude.
    """

    all: tuple[Condition, ...] | None = None
    any: tuple[Condition, ...] | None = None
    none: tuple[Condition, ...] | None = None
    problem: tuple[str, ...] | None = None  # catalogue rows on the problem's own lines
    hint: tuple[str, ...] | None = None  # class hints of cause rows on its lines
    generic: Literal[True] | None = None  # an exception that no catalogue row explains
    first: Literal[True] | None = None  # no failure was stated before it
    text: str | None = None  # pattern in the exception's or message's text
    exception: tuple[str, ...] | None = None  # last part of the exception class
    site: tuple[str, ...] | None = None  # names from rules/sites.yaml in the traceback
    phase: tuple[Phase, ...] | None = None  # phases the problem may be in
    process: str | None = None  # pattern in the name of the process that reports it
    seen: tuple[str, ...] | None = None  # catalogue rows anywhere in the attempt
    after: tuple[str, ...] | None = None  # catalogue rows before the problem
    log: str | None = None  # pattern in any line of the attempt
    fact: str | None = None
    own: bool = False  # only values printed on the problem's own lines
    eq: Scalar | None = None
    ne: Scalar | None = None
    lt: Scalar | None = None
    le: Scalar | None = None
    gt: Scalar | None = None
    ge: Scalar | None = None
    in_: tuple[Scalar, ...] | None = None
    matches: str | None = None
    exists: bool | None = None

    def problems(self) -> Iterator[str]:
        """Not exactly one test, or comparisons without a fact."""
        tests = [name for name in _TESTS if getattr(self, name) is not None]
        comparisons = [name for name in _COMPARISONS if getattr(self, name) is not None]
        if len(tests) != 1:
            yield f"give exactly one of {', '.join(_TESTS)}; got {tests or 'none'}"
        elif tests == ["fact"] and not comparisons:
            yield "a fact needs a comparison: eq ne lt le gt ge in matches exists"
        elif tests != ["fact"] and (comparisons or self.own):
            yield f"{comparisons or ['own']} goes with fact"


_TESTS = (
    "all",
    "any",
    "none",
    "problem",
    "hint",
    "generic",
    "first",
    "text",
    "exception",
    "site",
    "phase",
    "process",
    "seen",
    "after",
    "log",
    "fact",
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "in_", "matches", "exists")


@dataclass(frozen=True, slots=True, kw_only=True)
class When(Strict):
    """The three lists that must hold together."""

    all: tuple[Condition, ...] = ()
    any: tuple[Condition, ...] = ()
    none: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjust(Strict):
    """Another confidence when more is known; the first that holds is taken."""

    when: Condition
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Strict):
    """Another possible reading, shown beside the diagnosis when its condition holds."""

    subtype: str
    family: Family
    why: str
    confidence: float = 0.2
    when: Condition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Strict):
    """Where the rule's knowledge comes from."""

    url: str
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Strict):
    """A small log and what the rule must make of it: the example is the test."""

    name: str
    expect: Literal["matched", "not_matched"]
    log: str
    vllm: str | None = None
    launch: str | None = None
    phase: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Strict):
    """One failure."""

    schema_: Literal[1]
    id: str
    subtype: str | None = None  # taxonomy subtype when several rules lead to one; default: id
    title: str
    family: Family
    status: Literal["draft", "tested", "stable"] = "tested"
    vllm: str | None = None
    subject: Literal["problem", "log"] = "problem"
    phase: Phase | None = None  # the phase when the problem itself does not tell
    fixed_phase: bool = False  # `phase` holds whatever the traceback says
    priority: int
    confidence: float = 0.9
    adjust: tuple[Adjust, ...] = ()
    when: When
    summary: tuple[str, ...]
    missing: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()
    confirm: tuple[str, ...] = ()  # rows quoted as confirmation when present
    known_gaps: str = ""
    sources: tuple[Source, ...] = ()
    examples: tuple[Example, ...]

    def problems(self) -> Iterator[str]:
        """What types don't express: bounds, and the form of id, title and conditions."""
        if not re.fullmatch(r"[a-z]+\.[a-z0-9_]+", self.id):
            yield f"id {self.id!r} is not of the form prefix.slug"
        if not 8 <= len(self.title) <= 90:
            yield f"title has {len(self.title)} characters; 8 to 90 are allowed"
        if not 0 <= self.priority <= 100:
            yield f"priority {self.priority} is not within 0 and 100"
        if not self.summary:
            yield "summary needs at least one text"
        adjusted = [*(a.confidence for a in self.adjust), *(r.confidence for r in self.readings)]
        for confidence in (self.confidence, *adjusted):
            if not 0 <= confidence <= 1:
                yield f"confidence {confidence} is not within 0 and 1"
        for condition in self.conditions():
            yield from condition.problems()

    def conditions(self) -> Iterator[Condition]:
        """Every condition of the rule, nested ones too."""
        yield from _walk(self.when)
        for adjust in self.adjust:
            yield from _walk(adjust.when)
        for reading in self.readings:
            if reading.when is not None:
                yield from _walk(reading.when)

    @property
    def name(self) -> str:
        """The subtype this rule stands for."""
        return self.subtype or self.id


def _walk(part: Condition | When) -> Iterator[Condition]:
    if isinstance(part, Condition):
        yield part
    for nested in (*(part.all or ()), *(part.any or ()), *(part.none or ())):
        yield from _walk(nested)
