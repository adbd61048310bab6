"""Actions on the work of a step: tokens, sequences, graphs, images, prompts.

Each takes a Case and gives a Fix with its sum, or None when it makes no sense there.
"""

from __future__ import annotations

from diag.facts.model import Value
from diag.fixes.case import Case
from diag.fixes.conditions import multimodal
from diag.fixes.flags import spelled
from diag.fixes.model import Change, Fix
from diag.fixes.situation import Known
from diag.fixes.sums import PRINTED, outlook, size, spare_after
from diag.fixes.window import missing, one_request
from diag.release import in_range
from diag.terms import Phase, Safety
from diag.units import format_count

_SMALLEST_STEP = 256  # tokens
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
        return None, "what was asked for and what was free are not both in the log"
    after = tried.value * new / old
    proof = f"the request falls from {size(tried.value)} to about {size(after)}; {size(free.value)} free"
    return (
        (True, proof)
        if after <= 0.95 * free.value
        else (None, proof + ", what was allocated before it shrinks too")
    )


def _only_assumed(case: Case, limit: Known | None) -> bool:
    """While serving a step is as large as the load makes it: an unlogged default says nothing of its size."""
    return limit is not None and limit.default and case.situation.phase is Phase.SERVING


def _spare(case: Case, new: float, old: float | None) -> dict[str, Value]:
    """What stays free after a request that scales with a setting went from `old` to `new`."""
    tried = case.numbers.tried
    return spare_after(case, tried=tried.value * new / old) if tried and old else {}


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
    if situation.training:
        return None  # a trainer's step is not vLLM's
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
        usual = situation.default_step_tokens(total)
        if numbers.free is None and usual is not None and least <= usual < to:
            to = int(usual)  # nothing says how much there is room for
        fits, proof = _scaled(numbers.tried, numbers.free, known, to)
        fits = None if _only_assumed(case, limit) else fits
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
        predicted={"max_num_batched_tokens": to, **(_spare(case, to, known) if fits else {})},
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
    if situation.training:
        return None
    if situation.subtype == "act.multimodal_encoder" and situation.engine == "V1":
        return None  # V1's encoder runs by its token budget, whatever the number of requests
    limit = situation.step_limit("max_num_seqs", numbers.total.value if numbers.total else None)
    dummies = situation.facts.get("sampler.dummy_requests")
    rows = situation.facts.number("sampler.dummy_requests") or (limit.value if limit else None)
    fits: bool | None = None
    blocks = situation.facts.number("kv.state_blocks")
    if situation.subtype == "kv.no_blocks":
        if not blocks or blocks < 1:
            return None  # sequences take next to nothing of an empty pool
        to, fits = int(blocks), True
        proof = f"each running sequence needs a state block, and the pool holds {to}"
    elif situation.subtype == "kv.preemption":
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
        fits = None if dummies is None and _only_assumed(case, limit) else fits
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
        predicted={"max_num_seqs": to, **(_spare(case, to, rows) if fits else {})},
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
        predicted=_without_graphs(case) if subtype.startswith("kv.") else None,
        used=("graph_estimate", "graph_memory", "tried", "free", "budget", "needed"),
    )


def _without_graphs(case: Case) -> dict[str, Value]:
    pool, graphs = case.numbers.available or case.numbers.budget, case.numbers.graph_estimate
    return {} if pool is None or graphs is None else outlook(case, pool=pool.value + graphs.value)


def _graphs_to_pool(case: Case, graphs: float) -> tuple[bool | None, str]:
    pool, request = case.numbers.available or case.numbers.budget, one_request(case.numbers)
    if pool is None:
        return None, f"gives the {size(graphs)} set aside for graphs to the pool"
    after = pool.value + graphs
    if request is not None:
        return (
            after >= request + 3 * PRINTED,
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
    if in_range(situation.version, "<0.4") is True:
        return None  # older than the flag, and than the releases whose flags are listed
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
    if asked is not None and situation.subtype.startswith("kv."):
        proof = (
            f"the profile pass of V0 runs one prompt of the full context, {format_count(asked.value)} tokens here; "
            "the pool gets what a shorter one leaves"
        )
    elif asked is not None:
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
