"""The one function that wires the steps: bytes -> lines -> attempts -> facts -> rules -> ledger -> fixes -> Diagnosis.

Every app calls `diagnose`; nothing else puts the parts together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeAlias

from diag.errors import UsageError
from diag.facts.catalogue import catalogue, plain_scan_patterns, scan_patterns
from diag.facts.collect import collect
from diag.facts.model import Fact, Facts
from diag.fixes.command import command_from_facts
from diag.fixes.direction import advise_gmu
from diag.fixes.flag_check import check_command
from diag.fixes.planner import plan_fixes
from diag.fixes.situation import Situation
from diag.knowledge.bugs import matching_bugs
from diag.log.attempts import split_attempts
from diag.log.model import Attempt, Log
from diag.log.reader import read_lines
from diag.log.scan import Anchors
from diag.log.source import RawText, read_source, read_text
from diag.memory.eras import Era, era_within, infer_engine, infer_release_range
from diag.memory.gpus import by_name, describe_capacity
from diag.memory.ledger import build_ledger, mark_failed
from diag.memory.sizes import total_bytes
from diag.release import parse_release
from diag.report import compose
from diag.report.model import (
    Diagnosis,
    Environment,
    FactOut,
    Finding,
    KnownBug,
    Ledger,
    SourceInfo,
)
from diag.rules.engine import Verdict, judge
from diag.rules.load import load_rules
from diag.terms import Family, Origin, Outcome

Source: TypeAlias = "str | os.PathLike[str] | BinaryIO"
AttemptChoice: TypeAlias = int | Literal["first", "last", "good"]

MAX_JUDGED = 40  # attempts of one file that are judged, from the end


@dataclass(frozen=True, slots=True)
class _Judged:
    """One attempt with its facts and verdict."""

    attempt: Attempt
    facts: Facts
    verdict: Verdict
    outcome: Outcome

    @property
    def failed(self) -> bool:
        """Anything but a healthy start or a log that only breaks off."""
        return self.verdict.root is not None

    @property
    def subtype(self) -> str | None:
        """What failed."""
        return self.verdict.root.rule.name if self.verdict.root else None


def diagnose(
    source: Source,
    *,
    attempt: AttemptChoice = "last",
    vllm_version: str | None = None,
    gpu: str | None = None,
    launch: str | None = None,
    name: str | None = None,
) -> Diagnosis:
    """Why this log failed, or that it did not.

    Args: source is a path, "-" for standard input, an open binary file, or the text of a log itself (a string with a
        newline, or one line with ": " that is no file's name). attempt picks one of several starts in it, "last" being
        the last that failed, "good" the last that went through. vllm_version, gpu ("L4", "80 GiB", "2x A100-80GB")
        and launch (the command line) add what the log does not print.
    Raises: LogReadError when the input can't be read, UsageError when an option makes no sense.
    """
    log = _log(source, name)
    attempts = split_attempts(log)
    judged = _judge_all(attempts, launch, attempt)
    chosen = _choose(judged, attempts, attempt)
    return _report(log, attempts, judged, chosen, vllm_version, gpu, launch)


def diagnose_pair(
    source: Source,
    *,
    vllm_version: str | None = None,
    gpu: str | None = None,
    launch: str | None = None,
    name: str | None = None,
) -> tuple[Diagnosis, Diagnosis]:
    """The last good start in a log and the last that failed; options as for `diagnose`.

    Raises: LogReadError when the input can't be read, UsageError when the log has not both.
    """
    log = _log(source, name)
    attempts = split_attempts(log)
    judged = _judge_all(attempts, launch, "last")
    good, failed = (_choose(judged, attempts, which) for which in ("good", "last"))
    if good.outcome is not Outcome.HEALTHY or not failed.failed:
        lacking = "failed" if good.outcome is Outcome.HEALTHY else "went through"
        raise UsageError(
            f"{len(attempts)} start{'' if len(attempts) == 1 else 's'} in this log, and none that {lacking}",
            hint="give two logs: oomdoc compare GOOD BAD",
        )
    return (
        _report(log, attempts, judged, good, vllm_version, gpu, launch),
        _report(log, attempts, judged, failed, vllm_version, gpu, launch),
    )


def _log(source: Source, name: str | None) -> Log:
    """The lines of a source, read and cleaned."""
    raw = _read(source, name)
    return read_lines(
        raw.lines,
        name=raw.name,
        total_lines=raw.total_lines,
        total_bytes=raw.total_bytes,
        formats=raw.formats,
        truncated=raw.truncated,
        notes=raw.notes,
    )


def _read(source: Source, name: str | None) -> RawText:
    if isinstance(source, str) and source != "-" and _is_text(source):
        return read_text(source, name or "<text>")
    return read_source(
        source, name=name, anchors=Anchors(lambda: (scan_patterns(), plain_scan_patterns()))
    )


def _is_text(source: str) -> bool:
    if "\n" in source:
        return True
    # Path.exists raises for a text that is too long for a name
    return ": " in source and not os.path.exists(source)  # noqa: PTH110


# --- attempts ---------------------------------------------------------------------------------------------------


def _judge_all(
    attempts: Sequence[Attempt], launch: str | None, choice: AttemptChoice
) -> list[_Judged]:
    """The attempts worth judging: the last ones, and the one asked for."""
    first = max(0, len(attempts) - MAX_JUDGED)
    wanted = set(range(first, len(attempts)))
    if choice == "first":
        wanted = set(range(min(len(attempts), MAX_JUDGED)))
    elif isinstance(choice, int) and 1 <= choice <= len(attempts):
        wanted.update({max(0, choice - 2), choice - 1})
    judged: list[_Judged] = []
    for index in sorted(wanted):
        before = judged[-1] if judged and judged[-1].attempt.index == index else None
        facts = collect(
            attempts[index],
            launch=launch,
            earlier_engine=before is not None and _left_open(before, attempts[index]),
        )
        verdict = judge(facts, load_rules())
        judged.append(_Judged(attempts[index], facts, verdict, compose.outcome(verdict, facts)))
    return judged


def _left_open(before: _Judged, attempt: Attempt) -> bool:
    """An offline program's former engine came up and was not closed before the next one started."""
    servers = ("APIServer", "api_server")
    served = any((line.speaker.process or "").startswith(servers) for line in before.attempt.lines)
    return (
        before.attempt.service == attempt.service
        and not served
        and not before.failed
        and not before.facts.flag("startup.complete")
        and bool(before.facts.seen("graph.init_done", "kv.size_tokens", "kv.blocks_v0"))
        and not before.facts.seen("exec.shutdown_signal")
    )


def _choose(
    judged: Sequence[_Judged], attempts: Sequence[Attempt], choice: AttemptChoice
) -> _Judged:
    if isinstance(choice, int):
        if not 1 <= choice <= len(attempts):
            raise UsageError(
                f"there is no attempt {choice}",
                hint=f"the log holds {len(attempts)}; give a number from 1 to {len(attempts)}",
            )
        return next(item for item in judged if item.attempt.index == choice)
    if choice == "first":
        return judged[0]
    healthy = [item for item in judged if item.outcome is Outcome.HEALTHY]
    if choice == "good" and healthy:
        return healthy[-1]
    failed = [item for item in judged if item.failed]
    telling = [item for item in failed if item.outcome is not Outcome.UNKNOWN]
    return (telling or failed or judged)[-1]


# --- the report -------------------------------------------------------------------------------------------------


def _report(
    log: Log,
    attempts: Sequence[Attempt],
    judged: Sequence[_Judged],
    chosen: _Judged,
    vllm_version: str | None,
    gpu: str | None,
    launch: str | None,
) -> Diagnosis:
    facts, verdict = chosen.facts, chosen.verdict
    found = compose.finding(verdict, facts)
    printed = vllm_version or facts.text("vllm.version")
    version = parse_release(printed)
    engine = infer_engine(facts)
    assumed_total = _gpu_total(gpu) or _named_total(facts.text("device.name"))
    era = None if version else _era_by_wording(facts, engine)
    situation = Situation(
        facts=facts,
        subtype=found.subtype if found else "unknown",
        family=found.family if found else Family.UNKNOWN,
        phase=found.phase if found else None,
        version=version,
        engine=engine,
        problem_line=found.line if found else None,
        rank=found.rank if found else None,
        command=launch or command_from_facts(facts) or facts.text("config.command"),
        backend=facts.text("config.backend"),
        wording_era=era,
        assumed_total=assumed_total,
    )
    advice = advise_gmu(situation)
    fixes, not_helpful = plan_fixes(situation, advice) if found else ((), ())
    ledger = build_ledger(
        facts,
        version=version,
        engine=engine,
        assumed_total=assumed_total,
        assumed_gmu=advice.current,
        era=era,
        oom_line=found.line if found else None,
    )
    return Diagnosis(
        source=_source_info(log, attempts, judged, chosen, vllm_version),
        environment=_environment(facts, printed, vllm_version, engine, gpu, launch, assumed_total),
        outcome=chosen.outcome,
        diagnosis=found,
        headline=compose.headline(chosen.outcome, facts, found),
        alternatives=compose.alternatives(verdict),
        facts=tuple(_fact_out(fact) for fact in facts),
        ledger=_mark_failed(ledger, found),
        gmu=advice if found else None,
        fixes=fixes,
        not_helpful=not_helpful,
        flag_notes=check_command(launch or facts, version, engine),
        known_bugs=_known_bugs(situation) if found else (),
        next_steps=compose.next_steps(chosen.outcome, found, [event.row for event in facts.events]),
    )


def _known_bugs(situation: Situation) -> tuple[KnownBug, ...]:
    """Bugs of the release in the log that fit this failure; none when they can't be looked up."""
    try:
        bugs = matching_bugs(
            situation.facts, situation.problem, situation.subtype, situation.version
        )
    except Exception:  # noqa: BLE001 - what others met must not take the answer with it
        return ()
    return tuple(
        KnownBug(
            id=bug.id,
            affected=bug.affected,
            fixed_in=bug.fixed_in,
            url=bug.url,
            why=bug.why,
            cure=bug.cure,
        )
        for bug in bugs
    )


_FAILED_TERM = {
    Family.KV_RESERVATION: "kv_pool",
    Family.WEIGHTS: "weights",
    Family.CUDA_GRAPH: "cuda_graphs",
    Family.TP_BUFFER: "collectives",
    Family.ACTIVATION_SPIKE: "peak_activation",
    Family.COMPILE: "peak_activation",
    Family.ALLOCATOR_TRANSIENT: "reserved_unallocated",
    Family.DEVICE_BASELINE: "other_processes",
}


def _mark_failed(ledger: Ledger, found: Finding | None) -> Ledger:
    """The ledger with the term flagged that the failure is about."""
    term = _FAILED_TERM.get(found.family) if found else None
    if found is None or term is None:
        return ledger
    return mark_failed(ledger, term, rank=found.rank)


def _era_by_wording(facts: Facts, engine: str | None) -> Era | None:
    releases = {row.id: row.releases for row in catalogue().rows if row.releases}
    low, high = infer_release_range(facts, releases)
    return era_within(low, high, engine)


def _gpu_total(gpu: str | None) -> int | None:
    """Bytes of the GPU named by the user. Raises UsageError for an unknown one."""
    if gpu is None:
        return None
    from diag.errors import UnitError
    from diag.units import parse_size

    known = by_name(gpu)
    if known is not None:
        return known.typical_bytes
    try:
        size = parse_size(gpu)
    except UnitError:
        size = 0
    if size <= 0:
        raise UsageError(
            f"--gpu {gpu!r} is no GPU that oomdoc knows",
            hint='give a name like "L4" or a size like "23.6 GiB"',
        )
    return size


def _named_total(device: str | None) -> int | None:
    """Bytes of the GPU whose name the log prints somewhere; None for one that is not in the table."""
    known = by_name(device) if device else None
    return known.typical_bytes if known else None


def _source_info(
    log: Log,
    attempts: Sequence[Attempt],
    judged: Sequence[_Judged],
    chosen: _Judged,
    vllm_version: str | None,
) -> SourceInfo:
    failed = [item for item in judged if item.failed]
    notes = [*log.notes, *chosen.verdict.failed]
    if vllm_version and parse_release(vllm_version) is None:
        notes.append(f"{vllm_version!r} holds no release number; the release counts as unknown.")
    if len(judged) < len(attempts):
        notes.append(f"{len(attempts)} starts in this log; {len(judged)} of them were looked at.")
    return SourceInfo(
        name=log.name,
        lines=log.total_lines,
        bytes=log.total_bytes,
        attempts=len(attempts),
        attempt=chosen.attempt.index,
        attempts_failed=len(failed),
        attempts_same_failure=sum(item.subtype == chosen.subtype for item in failed),
        formats=log.formats,
        truncated=log.truncated,
        notes=tuple(notes),
    )


def _environment(
    facts: Facts,
    printed: str | None,
    vllm_version: str | None,
    engine: str | None,
    gpu: str | None,
    launch: str | None,
    assumed_total: int | None,
) -> Environment:
    total = total_bytes(facts, assumed=assumed_total).value
    named = (facts.text("device.name") or "").replace("_", " ").removeprefix("NVIDIA ")
    device = named or gpu or (describe_capacity(total) if total else None)
    ranks = facts.number("config.tensor_parallel_size") or 1
    stages = facts.number("config.pipeline_parallel_size") or 1
    many = round(ranks * stages)
    return Environment(
        vllm_version=printed,
        vllm_origin=None if printed is None else Origin.ASSUMED if vllm_version else Origin.LOGGED,
        engine=engine,
        model=facts.text("config.model"),
        device=f"{many}x {device}" if device and gpu is None else device,
        backend=facts.text("config.backend"),
        command=launch or facts.text("config.command"),
    )


def _fact_out(fact: Fact) -> FactOut:
    return FactOut(
        name=fact.name,
        value=fact.value,
        unit=fact.unit,
        rank=fact.rank,
        line=fact.line,
        origin=fact.origin,
    )
