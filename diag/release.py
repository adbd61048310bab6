"""vLLM release numbers as found in logs: compared by PEP 440, with the odd builds handled.

Vendor builds carry local parts (`0.13.0+faa43dbf.nv26.01`), dev builds of a shallow clone call themselves
`0.1.dev18496+g...` although they are newer than any release: those have no comparable number.
"""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from diag.errors import UnitError

_NUMBER = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:rc|dev|post|a|b)\d*)*)", re.IGNORECASE)


@lru_cache(maxsize=256)
def parse_release(text: str | None) -> Version | None:
    """The comparable release in a printed version, or None when there is none.

    >>> parse_release("v0.13.0+faa43dbf.nv26.01"), parse_release("0.1.dev18496+gd4e0675a7"), parse_release("dev")
    (<Version('0.13.0')>, None, None)
    """
    printed = (text or "").strip()
    match = _NUMBER.match(printed)
    if match is None or printed[match.end() :].startswith("x"):
        return None  # "0.2x": one of ten minor releases
    try:
        version = Version(match.group(1))
    except InvalidVersion:
        return None
    if version.release[:2] == (0, 1) and version.is_devrelease:
        return None
    return version


def as_release(version: Version) -> Version:
    """The release a pre-release or dev build leads to (0.8.5.dev274 -> 0.8.5): its code is nearest to that."""
    return Version(version.base_version)


@lru_cache(maxsize=1024)
def _specifier(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier as error:
        raise UnitError(
            f"{text!r} is not a range of releases", hint='write it like ">=0.9.1,<0.11"'
        ) from error


def in_range(version: Version | None, spec: str | None) -> bool | None:
    """Whether `version` lies in the PEP 440 range `spec`; None when the version is unknown, True without a range."""
    if spec is None:
        return True
    wanted = _specifier(spec)
    return None if version is None else wanted.contains(as_release(version), prereleases=True)
