"""Which accelerator a log is about, by name or by the capacity it reports.

In: a device name as printed or typed, or total bytes. Out: `Gpu` entries of `corpus/gpus.yaml`, or
words such as "80 GB card". Reported totals are below the label: an 80 GB H100 shows 79.1 to 79.65
GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from diag.errors import RuleFileError
from diag.resources import read_data
from diag.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOLERANCE_GIB = 0.011  # totals are printed to a hundredth
_SIZE_CLASSES_GB = (
    4,
    6,
    8,
    10,
    11,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    72,
    80,
    94,
    96,
    128,
    141,
    144,
    180,
    192,
    256,
    288,
)
_LEAST_SHARE = 0.87  # a reported total below this share of a label does not belong to it
_WORD = re.compile(r"[a-z0-9]+")
# "RTX4090", "3090Ti", "80 GB", "A100-80G": one spelling for each.
_SPELLINGS = (
    (re.compile(r"\b(rtx|gtx|rx|ascend)(?=\d)"), r"\1 "),
    (re.compile(r"\b(\d{4})(ti|super|xtx|xt)\b"), r"\1 \2 "),
    (re.compile(r"\b(\d{1,3})\s*(?:gib|gb)\b"), r"\1gb"),
    (re.compile(r"\b(\d{2,3})g\b"), r"\1gb"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of accelerator (or MIG slice)."""

    name: str
    nominal_gb: int
    low: int  # smallest reported total, bytes
    high: int  # largest reported total, bytes
    words: tuple[frozenset[str], ...]  # alternatives of words that name it
    not_words: frozenset[str] = frozenset()
    compute_capability: str | None = None
    kind: str = "datacenter"  # datacenter workstation consumer embedded mig
    unified: bool = False  # shares the host's memory
    approximate: bool = False  # the range is a guess

    @property
    def typical_bytes(self) -> int:
        """A total to compute with when the log prints none: the low end of the range, in bytes."""
        return self.low


@lru_cache(maxsize=1)
def all_gpus() -> tuple[Gpu, ...]:
    """Every entry of `corpus/gpus.yaml`. Raises: RuleFileError when the file is wrong."""
    return _load(read_data("corpus/gpus.yaml"))


def by_name(text: str) -> Gpu | None:
    """The accelerator a device name means; None when unknown or when the name leaves the memory
    size open.

    >>> by_name("NVIDIA A100-SXM4-80GB").name, by_name("4090").name, by_name("A100")
    ('A100 80GB', 'RTX 4090 24GB', None)
    """
    found = candidates(text)
    return found[0] if len(found) == 1 else None


def candidates(text: str) -> tuple[Gpu, ...]:
    """Accelerators that fit a device name: one when clear, several when only the size is open."""
    words = _words(text)
    best: list[Gpu] = []
    most = 0
    for gpu in all_gpus():
        if not _same_kind(gpu, words):
            continue
        hits = max((len(needed) for needed in gpu.words if needed <= words), default=0)
        if hits > most:
            best, most = [gpu], hits
        elif hits == most and hits:
            best.append(gpu)
    if best:
        return _of_size(tuple(best), words)
    return tuple(
        gpu
        for gpu in all_gpus()
        if _same_kind(gpu, words) and any(_without_size(needed) <= words for needed in gpu.words)
    )


def by_capacity(total_bytes: int) -> tuple[Gpu, ...]:
    """Accelerators whose reported total may be `total_bytes`, in file order; MIG slices last."""
    slack = round(_TOLERANCE_GIB * GIB)
    fitting = [gpu for gpu in all_gpus() if gpu.low - slack <= total_bytes <= gpu.high + slack]
    return tuple(sorted(fitting, key=lambda gpu: gpu.kind == "mig"))


def nominal_size(total_bytes: int) -> int | None:
    """The size on the label (GB) that a reported total belongs to; None when no usual label fits.

    >>> nominal_size(round(79.15 * GIB)), nominal_size(round(23.65 * GIB))
    (80, 24)
    """
    found = [gpu for gpu in by_capacity(total_bytes) if not gpu.approximate]
    labels = {gpu.nominal_gb for gpu in found or by_capacity(total_bytes)}
    if len(labels) == 1:
        return labels.pop()
    amount = total_bytes / GIB
    return next(
        (
            size
            for size in _SIZE_CLASSES_GB
            if _LEAST_SHARE * size <= amount <= size + _TOLERANCE_GIB
        ),
        None,
    )


def describe_capacity(total_bytes: int) -> str:
    """A device in words: "80 GB card", or "55.0 GiB device" when no usual label fits."""
    size = nominal_size(total_bytes)
    if size is None:
        return f"{total_bytes / GIB:.1f} GiB device"
    if all(gpu.unified for gpu in by_capacity(total_bytes)) and by_capacity(total_bytes):
        return f"{size} GB unified memory"
    return f"{size} GB card"


def _words(text: str) -> frozenset[str]:
    lowered = text[:200].lower()
    for pattern, replacement in _SPELLINGS:
        lowered = pattern.sub(replacement, lowered)
    return frozenset(_WORD.findall(lowered))


def _same_kind(gpu: Gpu, words: frozenset[str]) -> bool:
    """Not ruled out: a slice is no whole card, a laptop part is not the desktop card."""
    if gpu.not_words & words or (gpu.kind == "mig") != ("mig" in words):
        return False
    return "laptop" not in words or gpu.kind != "consumer" or "laptop" in gpu.words[0]


def _is_size(word: str) -> bool:
    return word.endswith("gb") and word[:-2].isdigit()


def _without_size(words: frozenset[str]) -> frozenset[str]:
    rest = frozenset(word for word in words if not _is_size(word))
    return rest or words


def _of_size(found: tuple[Gpu, ...], words: frozenset[str]) -> tuple[Gpu, ...]:
    """Of several entries those whose label is in the name, when it names one."""
    labels = {int(word[:-2]) for word in words if _is_size(word)}
    fitting = tuple(gpu for gpu in found if gpu.nominal_gb in labels)
    return fitting or found


def _load(document: Mapping[str, Any]) -> tuple[Gpu, ...]:
    gpus, problems = [], []
    for row in document["gpus"]:
        try:
            gpus.append(_gpu(row))
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"corpus/gpus.yaml: entry {row!r}: {error}")
    if problems:
        raise RuleFileError(problems)
    return tuple(gpus)


def _gpu(row: Mapping[str, Any]) -> Gpu:
    low, high = row["gib"]
    if not 0 < low <= high:
        raise ValueError(f"gib range {low}..{high} is not a range")
    return Gpu(
        name=row["name"],
        nominal_gb=row["gb"],
        low=round(low * GIB),
        high=round(high * GIB),
        words=(frozenset(row["words"]), *(frozenset(item) for item in row.get("also", ()))),
        not_words=frozenset(row.get("not_words", ())),
        compute_capability=row.get("sms"),
        kind=row["kind"],
        unified=row.get("unified", False),
        approximate=row.get("approximate", False),
    )
