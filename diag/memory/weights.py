"""Bytes of weights on one rank, by component, for a way of sharding and a storage format.

In: a `ModelShape` and the deployment's parallel sizes. Out: `Weights` of the fullest pipeline stage. Counts are
exact; formats add scales; what an engine pads or keeps beside the checkpoint is inside the stated error.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from diag.errors import UsageError
from diag.memory.kv_cache import ceil_div, kv_element_bytes, local_kv_heads
from diag.memory.quantization import Quantization
from diag.memory.shapes import Block, ModelShape, Split

_VOCAB_STEP = 64  # rows of a vocabulary matrix are padded to a multiple of it
_MXFP4_HIDDEN, _MXFP4_INTER = 256, 128  # alignment of the MXFP4 expert kernels
EXACT_PCT, PADDED_PCT, HEADER_PCT = 1.0, 4.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes on the fullest rank. `error_pct`: plus or minus percent; `source` in words."""

    parts: tuple[tuple[str, int], ...]
    error_pct: float
    source: str

    @property
    def total(self) -> int:
        """All components together."""
        return sum(size for _, size in self.parts)


def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """Layers of each pipeline stage: even, the surplus one each from the last but one stage backwards.

    >>> [len(stage) for stage in stage_layers(61, 4)]
    [15, 15, 16, 15]
    """
    if not 1 <= pp <= layers:
        raise UsageError(f"{pp} pipeline stages do not fit {layers} layers")
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-2 - extra] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def weights_bytes(
    shape: ModelShape,
    *,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    tp: int = 1,
    pp: int = 1,
    expert_ranks: int | None = None,
    language_only: bool = False,
) -> Weights:
    """Weights of the fullest rank.

    Args: dtype of what is not quantised (None or "auto": the checkpoint's); quantization (None: 16 bit); tp, pp
        (ranks, stages); expert_ranks with expert parallelism (tp x dp), None without; language_only leaves the
        vision tower out.
    Raises: UsageError when the model can't be divided so.
    """
    check_tp(shape, tp)
    size = kv_element_bytes("auto", dtype if dtype not in (None, "auto") else shape.dtype) or 2
    if shape.dtype == "float32" and dtype in (None, "auto"):
        size = 2  # vLLM's auto loads float32 checkpoints as float16
    stages = [
        _stage(
            shape, stage, layers, size, quantization, tp, expert_ranks, language_only=language_only
        )
        for stage, layers in enumerate(stage_layers(shape.layers, pp))
    ]
    fullest = max(range(pp), key=lambda stage: sum(stages[stage].values()))
    error = quantization.error_pct if quantization else EXACT_PCT
    if _padded_experts(shape, quantization):
        error = PADDED_PCT
    error += 100 * 0.1 * stages[fullest]["vision"] / max(1, sum(stages[fullest].values()))
    return _by_checkpoint(
        shape,
        quantization,
        Weights(
            parts=tuple((name, count) for name, count in stages[fullest].items() if count),
            error_pct=round(error, 1),
            source="parameter counts of the shape",
        ),
        dtype_given=dtype not in (None, "auto", shape.dtype),
        sharded=tp * pp > 1 or bool(expert_ranks and expert_ranks > 1),
    )


def check_tp(shape: ModelShape, tp: int) -> None:
    """Raises UsageError when the attention heads can't be divided by `tp` as vLLM asks."""
    if tp < 1 or shape.heads % tp:
        raise UsageError(
            f"{shape.name} has {shape.heads} attention heads: --tensor-parallel-size {tp} does not divide them",
            hint=f"use one of {', '.join(map(str, possible_tp(shape, max(tp, 8))))}",
        )


def possible_tp(shape: ModelShape, most: int) -> tuple[int, ...]:
    """Tensor-parallel sizes up to `most` that divide the heads and go well with the KV heads."""
    return tuple(
        tp
        for tp in range(1, most + 1)
        if shape.heads % tp == 0
        and (shape.latent or shape.kv_heads % tp == 0 or tp % max(1, shape.kv_heads) == 0)
    )


def _stage(  # noqa: PLR0913 - one place that knows all of them
    shape: ModelShape,
    stage: int,
    layers: range,
    dtype_bytes: float,
    quantization: Quantization | None,
    tp: int,
    expert_ranks: int | None,
    *,
    language_only: bool,
) -> Counter[str]:
    sizes: Counter[str] = Counter()
    last = layers.stop == shape.layers
    for block in shape.blocks:
        if block.component in ("vision", "encoder") and language_only:
            continue
        if block.layers is None:
            here = _outside_layers(block, shape, stage, last=last)
            sizes[block.component] += round(
                _local(block, shape, tp, expert_ranks) * dtype_bytes * here
            )
            continue
        own = [layer for layer in block.layers if layer in layers]
        params = _local(block, shape, tp, expert_ranks)
        for layer in own:
            module = block.module.replace("{i}", str(layer))
            if quantization and quantization.covers(block.component, module):
                params_stored = params * _padding(block, shape, quantization, tp)
                sizes[block.component] += round(params_stored * quantization.weight_bytes)
            else:
                sizes[block.component] += round(params * dtype_bytes)
    return sizes


def _outside_layers(block: Block, shape: ModelShape, stage: int, *, last: bool) -> int:
    """Whether a stage holds a block that belongs to no layer: 1 or 0."""
    if block.component == "head" or block.module == "model.norm":
        return int(last)
    if block.component == "embedding" and shape.tied:
        return int(stage == 0 or last)
    return int(stage == 0)


def _local(block: Block, shape: ModelShape, tp: int, expert_ranks: int | None) -> float:
    """Parameters of one layer's block on one rank."""
    if block.split is Split.NONE:
        return block.params
    if block.split is Split.VOCAB:
        rows = ceil_div(ceil_div(block.params, block.width), _VOCAB_STEP) * _VOCAB_STEP
        return ceil_div(rows, tp) * block.width
    if block.split is Split.KV_HEADS and shape.kv_heads:
        return block.params * local_kv_heads(shape.kv_heads, tp) / shape.kv_heads
    if block.split is Split.EXPERTS:
        return block.params / (expert_ranks or tp)
    return block.params / tp


def _padded_experts(shape: ModelShape, quantization: Quantization | None) -> bool:
    return bool(shape.experts and quantization and quantization.method == "mxfp4")


def _padding(block: Block, shape: ModelShape, quantization: Quantization, tp: int) -> float:
    """Growth of MXFP4 experts by the alignment of both their sides."""
    if block.component != "experts" or not _padded_experts(shape, quantization):
        return 1.0
    inter = shape.moe_intermediate / tp
    hidden = ceil_div(shape.hidden, _MXFP4_HIDDEN) * _MXFP4_HIDDEN / shape.hidden
    return hidden * ceil_div(round(inter), _MXFP4_INTER) * _MXFP4_INTER / inter


def _by_checkpoint(
    shape: ModelShape,
    quantization: Quantization | None,
    counted: Weights,
    *,
    dtype_given: bool,
    sharded: bool,
) -> Weights:
    """On one rank the checkpoint's own size, when it was read and is loaded as it is, is nearer than any count."""
    if shape.checkpoint_bytes is None or sharded or dtype_given or shape.dtype == "float32":
        return counted
    if quantization != shape.quantization or _padded_experts(shape, quantization):
        return counted
    parts = [(name, size) for name, size in shape.checkpoint_parts if name != "draft"]
    if shape.tied:
        parts = [(name, size) for name, size in parts if name != "head"]
    if parts:
        return Weights(parts=tuple(parts), error_pct=HEADER_PCT, source="safetensors headers")
    scale = shape.checkpoint_bytes / max(1, counted.total)
    if not 0.8 < scale < 1.25:  # the index counts a draft layer, or another format
        return counted
    scaled = tuple((name, round(size * scale)) for name, size in counted.parts)
    return Weights(parts=scaled, error_pct=EXACT_PCT, source="size in the safetensors index")
