"""The Comparison of two starts: all that a renderer needs, as plain data. `diag.compare` fills it.

Sizes are whole bytes, None is unknown. `change` is BAD minus GOOD.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diag.facts.model import Value
from diag.terms import Origin, Outcome

SCHEMA_VERSION = 1


class Explained(str, Enum):
    """How far the changed terms explain the failure."""

    BY_ONE = "by_one"  # one term's change is as large as what is missing
    TOGETHER = "together"  # several together are
    PARTLY = "partly"  # all of them are not
    NO_NUMBERS = "no_numbers"  # what is missing, or every term, is not in the logs
    NOT_NEEDED = "not_needed"  # the second start did not fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two starts."""

    name: str
    attempt: int
    attempts: int
    outcome: Outcome
    vllm_version: str | None
    engine: str | None
    model: str | None
    device: str | None
    subtype: str | None  # of the failure
    title: str  # the failure or the state in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A size with its source."""

    bytes: int
    origin: Origin
    lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TermChange:
    """One memory term in both. `worse`: bytes by which its change adds to what is missing; None: no part in it."""

    term: str
    label: str
    good: Amount | None
    bad: Amount | None
    change: int | None
    worse: int | None = None
    explains: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting, variable or line of the environment that differs. `moves`: terms it has a part in."""

    name: str  # a flag, a variable, or words
    good: Value | None
    bad: Value | None
    unit: str = "text"
    good_default: bool = False  # the release's default, not printed
    bad_default: bool = False
    moves: tuple[str, ...] = ()
    explains: bool = False  # it moves a term that explains the failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDifference:
    """A known change of vLLM that lies between the two releases. `gone`: BAD is the older one."""

    id: str
    since: str
    says: str
    pool: str  # "larger" "smaller" "none": what it does to the pool from `since` on
    gone: bool
    moves: tuple[str, ...] = ()
    explains: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two starts side by side: what differs, and what of it explains the failure of the second."""

    good: Side
    bad: Side
    explained: Explained
    verdict: str  # one to three sentences
    missing_bytes: int | None
    missing: str  # what is missing, in words; "" when the second start did not fail
    terms: tuple[TermChange, ...] = ()
    settings: tuple[SettingChange, ...] = ()
    environment: tuple[SettingChange, ...] = ()
    releases: tuple[ReleaseDifference, ...] = ()
    notes: tuple[str, ...] = ()
