"""The closed sets that `rules/fixes.yaml` may use: numbers for its texts and conditions for its entries.

`values` gives each number formatted for people; one that isn't in the log is absent. `CONDITIONS` maps a condition's
name to a test of the case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter

from diag.fixes.case import Case
from diag.fixes.known_shape import divides, gpus_shown, shape_of, tensor_ranks
from diag.fixes.sums import is_symptom, size
from diag.fixes.window import missing, pool_bytes, request_shortfall
from diag.release import in_range
from diag.terms import Family, GmuVerdict, Phase
from diag.units import GIB, format_count

_KUBERNETES = re.compile(r"kubernetes|kubectl|\bpod\b|KUBERNETES_|containerName", re.IGNORECASE)
_RAY = re.compile(r"raylet|ray\.exceptions|RayWorker|memory_monitor", re.IGNORECASE)
_FORKED = re.compile(r"Cannot re-initialize CUDA in forked subprocess")
_ONLINE = ("fp8", "bitsandbytes", "torchao", "mxfp4", "experts_int8", "rtn", "int8")
_MULTIMODAL = re.compile(
    r"-?VL\b|vision|omni|llava|pixtral|internvl|gemma-?3|minicpm-?v|multimodal", re.IGNORECASE
)
_USUAL_CUT = 2048  # tokens; the context that is often advised whatever the log says
_LINES = 2000  # lines searched for a sign
_COLD_COMPILE = 2 * GIB  # the most that a first compile was seen to add to the profile peak
_BYTES = (
    "total",
    "budget",
    "needed",
    "available",
    "tried",
    "free",
    "allocated",
    "weights",
    "others",
)
NAMES = frozenset(
    {
        *_BYTES,
        "gmu",
        "step",
        "free_start",
        "wanted",
        "lack",
        "lack_kv",
        "idle",
        "pool",
        "asked_len",
        "est_len",
        "ranks",
        "heads",
        "more_ranks",
        "gpus",
    }
)


def values(case: Case) -> dict[str, str]:
    """Formatted numbers by name, a subset of NAMES."""
    numbers = case.numbers
    found = {name: amount for name, amount in numbers.named().items() if name in _BYTES}
    more = {
        "lack": missing(numbers),
        "pool": pool_bytes(numbers),
        "idle": numbers.reserved_idle.value if numbers.reserved_idle else None,
        "free_start": numbers.free_at_start.value if numbers.free_at_start else None,
    }
    found |= {name: amount for name, amount in more.items() if amount is not None}
    shortfall = request_shortfall(numbers)
    if shortfall is not None:
        found["lack_kv"] = shortfall.value
    if numbers.total is not None:
        found["step"] = 0.01 * numbers.total.value
        if numbers.gmu is not None:
            found["wanted"] = numbers.gmu.value * numbers.total.value
    texts = {name: size(amount) for name, amount in found.items()}
    if numbers.gmu is not None:
        texts["gmu"] = f"{numbers.gmu.value:g}"
    if numbers.asked_len is not None:
        texts["asked_len"] = format_count(numbers.asked_len.value)
    if numbers.estimated_len is not None:
        texts["est_len"] = format_count(numbers.estimated_len.value)
    texts["ranks"] = str(case.situation.ranks)
    texts["more_ranks"] = str(2 * tensor_ranks(case))
    if case.situation.ranks > 1 and (shape := shape_of(case)) is not None:
        texts["heads"] = str(shape.heads)  # asked for with several ranks only: the table costs time
    if (gpus := gpus_shown(case)) is not None:
        texts["gpus"] = str(gpus)
    return texts


def names_in(template: str) -> set[str]:
    """Names of the numbers a text uses."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def fill(template: str, known: Mapping[str, str]) -> str | None:
    """The text with its numbers, or None when one is missing."""
    return template.format_map(known) if names_in(template) <= known.keys() else None


def _shown(case: Case, sign: re.Pattern[str]) -> bool:
    """Whether a sign is in the command, the failing text or the lines."""
    if sign.search(case.command or "") or sign.search(case.situation.text):
        return True
    return any(sign.search(line.text[:400]) for line in case.situation.facts.lines[-_LINES:])


def _small_idle(case: Case) -> bool:
    idle, tried = case.numbers.reserved_idle, case.numbers.tried
    return idle is not None and tried is not None and idle.value < tried.value


def _oversized(case: Case) -> bool:
    """Whether one request was larger than the whole card: no batch is, an attention matrix can be."""
    tried, total = case.numbers.tried, case.numbers.total
    return tried is not None and total is not None and tried.value >= 1.5 * total.value


def _large_lack(case: Case) -> bool:
    """Whether more is missing for the KV pool than a cold compile takes."""
    shortfall, budget = request_shortfall(case.numbers), case.numbers.budget
    lack = shortfall.value if shortfall is not None else 0.0
    if budget is not None and budget.value < 0:
        lack = max(lack, -budget.value)
    return lack > _COLD_COMPILE


def _share_high(case: Case) -> bool:
    share = case.numbers.gmu
    return share is not None and share.value >= 0.95


def _online_quantisation(case: Case) -> bool:
    return (
        str(case.now("quantization") or "").lower() in _ONLINE or "quantise" in case.situation.sites
    )


def multimodal(case: Case) -> bool:
    """Whether the model takes images or video, as far as the log shows."""
    if case.situation.subtype == "act.multimodal_encoder" or "multimodal" in case.situation.sites:
        return True
    model = str(case.now("model") or "")
    return case.now("limit_mm_per_prompt") is not None or _MULTIMODAL.search(model) is not None


def _sequence_states(case: Case) -> bool:
    """Whether some layers keep a state per sequence (Mamba, linear attention)."""
    shape = shape_of(case)
    if shape is not None:
        return any(group.state for group in shape.cache)
    return any("mamba" in event.row for event in case.situation.facts.events)


def expandable_breaks(case: Case) -> bool:
    """Whether expandable segments are known to break something in this set-up."""
    situation = case.situation
    shown = f"{situation.command or ''}\n{case.command or ''}".lower()
    connector = "kv-transfer-config" in shown or "kv_transfer_config" in shown or "lmcache" in shown
    if situation.setting_on("enable_sleep_mode") or connector:
        return True
    if situation.family is Family.TP_BUFFER or situation.subtype in (
        "alloc.wake_up",
        "base.wsl_display",
    ):
        return True
    if situation.phase is Phase.SLEEP_WAKE:
        return True
    several = situation.ranks > 1 or (situation.setting_number("data_parallel_size") or 1) > 1
    reduced = situation.setting_on(
        "disable_custom_all_reduce"
    ) or "disable-custom-all-reduce" in shown.replace("_", "-")
    if several and not reduced and in_range(situation.version, "<0.9") is not False:
        return True  # older custom all-reduce shares its buffers over CUDA IPC, which such segments don't support
    return any("WSL" in line.text[:400] for line in situation.facts.lines[:400])


def _heavy_weights(case: Case) -> bool:
    """Whether the weights may be what fills the share: most of it, or its size is unknown."""
    weights, total, share = case.numbers.weights, case.numbers.total, case.numbers.gmu
    if weights is None or total is None or share is None:
        return weights is not None and weights.value >= 4 * GIB
    return weights.value >= 0.6 * share.value * total.value


def _heads_do_not_divide(case: Case) -> bool:
    return divides(case, 2 * tensor_ranks(case)) is False


def _all_gpus_used(case: Case) -> bool:
    gpus = gpus_shown(case)
    return gpus is not None and gpus < 2 * case.situation.ranks


def _fitting_length_printed(case: Case) -> bool:
    counted = case.numbers.estimated_len or case.numbers.capacity_tokens
    return counted is not None and counted.value >= 2 * _USUAL_CUT


def _more_than_one(name: str) -> Callable[[Case], bool]:
    return lambda case: (case.situation.setting_number(name) or 1) > 1


CONDITIONS: Mapping[str, Callable[[Case], bool]] = {
    "v0": lambda case: case.situation.engine == "V0",
    "v1": lambda case: case.situation.engine == "V1",
    "cpu": lambda case: case.situation.on_cpu,
    "gpu": lambda case: case.gpu,
    "several_ranks": lambda case: case.situation.ranks > 1,
    "pipeline": _more_than_one("pipeline_parallel_size"),
    "data_parallel": _more_than_one("data_parallel_size"),
    "lora": lambda case: (
        case.situation.setting_on("enable_lora") is True or case.situation.subtype == "act.lora"
    ),
    "prefix_caching": lambda case: case.situation.setting_on("enable_prefix_caching") is True,
    "heads_do_not_divide": _heads_do_not_divide,
    "all_gpus_used": _all_gpus_used,
    "length_printed": _fitting_length_printed,
    "expandable_breaks": expandable_breaks,
    "kv_tier": lambda case: case.now("kv_offloading_size") is not None,
    "sequence_states": _sequence_states,
    "container_limit": lambda case: case.situation.facts.get("host.cgroup_limit") is not None,
    "speculative": lambda case: (
        case.now("speculative") is not None
        or case.situation.subtype == "act.speculative"
        or "speculative" in case.situation.sites
    ),
    "multimodal": multimodal,
    "trainer": lambda case: case.situation.training,
    "online_quantisation": _online_quantisation,
    "expandable_on": lambda case: case.situation.expandable_segments,
    "cold_compile": lambda case: case.cold_compile,
    "large_lack": _large_lack,
    "ample_swap": lambda case: (case.situation.setting_number("swap_space") or 0) >= 16 * GIB,
    "no_swap": lambda case: bool(case.situation.facts.seen("serve.no_swap")),
    "charges_others": lambda case: case.situation.charges_others,
    "unified_memory": lambda case: case.situation.unified_memory,
    "small_idle": _small_idle,
    "symptom_length": is_symptom,
    "share_high": _share_high,
    "pinned_pool": lambda case: case.situation.pinned_by is not None,
    "kubernetes": lambda case: _shown(case, _KUBERNETES),
    "ray": lambda case: _shown(case, _RAY),
    "host_tier_full": lambda case: bool(case.situation.facts.seen("lmcache.no_memory")),
    "forked": lambda case: _FORKED.search(case.situation.text) is not None,
    "wrapped_counter": lambda case: case.situation.wrapped_counter,
    "state_blocks": lambda case: case.situation.facts.get("kv.state_blocks") is not None,
    "oversized": _oversized,
    "rdma": lambda case: any(
        case.situation.facts.seen(row) for row in ("os.ibv_reg", "os.rdma_reg", "os.memlock")
    ),
    "verdict_open": lambda case: case.advice.verdict is GmuVerdict.NOT_ENOUGH_FACTS,
    "verdict_leave": lambda case: case.advice.verdict is GmuVerdict.LEAVE,
    "nccl": lambda case: (
        case.situation.family is Family.TP_BUFFER
        or case.situation.subtype == "look.nccl_timeout"
        or "nccl" in case.situation.text.lower()
    ),
    "heavy_weights": _heavy_weights,
    "verdict_lower": lambda case: case.advice.verdict is GmuVerdict.LOWER,
    "verdict_raise": lambda case: case.advice.verdict is GmuVerdict.RAISE,
    "verdict_cannot_help": lambda case: case.advice.verdict is GmuVerdict.CANNOT_HELP,
}


def applies(
    case: Case, only: tuple[str, ...], unless: tuple[str, ...], releases: str | None
) -> bool:
    """Whether an entry of the table applies; a range of releases needs a known release."""
    if releases is not None and in_range(case.situation.version, releases) is not True:
        return False
    if not all(CONDITIONS[name](case) for name in only):
        return False
    return not any(CONDITIONS[name](case) for name in unless)
