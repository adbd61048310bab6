"""Reads what a logger puts in front of a message: level, time, source file, process, rank.

In: a line without its wrappers, e.g. `(Worker_TP1 pid=9) INFO 05-04 14:43:23 [a.py:298] Available`.
Out: a Prefix with the message and who said it. A line without a known prefix is all message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LEVELS = {
    "TRACE": "DEBUG",
    "DEBUG": "DEBUG",
    "DEBG": "DEBUG",
    "INFO": "INFO",
    "NOTICE": "INFO",
    "DEFAULT": "INFO",
    "WARN": "WARNING",
    "WARNING": "WARNING",
    "ERR": "ERROR",
    "ERROR": "ERROR",
    "CRITICAL": "CRITICAL",
    "FATAL": "CRITICAL",
    "ALERT": "CRITICAL",
    "EMERGENCY": "CRITICAL",
}
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "D": "DEBUG"}
_LEVEL = r"DEBUG|INFO|WARNING|ERROR|CRITICAL"
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,:]\d+)?(?:Z|[+-]\d\d:?\d\d)?"

# (EngineCore_DP0 pid=420), (VllmWorker rank=2 pid=7), (RayWorkerWrapper pid=9, ip=10.0.0.2),
# (pid=1384), (raylet)
_PROCESS = re.compile(
    r"\(?(?:(?P<process>[A-Za-z][\w.:-]{0,79}) )?(?:rank=(?P<rank>\d{1,6}) )?pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<host>[^)\s]{1,60}))?\) ?|\((?P<ray>raylet|gcs_server|autoscaler)[^)]{0,40}\) ?"
)
# INFO 05-04 14:43:23 [gpu_worker.py:298] msg; brackets and source may be missing
_VLLM = re.compile(
    rf"(?P<level>{_LEVEL}) +(?P<time>(?:\d{{4}}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?) +"
    r"(?:\[?(?P<source>[^\s\[\]]{1,120}:\d+)\](?: |$))?"
)
_NO_TIME = re.compile(
    rf"(?P<level>{_LEVEL})(?P<gap> +)"
    r"\[(?P<source>[\w./<>-]{1,120}\.(?:py|pyx|cpp|cc|cu|rs)(?::\d+)?)\](?: |$)"
)
# W1201 16:06:00.971000 24298 torch/utils/cpp_extension.py:140] msg
# [W827 22:16:08.1992 CUDACachingAllocator.cpp:508] msg, [E ProcessGroupNCCL.cpp:563] msg
_GLOG_LINE = re.compile(
    r"\[?(?P<glog>[IWEF])"
    r"(?:(?P<day>\d{3,8}) (?P<clock>\d\d:\d\d:\d+(?:\.\d+)?)(?: +(?P<pid>\d+))?)?"
    r" (?P<source>[\w./+<>-]{1,160}:\d+)\](?: |$)"
)
# [rank4]: msg, [rank4]:[W827 ..., [default0]:msg
_RANK = re.compile(r"\[(?:rank|default)(?P<rank>\d{1,6})\]: ?")
# 2026-07-06 18:33:06,987 - INFO - autotuner.py:622 - msg; dashes or bars
_DASHED = re.compile(
    rf"(?P<time>{_STAMP}) *[-|] *"
    rf"(?:(?P<name>[\w./<>-]{{1,80}}) *[-|] *)?(?P<level>{_LEVEL}|WARN) *[-|] *"
    r"(?:(?P<source>[\w./<>-]{1,120}\.\w{1,4}:\d+) *[-|] *)?"
    r"(?:(?P<loguru>[\w.<>-]{1,120}:[\w<>]{1,80}:\d+) +- +)?(?:std(?:err|out) *\| ?)?"
)
# 2023-06-30 09:24:53,584 INFO worker.py:1636 -- msg (Ray)
# 2024-03-20T21:31:00+0000 [INFO] [cli] msg (BentoML)
_SPACED = re.compile(
    rf"(?P<time>{_STAMP})[ \t]+\[?(?P<level>{_LEVEL})\]?[ \t]+"
    r"(?:(?P<source>[\w./<>-]{1,120}\.\w{1,4}:\d+)\]? +(?:-- +)?|\[[\w.-]{1,40}\] )?"
)
# [2023-09-23 16:35:32,117 E 1269 1269] (raylet) node_manager.cc:3007: msg
# [2026-06-27 01:27:44.242: I path.py:638] msg
_RAY_CORE = re.compile(
    rf"\[?(?P<time>{_STAMP}):? (?P<glog>[IWEFD]) "
    r"(?:(?P<pid>\d+) \d+\]|(?P<source>[\w./<>-]{1,160}:\d+)\]) "
    r"(?:\((?P<ray>[a-z_]{1,40})\) )?(?:(?P<native>[\w./-]{1,120}\.(?:cc|h|cpp):\d+): )?"
)
# [2025-09-23 12:37:58] msg, 2026-06-27 01:29:07.000841:  263  [INFO]: msg
_STAMPED = re.compile(
    rf"(?:\[(?P<time>{_STAMP})(?: TP\d+)?\]|(?P<other>{_STAMP}))"
    rf"(?::? +\d+ +\[(?P<level>{_LEVEL})\]:)? "
)
# [WARNING|logging.py:329] 2025-03-10 16:59:25,326 >> msg
_TRANSFORMERS = re.compile(
    rf"\[(?P<level>{_LEVEL})\|(?P<source>[\w./-]{{1,120}}:\d+)\] (?P<time>{_STAMP}) >> "
)
# INFO:     Started server process, WARNING:root:msg
_UVICORN = re.compile(
    rf"(?P<level>{_LEVEL})(?: (?P<source>[\w./-]{{1,120}}\.py:\d+))?:"
    r"(?:[ \t]+|[A-Za-z_][\w.]{0,80}:(?=\S))"
)
_KERNEL = re.compile(
    r"\[ {0,6}(?P<time>\d{1,9}\.\d{6}|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4})\] "
)
# host1:56890:56890 [0] NCCL INFO msg; the text stays whole, patterns look for "NCCL WARN"
_NCCL = re.compile(
    r"[\w.-]{1,80}:(?P<pid>\d+):\d+ \[\d+\] (?:[\w./-]{1,120}:\d+ )?NCCL (?P<level>[A-Z]+)\b"
)
# Lines of other tools that only give their level: [ERROR] RUNTIME(...), LMCache INFO: ...
_LEVEL_ONLY = re.compile(rf"(?:\[(?P<level>{_LEVEL})\] |[A-Z][\w-]{{1,30}} (?P<named>{_LEVEL}): )")
_HAMI = re.compile(rf"\[HAMI-core (?P<level>{_LEVEL}|Error|Warn|Info|Msg)\b", re.IGNORECASE)
_REPEATED = re.compile(
    r" ?\[repeated (\d{1,9})x across (?:the )?(?:cluster|all nodes)\]"
    r"(?: \(Ray deduplicates logs.{0,400}\))?"
)
_TENSOR = re.compile(r"_TP(\d+)")
_PIPELINE_ONLY = re.compile(r"Worker_(?:PP|EP)(\d+)$")
_NUMBERED = re.compile(r"VllmWorker-(\d+)$")

# The plain line that makes up most of every log, in one go.
_FAST = re.compile(
    r"(?:\((?P<process>[A-Za-z][\w.-]{0,79})(?: rank=(?P<rank>\d{1,6}))? pid=(?P<pid>\d{1,10})\) )?"
    rf"(?P<level>{_LEVEL}) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) "
    r"\[?(?P<source>[^\s\[\]]{1,120}:\d+)\](?: |$)"
)


@dataclass(slots=True)
class Prefix:
    """What stood in front of `text`. None: not printed."""

    text: str
    process: str | None = None
    pid: int | None = None
    rank: int | None = None
    host: str | None = None
    level: str | None = None
    time: str | None = None
    source: str | None = None
    repeated: int = 1
    known: bool = False  # some prefix was there


def parse_prefix(text: str) -> Prefix:
    """Splits a line into logger prefixes and message. Of two processes the inner one speaks."""
    match = _FAST.match(text)
    if match is not None:
        process, rank, pid, level, time, source = match.groups()
        prefix = Prefix(text[match.end() :], level=level, time=time, source=source, known=True)
        if process is not None:
            _set_process(prefix, process, pid, rank)
    else:
        prefix = Prefix(text)
    if match is None or (prefix.text[:1] in "([" and prefix.text):
        _peel_processes(prefix)
        if prefix.level is None and prefix.text and not prefix.text[0].isspace():
            _peel_logger(prefix)
    if "[repeated " in prefix.text:
        _take_repeats(prefix)
    return prefix


def _set_process(prefix: Prefix, process: str | None, pid: str | None, rank: str | None) -> None:
    if process is not None:
        prefix.process = process
        prefix.rank = rank_of(process)
    if pid is not None:
        prefix.pid = int(pid)
    if rank is not None:
        prefix.rank = int(rank)


def rank_of(process: str) -> int | None:
    """The rank a process name gives: its TP number when the name has no PP or DP part.

    >>> rank_of("Worker_TP3"), rank_of("Worker_PP1_TP3"), rank_of("EngineCore_DP0")
    (3, None, None)
    """
    if "_TP" in process and "_PP" not in process and "_DP" not in process:
        match = _TENSOR.search(process)
        return int(match.group(1)) if match else None
    match = _PIPELINE_ONLY.match(process) or _NUMBERED.match(process)
    return int(match.group(1)) if match else None


def _peel_processes(prefix: Prefix) -> None:
    """Takes off every `(name pid=N)` and `[rankN]:` at the front, also when mixed."""
    for _ in range(6):
        text = prefix.text
        match = _PROCESS.match(text) if ("pid=" in text[:130] or text[:1] == "(") else None
        if match is not None:
            process, rank, pid, host, ray = match.groups()
            _set_process(prefix, ray or process, pid, rank)
            prefix.host = host or prefix.host
        else:
            match = _RANK.match(text)
            if match is None:
                return
            prefix.rank = int(match.group("rank"))
        prefix.text = text[match.end() :]
        prefix.known = True


def _peel_logger(prefix: Prefix) -> None:
    text = prefix.text
    match = _VLLM.match(text)
    if match is not None:
        _fill(prefix, match)
        return
    match = _NO_TIME.match(text)
    if match is not None:
        _fill(prefix, match)
        if len(match.group("gap")) > 1:
            prefix.text = prefix.text.lstrip(" ")
        return
    first = text[0]
    if first.isdigit():
        _peel_stamped(prefix)
    elif first == "[":
        _peel_bracketed(prefix)
    elif first in "IWEF" and (match := _GLOG_LINE.match(text)) is not None:
        _fill_glog(prefix, match)
    elif first in "DIWEC" and (match := _UVICORN.match(text)) is not None:
        _fill(prefix, match)
    elif " NCCL " in text[:200] and (match := _NCCL.match(text)) is not None:
        _note_nccl(prefix, match)
    elif (match := _LEVEL_ONLY.match(text)) is not None:
        prefix.level = LEVELS[match.group("level") or match.group("named")]


def _peel_stamped(prefix: Prefix) -> None:
    """Lines that begin with a full date."""
    text = prefix.text
    match = _RAY_CORE.match(text)
    if match is not None:
        _fill_native(prefix, match)
        return
    for pattern in (_DASHED, _SPACED):
        match = pattern.match(text)
        if match is not None:
            _fill(prefix, match)
            if prefix.source is None and pattern is _DASHED:
                prefix.source = match.group("loguru")
            return
    match = _STAMPED.match(text)
    if match is not None:
        _fill(prefix, match)
        prefix.time = prefix.time or match.group("other")
        _peel_inner(prefix)


def _peel_bracketed(prefix: Prefix) -> None:
    """Lines that begin with `[`."""
    text = prefix.text
    match = _GLOG_LINE.match(text)
    if match is not None:
        _fill_glog(prefix, match)
        return
    match = _RAY_CORE.match(text)
    if match is not None:
        _fill_native(prefix, match)
        return
    match = _TRANSFORMERS.match(text)
    if match is not None:
        _fill(prefix, match)
        return
    match = _STAMPED.match(text)
    if match is not None:
        _fill(prefix, match)
        _peel_inner(prefix)
        return
    match = _KERNEL.match(text)
    if match is not None:
        _fill(prefix, match)
        prefix.process = "kernel"
        return
    match = _LEVEL_ONLY.match(text) or _HAMI.match(text)
    if match is not None:
        prefix.level = LEVELS.get(match.group("level").upper())


def _peel_inner(prefix: Prefix) -> None:
    """A time stamp alone was taken off; another prefix may follow it."""
    _peel_processes(prefix)
    outer = prefix.time
    if prefix.text and prefix.level is None:
        if " NCCL " in prefix.text[:200] and (match := _NCCL.match(prefix.text)) is not None:
            _note_nccl(prefix, match)
        elif (match := _VLLM.match(prefix.text) or _UVICORN.match(prefix.text)) is not None:
            _fill(prefix, match)
        elif (match := _GLOG_LINE.match(prefix.text)) is not None:
            _fill_glog(prefix, match)
        elif (match := _LEVEL_ONLY.match(prefix.text)) is not None:
            prefix.level = LEVELS[match.group("level") or match.group("named")]
    prefix.time = prefix.time or outer


def _fill(prefix: Prefix, match: re.Match[str]) -> None:
    found = match.groupdict()
    level = found.get("level")
    if level:
        prefix.level = LEVELS.get(level.upper(), level)
    prefix.time = found.get("time") or prefix.time
    prefix.source = found.get("source") or prefix.source
    if found.get("pid") and prefix.pid is None:
        prefix.pid = int(found["pid"])
    prefix.text = prefix.text[match.end() :]
    prefix.known = True


def _fill_glog(prefix: Prefix, match: re.Match[str]) -> None:
    _fill(prefix, match)
    prefix.level = _GLOG[match.group("glog")]
    day, clock = match.group("day"), match.group("clock")
    if day is not None:
        prefix.time = f"{day} {clock}"


def _fill_native(prefix: Prefix, match: re.Match[str]) -> None:
    _fill(prefix, match)
    prefix.level = _GLOG[match.group("glog")]
    prefix.process = match.group("ray") or prefix.process
    prefix.source = match.group("native") or prefix.source


def _note_nccl(prefix: Prefix, match: re.Match[str]) -> None:
    prefix.level = LEVELS.get(match.group("level"), "INFO")
    prefix.process = prefix.process or "nccl"
    prefix.pid = prefix.pid or int(match.group("pid"))
    prefix.known = True


def _take_repeats(prefix: Prefix) -> None:
    match = _REPEATED.search(prefix.text)
    if match is not None:
        prefix.repeated = int(match.group(1))
        prefix.text = prefix.text[: match.start()] + prefix.text[match.end() :]
