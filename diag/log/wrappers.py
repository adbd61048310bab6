"""Takes off what collectors put around a line: compose, Kubernetes, journald, Cloud Logging, others.

In: all lines of a log, to learn which wrappers it uses; then one line at a time. Out: the line inside
and the service or pod it came from. Known wrappers are peeled by shape; others are learned from text
that many lines carry in front of a vLLM prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.log.prefixes import LEVELS, parse_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEVEL = r"DEBUG|INFO|WARNING|ERROR|CRITICAL"
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
# Where vLLM's own part of a line begins.
HEAD = re.compile(
    rf"(?:\((?:[A-Za-z][\w.-]{{0,60}} )?(?:rank=\d+ )?pid=\d+(?:, ip=[^)\s]{{1,60}})?\) ?)+"
    rf"(?:(?:{_LEVEL}) (?:\d\d-\d\d \d\d:|\d{{4}}-\d\d-\d\d ))?"
    rf"|(?:{_LEVEL}) \d\d-\d\d \d\d:\d\d:\d\d "
)
_ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ZONE = r"(?:Z|[+-]\d\d:?\d\d)"
_COMPOSE = re.compile(r"(?:\d+\|)?(?P<service>[A-Za-z0-9][\w.@-]{0,80}) *\| ?")
_STAMP_ONLY = re.compile(
    rf"(?:\[{_ISO}{_ZONE}?\]|{_ISO}{_ZONE}"
    rf"|\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{{1,9}})?(?:{_ZONE}| UTC)(?= ))(?:[ \t]|$)"
)
_SYSLOG = re.compile(
    rf"(?:<\d{{1,3}}>)?(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|{_ISO}{_ZONE})"
    r" (?P<host>[\w.-]{1,80}) (?P<unit>[^\s:\[\]|]{1,60})(?:\[(?P<pid>\d+)\])?: "
)
_DIGITS = "0123456789"
# Name in Log.formats, the characters a line with the wrapper can begin with, the wrapper.
_KNOWN: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("kubernetes", "[p", re.compile(r"\[?pod/(?P<service>[\w./-]{1,160})\]? ")),
    ("tag", "[", re.compile(r"\[(?P<service>vllm[\w.-]{0,40})\]:? ")),
    ("journald", "JFMASOND<" + _DIGITS, _SYSLOG),
    (
        "runpod",
        "abcdefghijklmnopqrstuvwxyz" + _DIGITS,
        re.compile(r"(?P<service>[a-z0-9]{14})\[(?P<level>info|warning|error)\]"),
    ),
    (
        "lemonade",
        "[" + _DIGITS,
        re.compile(rf"(?:{_STAMP} )?\[(?P<level>Error|Info|Warning|Debug)\] \(Process\) "),
    ),
    (
        "stderr_bar",
        "|DIWEC" + _DIGITS,
        re.compile(rf"(?:{_STAMP} )?\|? ?(?:\| )?(?P<level>{_LEVEL}) *\| *std(?:err|out) *\| ?"),
    ),
    (
        "cloud_logging",
        "DNAEIWC",
        re.compile(
            rf"(?P<level>DEFAULT|NOTICE|ALERT|EMERGENCY|{_LEVEL}) {_ISO}Z "
            r"(?:\[resource\.labels\.\w{1,40}: (?P<service>[^\]]{1,80})\] )?"
        ),
    ),
    ("kubernetes", "s", re.compile(r"std(?:out|err) (?P<part>[FP]) ")),
    (
        "rust_tracing",
        " TDIWE",
        re.compile(r" *(?P<level>TRACE|DEBUG|INFO|WARN|ERROR) +\w+(?:::\w+)+: (?:VLLM: )?"),
    ),
    ("time_stamps", "[" + _DIGITS, _STAMP_ONLY),
)
_NUMBERED = re.compile(r"[-_]\d+$")
_KERNEL_NAMES = ("kernel", "kern")

_LEARN_FROM = 4000  # lines looked at
_LEARN_MIN = 3  # lines that must carry an unknown wrapper
_MAX_SHAPES = 8
_MAX_DEPTH = 8


@dataclass(slots=True)
class Peeled:
    """A line without its wrappers. `partial`: a container runtime cut it, the next continues it."""

    text: str
    service: str | None = None
    process: str | None = None
    partial: bool = False


class Wrappers:
    """Peels wrappers. Names before `|` and unknown shapes count only when many lines agree."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.formats: Counter[str] = Counter()
        self._names = _compose_names(lines)
        self._shapes: tuple[re.Pattern[str], ...] = ()
        self._shapes = self._learn(lines)

    def peel(self, text: str) -> Peeled:
        """The line inside, wrappers taken off one by one from the outside."""
        peeled = Peeled(text)
        for _ in range(_MAX_DEPTH):
            inner = peeled.text
            if not inner or not self._peel_one(peeled):
                break
        return peeled

    def _peel_one(self, peeled: Peeled) -> bool:
        text = peeled.text
        first = text[0]
        for name, signs, pattern in _KNOWN:
            if first in signs and (match := pattern.match(text)) is not None:
                return self._take(peeled, match, name)
        if "|" in text[:100]:
            match = _COMPOSE.match(text)
            if match is not None and match.group("service") in self._names:
                return self._take(peeled, match, "docker_compose")
        for shape in self._shapes:
            match = shape.match(text)
            if match is not None and match.end():
                return self._take(peeled, match, "other_wrapper")
        return False

    def _take(self, peeled: Peeled, match: re.Match[str], name: str) -> bool:
        found = match.groupdict()
        peeled.text = peeled.text[match.end() :]
        peeled.service = found.get("service") or peeled.service
        if found.get("part"):
            peeled.partial = found["part"] == "P"
        if found.get("unit") in _KERNEL_NAMES:
            peeled.process = "kernel"
        elif found.get("unit"):
            pid = f"[{found['pid']}]" if found["pid"] else ""
            peeled.service = f"{found['host']} {found['unit']}{pid}"
        self.formats[name] += 1
        return True

    def _learn(self, lines: Sequence[str]) -> tuple[re.Pattern[str], ...]:
        """Shapes of text that stands in front of vLLM's prefix on several lines, digits aside."""
        shapes: Counter[str] = Counter()
        heads = 0
        for line in lines[:_LEARN_FROM]:
            match = HEAD.search(line, 0, 240)
            if match is None:
                continue
            heads += 1
            if match.start():
                before = self.peel(line[: match.start()]).text
                if before and _may_be_wrapper(before):
                    shapes[_shape(before)] += 1
        self.formats.clear()
        least = max(_LEARN_MIN, heads // 50)
        return tuple(
            re.compile(shape) for shape, seen in shapes.most_common(_MAX_SHAPES) if seen >= least
        )


def _compose_names(lines: Sequence[str]) -> frozenset[str]:
    """Service names in front of `|`: numbered ones (`vllm-1`), or one that many lines carry.

    A name without a number must stand in front of at least one log line, or any table would do.
    """
    seen: Counter[str] = Counter()
    logging: set[str] = set()
    for line in lines:
        if "|" not in line[:100]:
            continue
        stamp = _STAMP_ONLY.match(line)
        match = _COMPOSE.match(line, stamp.end() if stamp else 0)
        if match is None:
            continue
        name = match.group(1)
        seen[name] += 1
        if name not in logging and parse_prefix(line[match.end() : match.end() + 400]).known:
            logging.add(name)
    total = sum(1 for line in lines if line.strip())
    return frozenset(
        name
        for name, count in seen.items()
        if not name.isdigit()
        and name.upper() not in LEVELS
        and (_NUMBERED.search(name) or (name in logging and count * 20 >= total))
    )


def _may_be_wrapper(before: str) -> bool:
    """Whether the text can be a collector's prefix: short, closed by a sign, no progress bar."""
    return (
        len(before) <= 100
        and not before[-1].isalnum()
        and bool(before.strip())
        and "/s]" not in before
        and "%|" not in before
        and "it]" not in before
        and not parse_prefix(before).known
    )


def _shape(before: str) -> str:
    """A regular expression for the text with its numbers, hexadecimal ids and levels left open."""
    parts = re.split(
        r"(\d+|\b(?:error|info|warning|warn|debug)\b)", before.strip(" "), flags=re.IGNORECASE
    )
    levels = r"(?i:error|info|warning|warn|debug)"
    shape = "".join(
        (r"\d+" if part.isdigit() else levels if index % 2 else re.escape(part))
        for index, part in enumerate(parts)
    )
    return r"\s*" + shape + (" ?" if before.endswith(" ") else "")
