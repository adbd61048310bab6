"""Cards: what one thread or one page of documentation teaches, in our own words (`corpus/cards/*.md`).

A card is front matter (`Card` without `body`) and a Markdown text with the sections of `SECTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from diag.errors import RuleFileError
from diag.schema import Strict, build, validated
from diag.terms import Phase

Kind: TypeAlias = Literal["issue", "pull", "discussion", "doc"]
Solved: TypeAlias = Literal["confirmed", "advised", "open"]

SECTIONS = ("Cause", "What fixed it", "What did not help", "Notes")
REQUIRED_SECTIONS = ("Cause",)
_FENCE = "---"
_HEADING = re.compile(r"^## +(.+?)\s*$", re.MULTILINE)
_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Strict):
    """One card. `class_` is a subtype of the taxonomy, `also` names others it is rightly shown for."""

    id: str
    kind: Kind
    title: str
    urls: tuple[str, ...]  # the thread or page itself first, then what it links
    class_: str
    also: tuple[str, ...] = ()
    phase: Phase | None = None
    date: str | None = None  # of the thread, YYYY-MM-DD
    reported: str | None = None  # the release that was running
    releases: str | None = None  # PEP 440 range it holds for, when more is known than one report
    engine: Literal["V0", "V1"] | None = None
    hardware: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # options and environment variables that play a part
    symptoms: tuple[str, ...] = ()  # patterns of log lines
    fix: str | None = None  # one line: what solved it
    solved: Solved = "open"
    confidence: Literal["high", "medium", "low"] = "medium"
    body: str = ""

    @property
    def url(self) -> str:
        """The thread or page."""
        return self.urls[0]

    @property
    def classes(self) -> tuple[str, ...]:
        """Subtypes it may be shown for."""
        return (self.class_, *self.also)

    def section(self, name: str) -> str:
        """Text of one section, "" when the card has none."""
        return dict(split_sections(self.body)).get(name, "")

    def problems(self) -> Iterator[str]:
        """What is wrong with it beyond the shape of its front matter."""
        if not _ID.fullmatch(self.id):
            yield f"id {self.id!r} is not lower-case words joined by hyphens"
        if not self.urls or not all(url.startswith("https://") for url in self.urls):
            yield "urls need at least one, all https://"
        if self.solved != "open" and not self.fix:
            yield f"solved is {self.solved!r}, but fix says nothing"
        sections = dict(split_sections(self.body))
        for name in REQUIRED_SECTIONS:
            if not sections.get(name):
                yield f"the section '## {name}' is missing or empty"
        for name in sections:
            if name not in SECTIONS:
                yield f"unknown section '## {name}'; known are {', '.join(SECTIONS)}"
        if self.fix and not sections.get("What fixed it"):
            yield "fix is given, but the section '## What fixed it' is missing"


def split_sections(body: str) -> list[tuple[str, str]]:
    """(heading, text) of every `##` section of a Markdown text."""
    found = list(_HEADING.finditer(body))
    ends = [match.start() for match in found[1:]] + [len(body)]
    return [
        (match.group(1), body[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]


def split_front_matter(text: str, file: str) -> tuple[Any, str]:
    """Front matter and body of a Markdown file. Raises RuleFileError."""
    import yaml

    lines = text.split("\n")
    if lines[:1] != [_FENCE] or _FENCE not in lines[1:]:
        raise RuleFileError([f"{file}:1: no front matter between two lines of ---"])
    end = lines.index(_FENCE, 1)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        head = yaml.load("\n".join(lines[1:end]), Loader=loader)  # noqa: S506 - the safe loader, in C
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 2}" if mark else ""
        raise RuleFileError(
            [f"{file}{line}: not YAML: {getattr(error, 'problem', error)}"]
        ) from error
    return head, "\n".join(lines[end + 1 :]).strip()


def card_body(text: str, file: str) -> dict[str, Any]:
    """A card's file as one mapping, dates as text. Raises RuleFileError."""
    head, body = split_front_matter(text, file)
    if not isinstance(head, dict):
        raise RuleFileError([f"{file}:2: front matter is no mapping"])
    plain = {key: str(value) if key == "date" else value for key, value in head.items()}
    if "class" in plain:
        plain["class_"] = plain.pop("class")
    return {**plain, "body": body}


def read_card(path: Path) -> Card:
    """A card from its file, checked. Raises RuleFileError with every problem."""
    card = validated(Card, card_body(path.read_text("utf-8"), path.name), path.name)
    problems = list(card.problems())
    if path.stem != card.id:
        problems.append(f"the file is called {path.name}, the card {card.id}")
    if problems:
        raise RuleFileError([f"{path.name}: {problem}" for problem in problems])
    return card


def read_cards(folder: Path) -> tuple[Card, ...]:
    """All cards of a folder by id. Raises RuleFileError with the problems of all of them."""
    cards: list[Card] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.md")):
        try:
            cards.append(read_card(path))
        except RuleFileError as error:
            problems.extend(error.problems)
    if problems:
        raise RuleFileError(problems)
    return tuple(cards)


def trusted(bodies: Iterable[dict[str, Any]]) -> tuple[Card, ...]:
    """Cards from mappings that were checked when the index was built."""
    return tuple(build(Card, body) for body in bodies)
