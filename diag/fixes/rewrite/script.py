"""Shell scripts, unit files and anything else with a `vllm serve` or `docker run` line in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from diag.errors import RewriteError
from diag.facts.model import Value
from diag.fixes.command import Parts, written
from diag.fixes.model import Change
from diag.fixes.rewrite.arguments import Words, set_flag
from diag.fixes.rewrite.container import large_enough, set_script_variable, words_of
from diag.fixes.rewrite.model import (
    HOST_IPC,
    MAX_CHARACTERS,
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
    same,
)
from diag.fixes.rewrite.shelltext import Command, TextSegment, find_commands
from diag.fixes.rewrite.views import as_is_view

# Words after which a command begins; a variable is set behind them.
_BEFORE_COMMAND = frozenset("sudo env then do else if while until { ! time".split())
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def edit(text: str, change: Change, service: str | None) -> list[Splice]:
    """The splices that make a change. Raises RewriteError, or CannotPutError for what no command there takes."""
    command = find_command(text, service)
    if is_container_setting(change):
        return _set_docker_flag(command, change)
    if change.env is not None:
        return _set_variable(text, command, change.env, change.to)
    assert change.flag is not None
    return set_flag(words_of(command), change.flag, change.to)


def seen(text: str, service: str | None) -> Seen:
    """What the file says, for the check: all words, those within quoted scripts included."""
    find_command(text, service)
    return Seen(words=tuple(_expanded(_whole(text))))


def arguments(text: str, service: str | None) -> Words:
    """vLLM's words."""
    return words_of(find_command(text, service))


def find_command(text: str, service: str | None) -> Command:
    """The command that starts vLLM; `service` is a word of it when there are several. Raises RewriteError."""
    if len(text) > MAX_CHARACTERS:
        raise RewriteError(f"the file has more than {MAX_CHARACTERS:,} characters")
    commands = list(find_commands(_whole(text)))
    if service is not None:
        commands = [command for command in commands if service in command.written.split()]
    if len(commands) > 1:
        lines = ", ".join(str(command.line) for command in commands[:6])
        raise RewriteError(
            f"vLLM is started on several lines: {lines}",
            hint="give --service a word that only one of them has, such as the model",
        )
    if not commands:
        raise RewriteError("no command that starts vLLM was found")
    return commands[0]


def _whole(text: str) -> TextSegment:
    return TextSegment(text, as_is_view(text, 0, len(text), lines=True))


def _expanded(segment: TextSegment, depth: int = 0) -> Iterator[str]:
    for index, token in enumerate(segment.tokens):
        view = segment.inside(index) if "vllm" in token.raw and depth < 4 else None
        if view is None:
            yield token.value
        else:
            yield ";"
            yield from _expanded(TextSegment(segment.file, view), depth + 1)


# --- docker's own options ---------------------------------------------------------------------------------------


def _set_docker_flag(command: Command, change: Change) -> list[Splice]:
    assert change.flag is not None
    name = change.flag.split("=")[0]
    if command.docker is None:
        raise CannotPutError(f"{name} is an option of docker run, and this file has none")
    segment, parts = command.docker
    assert parts.docker is not None
    assert parts.image is not None
    options = " ".join(segment.values[parts.docker : parts.image])
    if name == "--shm-size" and re.search(r"--ipc[= ]host\b", options):
        raise CannotPutError(HOST_IPC)
    for index in range(parts.docker, parts.image):
        head, sign, now = segment.values[index].partition("=")
        if head != name:
            continue
        if change.to is None:
            return [segment.remove(index, index + (1 if sign else 2))]
        now = now if sign else segment.values[index + 1]
        if same(now, change.to):
            return []
        if name == "--shm-size" and large_enough(now, written(change.to)):
            raise CannotPutError(f"{name} is {now} already")
        if sign:
            return [segment.replace(index, f"{name}={written(change.to)}")]
        return [segment.replace(index + 1, written(change.to))]
    if change.to is None:
        return []
    return [_docker_option(segment, parts, [f"{name}={written(change.to)}"])]


def _docker_option(segment: TextSegment, parts: Parts, words: list[str]) -> Splice:
    """New options in front of the image, on a line of their own when the image is."""
    assert parts.image is not None
    return segment.insert(parts.image - 1, words, lead=parts.image)


def _set_docker_variable(
    segment: TextSegment, parts: Parts, name: str, value: Value | None
) -> list[Splice]:
    assert parts.docker is not None
    assert parts.image is not None
    for index in range(parts.docker, parts.image):
        word = segment.values[index]
        before = segment.values[index - 1]
        if before in ("-e", "--env") and word.split("=")[0] == name:
            if value is None:
                return [segment.remove(index - 1, index + 1)]
            return (
                []
                if same(word.partition("=")[2], value)
                else [segment.replace(index, f"{name}={written(value)}")]
            )
        match = re.fullmatch(rf"(-e=?|--env=){re.escape(name)}=(.*)", word, re.DOTALL)
        if match:
            if value is None:
                return [segment.remove(index, index + 1)]
            return (
                []
                if same(match[2], value)
                else [segment.replace(index, f"{match[1]}{name}={written(value)}")]
            )
    return (
        []
        if value is None
        else [_docker_option(segment, parts, ["-e", f"{name}={written(value)}"])]
    )


# --- variables --------------------------------------------------------------------------------------------------


def _set_variable(text: str, command: Command, name: str, value: Value | None) -> list[Splice]:
    inside = set_script_variable(command, name, value)
    if inside is not None:
        return inside
    if command.docker is not None:
        return _set_docker_variable(*command.docker, name, value)
    whole = _whole(text)
    for index in range(len(whole.tokens) - 1, -1, -1):
        word = whole.values[index]
        if word.startswith((f"{name}=", f"Environment={name}=")) and not word.endswith("("):
            return _set_assignment(whole, index, name, value)
    if value is None:
        return []
    first = command.segment.values[command.parts.start]
    if first.startswith("ExecStart"):
        return [_before(command, command.parts.start, f"Environment={name}={written(value)}\n")]
    index = command.parts.start
    while index < command.parts.args and _goes_before(command.segment.values[index]):
        index += 1
    return [_before(command, index, f"{name}={written(value)} ")]


def _goes_before(word: str) -> bool:
    return word in _BEFORE_COMMAND or _ASSIGNMENT.match(word) is not None


def _set_assignment(
    segment: TextSegment, index: int, name: str, value: Value | None
) -> list[Splice]:
    word = segment.values[index]
    head, _, now = word.partition(f"{name}=")
    if value is None:
        exported = index > 0 and segment.values[index - 1] == "export"
        return [segment.remove(index - int(exported), index + 1)]
    return [] if same(now, value) else [segment.assign(index, f"{head}{name}", written(value))]


def _before(command: Command, index: int, text: str) -> Splice:
    view = command.segment.view_of_text
    place = view.at[command.segment.tokens[index].start]
    return Splice(place, place, view.escape(text))
