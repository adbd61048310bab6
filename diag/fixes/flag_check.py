"""Flags in the user's own command that this vLLM release does not have, or takes without using them.

In: a command, or the facts of a log with its arguments; the release; V0 or V1 where known. Out: notes for the report.
Nothing is said about a flag that no release has unless it is one letter or two away from one that this release has.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from diag.facts.model import Facts
from diag.fixes.command import Given, command_from_facts, given
from diag.fixes.flag_history import (
    FlagHistory,
    Successor,
    at,
    history,
    names,
    nearest,
    spelled_out,
)
from diag.memory.eras import default_engine

MAX_NOTES = 20
MAX_TYPOS = 10  # unknown names that are looked up: comparing with every name takes milliseconds
_TYPO = 0.88  # likeness of a slip of the pen; plugins have flags and variables of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagNote:
    """One flag or variable worth a word. `flag` is as the user wrote it, `why` a sentence without a full stop.

    `what`: "removed", "renamed", "not_yet", "unknown" (a typo); "no_effect", "falls_back", "refused".
    """

    flag: str
    what: str
    why: str


def check_command(
    command: str | Facts, version: Version | None, engine: str | None = None
) -> tuple[FlagNote, ...]:
    """Notes on the flags and variables of a command for one release, in the command's order, each name once.

    Args: command or the facts of a log; version None gives no notes; engine "V0" or "V1", None: the release's default.
    A command rebuilt from vLLM's own "non-default args" is checked for effects only: the release took its names.

    >>> [note.what for note in check_command("vllm serve m --swap-space 8", Version("0.18.0"))]
    ['removed']
    """
    if version is None:
        return ()
    items, typed = _items(command)
    notes: dict[str, FlagNote] = {}
    unknown: set[str] = set()
    for item in items:
        note = None
        if history(item.name) is not None:
            note = _name_note(item, version) if typed else None
            note = note or _effect_note(item, version, engine)
        elif typed and item.name not in unknown and len(unknown) < MAX_TYPOS:
            unknown.add(item.name)
            note = _typo_note(item, version)
        if note is not None:
            notes.setdefault(spelled_out(item.name), note)
    return tuple(notes.values())[:MAX_NOTES]


def _items(command: str | Facts) -> tuple[tuple[Given, ...], bool]:
    """What was given, and whether the user typed it that way."""
    if isinstance(command, str):
        return given(command), True
    printed = command.text("config.command")
    if printed:
        return given(printed), True
    return given(command_from_facts(command) or ""), False


def _name_note(item: Given, version: Version) -> FlagNote | None:
    """A note when the release does not have the name."""
    found = history(item.name)
    if found is None:
        return None
    negation = _negation_note(item, found, version)
    if negation is not None or found.exists(version) is not False:
        return negation
    before = [run for run in found.runs if run.gone and Version(run.gone) <= version]
    lost = "vLLM reads it no more" if item.variable else "gone"
    if not before:
        return FlagNote(
            flag=item.name,
            what="not_yet",
            why=f"it came with {found.runs[0].since}; this is {version}",
        )
    why = f"{lost} since {before[-1].gone}"
    successor = found.successor if _has(found.successor, version) else None
    if successor is None:
        return FlagNote(flag=item.name, what="removed", why=why)
    reason = f" ({successor.why})" if successor.why else ""
    if not successor.exact:
        return FlagNote(
            flag=item.name, what="removed", why=f"{why}; near it is {successor}{reason}"
        )
    return FlagNote(flag=item.name, what="renamed", why=f"{why}; now {successor}{reason}")


def _has(successor: Successor | None, version: Version) -> bool:
    found = history(successor.flag) if successor else None
    return found is not None and found.exists(version) is not False


def _negation_note(item: Given, found: FlagHistory, version: Version) -> FlagNote | None:
    """`--no-x` where only `--x` works."""
    plain = item.name.replace("_", "-")
    if not plain.startswith("--no-") or found.name == plain or not found.exists(version):
        return None
    if at(found.negated, version) is not False:
        return None
    since = next((release for release, works in found.negated.items() if works), None)
    if since is None:
        return FlagNote(flag=item.name, what="unknown", why=f"{found.name} has no form with --no-")
    return FlagNote(
        flag=item.name,
        what="not_yet",
        why=f"the form with --no- came with {since}; this is {version}",
    )


def _typo_note(item: Given, version: Version) -> FlagNote | None:
    if item.variable and not item.name.startswith("VLLM_"):
        return None
    wanted = spelled_out(item.name)
    if not item.variable and any(name.startswith(wanted) for name in names("flag")):
        return None  # argparse completes an unambiguous beginning
    near = nearest(item.name, 1, version, _TYPO) if len(wanted) > 3 else ()
    if not near:
        return None
    return FlagNote(
        flag=item.name, what="unknown", why=f'vLLM has no such name; "{near[0]}" is nearest'
    )


def _effect_note(item: Given, version: Version, engine: str | None) -> FlagNote | None:
    """A note when the release takes the flag without using it as asked."""
    found = history(item.name)
    if found is None or not found.effects:
        return None
    running = engine if engine in ("V0", "V1") else None
    for effect in found.in_force(version, running or default_engine(version)):
        at_default = item.value is not None and item.value == found.default(version)
        if effect.what != "no_effect" and at_default:
            continue
        if effect.what == "falls_back" and running == "V1":
            continue  # it did not
        return FlagNote(flag=item.name, what=effect.what, why=str(effect))
    return None
