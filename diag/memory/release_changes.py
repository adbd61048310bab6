"""What changed between two vLLM releases in how memory is planned, from `corpus/release_changes.yaml`.

In: two releases. Out: the changes that one has and the other has not, in the order of their releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from packaging.version import Version

from diag.release import as_release
from diag.resources import read_data
from diag.schema import Strict, build

FILE = "corpus/release_changes.yaml"


class PoolEffect(str, Enum):
    """What a change does to the KV pool, same card and flags."""

    LARGER = "larger"
    SMALLER = "smaller"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChange(Strict):
    """One change, true from release `since` on."""

    id: str
    since: str
    terms: tuple[str, ...]
    pool: PoolEffect
    says: str
    evidence: str
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChanges(Strict):
    """The whole file."""

    schema_: int
    changes: tuple[ReleaseChange, ...]


@lru_cache(maxsize=1)
def all_changes() -> tuple[ReleaseChange, ...]:
    """Every change of the file, oldest release first."""
    found = build(ReleaseChanges, read_data(FILE)).changes
    return tuple(sorted(found, key=lambda item: Version(item.since)))


def changes_between(
    one: Version | None, other: Version | None, engine: str | None = None
) -> tuple[ReleaseChange, ...]:
    """Changes that only the newer of two releases has; none when a release is unknown.

    `engine`: the generation of the newer release; changes of the other one are left out.

    >>> [change.id for change in changes_between(Version("0.19.0"), Version("0.21.0"))]
    ['graphs-charged', 'default-share']
    """
    if one is None or other is None:
        return ()
    low, high = sorted((as_release(one), as_release(other)))
    return tuple(
        change
        for change in all_changes()
        if low < Version(change.since) <= high and change.engine in (None, engine or change.engine)
    )
