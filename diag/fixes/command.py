"""The user's own command line with a change made to it, and a command rebuilt from vLLM's "non-default args" line.

In: `vllm serve M --max-model-len 8192 | tee log` and changes. Out: the same line, one flag replaced or added, the
rest as it was written. Understands `python -m vllm.entrypoints...`, `docker run ... IMAGE ...`, variables in front.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diag.facts.args import asked_args, is_flag
from diag.facts.model import Facts, Value
from diag.fixes.flags import takes
from diag.fixes.model import Change
from diag.units import GIB

MAX_COMMAND = 20_000  # characters

_CONTINUATION = re.compile(r"[ \t]*[\\^`][ \t]*\r?\n[ \t]*")
_WORD = re.compile(
    r"""(?:\d?(?:>>|>&|>|<)&?\d?|\|\|?|&&|&|;|\n)        # shell operators
    |(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"|&;<>\\])+   # a word, quoted parts included
    |['"\\].*""",  # an open quote takes the rest
    re.VERBOSE | re.DOTALL,
)
OPERATOR = re.compile(r"\d?(?:>>|>&|>|<)&?\d?|\|\|?|&&|&|;|\n")
_REDIRECT = re.compile(r"\d?(?:>>|>&|>|<)&?\d?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"['\"]?\$\{?(\w+)\}?['\"]?")
_ENTRYPOINT = re.compile(r"vllm\.entrypoints\.[\w.]+|\S*/api_server\.py|api_server\.py")
_DOCKER = ("docker", "podman", "nerdctl")
_DOCKER_SWITCHES = frozenset(
    "-d -i -t -it -ti -dit -itd --detach --interactive --tty --rm --privileged --init --read-only --no-healthcheck "
    "-P --publish-all --oom-kill-disable --sig-proxy".split()
)
DOCKER_FLAGS = frozenset({"--shm-size", "--ipc", "--memory", "--memory-swap", "--gpus"})
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-n": "nnodes",
    "-cc": "compilation-config",
}
_SAME = {
    "device-memory-utilization": "gpu-memory-utilization",
    "kv-cache-memory": "kv-cache-memory-bytes",
}
SECRET = re.compile(r"api_key|token$|password|secret", re.IGNORECASE)
_FRONT = ("sudo", "env", "exec", "nohup", "time", "numactl")


@dataclass(frozen=True, slots=True)
class Given:
    """A flag of vLLM's, or a variable set in front of it, as the user wrote it. `value` None: nothing follows."""

    name: str
    value: str | None
    variable: bool = False


@dataclass(slots=True)
class Parts:
    """Where in the words what begins: `start` of the command, docker options, vLLM's own arguments, end."""

    words: list[str]
    start: int
    args: int
    end: int
    docker: int | None = None  # index after "run"
    image: int | None = None


def changed_command(command: str, changes: Iterable[Change]) -> str | None:
    """The command on one line with the changes made; None when it is no vLLM command or nothing could be changed.

    >>> changed_command("vllm serve m -tp 2 | tee x.log", [Change(flag="--max-model-len", to=4096)])
    'vllm serve m -tp 2 --max-model-len 4096 | tee x.log'
    """
    if len(command) > MAX_COMMAND:
        return None
    words = _WORD.findall(_CONTINUATION.sub(" ", command.strip()))
    before = list(words)
    for change in changes:
        parts = _parts(words)
        if parts is None:
            return None
        _apply(parts, change)
    if words == before:
        return None
    changed = " ".join(word.strip() or ";" for word in words)
    try:
        shlex.split(changed)
    except ValueError:  # a quote is open: the line was pasted incompletely
        return None
    return changed


def given(command: str) -> tuple[Given, ...]:
    """vLLM's own flags and the variables of a command, in order; nothing for other programs and their options.

    >>> [(item.name, item.value) for item in given("VLLM_USE_V1=0 vllm serve m --swap-space=8 -tp 2 | tee x")]
    [('VLLM_USE_V1', '0'), ('--swap-space', '8'), ('-tp', '2')]
    """
    if len(command) > MAX_COMMAND:
        return ()
    words = _WORD.findall(_CONTINUATION.sub(" ", command.strip()))
    parts = _parts(words)
    return () if parts is None else (*_given_variables(parts), *_given_flags(parts))


def _given_variables(parts: Parts) -> Iterator[Given]:
    front = parts.words[parts.start : parts.args if parts.docker is None else parts.docker]
    if parts.docker is not None:
        options = parts.words[parts.docker : parts.image]
        front = [
            word.split("=", 1)[1] if word.startswith(("--env=", "-e=")) else word
            for before, word in zip(["", *options], options, strict=False)
            if before in ("-e", "--env") or word.startswith(("--env=", "-e="))
        ]
    for word in front:
        plain = word.strip("'\"")
        if _ASSIGNMENT.match(plain):
            name, value = plain.split("=", 1)
            yield Given(name, value.strip("'\""), variable=True)


def _given_flags(parts: Parts) -> Iterator[Given]:
    words = parts.words
    for index in range(parts.args, parts.end):
        if not is_flag(words[index]):
            continue
        name, sign, value = words[index].partition("=")
        following = words[index + 1] if index + 1 < parts.end else None
        if not sign and following is not None and not is_flag(following):
            sign, value = "=", following
        yield Given(name, value.strip("'\"") if sign else None)


def command_from_facts(facts: Facts) -> str | None:
    """`vllm serve MODEL --flag value ...` rebuilt from a "non-default args" line; None without a readable one."""
    for event in facts.seen("cfg.non_default_args"):
        arguments = asked_args(event)
        model = arguments.get("model_tag") or arguments.get("model")
        if isinstance(model, str) and model:
            return " ".join(
                [
                    *_cpu_pool_variable(facts),
                    "vllm",
                    "serve",
                    shlex.quote(model),
                    *_as_flags(arguments),
                ]
            )
    return None


def _cpu_pool_variable(facts: Facts) -> list[str]:
    """VLLM_CPU_KVCACHE_SPACE as the log shows it: the CPU back end's pool was set, and not by a flag."""
    if facts.get("config.kv_cache_memory_bytes") is not None:
        return []
    for event in facts.seen("profile.cpu_explicit", "profile.cpu_explicit_fail"):
        pool = event.values.get("kv_gib")
        if isinstance(pool, (int, float)) and pool >= GIB:
            return [f"VLLM_CPU_KVCACHE_SPACE={round(pool / GIB)}"]
    return []


def _as_flags(arguments: Mapping[str, object]) -> list[str]:
    """Command line words for Python arguments; secrets are left out."""
    words: list[str] = []
    for key, value in arguments.items():
        if key in ("model", "model_tag", "dispatch_function", "subparser") or value is None:
            continue
        if SECRET.search(key) and key != "tokenizer":
            continue
        flag = "--" + str(key).replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (list, tuple)):
            words += [flag, *(shlex.quote(str(item)) for item in value)]
        elif isinstance(value, dict):
            words += [flag, shlex.quote(json.dumps(value, default=str))]
        else:
            words += [flag, shlex.quote(str(value))]
    return words


# --- finding the parts ----------------------------------------------------------------------------------------


def _parts(words: list[str]) -> Parts | None:
    """The parts of the first simple command that starts vLLM; None when there is none."""
    return next(vllm_commands(words), None)


def vllm_commands(words: list[str]) -> Iterator[Parts]:
    """The parts of every simple command among shell words that starts vLLM, in order."""
    start = 0
    while start < len(words):
        end = _end(words, start)
        parts = _vllm_part(words, start, end)
        if parts is not None:
            yield parts
        start = end + 1
        while end < len(words) and start < len(words) and _REDIRECT.fullmatch(words[end]):
            end = _end(words, start)  # what follows a redirection is a file, not a command
            start = end + 1


def _end(words: Sequence[str], start: int) -> int:
    """Index of the first shell operator at or after `start`."""
    for index in range(start, len(words)):
        if OPERATOR.fullmatch(words[index]):
            return index
    return len(words)


def _vllm_part(words: list[str], start: int, end: int) -> Parts | None:
    for index in range(start, end):
        name = words[index].rsplit("/", 1)[-1]
        if name in _DOCKER and "run" in words[index + 1 : end]:
            return _docker_part(words, start, words.index("run", index) + 1, end)
        if name == "vllm" and index + 1 < end and words[index + 1] == "serve":
            return Parts(words, start, index + 2, end)
        if _ENTRYPOINT.fullmatch(words[index]):
            return Parts(words, start, index + 1, end)
    return None


def _docker_part(words: list[str], start: int, options: int, end: int) -> Parts | None:
    """Options up to the image, then the container's arguments; only for an image or arguments that name vLLM."""
    index = options
    while index < end and words[index].startswith("-"):
        plain = words[index] in _DOCKER_SWITCHES or "=" in words[index]
        index += 1 if plain else 2
    if index >= end or not any(
        "vllm" in word for word in [*words[index:end], *_value(words, index)]
    ):
        return None
    return Parts(words, start, index + 1, end, docker=options, image=index)


def _value(words: Sequence[str], index: int) -> Iterator[str]:
    """The values that earlier words give to the variable at `index`: `IMAGE=vllm/vllm-openai` for `"$IMAGE"`."""
    match = _VARIABLE.fullmatch(words[index])
    if match:
        yield from (word for word in words[:index] if word.startswith(f"{match[1]}="))


# --- making a change ------------------------------------------------------------------------------------------


def _apply(parts: Parts, change: Change) -> None:
    if change.env is not None:
        _set_env(parts, change.env, change.to)
    elif change.flag is not None:
        if change.flag.split("=")[0] in DOCKER_FLAGS:
            _set_docker_flag(parts, change.flag, change.to)
        else:
            _set_flag(parts, change.flag, change.to)


def flag_name(word: str) -> str:
    """A flag's plain name: `--max_model_len=8` and `-tp` become `max-model-len` and `tensor-parallel-size`."""
    head = word.split("=", 1)[0]
    plain = _SHORT.get(head) or head.lstrip("-").replace("_", "-").lower()
    return _SAME.get(plain, plain)


def _set_flag(parts: Parts, flag: str, value: Value | None) -> None:
    words, wanted = parts.words, flag_name(flag)
    negated = f"no-{wanted}"
    found = [
        index
        for index in range(parts.args, parts.end)
        if is_flag(words[index]) and flag_name(words[index]) in (wanted, negated)
    ]
    for index in reversed(found[1:]):  # the last of several counts; keep one
        del words[index : flag_end(words, index, parts.end)]
        parts.end = _end(words, parts.start)
    switch = takes(flag) == "switch" or isinstance(value, bool)
    if not found:
        if value is not None and value is not False:
            words[parts.end : parts.end] = [flag] if switch else [flag, _quoted(value)]
        return
    index = found[0]
    if value is None or value is False or switch or flag_name(words[index]) == negated:
        del words[index : flag_end(words, index, parts.end)]
        if value is not None and value is not False:
            words[index:index] = [flag] if switch else [flag, _quoted(value)]
        return
    if "=" in words[index]:
        words[index] = f"{words[index].split('=', 1)[0]}={_quoted(value)}"
        return
    stop = values_end(words, index, parts.end)
    words[index + 1 : stop] = [_quoted(value)]


def values_end(words: Sequence[str], index: int, end: int) -> int:
    """Index after the values of the flag at `index`."""
    if "=" in words[index]:
        return index + 1
    stop = index + 1
    limit = end if takes("--" + flag_name(words[index])) == "list" else min(end, index + 2)
    while stop < limit and not is_flag(words[stop]):
        stop += 1
    return stop


def flag_end(words: Sequence[str], index: int, end: int) -> int:
    """Index after the flag at `index` and what belongs to it."""
    name = flag_name(words[index])
    if takes(f"--{name}") == "switch" or takes(f"--{name.removeprefix('no-')}") == "switch":
        return index + 1 + int(spoken(words, index, end))
    return values_end(words, index, min(end, _end(words, index + 1)))


def spoken(words: Sequence[str], index: int, end: int) -> bool:
    """Whether the switch at `index` is followed by its truth value: `--enforce-eager True`."""
    return index + 1 < end and words[index + 1].strip("'\"").lower() in ("true", "false")


def _set_env(parts: Parts, name: str, value: Value | None) -> None:
    words = parts.words
    assignment = None if value is None else f"{name}={_quoted(value)}"
    if parts.docker is not None and parts.image is not None:
        _set_docker_env(parts, name, assignment)
        return
    for index in range(parts.start, parts.args):
        if words[index].startswith(f"{name}="):
            words[index : index + 1] = [] if assignment is None else [assignment]
            return
    first = parts.start
    while first < parts.args and (_ASSIGNMENT.match(words[first]) or words[first] in _FRONT[:2]):
        first += 1
    if assignment is not None:
        words.insert(first, assignment)
    else:
        words[first:first] = ["env", "-u", name]


def _set_docker_env(parts: Parts, name: str, assignment: str | None) -> None:
    words = parts.words
    assert parts.docker is not None
    assert parts.image is not None
    for index in range(parts.docker, parts.image):
        word = words[index]
        if word in ("-e", "--env") and words[index + 1].strip("'\"").split("=")[0] == name:
            words[index : index + 2] = [] if assignment is None else [word, assignment]
            return
        if word.startswith((f"--env={name}=", f"-e={name}=")):
            words[index : index + 1] = [] if assignment is None else ["-e", assignment]
            return
    if assignment is not None:
        words[parts.docker : parts.docker] = ["-e", assignment]


def _set_docker_flag(parts: Parts, flag: str, value: Value | None) -> None:
    """An option of `docker run` itself; nothing to do for another launcher."""
    if parts.docker is None or parts.image is None:
        return
    words, name = parts.words, flag.split("=", 1)[0]
    for index in range(parts.docker, parts.image):
        if words[index] == name:
            del words[index : index + 2]
            break
        if words[index].startswith(f"{name}="):
            del words[index]
            break
    if value is not None:
        words[parts.docker : parts.docker] = [f"{name}={value}"]


def written(value: Value) -> str:
    """A value as a command or a variable spells it.

    >>> written(0.9), written(True), written(16)
    ('0.9', '1', '16')
    """
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quoted(value: Value) -> str:
    return shlex.quote(written(value))
