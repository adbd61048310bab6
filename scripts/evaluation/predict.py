"""What oomdoc and two baselines say about a case, in one shape.

The baselines are what people have without oomdoc: a table of patterns with fixed advice, as the tools that match log
lines do it, and the forum's standing advice to lower `gpu_memory_utilization`.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diag.report.model import Diagnosis, FactOut
from diag.terms import Outcome
from evaluation.cases import HEALTHY, Case, Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One answer. `gmu` None: no word on gpu_memory_utilization. `error`: the program failed."""

    reading: Reading
    outcome: str
    gmu: str | None
    facts: tuple[FactOut, ...] = ()
    seconds: float = 0.0
    error: str | None = None

    @property
    def claims_failure(self) -> bool:
        """Whether the answer says that something failed."""
        return self.outcome in {"memory_failure", "other_failure"}


class Diagnose(Protocol):
    """The one function of oomdoc that is measured."""

    def __call__(
        self, source: str | Path, *, vllm_version: str | None = None, launch: str | None = None
    ) -> Diagnosis:
        """The diagnosis of a log."""


Predictor = Callable[[Case], Prediction]


def by_oomdoc(diagnose: Diagnose, *, context: bool) -> Predictor:
    """oomdoc itself; with `context` it also gets the version and command that the label knows."""

    def predict(case: Case) -> Prediction:
        started = time.perf_counter()
        try:
            found = diagnose(
                case.log,
                vllm_version=case.vllm_version if context else None,
                launch=case.launch if context else None,
            )
        except Exception:  # noqa: BLE001  a crash is a result to report, not the end of the run
            return Prediction(
                reading=("crash", "crash"),
                outcome="crash",
                gmu=None,
                seconds=time.perf_counter() - started,
                error=traceback.format_exc(limit=-3),
            )
        return Prediction(
            reading=_reading(found),
            outcome=found.outcome.value,
            gmu=found.gmu.verdict.value if found.gmu else None,
            facts=found.facts,
            seconds=time.perf_counter() - started,
        )

    return predict


def _reading(found: Diagnosis) -> Reading:
    if found.diagnosis is not None:
        return found.diagnosis.family.value, found.diagnosis.subtype
    return {
        Outcome.HEALTHY: (HEALTHY, HEALTHY),
        Outcome.OTHER_FAILURE: ("lookalike", "look.other"),
    }.get(found.outcome, ("unknown", "unknown"))


# First match wins. Most telling patterns first, which is kinder than the tools in use.
_TABLE: tuple[tuple[re.Pattern[str], Reading, str], ...] = (
    (
        re.compile("less than desired GPU memory"),
        ("kv_reservation", "kv.free_below_target"),
        "lower",
    ),
    (re.compile("No available memory for the cache"), ("kv_reservation", "kv.no_blocks"), "raise"),
    (
        re.compile("(?i)model'?s'?s? max(imum)? seq(uence)? len.*(is larger than|KV cache)"),
        ("kv_reservation", "kv.max_len_exceeds"),
        "raise",
    ),
    (
        re.compile("out of memory|OutOfMemoryError", re.IGNORECASE),
        ("activation_spike", "act.prefill"),
        "lower",
    ),
    (
        re.compile(r"\bKilled\b|exit code:? 137|SIGKILL|OOMKilled"),
        ("host_memory", "host.oom_killed"),
        "cannot_help",
    ),
    (re.compile("NCCL.{0,20}error", re.IGNORECASE), ("tp_buffer", "tp.nccl_oom"), "cannot_help"),
    (
        re.compile("Engine core initialization failed|EngineCore failed|EngineDeadError"),
        ("unknown", "unknown"),
        "lower",
    ),
    (re.compile("Traceback|Error"), ("lookalike", "look.other"), "not_enough_facts"),
)


def by_pattern_table(case: Case) -> Prediction:
    """The first pattern of a fixed table that occurs in the log, with its fixed advice."""
    text = case.log if isinstance(case.log, str) else case.log.read_text("utf-8", errors="replace")
    for pattern, reading, gmu in _TABLE:
        if pattern.search(text):
            outcome = "other_failure" if reading[0] == "lookalike" else "memory_failure"
            return Prediction(reading=reading, outcome=outcome, gmu=gmu)
    return Prediction(reading=(HEALTHY, HEALTHY), outcome="healthy", gmu=None)


def by_always_lower(_case: Case) -> Prediction:
    """The forum's answer to every log. It names no class."""
    return Prediction(reading=("-", "-"), outcome="memory_failure", gmu="lower")
