"""No pattern of the data files may be made slow by a log: each one, in both engines, on text written to hurt it.

RE2 can't backtrack; `regex`, which stands in for it where it has no wheel, can, and is held by its timeout.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from diag.facts.catalogue import message_files
from diag.log.reader import read_lines
from diag.log.source import read_text
from diag.patterns import MAX_TEXT, TIMEOUT_S, _WithTimeout, compile_pattern, required_literals
from diag.pipeline import diagnose
from diag.resources import data_dir, read_yaml
from diag.rules.load import read_rules

EACH_S = 0.5
TOTAL_S = 25.0
FRAME = 601  # characters of a frame that patterns of sites see


def _rows() -> Iterator[tuple[str, str, str]]:
    for file, body in message_files(data_dir("rules")):
        for row in body["messages"]:
            examples = row.get("example") or ""
            example = examples if isinstance(examples, str) else examples[0]
            yield f"{file}: {row['id']}", row["pattern"], example.replace("\n", " ")


def _conditions() -> Iterator[tuple[str, str, str]]:
    for rule in read_rules(data_dir("rules")):
        example = rule.examples[0].log.replace("\n", " ") if rule.examples else ""
        for condition in rule.conditions():
            for pattern in (condition.text, condition.log, condition.process, condition.matches):
                if pattern is not None:
                    yield rule.id, pattern, example


def _sites() -> Iterator[tuple[str, str, str]]:
    for name, body in read_yaml(data_dir("rules") / "sites.yaml")["sites"].items():
        for pattern in (*body.get("frames", ()), *body.get("inner", ())):
            yield f"sites.yaml: {name}", pattern, "vllm/model_executor/models/qwen2_vl.py:forward"


def fill(part: str, size: int = MAX_TEXT) -> str:
    """The part again and again, up to the size."""
    return (part * (size // len(part) + 1))[:size] if part else ""


def hostile(pattern: str, example: str, size: int = MAX_TEXT) -> dict[str, str]:
    """Texts that make a backtracking engine try much and find nothing."""
    literals = required_literals(pattern)
    words = example.split()
    texts = {
        "letters": fill("a", size),
        "spaces": fill(" ", size),
        "digits": fill("0", size),
        "brackets": fill("(", size),
        "numbers": fill("1.2,", size),
        "literal": fill(literals[0], size) if literals else "",
        "literal and digits": fill(f"{literals[0]}1", size) if literals else "",
        "example": fill(example, size),
        "example without spaces": fill("".join(words), size),
        "near miss": fill(example[: len(example) * 2 // 3], size),
        "near miss, then spaces": example[: len(example) * 2 // 3] + fill(" ", size),
        "near miss, then letters": example[: len(example) // 2] + fill("a", size),
        "words apart": fill("    ".join(words), size),
    }
    return {name: text[:size] for name, text in texts.items() if text}


CASES = {"rows": _rows, "conditions": _conditions, "sites": _sites}


@pytest.mark.parametrize(
    ("source", "engine"),
    [
        ("rows", "re2"),
        ("rows", "regex"),
        ("conditions", "re2"),
        ("conditions", "regex"),
        ("sites", "re2"),  # `regex` on sites: the next test
    ],
)
def test_no_pattern_is_slow_on_hostile_text(source, engine):
    if engine == "re2":
        pytest.importorskip("re2")
    slow: list[str] = []
    total = 0.0
    tried = 0
    spent: dict[str, float] = defaultdict(float)
    for name, pattern, example in CASES[source]():
        compiled = compile_pattern(pattern) if engine == "re2" else _WithTimeout(pattern)
        for kind, text in hostile(pattern, example).items():
            started = time.thread_time()  # this thread's own work, whatever else the machine does
            compiled.search(text)
            seconds = time.thread_time() - started
            total += seconds
            spent[name] += seconds
            tried += 1
            if seconds > EACH_S:
                slow.append(f"{name}: {seconds:.2f} s on {kind}: {pattern[:80]}")
    worst = sorted(spent.items(), key=lambda item: -item[1])[:5]
    assert slow == []
    assert tried > 500
    assert total < TOTAL_S, f"{total:.1f} s in all; most: {worst}"


def test_patterns_of_sites_are_quick_on_what_a_frame_can_hold():
    """A frame's file name is read up to 400 characters, its function up to 200."""
    for name, pattern, example in _sites():
        for text in hostile(pattern, example, FRAME).values():
            started = time.thread_time()
            _WithTimeout(pattern).search(text)
            assert time.thread_time() - started < 0.05, name


def test_a_search_that_takes_too_long_is_given_up():
    started = time.monotonic()
    assert _WithTimeout(r"(?:\w+\d+)+x").search("a1" * 30_000) is None
    assert time.monotonic() - started < 4 * TIMEOUT_S


@pytest.mark.parametrize(
    "unit",
    ["a", " ", "0", "(", "1.2,", "A.", "Error: ", 'File "', "=' ", "a={", "Traceback (most recent call last)", "GiB ",
     "CUDA out of memory. ", "non-default args: {", "vllm serve --", "\u2588"],
)  # fmt: skip
def test_the_whole_way_is_quick_on_hostile_lines(unit):
    text = "\n".join(["x", *(fill(unit) for _ in range(4))]) + "\n"
    started = time.thread_time()
    diagnose(text)
    assert time.thread_time() - started < 8


def test_the_reader_hands_on_no_more_than_patterns_may_see():
    raw = read_text(fill("x", 3 * MAX_TEXT) + "\n")
    log = read_lines(raw.lines, name="x", total_lines=1, total_bytes=0)
    assert sum(len(line.text) for line in log.lines) <= 4 * MAX_TEXT
