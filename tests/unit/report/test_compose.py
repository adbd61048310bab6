"""Rule texts and facts -> the sentences and quoted lines of a report."""

from __future__ import annotations

import pytest
from log_samples import (
    GIB,
    INIT_FAILED,
    MAX_LEN,
    NO_BLOCKS,
    OOM,
    SERVING,
    core,
    facts_of,
    planned,
    start,
)
from log_samples import made_rule as rule

from diag.report import compose
from diag.report.compose import MAX_ALTERNATIVES, MAX_ECHOES, MAX_QUOTE, format_value
from diag.rules.engine import Verdict, judge
from diag.terms import EvidenceRole, Family, Outcome


def judged(text: str, *rules):
    facts = facts_of(text + "\n")
    return judge(facts, rules), facts


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (round(13.62 * GIB), "bytes", "13.62 GiB"),
        (-GIB, "bytes", "-1.00 GiB"),
        (163840, "tokens", "163,840"),
        (7, "count", "7"),
        (99.2, "pct", "99.2 %"),
        (4.84, "x", "4.84x"),
        (0.9, "ratio", "0.9"),
        (0.123456, "ratio", "0.1235"),
        (19.874, "s", "19.87"),
        ("fp8", "text", "fp8"),
        (True, "bool", "True"),
    ],
)
def test_a_value_as_people_read_it(value, unit, text):
    assert format_value(value, unit) == text


@pytest.mark.parametrize(
    ("texts", "summary"),
    [
        (
            ["{kv.needed} of {kv.available}; short by {kv.shortfall}."],
            "15.00 GiB of 13.62 GiB; short by 1.38 GiB.",
        ),
        (["{kv.needed} of {weights.memory}.", "{kv.needed} is needed."], "15.00 GiB is needed."),
        (["{weights.memory} is unknown."], "The rule kv.a."),
        (["No number."], "No number."),
        (["A length of {kv.asked_len} tokens."], "A length of 163,840 tokens."),
    ],
)
def test_the_first_text_whose_numbers_are_all_known(texts, summary):
    verdict, facts = judged(core(MAX_LEN), rule(summary=texts))
    assert compose.summary(verdict.root, facts) == summary


def test_the_problems_own_number_is_taken_and_no_other_errors():
    """Two texts of one attempt: the second is the root, so its 2 GiB count."""
    text = f"{core(OOM)}\n{core(OOM.replace('432.00 MiB', '2.00 GiB').replace('torch.OutOf', 'torch.cuda.OutOf'))}"
    second = rule(when={"all": [{"text": "torch.cuda"}]}, summary=["{oom.tried} was refused."])
    verdict, facts = judged(text, second)
    assert compose.summary(verdict.root, facts) == "2.00 GiB was refused."


def test_another_errors_numbers_prove_nothing():
    text = f"{core(OOM)}\n{core('KeyError: x')}"
    key = rule(when={"all": [{"exception": ["KeyError"]}]}, summary=["{oom.tried} was refused."])
    verdict, facts = judged(text, key)
    assert compose.summary(verdict.root, facts) == "The rule kv.a."


def test_a_value_of_the_problems_rank_is_preferred():
    weights = "".join(
        f"(Worker_TP{rank} pid={rank + 5}) INFO 04-17 02:01:00 [gpu_model_runner.py:1] Model loading took {size} GiB "
        "memory and 10.84 seconds\n"
        for rank, size in ((0, "9.5"), (1, "12.5"))
    )
    text = f"{weights}(Worker_TP1 pid=6) ERROR 04-17 02:01:23 [multiproc_executor.py:949] {OOM}"
    verdict, facts = judged(text, rule(summary=["Weights take {weights.memory}."]))
    assert compose.summary(verdict.root, facts) == "Weights take 12.50 GiB."
    assert compose.finding(verdict, facts).rank == 1


def test_the_text_of_a_problem_is_bounded_and_not_filled_in():
    text = "ValueError: {kv.needed} " + "x" * 5000
    verdict, facts = judged(core(text), rule(summary=["{problem.text}"]))
    said = compose.summary(verdict.root, facts)
    assert said.startswith("ValueError: {kv.needed} xxx")
    assert said.endswith("...")
    assert len(said) == 300


def test_evidence_is_quoted_once_in_the_order_of_the_log():
    text = "\n".join([start(), planned(), core(NO_BLOCKS), f"(APIServer pid=1) {INIT_FAILED}"])
    verdict, facts = judged(
        text,
        rule(
            when={"all": [{"problem": ["kv.no_blocks"]}]}, confirm=["kv.size_tokens", "load.took"]
        ),
    )
    quoted = compose.evidence(verdict, facts)
    assert [(item.line, item.role) for item in quoted] == [
        (5, EvidenceRole.CONFIRMATION),
        (7, EvidenceRole.CONFIRMATION),
        (11, EvidenceRole.CAUSE),
        (12, EvidenceRole.ECHO),
    ]
    assert quoted[2].text == NO_BLOCKS
    assert quoted[3].text == INIT_FAILED


def test_quotes_and_echoes_are_bounded():
    lines = [core(NO_BLOCKS + "x" * 5000)]
    lines += [core(NO_BLOCKS + "x" * 5000, pid=100 + number) for number in range(20)]
    verdict, facts = judged("\n".join(lines), rule())
    quoted = compose.evidence(verdict, facts)
    assert len(quoted) == 1 + MAX_ECHOES
    assert max(len(item.text) for item in quoted) == MAX_QUOTE


def test_a_finding_that_is_sure_asks_for_nothing():
    for confidence, missing in ((0.95, ()), (0.9, ()), (0.89, ("the traceback",))):
        verdict, facts = judged(
            core(NO_BLOCKS), rule(confidence=confidence, missing=["the traceback"])
        )
        assert compose.finding(verdict, facts).missing == missing


def test_alternatives_are_ranked_and_never_surer_than_the_finding():
    readings = [
        {"subtype": f"a.r{number}", "family": "weights", "why": "x", "confidence": number / 10}
        for number in range(1, 8)
    ]
    verdict, facts = judged(
        core(NO_BLOCKS),
        rule(confidence=0.5, readings=readings),
        rule("kv.b", priority=40, confidence=0.8),
    )
    found = compose.alternatives(verdict)
    assert len(found) == MAX_ALTERNATIVES
    assert [item.confidence for item in found] == [0.5, 0.5, 0.5, 0.4]
    assert max(item.confidence for item in found) <= compose.finding(verdict, facts).confidence


def test_a_rule_that_also_holds_is_half_as_sure():
    verdict, _ = judged(
        core(NO_BLOCKS), rule(confidence=0.9), rule("kv.b", priority=40, confidence=0.8)
    )
    (other,) = compose.alternatives(verdict)
    assert (other.subtype, other.confidence, other.why) == ("kv.b", 0.4, "The rule kv.b.")


@pytest.mark.parametrize(
    ("family", "outcome"),
    [
        (Family.KV_RESERVATION, Outcome.MEMORY_FAILURE),
        (Family.HOST_MEMORY, Outcome.MEMORY_FAILURE),
        (Family.LOOKALIKE, Outcome.OTHER_FAILURE),
        (Family.UNKNOWN, Outcome.UNKNOWN),
    ],
)
def test_the_outcome_of_a_failure(family, outcome):
    assert compose.outcome(*judged(core(NO_BLOCKS), rule(family=family.value))) is outcome


CUT = (
    "(EngineCore pid=97) Traceback (most recent call last):\n"
    '(EngineCore pid=97)   File "/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 745, in step_fn'
)
POOL = "KV pool 21.77 GiB, 158,512 tokens, 4.84 requests of 32,768 tokens. Nothing to do."


@pytest.mark.parametrize(
    ("text", "outcome", "headline"),
    [
        (f"{start()}\n{planned()}\n{SERVING}", Outcome.HEALTHY,
         "Healthy start: serving since line 11. " + POOL),
        (f"{start()}\n{planned()}", Outcome.HEALTHY,
         "Healthy start: start-up went through. " + POOL),
        (SERVING, Outcome.HEALTHY, "Healthy start: serving since line 1. Nothing to do."),
        (start(), Outcome.UNKNOWN,
         "Cannot tell yet. The log ends in the profile run and shows no failure up to there."),
        ("hello world", Outcome.UNKNOWN,
         "Cannot tell. No line of this input is known from vLLM or what it runs on."),
        ("asyncio.exceptions.CancelledError", Outcome.UNKNOWN,
         "Cannot tell yet. CancelledError (line 1) only says that something was given up; why is not in the log."),
        (f"{SERVING}\n{CUT}", Outcome.UNKNOWN,
         ("Cannot tell yet. A traceback breaks off at line 3 (core.py, step_fn): its last line, the error itself, "
          "is not in the log.")),
    ],
)  # fmt: skip
def test_the_headline_of_a_log_without_a_finding(text, outcome, headline):
    verdict, facts = judged(text)
    assert verdict == Verdict(root=None)
    assert compose.outcome(verdict, facts) is outcome
    assert compose.headline(outcome, facts, None) == headline


def test_the_headline_of_another_failure_says_that_it_is_not_memory():
    verdict, facts = judged(
        core("KeyError: x"), rule(family="lookalike", summary=["{problem.text}"])
    )
    found = compose.finding(verdict, facts)
    assert (
        compose.headline(Outcome.OTHER_FAILURE, facts, found)
        == "Not a memory failure (line 1): KeyError: x"
    )


def test_a_memory_failure_speaks_for_itself():
    verdict, facts = judged(core(NO_BLOCKS), rule())
    assert compose.headline(Outcome.MEMORY_FAILURE, facts, compose.finding(verdict, facts)) == ""


@pytest.mark.parametrize(("confidence", "asks"), [(0.95, False), (0.6, False), (0.59, True)])
def test_an_answer_that_is_not_sure_says_how_to_learn_more(confidence, asks):
    verdict, facts = judged(core(NO_BLOCKS), rule(confidence=confidence))
    found = compose.finding(verdict, facts)
    assert bool(compose.next_steps(Outcome.MEMORY_FAILURE, found, ["kv.no_blocks"])) is asks


def test_a_text_that_is_no_log_is_answered_with_how_to_get_one():
    steps = compose.next_steps(Outcome.UNKNOWN, None, [])
    assert steps[0].startswith("docker logs")
    assert compose.next_steps(Outcome.UNKNOWN, None, ["load.start"])[0].startswith("dmesg")
    assert compose.next_steps(Outcome.HEALTHY, None, []) == ()


def test_a_class_for_the_rest_says_nothing_beside_one_with_a_name():
    rest = rule("look.other", priority=5, confidence=0.6)
    verdict, _ = judged(core(NO_BLOCKS), rule(confidence=0.9), rest)
    assert compose.alternatives(verdict) == ()
    verdict, _ = judged(core(NO_BLOCKS), rule("act.other", confidence=0.9), rest)
    assert [item.subtype for item in compose.alternatives(verdict)] == ["look.other"]
