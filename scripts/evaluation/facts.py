"""Facts of a labelled log against the facts oomdoc printed.

In: the label's dictionary, whose names carry the unit (`weights_gib`), and the `facts` of a Diagnosis. Out: one
verdict for each labelled fact. Sizes are compared at the precision the log printed them with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diag.report.model import FactOut
from diag.terms import Origin
from diag.units import GIB

# Label name -> the names oomdoc may use for it.
NAMES: dict[str, tuple[str, ...]] = {
    "model": ("config.model",),
    "dtype": ("config.dtype",),
    "max_model_len": ("config.max_model_len",),
    "tp": ("config.tensor_parallel_size",),
    "pp": ("config.pipeline_parallel_size",),
    "dp": ("config.data_parallel_size",),
    "quantization": ("config.quantization",),
    "enforce_eager": ("config.enforce_eager",),
    "kv_cache_dtype": ("config.kv_cache_dtype",),
    "gmu": ("config.gpu_memory_utilization",),
    "max_num_seqs": ("config.max_num_seqs",),
    "swap_space_gib": ("config.swap_space",),
    "backend": ("config.backend",),
    "engine_version": ("vllm.version",),
    "weights_gib": ("weights.memory",),
    "weights_gib_v0_split_line": ("weights.memory",),
    "checkpoint_gib": ("weights.checkpoint",),
    "host_ram_available_gib": ("host.ram_available",),
    "gpu_total_gib": ("device.total", "oom.total"),
    "npu_total_bytes": ("device.total",),
    "budget_gib": ("device.requested",),
    "free_at_start_gib": ("device.free_at_start",),
    "peak_activation_gib": ("profile.peak_activation",),
    "non_torch_gib": ("profile.non_torch",),
    "graph_est_gib": ("profile.graph_estimate",),
    "kv_cache_gib": ("profile.available_kv_cache",),
    "npu_available_bytes": ("profile.available_kv_cache",),
    "kv_gib_set": ("profile.available_kv_cache", "config.kv_cache_memory_bytes"),
    "kv_tokens": ("kv.pool_tokens",),
    "num_gpu_blocks": ("kv.gpu_blocks",),
    "num_cpu_blocks": ("kv.cpu_blocks",),
    "max_concurrency": ("kv.max_concurrency",),
    "concurrency_x": ("kv.max_concurrency",),
    "kv_needed_gib": ("kv.needed",),
    "kv_available_gib": ("kv.available",),
    "estimated_max_len": ("kv.estimated_max_len",),
    "asked_max_len": ("kv.asked_len",),
    "graph_secs": ("graph.capture_s",),
    "graph_gib": ("graph.memory",),
    "init_engine_secs": ("engine.init_s",),
    "init_engine_s": ("engine.init_s",),
    "startup_complete": ("startup.complete",),
    "oom_tried_gib": ("oom.tried",),
    "oom_gpu": ("oom.gpu",),
    "oom_free_gib": ("oom.free",),
    "oom_process_in_use_gib": ("oom.process_in_use",),
    "oom_other_processes_gib": ("oom.other_processes",),
    "oom_pytorch_allocated_gib": ("oom.allocated",),
    "oom_private_pools_gib": ("oom.private_pools",),
    "oom_reserved_unallocated_gib": ("oom.reserved_unallocated",),
    "sleep_freed_gib": ("sleep.freed",),
    "sleep_backed_up_gib": ("sleep.backed_up",),
    "sleep_discarded_gib": ("sleep.discarded",),
    "cpu_node_total_gib": ("host.node_total",),
    "host_total_gib": ("host.node_total",),
    "node_total_gib": ("host.node_total", "device.total"),
    "available_gib": ("host.node_available", "device.free_at_start"),
    "wanted_gib": ("host.wanted", "device.requested"),
    "failed_alloc_bytes": ("host.alloc_failed",),
    "kv_usage_max_pct": ("serving.kv_usage_max",),
    "waiting_max": ("serving.waiting_max",),
}
# In the labels, but no fact of a log: remarks, the harness's own observations, whole lines.
NOT_FACTS = frozenset(
    "line_cut_note which note rank speculative core_init_failed failed_core_procs engine_dead_text ansi_codes"
    " processes first_error_line last_error_line worker_exit concurrency_for_tokens node check_at non_kv_gib"
    " preemptions_metric vllm_version".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactCheck:
    """One labelled fact, or one printed value the label does not hold (`name` is then ours)."""

    name: str
    verdict: str  # "right" "wrong" "missing"
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class _Gold:
    """The values a label gives for one name. `complete`: no other value may be printed under it."""

    values: tuple[Any, ...]
    complete: bool


def check_facts(labelled: Mapping[str, Any], printed: Iterable[FactOut]) -> list[FactCheck]:
    """A verdict for every labelled fact, then the printed values that contradict the label.

    Only values read from the log count; derived and assumed ones are no claim about a line.
    """
    ours: dict[str, list[FactOut]] = {}
    for fact in printed:
        if fact.origin is Origin.LOGGED:
            ours.setdefault(fact.name, []).append(fact)
    gold = _flatten(labelled)
    checks = [
        check
        for name, values in gold.items()
        for check in [_check_one(name, values, _of(ours, NAMES[name]))]
        if check is not None
    ]
    return checks + _contradictions(gold, ours)


def _of(ours: Mapping[str, list[FactOut]], names: tuple[str, ...]) -> list[FactOut]:
    return [fact for name in names for fact in ours.get(name, ())]


def _flatten(labelled: Mapping[str, Any]) -> dict[str, _Gold]:
    """Label entries as lists of values; the entries of several OOM texts are joined by name."""
    gold: dict[str, _Gold] = {}
    for name, value in labelled.items():
        if name == "ooms":
            for inner_name in sorted({key for oom in value for key in oom} - NOT_FACTS):
                values = tuple(oom[inner_name] for oom in value if inner_name in oom)
                gold[inner_name] = _Gold(values, complete=False)
        elif name in NAMES:
            gold[name] = _values(name, value)
    return gold


def _values(name: str, value: Any) -> _Gold:
    if not isinstance(value, Mapping):
        return _Gold((value,), complete=True)
    if "per_rank" in value:
        return _Gold(tuple(value["per_rank"].values()), complete=False)
    if "in_order" in value:
        return _Gold(tuple(value["in_order"]), complete=False)
    if name == "oom_other_processes_gib":  # pid -> size; their sum is a fair answer too
        return _Gold(tuple(value.values()), complete=False)
    return _Gold((), complete=False)


def _check_one(name: str, gold: _Gold, ours: list[FactOut]) -> FactCheck | None:
    """None when the label holds nothing to compare."""
    if not gold.values:
        return None
    expected = ", ".join(str(value) for value in gold.values)
    got = ", ".join(sorted({str(fact.value) for fact in ours}))
    if gold.values in {(None,), (False,)} and not ours:
        # "None" and "no" are often said by silence; only start-up has a line that is telling by its absence.
        if name != "startup_complete" and gold.values == (None,):
            return None
        verdict = "right" if name == "startup_complete" else "missing"
    elif _all_found(name, gold.values, ours):
        verdict = "right"
    else:
        verdict = "wrong" if ours else "missing"
    return FactCheck(name=name, verdict=verdict, expected=expected, got=got)


def _all_found(name: str, values: tuple[Any, ...], ours: list[FactOut]) -> bool:
    found = all(any(same(name, value, fact.value) for fact in ours) for value in values)
    if found or name != "oom_other_processes_gib":
        return found
    return any(abs(sum(values) - float(fact.value) / GIB) < 0.01 for fact in ours)


def _contradictions(
    gold: Mapping[str, _Gold], ours: Mapping[str, list[FactOut]]
) -> list[FactCheck]:
    """Printed values of fully labelled names that equal none of the labelled values."""
    allowed: dict[str, list[tuple[str, Any]]] = {}
    open_ended = {
        name for label, entry in gold.items() if not entry.complete for name in NAMES[label]
    }
    for label, entry in gold.items():
        for name in NAMES[label]:
            allowed.setdefault(name, []).extend((label, value) for value in entry.values)
    found = []
    for name, values in allowed.items():
        if name in open_ended:
            continue
        extras: dict[str, FactOut] = {}
        matched = False
        for fact in ours.get(name, ()):
            if any(same(label, value, fact.value) for label, value in values):
                matched = True
            elif not any(_coarser(label, value, fact.value) for label, value in values):
                extras[f"{fact.rank}:{fact.value}"] = fact
        if matched:  # with no match at all the labelled fact itself is already counted as wrong
            expected = ", ".join(str(value) for _, value in values)
            found += [
                FactCheck(
                    name=name,
                    verdict="wrong",
                    expected=expected,
                    got=f"{fact.value} (line {fact.line})",
                )
                for fact in extras.values()
            ]
    return found


_DTYPES = {"half": "float16", "float": "float32"}


def _dtype(text: str) -> str:
    """`torch.half` -> `float16`."""
    bare = text.removeprefix("torch.")
    return _DTYPES.get(bare, bare)


def _coarser(name: str, expected: Any, got: Any) -> bool:
    """Whether a size is the labelled one, printed once more with two decimals."""
    if "_gib" not in name or not isinstance(got, (int, float)):
        return False
    return isinstance(expected, float) and round(expected, 2) == round(got / GIB, 2)


def same(name: str, expected: Any, got: Any) -> bool:
    """Whether a printed value equals the labelled one at the label's precision."""
    if expected is None:
        return str(got).lower() in {"none", "null", ""}
    if isinstance(expected, bool) or isinstance(got, bool):
        return bool(expected) == bool(got)
    if isinstance(expected, str):
        return _dtype(expected) == _dtype(str(got))
    if isinstance(got, str):
        return False
    if "_gib" not in name:
        return bool(abs(got - expected) <= 1e-6 * abs(expected))
    # The label dropped the zeros of "1.00", and the sizes of a log have two decimals at least.
    decimals = max(2, len(repr(expected).partition(".")[2]))
    return bool(abs(got / GIB - expected) <= 0.501 * 10**-decimals)
