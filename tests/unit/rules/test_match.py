"""Conditions: true, false or unknown; the lines that say so; the facts that are missing."""

from __future__ import annotations

import itertools

import pytest
from log_samples import (
    GIB,
    MIB,
    NO_BLOCKS,
    OOM,
    core,
    facts_of,
    line,
    made_condition,
    made_when,
    planned,
    start,
    traceback,
)

from diag.facts.model import Event, Fact, Facts, Problem
from diag.rules.match import (
    Context,
    LogText,
    Result,
    any_of,
    check,
    conjunction,
    evaluate,
    negate,
    rows,
)
from diag.rules.schema import When
from diag.terms import Phase, RowRole

LINES = (line("first line", 1), line("second line holds 12", 2), line("third", 3))

# What a condition can come to: a line that is there, one that is not, a fact that is not known.
PARTS = {
    True: {"log": "first"},
    False: {"log": "absent"},
    None: {"fact": "kv.needed", "gt": 0},
}
TABLE = [
    pytest.param(combination, id="-".join({True: "yes", False: "no", None: "open"}[c] for c in combination))
    for size in (1, 2, 3)
    for combination in itertools.product((True, False, None), repeat=size)
]  # fmt: skip


def context(
    *facts: Fact, problem: Problem | None = None, events: tuple[Event, ...] = (), lines=LINES
) -> Context:
    table: dict[str, tuple[Fact, ...]] = {}
    for fact in facts:
        table[fact.name] = (*table.get(fact.name, ()), fact)
    problems = (problem,) if problem else ()
    return Context(
        Facts(table=table, lines=lines, events=events, problems=problems), LogText(lines), problem
    )


def held(condition: dict, where: Context | None = None) -> bool | None:
    return check(made_condition(**condition), where or context()).held


def kleene_and(values) -> bool | None:
    return False if False in values else None if None in values else True


def kleene_or(values) -> bool | None:
    return True if True in values else None if None in values else False


@pytest.mark.parametrize("values", TABLE)
def test_all_one_false_settles_it(values):
    assert held({"all": [PARTS[value] for value in values]}) is kleene_and(values)


@pytest.mark.parametrize("values", TABLE)
def test_any_one_true_settles_it(values):
    assert held({"any": [PARTS[value] for value in values]}) is kleene_or(values)


@pytest.mark.parametrize("values", TABLE)
def test_none_excludes_only_what_is_known_to_hold(values):
    assert held({"none": [PARTS[value] for value in values]}) is (True not in values)


@pytest.mark.parametrize("values", TABLE)
def test_the_lists_of_a_rule_hold_together(values):
    every = [PARTS[value] for value in values]
    for parts, wanted in (
        ({"all": every}, kleene_and(values)),
        ({"any": every}, kleene_or(values)),
        ({"none": every}, True not in values),
        ({"all": every, "any": every}, kleene_and(values)),
        ({"all": every, "none": every}, False),
    ):
        result = evaluate(made_when(**parts), context()).held
        if parts.keys() == {"all", "none"}:
            # what holds excludes itself; what is open may hold
            assert result is (False if False in values or True in values else None)
        else:
            assert result is wanted


def test_a_rule_without_conditions_holds():
    assert evaluate(When(), context()).held is True


def test_lists_nest():
    assert held({"all": [{"any": [PARTS[False], {"none": [PARTS[False]]}]}, PARTS[True]]}) is True
    assert held({"none": [{"all": [PARTS[True], PARTS[False]]}]}) is True
    assert held({"all": [{"none": [PARTS[True]]}, PARTS[None]]}) is False


def test_evidence_and_missing_facts_are_gathered():
    result = evaluate(made_when(all=[PARTS[True], {"log": "second"}, PARTS[None]]), context())
    assert result == Result(None, (LINES[0], LINES[1]), ("kv.needed",))
    result = any_of(made_when(any=[PARTS[False], PARTS[None]]).any, context())
    assert (result.held, result.missing) == (None, ("kv.needed",))


def test_the_lines_of_an_exclusion_are_no_evidence():
    assert negate(Result(False, (LINES[0],))) == Result(True)
    assert negate(Result(True, (LINES[0],))) == Result(False)
    assert negate(Result(None, (), ("a.b",))) == Result(True, (), ("a.b",))
    assert conjunction([]) == Result(True)


# --- one line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        ("second", 2), (r"\d+", 2), ("^third$", 3), ("line$", 1), ("^line", None), ("line.*third", None),
        ("(?i)THIRD", 3), ("absent|third", 3), (r"first line\s+second", None),
    ],
)  # fmt: skip
def test_a_pattern_holds_in_one_line(pattern, number):
    found = LogText(LINES).line_with(pattern)
    assert (found.number if found else None) == number


def test_the_line_is_right_behind_letters_of_several_bytes():
    lines = (
        line("\u2588\u2580 \U0001f680" * 50, 1),
        line("\u00e4" * 9, 2),
        line("needle", 3),
        line("needle", 4),
    )
    assert LogText(lines).line_with("needle").number == 3


def test_an_empty_log_holds_nothing():
    assert LogText(()).line_with("x") is None


# --- facts -------------------------------------------------------------------------------------------------------


def fact(
    name: str, value: object, unit: str = "bytes", number: int | None = 2, rank: int | None = None
) -> Fact:
    return Fact(name=name, value=value, unit=unit, line=number, rank=rank)


@pytest.mark.parametrize(
    ("test", "wanted"),
    [
        ({"le": "0 GiB"}, True), ({"lt": "-0.5 GiB"}, False), ({"lt": "-0.49 GiB"}, True), ({"gt": "-512 MiB"}, False),
        ({"ge": "-512 MiB"}, True), ({"eq": -GIB // 2}, True), ({"ne": "-512 MiB"}, False), ({"gt": 0}, False),
        ({"ge": "-1 GiB", "le": "0 GiB"}, True), ({"ge": "-1 GiB", "le": "-600 MiB"}, False), ({"exists": True}, True),
        ({"exists": False}, False),
    ],
)  # fmt: skip
def test_sizes_are_compared_as_bytes(test, wanted):
    where = context(fact("profile.available_kv_cache", -GIB // 2))
    assert held({"fact": "profile.available_kv_cache", **test}, where) is wanted


@pytest.mark.parametrize(
    ("value", "unit", "test", "wanted"),
    [
        ("fp8", "text", {"eq": "fp8"}, True),
        ("fp8", "text", {"in": ["fp8", "fp8_e5m2"]}, True),
        ("auto", "text", {"in": ["fp8", "fp8_e5m2"]}, False),
        ("Qwen2.5-VL-7B", "text", {"matches": r"(?i)-vl\b"}, True),
        ("Qwen2.5-7B", "text", {"matches": r"(?i)-vl\b"}, False),
        (-9, "count", {"in": [-9, 137]}, True),
        (True, "bool", {"eq": True}, True),
        (False, "bool", {"eq": True}, False),
        (0.95, "ratio", {"gt": 0.9, "lt": 1}, True),
        (96.0, "pct", {"ge": 95}, True),
    ],
)
def test_a_comparison(value, unit, test, wanted):
    assert held({"fact": "a.b", **test}, context(fact("a.b", value, unit))) is wanted


def test_a_fact_holds_when_it_does_for_any_rank_and_quotes_that_line():
    where = context(fact("a.b", 5 * GIB, rank=0, number=1), fact("a.b", -GIB, rank=1, number=3))
    result = check(made_condition(fact="a.b", lt="0 GiB"), where)
    assert (result.held, result.lines) == (True, (LINES[2],))


def test_an_absent_fact_is_unknown_but_its_existence_is_not():
    assert held({"fact": "a.b", "gt": 0}) is None
    assert held({"fact": "a.b", "exists": False}) is True
    assert held({"fact": "a.b", "exists": True}) is False


def test_own_means_printed_on_the_problems_lines():
    problem = Problem(line=LINES[1], text="", exception=None, role=RowRole.CAUSE, phase=None)
    other, own = fact("oom.tried", 9 * GIB, number=1), fact("oom.tried", GIB, number=2)
    condition = {"fact": "oom.tried", "own": True, "ge": "5 GiB"}
    assert held(condition, context(other, own, problem=problem)) is False
    assert held(condition, context(other, problem=problem)) is None
    assert held({**condition, "own": False}, context(other, own, problem=problem)) is True


@pytest.mark.parametrize(
    ("value", "unit", "test"),
    [("fp8", "text", {"gt": 1}), (GIB, "bytes", {"lt": "a lot"}), (3, "count", {"ge": "2"})],
)
def test_a_comparison_that_makes_no_sense_does_not_raise(value, unit, test):
    assert held({"fact": "a.b", **test}, context(fact("a.b", value, unit))) in (False, None)


def test_in_takes_sizes_too():
    assert held({"fact": "a.b", "in": ["1 GiB"]}, context(fact("a.b", GIB))) is True


# --- the problem -------------------------------------------------------------------------------------------------

SERVE = (("v1/engine/core.py", "run_busy_loop"), ("v1/sample/sampler.py", "forward"))


def case(text: str, index: int = 0) -> Context:
    facts = facts_of(text + "\n")
    return Context(facts, LogText(facts.lines), facts.problems[index])


SAMPLER = "\n".join([start(), planned(), *(core(part) for part in traceback(*SERVE, error=OOM))])
TWO = f"{core(NO_BLOCKS)}\n{core('TypeError: while cleaning up', source='core.py:99')}"
BARE = core("TypeError: unsupported operand")


@pytest.mark.parametrize(
    ("text", "condition", "wanted"),
    [
        (SAMPLER, {"problem": ["@oom"]}, True),
        (SAMPLER, {"problem": ["torch.oom_head"]}, True),
        (SAMPLER, {"problem": ["kv.no_blocks"]}, False),
        (SAMPLER, {"site": ["sampler", "lora"]}, True),
        (SAMPLER, {"site": ["lora"]}, False),
        (SAMPLER, {"phase": ["serving"]}, True),
        (SAMPLER, {"phase": ["profile", "kv_alloc"]}, False),
        (SAMPLER, {"exception": ["OutOfMemoryError"]}, True),
        (SAMPLER, {"exception": ["ValueError"]}, False),
        (SAMPLER, {"text": r"Tried to allocate \d+"}, True),
        (SAMPLER, {"text": "TypeError"}, False),
        (SAMPLER, {"process": "^EngineCore"}, True),
        (SAMPLER, {"process": "^APIServer"}, False),
        (SAMPLER, {"seen": ["graph.done"]}, True),
        (SAMPLER, {"seen": ["@capture_done"]}, True),
        (SAMPLER, {"seen": ["startup.complete"]}, False),
        (SAMPLER, {"after": ["kv.size_tokens"]}, True),
        (SAMPLER, {"after": ["torch.oom_head"]}, False),  # it is the problem, not before it
        (SAMPLER, {"fact": "oom.tried", "own": True, "eq": 432 * MIB}, True),
        (SAMPLER, {"fact": "weights.memory", "own": True, "exists": True}, False),
        (SAMPLER, {"first": True}, True),
        (SAMPLER, {"generic": True}, True),
        (BARE, {"generic": True}, True),
        (BARE, {"hint": ["kv.no_blocks"]}, False),
        (core(NO_BLOCKS), {"hint": ["kv.no_blocks"]}, True),
    ],
)
def test_a_condition_about_the_problem(text, condition, wanted):
    assert held(condition, case(text)) is wanted


def test_only_the_first_stated_failure_is_the_first():
    assert held({"first": True}, case(TWO, 0)) is True
    assert held({"first": True}, case(TWO, 1)) is False


def test_conditions_about_the_problem_are_false_for_the_whole_log():
    for condition in (
        {"text": "."},
        {"generic": True},
        {"first": True},
        {"phase": ["serving"]},
        {"site": ["lora"]},
    ):
        assert held(condition) is False


def test_groups_of_rows_are_put_in_their_place():
    assert rows(("a.b",)) == ("a.b",)
    assert "torch.oom_head" in rows(("@oom",))
    assert rows(("a.b", "@capture_done"))[0] == "a.b"


def test_a_phase_is_one_of_the_vocabulary():
    assert made_condition(phase=["kv_alloc"]).phase == (Phase.KV_ALLOC,)
