"""Checks everything below `rules/`: what a maintainer runs after adding a row or a rule.

Out: one message per problem, none when all is well. A pattern must compile in RE2, which refuses what could backtrack
without bound; examples must do what they say.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diag.errors import RuleFileError, UnitError
from diag.facts.catalogue import Catalogue, Row, load, message_files
from diag.log.reader import read_lines
from diag.log.source import read_text
from diag.patterns import why_refused
from diag.release import in_range
from diag.resources import data_dir, read_yaml
from diag.rules.load import read_rules
from diag.rules.schema import Condition, Rule
from diag.units import parse_size


def check_all(rules_dir: Path | None = None) -> list[str]:
    """Every problem of the catalogue, sites, phases, groups and failure rules, in words."""
    folder = rules_dir or data_dir("rules")
    try:
        known = load(message_files(folder), read_yaml(folder / "facts.yaml")["facts"])
        rules = read_rules(folder)
    except RuleFileError as error:
        return list(error.problems)
    return [
        *check_catalogue(known),
        *check_names(folder, known),
        *check_rules(rules, known, folder),
    ]


def check_catalogue(known: Catalogue) -> Iterator[str]:
    """Rows: unique ids, patterns that RE2 takes, known facts, examples with the right values."""
    for row_id, count in Counter(row.id for row in known.rows).items():
        if count > 1:
            yield f"messages: row {row_id!r} is defined {count} times"
    for row in known.rows:
        where = f"messages/{row.file}: {row.id}"
        yield from (f"{where}: {problem}" for problem in _check_row(row, known))


def _check_row(row: Row, known: Catalogue) -> Iterator[str]:
    problem = why_refused(row.pattern)
    if problem:
        yield problem
        return
    groups = set(re.compile(row.pattern).groupindex)
    for fact, group in row.facts.items():
        if fact not in known.registry:
            yield f"unknown fact {fact!r}{_nearest(fact, known.registry)}"
        if not group.startswith("=") and group not in groups:
            yield f"fact {fact!r} takes group {group!r}, which the pattern lacks"
    if row.releases:
        try:
            in_range(None, row.releases)
        except UnitError as error:
            yield str(error)
    if row.values and len(row.values) != len(row.examples):
        yield f"{len(row.examples)} examples but {len(row.values)} sets of values"
    for index, example in enumerate(row.examples):
        wanted = row.values[index] if index < len(row.values) else {}
        yield from _check_example(row, example, wanted, known)


def _check_example(row: Row, example: str, wanted: Any, known: Catalogue) -> Iterator[str]:
    """The example, read as the log reader reads it, must give the row and its values."""
    raw = read_text(example)
    log = read_lines(raw.lines, name="example", total_lines=raw.total_lines, total_bytes=0)
    found = [event for line in log.lines for event in known.find(line) if event.row == row.id]
    if not found:
        yield f"the pattern does not find its own example {example[:80]!r}"
        return
    values = dict(found[0].values)
    for name, value in wanted.items():
        if values.get(name) != value and not _close(values.get(name), value):
            yield f"example gives {name} = {values.get(name)!r}, expected {value!r}"


def _close(left: object, right: object) -> bool:
    return (
        isinstance(left, float)
        and isinstance(right, (int, float))
        and abs(left - right) <= 1e-9 * max(1.0, abs(left))
    )


def check_names(folder: Path, known: Catalogue) -> Iterator[str]:
    """Sites, phases and groups name only what exists."""
    for name, body in read_yaml(folder / "sites.yaml")["sites"].items():
        for pattern in (*body.get("frames", ()), *body.get("inner", ())):
            if problem := why_refused(pattern):
                yield f"sites.yaml: {name}: {problem}"
    phases = read_yaml(folder / "phases.yaml")["after"]
    groups = read_yaml(folder / "groups.yaml")["groups"]
    for file, mapping in (("phases.yaml", phases), ("groups.yaml", groups)):
        for name, rows in mapping.items():
            for row in rows:
                if row not in known.by_id:
                    yield f"{file}: {name}: unknown row {row!r}{_nearest(row, known.by_id)}"


@dataclass(frozen=True, slots=True)
class _Names:
    """What rules may refer to."""

    known: Catalogue
    sites: Mapping[str, Any]
    groups: Mapping[str, Any]


def check_rules(rules: Iterable[Rule], known: Catalogue, folder: Path) -> Iterator[str]:
    """Failure rules: path is id, unique titles, known rows, facts and sites, both kinds of example."""
    rules = tuple(rules)
    names = _Names(
        known,
        read_yaml(folder / "sites.yaml")["sites"],
        read_yaml(folder / "groups.yaml")["groups"],
    )
    for title, count in Counter(rule.title for rule in rules).items():
        if count > 1:
            yield f"title {title!r} is used by {count} rules"
    for rule in rules:
        where = f"failures/{rule.id.replace('.', '/')}.yaml"
        if not (folder / where).is_file():
            yield f"{where}: the id {rule.id!r} does not match the path of its file"
        yield from (f"{where}: {problem}" for problem in _check_rule(rule, names))


def _check_rule(rule: Rule, names: _Names) -> Iterator[str]:
    known = names.known
    kinds = {example.expect for example in rule.examples}
    for kind in ("matched", "not_matched"):
        if kind not in kinds:
            yield f"no example that is {kind}"
    for condition in rule.conditions():
        yield from _check_condition(condition, names)
    for name in re.findall(r"\{([\w.]+)\}", " ".join(rule.summary)):
        if name != "problem.text" and name not in known.registry:
            yield f"unknown fact {{{name}}}{_nearest(name, known.registry)}"
    for row in rule.confirm:
        if row not in known.by_id:
            yield f"confirm: unknown row {row!r}{_nearest(row, known.by_id)}"


def _check_condition(condition: Condition, names: _Names) -> Iterator[str]:
    known, sites, groups = names.known, names.sites, names.groups
    for row in (*(condition.problem or ()), *(condition.seen or ()), *(condition.after or ())):
        ids = groups if row.startswith("@") else known.by_id
        if row.removeprefix("@") not in ids:
            yield f"unknown row {row!r}{_nearest(row.removeprefix('@'), ids)}"
    for site in condition.site or ():
        if site not in sites:
            yield f"unknown site {site!r}{_nearest(site, sites)}"
    if condition.fact is not None:
        yield from _check_fact(condition, known)
    for pattern in (condition.text, condition.log, condition.process, condition.matches):
        if pattern is not None and (problem := why_refused(pattern)):
            yield problem


def _check_fact(condition: Condition, known: Catalogue) -> Iterator[str]:
    """The fact exists, and what it is compared with is of its kind."""
    name = condition.fact or ""
    if name not in known.registry:
        yield f"unknown fact {name!r}{_nearest(name, known.registry)}"
        return
    unit = known.registry[name]["unit"]
    ordered = (condition.lt, condition.le, condition.gt, condition.ge)
    for value in (*ordered, condition.eq, condition.ne, *(condition.in_ or ())):
        if value is not None and not _of_kind(value, unit):
            yield f"fact {name!r} is of unit {unit}; it can't be compared with {value!r}"
    if unit == "text" and any(value is not None for value in ordered):
        yield f"fact {name!r} is text; it has no order"


def _of_kind(value: object, unit: str) -> bool:
    if unit == "text":
        return isinstance(value, str)
    if unit == "bool":
        return isinstance(value, bool)
    if unit == "bytes" and isinstance(value, str):
        try:
            parse_size(value)
        except UnitError:
            return False
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""
