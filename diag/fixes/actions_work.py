"""Actions on what lies outside the pool: step size, sequences, graphs, images, weights, allocator, other processes.

Each takes a Case and gives a Fix with its sum, or None when it makes no sense there.
"""

from __future__ import annotations

import math

from diag.facts.model import Value
from diag.fixes.actions_pool import size
from diag.fixes.case import Case
from diag.fixes.conditions import multimodal
from diag.fixes.flags import allocator_variable, spelled
from diag.fixes.model import Change, Fix
from diag.fixes.situation import Known
from diag.fixes.window import missing, one_request, request_shortfall
from diag.release import in_range
from diag.terms import Family, Phase, Safety
from diag.units import GIB, format_count

_SMALLEST_STEP = 256  # tokens
_OTHERS_MUST_SHOW = ("kv.no_blocks", "weights.load_peak", "tp.nccl_oom")
_MOST_OFFLOAD = 16  # GiB; beyond that decoding only waits for the bus
_SMALL_STEP = 1024  # tokens; below the default of every GPU
_V0_AUTO_CHUNKING = 32768  # V0 chunks prompts by itself above this length


def _default_note(limit: Known | None) -> str:
    """Says so when the present value is the release's default and not in the log."""
    if limit is None or not limit.default:
        return ""
    return f" ({format_count(limit.value)} is the release's default; the log does not show another)"


def _scaled(
    tried: Known | None, free: Known | None, old: float, new: float
) -> tuple[bool | None, str]:
    """Whether a request that scales with a setting fits after it went from `old` to `new`."""
    if tried is None or free is None:
        return None, "the size of the failed request is not in the log"
    after = tried.value * new / old
    proof = f"the request falls from {size(tried.value)} to about {size(after)}; {size(free.value)} free"
    return (
        (True, proof)
        if after <= 0.95 * free.value
        else (None, proof + ", what was allocated before it shrinks too")
    )


def _largest_fitting(tried: Known | None, free: Known | None, now: int, least: int) -> int:
    """The largest power of two below `now` whose scaled request fits; a quarter of `now` when unknown."""
    to = 1 << (max(2, now) - 1).bit_length() - 1
    if tried is None or free is None:
        return max(least, to // 2)
    while to > least and tried.value * to / now > 0.95 * free.value:
        to //= 2
    return max(least, to)


def fewer_batched_tokens(case: Case) -> Fix | None:
    """Smaller steps: activations of hidden layers, experts and encoder scale with them."""
    situation, numbers = case.situation, case.numbers
    if situation.engine == "V0" and not situation.setting_on("enable_chunked_prefill"):
        return None  # there a step must hold a whole prompt
    if situation.phase is Phase.WEIGHT_LOAD:
        return None
    total = numbers.total.value if numbers.total else None
    limit = situation.step_limit("max_num_batched_tokens", total)
    seqs = situation.step_limit("max_num_seqs", total)
    least = max(_SMALLEST_STEP, int(seqs.value) if seqs else 0)
    if limit is None:
        known, to = None, _SMALL_STEP
        fits, proof = None, "the present value is not in the log"
    else:
        known = limit.value
        to = _largest_fitting(numbers.tried, numbers.free, int(known), least)
        fits, proof = _scaled(numbers.tried, numbers.free, known, to)
    if situation.subtype.startswith("kv."):
        fits, proof = _kv_by_activation(case, known, to)
    if limit is not None and to >= limit.value:
        return None
    proof += _default_note(limit)
    return case.fix(
        "fewer_batched_tokens",
        f"Process at most {format_count(to)} tokens in a step",
        [Change(flag="--max-num-batched-tokens", from_=int(known) if known else None, to=to)],
        fits=fits,
        proof=proof,
        cost="slower prefill: long prompts take more steps",
        safety=Safety.TRADEOFF,
        verify="the failed step passes; the profile line shows a smaller peak activation",
        when_not="one image or video needs more tokens than that, or it falls below --max-num-seqs",
        predicted={"max_num_batched_tokens": to},
        used=("tried", "free", "activation", "budget"),
    )


def _kv_by_activation(case: Case, known: float | None, to: int) -> tuple[bool | None, str]:
    """For a small pool: what a smaller profile peak gives back, when the peak is logged."""
    peak, pool = case.numbers.activation, case.numbers.available or case.numbers.budget
    if known is None or peak is None or pool is None:
        return (
            None,
            "the pool gets what the profile run no longer needs; its peak is not in the log",
        )
    back = peak.value * (1 - to / known)
    # The encoder and the sampler have their own part in the peak, so this is an upper bound.
    return (
        None,
        f"gives back up to {size(back)} of the {size(peak.value)} peak activation to a pool of {size(pool.value)}",
    )


def fewer_seqs(case: Case) -> Fix | None:
    """Fewer requests in a step: sampler rows, logits, graph sizes, dummy images of V0."""
    situation, numbers = case.situation, case.numbers
    if situation.subtype == "act.multimodal_encoder" and situation.engine == "V1":
        return None  # V1's encoder runs by its token budget, whatever the number of requests
    limit = situation.step_limit("max_num_seqs", numbers.total.value if numbers.total else None)
    dummies = situation.facts.get("sampler.dummy_requests")
    rows = situation.facts.number("sampler.dummy_requests") or (limit.value if limit else None)
    fits: bool | None = None
    if situation.subtype == "kv.preemption":
        running = situation.facts.number("serving.running_max")
        if running is None or running < 2:
            return None
        to, proof = (
            max(1, int(running * 0.75)),
            f"{running:.0f} requests ran at once when the pool was full",
        )
    elif rows is None:
        to, proof = 64, "the present value is not in the log"
    elif situation.subtype in ("act.sampler_warmup", "act.logits_logprobs"):
        to = _largest_fitting(numbers.tried, numbers.free, int(rows), 8)
        fits, proof = _scaled(numbers.tried, numbers.free, rows, to)
    elif situation.subtype == "act.multimodal_encoder":
        to, proof = 8, "V0 profiles one dummy image for every request that may run"
    else:
        to = max(4, int(rows) // 4)
        proof = "sequences take part in the peak; the share of one is not in the log"
    if rows is not None and to >= rows:
        return None
    if dummies is None:
        proof += _default_note(limit)
    return case.fix(
        "fewer_seqs",
        f"Run at most {to} requests at once",
        [Change(flag="--max-num-seqs", from_=int(rows) if rows else None, to=to)],
        fits=fits,
        proof=proof,
        cost="lower peak throughput under load",
        safety=Safety.TRADEOFF,
        verify="the failed step passes",
        when_not="more requests than that must run at once",
        predicted={"max_num_seqs": to},
        used=("tried", "free"),
    )


def enforce_eager(case: Case) -> Fix | None:
    """No CUDA graphs at all."""
    if case.now("enforce_eager") is True or not (case.gpu or case.npu):
        return None
    numbers, subtype = case.numbers, case.situation.subtype
    lack = missing(numbers)
    if subtype == "graph.capture_oom":
        fits: bool | None = True
        proof = "no graph is captured, so the failed step does not take place"
    elif subtype.startswith("kv."):
        if not case.situation.charges_graphs or numbers.graph_estimate is None:
            return None  # the budget holds no graphs that could be given back
        fits, proof = _graphs_to_pool(case, numbers.graph_estimate.value)
    elif numbers.graph_memory is not None and lack is not None:
        graphs = numbers.graph_memory.value
        fits = True if graphs >= lack else None
        proof = f"gives back the {size(graphs)} of the graphs; {size(lack)} are missing"
    else:
        fits, proof = (
            None,
            "gives back 0.3 to 3 GiB of graphs; how much they took here is not in the log",
        )
    return case.fix(
        "enforce_eager",
        "Run without CUDA graphs",
        [Change(flag="--enforce-eager", from_=False, to=True)],
        fits=fits,
        proof=proof,
        cost="slower decoding, most with small batches",
        safety=Safety.TRADEOFF,
        verify='no "Capturing CUDA graph" lines; the start goes on to serving',
        when_not="latency of single requests matters",
        used=("graph_estimate", "graph_memory", "tried", "free", "budget", "needed"),
    )


def _graphs_to_pool(case: Case, graphs: float) -> tuple[bool | None, str]:
    pool, request = case.numbers.available or case.numbers.budget, one_request(case.numbers)
    if pool is None:
        return None, f"gives the {size(graphs)} set aside for graphs to the pool"
    after = pool.value + graphs
    if request is not None:
        return (
            after >= request,
            f"{size(pool.value)} + {size(graphs)} set aside for graphs, {size(request)} needed",
        )
    if after <= 0:
        return False, f"the budget would still be {size(after)}"
    return None, f"the budget goes from {size(pool.value)} to {size(after)}"


def fewer_graphs(case: Case) -> Fix | None:
    """Graphs for small batches only."""
    flag = spelled("largest_graph", case.situation.version)
    if (
        flag is None
        or not case.gpu
        or case.now("enforce_eager") is True
        or case.situation.engine == "V0"
    ):
        return None
    return case.fix(
        "fewer_graphs",
        "Capture graphs only up to a batch of 64",
        [Change(flag=flag, to=64)],
        fits=None,
        proof="memory of the graphs falls about with their number; each one's size is not in the log",
        cost="batches above 64 decode without graphs",
        safety=Safety.TRADEOFF,
        verify="fewer steps in the capture bar, and a smaller figure when it is done",
        when_not="most of the load runs in large batches",
        used=("graph_memory", "graph_estimate"),
    )


def limit_images(case: Case) -> Fix | None:
    """Fewer images and videos in the profile run and in a request."""
    if not case.has_flag("--limit-mm-per-prompt") or not multimodal(case):
        return None
    now = case.situation.setting_text("limit_mm_per_prompt")
    older = in_range(case.situation.version, "<0.9") is True
    to = "image=1" if older else '{"image": 1, "video": 0}'
    if now == to:
        return None
    return case.fix(
        "limit_images",
        "Allow one image and no video in a prompt",
        [Change(flag="--limit-mm-per-prompt", from_=now, to=to)],
        fits=None,
        proof="the encoder is profiled for what a prompt may hold; with 0 for every kind it is left out",
        cost="requests with more images, or with video, are refused",
        safety=Safety.TRADEOFF,
        verify="the profile run passes",
        when_not="users send several images or video",
    )


def smaller_images(case: Case) -> Fix | None:
    """A lower pixel limit for the image processor."""
    if not case.has_flag("--mm-processor-kwargs"):
        return None
    return case.fix(
        "smaller_images",
        "Scale images down to a megapixel",
        [Change(flag="--mm-processor-kwargs", to='{"max_pixels": 1003520}')],
        fits=None,
        proof="encoder memory grows with the pixels of the largest image (their square without flash attention)",
        cost="fine print in large images gets lost",
        safety=Safety.CHANGES_RESULTS,
        verify="the failed step passes",
        when_not="the model's processor names its limit differently (max_pixels is Qwen-VL's)",
    )


def chunk_prompts(case: Case) -> Fix | None:
    """V0: long prompts in slices instead of one pass."""
    situation = case.situation
    length = case.numbers.asked_len
    if situation.engine != "V0" or not case.has_flag("--enable-chunked-prefill"):
        return None
    if situation.setting_on("enable_chunked_prefill") or (
        length and length.value > _V0_AUTO_CHUNKING
    ):
        return None
    return case.fix(
        "chunk_prompts",
        "Process prompts in slices of 2,048 tokens",
        [
            Change(flag="--enable-chunked-prefill", from_=False, to=True),
            Change(flag="--max-num-batched-tokens", to=2048),
        ],
        fits=None,
        proof="without it V0 profiles and runs a prompt of the full context in one pass",
        cost="slower first token for long prompts",
        safety=Safety.TRADEOFF,
        verify="the failed step passes",
        when_not="the model is multimodal or uses a sliding window or speculation: V0 then refuses it",
    )


def shorter_profile(case: Case) -> Fix | None:
    """V0 without slices: the profile pass is one prompt of the longest length."""
    situation, asked = case.situation, case.numbers.asked_len
    if situation.engine != "V0" or situation.setting_on("enable_chunked_prefill"):
        return None
    to = 4096
    if asked is not None:
        if asked.value <= to:
            return None
        to = max(to, 1 << (int(asked.value) - 1).bit_length() - 1)
    fits, proof = (
        None,
        "the profile pass of V0 runs one prompt of this length; the present one is not in the log",
    )
    if asked is not None:
        fits, proof = _scaled(case.numbers.tried, case.numbers.free, asked.value, to)
    return case.fix(
        "shorter_profile",
        f"Limit the context to {format_count(to)} tokens",
        [Change(flag="--max-model-len", from_=int(asked.value) if asked else None, to=to)],
        fits=fits,
        proof=proof,
        cost="longer requests are refused",
        safety=Safety.TRADEOFF,
        verify="the profile run passes",
        when_not="the context is above 32,768 already and runs in slices: shortening it can switch that off",
        used=("tried", "free", "asked_len"),
    )


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


def offload_weights(case: Case) -> Fix | None:
    """Some of the weights in host memory."""
    if not case.gpu or not case.has_flag("--cpu-offload-gb"):
        return None
    if (
        case.situation.subtype.startswith("alloc.")
        and case.situation.phase is not Phase.WEIGHT_LOAD
    ):
        return None
    now = round((case.situation.setting_number("cpu_offload") or 0) / GIB, 1)
    lack, shortfall = missing(case.numbers), request_shortfall(case.numbers)
    budget, weights = case.numbers.budget, case.numbers.weights
    fits: bool | None = None
    to = max(4, math.ceil(now) * 2)
    proof = (
        "takes that much off each GPU; how much of the model was still to come is not in the log"
    )
    if shortfall is not None and shortfall.value > 0:
        more = math.ceil(shortfall.value / GIB)
        to = math.ceil(now) + more
        if more > _MOST_OFFLOAD or (weights is not None and more * GIB > weights.value / 2):
            return None
        fits = True if weights is not None else None
        proof = f"the pool gains {more} GiB; {size(shortfall.value)} are missing"
    elif budget is not None and budget.value < 0:
        to = math.ceil(now) + math.ceil(-budget.value / GIB) + 2
        proof = f"the budget of {size(budget.value)} gains that much"
    elif lack:
        proof += f" (at least {size(lack)})"
    return case.fix(
        "offload_weights",
        f"Keep {to} GiB of the weights in host memory",
        [Change(flag="--cpu-offload-gb", from_=now, to=to)],
        fits=fits,
        proof=proof,
        cost=f"decoding waits for the bus; {to} GiB of pinned host memory per GPU",
        safety=Safety.TRADEOFF,
        verify="the weights line shows that much less",
        when_not="the host is short of memory, or speed matters: a smaller checkpoint is better",
        used=("budget", "tried", "free"),
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
    fits, outlook = None, {}
    if total is not None and free is not None and held is not None and share is not None:
        # Half a GiB stays with this process's own context.
        after = total.value - min(held, GIB / 2)
        fits = True if after >= share.value * total.value else None
        wanted = size(share.value * total.value)
        proof = (
            f"{size(held)} of {size(total.value)} are taken; without it up to {size(after)} are free for the {wanted} "
            "asked for"
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
        proof=found + (f"; {size(lack)} are missing" if lack is not None else ""),
        cost="nothing in most set-ups",
        verify='"reserved by PyTorch but unallocated" stays small, should it fail again',
        when_not="with sleep mode, custom all-reduce under DP x TP, KV connectors (NIXL, LMCache) or WSL2",
        used=("tried", "free", "reserved_idle"),
    )


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


# --- host and launch ------------------------------------------------------------------------------------------


def less_swap(case: Case) -> Fix | None:
    """V0's pinned CPU block pool."""
    now = case.situation.setting_number("swap_space")
    if not case.has_flag("--swap-space") or (case.situation.engine != "V0" and now is None):
        return None
    shown = now / GIB if now is not None else 4.0
    if shown <= 1:
        return None
    ranks = case.situation.ranks
    return case.fix(
        "less_swap",
        "Reserve 1 GiB of CPU swap space",
        [Change(flag="--swap-space", from_=round(shown, 1), to=1)],
        fits=None,
        proof=f"{shown:g} GiB are pinned for each of {ranks} GPU{'s' if ranks > 1 else ''}"
        + ("" if now is not None else " (the release's default)"),
        cost="preempted groups with several sequences have less room to swap to",
        safety=Safety.TRADEOFF,
        verify="the host keeps that much more memory free",
        when_not="requests use n > 1 or best_of: V0 can only swap those, and fails without the space",
    )


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
