"""One case from the failing start to the fixed one: start, explain the log, make the first fix, start again.

In: a case and the folder of vLLM's programs. Out: a Trial, plain data for the table and the JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diag import diagnose
from diag.report.model import Diagnosis, Fix
from diag.terms import Outcome
from proving.cases import ENGINES, MODELS, Case
from proving.remedy import Attempt, apply, first_attempt
from proving.server import Start, complete, free_port, memory_held
from proving.tiny_model import write_model

_AFTER_DEATH_S = 20  # an engine that died while serving takes its server down within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one start did. `answered` None: nothing was asked."""

    command: str
    how: str
    log: Path
    ready: bool
    answered: bool | None
    exit_code: int | None
    seconds: float
    came_back: str = ""
    killed: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Started and answered all that was asked."""
        return self.ready and self.answered is True


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One case. `tried` are fixes with the start each led to; the first counts, the rest are for whoever mends it."""

    case: str
    what: str
    failed: Run
    error: str
    outcome: str
    subtype: str | None
    expected: tuple[str, ...]
    same_without_command: bool
    tried: tuple[tuple[Fix, Run | None], ...] = ()
    after: str | None = None  # oomdoc's outcome for the log of the start that works

    @property
    def named(self) -> bool:
        """Whether the class is a right one."""
        return self.subtype in self.expected

    @property
    def mended(self) -> bool:
        """Whether the first fix started, answered, and left a log that oomdoc calls healthy."""
        first = self.tried[0][1] if self.tried else None
        return first is not None and first.works and self.after == Outcome.HEALTHY.value


def prepare(folder: Path) -> None:
    """Writes the models. Raises OSError when there is no room."""
    for name, shape in MODELS.items():
        if not (folder / "models" / name / "config.json").is_file():
            write_model(folder / "models" / name, shape)


def run_trial(case: Case, *, folder: Path, programs: Path, most_fixes: int = 3) -> Trial:
    """The whole case. Stops after the first fix that works. Raises OSError when a process can't be started."""
    if case.engines:
        text = ENGINES % (*case.engines, case.model)
        (folder / "engines.py").write_text(text, encoding="utf-8")
    port = free_port()
    first = first_attempt(case, port)
    failed = _run(first, port, folder / f"{case.name}.1.log", folder, programs)
    found = _explain(failed.log, first.command)
    tried: list[tuple[Fix, Run | None]] = []
    after = None
    for number, fix in enumerate([] if failed.works else found.fixes[:most_fixes]):
        attempt = apply(fix, first)
        run = None
        if attempt is not None:
            log = folder / f"{case.name}.{number + 2}.log"
            run = _run(attempt, port, log, folder, programs)
        tried.append((fix, run))
        if run is not None and run.works:
            after = _explain(run.log, run.command).outcome.value
            break
    return Trial(
        case=case.name,
        what=case.what,
        failed=failed,
        error=error_line(found),
        outcome=found.outcome.value,
        subtype=found.diagnosis.subtype if found.diagnosis else None,
        expected=case.expected,
        same_without_command=_same(found, _explain(failed.log, None)),
        tried=tuple(tried),
        after=after,
    )


def error_line(found: Diagnosis, longest: int = 160) -> str:
    """The quoted line of the failure, without prefix, shortened."""
    if found.diagnosis is None:
        return ""
    quoted = [item.text for item in found.diagnosis.evidence if item.line == found.diagnosis.line]
    text = quoted[0] if quoted else ""
    text = re.sub(r"^(\([^)]*pid=\d+\) ?)?([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?", "", text).strip()
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _run(attempt: Attempt, port: int, log: Path, folder: Path, programs: Path) -> Run:
    limits = attempt.limits
    with (
        memory_held(limits.held),
        Start(attempt.command, folder=folder, log=log, programs=programs, limits=limits) as start,
    ):
        ready, answered, came_back = _use(start, attempt, port)
        seconds = start.seconds
        # Ended by us: the exit code says nothing about the start.
        code = None if ready and answered else start.wait_end(_AFTER_DEATH_S)
    return Run(
        command=attempt.command,
        how=attempt.how,
        log=log,
        ready=ready,
        answered=answered,
        exit_code=code,
        seconds=round(seconds, 1),
        came_back=came_back,
        killed=tuple(start.killed),
    )


def _use(start: Start, attempt: Attempt, port: int) -> tuple[bool, bool | None, str]:
    """Ready, answered, what came back."""
    if "engines.py" in attempt.command:
        good = start.wait_end() == 0
        text = start.log.read_text(encoding="utf-8", errors="replace")
        answers = re.findall(r"(?m)^engine \d answers \d+ tokens", text)
        return good, (True if good and len(answers) == 2 else None), "; ".join(answers)
    if not start.wait_ready(port):
        return False, None, ""
    model = f"models/{attempt.model}"
    answered, came_back = complete(port, model)
    if answered and attempt.request is not None:
        start.squeeze(attempt.request.spare)
        answered, came_back = complete(port, model, attempt.request)
    return True, answered, came_back


def _explain(log: Path, command: str | None) -> Diagnosis:
    return diagnose(log, launch=command if command and "vllm" in command else None)


def _same(one: Diagnosis, other: Diagnosis) -> bool:
    """The same class and first fix."""

    def gist(found: Diagnosis) -> tuple[str | None, Sequence[tuple[object, ...]]]:
        first = found.fixes[0].changes if found.fixes else ()
        named = found.diagnosis.subtype if found.diagnosis else None
        return named, [(item.flag, item.env, item.action, item.to) for item in first]

    return gist(one) == gist(other)
