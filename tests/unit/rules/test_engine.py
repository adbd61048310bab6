"""All rules against all problems: who is the root, what else it could be, what only repeats it."""

from __future__ import annotations

import pytest
from log_samples import (
    INIT_FAILED,
    MAX_LEN,
    NO_BLOCKS,
    OOM,
    SERVING,
    core,
    facts_of,
    made_rule,
    planned,
    start,
    traceback,
)

from diag.rules.engine import judge
from diag.terms import Phase


def rule(name: str, when: dict | None = None, **changes):
    return made_rule(name, **({"when": when} if when else {}), **changes)


def verdict(text: str, *rules):
    return judge(facts_of(text + "\n"), rules)


def names(found):
    return (found.root and found.root.rule.name, [match.rule.name for match in found.others])


def test_nothing_matches():
    found = verdict(core(NO_BLOCKS), rule("kv.never", {"all": [{"log": "absent"}]}))
    assert (found.root, found.others, found.echoes) == (None, (), ())


def test_the_rule_that_knows_most_is_the_root():
    low, high = rule("kv.low", priority=10), rule("kv.high", priority=60)
    for order in ((low, high), (high, low)):
        assert verdict(core(NO_BLOCKS), *order).root.rule.name == "kv.high"


def test_among_equals_the_earliest_line_wins():
    text = f"{core('KeyError: first')}\n{core('TypeError: second')}"
    a = rule("kv.second", {"all": [{"text": "second"}]})
    b = rule("kv.first", {"all": [{"text": "first"}]})
    assert verdict(text, a, b).root.rule.name == "kv.first"


def test_knowing_more_beats_being_earlier():
    text = f"{core('KeyError: first')}\n{core('TypeError: second')}"
    a = rule("kv.second", {"all": [{"text": "second"}]}, priority=60)
    b = rule("kv.first", {"all": [{"text": "first"}]})
    assert verdict(text, b, a).root.rule.name == "kv.second"


def test_other_subtypes_of_the_same_problem_are_readings_and_far_ones_are_not():
    found = verdict(
        f"{core('KeyError: first')}\n{core('TypeError: second')}",
        rule("kv.root", {"all": [{"text": "first"}]}, priority=90),
        rule("kv.same", {"all": [{"text": "first"}]}, priority=20),  # the same problem: always
        rule(
            "kv.near", {"all": [{"text": "second"}]}, priority=70
        ),  # another problem, knows as much
        rule("kv.far", {"all": [{"text": "second"}]}, priority=69),
        rule("kv.twin", {"all": [{"text": "first"}]}, priority=80, subtype="kv.root"),
    )
    assert names(found) == ("kv.root", ["kv.near", "kv.same"])


@pytest.mark.parametrize(
    ("conditions", "confidence"),
    [
        ([], 0.9),
        ([("absent", 0.1)], 0.9),
        ([("absent", 0.1), ("KV cache", 0.4), ("weights", 0.7)], 0.4),  # the first that holds
    ],
)
def test_confidence_is_adjusted_by_what_else_is_known(conditions, confidence):
    adjust = [{"when": {"log": pattern}, "confidence": value} for pattern, value in conditions]
    text = f"{core('KV cache, weights', 'INFO')}\n{core(NO_BLOCKS)}"
    assert verdict(text, rule("kv.a", adjust=adjust)).root.confidence == confidence


def test_an_adjustment_that_is_not_known_to_hold_does_not_hold():
    adjust = [{"when": {"fact": "kv.needed", "gt": 0}, "confidence": 0.1}]
    assert verdict(core(NO_BLOCKS), rule("kv.a", adjust=adjust)).root.confidence == 0.9


def test_readings_are_given_when_their_condition_holds():
    readings = [
        {"subtype": "a.always", "family": "weights", "why": "x"},
        {"subtype": "a.holds", "family": "weights", "why": "x", "when": {"text": "cache blocks"}},
        {"subtype": "a.fails", "family": "weights", "why": "x", "when": {"text": "absent"}},
        {
            "subtype": "a.open",
            "family": "weights",
            "why": "x",
            "when": {"fact": "kv.needed", "gt": 0},
        },
    ]
    root = verdict(core(NO_BLOCKS), rule("kv.a", readings=readings)).root
    assert [reading.subtype for reading in root.readings] == ["a.always", "a.holds"]


PROFILE = [core(part) for part in traceback(("v1/worker/gpu_worker.py", "profile_run"), error=OOM)]


@pytest.mark.parametrize(
    ("text", "changes", "phase"),
    [
        ("\n".join(PROFILE), {"phase": "serving"}, Phase.PROFILE),  # the problem knows better
        ("\n".join(PROFILE), {"phase": "serving", "fixed_phase": True}, Phase.SERVING),
        (core("KeyError: x"), {"phase": "serving"}, Phase.SERVING),
        (core("KeyError: x"), {}, None),
    ],
)
def test_the_phase(text, changes, phase):
    assert verdict(text, rule("kv.a", **changes)).root.phase is phase


def test_a_rule_about_the_whole_log_quotes_its_line():
    found = verdict(
        f"{core('one', 'INFO')}\n{core('two', 'INFO')}",
        rule("kv.a", {"all": [{"log": "two"}]}, subject="log"),
    )
    assert found.root.problem is None
    assert found.root.line.number == 2


def test_echoes_are_copies_reports_and_every_later_problem():
    text = "\n".join(
        [
            core("KeyError: before"),  # 1: stated before, no echo
            core(NO_BLOCKS),  # 2: the root
            core(NO_BLOCKS, pid=98),  # 3: its copy
            core("TypeError: while cleaning up", source="core.py:9"),  # 4: a later problem
            f"(APIServer pid=1) {INIT_FAILED}",  # 5: a report
        ]
    )
    found = verdict(text, rule("kv.a", {"all": [{"problem": ["kv.no_blocks"]}]}))
    assert found.root.line.number == 2
    assert [line.number for line in found.echoes] == [3, 4, 5]


# --- the shipped rules: what outranks what ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "root"),
    [
        # a report that something failed gives way to the error that says what
        ([f"(APIServer pid=1) {INIT_FAILED}", core(NO_BLOCKS)], "kv.no_blocks"),
        ([core(NO_BLOCKS), f"(APIServer pid=1) {INIT_FAILED}"], "kv.no_blocks"),
        # the clean-up's own error, later, is no cause
        ([core(MAX_LEN), core("AttributeError: 'NoneType' object has no attribute 'x'"), INIT_FAILED],
         "kv.max_len_exceeds"),
        # nor is one before it that no catalogue row explains
        ([core("AttributeError: module has no attribute 'y'"), core(MAX_LEN)], "kv.max_len_exceeds"),
        ([start(), planned(), SERVING,
          *(core(p) for p in traceback(("v1/engine/core.py", "run_busy_loop"), error=OOM)),
          "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."],
         "act.prefill"),
    ],
)  # fmt: skip
def test_the_root_cause_outranks_its_echoes(lines, root):
    from diag.rules.load import load_rules

    assert verdict("\n".join(lines), *load_rules()).root.rule.name == root
