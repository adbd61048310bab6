"""Exceptions and failure lines -> Problems: each thing that went wrong once, with frames, site and phase.

Sample: a traceback logged line by line by one of eight interleaved workers,
    (Worker_TP3 pid=9) ERROR 04-17 02:01:23 [multiproc_executor.py:949]   File "x.py", line 3, in profile_run
    (Worker_TP3 pid=9) ERROR 04-17 02:01:23 [multiproc_executor.py:949] torch.OutOfMemoryError: CUDA out of memory. ...
Frames are gathered by speaker; "During handling ..." chains are one problem; other ranks' copies are folded in.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diag.facts.model import Event, Frame, Problem
from diag.facts.sites import phase_of_sites, places, sites_of
from diag.log.model import LogLine, Speaker
from diag.terms import Phase, RowRole

MAX_FRAMES = 400  # a chain keeps that many
MAX_MESSAGE_LINES = 16  # lines of an exception's text that are joined
MAX_PROBLEMS = 2000
MAX_COPIES = 500
_SOON = 5  # lines from a statement to the traceback that belongs to it

_FRAME = re.compile(
    r'File "(?P<file>[^"\n]{1,400})", line (?P<line>\d+)(?:, in (?P<function>[^\s,]{1,200}))?'
)
_NOTEBOOK_FRAME = re.compile(
    r"^\s*(?:File )?(?P<file>[~/.\w][^\s:()]{1,300}\.py)(?:[:,] ?(?P<line>\d+))?,? in (?P<function>[\w.<>]+)\("
)
_EXCEPTION = re.compile(
    r"^(?:\w+: )?(?P<path>(?:[A-Za-z_]\w*\.)*)"
    r"(?P<name>Exception|KeyboardInterrupt|SystemExit|StopIteration|OutOfMemory|OutOfResources"
    r"|[A-Z]\w*(?:Error|Exception|Interrupt|Failure|Exhausted|OutOfResources))"
    r"(?:\((?P<wrapped>['\"].*)|(?P<task>\(\w+\))?: ?(?P<text>.*)|\s*$)"
)
_BEGIN = re.compile(r"Traceback \(most recent call last\)")
_CHAIN = re.compile(
    r"During handling of the above exception|The above exception was the direct cause"
)
_ALIKE = re.compile(r"0x[0-9a-f]+|\d[\d.,]*|GPU \d+|rank ?\d+|cuda:\d+", re.IGNORECASE)
_REFUSED = (
    "torch.map_warning",
    "torch.alloc_warning",
)  # what a cut traceback was most likely about
_METHOD = re.compile(r"(?:processing|executing) method ['\"]?(\w+)")


@dataclass(slots=True)
class _Open:
    """A traceback being gathered for one speaker."""

    first: int
    frames: list[Frame] = field(default_factory=list)
    lines: list[LogLine] = field(default_factory=list)
    exceptions: list[tuple[LogLine, str, str]] = field(default_factory=list)  # line, name, text
    chained: bool = False  # the next traceback belongs to the same chain
    text_open: bool = False  # the last exception's text may go on

    def add_text(self, line: LogLine) -> None:
        """Append a continuation line to the last exception's text."""
        stated, name, text = self.exceptions[-1]
        self.exceptions[-1] = (stated, name, f"{text}\n{line.text.strip()}")
        self.lines.append(line)
        self.text_open = text.count("\n") < MAX_MESSAGE_LINES


class _Gatherer:
    """Walks the lines once and closes a problem whenever a speaker's traceback has ended."""

    def __init__(self, events: Mapping[int, Sequence[Event]]) -> None:
        self.events = events  # by id() of the LogLine
        self.open: dict[Speaker, _Open] = {}
        self.closed: list[_Open] = []
        self.method: dict[Speaker, Frame] = {}  # named by the statement right before a traceback

    def feed(self, line: LogLine) -> None:
        """Take the next line of the attempt."""
        current = self.open.get(line.speaker)
        frames = _frames(line)
        if frames or _BEGIN.search(line.text):
            current = self._going_on(line)
            current.frames.extend(frames[: MAX_FRAMES - len(current.frames)])
            current.lines.append(line)
            current.text_open = False
        elif match := _EXCEPTION.match(line.text.strip()):
            current = self._going_on(line)
            current.exceptions.append((line, match["name"], line.text.strip()))
            current.lines.append(line)
            current.chained, current.text_open = False, True
        elif current and _CHAIN.search(line.text):
            current.chained, current.text_open = True, False
        elif current and current.text_open and self._continues(line, current):
            current.add_text(line)
        elif self._roles(line) & {RowRole.CAUSE, RowRole.ECHO}:
            named = _method(line)
            self.closed.append(_Open(first=line.number, frames=named, lines=[line]))
            if named:
                self.method[line.speaker] = named[0]

    def _going_on(self, line: LogLine) -> _Open:
        """The speaker's open traceback, or a new one when the last has ended with its exception."""
        current = self.open.get(line.speaker)
        if current and current.exceptions and not current.chained:
            self._close(line.speaker)
            current = None
        if current is None:
            current = self.open[line.speaker] = _Open(first=line.number)
            named = self.method.pop(line.speaker, None)
            if named and line.number - named.number <= _SOON:
                current.frames.append(named)
        return current

    def _roles(self, line: LogLine) -> set[RowRole]:
        return {event.role for event in self.events.get(id(line), ())}

    def _continues(self, line: LogLine, current: _Open) -> bool:
        """Whether a line goes on with the exception's text: the same logger line or no logger at all."""
        stated = current.exceptions[-1][0]
        if line.number - stated.number > 2 * MAX_MESSAGE_LINES or RowRole.ECHO in self._roles(line):
            return False
        return line.level is None or (line.level, line.source) == (stated.level, stated.source)

    def _close(self, speaker: Speaker) -> None:
        done = self.open.pop(speaker, None)
        if done and (done.exceptions or done.frames or self._stated(done)):
            self.closed.append(done)

    def _stated(self, done: _Open) -> bool:
        """Whether the line that opens the traceback says the cause itself, as the V0 engine's workers do."""
        return any(RowRole.CAUSE in self._roles(line) for line in done.lines)

    def finish(self) -> list[_Open]:
        """All tracebacks and statements, by first line."""
        for speaker in list(self.open):
            self._close(speaker)
        self.closed.sort(key=lambda done: done.first)
        return self.closed[:MAX_PROBLEMS]


def _method(line: LogLine) -> list[Frame]:
    """The method that "... while processing method load_model" names: as good as a frame."""
    match = _METHOD.search(line.text)
    if match is None:
        return []
    return [Frame(file="worker.py", lineno=None, function=match[1], number=line.number)]


def _frames(line: LogLine) -> list[Frame]:
    """Every frame on a line: one as a rule, many when the newlines of a traceback were lost."""
    text = line.text
    if "File " in text:
        return [
            Frame(
                file=match["file"],
                lineno=int(match["line"]),
                function=match["function"] or "",
                number=line.number,
            )
            for match in _FRAME.finditer(text)
        ] or _notebook_frame(line)
    return _notebook_frame(line) if ".py" in text and " in " in text else []


def _notebook_frame(line: LogLine) -> list[Frame]:
    match = _NOTEBOOK_FRAME.match(line.text)
    if match is None:
        return []
    number = int(match["line"]) if match["line"] else None
    function = match["function"].rsplit(".", 1)[-1]
    return [Frame(file=match["file"], lineno=number, function=function, number=line.number)]


def gather(
    lines: Iterable[LogLine], events: Sequence[Event], started: Sequence[tuple[int, Phase]]
) -> tuple[Problem, ...]:
    """The problems of one attempt in log order, copies folded.

    `events` are all catalogue rows found on the lines; `started` the (line, phase) marks from `phase_marks`.
    """
    by_line: dict[int, list[Event]] = {}
    for event in events:
        by_line.setdefault(id(event.line), []).append(event)
    gatherer = _Gatherer(by_line)
    for line in lines:
        gatherer.feed(line)
    warned = [event for event in events if event.row in _REFUSED]
    problems = (_problem(done, by_line, started, warned) for done in gatherer.finish())
    return _fold(list(problems))


def _problem(
    done: _Open,
    events: Mapping[int, Sequence[Event]],
    started: Sequence[tuple[int, Phase]],
    warned: Sequence[Event],
) -> Problem:
    own = tuple(event for line in done.lines for event in events.get(id(line), ()))
    sites = sites_of(done.frames)
    if done.exceptions:
        stated, name, text = _telling(done, events)
    elif own:
        stated, name, text = own[0].line, None, own[0].line.text.strip()
    else:
        last = done.frames[-1]
        stated = next(line for line in reversed(done.lines) if line.number == last.number)
        name, text = None, ""  # a traceback whose end was cut off
        own = tuple(event for event in warned if event.line.number < done.first)[-1:]
    return Problem(
        line=stated,
        text=text,
        exception=name,
        role=_role(own, raised=bool(done.exceptions)),
        phase=phase_of_sites(sites) or _own_phase(own) or _phase_at(done.first, started),
        frames=tuple(done.frames),
        sites=sites,
        events=own,
        first_number=done.first,
    )


def _telling(done: _Open, events: Mapping[int, Sequence[Event]]) -> tuple[LogLine, str | None, str]:
    """Of a chain's exceptions the one to quote: the first that the catalogue knows as a cause, else the first."""
    for stated, name, text in done.exceptions:
        if any(event.role is RowRole.CAUSE for event in events.get(id(stated), ())):
            return stated, name, text
    return done.exceptions[0]


def _role(own: Sequence[Event], *, raised: bool) -> RowRole:
    roles = {event.role for event in own}
    if not raised and all(event.role is RowRole.WARNING for event in own):
        return RowRole.DETAIL
    for role in (RowRole.CAUSE, RowRole.ECHO, RowRole.NOISE, RowRole.WARNING, RowRole.DETAIL):
        if role in roles:
            return RowRole.CAUSE if role is RowRole.DETAIL and raised else role
    return RowRole.CAUSE


def _own_phase(own: Sequence[Event]) -> Phase | None:
    """The phase of a cause row that can be printed in one phase only."""
    return next((e.phase for e in own if e.role is RowRole.CAUSE and e.subtype and e.phase), None)


def phase_marks(events: Sequence[Event]) -> tuple[tuple[int, Phase], ...]:
    """(line, phase that begins after it) for every event that ends a phase, in log order."""
    after = places().phase_after
    return tuple((e.line.number, after[e.row]) for e in events if e.row in after)


def _phase_at(number: int, started: Sequence[tuple[int, Phase]]) -> Phase | None:
    phase = None
    for line, begun in started:
        if line > number:
            break
        phase = begun
    return phase


def _fold(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """One problem for all that say the same but for numbers; a copy with frames lends them to one without."""
    folded: OrderedDict[tuple[str | None, str], Problem] = OrderedDict()
    for problem in problems:
        key = (problem.exception, _ALIKE.sub("#", problem.text.split("\n", 1)[0])[:300])
        if not problem.text:
            key = (None, f"@{problem.first_number}")
        first = folded.get(key)
        if first is not None and _elsewhere(first, problem):
            key = (problem.exception, f"{key[1]}@{problem.phase}")
            first = folded.get(key)
        if first is None:
            folded[key] = problem
        elif len(first.copies) < MAX_COPIES:
            folded[key] = _merged(first, problem)
    return tuple(folded.values())


def _elsewhere(first: Problem, other: Problem) -> bool:
    """The same words from another place: both tracebacks are there, and they settle different phases."""
    here, there = phase_of_sites(first.sites), phase_of_sites(other.sites)
    return here is not None and there is not None and here is not there


def _merged(first: Problem, other: Problem) -> Problem:
    richer = other if len(other.frames) > 0 and not first.frames else first
    return replace(
        first,
        frames=richer.frames,
        sites=richer.sites,
        phase=richer.phase or first.phase,
        copies=(*first.copies, other.line),
    )
