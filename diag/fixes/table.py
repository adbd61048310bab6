"""`rules/fixes.yaml`, checked: which actions and instructions belong to a failure, and what does not help there.

A wrong file raises RuleFileError with every problem in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from diag.errors import RuleFileError
from diag.facts.model import Value
from diag.fixes.conditions import CONDITIONS, NAMES, names_in
from diag.resources import read_data, read_yaml
from diag.schema import Strict, build, validated
from diag.terms import Safety


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Strict):
    """A flag or variable that a step sets."""

    flag: str | None = None
    env: str | None = None
    to: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conditional(Strict):
    only: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    releases: str | None = None  # PEP 440; an unknown release does not hold

    def texts(self) -> Iterator[str]:
        """Texts that may hold numbers."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(_Conditional):
    """An instruction without a sum."""

    title: str
    do: str | None = None
    set: tuple[Setting, ...] = ()
    proof: str
    proof_plain: str | None = None
    cost: str
    safety: Safety = Safety.SAFE
    verify: str
    when_not: str

    def texts(self) -> Iterator[str]:
        """Proof and action."""
        yield self.proof
        if self.do:
            yield self.do


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempting(_Conditional):
    """A change that does not help, and why. `plain`: the reason without numbers."""

    change: str
    why: str
    plain: str | None = None

    def texts(self) -> Iterator[str]:
        """Change and reason."""
        yield self.change
        yield self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Strict):
    """One failure class: names of actions and steps in order, names of tempting changes."""

    fixes: tuple[str, ...]
    not_helpful: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FixTable(Strict):
    """The whole file."""

    schema_: int
    steps: dict[str, Step]
    not_helpful: dict[str, Tempting]
    subtypes: dict[str, Entry]

    def problems(self, actions: frozenset[str]) -> list[str]:
        """Names that don't exist, unused entries, steps that do nothing."""
        found = []
        used: set[str] = set()
        for subtype, entry in self.subtypes.items():
            used.update(entry.fixes, entry.not_helpful)
            found += [
                f"subtypes.{subtype}: unknown fix {name!r}"
                for name in entry.fixes
                if name not in actions and name not in self.steps
            ]
            found += [
                f"subtypes.{subtype}: unknown not_helpful {name!r}"
                for name in entry.not_helpful
                if name not in self.not_helpful
            ]
        entries: dict[str, _Conditional] = {**self.steps, **self.not_helpful}
        for name, item in entries.items():
            found += [
                f"{name}: unknown condition {word!r}"
                for word in (*item.only, *item.unless)
                if word not in CONDITIONS
            ]
            found += [
                f"{name}: unknown number {{{word}}}"
                for text in item.texts()
                for word in names_in(text) - NAMES
            ]
            if name not in used:
                found.append(f"{name}: no subtype uses it")
        found += [
            f"steps.{name}: needs do or set"
            for name, step in self.steps.items()
            if not step.do and not step.set
        ]
        return found


@lru_cache(maxsize=4)
def load_table(actions: frozenset[str], path: Path | None = None) -> FixTable:
    """The table, for the given action names. Raises RuleFileError with every problem."""
    name = "rules/fixes.yaml" if path is None else str(path)
    if path is None:
        table = build(FixTable, read_data(name))
    else:
        table = validated(FixTable, read_yaml(path), name)
    problems = [f"{name}: {problem}" for problem in table.problems(actions)]
    if problems:
        raise RuleFileError(problems)
    return table
