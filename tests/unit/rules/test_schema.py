"""Rule files: unknown keys, contradictions and missing parts are errors, all of them at once."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from log_samples import made_condition

from diag.errors import RuleFileError
from diag.rules.load import load_rules, parse_rule, read_rules, rule_files
from diag.rules.schema import Rule
from diag.schema import build
from diag.terms import Family


def body(**changes) -> dict:
    return {
        "schema": 1,
        "id": "kv.test_rule",
        "title": "A rule of a test",
        "family": "kv_reservation",
        "priority": 50,
        "when": {"all": [{"problem": ["kv.no_blocks"]}]},
        "summary": ["It failed."],
        "examples": [],
        **changes,
    }


def test_a_rule_and_its_defaults():
    rule = parse_rule(body(), "x.yaml")
    assert (rule.name, rule.family, rule.subject, rule.confidence) == (
        "kv.test_rule",
        Family.KV_RESERVATION,
        "problem",
        0.9,
    )
    assert parse_rule(body(subtype="kv.no_blocks"), "x.yaml").name == "kv.no_blocks"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"colour": "red"}, "colour"),
        ({"id": "KV.Test"}, "id"),
        ({"id": "nodot"}, "id"),
        ({"family": "gremlins"}, "family"),
        ({"priority": 101}, "priority"),
        ({"confidence": 1.5}, "confidence"),
        ({"summary": []}, "summary"),
        ({"title": "short"}, "title"),
        ({"phase": "lunch"}, "phase"),
        ({"subject": "line"}, "subject"),
        ({"schema": 2}, "schema"),
        ({"when": {"some": []}}, "when.some"),
        ({"when": {"all": [{"problem": ["a"], "text": "b"}]}}, "exactly one"),
        ({"when": {"all": [{}]}}, "exactly one"),
        ({"when": {"all": [{"fact": "a.b"}]}}, "needs a comparison"),
        ({"when": {"all": [{"text": "x", "gt": 1}]}}, "goes with fact"),
        ({"when": {"all": [{"text": "x", "own": True}]}}, "goes with fact"),
        ({"when": {"all": [{"generic": False}]}}, "generic"),
        ({"when": {"any": [{"none": [{"fact": "a", "is": 3}]}]}}, "is"),
        ({"examples": [{"name": "n", "expect": "maybe", "log": "x"}]}, "expect"),
        ({"adjust": [{"confidence": 0.5}]}, "adjust.0.when"),
        ({"readings": [{"subtype": "a.b", "family": "weights"}]}, "readings.0.why"),
    ],
)
def test_what_is_wrong_is_named(changes, says):
    with pytest.raises(RuleFileError) as caught:
        parse_rule(body(**changes), "kv/test_rule.yaml")
    assert all(problem.startswith("kv/test_rule.yaml: ") for problem in caught.value.problems)
    assert says in str(caught.value)


def test_a_file_that_is_no_mapping():
    for wrong in (None, [], "text"):
        with pytest.raises(RuleFileError):
            parse_rule(wrong, "x.yaml")


def test_every_error_of_a_rule_is_named():
    with pytest.raises(RuleFileError) as caught:
        parse_rule(body(family="x", phase="y", status="z"), "x.yaml")
    assert len(caught.value.problems) == 3


def test_rules_do_not_change():
    rule = parse_rule(body(), "x.yaml")
    with pytest.raises(FrozenInstanceError):
        rule.priority = 3


def test_a_shipped_file_is_built_as_it_would_be_validated():
    for made in (
        body(),
        body(when={"any": [{"fact": "a.b", "in": [1, 2]}, {"none": [{"phase": ["serving"]}]}]}),
    ):
        assert build(Rule, {**made, "examples": ()}) == parse_rule(made, "x.yaml")


def test_in_is_written_without_an_underscore():
    assert made_condition(fact="a.b", **{"in": [1, 2]}).in_ == (1, 2)


def test_a_folder_is_read_in_order_and_errors_of_all_files_come_together(tmp_path):
    folder = tmp_path / "rules" / "failures" / "kv"
    folder.mkdir(parents=True)
    for name in ("b", "a"):
        (folder / f"{name}.yaml").write_text(
            f"{{schema: 1, id: kv.{name}, title: The rule of {name}}}"
        )
    (folder / "c.yaml").write_text("open: [\n")
    assert [path.name for path in rule_files(tmp_path / "rules")] == ["a.yaml", "b.yaml", "c.yaml"]
    with pytest.raises(RuleFileError) as caught:
        read_rules(tmp_path / "rules")
    text = str(caught.value)
    assert "rules/failures/kv/a.yaml: family" in text
    assert "rules/failures/kv/b.yaml: family" in text
    assert "c.yaml:2: not YAML" in text


def test_the_shipped_rules_are_loaded_without_their_examples():
    rules = load_rules()
    assert len({rule.id for rule in rules}) == len(rules) > 40
    assert not any(rule.examples for rule in rules)
