"""The history of one vLLM flag or environment variable: since, removed, renamed, defaults by release.

In: a name as people write it (`--swap-space`, `gpu_memory_utilization`, `VLLM_USE_V1`) and, where a release is asked
for, its number. Out: FlagHistory, or the nearest names. The tables are `corpus/flags/`, read from vLLM's sources.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from packaging.version import Version

from diag.release import as_release, in_range
from diag.resources import read_data

_UNSET = ("None", "", "{}", "[]", "set()")  # different ways of saying "nothing given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive releases that have a name. `gone`: the first without it, None when the newest has it; `oldest`:
    `since` is only where reading began.
    """

    since: str
    last: str
    gone: str | None
    oldest: bool = False

    def __str__(self) -> str:
        start = f"{self.since} or earlier" if self.oldest else self.since
        if self.gone is None:
            return f"since {start}"
        return f"{start} only" if self.since == self.last else f"{start} to {self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a release makes of a flag it takes: "no_effect", "falls_back" (from V1 to V0) or "refused"."""

    what: str
    why: str
    engine: str | None
    releases: str
    evidence: str

    def __str__(self) -> str:
        where = f" with {self.engine}" if self.engine else ""
        return _EFFECTS[self.what].format(where=where, why=self.why)


_EFFECTS = {
    "no_effect": "it does nothing{where}: {why}",
    "falls_back": "any value but its default makes vLLM start V0 instead of V1: {why}",
    "refused": "only its default is accepted: {why}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """What does the job of a name that is gone. `inside`: the key of a JSON flag; `exact` False: near, not the same."""

    to: str
    inside: str | None
    exact: bool
    why: str | None
    evidence: str

    @property
    def flag(self) -> str:
        """The name alone, without the value that belongs to the answer."""
        return self.to.split(" ", 1)[0].split("=", 1)[0]

    def __str__(self) -> str:
        return f'{self.inside} in the JSON of "{self.to}"' if self.inside else f'"{self.to}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagHistory:
    """One flag or variable. The maps go from the release from which a value holds to the value, oldest first."""

    name: str
    kind: str  # "flag" or "variable"
    same_as: str | None  # the flag this is a second spelling of
    runs: tuple[Run, ...]
    defaults: Mapping[str, str]
    takes: Mapping[str, str]
    types: Mapping[str, str | None]
    choices: Mapping[str, tuple[str, ...]]
    negated: Mapping[str, bool]  # whether --no-NAME works
    deprecated_since: str | None
    successor: Successor | None
    effects: tuple[Effect, ...]

    def exists(self, version: Version | None) -> bool | None:
        """Whether a release knows it; None when the release is unknown or older than what was read."""
        if version is None or self._too_old(version):
            return None
        release = as_release(version)
        return any(
            Version(run.since) <= release and (run.gone is None or release < Version(run.gone))
            for run in self.runs
        )

    def _too_old(self, version: Version) -> bool:
        return as_release(version) < Version(releases_read(self.kind)[0])

    def default(self, version: Version | None) -> str | None:
        """The default as text in a release; None when it does not have the name or the release is unknown.

        "None" is Python's None, as vLLM writes it; "=" starts source text that only running it would resolve.
        """
        return at(self.defaults, version) if self.exists(version) else None

    def in_force(self, version: Version | None, engine: str | None = None) -> tuple[Effect, ...]:
        """What a release makes of it when the engine is V0 or V1; both when `engine` is None."""
        return tuple(
            effect
            for effect in self.effects
            if in_range(version, effect.releases) and engine in (None, effect.engine or engine)
        )

    def default_changes(self) -> tuple[tuple[str, str, str], ...]:
        """(release, old, new) of every change of the default that is more than another way of writing it."""
        pairs = list(self.defaults.items())
        return tuple(
            (release, old, new)
            for (_, old), (release, new) in pairwise(pairs)
            if not _same(old, new)
        )


@lru_cache(maxsize=2)
def releases_read(kind: str = "flag") -> tuple[str, ...]:
    """The releases behind the table of flags, or of variables, oldest first."""
    return tuple(read_data(f"corpus/flags/{_FILES[kind]}.yaml")["releases"])


_FILES = {"flag": "flags", "variable": "environment"}


@lru_cache(maxsize=1)
def _rows() -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """(kind, row) by name."""
    flags = {**read_data("corpus/flags/flags.yaml")["flags"], **_changes()["also"]}
    variables = read_data("corpus/flags/environment.yaml")["variables"]
    return {
        **{name: ("flag", row) for name, row in flags.items()},
        **{name: ("variable", row) for name, row in variables.items()},
    }


@lru_cache(maxsize=1)
def _changes() -> Mapping[str, Any]:
    changes: Mapping[str, Any] = read_data("corpus/flags/changes.yaml")
    return changes


def names(kind: str | None = None) -> tuple[str, ...]:
    """Every flag and variable in the tables, or those of one kind, second spellings included."""
    return tuple(name for name, (of, _) in _rows().items() if kind in (None, of))


def history(name: str) -> FlagHistory | None:
    """The history of a name as people write it; None when no release that was read has it.

    >>> found = history("gpu_memory_utilization")
    >>> found.default(Version("0.19.1")), found.default(Version("0.20.0"))
    ('0.9', '0.92')
    """
    return _history(spelled_out(name))


def spelled_out(name: str) -> str:
    """`max_model_len`, `--max_model_len=4096` and `--compilation-config.mode` as the tables write the name."""
    text = name.strip().split("=", 1)[0]
    if text in _rows():
        return text
    plain = text.lstrip("-").replace("_", "-").split(".", 1)[0].lower()
    if not text.startswith("-") and text.upper() in _rows():
        return text.upper()
    if f"--{plain}" not in _rows() and plain.startswith("no-") and f"--{plain[3:]}" in _rows():
        return f"--{plain[3:]}"
    return text.split(".", 1)[0] if text.startswith("-") and text[:2] != "--" else f"--{plain}"


@lru_cache(maxsize=2048)
def _history(name: str) -> FlagHistory | None:
    if name not in _rows():
        return None
    kind, row = _rows()[name]
    runs = tuple(_run(kind, since, gone) for since, gone in row["runs"])
    first = runs[0].since
    same_as = row.get("is")
    if isinstance(same_as, dict):  # the flag a short form stood for changed; the newest counts
        same_as = list(same_as.values())[-1]
    whole = _history(same_as) if same_as and same_as != name else None
    if whole is not None:
        return FlagHistory(
            name=name, kind=kind, same_as=whole.name, runs=runs, defaults=whole.defaults,
            takes=whole.takes, types=whole.types, choices=whole.choices, negated=whole.negated,
            deprecated_since=whole.deprecated_since, successor=_successor(name),
            effects=whole.effects,
        )  # fmt: skip
    choices = _by_release(row.get("choices") or [], first)
    return FlagHistory(
        name=name, kind=kind, same_as=None, runs=runs,
        defaults=_by_release(row.get("default", "None"), first),
        takes=_by_release(row.get("takes", "value"), first),
        types=_by_release(row.get("type"), first),
        choices={release: tuple(values) for release, values in choices.items()},
        negated=_by_release(row.get("negated", False), first),
        deprecated_since=row.get("deprecated"),
        successor=_successor(name),
        effects=tuple(_effect(item) for item in _changes()["effects"].get(name, ())),
    )  # fmt: skip


def _run(kind: str, since: str, gone: str | None) -> Run:
    read = releases_read(kind)
    last = read[-1] if gone is None else read[read.index(gone) - 1]
    return Run(since=since, last=last, gone=gone, oldest=since == read[0])


def _by_release(value: Any, first: str) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {first: value}


def _successor(name: str) -> Successor | None:
    row = _changes()["renamed"].get(name)
    if row is None:
        return None
    return Successor(
        to=row.get("to") or row["instead"],
        inside=row.get("inside"),
        exact="to" in row,
        why=row.get("why"),
        evidence=row["evidence"],
    )


def _effect(row: Mapping[str, Any]) -> Effect:
    return Effect(
        what=row["what"],
        why=row["why"],
        engine=row.get("engine"),
        releases=row["releases"],
        evidence=row["evidence"],
    )


def at(values: Mapping[str, Any], version: Version | None) -> Any:
    """The value that holds in a release; None before the first, and when the release is unknown."""
    if version is None:
        return None
    starts = [Version(release) for release in values]
    index = bisect_right(starts, as_release(version))
    return list(values.values())[index - 1] if index else None


def _same(old: str, new: str) -> bool:
    if all(text in _UNSET or text.startswith("=") for text in (old, new)):
        return True
    try:
        return float(old) == float(new)
    except (TypeError, ValueError):
        return old == new


def nearest(
    name: str, count: int = 3, version: Version | None = None, alike: float = 0.75
) -> tuple[str, ...]:
    """The names most like one that is in no table; with a release, only names it has. `alike`: 0 to 1, as difflib's.

    >>> nearest("--gpu-memory-utilisation", 1)
    ('--gpu-memory-utilization',)
    """
    import difflib

    variable = not name.startswith("-") and name.isupper()
    wanted = name.upper() if variable else spelled_out(name)
    known = [item for item in names("variable" if variable else "flag") if len(item) > 3]
    if version is not None:
        known = [item for item in known if (found := history(item)) and found.exists(version)]
    return tuple(difflib.get_close_matches(wanted[:80], known, n=count, cutoff=alike))


def describe(name: str, version: Version | None = None, engine: str | None = None) -> str:
    """What there is to say about a name in one or a few sentences, about one release when it is given.

    >>> describe("--forced-num-gpu-blocks", Version("0.9.0"))
    '--forced-num-gpu-blocks: 0.4.0 only; not in 0.9.0. Now: "--num-gpu-blocks-override".'
    """
    found = history(name)
    if found is None:
        near = nearest(name)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        return f"{spelled_out(name)}: in no vLLM release that was read{hint}."
    parts = [f"{found.name}: {', '.join(str(run) for run in found.runs)}"]
    if found.same_as:
        parts[0] += f", a second spelling of {found.same_as}"
    exists = found.exists(version)
    if exists is False:
        parts[0] += f"; not in {version}"
    elif exists:
        parts[0] += f"; default in {version}: {shown(found.default(version))}"
    if found.successor and exists is not True and found.runs[-1].gone:
        parts.append(_succeeded(found.successor))
    if exists:
        parts += [
            f"{str(effect)[0].upper()}{str(effect)[1:]}"
            for effect in found.in_force(version, engine)
        ]
    return ". ".join(parts) + "."


def _succeeded(successor: Successor) -> str:
    lead = "Now" if successor.exact else "Near it"
    return f"{lead}: {successor}" + (f" ({successor.why})" if successor.why else "")


def shown(default: str | None) -> str:
    """A default for people.

    >>> shown("None"), shown("=EPLBConfig()"), shown("0.92")
    ('unset', 'worked out at start', '0.92')
    """
    if default is None or default.startswith("="):
        return "worked out at start"
    return {"None": "unset", "": "empty"}.get(default, default)
