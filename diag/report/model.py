"""The Diagnosis: all that a renderer needs, as plain data. `to_dict` gives the documented JSON.

No text formatting here and nothing computed: `diag.diagnose` fills it, renderers and apps read it. Ledger, fixes and
the verdict on gpu_memory_utilization are those of the parts that compute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from diag.fixes.flag_check import FlagNote
from diag.fixes.model import Change, Fix, GmuAdvice, NotHelpful
from diag.memory.model import Ledger, LedgerEntry, RankLedger
from diag.terms import EvidenceRole, Family, Origin, Outcome, Phase

__all__ = [
    "SCHEMA_VERSION",
    "Alternative",
    "Change",
    "Diagnosis",
    "Environment",
    "Evidence",
    "FactOut",
    "Finding",
    "Fix",
    "FlagNote",
    "GmuAdvice",
    "KnownBug",
    "Ledger",
    "LedgerEntry",
    "NotHelpful",
    "RankLedger",
    "Related",
    "SourceInfo",
]

SCHEMA_VERSION = 1

Value = int | float | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """The input. `attempts` counts starts in it; `attempt` is the one diagnosed (1-based)."""

    name: str
    lines: int
    bytes: int
    attempts: int = 1
    attempt: int = 1
    attempts_failed: int = 0
    attempts_same_failure: int = 0
    formats: tuple[str, ...] = ()
    truncated: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What runs where, as far as the log says: for headings and drafts."""

    vllm_version: str | None = None
    vllm_origin: Origin | None = None
    engine: str | None = None  # "V0" | "V1"
    model: str | None = None
    device: str | None = None  # "1x 80 GB", "2x NVIDIA L4"
    backend: str | None = None
    command: str | None = None  # the user's own command line, when the log or --launch gives one


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A quoted line. `text` is cleaned and bounded in length."""

    line: int
    text: str
    role: EvidenceRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What failed. `summary` is one to three sentences with the numbers that prove it."""

    family: Family
    subtype: str
    phase: Phase | None
    rank: int | None
    confidence: float  # 0..1
    title: str
    summary: str
    line: int | None
    evidence: tuple[Evidence, ...] = ()
    missing: tuple[str, ...] = ()  # facts that would make it surer, in words

    @property
    def certainty(self) -> str:
        """The confidence in words."""
        if self.confidence >= 0.9:
            return "certain"
        return "likely" if self.confidence >= 0.6 else "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another reading of the same log."""

    family: Family
    subtype: str
    confidence: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FactOut:
    """A fact as the report shows it."""

    name: str
    value: Value
    unit: str
    rank: int | None
    line: int | None
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBug:
    """A bug of the user's release that fits the log."""

    id: str
    affected: str
    fixed_in: str | None
    url: str
    why: str
    cure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """A thread, doc page or card about the same failure."""

    id: str
    kind: str  # "issue" | "doc" | "card"
    title: str
    url: str
    score: float
    why: str
    versions: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer."""

    source: SourceInfo
    environment: Environment
    outcome: Outcome
    diagnosis: Finding | None
    headline: str  # one sentence when there is no finding: healthy, not enough, ...
    alternatives: tuple[Alternative, ...] = ()
    facts: tuple[FactOut, ...] = ()
    ledger: Ledger = field(default_factory=lambda: Ledger(era=None, formula=None))
    gmu: GmuAdvice | None = None
    fixes: tuple[Fix, ...] = ()
    not_helpful: tuple[NotHelpful, ...] = ()
    flag_notes: tuple[FlagNote, ...] = ()  # about the user's own command, for this release
    known_bugs: tuple[KnownBug, ...] = ()
    related: tuple[Related, ...] = ()
    next_steps: tuple[str, ...] = ()  # commands that get the missing lines, for an unknown outcome

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `oomdoc explain --format json`: raw bytes, stable key order."""
        from diag import __version__

        body = {"schema_version": SCHEMA_VERSION, "oomdoc_version": __version__}
        body.update({item.name: _plain(getattr(self, item.name)) for item in fields(self)})
        return body


def _plain(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as JSON types; `from_` loses its underscore."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name.rstrip("_"): _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [_plain(item) for item in value]
    return value
