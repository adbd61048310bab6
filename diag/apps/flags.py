"""`oomdoc flags`: the history of one flag or variable as text or JSON, or a list of what changed. Thin: the tables of
`diag.fixes.flag_history` say it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diag.errors import UsageError
from diag.report.safe import clean

if TYPE_CHECKING:
    from packaging.version import Version

    from diag.fixes.flag_history import FlagHistory, Run

SCHEMA_VERSION = 1
_LABEL = 11  # columns of the left column


def answer(name: str | None, release: str | None, *, as_json: bool) -> str:
    """What the command prints. Raises UsageError for a release that is no number and a name of no release."""
    from diag.report.jsonout import dump

    version = _version(release)
    if name is None:
        changes = list(_changes(version))
        body = {"schema_version": SCHEMA_VERSION, "changes": changes}
        return dump(body) if as_json else _listing(changes)
    found = _find(name)
    return dump(_as_json(found, version)) if as_json else "\n".join(_page(found, version))


def _version(release: str | None) -> Version | None:
    from diag.release import parse_release

    version = parse_release(release)
    if release is not None and version is None:
        raise UsageError(f"{clean(release, 40)!r} is not a vLLM release", hint="write it like 0.12")
    return version


def _find(name: str) -> FlagHistory:
    from diag.fixes.flag_history import history, nearest

    found = history(name)
    if found is None:
        near = nearest(name)
        hint = f"did you mean {' or '.join(near)}?" if near else None
        raise UsageError(f"no vLLM release has {clean(name, 80)!r}", hint=hint)
    return found


# --- one name -------------------------------------------------------------------------------------------------


def _page(found: FlagHistory, version: Version | None) -> Iterator[str]:
    from diag.fixes.flag_history import describe, shown

    yield found.name
    rows = [
        ("in vLLM", ", ".join(map(str, found.runs))),
        ("stands for", found.same_as),
        ("also", ", ".join(f"{name} ({_span(runs)})" for name, runs in _other_spellings(found))),
        ("takes", _steps(found.takes) if found.kind == "flag" else None),
        ("type", _steps({at: kind or "text" for at, kind in found.types.items()})),
        ("default", _steps({at: shown(text) for at, text in found.defaults.items()})),
        ("choices", ", ".join(list(found.choices.values())[-1])),
        ("--no- form", _negated(found)),
        ("deprecated", f"since {found.deprecated_since}" if found.deprecated_since else None),
        ("successor", _successor(found)),
    ]
    rows += [("note", f"{item.releases}: {item}") for item in found.effects]
    yield from (f"  {label:<{_LABEL}} {text}" for label, text in rows if text and text != "text")
    if version is not None:
        yield ""
        yield describe(found.name, version)


def _span(runs: tuple[Run, ...]) -> str:
    return ", ".join(map(str, runs))


def _steps(values: Mapping[str, Any]) -> str:
    """`0.9; 0.92 from 0.20.0`; what comes out the same is said once."""
    parts: list[tuple[str, str]] = []
    for release, value in values.items():
        if not parts or parts[-1][1] != str(value):
            parts.append((release, str(value)))
    return "; ".join(
        value if not index else f"{value} from {release}"
        for index, (release, value) in enumerate(parts)
    )


def _negated(found: FlagHistory) -> str | None:
    since = next((release for release, works in found.negated.items() if works), None)
    return f"since {since}" if since else None


def _successor(found: FlagHistory) -> str | None:
    if found.successor is None:
        return None
    near = "" if found.successor.exact else "near it: "
    why = f" ({found.successor.why})" if found.successor.why else ""
    return f"{near}{found.successor}{why}"


def _other_spellings(found: FlagHistory) -> list[tuple[str, tuple[Run, ...]]]:
    from diag.fixes.flag_history import history, names

    others = (history(name) for name in names(found.kind))
    return [(item.name, item.runs) for item in others if item and item.same_as == found.name]


def _as_json(found: FlagHistory, version: Version | None) -> dict[str, Any]:
    body = {"schema_version": SCHEMA_VERSION, **asdict(found)}
    body["aliases"] = [
        {"name": name, "runs": [asdict(run) for run in runs]}
        for name, runs in _other_spellings(found)
    ]
    if version is not None:
        body["at"] = {
            "vllm": str(version),
            "exists": found.exists(version),
            "default": found.default(version),
            "effects": [asdict(effect) for effect in found.in_force(version)],
        }
    return body


# --- what changed ---------------------------------------------------------------------------------------------


def _changes(version: Version | None) -> Iterator[dict[str, Any]]:
    """Every change of a default and every end of a flag or variable, after a release when it is given."""
    from diag.fixes.flag_history import history, names

    for name in names():
        found = history(name)
        if found is None or found.same_as or (version and found.exists(version) is not True):
            continue
        for release, old, new in found.default_changes():
            if _later(release, version):
                yield {"name": name, "release": release, "what": "default", "from": old, "to": new}
        gone = found.runs[-1].gone
        if gone is not None and _later(gone, version):
            to = str(found.successor.to) if found.successor and found.successor.exact else None
            what = "renamed" if to else "removed"
            yield {"name": name, "release": gone, "what": what, "from": name, "to": to}


def _later(release: str, version: Version | None) -> bool:
    from packaging.version import Version as Number

    return version is None or Number(release) > version


def _listing(changes: list[dict[str, Any]]) -> str:
    from diag.fixes.flag_history import shown

    if not changes:
        return "Nothing changed since."
    width = min(max(len(item["name"]) for item in changes), 44)
    lines = []
    for item in changes:
        what = item["what"]
        if what == "default":
            what = f"default {shown(item['from'])} -> {shown(item['to'])}"
        elif what == "renamed":
            what = f"renamed to {item['to']}"
        lines.append(f"{item['name']:<{width}}  {item['release']:<9} {what}")
    return "\n".join(lines)
