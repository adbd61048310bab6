"""Compose files: the service that runs vLLM, its entry point and command in any form, `environment`, `shm_size`."""

from __future__ import annotations

from typing import Any

from diag.errors import RewriteError
from diag.fixes.command import written
from diag.fixes.model import Change
from diag.fixes.rewrite.arguments import Segment, Words, set_flag
from diag.fixes.rewrite.container import (
    Launch,
    inner,
    large_enough,
    launch,
    plain_text,
    seen_variables,
    seen_words,
    set_script_variable,
    set_variable,
    starts_vllm,
    yaml_segment,
)
from diag.fixes.rewrite.model import (
    HOST_IPC,
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
    same,
)
from diag.fixes.rewrite.yamltext import (
    MapNode,
    Node,
    YamlFile,
    find,
    merged,
    own_entry,
    read,
    scalar,
    shared,
    text_of,
)

_KEYS = {
    "--shm-size": "shm_size",
    "--ipc": "ipc",
    "--memory": "mem_limit",
    "--memory-swap": "memswap_limit",
}
_LIMITS = ("deploy", "resources", "limits")


def edit(text: str, change: Change, service: str | None) -> list[Splice]:
    """The splices that make a change. Raises RewriteError, or CannotPutError for what compose has no place for."""
    file = read(text)
    name, node = _service(file, service)
    if is_container_setting(change):
        return _set_container(file, name, node, change)
    if change.env is not None:
        start = _launch_or_none(file, node)
        if start is not None and start.command is not None:
            inside = set_script_variable(start.command, change.env, change.to)
            if inside is not None:
                return inside
        return set_variable(file, node, "environment", change.env, change.to, named=False)
    assert change.flag is not None
    return set_flag(_launch(file, node).words, change.flag, change.to)


def seen(text: str, service: str | None) -> Seen:
    """What the file says, for the check."""
    file = read(text)
    name, _ = _service(file, service)
    data = file.data()
    body: dict[str, Any] = data[0]["services"][name]
    words = seen_words(body.pop("entrypoint", None), body.pop("command", None))
    variables = seen_variables(body.pop("environment", None))
    container = {flag: plain_text(body.pop(key)) for flag, key in _KEYS.items() if key in body}
    limits = inner(body, *_LIMITS)
    if "memory" in limits:
        container["--memory"] = plain_text(limits.pop("memory"))
    return Seen(words=words, env=variables, container=container, rest=data)


def arguments(text: str, service: str | None) -> Words:
    """vLLM's words."""
    file = read(text)
    return _launch(file, _service(file, service)[1]).words


def _service(file: YamlFile, wanted: str | None) -> tuple[str, MapNode]:
    services = file.at((0, "services"))
    if not isinstance(services, MapNode):
        raise RewriteError("the file has no services")
    found = {str(key.value): body for key, body in services.value if isinstance(body, MapNode)}
    if wanted is not None:
        if wanted not in found:
            raise RewriteError(
                f"there is no service {wanted!r}", hint=f"there are {', '.join(found) or 'none'}"
            )
        return wanted, found[wanted]
    likely = [name for name, body in found.items() if _runs_vllm(file, body)]
    if len(likely) > 1:
        raise RewriteError(
            f"several services run vLLM: {', '.join(likely)}", hint="name one with --service"
        )
    if not likely:
        raise RewriteError("no service runs vLLM", hint="name it with --service")
    return likely[0], found[likely[0]]


def _runs_vllm(file: YamlFile, node: MapNode) -> bool:
    words: list[str] = []
    for key in ("entrypoint", "command"):
        pair = find(node, key)
        segment = yaml_segment(file, pair[1]) if pair else None
        words += segment.values if segment else []
    image = find(node, "image")
    return starts_vllm(words, text_of(image[1]) if image else None)


def _launch_or_none(file: YamlFile, node: MapNode) -> Launch | None:
    try:
        return _launch(file, node)
    except RewriteError:
        return None


def _launch(file: YamlFile, node: MapNode) -> Launch:
    segments: list[Segment] = []
    for key in ("entrypoint", "command"):
        pair = own_entry(file, node, key)
        segment = yaml_segment(file, pair[1]) if pair else None
        if segment is not None:
            segments.append(segment)
    image = find(node, "image")
    own = starts_vllm((), text_of(image[1]) if image else None) and not find(node, "entrypoint")
    last = segments[-1] if find(node, "command") and segments else None
    return launch(segments, own_entry_point=own, last=last)


def _set_container(file: YamlFile, name: str, node: MapNode, change: Change) -> list[Splice]:
    flag = (change.flag or "").split("=")[0]
    key = _KEYS.get(flag)
    if key is None:
        raise CannotPutError(
            f"{change.flag} is not set by this file; see deploy.resources of {name}"
        )
    limits: Node | None = node
    for step in _LIMITS:
        pair = find(limits, step)
        limits = pair[1] if pair else None
    deployed = find(limits, "memory") if flag == "--memory" else None
    pair = deployed or find(node, key)
    now = text_of(pair[1] if pair else merged(node, key))
    if change.to is None:
        return (
            [file.remove_entry(node if deployed is None else limits, pair[0].value)] if pair else []
        )
    if same(now, change.to):
        return []
    ipc = find(node, "ipc")
    if flag == "--shm-size" and ipc and text_of(ipc[1]) == "host":
        raise CannotPutError(HOST_IPC)
    if flag == "--shm-size" and now and large_enough(now, written(change.to)):
        raise CannotPutError(f"{key} is {now} already")
    if pair is None:  # also where an anchor has it: the service's own entry outranks that
        near = next((near for near in ("command", "image") if find(node, near)), None)
        return [file.add_entry(node, key, scalar(written(change.to)), near)]
    if pair[1].start_mark.index < pair[0].end_mark.index:
        raise shared(key, file.line(pair[0]))
    return [file.replace(pair[1], written(change.to), as_text=True)]
