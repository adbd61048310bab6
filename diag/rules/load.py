"""Reads the rule files; every problem of every file is reported together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diag.errors import RuleFileError
from diag.facts.catalogue import read_yaml
from diag.resources import data_dir
from diag.rules.schema import Rule


def rule_files(rules_dir: Path) -> Iterator[Path]:
    """All rule files below `rules/failures`, in a stable order."""
    yield from sorted((rules_dir / "failures").glob("*/*.yaml"))


def parse_rule(body: Any, file: str) -> Rule:
    """A rule from its mapping. Raises RuleFileError naming each bad key."""
    try:
        return Rule.model_validate(body)
    except ValidationError as error:
        raise RuleFileError(
            [
                f"{file}: {'.'.join(str(part) for part in item['loc']) or 'rule'}: {item['msg']}"
                for item in error.errors()
            ]
        ) from error


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


def build_json(rules_dir: Path) -> str:
    """All rules as one JSON text without their examples: what the wheel carries for speed."""
    bodies = [read_yaml(path) for path in rule_files(rules_dir)]
    for body in bodies:
        body["examples"] = []
    return json.dumps(bodies, ensure_ascii=False, separators=(",", ":"))


@lru_cache(maxsize=1)
def load_rules() -> tuple[Rule, ...]:
    """The shipped rules, loaded once."""
    rules = data_dir("rules")
    compiled = rules.parent / "failures.json"
    if not compiled.is_file():
        return read_rules(rules)
    return tuple(parse_rule(body, body["id"]) for body in json.loads(compiled.read_text("utf-8")))
