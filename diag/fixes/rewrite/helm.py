"""Values of the vLLM production-stack chart: `servingEngineSpec.modelSpec[]` with `vllmConfig`, `env`, `shmSize`.

A flag with a key of its own goes there, unless `extraArgs`, which the chart passes on last, has it; others go to
`extraArgs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diag.errors import RewriteError
from diag.facts.args import is_flag
from diag.facts.model import Value
from diag.fixes.command import flag_name, written
from diag.fixes.flags import takes
from diag.fixes.model import Change
from diag.fixes.rewrite.arguments import Words, set_flag
from diag.fixes.rewrite.container import (
    ListSegment,
    large_enough,
    plain_text,
    seen_variables,
    set_variable,
)
from diag.fixes.rewrite.kubernetes import quantity
from diag.fixes.rewrite.model import (
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
    same,
)
from diag.fixes.rewrite.yamltext import (
    ListNode,
    MapNode,
    Node,
    YamlFile,
    find,
    is_empty,
    own_entry,
    quoted,
    read,
    text_of,
)

_CONFIG = "vllmConfig"
_EXTRA = "extraArgs"
# The keys that the chart's templates turn into flags.
_KEYS = {
    "max-model-len": "maxModelLen",
    "dtype": "dtype",
    "tensor-parallel-size": "tensorParallelSize",
    "pipeline-parallel-size": "pipelineParallelSize",
    "max-num-seqs": "maxNumSeqs",
    "gpu-memory-utilization": "gpuMemoryUtilization",
    "max-loras": "maxLoras",
    "enable-prefix-caching": "enablePrefixCaching",
    "enable-chunked-prefill": "enableChunkedPrefill",
}
_ONLY_WITH_RAY = "pipelineParallelSize"


def edit(text: str, change: Change, service: str | None) -> list[Splice]:
    """The splices that make a change. Raises RewriteError, or CannotPutError for what the chart has no value for."""
    file = read(text)
    _, spec = _model(file, service)
    if is_container_setting(change):
        return _set_container(file, spec, change)
    if change.env is not None:
        return set_variable(file, spec, "env", change.env, change.to, named=True)
    assert change.flag is not None
    return _set_flag(file, spec, change.flag, change.to)


def seen(text: str, service: str | None) -> Seen:
    """What the file says, for the check."""
    file = read(text)
    index, _ = _model(file, service)
    data = file.data()
    spec: dict[str, Any] = data[0]["servingEngineSpec"]["modelSpec"][index]
    config = spec.pop(_CONFIG, None)
    config = dict(config) if isinstance(config, dict) else {}
    extra = config.pop(_EXTRA, None)
    words = _as_flags({key: plain_text(value) for key, value in config.items()})
    words += [plain_text(item) for item in extra] if isinstance(extra, list) else []
    container = {}
    for flag, key in (("--shm-size", "shmSize"), ("--memory", "limitMemory")):
        if key in spec:
            container[flag] = plain_text(spec.pop(key))
    return Seen(
        words=tuple(words),
        env=seen_variables(spec.pop("env", None)),
        container=container,
        rest=data,
    )


def arguments(text: str, service: str | None) -> Sequence[str]:
    """vLLM's words as the chart makes them."""
    file = read(text)
    _, spec = _model(file, service)
    model = find(spec, "modelURL")
    words = [text_of(model[1]) or ""] if model else []
    config = find(spec, _CONFIG)
    pairs = config[1].value if config and isinstance(config[1], MapNode) else []
    known = {
        str(key.value): text_of(value) or "" for key, value in pairs if key.value in _KEYS.values()
    }
    words += _as_flags(known)
    extra = find(config[1], _EXTRA) if config else None
    if extra and isinstance(extra[1], ListNode):
        words += ListSegment(file, extra[1]).values
    return words


def _as_flags(config: dict[str, str]) -> list[str]:
    flags = {key: flag for flag, key in _KEYS.items()}
    words = []
    for key, value in config.items():
        name = flags.get(key, key)
        if value in ("true", "false"):
            words.append(f"--{name}" if value == "true" else f"--no-{name}")
        else:
            words += [f"--{name}", value]
    return words


def _model(file: YamlFile, wanted: str | None) -> tuple[int, MapNode]:
    specs = file.at((0, "servingEngineSpec", "modelSpec"))
    models = [
        (index, item, _name(item))
        for index, item in enumerate(specs.value if isinstance(specs, ListNode) else [])
        if isinstance(item, MapNode)
    ]
    if wanted is not None:
        chosen = [model for model in models if model[2] == wanted]
    else:
        chosen = [model for model in models if not _is_off(model[1])]
    names = ", ".join(model[2] for model in models)
    if not chosen:
        problem = f"no model {wanted!r}" if wanted else "no model that is switched on"
        raise RewriteError(f"modelSpec has {problem}", hint=f"it has {names or 'none'}")
    if len(chosen) > 1:
        raise RewriteError(f"there are several models: {names}", hint="name one with --service")
    return chosen[0][:2]


def _name(spec: MapNode) -> str:
    pair = find(spec, "name")
    return (text_of(pair[1]) if pair else None) or "?"


def _is_off(spec: MapNode) -> bool:
    pair = find(spec, "enabled")
    return pair is not None and text_of(pair[1]) == "false"


def _set_flag(file: YamlFile, spec: MapNode, flag: str, value: Value | None) -> list[Splice]:
    pair = own_entry(file, spec, _CONFIG)
    config = pair[1] if pair else None
    extra = own_entry(file, config, _EXTRA) if isinstance(config, MapNode) else None
    key = _KEYS.get(flag_name(flag))
    if key == _ONLY_WITH_RAY and find(spec, "raySpec") is None:
        key = None
    listed = ListSegment(file, extra[1]) if extra and isinstance(extra[1], ListNode) else None
    if listed is not None and (key is None or _has(listed.values, flag)):
        slots = [(listed, index) for index in range(len(listed.values))]
        return set_flag(Words(slots, 0, len(slots), listed), flag, value)
    if key is not None:
        return _set_key(file, spec, pair, key, value)
    if value is None or value is False:
        return []
    words = [flag] if takes(flag) == "switch" or value is True else [flag, written(value)]
    shown = f"[{', '.join(quoted(word) for word in words)}]"
    if extra is not None:
        raise RewriteError(f"{_EXTRA} is no list (line {file.line(extra[0])})")
    return _put(file, spec, pair, _EXTRA, shown)


def _has(values: Sequence[str], flag: str) -> bool:
    name = flag_name(flag)
    return any(is_flag(word) and flag_name(word) in (name, f"no-{name}") for word in values)


def _set_key(
    file: YamlFile, spec: MapNode, config: tuple[Node, Node] | None, key: str, value: Value | None
) -> list[Splice]:
    known = own_entry(file, config[1], key) if config and isinstance(config[1], MapNode) else None
    shown = (
        None if value is None else str(value).lower() if isinstance(value, bool) else written(value)
    )
    if known is None:
        return [] if shown is None else _put(file, spec, config, key, shown)
    assert config is not None
    if shown is None:
        return [file.remove_entry(config[1], key)]
    return [] if same(text_of(known[1]), value) else [file.replace(known[1], shown, as_text=False)]


def _put(
    file: YamlFile, spec: MapNode, config: tuple[Node, Node] | None, key: str, shown: str
) -> list[Splice]:
    """A new key of vllmConfig, which may not be there yet."""
    if config is None:
        return [file.add_entry(spec, _CONFIG, f"\n{key}: {shown}")]
    if is_empty(config[1]) or not isinstance(config[1], MapNode):
        return [file.fill(*config, f"{key}: {shown}")]
    return [file.add_entry(config[1], key, shown)]


def _set_container(file: YamlFile, spec: MapNode, change: Change) -> list[Splice]:
    flag = (change.flag or "").split("=")[0]
    key = {"--shm-size": "shmSize", "--memory": "limitMemory"}.get(flag)
    if key is None or change.to is None:
        raise CannotPutError(f"the chart has no value for {flag}")
    config = find(spec, _CONFIG)
    if key == "shmSize" and (config is None or find(config[1], "tensorParallelSize") is None):
        raise CannotPutError(
            "the chart mounts memory at /dev/shm only when vllmConfig.tensorParallelSize is set"
        )
    wanted = quantity(written(change.to))
    pair = own_entry(file, spec, key)
    if pair is None:
        return [file.add_entry(spec, key, quoted(wanted))]
    now = text_of(pair[1])
    if now == wanted:
        return []
    if key == "shmSize" and now and large_enough(now, wanted):
        raise CannotPutError(f"{key} is {now} already")
    return [file.replace(pair[1], wanted, as_text=True)]
