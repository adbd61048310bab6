"""Finds out what a file is, makes the changes one by one, and checks the result against what was asked.

A result is handed out only when, read again, it holds every new value and otherwise says what the file said before.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diag.errors import RewriteError
from diag.facts.args import is_flag
from diag.facts.model import Value
from diag.fixes.command import OPERATOR, SECRET, flag_end, flag_name, written
from diag.fixes.flags import known_flags
from diag.fixes.model import Change
from diag.fixes.rewrite import compose, config, dockerfile, helm, kubernetes, python, script
from diag.fixes.rewrite.arguments import Words
from diag.fixes.rewrite.kubernetes import quantity
from diag.fixes.rewrite.model import (
    MAX_CHARACTERS,
    CannotPutError,
    Kind,
    Rewritten,
    Seen,
    Splice,
    is_container_setting,
    same,
    splice,
)
from diag.fixes.rewrite.shelltext import ENDS
from diag.fixes.rewrite.views import NeedsQuotesError
from diag.fixes.rewrite.yamltext import MapNode, YamlFile, find, quoted, read

_NEEDS_GPUS = {
    Kind.COMPOSE: "reserve as many GPUs for the service as the tensor parallel size asks for",
    Kind.KUBERNETES: "the container's limit of nvidia.com/gpu must be the tensor parallel size",
    Kind.HELM: "requestGPU must be the tensor parallel size",
}


@dataclass(frozen=True, slots=True)
class _Editor:
    """What a kind of file can do."""

    edit: Callable[[str, Change, str | None], list[Splice]]
    seen: Callable[[str, str | None], Seen]
    arguments: Callable[[str, str | None], Words | Sequence[str]]


_EDITORS = {
    Kind.COMPOSE: _Editor(compose.edit, compose.seen, compose.arguments),
    Kind.KUBERNETES: _Editor(kubernetes.edit, kubernetes.seen, kubernetes.arguments),
    Kind.HELM: _Editor(helm.edit, helm.seen, helm.arguments),
    Kind.CONFIG: _Editor(config.edit, config.seen, config.arguments),
    Kind.SHELL: _Editor(script.edit, script.seen, script.arguments),
    Kind.DOCKERFILE: _Editor(dockerfile.edit, dockerfile.seen, dockerfile.arguments),
    Kind.PYTHON: _Editor(python.edit, python.seen, python.arguments),
}


# --- what a file is -------------------------------------------------------------------------------------------


def detect(text: str, name: str = "") -> Kind | None:
    """What a file is, by its content and, where that leaves it open, by its name; None: nothing that runs vLLM.

    >>> detect("services: {a: {image: vllm/vllm-openai, command: --model m}}").value
    'compose'
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.removeprefix("\ufeff")
    base = name.replace("\\", "/").rsplit("/", 1)[-1].lower()
    if base.endswith(".py"):
        return Kind.PYTHON
    if "dockerfile" in base or "containerfile" in base:
        return Kind.DOCKERFILE
    shell = base.endswith((".sh", ".bash", ".zsh", ".service", ".ps1", ".bat")) or text.startswith(
        "#!"
    )
    if not shell:
        if kind := _yaml_kind(text):
            return kind
        if re.search(r"^\s*FROM\s+\S+", text, re.MULTILINE) and re.search(
            r"^\s*(?:CMD|ENTRYPOINT)\b", text, re.MULTILINE
        ):
            return Kind.DOCKERFILE
        if re.search(r"^\s*(?:from|import)\s+vllm\b", text, re.MULTILINE):
            return Kind.PYTHON
    try:
        script.find_command(text, None)
    except RewriteError as error:
        return Kind.SHELL if "several" in error.message else None
    return Kind.SHELL


def _yaml_kind(text: str) -> Kind | None:
    if ":" not in text:
        return None
    try:
        file = read(text)
    except RewriteError:
        return None
    roots = [root for root in file.roots if isinstance(root, MapNode)]
    if any(find(root, "apiVersion") and find(root, "kind") for root in roots):
        return Kind.KUBERNETES
    if len(roots) != 1:
        return None
    return _kind_of(file, roots[0])


def _kind_of(file: YamlFile, root: MapNode) -> Kind | None:
    if find(root, "servingEngineSpec"):
        return Kind.HELM
    services = find(root, "services")
    if services and isinstance(services[1], MapNode):
        return Kind.COMPOSE
    known = {flag_name(flag) for flag in known_flags()}
    keys = [flag_name(f"--{key.value}") for key, _ in root.value]
    if any(key in known for key in keys) and sum(key in known for key in keys) * 2 >= len(keys):
        return Kind.CONFIG
    return Kind.KUBERNETES if kubernetes.has_container(file) else None


# --- changing it ----------------------------------------------------------------------------------------------


def rewrite(
    text: str,
    changes: Iterable[Change],
    *,
    kind: Kind | None = None,
    service: str | None = None,
    name: str = "file",
) -> Rewritten:
    """The text with the changes of a fix made, its diff, and in words what it has no place for.

    Args: kind, when it is known already; service: which service, container, model or variable when several run vLLM;
        name: of the file, for `detect` and the diff.
    Raises: RewriteError when the file is not understood, ambiguous, or an edit fails its check; MissingExtraError for
        a Python program without libcst.
    """
    kind = kind or detect(text, name)
    if kind is None:
        if len(text) > MAX_CHARACTERS or name.lower().endswith((".yaml", ".yml")):
            read(text)  # says what is wrong with it
        raise RewriteError(
            "nothing in the file starts vLLM",
            hint="give a compose file, manifest, Helm values, script, Dockerfile, --config file or program",
        )
    mark, body = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
    editor = _EDITORS[kind]
    new, done, notes = body, [], []
    for change in changes:
        if change.action is not None:
            notes.append(change.action)
            continue
        before = new
        try:
            new = _made(editor, before, change, service)
        except CannotPutError as error:
            notes.append(str(error))
            continue
        done.append(change)
        notes += _remarks(kind, editor, before, new, change, service)
    if new != body:
        _check(editor, kind, body, new, done, service)
    return Rewritten(
        kind=kind,
        text=mark + new,
        diff=_diff(body, new, name),
        held=len(done),
        notes=tuple(dict.fromkeys(notes)),
    )


def _made(editor: _Editor, text: str, change: Change, service: str | None) -> str:
    try:
        return splice(text, editor.edit(text, change, service))
    except NeedsQuotesError as error:
        old = text[error.start : error.end]
        quotes = Splice(error.start, error.end, quoted(re.sub(r"\s*\n\s*", " ", old)))
        text = splice(text, [quotes])
        return splice(text, editor.edit(text, change, service))


def _remarks(
    kind: Kind, editor: _Editor, old: str, new: str, change: Change, service: str | None
) -> Iterator[str]:
    """What the user should know about a change that was made, or that found nothing to take out."""
    if change.to is None and old == new:
        yield f"{change.flag or change.env} is not set in this file; if vLLM sees it, it is set elsewhere"
    if change.flag is None or is_container_setting(change):
        return
    if change.flag == "--tensor-parallel-size" and kind in _NEEDS_GPUS and old != new:
        yield _NEEDS_GPUS[kind]
    words = _own_words(editor, old, service)
    name = flag_name(change.flag)
    for index, word in enumerate(words):
        was = _value(words, index) if is_flag(word) and flag_name(word) == name else None
        if was and "$" in was and old != new:
            yield f"{change.flag} came from {was}; now it is written out"
    if any(re.search(r"\$\{?\w*(?:ARGS|OPTS|FLAGS|OPTIONS)\b|\[@\]", word) for word in words):
        yield f"the command also takes arguments from a variable; {change.flag} must not be set there"


def _own_words(editor: _Editor, text: str, service: str | None) -> list[str]:
    """vLLM's words in a file."""
    words = editor.arguments(text, service)
    return words.values[words.start : words.end] if isinstance(words, Words) else list(words)


def _diff(old: str, new: str, name: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


# --- checking it ----------------------------------------------------------------------------------------------


def _check(
    editor: _Editor, kind: Kind, old: str, new: str, changes: Sequence[Change], service: str | None
) -> None:
    """Raises RewriteError unless the new text holds the values and nothing else is different."""
    before, after = editor.seen(old, service), editor.seen(new, service)
    for change in changes:
        if not _holds(after, kind, change):
            raise _refused(f"{change.flag or change.env} would not get its value")
    flags = frozenset(flag_name(change.flag) for change in changes if change.flag)
    variables = frozenset(change.env for change in changes if change.env)
    if _others(before.words, flags, variables) != _others(after.words, flags, variables):
        raise _refused("other words of the command would change")
    if _without(before.env, variables) != _without(after.env, variables):
        raise _refused("other variables would change")
    names = frozenset(change.flag.split("=")[0] for change in changes if change.flag)
    if (
        _without(before.container, names) != _without(after.container, names)
        or before.rest != after.rest
    ):
        raise _refused("other parts of it would change; an anchor may share what was edited")


def _refused(why: str) -> RewriteError:
    return RewriteError(f"the file can't be changed safely: {why}", hint="change it by hand")


def _holds(after: Seen, kind: Kind, change: Change) -> bool:
    if change.env is not None:
        assigned = [
            word.partition(f"{change.env}=")[2]
            for word in after.words
            if _assigns(word, frozenset({change.env}))
        ]
        if assigned:
            return any(same(now, change.to) for now in assigned)
        return same(after.env.get(change.env), change.to)
    assert change.flag is not None
    flag = change.flag.split("=")[0]
    if is_container_setting(change) and kind is not Kind.SHELL:
        now = after.container.get(flag)
        if now is None or change.to is None:
            return now is None and change.to is None
        return same(now, change.to) or now == quantity(written(change.to))
    return _flag_holds(after.words, flag, change.to)


def _flag_holds(words: Sequence[str], flag: str, value: Value | None) -> bool:
    name = flag_name(flag)
    found = [
        k
        for k, word in enumerate(words)
        if is_flag(word) and flag_name(word) in (name, f"no-{name}")
    ]
    if value is None or value is False:
        return all(_value(words, k) in ("false", "False") for k in found)
    if not found or flag_name(words[found[-1]]) != name:
        return False
    now = _value(words, found[-1])
    if value is True:
        return now is None or now.lower() == "true"
    return same(now, value) or (now is not None and _number(now) == value)


def _number(text: str) -> Value | None:
    try:
        number = json.loads(text)
    except ValueError:
        return None
    return number if isinstance(number, (int, float)) else None


def _value(words: Sequence[str], index: int) -> str | None:
    """What is written for the flag at `index`; None for a switch alone."""
    _, sign, value = words[index].partition("=")
    if sign:
        return value
    following = words[index + 1] if index + 1 < len(words) else None
    if following is None or is_flag(following) or flag_end(words, index, len(words)) == index + 1:
        return None
    return following


def _others(words: Sequence[str], flags: frozenset[str], variables: frozenset[str]) -> list[str]:
    """The words without those of the changed flags and variables."""
    left: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        if is_flag(word) and {name := flag_name(word), name.removeprefix("no-")} & flags:
            index = flag_end(words, index, len(words))
            continue
        index += 1
        if _assigns(word, variables):
            if left and left[-1] in ("-e", "--env", "export"):
                left.pop()
            alone = not left or OPERATOR.fullmatch(left[-1])
            if alone and index < len(words) and words[index] in ENDS:
                index += 1
            continue
        if word == "\n" and left and left[-1] == "\n":
            continue
        left.append(word)
    return left


def _assigns(word: str, variables: frozenset[str]) -> bool:
    match = re.match(r"(?:-e=?|--env=|Environment=)?([A-Za-z_]\w*)=", word)
    return match is not None and match[1] in variables


def _without(known: Mapping[str, str | None], names: frozenset[str]) -> dict[str, str | None]:
    return {key: value for key, value in known.items() if key not in names}


# --- the command that a file stands for -----------------------------------------------------------------------


def command_in_file(text: str, name: str = "", *, service: str | None = None) -> str | None:
    r"""`vllm serve MODEL --flag value ...` as the file starts it, without secrets; None when it can't be told.

    >>> command_in_file("model: m\nmax-model-len: 8192\n", "vllm.yaml")
    'vllm serve m --max-model-len 8192'
    """
    kind = detect(text, name)
    if kind is None:
        return None
    try:
        values = _own_words(_EDITORS[kind], text.removeprefix("\ufeff"), service)
    except RewriteError:
        return None
    if values[:2] == ["vllm", "serve"]:
        values = values[2:]
    elif values[:1] == ["serve"]:
        values = values[1:]
    return " ".join(["vllm", "serve", *(_word(value) for value in _public(values))])


def _public(values: Sequence[str]) -> Iterator[str]:
    index = 0
    while index < len(values):
        word = values[index]
        if is_flag(word) and SECRET.search(flag_name(word).replace("-", "_")):
            index = flag_end(values, index, len(values))
            continue
        yield word
        index += 1


def _word(value: str) -> str:
    """A word as a shell reads it; variables stay variables."""
    return value if re.fullmatch(r"[\w./:=,@%+${}-]+", value) else shlex.quote(value)
