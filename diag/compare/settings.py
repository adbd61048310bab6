"""Settings and lines of the environment that differ between two starts, and which of them can have moved a term.

In: the Diagnosis of each. Out: SettingChange rows; a value that no log prints is the release's default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from diag.compare.terms import facts_of
from diag.facts.args import flags
from diag.facts.model import Fact, Value
from diag.fixes.command import flag_name
from diag.memory.defaults import batch_limits, default_of
from diag.release import parse_release
from diag.report.comparison import SettingChange
from diag.report.model import Diagnosis

# The flags of config facts, and the terms that each has a part in.
_SETTINGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model": ("model", ("weights", "activation", "need", "graphs")),
    "dtype": ("--dtype", ("weights", "activation", "need")),
    "quantization": ("--quantization", ("weights",)),
    "max_model_len": ("--max-model-len", ("need", "activation")),
    "kv_cache_dtype": ("--kv-cache-dtype", ("need",)),
    "block_size": ("--block-size", ("need",)),
    "gpu_memory_utilization": ("--gpu-memory-utilization", ("requested", "pool")),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes", ("pool",)),
    "num_gpu_blocks_override": ("--num-gpu-blocks-override", ("pool",)),
    "max_num_batched_tokens": ("--max-num-batched-tokens", ("activation", "tried")),
    "max_num_seqs": ("--max-num-seqs", ("activation", "graphs", "captured", "tried")),
    "enable_chunked_prefill": ("--enable-chunked-prefill", ("activation",)),
    "limit_mm_per_prompt": ("--limit-mm-per-prompt", ("activation", "tried")),
    "enforce_eager": ("--enforce-eager", ("graphs", "captured")),
    "enable_lora": ("--enable-lora", ("weights", "activation", "graphs")),
    "speculative": ("--speculative-config", ("weights", "need", "activation", "graphs")),
    "enable_prefix_caching": ("--enable-prefix-caching", ("need",)),
    "enable_sleep_mode": ("--enable-sleep-mode", ()),
    "enable_expert_parallel": ("--enable-expert-parallel", ("weights", "activation")),
    "cpu_offload": ("--cpu-offload-gb", ("weights",)),
    "swap_space": ("--swap-space", ()),
    "kv_offloading_size": ("--kv-offloading-size", ()),
    "tensor_parallel_size": (
        "--tensor-parallel-size",
        ("weights", "need", "non_torch", "activation"),
    ),
    "pipeline_parallel_size": ("--pipeline-parallel-size", ("weights", "need", "non_torch")),
    "data_parallel_size": ("--data-parallel-size", ("non_torch", "activation")),
}
_ENVIRONMENT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "config.backend": ("platform", ()),
    "device.name": ("device", ("total", "requested")),
    "vllm.engine": ("engine", ("activation", "graphs")),
    "vllm.model_runner": ("model runner", ()),
    "config.allocator": ("PYTORCH_ALLOC_CONF", ("free",)),
    "log.ranks": ("ranks in the log", ()),
    "host.ram_total": ("host RAM", ()),
    "host.ram_available": ("free host RAM", ()),
    "host.cgroup_limit": ("memory limit of the container", ()),
}
# Settings whose growth makes their terms larger, or smaller.
_RISING = frozenset(
    "--gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override --max-model-len "
    "--max-num-batched-tokens --max-num-seqs".split()
)
_FALLING = frozenset(("--tensor-parallel-size", "--pipeline-parallel-size", "--cpu-offload-gb"))
_LISTED = 3  # config facts that show that a log lists its settings at all


def changed_settings(good: Diagnosis, bad: Diagnosis) -> tuple[SettingChange, ...]:
    """Settings that differ: printed in both, or printed in one and known by the release's default in the other."""
    one, other = _config(good), _config(bad)
    rows = []
    for name, (flag, moves) in _SETTINGS.items():
        row = _differing(
            flag, one.get(name), other.get(name), _default(good, name), _default(bad, name)
        )
        if (
            row is not None
            and (len(one) >= _LISTED or name in one)
            and (len(other) >= _LISTED or name in other)
        ):
            rows.append(replace(row, moves=moves))
    known = {flag for flag, _ in _SETTINGS.values()}
    return (*rows, *_other_words(good, bad, known))


def _config(diagnosis: Diagnosis) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    for item in facts_of(diagnosis):
        name = item.name.removeprefix("config.")
        if item.name.startswith("config.") and name in _SETTINGS:
            found.setdefault(name, item)
    return found


def _default(diagnosis: Diagnosis, name: str) -> Value | None:
    """The release's default of a setting; None when that is unknown or depends on something unknown."""
    environment = diagnosis.environment
    version = parse_release(environment.vllm_version)
    if version is None:
        return None
    if name in ("max_num_batched_tokens", "max_num_seqs"):
        totals = [item.total_bytes for item in diagnosis.ledger.ranks if item.total_bytes]
        limits = batch_limits(
            version,
            environment.engine,
            total=next(iter(totals), None),
            device_name=environment.device,
        )
        if limits is None:
            return None
        return limits.tokens if name == "max_num_batched_tokens" else limits.seqs
    return _PLAIN_DEFAULTS.get(name, default_of(name, version, environment.engine))


_PLAIN_DEFAULTS: Mapping[str, Value] = {
    "enforce_eager": False,
    "enable_lora": False,
    "enable_sleep_mode": False,
    "enable_expert_parallel": False,
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "cpu_offload": 0,
}


def _differing(
    name: str,
    one: Fact | None,
    other: Fact | None,
    one_default: Value | None,
    other_default: Value | None,
) -> SettingChange | None:
    left = one.value if one is not None else one_default
    right = other.value if other is not None else other_default
    if left is None and right is None:
        return None
    if (
        left == right
        or (str(left) == "None" and right is None)
        or (left is None and str(right) == "None")
    ):
        return None
    shown = one or other
    return SettingChange(
        name=name,
        good=left,
        bad=right,
        unit=shown.unit if shown is not None else _unit(left if left is not None else right),
        good_default=one is None and left is not None,
        bad_default=other is None and right is not None,
    )


def _unit(value: Value | None) -> str:
    if isinstance(value, bool):
        return "bool"
    return "count" if isinstance(value, int) else "ratio" if isinstance(value, float) else "text"


def _other_words(good: Diagnosis, bad: Diagnosis, known: Iterable[str]) -> Iterable[SettingChange]:
    """Flags and variables of the two command lines that no fact stands for."""
    one, other = good.environment.command, bad.environment.command
    if not one or not other:
        return
    skipped = {*known, "--host", "--port", "--api-key", "--served-model-name"}
    left, right = _words(one), _words(other)
    for name in sorted({*left, *right} - skipped):
        if left.get(name) != right.get(name):
            yield SettingChange(name=name, good=left.get(name), bad=right.get(name))


def _words(command: str) -> dict[str, str]:
    """Flags and leading variables of a command line by name; secrets are not among them."""
    found = {}
    for word in command.split():
        name, equals, value = word.partition("=")
        if word.startswith("-") or not equals or not name.replace("_", "").isalnum():
            continue
        if name.isupper() and not any(part in name for part in ("KEY", "TOKEN", "SECRET", "PASSW")):
            found[name] = value
    for setting in flags(command):
        if setting.key != "model":
            found[f"--{flag_name(f'-{setting.key}')}"] = setting.value
    return found


def changed_environment(good: Diagnosis, bad: Diagnosis) -> tuple[SettingChange, ...]:
    """Lines about machine and platform that both logs have and that differ."""
    one, other = facts_of(good), facts_of(bad)
    rows = []
    for fact, (name, moves) in _ENVIRONMENT.items():
        left, right = one.get(fact), other.get(fact)
        if left is None or right is None:
            continue
        row = _differing(name, left, right, None, None)
        if row is not None:
            rows.append(replace(row, moves=moves))
    versions = good.environment.vllm_version, bad.environment.vllm_version
    if versions[0] != versions[1] and None not in versions:
        rows.insert(0, SettingChange(name="vLLM", good=versions[0], bad=versions[1]))
    return tuple(rows)


def marked(rows: Iterable[SettingChange], moved: Mapping[str, int]) -> tuple[SettingChange, ...]:
    """Rows that move a term that explains the failure, and in its direction.

    Two defaults differ by the release, not by a hand.
    """
    return tuple(
        replace(
            row,
            explains=not (row.good_default and row.bad_default)
            and any(_pushes(row, moved[term]) for term in row.moves if term in moved),
        )
        for row in rows
    )


def _pushes(row: SettingChange, change: int) -> bool:
    """Whether a setting's change can have moved a term that way; a setting without a known direction can."""
    numbers = [value for value in (row.good, row.bad) if isinstance(value, (int, float))]
    sign = -1 if row.name in _FALLING else 1 if row.name in _RISING else 0
    if sign == 0 or len(numbers) < 2:
        return True
    return sign * (numbers[1] - numbers[0]) * change > 0
