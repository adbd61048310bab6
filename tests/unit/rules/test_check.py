"""`oomdoc rules check`: every mistake a maintainer can make in rows, sites and rules, in words."""

from __future__ import annotations

import pytest
import yaml
from log_samples import small_catalogue

from diag.rules.check import check_all, check_catalogue, check_names, check_rules
from diag.rules.schema import Rule
from diag.schema import validated

FACTS = {"kv.pool_tokens": "tokens"}
ROW = {
    "id": "kv.size", "pattern": r"KV cache size: (?P<kv_tokens>[\d,]+) tokens",
    "facts": {"kv.pool_tokens": "kv_tokens"}, "example": "GPU KV cache size: 62,608 tokens",
    "values": {"kv_tokens": 62608},
}  # fmt: skip
RULE = {
    "schema": 1, "id": "kv.small", "title": "The pool is small", "family": "kv_reservation", "priority": 50,
    "when": {"all": [{"problem": ["kv.size"]}]}, "summary": ["It holds {kv.pool_tokens} tokens."],
    "examples": [{"name": "a", "expect": "matched", "log": "x"}, {"name": "b", "expect": "not_matched", "log": "y"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"pattern": "(?=x)KV"}, "RE2 refuses"),
        ({"pattern": "(KV"}, "does not compile"),
        ({"facts": {"kv.pool_token": "kv_tokens"}}, 'unknown fact \'kv.pool_token\'; did you mean "kv.pool_tokens"?'),
        ({"facts": {"kv.pool_tokens": "tokens"}}, "takes group 'tokens', which the pattern lacks"),
        ({"facts": {"kv.pool_tokens": "=7"}}, None),
        pytest.param({"releases": "newer than 0.8"}, "0.8"),
        pytest.param({"releases": ">>0.8"}, "0.8"),
        ({"releases": ">=0.8.3"}, None),
        ({"example": "something else"}, "does not find its own example"),
        ({"example": "INFO 01-01 00:00:00 [kv_cache_utils.py:1] GPU KV cache size: 62,608 tokens"}, None),
        ({"values": {"kv_tokens": 62609}}, "kv_tokens = 62608, expected 62609"),
        ({"values": {"other": 1}}, "other = None, expected 1"),
        ({"values": [{"kv_tokens": 62608}, {"kv_tokens": 1}]}, "1 examples but 2 sets of values"),
    ],
)  # fmt: skip
def test_a_row(change, says):
    problems = list(check_catalogue(small_catalogue({**ROW, **change}, facts=FACTS)))
    if says is None:
        assert problems == []
    else:
        assert any(says in problem for problem in problems), problems
        assert problems[0].startswith("messages/test.yaml: kv.size: ")


def test_an_id_is_used_once():
    assert list(check_catalogue(small_catalogue(ROW, ROW, facts=FACTS))) == [
        "messages: row 'kv.size' is defined 2 times"
    ]


@pytest.fixture
def folder(tmp_path):
    """A small rules folder without a mistake."""
    root = tmp_path / "rules"
    (root / "messages").mkdir(parents=True)
    (root / "failures" / "kv").mkdir(parents=True)
    row = {"role": "cause", "means": "x", **ROW}
    write(root / "messages" / "vllm.yaml", {"origin": "vllm", "messages": [row]})
    write(root / "facts.yaml", {"facts": {"kv.pool_tokens": {"unit": "tokens", "means": "x"}}})
    write(root / "sites.yaml", {"sites": {"profile_run": {"frames": ["profile_run$"]}}})
    write(root / "phases.yaml", {"after": {"kv_alloc": ["kv.size"]}})
    write(root / "groups.yaml", {"groups": {"pool": ["kv.size"]}})
    write(root / "failures" / "kv" / "small.yaml", RULE)
    return root


def write(path, body):
    path.write_text(yaml.safe_dump(body))


def test_nothing_is_wrong_with_it(folder):
    assert check_all(folder) == []


@pytest.mark.parametrize(
    ("file", "body", "says"),
    [
        ("sites.yaml", {"sites": {"a": {"frames": ["(open"]}}}, "sites.yaml: a: pattern does not compile"),
        ("sites.yaml", {"sites": {"a": {"inner": ["(?!x)y"]}}}, "sites.yaml: a: RE2 refuses"),
        ("phases.yaml", {"after": {"profile": ["kv.sise"]}},
         "phases.yaml: profile: unknown row 'kv.sise'; did you mean \"kv.size\"?"),
        ("groups.yaml", {"groups": {"g": ["nothing"]}}, "groups.yaml: g: unknown row 'nothing'"),
    ],
)  # fmt: skip
def test_sites_phases_and_groups(folder, file, body, says):
    write(folder / file, body)
    assert any(says in problem for problem in check_all(folder))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "kv.other"}, "does not match the path"),
        ({"examples": RULE["examples"][:1]}, "no example that is not_matched"),
        ({"examples": RULE["examples"][1:]}, "no example that is matched"),
        ({"summary": ["{kv.pool_tokes} fit"]}, 'unknown fact {kv.pool_tokes}; did you mean "kv.pool_tokens"?'),
        ({"summary": ["{problem.text}"]}, None),
        ({"confirm": ["kv.sizes"]}, "confirm: unknown row 'kv.sizes'"),
        ({"when": {"any": [{"problem": ["kv.siz"]}]}}, "unknown row 'kv.siz'"),
        ({"when": {"any": [{"seen": ["@nothing"]}]}}, "unknown row '@nothing'"),
        ({"when": {"none": [{"site": ["profile_rum"]}]}}, "unknown site 'profile_rum'"),
        ({"when": {"all": [{"any": [{"none": [{"fact": "a.b", "gt": 1}]}]}]}}, "unknown fact 'a.b'"),
        ({"when": {"all": [{"text": "(?<=a)b"}]}}, "RE2 refuses"),
        ({"when": {"all": [{"log": "(a"}]}}, "does not compile"),
        ({"adjust": [{"when": {"site": ["x"]}, "confidence": 0.1}]}, "unknown site 'x'"),
        ({"readings": [{"subtype": "a.b", "family": "weights", "why": "x", "when": {"after": ["y"]}}]},
         "unknown row 'y'"),
    ],
)  # fmt: skip
def test_a_rule(folder, change, says):
    write(folder / "failures" / "kv" / "small.yaml", {**RULE, **change})
    problems = check_all(folder)
    assert any(says in problem for problem in problems) if says else problems == []


def test_a_title_is_used_once(folder):
    write(folder / "failures" / "kv" / "twin.yaml", {**RULE, "id": "kv.twin"})
    assert "title 'The pool is small' is used by 2 rules" in check_all(folder)


def test_files_that_cannot_be_read_are_reported_first(folder):
    (folder / "failures" / "kv" / "bad.yaml").write_text("open: [\n")
    (folder / "failures" / "kv" / "small.yaml").write_text("{schema: 1}")
    problems = check_all(folder)
    assert any(problem.startswith("bad.yaml:2: not YAML") for problem in problems)
    assert any("failures/kv/small.yaml: family" in problem for problem in problems)


def test_groups_of_the_checked_folder_count(folder):
    write(
        folder / "failures" / "kv" / "small.yaml",
        {**RULE, "when": {"all": [{"problem": ["@pool"]}]}},
    )
    assert check_all(folder) == []
    write(
        folder / "failures" / "kv" / "small.yaml",
        {**RULE, "when": {"all": [{"problem": ["@oom"]}]}},
    )
    assert any("unknown row '@oom'" in problem for problem in check_all(folder))


@pytest.mark.parametrize("comparison", [{"gt": "many"}, {"eq": "1 GiB"}, {"in": ["x"]}])
def test_a_comparison_that_does_not_fit_the_unit_is_reported(folder, comparison):
    when = {"all": [{"fact": "kv.pool_tokens", **comparison}]}
    write(folder / "failures" / "kv" / "small.yaml", {**RULE, "when": when})
    assert check_all(folder) != []


def test_the_parts_can_be_called_alone(folder):
    known = small_catalogue(ROW, facts=FACTS)
    assert list(check_names(folder, known)) == []
    assert list(check_rules([validated(Rule, RULE, "x")], known, folder)) == []
