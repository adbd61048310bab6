"""Every shipped bug is shown for the logs it must be shown for, and for no other release or cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag import diagnose
from diag.errors import RuleFileError
from diag.knowledge.bugs import Bug, BugExample, all_bugs, read_bugs

BUGS = all_bugs()
EXAMPLES = [
    pytest.param(bug, example, id=f"{bug.id}: {example.name}")
    for bug in BUGS
    for example in bug.examples
]


@pytest.mark.parametrize(("bug", "example"), EXAMPLES)
def test_the_example_of_a_bug(bug: Bug, example: BugExample):
    text = example.log if example.log.endswith("\n") else example.log + "\n"
    answer = diagnose(text, vllm_version=example.vllm, launch=example.launch)
    shown = {item.id for item in answer.known_bugs}
    assert (bug.id in shown) == (example.expect == "applies"), shown


def test_an_applying_bug_names_its_cure_and_its_proof():
    applies = next(e for e in BUGS[0].examples if e.expect == "applies")
    answer = diagnose(applies.log, vllm_version=applies.vllm, launch=applies.launch)
    shown = next(item for item in answer.known_bugs if item.id == BUGS[0].id)
    assert (shown.cure, shown.url) == (BUGS[0].cure, BUGS[0].url)


def test_no_bug_is_shown_when_the_release_is_unknown():
    applies = next(e for e in BUGS[0].examples if e.expect == "applies")
    lines = [line for line in applies.log.splitlines() if " engine (v" not in line]
    assert diagnose("\n".join(lines) + "\n").known_bugs == ()


BAD = """
schema: 1
bugs:
  - id: Upper
    title: t
    url: http://x
    project: vllm
    affected: '>=0.9,<0.11'
    fixed_in: '0.10.0'
    classes: [kv.no_blocks]
    when: {}
    why: w
    cure: c
    proof: p
  - {id: no-shape, surprise: 1}
"""


def test_every_problem_of_a_bad_file_is_told(tmp_path: Path):
    file = tmp_path / "known_bugs.yaml"
    file.write_text(BAD, encoding="utf-8")
    with pytest.raises(RuleFileError) as caught:
        read_bugs(file)
    text = "\n".join(caught.value.problems)
    for part in (
        "Upper",
        "https://",
        "lies in affected",
        "one that does not",
        "no-shape: surprise",
    ):
        assert part in text, text
