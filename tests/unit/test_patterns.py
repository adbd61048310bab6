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
    required_literals,
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
    ("pattern", "literals"),
    [
        ("Available KV cache memory", ("Available KV cache memory",)),
        (r"took (?P<gib>[\d.]+) GiB memory and", (" GiB memory and",)),
        (r"a\.b\(c\) \[x\]", ("a.b(c) [x]",)),
        ("killed|evicted", ("killed", "evicted")),
        ("killed|[a-z]+", ()),  # a match of the second branch need not hold the first's text
        ("(?:left|right) side", (" side",)),
        ("(?:x|y) side", (" side",)),
        ("colou?rs of", ("rs of",)),
        (r"number\d+tail", ("number",)),
        ("repeat+ed", ("repeat",)),
        ("word{2,3}ly", ("word",)),
        ("word{0,3}lily", ("lily",)),
        ("(?i)Any Case", ()),
        ("(?si)Any Case", ()),
        ("(?s)one case", ("one case",)),
        ("abc", ()),  # too short to be of use
        ("(?:optional text)?rest of it", ("rest of it",)),
        ("(?:repeated text)*rest of it", ("rest of it",)),
        ("(?:needed text)+rest", ("needed text",)),
        ("(?:nested (?:either|or) text|whole) end", ("either",)),
        (r"[^\]a-z]{4}bracket", ("bracket",)),
        ("[]abc]closing", ("closing",)),
        ("[[:alpha:]xyz1]abcd", ("abcd",)),
        (r"tab\there", ("tab\there",)),
        ("^starts .* end$", ("starts ",)),
        ("x* many spaces", (" many spaces",)),
        (r"\x41BCDE", ("BCDE",)),
        (r"\x{41}BCDE", ("BCDE",)),
        (r"\pLdefg", ("defg",)),
        (r"\p{Greek}defg", ("defg",)),
        (r"\bword\b", ("word",)),
    ],
)
def test_the_texts_of_which_a_match_must_hold_one(pattern, literals):
    if pattern.startswith("(?:nested"):  # any answer that is sure will do
        assert required_literals(pattern) in (
            (),
            ("nested ", "whole"),
            (" text", "whole"),
            ("either", "whole"),
        )
    else:
        assert required_literals(pattern) == literals


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\x41BCDE", "ABCDE"),
        (r"(?:a|(?:bcde|f))ghij|klmn", "fghij"),
        (r"word{2,3}ly", "worddly"),
        (r"(?:ab){2}cdef|x{4}", "xxxx"),
        (r"\Qa.b|c\Efgh", "a.b|cfgh"),
        (r"[[:alpha:]]bcde", "abcde"),
        (r"a\|bcd|efgh", "efgh"),
        (r"(?P<a>x)?(?P<b>yyyy|zzzz)", "zzzz"),
        (r"(?-s:some) text", "some text"),
        (r"a{2,}bcde", "aabcde"),
        (r"odd{brace here", "odd{brace here"),
        (r"octal \060 here", "octal 0 here"),
    ],
)
def test_a_match_holds_one_of_them(pattern, text):
    pytest.importorskip("re2")
    assert compile_pattern(pattern).search(text) is not None
    literals = required_literals(pattern)
    assert not literals or any(literal in text for literal in literals)
