"""What a quantised checkpoint stores: bytes per weight, and which modules stay in 16 bit.

In: the `quantization_config` of a config.json, a `--quantization` value, or the end of a model's name. Out: a
`Quantization`. Formats are those of the checkpoints' public specifications; sizes include scales and zero points.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

BY_NAME_PCT = 3.0  # a name does not say which modules stay in 16 bit
_PATTERN_S = 0.05
_MAX_PATTERN = 300  # characters of one ignore pattern; configs come from anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the weights of linear layers are stored.

    `weight_bytes` per weight with its scales; `ignored` are module names or "re:" patterns that stay in 16 bit;
    `only` limits the format to components ("experts" for MXFP4 checkpoints of gpt-oss).
    """

    method: str
    weight_bytes: float
    ignored: tuple[str, ...] = ()
    only: frozenset[str] = field(default_factory=frozenset)
    error_pct: float = 1.0

    def covers(self, component: str, module: str) -> bool:
        """Whether a module's weights are stored in this format."""
        if component in ("embedding", "head", "norm", "router", "state", "vision"):
            return False
        if self.only and component not in self.only:
            return False
        return not any(_names(pattern, module) for pattern in self.ignored)


def _names(pattern: str, module: str) -> bool:
    """Whether an ignore entry means a module: a pattern after "re:", a full name, a part of it."""
    if pattern.startswith("re:"):
        return _matches(pattern[3:_MAX_PATTERN], module)
    plain = pattern.removesuffix(".*").removesuffix("*").rstrip(".")
    if plain.startswith("*"):
        return plain.lstrip("*").strip(".") in module
    return module == plain or module.startswith(f"{plain}.") or module.endswith(f".{plain}")


@lru_cache(maxsize=4096)
def _matches(pattern: str, module: str) -> bool:
    """A pattern from a config, which may come from anywhere: bounded in time, wrong ones match nothing."""
    import regex

    try:
        return regex.match(pattern, module, timeout=_PATTERN_S) is not None
    except (regex.error, TimeoutError):
        return False


def _grouped(bits: int, group: int, *, scale: float = 2, zero: float = 0.0) -> float:
    """Bytes per weight of `bits` with a scale of `scale` bytes and a zero point of `zero` for each group."""
    return bits / 8 + ((scale + zero) / group if group > 0 else 0)


def named(method: str, *, bits: int = 4, group: int = 128) -> Quantization | None:
    """The usual form of a method by its name; None when the name is not known.

    >>> named("awq").weight_bytes, named("fp8").weight_bytes
    (0.51953125, 1.000244140625)
    """
    name = method.lower().replace("-", "_")
    if name.startswith("awq"):
        return Quantization(method="awq", weight_bytes=_grouped(bits, group, zero=bits / 8))
    if name.startswith(("gptq", "auto_round", "autoround", "inc")):
        return Quantization(method="gptq", weight_bytes=_grouped(bits, group), error_pct=1.5)
    if name in ("fp8", "fbgemm_fp8", "modelopt", "modelopt_fp8", "fp8_per_tensor", "ptpc_fp8"):
        return Quantization(method="fp8", weight_bytes=1 + 4 / (128 * 128))
    if name in ("int8", "w8a8", "experts_int8"):
        only = frozenset({"experts"}) if name == "experts_int8" else frozenset()
        return Quantization(method=name, weight_bytes=1 + 4 / 4096, only=only)
    if name in ("nvfp4", "modelopt_fp4", "fp4"):
        return Quantization(method="nvfp4", weight_bytes=_grouped(4, 16, scale=1))
    if name in ("mxfp4", "quark_mxfp4"):
        return Quantization(
            method="mxfp4",
            weight_bytes=_grouped(4, 32, scale=1),
            only=frozenset({"experts"}),
            error_pct=3.0,
        )
    if name in ("bitsandbytes", "bnb"):
        return Quantization(
            method="bitsandbytes", weight_bytes=_grouped(4, 64, scale=4), error_pct=2
        )
    return None


def of_config(config: Mapping[str, Any]) -> Quantization | None:
    """The format of a checkpoint by its config.json; None: not quantised, or not known."""
    body = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(body, Mapping):
        return None
    method = str(body.get("quant_method") or body.get("quant_algo") or "").lower()
    ignored = _ignored(body)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(body, ignored)
    if method in ("modelopt", "modelopt_fp4", "modelopt_mixed") or "quant_algo" in body:
        algorithm = str(body.get("quant_algo") or "").lower()
        found = named("nvfp4" if "fp4" in algorithm or "fp4" in method else "fp8")
    elif method == "bitsandbytes":
        eight = bool(body.get("load_in_8bit"))
        found = Quantization(
            method="bitsandbytes", weight_bytes=1 if eight else _grouped(4, 64, scale=4)
        )
    elif method == "fp8":
        block = body.get("weight_block_size")
        scale = 4 / (block[0] * block[1]) if isinstance(block, list) and len(block) == 2 else 0
        found = Quantization(method="fp8", weight_bytes=1 + scale)
    else:
        bits, group = (
            _int(body.get("bits") or body.get("w_bit"), 4),
            _int(body.get("group_size"), 128),
        )
        found = named(method, bits=bits, group=group)
    return None if found is None else replace(found, ignored=ignored)


def _ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        value = body.get(key)
        if isinstance(value, list):
            found += [str(item)[:_MAX_PATTERN] for item in value[:5_000]]
    return tuple(found)


def _compressed(body: Mapping[str, Any], ignored: tuple[str, ...]) -> Quantization | None:
    """compressed-tensors: the first group's weights decide."""
    groups = body.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits, group = _int(weights.get("num_bits"), 8), _int(weights.get("group_size"), 0)
    floating = weights.get("type") == "float"
    if bits == 4 and floating:
        size, method = (_grouped(4, 16, scale=1), "nvfp4")
        if group == 32:
            size, method = (_grouped(4, 32, scale=1), "mxfp4")
    elif bits == 8:
        size, method = (1 + 2 / 4096, "fp8" if floating else "int8")
    else:
        zero = 0.0 if weights.get("symmetric", True) else bits / 8
        size, method = (_grouped(bits, group or 4096, zero=zero), f"int{bits}")
    return Quantization(method=method, weight_bytes=size, ignored=ignored)


def _int(value: object, fallback: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else fallback


_SUFFIXES = (
    (re.compile(r"[-_.]fp8[-_](?:kv|dynamic|block|static)(?:[-_.]|$)|[-_.](?:fp8|fp8e4m3)(?=[-_.]|$)"), "fp8", 8),
    (re.compile(r"[-_.](?:nvfp4|fp4)(?:a16)?(?=[-_.]|$)"), "nvfp4", 4),
    (re.compile(r"[-_.]mxfp4(?=[-_.]|$)"), "mxfp4", 4),
    (re.compile(r"[-_.](?:quantized[-_.])?w8a(?:8|16)(?=[-_.]|$)|[-_.]gptq[-_]int8|[-_.]int8(?=[-_.]|$)"), "int8", 8),
    (re.compile(r"[-_.]awq(?:[-_](?:int)?4(?:bit)?)?(?:[-_]g\d+)?(?=[-_.]|$)"), "awq", 4),
    (
        re.compile(r"[-_.]gptq(?:[-_](?:int)?4(?:bit)?)?(?:[-_]g?\d+g?)?(?=[-_.]|$)"
                   r"|[-_.](?:quantized[-_.])?w4a16(?:[-_]ct)?(?=[-_.]|$)|[-_.]int4(?:[-_](?:autoround|mixed)\S*)?(?=[-_.]|$)"
                   r"|[-_.]autoround\S*"),
        "gptq",
        4,
    ),
    (re.compile(r"[-_.](?:unsloth[-_])?bnb(?:[-_]4bit)?(?=[-_.]|$)"), "bitsandbytes", 4),
)  # fmt: skip


def of_name(name: str) -> tuple[str, Quantization | None]:
    """A model name without the part that names a quantisation, and that quantisation.

    >>> base, found = of_name("Qwen3-32B-AWQ"); base, found.method
    ('Qwen3-32B', 'awq')
    """
    text = name[:300]
    for pattern, method, bits in _SUFFIXES:
        match = pattern.search(text.lower())
        if match is None or match.start() == 0:
            continue
        base = text[: match.start()] + text[match.end() :]
        found = named(method, bits=bits)
        return base.rstrip("-_."), None if found is None else replace(found, error_pct=BY_NAME_PCT)
    return text, None
