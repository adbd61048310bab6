"""The shape of a failure rule (`rules/failures/<prefix>/<slug>.yaml`). Unknown keys are errors.

A rule names what it looks for in one problem (or in the whole log), and what to tell the user. The operators are
closed: no expressions, no code.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diag.terms import Family, Phase

Scalar: TypeAlias = bool | int | float | str


class Strict(BaseModel):
    """Base: no unknown keys, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Condition(Strict):
    """One test. Exactly one of the first group is given; `fact` goes with one comparison.

    An absent line is false, an absent fact unknown. Unknown spreads: one true settles `any`, one false settles `all`.
    `none` excludes: what is not known to hold does not exclude.
    """

    all: tuple[Condition, ...] | None = None
    any: tuple[Condition, ...] | None = None
    none: tuple[Condition, ...] | None = None
    problem: tuple[str, ...] | None = Field(
        None, description="catalogue rows on the problem's own lines"
    )
    hint: tuple[str, ...] | None = Field(None, description="class hints of cause rows on its lines")
    generic: Literal[True] | None = Field(
        None, description="an exception that no catalogue row explains"
    )
    first: Literal[True] | None = Field(None, description="no failure was stated before it")
    text: str | None = Field(None, description="pattern in the exception's or message's text")
    exception: tuple[str, ...] | None = Field(None, description="last part of the exception class")
    site: tuple[str, ...] | None = Field(
        None, description="names from rules/sites.yaml in the traceback"
    )
    phase: tuple[Phase, ...] | None = Field(None, description="phases the problem may be in")
    process: str | None = Field(
        None, description="pattern in the name of the process that reports it"
    )
    seen: tuple[str, ...] | None = Field(None, description="catalogue rows anywhere in the attempt")
    after: tuple[str, ...] | None = Field(None, description="catalogue rows before the problem")
    log: str | None = Field(None, description="pattern in any line of the attempt")
    fact: str | None = None
    own: bool = Field(False, description="only values printed on the problem's own lines")
    eq: Scalar | None = None
    ne: Scalar | None = None
    lt: Scalar | None = None
    le: Scalar | None = None
    gt: Scalar | None = None
    ge: Scalar | None = None
    in_: tuple[Scalar, ...] | None = Field(None, alias="in")
    matches: str | None = None
    exists: bool | None = None

    @model_validator(mode="after")
    def _one_test(self) -> Condition:
        tests = [name for name in _TESTS if getattr(self, name) is not None]
        comparisons = [name for name in _COMPARISONS if getattr(self, name) is not None]
        if len(tests) != 1:
            raise ValueError(f"give exactly one of {', '.join(_TESTS)}; got {tests or 'none'}")
        if tests == ["fact"] and not comparisons:
            raise ValueError("a fact needs a comparison: eq ne lt le gt ge in matches exists")
        if tests != ["fact"] and (comparisons or self.own):
            raise ValueError(f"{comparisons or ['own']} goes with fact")
        return self


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


class When(Strict):
    """The three lists that must hold together."""

    all: tuple[Condition, ...] = ()
    any: tuple[Condition, ...] = ()
    none: tuple[Condition, ...] = ()


class Adjust(Strict):
    """Another confidence when more is known; the first that holds is taken."""

    when: Condition
    confidence: float = Field(ge=0, le=1)


class Reading(Strict):
    """Another possible reading, shown beside the diagnosis when its condition holds."""

    subtype: str
    family: Family
    why: str
    confidence: float = Field(0.2, ge=0, le=1)
    when: Condition | None = None


class Source(Strict):
    """Where the rule's knowledge comes from."""

    url: str
    says: str


class Example(Strict):
    """A small log and what the rule must make of it: the example is the test."""

    name: str
    expect: Literal["matched", "not_matched"]
    log: str
    vllm: str | None = None
    launch: str | None = None
    phase: Phase | None = None


class Rule(Strict):
    """One failure."""

    schema_: Literal[1] = Field(alias="schema")
    id: str = Field(pattern=r"^[a-z]+\.[a-z0-9_]+$")
    subtype: str | None = Field(
        None, description="taxonomy subtype when several rules lead to one; default: id"
    )
    title: str = Field(min_length=8, max_length=90)
    family: Family
    status: Literal["draft", "tested", "stable"] = "tested"
    vllm: str | None = None
    subject: Literal["problem", "log"] = "problem"
    phase: Phase | None = Field(None, description="the phase when the problem itself does not tell")
    fixed_phase: bool = Field(False, description="`phase` holds whatever the traceback says")
    priority: int = Field(ge=0, le=100)
    confidence: float = Field(0.9, ge=0, le=1)
    adjust: tuple[Adjust, ...] = ()
    when: When
    nothing_ran_out: bool = False
    summary: tuple[str, ...] = Field(min_length=1)
    missing: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()
    confirm: tuple[str, ...] = Field((), description="rows quoted as confirmation when present")
    known_gaps: str = ""
    sources: tuple[Source, ...] = ()
    examples: tuple[Example, ...]

    @property
    def name(self) -> str:
        """The subtype this rule stands for."""
        return self.subtype or self.id
