"""Reads log lines out of JSON: one record a line, a Loki or Elasticsearch answer, a printed export.

In: text that starts with a brace, or all lines of an export. Out: Records, each a message (line
feeds inside) with what its keys say about level, time, source and process.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # json values

from diag.log.prefixes import LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MESSAGE_KEYS = (
    "textPayload",
    "message",
    "msg",
    "log",
    "line",
    "@message",
    "body",
    "MESSAGE",
    "event",
)
_TRACE_KEYS = (
    "exc_info",
    "exc_text",
    "stack_trace",
    "stacktrace",
    "traceback",
    "exception",
    "stack_info",
    "error",
)
# A JSON object is a log record when one of these stands beside its message.
_RECORD_KEYS = frozenset(
    {"time", "ts", "timestamp", "@timestamp", "asctime", "level", "levelname", "lvl", "severity",
     "stream", "logger", "name", "labels", "insertId", "resource", "process", "pid", "filename",
     "lineno", "kubernetes", "container", "container_name", "host", "hostname", "pod", "logName",
     "receiveTimestamp", "file", "__REALTIME_TIMESTAMP", "_HOSTNAME", "eventTime", "ingestionTime"}
)  # fmt: skip
_INNER_KEYS = ("jsonPayload", "data", "result", "results", "streams", "hits", "_source", "entries",
               "records", "logs", "events", "items", "log", "message", "structured")  # fmt: skip
_SERVICE_KEYS = (
    "container_name",
    "container",
    "containerName",
    "pod",
    "pod_name",
    "service_name",
    "instance_id",
)
_MAX_DEPTH = 6
_MAX_RECORDS = 200_000

_PRETTY_LINE = re.compile(
    r'^\s*(?:"[^"\\]{1,80}"\s*:|[\[\]{}]+,?\s*$|"(?:[^"\\]|\\.)*",?\s*$|-?[\d.]+,?\s*$)'
)
_PRETTY_MESSAGE = re.compile(
    r'^\s*"(?:textPayload|message|msg|log|line|@message|body|MESSAGE)"\s*:\s*'
    r'"(?P<value>(?:[^"\\]|\\.)*)"?,?\s*$'
)
_PRETTY_TIME = re.compile(
    r'^\s*"(?:timestamp|@timestamp|time|ts)"\s*:\s*"?(?P<value>[^",]{4,40})"?,?\s*$'
)
_BROKEN_MESSAGE = re.compile(
    r'"(?:textPayload|message|msg|log|line)"\s*:\s*"(?P<value>(?:[^"\\]|\\.)*)'
)
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "", "f": ""}


@dataclass(slots=True)
class Record:
    """One log record. `text` may hold line feeds. `partial`: the next record continues it."""

    text: str
    level: str | None = None
    time: str | None = None
    source: str | None = None
    pid: int | None = None
    service: str | None = None
    stamp: str | None = None  # the collector's time, to tell which way the records run
    partial: bool = False


def read_json_line(text: str) -> list[Record] | None:
    """The records of a line that is JSON, in order; None when it is no log record.

    A record cut at its end is read as far as it goes.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _read_broken(text)
    records = list(_walk(value, 0))
    for record in records:
        record.text = _sound(record.text)
    return records or None


def _walk(value: Any, depth: int) -> Iterator[Record]:
    """Records in a JSON value, from the containers that log tools use."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        for item in value[:_MAX_RECORDS]:
            if isinstance(item, (dict, list)):
                yield from _walk(item, depth + 1)
        return
    if not isinstance(value, dict):
        return
    record = _record(value)
    if record is not None:
        yield record
        return
    pairs = value.get("values")
    if isinstance(pairs, list) and isinstance(value.get("stream", value.get("metric")), dict):
        yield from _loki(pairs, value.get("stream"))
        return
    for key in _INNER_KEYS:
        inner = value.get(key)
        if isinstance(inner, (dict, list)):
            for found in _walk(inner, depth + 1):
                found.level = found.level or _level(value)
                found.stamp = found.stamp or _stamp(value)
                yield found


def _loki(pairs: list[Any], labels: Any) -> Iterator[Record]:
    """Loki's `[["nanoseconds", "line"], ...]`."""
    service = _service(labels) if isinstance(labels, dict) else None
    for pair in pairs[:_MAX_RECORDS]:
        if isinstance(pair, list) and len(pair) >= 2 and isinstance(pair[1], str):
            yield Record(pair[1].rstrip("\n"), service=service, stamp=str(pair[0]))


def _record(value: dict[str, Any]) -> Record | None:
    """The record an object is, or None."""
    key = next((key for key in _MESSAGE_KEYS if isinstance(value.get(key), str)), None)
    if key is None:
        return None
    # An only child, as in jsonPayload: {"message": ...}, was reached through its parent.
    sure = key in ("textPayload", "@message", "MESSAGE") or (len(value) == 1 and key != "event")
    if not sure and not _RECORD_KEYS.intersection(value):
        return None
    text = value[key]
    record = Record(text.rstrip("\n"), level=_level(value), stamp=_stamp(value))
    record.partial = key == "log" and "stream" in value and not text.endswith("\n")
    record.service = _service(value)
    _add_logger_keys(record, value)
    for trace_key in _TRACE_KEYS:
        trace = value.get(trace_key)
        if isinstance(trace, str) and trace and trace not in record.text:
            record.text += "\n" + trace.rstrip("\n")
    return record


def _add_logger_keys(record: Record, value: dict[str, Any]) -> None:
    """Python's logging keys, as vLLM's own JSON logging prints them."""
    time, file, line = value.get("asctime"), value.get("filename"), value.get("lineno")
    if isinstance(time, str):
        record.time = time
    if isinstance(file, str):
        record.source = f"{file}:{line}" if isinstance(line, int) else file
    pid = value.get("process", value.get("pid"))
    if isinstance(pid, int):
        record.pid = pid


def _level(value: dict[str, Any]) -> str | None:
    for key in ("levelname", "level", "severity", "lvl"):
        level = value.get(key)
        if isinstance(level, str):
            return LEVELS.get(level.upper())
    return None


def _stamp(value: dict[str, Any]) -> str | None:
    for key in ("timestamp", "@timestamp", "time", "ts", "asctime"):
        stamp = value.get(key)
        if isinstance(stamp, (str, int, float)):
            return str(stamp)
    return None


def _service(value: dict[str, Any]) -> str | None:
    for labels in (value, value.get("kubernetes"), value.get("labels")):
        if isinstance(labels, dict):
            for key in _SERVICE_KEYS:
                name = labels.get(key)
                if isinstance(name, str) and name:
                    return name
    return None


def _read_broken(text: str) -> list[Record] | None:
    """The message of a JSON record that was cut."""
    match = _BROKEN_MESSAGE.search(text)
    if match is None or text.rstrip().endswith("}"):
        return None
    return [Record(decode(match.group("value")).rstrip("\n"))]


def decode(text: str) -> str:
    """The text of a JSON string body; what is no valid escape stays as it is."""
    try:
        value = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return _sound(_ESCAPED.sub(_unescape, text))
    return _sound(str(value))


def _sound(text: str) -> str:
    """The text without lone surrogates, which could not be printed."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _unescape(match: re.Match[str]) -> str:
    sign = match.group(1)
    if sign[0] == "u" and len(sign) == 5:
        return chr(int(sign[1:], 16))
    return _PLAIN_ESCAPES.get(sign, sign)


def is_pretty_export(lines: Sequence[str]) -> bool:
    """Whether the log is an export of records printed over many lines each."""
    head = [line for line in lines[:2000] if line.strip()]
    if len(head) < 6 or head[0].lstrip()[:1] not in "[{":
        return False
    shaped = sum(1 for line in head if _PRETTY_LINE.match(line))
    messages = sum(1 for line in head if _PRETTY_MESSAGE.match(line))
    times = sum(1 for line in head if _PRETTY_TIME.match(line))
    return shaped * 10 >= len(head) * 9 and messages > 0 and times * 2 >= messages


def read_pretty(lines: Sequence[str]) -> list[tuple[int, Record]]:
    """The messages of a pretty-printed export, each with the index of its line.

    Values beside the message (level, time) are not taken over: they may stand before or after it.
    The next time is kept as `stamp`.
    """
    records: list[tuple[int, Record]] = []
    for index, line in enumerate(lines):
        match = _PRETTY_MESSAGE.match(line)
        if match is not None:
            records.append((index, Record(decode(match.group("value")).rstrip("\n"))))
            continue
        if records and records[-1][1].stamp is None:
            match = _PRETTY_TIME.match(line)
            if match is not None:
                records[-1][1].stamp = match.group("value")
        if not _PRETTY_LINE.match(line) and line.strip():
            records.append((index, Record(line)))
    return records
