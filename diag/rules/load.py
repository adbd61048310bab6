"""Reads the rule files; every problem of every file is reported together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from diag.errors import RuleFileError
from diag.resources import data_dir, data_names, read_data, read_yaml
from diag.rules.schema import Rule
from diag.schema import build, validated


def rule_files(rules_dir: Path) -> Iterator[Path]:
    """All rule files below `rules/failures`, in a stable order."""
    yield from sorted((rules_dir / "failures").glob("*/*.yaml"))


def parse_rule(body: Any, file: str) -> Rule:
    """A rule from its mapping. Raises RuleFileError with what is wrong with it."""
    rule = validated(Rule, body, file)
    problems = [f"{file}: {problem}" for problem in rule.problems()]
    if problems:
        raise RuleFileError(problems)
    return rule


def read_rules(rules_dir: Path) -> tuple[Rule, ...]:
    """All rules of a folder. Raises RuleFileError with every message."""
    rules: list[Rule] = []
    problems: list[str] = []
    for path in rule_files(rules_dir):
        file = str(path.relative_to(rules_dir.parent))
        try:
            rules.append(parse_rule(read_yaml(path), file))
        except RuleFileError as error:
            problems.extend(error.problems)
    if problems:
        raise RuleFileError(problems)
    return tuple(rules)


@lru_cache(maxsize=1)
def load_rules() -> tuple[Rule, ...]:
    """The shipped rules without their examples, loaded once."""
    names = data_names("rules/failures")
    return tuple(build(Rule, {**read_data(name), "examples": ()}) for name in names)


def all_rules() -> tuple[Rule, ...]:
    """The shipped rules with their examples, read from the YAML. Raises RuleFileError with every message."""
    return read_rules(data_dir("rules"))
