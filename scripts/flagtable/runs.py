"""Rows of many releases folded into one: runs in which a name exists, and the releases from which a value holds.

`{"0.9.1": row, "0.9.2": row}` becomes `runs: [[0.9.1, null]]` (first release, first one without it) and, for each
property, the value itself or `{release from which: value}` when it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from flagtable.arguments import Flag


def runs(releases: Sequence[str], having: Mapping[str, Any]) -> list[list[str | None]]:
    """[first release, first release without] pairs; None in second place: it is in the newest one."""
    found: list[list[str | None]] = []
    inside = False
    for release in releases:
        if release in having and not inside:
            found.append([release, None])
        elif release not in having and inside:
            found[-1][1] = release
        inside = release in having
    return found


def changes(releases: Sequence[str], values: Mapping[str, Any]) -> Any:
    """The value when it never changes, else {release from which: value}."""
    since: dict[str, Any] = {}
    for release in releases:
        if release in values and (not since or next(reversed(since.values())) != values[release]):
            since[release] = values[release]
    return next(iter(since.values())) if len(since) == 1 else since


def flag_rows(read: Mapping[str, Mapping[str, Flag]]) -> dict[str, dict[str, Any]]:
    """One row a flag and one a second spelling, by name. `read`: flags by release, oldest first."""
    releases = list(read)
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted({name for flags in read.values() for name in flags}):
        having = {release: read[release][name] for release in releases if name in read[release]}
        row: dict[str, Any] = {"runs": runs(releases, having)}
        row["default"] = changes(releases, {r: flag.default for r, flag in having.items()})
        row["takes"] = changes(releases, {r: flag.takes for r, flag in having.items()})
        row["type"] = changes(releases, {r: flag.type for r, flag in having.items()})
        row["negated"] = changes(releases, {r: flag.negated for r, flag in having.items()})
        row["choices"] = changes(
            releases, {r: list(flag.choices or ()) for r, flag in having.items()}
        )
        row["deprecated"] = next((r for r, flag in having.items() if flag.deprecated), None)
        rows[name] = _lean(row)
    for name, row in _aliases(read, releases).items():
        rows.setdefault(name, row)
    return dict(sorted(rows.items()))


def _aliases(
    read: Mapping[str, Mapping[str, Flag]], releases: Sequence[str]
) -> dict[str, dict[str, Any]]:
    owners: dict[str, dict[str, str]] = {}
    for release in releases:
        for flag in read[release].values():
            for alias in flag.aliases:
                owners.setdefault(alias, {})[release] = flag.name
    return {
        alias: {"runs": runs(releases, having), "is": changes(releases, having)}
        for alias, having in owners.items()
    }


def _lean(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what a reader assumes: default None, one value, no type, choices or marks."""
    usual = {"default": "None", "takes": "value", "negated": False, "choices": []}
    return {
        key: value
        for key, value in row.items()
        if value is not None and (key not in usual or value != usual[key])
    }


def variable_rows(read: Mapping[str, Mapping[str, str | None]]) -> dict[str, dict[str, Any]]:
    """One row an environment variable, by name."""
    releases = list(read)
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted({name for variables in read.values() for name in variables}):
        having = {release: read[release][name] for release in releases if name in read[release]}
        rows[name] = _lean({"runs": runs(releases, having), "default": changes(releases, having)})
    return rows


def as_yaml(head: str, releases: Sequence[str], key: str, rows: Mapping[str, Any]) -> str:
    """The file: comment lines, the releases read, and one line a name."""
    lines = [*(f"# {line}" for line in head.splitlines()), "schema: 1"]
    lines += [f"releases: {_flow(list(releases))}", f"{key}:"]
    lines += [f"  {_flow(name)}: {_flow(row)}" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10**9, sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
