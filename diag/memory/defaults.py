"""Defaults of vLLM that decide memory use, from `corpus/vllm_defaults.yaml`, by release and device.

In: a release, the engine generation, what is known of the device. Out: the default, or None when it
depends on something that is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from diag.release import in_range
from diag.resources import read_data
from diag.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from packaging.version import Version

Value = int | float | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Default token and request limits of one step; None: vLLM takes them from other settings."""

    tokens: int | None
    seqs: int | None


def default_of(name: str, version: Version | None, engine: str | None = None) -> Value | None:
    """Default of a setting (see the file for names and units); None when unset, absent or unknown.

    >>> from packaging.version import Version
    >>> default_of("gpu_memory_utilization", Version("0.20.0"))
    0.92
    """
    for row in _document()["settings"].get(name, ()):
        if _applies(row, version, engine):
            value: Value | None = row["value"]
            return value
    return None


def batch_limits(
    version: Version | None,
    engine: str | None,
    *,
    total: int | None = None,
    device_name: str | None = None,
    server: bool = True,
) -> BatchLimits | None:
    """Default limits of one step, for an API server or for the offline `LLM` class.

    `total` is the device's memory in bytes. None when release, size or name decide and are not known.

    >>> from packaging.version import Version
    >>> batch_limits(Version("0.11.0"), "V1", total=24 * 2**30)
    BatchLimits(tokens=2048, seqs=256)
    """
    name = (device_name or "").lower()
    found: set[BatchLimits] = set()
    for row in _document()["batch_limits"]:
        if not _applies(row, version, engine):
            continue
        fits = _fits_device(row, total, name)
        if fits is False:
            continue
        limits = row["server" if server else "offline"]
        found.add(BatchLimits(tokens=limits["tokens"], seqs=limits["seqs"]))
        if fits:
            break
    return found.pop() if len(found) == 1 else None


def _fits_device(row: Mapping[str, Any], total: int | None, name: str) -> bool | None:
    """Whether a row is for this device; None when what it asks for is not known."""
    answers: list[bool | None] = []
    if "min_gib" in row:
        answers.append(None if total is None else total >= row["min_gib"] * GIB)
    if "max_gib" in row:
        answers.append(None if total is None else total < row["max_gib"] * GIB)
    if "names" in row:
        answers.append(any(part in name for part in row["names"]) if name else None)
    if "not_names" in row:
        answers.append(not any(part in name for part in row["not_names"]) if name else None)
    if False in answers:
        return False
    return None if None in answers else True


def _applies(row: Mapping[str, Any], version: Version | None, engine: str | None) -> bool:
    if row.get("engine", engine) != engine:
        return False
    return row["vllm"] == "*" or in_range(version, row["vllm"]) is True


@lru_cache(maxsize=1)
def _document() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = read_data("corpus/vllm_defaults.yaml")
    return loaded
