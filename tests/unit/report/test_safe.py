from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.report.safe import MAX_TEXT, clean, clean_block, to_ascii


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        pytest.param("\x1b[31mred\x1b[0m", "red", id="colour"),
        pytest.param("a\x1b[2J\x1b[1;1Hb", "ab", id="clear-and-move"),
        pytest.param("a\x9b2Jb", "ab", id="8-bit-csi"),
        pytest.param("\x1b]0;title\x07x", "x", id="window-title"),
        pytest.param("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link", id="hyperlink"),
        pytest.param("\x1bPq#0\x1b\\x", "x", id="device-control"),
        pytest.param("a\x1b", "a", id="escape-at-the-end"),
        pytest.param(
            "a\x1b]52;c;unfinished", "a52;c;unfinished", id="unfinished-osc-hides-nothing"
        ),
        pytest.param("a\x07\x00\x08b", "ab", id="c0"),
        pytest.param("a\x85b", "a b", id="next-line"),
        pytest.param("x\u202egpj.exe\u2066\u200e", "xgpj.exe", id="bidi"),
        pytest.param("a\u200bb\u200dc\ufeff\u00ad", "abc", id="zero-width"),
        pytest.param("a\U000e0041b", "ab", id="tag-characters"),
        pytest.param("a\u2028b\u2029c\td\r\ne", "a b c d  e", id="breaks"),
        pytest.param("vllm\u00a0serve", "vllm serve", id="no-break-space"),
        pytest.param("\ud800", "\ufffd", id="lone-surrogate"),
        pytest.param("a" + "\u0301" * 50, "a" + "\u0301" * 3, id="pile-of-marks"),
        pytest.param("漢字 \u00e9", "漢字 \u00e9", id="letters-stay"),
        pytest.param('  File "x.py"  ', '  File "x.py"', id="indentation-stays"),
    ],
)
def test_clean(raw, shown):
    assert clean(raw) == shown


def test_clean_bounds_the_length():
    assert len(clean("x" * 10_240)) == MAX_TEXT
    assert clean("abcdef", 4) == "abc\u2026"


def test_work_is_bounded():
    start = time.perf_counter()
    for text in ("\x1b]" * 5_000_000, "\x1b[" + "1" * 10_000_000, "\u0301" * 5_000_000):
        clean(text)
    assert time.perf_counter() - start < 1


def test_clean_block_keeps_lines_and_turns_tabs():
    assert clean_block("services:\r\n\tvllm:\x1b[0m \n\n  x") == "services:\n    vllm:\n\n  x"


@given(st.text())
def test_nothing_that_acts_survives(text):
    for char in clean(text):
        assert unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


@given(st.text())
def test_clean_is_stable(text):
    assert clean(clean(text)) == clean(text)


def test_to_ascii():
    assert to_ascii("estimated, \u00b125 % \u2026 caf\u00e9") == "estimated, +-25 % ... caf\\xe9"
