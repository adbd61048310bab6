"""Named places in the code (`rules/sites.yaml`) and what follows which line (`rules/phases.yaml`).

In: frames of a traceback, rows seen before it. Out: the sites the frames pass and the phase they settle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from diag.facts.model import Frame
from diag.patterns import Pattern, compile_pattern
from diag.resources import read_data
from diag.terms import Phase

_MODEL_CODE = re.compile(r"/models/\w+(?:/\w+)?\.py:")
_PACKAGE_ROOT = re.compile(r"^.*?/(?:site|dist)-packages/")


@dataclass(frozen=True, slots=True)
class Site:
    """One named place. `phase` is set when passing it settles the phase."""

    name: str
    phase: Phase | None
    pattern: Pattern | None
    inner: Pattern | None  # looked for in the innermost frame of model code only

    def passed(self, keys: Sequence[str], innermost: str | None) -> bool:
        """Whether frames, as `frame_key` writes them, pass this place."""
        if self.pattern and any(self.pattern.search(key) for key in keys):
            return True
        return bool(self.inner and innermost and self.inner.search(innermost))


@dataclass(frozen=True, slots=True)
class Places:
    """All sites in file order, and the phase that begins after a catalogue row."""

    sites: tuple[Site, ...]
    phase_after: dict[str, Phase]


@lru_cache(maxsize=1)
def places() -> Places:
    """The shipped sites and phases, loaded once."""
    sites = read_data("rules/sites.yaml")["sites"]
    after = read_data("rules/phases.yaml")["after"]
    return Places(
        sites=tuple(
            Site(
                name,
                Phase(body["phase"]) if "phase" in body else None,
                _any(body.get("frames", ())),
                _any(body.get("inner", ())),
            )
            for name, body in sites.items()
        ),
        phase_after={row: Phase(phase) for phase, rows in after.items() for row in rows},
    )


def _any(patterns: Iterable[str]) -> Pattern | None:
    parts = [f"(?:{pattern})" for pattern in patterns]
    return compile_pattern("|".join(parts)) if parts else None


def frame_key(frame: Frame) -> str:
    """A frame as sites see it: path below site-packages, a colon, the function."""
    return f"{_PACKAGE_ROOT.sub('', frame.file)}:{frame.function}"


def sites_of(frames: Sequence[Frame]) -> frozenset[str]:
    """Names of the sites that the frames pass."""
    keys = [frame_key(frame) for frame in frames]
    innermost = next((key for key in reversed(keys) if _MODEL_CODE.search(key)), None)
    return frozenset(site.name for site in places().sites if site.passed(keys, innermost))


def phase_of_sites(names: Iterable[str]) -> Phase | None:
    """The phase that the sites settle: the first listed wins; None when none does."""
    passed = set(names)
    for site in places().sites:
        if site.phase is not None and site.name in passed:
            return site.phase
    return None
