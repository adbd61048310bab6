"""Actions around the engine: weights, other processes, allocator, collectives.

Each takes a Case and gives a Fix with its sum, or None when it makes no sense there.
"""

from __future__ import annotations

from diag.facts.model import Value
from diag.fixes.case import Case
from diag.fixes.conditions import expandable_breaks
from diag.fixes.flags import allocator_variable
from diag.fixes.model import Change, Fix
from diag.fixes.sums import size
from diag.fixes.window import missing
from diag.release import in_range
from diag.terms import Safety
from diag.units import GIB

# A display, the driver and a bare CUDA context hold up to this much of a card: no leftover engine is that small.
_NO_ENGINE = 1.5 * GIB
_OTHERS_MUST_SHOW = ("kv.no_blocks", "weights.load_peak", "tp.nccl_oom")


def half_precision(case: Case) -> Fix | None:
    """16 instead of 32 bits for the weights."""
    dtype = str(case.now("dtype") or "").lower()
    if dtype not in ("float32", "float"):
        return None
    placed = case.numbers.weights or case.numbers.allocated
    return case.fix(
        "half_precision",
        "Load the weights in 16 bits",
        [Change(flag="--dtype", from_=dtype, to="half")],
        fits=None,
        proof="32-bit weights take twice as much"
        + (f"; {size(placed.value)} were placed" if placed else ""),
        cost="hardly any accuracy; most checkpoints are 16-bit themselves",
        safety=Safety.CHANGES_RESULTS,
        verify="the weights line shows about half",
        when_not="the model overflows in float16 (use bfloat16 on a GPU that has it)",
        used=("weights", "allocated"),
    )


def free_card(case: Case) -> Fix | None:
    """Stop whatever else holds the device."""
    numbers = case.numbers
    total, free, share = numbers.total, numbers.free_at_start, numbers.gmu
    held = numbers.others.value if numbers.others else None
    if held is None and total is not None and free is not None:
        held = total.value - free.value
    if held is None and numbers.outside is not None and case.situation.subtype == "kv.alloc_oom":
        held = numbers.outside.value
    if (
        not held
        and case.situation.subtype in _OTHERS_MUST_SHOW
        and not case.situation.charges_others
    ):
        return None
    if numbers.others is not None and not numbers.others.value and held == 0:
        return None  # the text accounts for the whole card: nobody else is on it
    wanted = None if share is None or total is None else share.value * total.value
    if case.situation.on_cpu:
        asked = case.situation.facts.size("host.wanted")
        wanted = wanted if asked is None else asked
        if held is None or free is None or wanted is None or free.value >= wanted:
            return None  # the log shows nobody else in the way
    fits, outlook = None, {}
    if total is not None and free is not None and held is not None and wanted is not None:
        # Half a GiB stays with this process's own context.
        after = total.value - min(held, GIB / 2)
        if case.situation.on_cpu and after < wanted:
            return None  # an empty host would not do
        own = (
            case.situation.subtype == "alloc.not_released"
        )  # an engine of this program may hold it
        slight = held < _NO_ENGINE and not case.situation.on_cpu
        fits = True if after >= wanted and not own and not slight else None
        proof = (
            f"{size(held)} of {size(total.value)} are taken; without it up to {size(after)} are free for the "
            f"{size(wanted)} asked for"
            + ("; so little can be the display or the driver itself" if slight else "")
        )
        outlook = {"free_bytes": round(after)}
    elif held is not None:
        proof = f"other processes hold {size(held)}"
    else:
        proof = "how much others hold is not in the log"
    where = "the host" if case.situation.on_cpu else "the GPU"
    return case.fix(
        "free_card",
        f"Free {where}",
        [
            Change(
                action=(
                    "list who holds it and stop it: nvidia-smi (in a container or WSL2: on the host); an EngineCore or "
                    "worker left over from an earlier start is the usual one"
                    if not case.situation.on_cpu
                    else "stop what holds host memory: ps aux --sort=-rss | head"
                )
            )
        ],
        fits=fits,
        proof=proof,
        cost="the other process",
        verify="nvidia-smi shows the card nearly empty before the next start"
        if not case.situation.on_cpu
        else "free -g shows it",
        when_not="the other process must keep running: lower this one's share, or use another GPU",
        predicted=outlook,
        used=("total", "free_at_start", "others", "gmu"),
    )


# --- the allocator --------------------------------------------------------------------------------------------


def expandable_on(case: Case) -> Fix | None:
    """Expandable segments, only against real fragmentation and only where nothing breaks by it."""
    numbers, idle, lack = case.numbers, case.numbers.reserved_idle, missing(case.numbers)
    if idle is None or numbers.tried is None or idle.value < numbers.tried.value:
        return None
    if expandable_breaks(case) or not (case.gpu or case.npu) or case.situation.expandable_segments:
        return None
    name = "PYTORCH_NPU_ALLOC_CONF" if case.npu else _allocator_name(case)
    found = f"{size(idle.value)} are reserved but idle, {size(numbers.tried.value)} asked for"
    fits = lack is not None and idle.value >= lack
    return case.fix(
        "expandable_on",
        "Let the allocator grow segments in place",
        [
            Change(
                env=name,
                from_=case.situation.setting_text("allocator"),
                to="expandable_segments:True",
            )
        ],
        fits=True if fits else None,
        proof=found + (f"; {size(lack)} are missing" if lack else ""),
        cost="nothing in most set-ups",
        verify='"reserved by PyTorch but unallocated" stays small, should it fail again',
        when_not="with sleep mode, custom all-reduce under DP x TP, KV connectors (NIXL, LMCache) or WSL2",
        used=("tried", "free", "reserved_idle"),
    )


def expandable_off(case: Case) -> Fix | None:
    """Take expandable segments out again where they are on and break the step that failed."""
    if not case.situation.expandable_segments:
        return None
    return case.fix(
        "expandable_off",
        "Switch expandable segments off",
        [Change(env=_allocator_name(case), from_="expandable_segments:True", to=None)],
        fits=None,
        proof="they are on here, and sharing or mapping such memory is what failed",
        cost="a little more fragmentation",
        verify="the failed step passes",
        when_not="the failure stays the same without them: then it has another cause",
    )


def _allocator_name(case: Case) -> str:
    """The variable as the user or torch's own hint spells it, else as the release does."""
    shown = f"{case.command or ''} {case.situation.text}"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in shown:
            return name
    return allocator_variable(case.situation.version)


# --- collectives ----------------------------------------------------------------------------------------------


def no_custom_all_reduce(case: Case) -> Fix | None:
    """NCCL instead of vLLM's own all-reduce."""
    if (
        not case.has_flag("--disable-custom-all-reduce")
        or case.now("disable_custom_all_reduce") is True
    ):
        return None
    return case.fix(
        "no_custom_all_reduce",
        "Use NCCL for every all-reduce",
        [Change(flag="--disable-custom-all-reduce", from_=False, to=True)],
        fits=None,
        proof="the step that failed is then left out; nothing had run out of memory",
        cost="slightly slower small all-reduces",
        safety=Safety.SAFE,
        verify="the start goes on past graph capture",
        when_not="the same error comes from NCCL then: the fault is in peer access between the GPUs",
    )


def no_symmetric_memory(case: Case) -> Fix | None:
    """Leave out symmetric memory."""
    if in_range(case.situation.version, "<0.10.2") is True:
        return None
    used = (
        "VLLM_USE_NCCL_SYMM_MEM" in f"{case.command or ''} {case.situation.text}"
        or "pynccl" in case.situation.text
    )
    name = "VLLM_USE_NCCL_SYMM_MEM" if used else "VLLM_ALLREDUCE_USE_SYMM_MEM"
    value: Value = 0
    return case.fix(
        "no_symmetric_memory",
        "Leave out symmetric memory",
        [Change(env=name, from_=1, to=value)],
        fits=None,
        proof="the step that failed is then left out; the fabric or container did not allow it",
        cost="slightly slower medium all-reduces",
        verify="the start goes on past it",
        when_not="other NVLink errors appear too: check fabric manager and driver first",
    )
