"""What the user asked for: config dumps, argument lines and command lines -> config.* facts.

Samples: `Initializing a V1 LLM engine (v0.11.0) with config: model='m', max_seq_len=8192, dtype=torch.bfloat16, ...`,
`args: Namespace(model='m', swap_space=4, ...)`, `non-default args: {'max_model_len': 8192}`,
`vllm serve m --max-model-len 8192`. The engine's resolved configuration outranks what was asked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from diag.facts.model import Event, Fact, Value
from diag.log.model import LogLine
from diag.terms import Origin
from diag.units import GIB, parse_number, parse_short_count

MAX_ARGS = 200_000  # characters of one argument line that are read
MAX_CONTINUED = 80  # lines that a command with backslashes is read on for

_PAIR = re.compile(
    r"(?<![\w.])['\"]?(?P<key>[A-Za-z_]\w{1,60})['\"]?\s*[=:]\s*"
    r"(?P<value>'(?:[^'\\]|\\.){0,2000}'|\"(?:[^\"\\]|\\.){0,2000}\"|\{[^{}]{0,4000}\}|\[[^\[\]]{0,4000}\]|[^,\s(){}\[\]]{1,400})"
)
_TEXT = ("model", "dtype", "quantization", "kv_cache_dtype", "limit_mm_per_prompt")
_INTEGER = {
    "max_model_len": "tokens",
    "max_num_batched_tokens": "tokens",
    "block_size": "tokens",
    "max_num_seqs": "count",
    "tensor_parallel_size": "count",
    "pipeline_parallel_size": "count",
    "data_parallel_size": "count",
    "num_gpu_blocks_override": "blocks",
    "kv_cache_memory_bytes": "bytes",
}
_BOOLEAN = (
    "enforce_eager",
    "enable_lora",
    "enable_sleep_mode",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_expert_parallel",
)
_GIB = {
    "swap_space": "swap_space",
    "cpu_offload_gb": "cpu_offload",
    "kv_offloading_size": "kv_offloading_size",
}
_ALIASES = {
    "max_seq_len": "max_model_len",
    "model_tag": "model",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "device_memory_utilization": "gpu_memory_utilization",
    "num_speculative_tokens": "speculative_config",
    "speculative_model": "speculative_config",
    "device_config": "device",
    "use_v2_block_manager": "",
}
_FLAG = re.compile(r"--?[A-Za-z]")
COMMAND = re.compile(
    r"(?:vllm serve\b|-m vllm\.entrypoints\.[\w.]+|vllm/vllm-openai\S*|\bapi_server\.py)(?P<rest>.*)"
)
RESOLVED_ROWS = ("cfg.engine_v1", "cfg.engine_v0", "cfg.engine_old", "cfg.engine_oldest")
ASKED_ROWS = ("ext.args_namespace", "cfg.non_default_args")


@dataclass(frozen=True, slots=True)
class Setting:
    """One key as written, before typing."""

    key: str
    value: str


def pairs(text: str) -> Iterator[Setting]:
    """key=value and 'key': value pairs of a config dump, a Namespace or a dict, flat."""
    for match in _PAIR.finditer(text[:MAX_ARGS]):
        value = match["value"]
        cut = value[0] in "'\"" and value[-1] != value[0]  # by a pager or at the end of a paste
        if not cut:
            yield Setting(match["key"], value)


def flags(command: str) -> Iterator[Setting]:
    """Flags of a command line; a bare flag has the value "True". The word after `serve` is the model."""
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=False)
    except ValueError:  # an open quote in a pasted command
        words = command.split()
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else None
        if word == "serve" and following and not following.startswith("-"):
            yield Setting("model", following)
        if not is_flag(word):
            continue
        name, _, value = word.lstrip("-").partition("=")
        if not value:
            value = following if following is not None and not is_flag(following) else "True"
        key = name.replace("-", "_")
        if key.startswith("no_"):
            named = key[3:]
            key, value = named if named in _BOOLEAN else f"enable_{named}", "False"
        yield Setting(key, value)


def is_flag(word: str) -> bool:
    """Whether a word of a command is a flag and no value such as -1."""
    return _FLAG.match(word) is not None


def typed(setting: Setting) -> tuple[str, Value, str] | None:
    """(fact name, value, unit) of a setting; None for keys that don't matter, None values and odd text."""
    key = _ALIASES.get(setting.key, setting.key)
    value = setting.value.strip().strip("'\"")
    if value in ("None", "null", "") and key != "quantization":
        return None
    try:
        return _typed(key, value)
    except (ValueError, OverflowError):  # a number without end is no setting
        return None


def _typed(key: str, value: str) -> tuple[str, Value, str] | None:
    if key in _TEXT:
        return f"config.{key}", value.removeprefix("torch."), "text"
    if key in _INTEGER:
        number = parse_short_count(value)
        return (
            (f"config.{key}", number, _INTEGER[key])
            if number > 0 or key == "kv_cache_memory_bytes"
            else None
        )
    if key == "gpu_memory_utilization":
        return "config.gpu_memory_utilization", parse_number(value), "ratio"
    if key in _BOOLEAN:
        known = {"true": True, "false": False, "1": True, "0": False}.get(value.lower())
        return None if known is None else (f"config.{key}", known, "bool")
    if key in _GIB:
        return f"config.{_GIB[key]}", round(float(value) * GIB), "bytes"
    if key == "speculative_config":
        return "config.speculative", value[:400], "text"
    if key == "device" and value.lower() in (
        "cuda",
        "cpu",
        "tpu",
        "xpu",
        "npu",
        "neuron",
        "hpu",
        "rocm",
    ):
        return "config.backend", value.lower(), "text"
    return None


def _facts(settings: Iterator[Setting], line: int | None, origin: Origin) -> list[Fact]:
    found: dict[str, Fact] = {}
    for setting in settings:
        known = typed(setting)
        if known and known[0] not in found:
            name, value, unit = known
            found[name] = Fact(name=name, value=value, unit=unit, line=line, origin=origin)
    return list(found.values())


def from_event(event: Event) -> list[Fact]:
    """config.* facts of an argument or engine line; empty for other rows."""
    if event.row not in RESOLVED_ROWS and event.row not in ASKED_ROWS:
        return []
    asked = asked_args(event)
    if asked:
        return _facts(_top_level(asked), event.line.number, Origin.LOGGED)
    text = str(event.values.get("config") or event.values.get("args") or "")
    return _facts(pairs(text), event.line.number, Origin.LOGGED)


def _top_level(asked: Mapping[str, object]) -> Iterator[Setting]:
    """The settings themselves, not the keys of a nested dict."""
    for key, value in asked.items():
        yield Setting(str(key), str(value))


def from_command(
    command: str, line: int | None = None, origin: Origin = Origin.ASSUMED
) -> list[Fact]:
    """config.* facts of a command line, or an `LLM(...)` call, given by the user or printed in the log."""
    settings = list(flags(command))[::-1]  # the last of a repeated flag counts
    settings += pairs(command) if "(" in command else ()
    if "speculative" in command and not any(s.key.startswith("speculative") for s in settings):
        settings.append(Setting("speculative_config", "named in the command"))
    return _facts(iter(settings), line, origin)


def command_in(lines: Sequence[LogLine]) -> str | None:
    """The first vLLM command of a log (a shell prompt, a compose log, a start script), from its first word on."""
    for place, line in enumerate(lines):
        match = COMMAND.search(line.text)
        if match is None or line.level in ("ERROR", "DEBUG"):
            continue
        command = _continued(lines, place)
        if "--" in command[match.start("rest") :]:
            return command[match.start() :].strip()[:4000]
    return None


def _continued(lines: Sequence[LogLine], place: int) -> str:
    """A line and those it goes on in: a backslash at the end takes in the next one, as a shell does."""
    text = lines[place].text.rstrip()
    for line in islice(lines, place + 1, place + 1 + MAX_CONTINUED):
        if not text.endswith("\\"):
            break
        text = f"{text[:-1].rstrip()} {line.text.strip()}"
    return text.removesuffix("\\").rstrip()


def asked_args(event: Event) -> Mapping[str, object]:
    """The dict of a `non-default args` line as Python values; empty when it is none."""
    import ast

    try:
        value = ast.literal_eval(str(event.values.get("args", "")))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
