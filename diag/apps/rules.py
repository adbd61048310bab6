"""`oomdoc rules`: one rule as a page, and its examples as tests. Thin: the rules decide, `diagnose` judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from diag.errors import UsageError
from diag.report.safe import clean

if TYPE_CHECKING:
    from diag.rules.schema import Example, Rule


def find(rule_id: str) -> Rule:
    """The rule of that id. Raises UsageError with the nearest ids."""
    import difflib

    from diag.rules.load import all_rules

    rules = {rule.id: rule for rule in all_rules()}
    if rule_id in rules:
        return rules[rule_id]
    near = difflib.get_close_matches(rule_id, rules, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else 'see "oomdoc rules list"'
    raise UsageError(f"there is no rule {clean(rule_id, 60)!r}", hint=hint)


def listing(rules: Sequence[Rule]) -> str:
    """One line a rule: id and title, by id."""
    width = max((len(rule.id) for rule in rules), default=0)
    ordered = sorted(rules, key=lambda rule: rule.id)
    return "\n".join(f"{rule.id:<{width}}  {rule.title}" for rule in ordered)


def page(rule: Rule) -> str:
    """What a rule says, for people: class, releases, sentences, other readings, gaps, sources."""
    lines = [
        f"{rule.id}: {rule.title}",
        "",
        f"class     {rule.family.label} ({rule.name})",
        f"releases  {rule.vllm or 'all'}",
        f"status    {rule.status}",
    ]
    lines += _section("It says the first of these that has its numbers", rule.summary)
    lines += _section("It could also be", [f"{item.subtype}: {item.why}" for item in rule.readings])
    lines += _section("It would be surer with", rule.missing)
    lines += _section("Known gaps", [rule.known_gaps.strip()] if rule.known_gaps else [])
    lines += _section("Sources", [f"{item.url} ({item.says})" for item in rule.sources])
    names = [f"{item.name} ({item.expect.replace('_', ' ')})" for item in rule.examples]
    lines += _section("Examples", names)
    return "\n".join(lines)


def _section(heading: str, items: Sequence[str]) -> list[str]:
    return ["", heading, *[f"  {item}" for item in items]] if items else []


def test(rules: Sequence[Rule]) -> Iterator[str]:
    """A message for every example whose diagnosis is not what the rule expects."""
    for rule in rules:
        for example in rule.examples:
            problem = _judge(rule, example)
            if problem:
                yield f"rules: {rule.id}: example {example.name!r}: {problem}"


def _judge(rule: Rule, example: Example) -> str | None:
    from diag.pipeline import diagnose

    # A newline makes it pasted text, not a file name.
    found = diagnose(f"{example.log}\n", vllm_version=example.vllm, launch=example.launch).diagnosis
    subtype = found.subtype if found else None
    if example.expect == "not_matched":
        return f"noisy, found {subtype}" if subtype == rule.name else None
    if found is None or subtype != rule.name:
        return f"missing, found {subtype or 'nothing'}"
    if example.phase is not None and found.phase is not example.phase:
        return f"phase {found.phase.value if found.phase else None}, not {example.phase.value}"
    return None
