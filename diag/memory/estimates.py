"""What cannot be counted beforehand, estimated: activation, CUDA graphs, collectives, the CUDA context.

In: a shape and a deployment's sizes. Out: bytes with the range they lie in. The coefficients were fitted to the figures
healthy logs print (`scripts/receipts.py` measures them again); ranges cover what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from diag.memory.shapes import ModelShape
from diag.release import as_release
from diag.units import GIB, MIB

# Bytes a logit takes while the sampler is profiled: float32 and 16-bit copies, sort values and indices, probabilities.
NATIVE_SAMPLER_BYTES = 38.5
FLASHINFER_SAMPLER_BYTES = 13.0
_FLASHINFER_FROM = Version("0.20.0")  # seen as the default in logs from here on
_RUNNER2_SAMPLER_BYTES = 6.5
_RUNNER2_FROM = Version(
    "0.29.0"
)  # the newer model runner for every model; for plain dense ones earlier
_RUNNER2_DENSE_FROM = Version("0.25.0")
HIDDEN_COPIES, INTER_COPIES = 8.2, 3.0  # of a token while one layer runs
ENCODER_BYTES = 2.5 * GIB  # of a 0.65e9-parameter vision tower on one largest image
_ENCODER_PARAMS = 650e6
_ENCODER_TOKENS = 16384  # of that image
GRAPH_BYTES = 330 * 1024  # of one layer in one captured size
_GRAPH_TP_FACTOR = 1.8
CONTEXT_BYTES = 450 * MIB
NON_TORCH_BYTES = 80 * MIB
EARLY_NON_TORCH_BYTES = (
    250 * MIB
)  # where the communicator is made after the snapshot, even for one rank
_NON_TORCH_RANK_BYTES = 30 * MIB
# NCCL's buffers by the number of ranks.
NCCL_BYTES = {2: 300 * MIB, 4: 600 * MIB, 8: 1500 * MIB, 16: 1800 * MIB}
# Two regions of the custom all-reduce, and torch's symmetric memory, in MiB by ranks: data-centre Hopper and Blackwell.
_ALL_REDUCE_MIB: dict[str, dict[int, float]] = {
    "9.0": {2: 64, 4: 32, 6: 0.5, 8: 0.25},
    "10.0": {2: 2, 4: 2, 6: 1, 8: 1},
}
_SYMMETRIC_MIB: dict[str, dict[int, float]] = {
    "9.0": {2: 64, 4: 32, 6: 64, 8: 64},
    "10.0": {2: 8, 4: 32, 6: 128, 8: 128},
}
_ALL_REDUCE_OTHER_MIB, _RANK_TABLE_MIB = 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes, the range they lie in, and where they come from in words."""

    bytes: int
    low: int
    high: int
    source: str


def within(value: float, pct: float, source: str, *, up: float | None = None) -> Estimate:
    """A value plus or minus `pct` percent; `up` when the upper side is wider."""
    high = value * (1 + (pct if up is None else up) / 100)
    return Estimate(
        bytes=round(value),
        low=round(value * max(0, 1 - pct / 100)),
        high=round(high),
        source=source,
    )


def sampler_bytes(version: Version | None, *, dense: bool) -> float:
    """Bytes a logit takes in the profile run of a release."""
    if version is None or as_release(version) >= _RUNNER2_FROM:
        return _RUNNER2_SAMPLER_BYTES
    release = as_release(version)
    if dense and release >= _RUNNER2_DENSE_FROM:
        return _RUNNER2_SAMPLER_BYTES
    return FLASHINFER_SAMPLER_BYTES if release >= _FLASHINFER_FROM else NATIVE_SAMPLER_BYTES


def activation(
    shape: ModelShape,
    *,
    version: Version | None,
    step: int,
    seqs: int,
    tp: int,
    draft_tokens: int = 0,
) -> Estimate:
    """Peak activation of the profile run on one rank: the larger of one layer and the sampler, and MoE scratch.

    Args: step (max_num_batched_tokens), seqs (max_num_seqs), tp (ranks), draft_tokens per request.
    """
    inter = max(shape.intermediate, 2 * shape.hidden if shape.experts else 0)
    if shape.experts and shape.moe_intermediate:
        inter = shape.moe_intermediate
    layer = step * 2 * (INTER_COPIES * inter / tp + HIDDEN_COPIES * shape.hidden)
    rows = min(seqs, step) * (1 + draft_tokens)
    logits = (
        0.0
        if shape.pooling
        else rows * shape.vocab * sampler_bytes(version, dense=not shape.experts)
    )
    keeps = step * shape.hidden * 2
    scratch = 0.0
    if shape.experts:
        inner = shape.moe_intermediate / tp
        scratch = step * shape.experts_per_token * (max(2 * inner, shape.hidden) + inner) * 2
    value = scratch + keeps + max(layer, logits)
    native = sampler_bytes(version, dense=not shape.experts) == NATIVE_SAMPLER_BYTES
    pct = 25 if native and logits > layer else 45
    what = f"{rows:,} rows of logits" if logits > layer else f"{step:,} tokens in one layer"
    return within(value, pct, f"{what}", up=pct * 1.4)


def encoder(shape: ModelShape, *, step: int | None = None) -> Estimate | None:
    """Peak of the vision or audio tower on its dummy items; None without such a tower. `step`: V0's token limit."""
    params = sum(block.total for block in shape.blocks if block.component == "vision")
    if not params:
        return None
    value = ENCODER_BYTES * (params / _ENCODER_PARAMS) ** 0.5
    if step is not None:
        value *= min(1, step / _ENCODER_TOKENS)
    return within(value, 70, "one largest image or video through the tower")


def capture_sizes(
    version: Version | None, engine: str, seqs: int, *, largest: int | None = None
) -> int:
    """Batch sizes that CUDA graphs are captured for by default."""
    release = None if version is None else as_release(version)
    if engine == "V0":
        return 3 + min(seqs, 256) // 8
    if release is not None and release < Version("0.10.0"):
        return 67
    top = min(2 * seqs, 512) if largest is None else largest
    steps = range(8, top + 1, 8)
    if release is not None and release < Version("0.11.2"):
        return 3 + len(steps)
    fine = [size for size in steps if size < 256]
    return sum(size <= top for size in (1, 2, 4)) + len(fine) + len(range(256, top + 1, 16))


def graphs(shape: ModelShape, *, sizes: int, tp: int) -> Estimate:
    """Memory of the captured graphs on one rank."""
    value = GRAPH_BYTES * shape.layers * sizes * (_GRAPH_TP_FACTOR if tp > 1 else 1)
    return within(value, 50, f"{sizes} sizes x {shape.layers} layers", up=90)


def collectives(ranks: int, capability: str | None, *, symmetric: bool) -> Estimate:
    """Buffers for talking to the other ranks: NCCL's (seen 0.2 to 2 GiB) and those of the custom all-reduce."""
    if ranks < 2:
        return Estimate(bytes=0, low=0, high=0, source="one rank: none")
    size = next(
        (NCCL_BYTES[count] for count in sorted(NCCL_BYTES) if count >= ranks), NCCL_BYTES[16]
    )
    key = capability or ""
    own = 2 * _ALL_REDUCE_MIB.get(key, {}).get(ranks, _ALL_REDUCE_OTHER_MIB) + _RANK_TABLE_MIB
    if symmetric:
        own += _SYMMETRIC_MIB.get(key, {}).get(ranks, 0)
    nccl = within(size, 50, "")
    extra = round(own * MIB)
    return Estimate(
        bytes=nccl.bytes + extra,
        low=nccl.low + extra,
        high=nccl.high + extra,
        source=f"NCCL for {ranks} ranks estimated; all-reduce buffers {own:.0f} MiB by vLLM's table",
    )


def non_torch(ranks: int, *, early: bool) -> Estimate:
    """Growth outside PyTorch after the start-up snapshot: kernels, handles; `early`: the communicator as well."""
    value = EARLY_NON_TORCH_BYTES if early else NON_TORCH_BYTES
    value += _NON_TORCH_RANK_BYTES * (ranks if ranks > 1 else 0)
    return within(value, 70, "kernels and handles", up=150)


def context() -> Estimate:
    """The CUDA context of one process."""
    return within(CONTEXT_BYTES, 30, "0.3 to 0.65 GiB seen", up=45)
