"""Patterns of the data files: what RE2 and its stand-in find, what is refused, which text a match must hold."""

from __future__ import annotations

import time

import pytest

from diag import patterns
from diag.patterns import (
    MAX_TEXT,
    compile_pattern,
    compile_set,
    found,
    plain_groups,
    required_literal,
    why_refused,
)


@pytest.fixture(params=["re2", "regex"])
def engine(request, monkeypatch):
    """Both engines: RE2, and what stands in for it where it has no wheel."""
    if request.param == "re2":
        pytest.importorskip("re2")
    else:
        monkeypatch.setattr(patterns, "_re2", lambda: None)
    compile_pattern.cache_clear()
    yield request.param
    compile_pattern.cache_clear()


def test_search_gives_groups_and_the_place(engine):
    match = compile_pattern(r"(?P<a>\d+) tokens(?P<b> left)?").search("GPU holds 12 tokens")
    assert match.groupdict() == {"a": "12", "b": None}
    assert match.start() == 10


def test_the_place_counts_characters_not_bytes(engine):
    assert compile_pattern("KV").search("█▄▀ KV").start() == 4


def test_finditer_gives_all_matches_in_order(engine):
    matches = compile_pattern(r"(?P<n>\d+)").finditer("1, 22 and 333")
    assert [match.groupdict()["n"] for match in matches] == ["1", "22", "333"]


def test_no_match_is_none(engine):
    assert compile_pattern("absent").search("something else") is None


def test_re2_never_matches_across_a_newline():
    pytest.importorskip("re2")
    assert compile_pattern(r"one\s+two").search("one\ntwo") is None
    assert compile_pattern(r"one[^x]two").search("one\ntwo") is None


def test_found_looks_at_a_bounded_part_of_the_text(engine):
    assert found("needle", "x" * (MAX_TEXT - 6) + "needle")
    assert not found("needle", "x" * (MAX_TEXT - 5) + "needle")


def test_the_stand_in_gives_up_on_a_pattern_that_backtracks(monkeypatch):
    monkeypatch.setattr(patterns, "TIMEOUT_S", 0.05)
    slow = patterns._WithTimeout(r"(?:\w+\d+)+x")
    started = time.perf_counter()
    assert slow.search("a1" * 2000) is None
    assert list(slow.finditer("a1" * 2000)) == []
    assert time.perf_counter() - started < 1


def test_a_set_names_the_patterns_that_match(engine):
    which = compile_set([r"KV (?P<what>cache|pool)", "weights", r"\d+ GiB"])
    hits = which("the KV cache takes 4 GiB")
    assert hits == (
        [0, 2] if engine == "re2" else [0, 1, 2]
    )  # the stand-in leaves the work to each


def test_a_set_of_nothing_finds_nothing(engine):
    assert compile_set([])("text") == []


def test_plain_groups_only_unnames():
    assert plain_groups(r"(?P<a>x)(?:y)(?P<b_2>z)") == "(?:x)(?:y)(?:z)"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"KV cache size: (?P<n>\d+)", None),
        ("(open", "does not compile"),
        ("(?=ahead)x", "RE2 refuses"),
        ("(?<!behind)x", "RE2 refuses"),
        (r"(?P<q>['\"]).*(?P=q)", "RE2 refuses"),
    ],
)
def test_what_is_wrong_with_a_pattern(pattern, says):
    pytest.importorskip("re2")
    problem = why_refused(pattern)
    assert problem is None if says is None else says in problem


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("Available KV cache memory", "Available KV cache memory"),
        (r"took (?P<gib>[\d.]+) GiB memory and", " GiB memory and"),
        (r"a\.b\(c\) \[x\]", "a.b(c) [x]"),
        (r"left|right side", ""),  # a match needs only one of them
        (r"(?:left|right) side", " side"),
        (r"colou?rs of", "rs of"),
        (r"number\d+tail", "number"),
        (r"repeat+ed", "repeat"),
        (r"word{2,3}ly", "wor"),
        (r"(?i)Any Case", ""),
        ("abc", ""),  # too short to be of use
        (r"(?:optional text)?rest of it", "rest of it"),
        (r"[^\]a-z]{4}bracket", "bracket"),
        (r"[]abc]closing", "closing"),
        (r"tab\there", "tab\there"),
        (r"^starts .* end$", "starts "),
        (r"x* many spaces", " many spaces"),
    ],
)
def test_the_text_that_every_match_holds(pattern, literal):
    want = literal if len(literal) >= 4 else ""
    assert required_literal(pattern) == want


@pytest.mark.xfail(reason="hex escapes, classes in classes and (?si) are read as plain text")
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\x41BCDE", "ABCDE"),
        ("(?si)some words", "SOME WORDS"),
        ("[[:alpha:]xyz1]abc", "qabc"),
        (r"\pLdefgh", "xdefgh"),
    ],
)
def test_the_literal_is_in_every_match_of_rarer_syntax(pattern, text):
    pytest.importorskip("re2")
    assert compile_pattern(pattern).search(text) is not None
    assert required_literal(pattern) in text
