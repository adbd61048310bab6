"""The memory failures that vLLM's CPU back end can give, each as a command and the limits it runs under.

Sizes follow the machine: a pool larger than its memory, a share that another process leaves no room for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proving.tiny_model import Shape

GIB = 2**30
MIB = 2**20

MODELS: Mapping[str, Shape] = {
    "tiny": Shape(),
    "words": Shape(layers=2, hidden=128, vocabulary=64_000),
    "heavy": Shape(layers=14, hidden=2048, heads=16, inner=8192, vocabulary=32_000, weights=False),
    # About a quarter of the bytes of `heavy`, as its 4-bit checkpoint would have.
    "light": Shape(layers=3, hidden=2048, heads=16, inner=8192, vocabulary=16_000, weights=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Memory of the host as vLLM counts it, in bytes."""

    total: int
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What stands in for a smaller machine, in bytes; None: no limit.

    address_space: `ulimit -v` of the server. shared_memory: size of a /dev/shm of its own. resident: the fattest
    process is killed when all together use more, as the kernel does at a container's limit. held: memory that
    another process of ours holds meanwhile.
    """

    address_space: int | None = None
    shared_memory: int | None = None
    resident: int | None = None
    held: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the running server; `spare` bytes of address space are left to the worker before it is sent."""

    prompt_tokens: int
    prompt_logprobs: bool = False
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failure. `expected`: the classes that are right. `engines`: an offline program in place of a server."""

    name: str
    what: str
    expected: tuple[str, ...]
    model: str = "tiny"
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    request: Request | None = None
    engines: tuple[str, ...] = ()

    def command(self, port: int) -> str:
        """The command line a user would type."""
        if self.engines:
            return "python engines.py 1 2"
        words = [f"{name}={value}" for name, value in self.environment.items()]
        words += ["vllm", "serve", f"models/{self.model}", *self.arguments]
        if not MODELS[self.model].weights:
            words += ["--load-format", "dummy"]
        # Compiling the model takes a minute and is not what is tried here.
        words += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
        return shlex.join(words)


def all_cases(host: Host) -> tuple[Case, ...]:
    """Every case, sized for this machine."""
    return (*_pool_cases(host), *_host_cases(host), *_serving_cases())


def _pool_cases(host: Host) -> tuple[Case, ...]:
    short = ("--max-model-len", "4096")
    full_length = MODELS["tiny"].kv_bytes_per_token * 131_072  # 2 GiB
    too_long, nothing = ("kv.max_len_exceeds",), ("kv.no_blocks",)
    no_room = ("kv.free_below_target", "kv.alloc_oom")
    return (
        Case(
            name="length-env",
            what="pool of 1 GiB by VLLM_CPU_KVCACHE_SPACE, one request needs 2 GiB",
            expected=too_long,
            arguments=("--max-model-len", "131072"),
            environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
        Case(
            name="length-bytes",
            what="pool of 64 MiB by --kv-cache-memory-bytes, one request needs 512 MiB",
            expected=too_long,
            arguments=("--max-model-len", "32768", "--kv-cache-memory-bytes", "64M"),
        ),
        Case(
            name="length-share",
            what="small --gpu-memory-utilization, one request needs 2 GiB",
            expected=too_long,
            arguments=(
                "--max-model-len",
                "131072",
                "--gpu-memory-utilization",
                _share(GIB + full_length // 4, host),
            ),
        ),
        Case(
            name="zero-env",
            what="VLLM_CPU_KVCACHE_SPACE=0",
            expected=nothing,
            arguments=short,
            environment={"VLLM_CPU_KVCACHE_SPACE": "0"},
        ),
        Case(
            name="zero-bytes",
            what="--kv-cache-memory-bytes below one block",
            expected=nothing,
            arguments=(*short, "--kv-cache-memory-bytes", "1000"),
        ),
        Case(
            name="zero-share",
            what="--gpu-memory-utilization below what the worker itself takes",
            expected=nothing,
            arguments=(*short, "--gpu-memory-utilization", _share(300 * MIB, host)),
        ),
        Case(
            name="above-ram-env",
            what="VLLM_CPU_KVCACHE_SPACE above the machine's memory",
            expected=no_room,
            arguments=short,
            environment={"VLLM_CPU_KVCACHE_SPACE": "400"},
        ),
        Case(
            name="above-ram-bytes",
            what="--kv-cache-memory-bytes above the machine's memory",
            expected=no_room,
            arguments=(*short, "--kv-cache-memory-bytes", f"{3 * host.total // GIB}G"),
        ),
    )


def _host_cases(host: Host) -> tuple[Case, ...]:
    short = ("--max-model-len", "4096")
    wanted = int(0.6 * host.total)
    # Leaves the share less than it asks for by this much.
    held = max(0, host.available - wanted) + GIB
    small_pool = ("--kv-cache-memory-bytes", "256M")
    return (
        Case(
            name="busy-host",
            what="another process holds memory that the share asks for",
            expected=("kv.free_below_target", "base.other_process"),
            arguments=(*short, "--gpu-memory-utilization", "0.6"),
            limits=Limits(held=held),
        ),
        Case(
            name="pool-ulimit",
            what="ulimit -v too small for a pool of 4 GiB",
            expected=("kv.alloc_oom",),
            arguments=(*short, "--kv-cache-memory-bytes", "4G"),
            limits=Limits(address_space=5 * GIB),
        ),
        Case(
            name="buffers-ulimit",
            what="ulimit -v too small for the message buffers after the weights",
            expected=("host.oom_killed", "weights.too_big"),
            model="heavy",
            arguments=(*short, *small_pool),
            # The weights pass and the 160 MiB after them don't; with other libraries the weights may fail already.
            limits=Limits(address_space=MODELS["heavy"].weight_bytes + 1755 * MIB),
        ),
        Case(
            name="weights-ulimit",
            what="ulimit -v too small for the weights",
            expected=("weights.too_big", "host.oom_killed"),
            model="heavy",
            arguments=(*short, *small_pool),
            limits=Limits(address_space=3 * GIB),
        ),
        Case(
            name="weights-killed",
            what="killed at the memory limit while weights load",
            expected=("host.oom_killed",),
            model="heavy",
            arguments=(*short, *small_pool),
            limits=Limits(resident=5 * GIB // 2),
        ),
        Case(
            name="small-shm",
            what="8 MiB of /dev/shm with two ranks",
            expected=("host.shm",),
            arguments=(*short, *small_pool, "--tensor-parallel-size", "2"),
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            limits=Limits(shared_memory=8 * MIB),
        ),
        Case(
            name="second-engine",
            what="a second LLM in one program while the first holds its pool",
            expected=("alloc.not_released",),
            engines=(f"kv_cache_memory_bytes={held}", "gpu_memory_utilization=0.6"),
        ),
    )


def _serving_cases() -> tuple[Case, ...]:
    return (
        Case(
            name="prefill",
            what="no memory for a prompt of 24,000 tokens in one step",
            expected=("act.prefill",),
            arguments=(
                *("--max-model-len", "32768", "--max-num-batched-tokens", "32768"),
                *("--kv-cache-memory-bytes", "1G"),
            ),
            request=Request(prompt_tokens=24_000, spare=192 * MIB),
        ),
        Case(
            name="logprobs",
            what="no memory for prompt_logprobs over 64,000 words",
            expected=("act.logits_logprobs",),
            model="words",
            arguments=(
                *("--max-model-len", "16384", "--max-num-batched-tokens", "16384"),
                *("--kv-cache-memory-bytes", "512M"),
            ),
            request=Request(prompt_tokens=8_000, prompt_logprobs=True, spare=3 * GIB),
        ),
    )


def _share(size: int, host: Host) -> str:
    """--gpu-memory-utilization for about `size` bytes."""
    return f"{size / host.total:.3f}"


def read_host(
    node: Path = Path("/sys/devices/system/node/node0/meminfo"),
    whole: Path = Path("/proc/meminfo"),
) -> Host:
    """What vLLM reads: the first memory node, else the whole machine. Raises OSError, ValueError."""
    path = node if node.is_file() else whole
    found = {
        name: 1024 * int(amount)
        for name, amount in re.findall(
            r"(?m)([\w()]+):\s+(\d+) kB", path.read_text(encoding="utf-8")
        )
    }
    cached = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return Host(total=found["MemTotal"], available=sum(found.get(name, 0) for name in cached))


ENGINES = '''"""Engines in one program, by number: python engines.py 1 2"""
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engines = []
    for number in sys.argv[1:]:
        size = {"1": dict(%s), "2": dict(%s)}[number]
        engine = LLM("models/%s", max_model_len=4096, enforce_eager=True, **size)
        text = engine.generate(["Hello"], SamplingParams(max_tokens=8))[0].outputs[0]
        print("engine", number, "answers", len(text.token_ids), "tokens", flush=True)
        engines.append(engine)
'''
