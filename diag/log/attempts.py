"""Groups the lines of a log into starts of vLLM: a crash loop or a script with two engines has several.

In: a Log. Out: Attempts in the order of their first lines, each from its first start-up line to the
line before the next start. Services are kept apart when more than one of them starts a vLLM.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diag.log.model import Attempt, Log, LogLine

if TYPE_CHECKING:
    from collections.abc import Sequence

# Start markers, in the order one start prints them.
_SERVER = re.compile(r"\s*vLLM (?:API )?server version \S|[\s▀-▟]{6,80}[▀-▟]\s{0,8}version +\S")
_ARGS = re.compile(r"\s*(?:args: Namespace\(|non-default args: )")
_ENGINE = re.compile(r"\s*Initializing an? (?:V\d )?LLM engine(?: \(v| with config)")

# What only a start-up prints before its first marker.
_PREAMBLE = re.compile(
    r"\s*(?:Automatically detected platform|Available plugins for group|All plugins in this group"
    r"|Loading plugin |Platform plugin |No platform detected|- \w+ -> |Triton (?:is|not) installed"
    r"|nohup: |Starting vLLM|== |=== |NVIDIA (?:Release|Inference)|vLLM Version|NIM "
    r"|Container image Copyright"
    r"|\S{0,60}[$#] (?:[A-Za-z_]\w{0,40}=\S{0,200} ){0,9}"
    r"(?:python3? |vllm |docker |CUDA_|VLLM_|nohup |bash |\./)"
    r"|(?:python3? |(?:\S{0,80}/)?vllm serve )"
    r"|FlashInfer is (?:not )?available|Importing from |Upgrading |Collecting "
    r"|Requirement already satisfied)"
)
_TROUBLE = re.compile(
    r"\s*(?:Traceback \(most recent|(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b"
    r"|Killed\b|Segmentation fault|Bus error|Aborted\b|.{0,60}\bexited with (?:code|status))"
)
# Parts of the printed arguments that differ between two starts of the same command.
_VOLATILE = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+")
_VLLM_PROCESS = re.compile(
    r"APIServer|EngineCore|DPEngineCore|Worker|VllmWorker|RayWorker|MainProcess|ApiServer"
)
_MAX_BACK = 400  # lines looked back over for the start of an attempt
_WINDOW = 40  # lines without a sign of start-up that end the look back
_ENGINE_HEAD = 60  # characters of an engine line that hold engine generation and version


@dataclass(slots=True)
class _Start:
    """A start being collected: index of its first line in the group, what its markers said."""

    first: int
    marks: set[str] = field(default_factory=set)
    engines: set[str | None] = field(default_factory=set)  # processes that printed an engine line
    pids: set[int | None] = field(default_factory=set)  # of its markers
    args_text: str | None = None
    engine_text: str | None = None
    trouble: bool = False


@dataclass(slots=True)
class _Run:
    """An attempt before it is numbered."""

    service: str | None
    lines: list[LogLine]


def split_attempts(log: Log) -> tuple[Attempt, ...]:
    """The starts of vLLM in a log, numbered from 1. Without a marker all lines are one attempt."""
    leaders = _leaders(log.lines)
    runs: list[_Run] = []
    if len(leaders) < 2:
        runs = _split_service(log.lines, next(iter(leaders), None))
    else:
        own: dict[str | None, list[LogLine]] = {service: [] for service in leaders}
        guests: dict[str | None, list[LogLine]] = {}
        for line in log.lines:
            service = line.speaker.service
            (own if service in own else guests).setdefault(service, []).append(line)
        for service, lines in own.items():
            runs += _split_service(lines, service)
        _seat_guests(runs, guests)
    runs.sort(key=lambda run: run.lines[0].number if run.lines else 0)
    return tuple(
        Attempt(index=index, lines=tuple(run.lines), service=run.service)
        for index, run in enumerate(runs, 1)
    )


def _split_service(lines: Sequence[LogLine], service: str | None) -> list[_Run]:
    """The starts in the lines of one service."""
    starts = _find_starts(lines)
    bounds = [0, *(start.first for start in starts[1:]), len(lines)]
    return [_Run(service, list(lines[a:b])) for a, b in itertools.pairwise(bounds)]


def _leaders(lines: Sequence[LogLine]) -> set[str | None]:
    """Services that run a vLLM of their own.

    They print a start marker, or name vLLM processes that no service with a marker names.
    """
    marked: set[str | None] = set()
    spoke: dict[str | None, set[tuple[str, int | None]]] = {}
    for line in lines:
        speaker = line.speaker
        if speaker.service not in marked and marker(line) is not None:
            marked.add(speaker.service)
        if speaker.process is not None and _VLLM_PROCESS.match(speaker.process):
            spoke.setdefault(speaker.service, set()).add((speaker.process, speaker.pid))
    known: set[tuple[str, int | None]] = set().union(*(spoke.get(one, set()) for one in marked))
    return marked | {
        service
        for service, processes in spoke.items()
        if marked and service not in marked and not processes & known
    }


def _seat_guests(runs: list[_Run], guests: dict[str | None, list[LogLine]]) -> None:
    """Gives the lines of services without a vLLM to the run they copy, else to the run around them."""
    said = {
        (line.time, line.text): index
        for index, run in enumerate(runs)
        for line in run.lines
        if line.time is not None
    }
    firsts = sorted((run.lines[0].number, index) for index, run in enumerate(runs) if run.lines)
    added: dict[int, list[LogLine]] = {}
    for lines in guests.values():
        votes = Counter(said[key] for line in lines if (key := (line.time, line.text)) in said)
        if votes:
            added.setdefault(votes.most_common(1)[0][0], []).extend(lines)
            continue
        for line in lines:
            place = max(bisect_right(firsts, (line.number, len(runs))) - 1, 0)
            added.setdefault(firsts[place][1], []).append(line)
    for index, lines in added.items():
        runs[index].lines = sorted(runs[index].lines + lines, key=lambda line: line.number)


def marker(line: LogLine) -> str | None:
    """The kind of start marker a line is: "server", "args", "engine", or None."""
    text = line.text
    if "version" in text[:140] and _SERVER.match(text):
        return "server"
    if "args: " in text[:40] and _ARGS.match(text):
        return "args"
    if text.lstrip()[:15] == "Initializing a " and _ENGINE.match(text):
        return "engine"
    if text.lstrip()[:16] == "Initializing an " and _ENGINE.match(text):
        return "engine"
    return None


def _find_starts(lines: Sequence[LogLine]) -> list[_Start]:
    """The starts in the lines of one service."""
    starts: list[_Start] = []
    current: _Start | None = None
    last_mark = -1
    for index, line in enumerate(lines):
        kind = marker(line)
        if kind is None:
            if current is not None and not current.trouble and _TROUBLE.match(line.text):
                current.trouble = True
            continue
        if current is None or _begins_new(current, kind, line):
            first = 0 if current is None else _look_back(lines, index, last_mark + 1, current)
            current = _Start(first)
            starts.append(current)
        _note_mark(current, kind, line)
        last_mark = index
    return starts


def _note_mark(start: _Start, kind: str, line: LogLine) -> None:
    start.marks.add(kind)
    start.pids.add(line.speaker.pid)
    if kind == "engine":
        start.engines.add(line.speaker.process)
        start.engine_text = line.text[:_ENGINE_HEAD]
        start.trouble = (
            False  # what went wrong before an engine came up was no failure of this start
        )
    elif kind == "args":
        start.args_text = _VOLATILE.sub("", line.text)


def _begins_new(current: _Start, kind: str, line: LogLine) -> bool:
    """Whether a marker belongs to a new start."""
    if kind == "engine":
        # Data-parallel engines, or the driver and its Ray workers, print one line each.
        return "engine" in current.marks and (
            line.speaker.process in current.engines
            or current.trouble
            or line.text[:_ENGINE_HEAD] != current.engine_text
        )
    if "engine" in current.marks:
        return True
    if kind not in current.marks:
        # A banner behind the arguments: something in between was lost.
        return kind == "server" and "args" in current.marks
    # The same marker twice before any engine: a process that executed itself anew says it again.
    if current.trouble:
        return True
    return kind == "args" and _VOLATILE.sub("", line.text) != current.args_text


def _look_back(lines: Sequence[LogLine], index: int, floor: int, before: _Start) -> int:
    """Index of the first line that belongs to the start whose first marker is at `index`.

    Goes back over lines of the new process and over what only a start-up prints; lines between them
    come along. It ends at an error or at another vLLM process, and, when the run before did not
    fail, after a few lines without a sign.
    """
    first = index
    pid = lines[index].speaker.pid
    window = _MAX_BACK if before.trouble else _WINDOW
    for at in range(index - 1, max(floor, index - _MAX_BACK) - 1, -1):
        line = lines[at]
        speaker = line.speaker
        if first - at > window or line.level in ("ERROR", "CRITICAL") or _TROUBLE.match(line.text):
            break
        if pid is not None and speaker.pid == pid and (before.trouble or pid not in before.pids):
            first = (
                at  # containers number their processes alike, so the pid may be the old one's too
            )
        elif _PREAMBLE.match(line.text):
            first = at
        elif speaker.pid is not None and _VLLM_PROCESS.match(speaker.process or ""):
            break
    return first
