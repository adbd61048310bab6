"""Known bugs (`corpus/known_bugs.yaml`): what a release does wrong and another repairs, shown when the log fits.

A bug applies when the release in the log lies in `affected`, the failure has one of its `classes`, and its conditions
hold for the facts. A log without a release, or without a fact the bug hinges on, gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from diag.errors import OomdocError, RuleFileError
from diag.facts.model import Facts, Problem
from diag.patterns import found
from diag.release import in_range
from diag.resources import data_dir, read_data, read_yaml
from diag.rules.match import Context, LogText, evaluate
from diag.rules.schema import When
from diag.schema import Strict, build, validated

FILE = "corpus/known_bugs.yaml"
_ID = r"^[a-z0-9]+(-[a-z0-9]+)+$"


@dataclass(frozen=True, slots=True, kw_only=True)
class BugExample(Strict):
    """A small log and whether the bug is shown for it: the example is the test."""

    name: str
    expect: Literal["applies", "does_not_apply"]
    log: str
    vllm: str | None = None
    launch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug(Strict):
    """One bug. `affected` is a PEP 440 range of vLLM releases, `fixed_in` the first release with the repair."""

    id: str
    title: str
    url: str
    project: str  # whose code it is in
    affected: str
    fixed_in: str | None = None
    classes: tuple[str, ...]
    when: When
    why: str
    cure: str
    proof: str  # how the range was found
    sources: tuple[str, ...] = ()
    examples: tuple[BugExample, ...] = ()

    def problems(self) -> Iterator[str]:
        """What is wrong with it beyond its shape."""
        if not found(_ID, self.id):
            yield f"id {self.id!r} is not lower-case words joined by hyphens"
        try:
            in_range(Version("0"), self.affected)
            repaired = in_range(Version(self.fixed_in), self.affected) if self.fixed_in else False
        except (OomdocError, ValueError) as error:
            yield f"affected or fixed_in: {error}"
        else:
            if repaired:
                yield f"fixed_in {self.fixed_in} lies in affected {self.affected}"
        if not self.classes:
            yield "classes needs at least one"
        if not all(url.startswith("https://") for url in (self.url, *self.sources)):
            yield "url and sources start with https://"
        if {example.expect for example in self.examples} != {"applies", "does_not_apply"}:
            yield "give at least one example that applies and one that does not"


def read_bugs(path: Path) -> tuple[Bug, ...]:
    """All bugs with their examples, checked. Raises RuleFileError with every problem."""
    body = read_yaml(path)
    if not isinstance(body, dict) or not isinstance(body.get("bugs"), list):
        raise RuleFileError([f"{path.name}: needs a list named bugs"])
    bugs: list[Bug] = []
    problems: list[str] = []
    for index, item in enumerate(body["bugs"], 1):
        label = item.get("id", index) if isinstance(item, dict) else index
        where = f"{path.name}: {label}"
        try:
            bug = validated(Bug, item, where)
        except RuleFileError as error:
            problems.extend(error.problems)
            continue
        problems.extend(f"{where}: {problem}" for problem in bug.problems())
        if any(bug.id == other.id for other in bugs):
            problems.append(f"{where}: this id is used twice")
        bugs.append(bug)
    if problems:
        raise RuleFileError(problems)
    return tuple(bugs)


def all_bugs() -> tuple[Bug, ...]:
    """The shipped bugs with their examples, read from the YAML. Raises RuleFileError."""
    return read_bugs(data_dir("corpus") / Path(FILE).name)


@lru_cache(maxsize=1)
def _bodies() -> tuple[dict[str, Any], ...]:
    return tuple(read_data(FILE)["bugs"])


def matching_bugs(
    facts: Facts, problem: Problem | None, subtype: str, version: Version | None
) -> tuple[Bug, ...]:
    """The shipped bugs that fit this failure, the most specific range first. None without a release."""
    if version is None:
        return ()
    near = [
        build(Bug, body)
        for body in _bodies()
        if subtype in body["classes"] and in_range(version, body["affected"])
    ]
    return select(near, facts, problem)


def select(bugs: Iterable[Bug], facts: Facts, problem: Problem | None) -> tuple[Bug, ...]:
    """Those whose conditions hold for the facts; repaired ones first, since their cure is a release."""
    context = Context(facts, LogText(facts.lines), problem)
    fitting = [bug for bug in bugs if evaluate(bug.when, context).held]
    return tuple(sorted(fitting, key=lambda bug: bug.fixed_in is None))
