"""vLLM's flags and a card -> a `Deployment` with every default of the release filled in.

In: settings by their snake_case names as text (`facts.args.flags` makes them), a release, a card. Out: the
deployment and what was assumed. Values that make no sense are errors; flags that were not looked at are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from packaging.version import Version

from diag.errors import UsageError
from diag.memory.defaults import batch_limits
from diag.memory.eras import Era, default_engine, default_gpu_memory_utilization, era_of
from diag.memory.gpus import all_gpus, by_name, candidates
from diag.memory.plan_model import Deployment
from diag.memory.plan_search import best_parallel, instance_share, share_of_limit
from diag.memory.quantization import Quantization, named
from diag.memory.shapes import ModelShape
from diag.release import as_release
from diag.units import GIB, parse_short_count, parse_size

NEWEST = "0.33.0"
"""The release that is assumed when none is given: the newest whose source was read."""

_TOWER_LEFT_OUT = Version("0.11.0")  # with no image or video allowed the tower is not loaded
_CARDS = re.compile(r"(?:(\d{1,4})\s*[x*]\s*)?(.+)", re.IGNORECASE | re.DOTALL)
_LABEL = re.compile(r"(\d{1,3})\s*gb", re.IGNORECASE)
_ALIASES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "q": "quantization",
    "ep": "enable_expert_parallel",
    "device_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "cuda_graph_sizes": "max_cudagraph_capture_size",
}
_NO_MEMORY = frozenset(
    "host port api_key served_model_name trust_remote_code chat_template tool_call_parser reasoning_parser seed "
    "revision "
    "enable_auto_tool_choice enable_prefix_caching enable_chunked_prefill download_dir tokenizer tokenizer_mode model "
    "disable_log_requests disable_log_stats enable_log_requests uvicorn_log_level load_format generation_config".split()
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """What `--gpu` names: how many, what, bytes of each."""

    count: int
    name: str
    total: int
    capability: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A deployment, and in words what was assumed for it and which flags were not looked at."""

    deployment: Deployment
    assumed: tuple[str, ...]
    ignored: tuple[str, ...]


def parse_cards(text: str) -> Cards:
    """The value of `--gpu`: "2xA100-80GB", "L4", "24GB", "22.1 GiB".

    Raises: UsageError when it names no card, or several that differ in size.
    """
    match = _CARDS.fullmatch(text.strip()[:200])
    count, rest = (int(match[1] or 1), match[2].strip()) if match else (1, text)
    if not 1 <= count <= 4096:
        raise UsageError(f"--gpu {text}: {count} is no number of cards")
    known = by_name(rest)
    if known is not None:
        return Cards(
            count=count,
            name=known.name,
            total=known.typical_bytes,
            capability=known.compute_capability,
        )
    several = candidates(rest)
    if several:
        names = ", ".join(gpu.name for gpu in several[:4])
        raise UsageError(f"--gpu {text}: which one, {names}?", hint="give the size as well")
    label = _LABEL.fullmatch(rest)
    if label:
        same = [gpu for gpu in all_gpus() if gpu.nominal_gb == int(label[1]) and gpu.kind != "mig"]
        exact = [gpu for gpu in same if not gpu.approximate] or same
        total = min((gpu.low for gpu in exact), default=round(0.97 * int(label[1]) * GIB))
        return Cards(count=count, name=f"{label[1]} GB card", total=total)
    try:
        total = parse_size(rest)
    except ValueError as error:
        raise UsageError(
            f"--gpu {text}: no card that oomdoc knows", hint='write "2xA100-80GB" or "24GB"'
        ) from error
    if total < GIB:
        raise UsageError(
            f"--gpu {text}: no card that oomdoc knows", hint='write "2xA100-80GB" or "24GB"'
        )
    return Cards(count=count, name=f"{total / GIB:.1f} GiB device", total=total)


class _Flags:
    """Typed access to the settings; every problem names its flag."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = {_ALIASES.get(key, key): value for key, value in settings.items()}
        self.used: set[str] = set()

    def text(self, key: str) -> str | None:
        self.used.add(key)
        value = self.settings.get(key)
        return None if value in (None, "None", "") else value

    def count(self, key: str) -> int | None:
        value = self.text(key)
        if value is None:
            return None
        try:
            whole = parse_short_count(value)
        except (ValueError, OverflowError):
            raise UsageError(f"{_flag(key)} {value}: not a number") from None
        if not 1 <= whole <= 10**15:
            raise UsageError(f"{_flag(key)} {value}: must be at least 1")
        return whole

    def number(self, key: str) -> float | None:
        value = self.text(key)
        try:
            return None if value is None else float(value)
        except ValueError:
            raise UsageError(f"{_flag(key)} {value}: not a number") from None

    def switch(self, key: str) -> bool:
        return (self.text(key) or "false").lower() not in ("false", "0")

    def unused(self) -> tuple[str, ...]:
        """Flags that may matter and were not looked at."""
        return tuple(
            _flag(key) for key in self.settings if key not in self.used and key not in _NO_MEMORY
        )


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def resolve(
    shape: ModelShape,
    cards: Cards,
    settings: Mapping[str, str],
    *,
    version: Version | None = None,
    used: int = 0,
    instances: int = 1,
    limit: int | None = None,
) -> Resolved:
    """The deployment of these settings on these cards.

    Args: version None: the newest known; used (bytes that others hold on each card); instances on one card; limit
        (bytes this instance may use, instead of a share).
    Raises: UsageError for a flag's value that makes no sense, or a division that can't be.
    """
    flags = _Flags(settings)
    assumed: list[str] = []
    if version is None:
        version = Version(NEWEST)
        assumed.append(f"vLLM {NEWEST}")
    engine = default_engine(version) or "V1"
    length, automatic = _length(flags)
    gmu = _share(flags)
    base = Deployment(
        version=version,
        engine=engine,
        era=era_of(version, engine) or Era.I,
        total=cards.total,
        gpu_name=cards.name,
        capability=cards.capability,
        gpus=cards.count,
        gmu=gmu or default_gpu_memory_utilization(version) or 0.9,
        length=None if automatic else length or shape.context,
        dtype=flags.text("dtype"),
        kv_dtype=flags.text("kv_cache_dtype"),
        quantization=_quantization(shape, flags),
        block_size=flags.count("block_size"),
        eager=flags.switch("enforce_eager"),
        hybrid=not flags.switch("disable_hybrid_kv_cache_manager"),
        language_only=flags.switch("language_model_only")
        or (_no_images(flags) and as_release(version) >= _TOWER_LEFT_OUT),
        encoder=not (flags.switch("skip_mm_profiling") or _no_images(flags)),
        graph_top=flags.count("max_cudagraph_capture_size"),
        kv_bytes=flags.count("kv_cache_memory_bytes"),
        offload=round((flags.number("cpu_offload_gb") or 0) * GIB),
        draft_tokens=_draft(flags),
        expert_parallel=flags.switch("enable_expert_parallel"),
        used=used,
        instances=instances,
    )
    base = _batch(base, flags, assumed)
    deployment = _parallel(shape, base, flags, assumed)
    if limit is not None:
        share = share_of_limit(limit, deployment)
        deployment = replace(deployment, gmu=share)
        assumed.append(f"--gpu-memory-utilization {share:g} for {limit / GIB:g} GiB")
    elif instances > 1 and gmu is None:
        share = instance_share(shape, deployment, instances)
        deployment = replace(deployment, gmu=share)
        assumed.append(f"--gpu-memory-utilization {share:.2f} for each of {instances} instances")
    return Resolved(deployment=deployment, assumed=tuple(assumed), ignored=flags.unused())


def _share(flags: _Flags) -> float | None:
    """The share of total memory asked for, above 0 and at most 1."""
    gmu = flags.number("gpu_memory_utilization")
    if gmu is not None and not 0 < gmu <= 1:
        raise UsageError(f"--gpu-memory-utilization {gmu}: must be above 0 and at most 1")
    return gmu


def _length(flags: _Flags) -> tuple[int | None, bool]:
    """The length asked for, and whether it is to be fitted."""
    value = flags.text("max_model_len")
    if value in ("auto", "-1"):
        return None, True
    return flags.count("max_model_len"), False


def _batch(base: Deployment, flags: _Flags, assumed: list[str]) -> Deployment:
    """Tokens and requests of one step: as given, or the defaults of release and card."""
    limits = batch_limits(base.version, base.engine, total=base.total, device_name=base.gpu_name)
    step, seqs = flags.count("max_num_batched_tokens"), flags.count("max_num_seqs")
    length = base.length or 8192
    if seqs is None:
        seqs = (limits.seqs if limits else None) or 256
        assumed.append(f"--max-num-seqs {seqs}")
    if step is None:
        step = (limits.tokens if limits else None) or max(length, 2048)
        if base.engine == "V1" and base.version and as_release(base.version) >= Version("0.11.2"):
            step = min(step, seqs * length)
        assumed.append(f"--max-num-batched-tokens {step}")
    return replace(base, step=step, seqs=min(seqs, step))


def _parallel(shape: ModelShape, base: Deployment, flags: _Flags, assumed: list[str]) -> Deployment:
    """Ranks, stages, replicas: as given; else the best use of the cards."""
    tp, pp = flags.count("tensor_parallel_size"), flags.count("pipeline_parallel_size") or 1
    dp = flags.count("data_parallel_size")
    if tp is None and pp == 1 and base.gpus > 1 and dp is None:
        best = best_parallel(shape, base)
        if best and best[0].plan is not None:
            chosen = best[0].plan.deployment
            assumed.append(f"--tensor-parallel-size {chosen.tp}")
            return replace(base, tp=chosen.tp, dp=chosen.dp)
    tp = tp or 1
    needed = tp * pp * (dp or 1)
    if needed > base.gpus:
        raise UsageError(
            f"{needed} cards are needed for these parallel sizes, --gpu names {base.gpus}",
            hint=f'give --gpu "{needed}x{base.gpu_name}"',
        )
    return replace(base, tp=tp, pp=pp, dp=dp or 1)


def _quantization(shape: ModelShape, flags: _Flags) -> Quantization | None:
    """The checkpoint's own format; a flag counts for 16-bit checkpoints only."""
    asked = flags.text("quantization")
    if asked is None or shape.quantization is not None:
        return shape.quantization
    found = named(asked)
    if found is None:
        raise UsageError(f"--quantization {asked}: not known")
    return found


def _no_images(flags: _Flags) -> bool:
    """Whether `--limit-mm-per-prompt` forbids every image and video."""
    value = flags.text("limit_mm_per_prompt")
    if value is None:
        return False
    try:
        body = json.loads(value)
        limits = list(body.values()) if isinstance(body, dict) else [1]
    except (ValueError, RecursionError):
        limits = [int(number) for number in re.findall(r"=\s*(\d{1,6})", value)] or [1]
    return all(limit == 0 for limit in limits)


def _draft(flags: _Flags) -> int:
    """Draft tokens a request, of `--speculative-config`."""
    value = flags.text("speculative_config") or ""
    match = re.search(r"num_speculative_tokens[\"'\s:=]+(\d{1,3})", value)
    asked = flags.count("num_speculative_tokens") or flags.count("spec_tokens")
    return int(match[1]) if match else asked or 0
