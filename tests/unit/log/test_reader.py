"""Whole logs: exports, order, formats, hostile input, speed, and the values of real logs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diag.log.model import Log, RawLine
from diag.log.reader import read_lines

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared"
LOGS = SHARED / "cases" / "logs"


def read(text: str, **options) -> Log:
    raw = [RawLine(number, line) for number, line in enumerate(text.split("\n"), 1)]
    return read_lines(raw, name="t", total_lines=len(raw), total_bytes=len(text), **options)


def test_pretty_printed_export():
    records = [
        {"insertId": "1", "labels": {"a": "b"}, "textPayload": f'INFO 05-04 14:43:23 a.py:1] line {n}\n  "quoted"',
         "timestamp": f"2026-06-06T03:39:{n:02}Z", "severity": "INFO"}
        for n in range(12)
    ]  # fmt: skip
    log = read(json.dumps(records, indent=2))

    assert [line.text for line in log.lines][:2] == ["line 0", '  "quoted"']
    assert len(log.lines) == 24
    assert log.lines[0].number == log.lines[1].number == 7
    assert "json_export" in log.formats


def test_export_that_lists_the_newest_first_is_turned_round():
    lines = [
        json.dumps({"timestamp": f"2026-06-06T03:39:{n:02}Z", "message": f"first {n}\nsecond {n}"})
        for n in range(30, 10, -1)
    ]
    log = read("\n".join(lines))

    assert [line.text for line in log.lines[:3]] == ["first 11", "second 11", "first 12"]
    assert log.notes


def test_cut_records_of_a_container_runtime_are_joined():
    text = "\n".join(
        [
            json.dumps({"log": "Available KV cache me", "stream": "stderr", "time": "t"}),
            json.dumps({"log": "mory: 11.03 GiB\n", "stream": "stderr", "time": "t"}),
            "2025-11-19T20:16:36.09Z stderr P GPU KV ca",
            "2025-11-19T20:16:36.10Z stderr F che size: 412,944 tokens",
        ]
    )

    assert [(line.text, line.number, line.last_number) for line in read(text).lines] == [
        ("Available KV cache memory: 11.03 GiB", 1, 2),
        ("GPU KV cache size: 412,944 tokens", 3, 4),
    ]


def test_json_record_cut_at_its_end_is_read():
    assert (
        read('{"timestamp": "x", "message": "Killed by \\"me\\" at').lines[0].text
        == 'Killed by "me" at'
    )


def test_formats_notes_and_truncation_are_kept():
    raw = [RawLine(1, "\x1b[31mred\x1b[0m"), RawLine(2, "x" * 50, cut=True)]
    log = read_lines(
        raw, name="t", total_lines=9, total_bytes=99, formats=("gzip",), notes=("half of it",)
    )

    assert log.formats == ("gzip", "ansi")
    assert log.notes == ("half of it",)
    assert log.truncated
    assert (log.total_lines, log.total_bytes) == (9, 99)


def test_numbers_follow_physical_lines():
    log = read("a\r\nb\rc\r\n\nd\r")

    assert [(line.number, line.text) for line in log.lines] == [
        (1, "a"), (2, "b"), (2, "c"), (3, ""), (4, "d"),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=200),
            st.text(alphabet='(){}[]|":,\\\x1b\r> mpid=INFO12-[]/File "', max_size=200),
        ),
        max_size=12,
    )
)
def test_reader_never_raises(lines):
    raw = [RawLine(number, line.replace("\n", "")) for number, line in enumerate(lines, 1)]
    log = read_lines(raw, name="t", total_lines=len(raw), total_bytes=0)

    assert all("\n" not in line.text for line in log.lines)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 50_000,
        "(A pid=1) " * 20_000,
        " " * 100_000 + "x",
        "│" + " " * 100_000 + "x",
        "**" * 50_000 + "x",
        "<br>" * 30_000 + "x",
        "> " * 50_000,
        '{"a":' * 30_000,
        'File "' * 20_000,
        'File "a", line 1, in f ' * 10_000,
        "INFO 05-04 14:43:23 a.py:1] " * 5_000,
        "1/2 [00:01<00:01, 1it/s]" * 10_000,
        "\r" * 100_000,
        "\x1b[" * 50_000,
        "a=" * 50_000,
        "▀ " * 50_000 + "version",
        "A" * 100_000,
        "a." * 50_000,
        "[0m" * 30_000,
        "| " * 50_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_line_takes_little_time(text):
    started = time.process_time()
    read("\n".join([text] * 3))

    assert time.process_time() - started < 1.5


def test_speed():
    text = "\n".join(
        f"(EngineCore_DP0 pid=1462) INFO 03-10 07:38:{n % 60:02} [core.py:97] Engine 000: Avg prompt"
        f" throughput: {n}.0 tokens/s, Avg generation throughput: 90.1 tokens/s, Running: 1 reqs"
        for n in range(6_000)
    )
    started = time.process_time()
    read(text)

    assert time.process_time() - started < 1.0


def _printed(value) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _printed(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _printed(inner)]
    return [repr(value)] if isinstance(value, float) else []


@pytest.mark.skipif(not LOGS.is_dir(), reason="the collected logs are not here")
def test_values_of_real_logs_are_found_in_single_lines():
    # Values printed in MiB are listed in GiB there, so only what the raw text holds is asked for.
    missing = []
    for entry in map(json.loads, (LOGS / "index.jsonl").read_text(encoding="utf-8").splitlines()):
        path = LOGS / entry["file"]
        if not path.exists():
            continue
        text = path.read_bytes().decode("utf-8", "replace").replace("\0", "")
        texts = "\n".join(line.text for line in read(text).lines)
        missing += [
            (entry["file"], value)
            for value in _printed(entry.get("facts", {}))
            if value in text and value not in texts
        ]
    assert not missing
