"""What rewriting works with: kinds of files, pieces of text to put in, and what a file says, for the check.

A `Splice` replaces `text[start:end]`; offsets count characters of the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from diag.facts.model import Value
from diag.fixes.command import DOCKER_FLAGS, written
from diag.fixes.model import Change

MAX_CHARACTERS = 300_000  # of a file
HOST_IPC = "the container shares the host's IPC, so its /dev/shm is the host's; make that larger"


class Kind(str, Enum):
    """What a file is to its reader."""

    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    HELM = "helm"  # values of the vLLM production-stack chart
    CONFIG = "config"  # vLLM's own --config YAML
    SHELL = "shell"
    DOCKERFILE = "dockerfile"
    PYTHON = "python"

    @property
    def label(self) -> str:
        """The kind in words."""
        return _LABELS[self]


_LABELS = {
    Kind.COMPOSE: "a compose file",
    Kind.KUBERNETES: "a Kubernetes manifest",
    Kind.HELM: "values of the vLLM production stack",
    Kind.CONFIG: "a vLLM configuration",
    Kind.SHELL: "a shell script",
    Kind.DOCKERFILE: "a Dockerfile",
    Kind.PYTHON: "a Python program",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The new text. `diff`: unified, empty when nothing changed; `held`: how many of the settings the file holds now;
    `notes`: what it has no place for, in words.
    """

    kind: Kind
    text: str
    diff: str
    held: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Splice:
    """`new` takes the place of the characters from `start` up to `end`."""

    start: int
    end: int
    new: str


class CannotPutError(Exception):
    """This kind of file has no place for the setting; the text tells the user what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a file says before or after an edit: vLLM's words, variables, settings of the container, all the rest."""

    words: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    container: Mapping[str, str] = field(default_factory=dict)
    rest: Any = None


def splice(text: str, splices: Iterable[Splice]) -> str:
    """The text with all splices made. They must not overlap; of two at one place the first comes first."""
    ordered = sorted(splices, key=lambda item: (item.start, item.end))
    for item in ordered[::-1]:
        text = text[: item.start] + item.new + text[item.end :]
    return text


def is_container_setting(change: Change) -> bool:
    """Whether a flag belongs to `docker run` and not to vLLM."""
    return change.flag is not None and change.flag.split("=")[0] in DOCKER_FLAGS


def same(text: str | None, value: Value | None) -> bool:
    """Whether a written value already is the wanted one: equal as text, number or JSON.

    >>> same("0.90", 0.9), same('{"image":1}', '{"image": 1}'), same("8k", 8000)
    (True, True, False)
    """
    if text is None or value is None:
        return text is None and value is None
    wanted = written(value)
    if text == wanted:
        return True
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    try:
        return bool(json.loads(text) == json.loads(wanted))
    except (ValueError, RecursionError):
        return False
