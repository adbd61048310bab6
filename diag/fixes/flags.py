"""Which flags a vLLM release knows, and how a setting is spelled there; the table is `corpus/flags/core.yaml`.

An unknown release gives None ("can't say") from `flag_exists` and the newest spelling from `spelled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from packaging.version import Version

from diag.errors import Location, RuleFileError
from diag.release import in_range
from diag.resources import read_data

_TAKES = ("value", "switch", "list", "json")


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    path = "corpus/flags/core.yaml"
    table = read_data(path)
    problems = [
        f"{Location(path)}: {flag}: takes must be one of {', '.join(_TAKES)}"
        for flag, row in table["flags"].items()
        if row.get("takes") not in _TAKES
    ]
    problems += [
        f"{Location(path)}: settings.{name}: unknown flag {flag}"
        for name, names in table["settings"].items()
        for flag in names
        if flag not in table["flags"]
    ]
    if problems:
        raise RuleFileError(problems)
    return dict(table)


def known_flags() -> tuple[str, ...]:
    """Every flag of the table."""
    return tuple(_table()["flags"])


def takes(flag: str) -> str:
    """What follows a flag: "value", "switch", "list" or "json"; "value" for a flag not in the table."""
    row = _table()["flags"].get(flag)
    return str(row["takes"]) if row else "value"


def flag_exists(flag: str, version: Version | None) -> bool | None:
    """Whether a release knows a flag or an environment variable of vLLM's; None when release or flag is unknown.

    >>> from packaging.version import Version
    >>> flag_exists("--swap-space", Version("0.17.1")), flag_exists("--swap-space", Version("0.20.0"))
    (True, False)
    """
    row = _table()["flags"].get(flag) or _table()["environment"].get(flag)
    if row is None:
        return None
    releases = row.get("releases")
    return True if releases is None else in_range(version, str(releases))


def spelled(setting: str, version: Version | None) -> str | None:
    """A flag or a named setting as this release spells it; None when the release has nothing for it.

    >>> from packaging.version import Version
    >>> spelled("largest_graph", Version("0.10.0")), spelled("largest_graph", Version("0.8.5"))
    ('--cuda-graph-sizes', None)
    """
    for flag in _table()["settings"].get(setting, [setting]):
        if flag_exists(flag, version) is not False:
            return str(flag)
    return None


def allocator_variable(version: Version | None) -> str:
    """PyTorch's allocator variable: newer torch (seen from vLLM 0.19 on) calls it PYTORCH_ALLOC_CONF.

    The old name is read by every torch, so an unknown release gets that one.
    """
    return "PYTORCH_ALLOC_CONF" if in_range(version, ">=0.19") else "PYTORCH_CUDA_ALLOC_CONF"
