"""Kubernetes manifests of any kind, one or many documents, and other YAML that holds a container.

Finds the container that runs vLLM; changes its command or args, `env`, the memory volume at /dev/shm, its memory limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
)
from diag.fixes.rewrite.yamltext import (
    ListNode,
    MapNode,
    Node,
    Path,
    Scalar,
    YamlFile,
    find,
    own_entry,
    read,
    scalar,
    text_of,
    walk,
)

_SHM = "/dev/shm"  # noqa: S108 - a mount point in the container


@dataclass(frozen=True, slots=True)
class _Place:
    """A container; `pod` is the path of the pod around it, None in a file that is no manifest."""

    path: Path
    node: MapNode
    pod: Path | None
    names: tuple[str, ...]


def edit(text: str, change: Change, service: str | None) -> list[Splice]:
    """The splices that make a change. Raises RewriteError, or CannotPutError for what a manifest has no place for."""
    file = read(text)
    place = _container(file, service)
    if is_container_setting(change):
        return _set_container(file, place, change)
    if change.env is not None:
        command = _launch(file, place.node).command
        inside = set_script_variable(command, change.env, change.to) if command else None
        if inside is not None:
            return inside
        return set_variable(file, place.node, "env", change.env, change.to, named=True)
    assert change.flag is not None
    return set_flag(_launch(file, place.node).words, change.flag, change.to)


def seen(text: str, service: str | None) -> Seen:
    """What the file says, for the check."""
    file = read(text)
    place = _container(file, service)
    data = file.data()
    body = _inside(data, place.path)
    words = seen_words(body.pop("command", None), body.pop("args", None))
    variables = seen_variables(body.pop("env", None))
    container = {}
    limits = inner(body, "resources", "limits")
    if "memory" in limits:
        container["--memory"] = plain_text(limits.pop("memory"))
    size = _pop_shm(body, _inside(data, place.pod) if place.pod is not None else None)
    if size is not None:
        container["--shm-size"] = size
    return Seen(words=words, env=variables, container=container, rest=data)


def arguments(text: str, service: str | None) -> Words:
    """vLLM's words."""
    file = read(text)
    return _launch(file, _container(file, service).node).words


def has_container(file: YamlFile) -> bool:
    """Whether anything in the file runs vLLM."""
    return next(_candidates(file), None) is not None


# --- finding --------------------------------------------------------------------------------------------------


def _container(file: YamlFile, wanted: str | None) -> _Place:
    places = list(_candidates(file))
    if wanted is not None:
        chosen = [place for place in places if wanted in place.names]
        if not chosen:
            names = ", ".join(place.names[0] for place in places if place.names) or "none"
            raise RewriteError(f"no container {wanted!r} runs vLLM", hint=f"there are {names}")
        places = chosen
    if len(places) > 1:
        names = ", ".join("/".join(reversed(place.names)) or str(place.path) for place in places)
        raise RewriteError(f"several containers run vLLM: {names}", hint="name one with --service")
    if not places:
        raise RewriteError("no container runs vLLM")
    return places[0]


def _candidates(file: YamlFile) -> Iterator[_Place]:
    """Containers of pods that run vLLM; without any, mappings with a command that does."""
    pods = list(_in_pods(file))
    yield from pods or _elsewhere(file)


def _in_pods(file: YamlFile) -> Iterator[_Place]:
    for path, node in walk(file):
        pair = find(node, "containers")
        if pair is None or not isinstance(pair[1], ListNode):
            continue
        owner = text_of(file.at((path[0], "metadata", "name")))
        for index, body in enumerate(pair[1].value):
            if isinstance(body, MapNode) and _runs_vllm(body):
                own = find(body, "name")
                names = (text_of(own[1]) if own else None, owner)
                yield _Place((*path, "containers", index), body, path, tuple(filter(None, names)))


def _elsewhere(file: YamlFile) -> Iterator[_Place]:
    for path, node in walk(file):
        if not isinstance(node, MapNode) or not (find(node, "command") or find(node, "args")):
            continue
        if _runs_vllm(node):
            yield _Place(path, node, None, (str(path[-1]),))


def _runs_vllm(node: Node) -> bool:
    words: list[str] = []
    for key in ("command", "args"):
        pair = find(node, key)
        if pair is not None and isinstance(pair[1], ListNode):
            words += [str(item.value) for item in pair[1].value if isinstance(item, Scalar)]
        elif pair is not None and isinstance(pair[1], Scalar):
            words.append(str(pair[1].value))
    image = find(node, "image")
    if not words and image is None:
        return False
    return starts_vllm(words, text_of(image[1]) if image else None)


def _launch(file: YamlFile, node: MapNode) -> Launch:
    segments: list[Segment] = []
    found: dict[str, Segment] = {}
    for key in ("command", "args"):
        pair = own_entry(file, node, key)
        segment = yaml_segment(file, pair[1]) if pair else None
        if segment is not None:
            found[key] = segment
            segments.append(segment)
    image = find(node, "image")
    own = starts_vllm((), text_of(image[1]) if image else None) and "command" not in found
    return launch(segments, own_entry_point=own, last=found.get("args"))


# --- the container's own settings -------------------------------------------------------------------------------


def _set_container(file: YamlFile, place: _Place, change: Change) -> list[Splice]:
    flag = (change.flag or "").split("=")[0]
    if change.to is None:
        raise CannotPutError(f"{flag} has no counterpart here that could be taken out")
    wanted = quantity(written(change.to))
    if flag == "--shm-size" and place.pod is not None:
        pod = file.at(place.pod)
        assert isinstance(pod, MapNode)
        return _set_shm(file, pod, place.node, wanted)
    if flag == "--memory":
        limits = find(place.node, "resources")
        limits = find(limits[1], "limits") if limits else None
        memory = find(limits[1], "memory") if limits else None
        if memory is not None:
            now = text_of(memory[1])
            return [] if now == wanted else [file.replace(memory[1], wanted, as_text=True)]
        if limits is not None and isinstance(limits[1], MapNode) and limits[1].value:
            return [file.add_entry(limits[1], "memory", wanted)]
        raise CannotPutError(f"set resources.limits.memory of the container to {wanted}")
    raise CannotPutError(f"{change.flag} is docker's; look for its counterpart in the pod's spec")


def quantity(size: str) -> str:
    """A size as Kubernetes writes it.

    >>> quantity("16g"), quantity("512mb"), quantity("8Gi")
    ('16Gi', '512Mi', '8Gi')
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b?", size, re.IGNORECASE)
    return f"{match[1]}{match[2].upper()}i" if match else size


def _set_shm(file: YamlFile, pod: MapNode, container: MapNode, size: str) -> list[Splice]:
    volume = _shm_volume(pod, container)
    if volume is None:
        return _add_shm(file, pod, container, size)
    empty = find(volume, "emptyDir")
    if empty is None:
        raise CannotPutError(f"{_SHM} is mounted from a volume that is no emptyDir; give it {size}")
    limit = find(empty[1], "sizeLimit")
    now = text_of(limit[1]) if limit else None
    if limit is None or now is None:
        raise CannotPutError(f"{_SHM} is a volume without a size limit already")
    if now == size:
        return []
    if large_enough(now, size):
        raise CannotPutError(f"{_SHM} has {now} already")
    return [file.replace(limit[1], size, as_text=True)]


def _shm_volume(pod: MapNode, container: MapNode) -> Node | None:
    mounts, volumes = find(container, "volumeMounts"), find(pod, "volumes")
    for mount in _items(mounts):
        path, name = find(mount, "mountPath"), find(mount, "name")
        if path is None or name is None or (text_of(path[1]) or "").rstrip("/") != _SHM:
            continue
        for volume in _items(volumes):
            own = find(volume, "name")
            if own is not None and text_of(own[1]) == text_of(name[1]):
                return volume
    return None


def _items(pair: tuple[Node, Node] | None) -> list[Node]:
    return list(pair[1].value) if pair is not None and isinstance(pair[1], ListNode) else []


def _add_shm(file: YamlFile, pod: MapNode, container: MapNode, size: str) -> list[Splice]:
    taken = [find(volume, "name") for volume in _items(find(pod, "volumes"))]
    names = {text_of(pair[1]) for pair in taken if pair}
    name = "shm" if "shm" not in names else "dshm"
    mount = f"name: {name}\nmountPath: {_SHM}"
    volume = f"name: {name}\nemptyDir:\n  medium: Memory\n  sizeLimit: {scalar(size)}"
    return [
        _add_item(file, container, "volumeMounts", mount),
        _add_item(file, pod, "volumes", volume),
    ]


def _add_item(file: YamlFile, owner: MapNode, key: str, item: str) -> Splice:
    pair = own_entry(file, owner, key)
    if pair is None:
        return file.add_entry(owner, key, "\n- " + item.replace("\n", "\n  "))
    if not isinstance(pair[1], ListNode) or not pair[1].value:
        return file.fill(*pair, "- " + item.replace("\n", "\n  "))
    if pair[1].flow_style:
        raise CannotPutError(f"add to {key}: {item!r}")
    return file.insert_raw(pair[1], len(pair[1].value) - 1, [item])


def _pop_shm(body: dict[str, Any], pod: dict[str, Any] | None) -> str | None:
    """The size of the volume at /dev/shm, which is taken out of both; None where there is none."""
    mounts, volumes = _list(body, "volumeMounts"), _list(pod or {}, "volumes")
    found = None
    for mount in [
        item for item in mounts if plain_text(inner(item).get("mountPath")).rstrip("/") == _SHM
    ]:
        mounts.remove(mount)
        for volume in [item for item in volumes if inner(item).get("name") == mount.get("name")]:
            volumes.remove(volume)
            found = plain_text(inner(volume, "emptyDir").get("sizeLimit"))
    return found


def _list(owner: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """A list of mappings; one that is missing or null is put there, so that files with and without it compare."""
    items = owner.get(key)
    if not isinstance(items, list):
        items = owner[key] = []
    return items


def _inside(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data
