"""The shape of a model: its weights by component and what each layer keeps in the KV cache.

In: nothing but counts. Out: `ModelShape`, made by `shape_config.from_config` (a config.json or a row of
`corpus/models/`), found by `find_shape.find_shape`. All counts are of the whole model, before sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diag.memory.kv_cache import Attention
from diag.memory.quantization import Quantization


class Split(str, Enum):
    """How tensor parallelism spreads a weight."""

    RANKS = "ranks"  # divided by the ranks
    KV_HEADS = "kv_heads"  # divided, but never below one KV head a rank
    EXPERTS = "experts"  # divided by the ranks, or over all experts' ranks with expert parallelism
    VOCAB = "vocab"  # rows padded to a multiple of 64, then divided
    NONE = "none"  # on every rank in full


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Weights of one kind. `params` of one layer; `layers` its layer numbers, None outside of the layers.

    `width` are the columns of a vocabulary matrix. `module` is a checkpoint name with "{i}" for the layer.
    """

    component: str  # embedding attention mlp experts router state norm head vision encoder
    module: str
    params: int
    split: Split = Split.RANKS
    layers: tuple[int, ...] | None = None
    width: int = 0

    @property
    def total(self) -> int:
        """Parameters in all layers."""
        return self.params * (1 if self.layers is None else len(self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a Mamba or linear-attention layer keeps of one sequence: elements, before sharding.

    Both parts are divided by the ranks. `ssm_dtype` None: as the model.
    """

    conv_elements: int
    ssm_elements: int
    ssm_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayers:
    """Layers that keep their past in the same way."""

    kind: Attention
    layers: tuple[int, ...]
    kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    window: int | None = None
    latent: int | None = None  # MLA: elements per token, not split by tensor parallelism
    state: State | None = None
    extra_bytes: int = 0  # per token and layer beside the cache proper (sparse-attention index)
    cross_tokens: int | None = None  # cross-attention: encoder tokens per request


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of a model. `context` is its own limit of length in tokens; None: it states none."""

    name: str
    source: str  # where it was read: a path, an address, or "built-in table"
    kind: str  # model_type of the config
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int | None
    dtype: str
    tied: bool
    blocks: tuple[Block, ...]
    cache: tuple[CacheLayers, ...]
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    multimodal: bool = False
    pooling: bool = False
    quantization: Quantization | None = None
    checkpoint_bytes: int | None = None  # all tensors of the checkpoint, when it was read
    checkpoint_parts: tuple[tuple[str, int], ...] = ()  # by component, from the headers
    notes: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        """Parameters, counted from the shape."""
        return sum(block.total for block in self.blocks)

    @property
    def hybrid(self) -> bool:
        """Layers of more than one kind of cache."""
        return len(self.cache) > 1

    @property
    def latent(self) -> bool:
        """Latent attention (MLA): the cache is not split by tensor parallelism."""
        return any(group.latent for group in self.cache)
