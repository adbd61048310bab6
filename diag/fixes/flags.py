"""Which flags a vLLM release knows, and how a setting is spelled there, for the fixes; see `flag_history` for more.

An unknown release gives None ("can't say") from `flag_exists` and the newest spelling from `spelled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from packaging.version import Version

from diag.errors import Location, RuleFileError
from diag.fixes.flag_history import history, names
from diag.release import in_range
from diag.resources import read_data


@lru_cache(maxsize=1)
def _settings() -> Mapping[str, Any]:
    """Flags by the purpose they serve, newest first. Raises RuleFileError for a flag of no release."""
    path = "corpus/flags/core.yaml"
    settings: Mapping[str, Any] = read_data(path)["settings"]
    problems = [
        f"{Location(path)}: settings.{name}: unknown flag {flag}"
        for name, flags in settings.items()
        for flag in flags
        if history(flag) is None
    ]
    if problems:
        raise RuleFileError(problems)
    return settings


def known_flags() -> tuple[str, ...]:
    """Every flag of any release, second spellings included."""
    return names("flag")


def takes(flag: str) -> str:
    """What follows a flag in the newest release that has it: "value", "switch", "list" or "json"; "value" for a flag
    of no release.
    """
    found = history(flag)
    return list(found.takes.values())[-1] if found else "value"


def flag_exists(flag: str, version: Version | None) -> bool | None:
    """Whether a release knows a flag or an environment variable of vLLM's; None when release or flag is unknown.

    >>> from packaging.version import Version
    >>> flag_exists("--swap-space", Version("0.17.1")), flag_exists("--swap-space", Version("0.20.0"))
    (True, False)
    """
    found = history(flag)
    return found.exists(version) if found else None


def spelled(setting: str, version: Version | None) -> str | None:
    """A flag or a named setting as this release spells it; None when the release has nothing for it.

    >>> from packaging.version import Version
    >>> spelled("largest_graph", Version("0.10.0")), spelled("largest_graph", Version("0.8.5"))
    ('--cuda-graph-sizes', None)
    """
    for flag in _settings().get(setting, [setting]):
        if flag_exists(flag, version) is not False:
            return str(flag)
    return None


def allocator_variable(version: Version | None) -> str:
    """PyTorch's allocator variable: newer torch (seen from vLLM 0.19 on) calls it PYTORCH_ALLOC_CONF.

    The old name is read by every torch, so an unknown release gets that one.
    """
    return "PYTORCH_ALLOC_CONF" if in_range(version, ">=0.19") else "PYTORCH_CUDA_ALLOC_CONF"
