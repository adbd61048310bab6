"""How the KV cache of a model is laid out on one rank: pages, groups, blocks, tokens, what one request needs.

In: a `ModelShape`, the sharding, the cache's dtype and the release. Out: `KvLayout`, exact for every kind of
attention. Rules are those of vLLM's KV cache specs and of its grouping of unlike layers, rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from diag.errors import UsageError
from diag.memory.kv_cache import (
    DS_MLA_FP8_BYTES,
    Attention,
    ceil_div,
    kv_element_bytes,
    local_kv_heads,
)
from diag.memory.shapes import CacheLayers, ModelShape
from diag.memory.weights import stage_layers
from diag.release import as_release

_HYBRID_FROM = Version("0.9.2")  # unlike layers share one pool in groups
_CHUNKED_FROM = Version("0.14.1")  # chunked local attention too, by default
_LENGTH_TOKENS_FROM = Version("0.20.0")  # the printed token count is concurrency x length
_NULL_BLOCK_FROM = Version("0.29.0")
_KERNEL_BLOCK = 16
_MLA_BLOCK = 64
_SIMILAR = (
    1.5  # group sizes: the largest kind decides when it is below this multiple of the smallest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers of one kind that share block tables. `members` layers each hold one page per block."""

    kind: Attention
    layers: int
    window: int | None = None
    cross_tokens: int | None = None

    def blocks(self, length: int, block_size: int, step: int) -> int:
        """Blocks that one request of `length` tokens holds, with `step` tokens computed at once."""
        if self.kind is Attention.STATE:
            return 1
        if self.cross_tokens is not None:
            return ceil_div(self.cross_tokens, block_size)
        if self.window is None or self.kind is Attention.FULL:
            return ceil_div(length, block_size)
        if self.kind is Attention.SLIDING:
            return ceil_div(min(self.window - 1 + step, length), block_size) + 1
        return ceil_div(min(self.window + step, length), block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The cache of the stage that needs most. `page_bytes` of one block in one layer, `group_size` layers a group."""

    block_size: int
    page_bytes: int
    group_size: int
    groups: tuple[Group, ...]
    element_bytes: float
    token_bytes: float  # of one more token of a long request, all layers that grow with length
    state_bytes: int = 0  # of one sequence, whatever its length
    padding_layers: int = 0
    step: int = 2048
    reserved: int = 0
    counts_length: bool = True
    as_full: bool = False  # windows are not made use of by this release

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool on this rank."""
        return self.page_bytes * self.group_size

    def request_blocks(self, length: int) -> int:
        """Blocks of one request of full length, all groups."""
        return sum(group.blocks(length, self.block_size, self.step) for group in self.groups)

    def request_bytes(self, length: int) -> int:
        """Bytes of one request of full length."""
        return self.request_blocks(length) * self.block_bytes

    def pool_blocks(self, budget: int) -> int:
        """Blocks in a budget of bytes; 0 when it is negative."""
        return max(0, budget // self.block_bytes) if self.block_bytes else 0

    def concurrency(self, budget: int, length: int) -> float:
        """Requests of full length that fit at once."""
        return self.pool_blocks(budget) / max(1, self.request_blocks(length))

    def tokens(self, budget: int, length: int) -> int:
        """Tokens of the pool as this release prints them."""
        if len(self.groups) > 1 and self.counts_length:
            return int(self.concurrency(budget, length) * length)
        return self.pool_blocks(budget) // max(1, len(self.groups)) * self.block_size

    def fits(self, budget: int, length: int) -> bool:
        """Whether one request of full length fits."""
        return self.request_blocks(length) + self.reserved <= self.pool_blocks(budget)

    def longest(self, budget: int, most: int) -> int:
        """Longest length up to `most` that fits, in tokens; 0 when none does. Monotone, so bisection is exact."""
        if self.fits(budget, most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(budget, middle) else (low, middle)
        whole = low // self.block_size * self.block_size
        return whole if whole and len(self.groups) == 1 else low


def kv_layout(  # noqa: PLR0913 - what decides the layout
    shape: ModelShape,
    *,
    version: Version | None,
    engine: str = "V1",
    kv_dtype: str | None = None,
    dtype: str | None = None,
    tp: int = 1,
    pp: int = 1,
    block_size: int | None = None,
    step: int = 2048,
    hybrid: bool = True,
) -> KvLayout | None:
    """The layout on the stage that needs most; None for models without a KV cache (encoders).

    Args: step is max_num_batched_tokens; hybrid False: the hybrid manager is switched off.
    Raises: UsageError for a cache dtype that is not known.
    """
    if not shape.cache:
        return None
    model_dtype = dtype if dtype not in (None, "auto") else shape.dtype
    model_dtype = "float16" if model_dtype == "float32" and dtype in (None, "auto") else model_dtype
    element = kv_element_bytes(kv_dtype, model_dtype)
    if element is None:
        raise UsageError(f"--kv-cache-dtype {kv_dtype}: not known")
    maker = _Maker(
        shape, version, engine, kv_dtype or "auto", model_dtype or "bfloat16", element, tp
    )
    layouts = [
        maker.layout(range_, block_size, step, hybrid=hybrid)
        for range_ in stage_layers(shape.layers, pp)
    ]
    known = [item for item in layouts if item is not None]
    return max(known, key=lambda item: item.request_bytes(shape.context or 8192), default=None)


@dataclass(frozen=True, slots=True)
class _Maker:
    shape: ModelShape
    version: Version | None
    engine: str
    kv_dtype: str
    model_dtype: str
    element: float
    tp: int

    def layout(
        self, stage: range, block: int | None, step: int, *, hybrid: bool
    ) -> KvLayout | None:
        kinds = [
            (group, sum(layer in stage for layer in group.layers)) for group in self.shape.cache
        ]
        kinds = [(group, count) for group, count in kinds if count]
        if not kinds:
            return None
        attention = [(group, count) for group, count in kinds if group.kind is not Attention.STATE]
        state = max((self.state_bytes(group) for group, _ in kinds), default=0)
        token = max((self.token_bytes(group) for group, _ in attention), default=0)
        size = self._block_size(block, state, token)
        page = max(round(token * size), state)
        merge = not (hybrid and self._hybrid()) and not state
        groups = self._merged(kinds) if merge else self._groups(kinds)
        group_size = max(item.layers for item in groups)
        total = sum(count for _, count in kinds)
        growing = sum(self.token_bytes(g) * n for g, n in attention if self._grows(g, merge=merge))
        uneven = len({self.token_bytes(group) for group, _ in attention}) > 1
        if uneven and merge:  # one group of unlike pages: no padding
            page = round(growing * size / group_size)
        return KvLayout(
            block_size=size,
            page_bytes=page,
            group_size=group_size,
            groups=groups,
            element_bytes=self.element,
            token_bytes=growing,
            state_bytes=sum(self.state_bytes(group) * count for group, count in kinds),
            padding_layers=group_size * len(groups) - total,
            step=step,
            reserved=int(self._from(_NULL_BLOCK_FROM)),
            counts_length=self._from(_LENGTH_TOKENS_FROM),
            as_full=merge and any(group.window for group, _ in kinds),
        )

    def _from(self, release: Version) -> bool:
        return self.version is None or as_release(self.version) >= release

    def _hybrid(self) -> bool:
        return self.engine == "V1" and self._from(_HYBRID_FROM)

    def _grows(self, group: CacheLayers, *, merge: bool) -> bool:
        return group.cross_tokens is None and (
            group.kind is Attention.FULL or merge or not group.window
        )

    def _block_size(self, asked: int | None, state: int, token: float) -> int:
        """Tokens a block: asked or default, raised until an attention page holds a layer's whole state."""
        size = asked or (_MLA_BLOCK if self.shape.latent and self.engine == "V1" else _KERNEL_BLOCK)
        if not state or not token:
            return size
        return max(
            size, ceil_div(ceil_div(state, max(1, round(token))), _KERNEL_BLOCK) * _KERNEL_BLOCK
        )

    def token_bytes(self, group: CacheLayers) -> float:
        """Bytes of one token in one layer of a kind."""
        if group.kind is Attention.STATE:
            return 0
        if group.latent:
            packed = self.kv_dtype == "fp8_ds_mla" or (group.extra_bytes and self.element == 1)
            base = DS_MLA_FP8_BYTES if packed else group.latent * self.element
            return base + group.extra_bytes
        heads = local_kv_heads(group.kv_heads, self.tp)
        return heads * (group.head_dim + group.head_dim_v) * self.element

    def state_bytes(self, group: CacheLayers) -> int:
        """Bytes of one sequence's state in one layer of a kind."""
        if group.state is None:
            return 0
        conv = kv_element_bytes("auto", self.model_dtype) or 2
        ssm = kv_element_bytes("auto", group.state.ssm_dtype) or conv
        return round((group.state.conv_elements * conv + group.state.ssm_elements * ssm) / self.tp)

    def _merged(self, kinds: list[tuple[CacheLayers, int]]) -> tuple[Group, ...]:
        """All layers as one group of full attention."""
        cross = [g.cross_tokens for g, _ in kinds if g.cross_tokens]
        if cross:
            return self._groups(kinds)
        windows = {group.window if group.kind is Attention.SLIDING else None for group, _ in kinds}
        only = windows.pop() if len(windows) == 1 and self.engine == "V1" else None
        kind = Attention.SLIDING if only else Attention.FULL
        return (Group(kind=kind, layers=sum(count for _, count in kinds), window=only),)

    def _groups(self, kinds: list[tuple[CacheLayers, int]]) -> tuple[Group, ...]:
        """Groups of an equal number of layers; short ones are filled up with padding layers."""
        by_kind: dict[tuple[Attention, int | None, int | None], int] = {}
        for group, count in kinds:
            windowed = group.kind in (Attention.SLIDING, Attention.CHUNKED)
            chunked = group.kind is Attention.CHUNKED and not self._from(_CHUNKED_FROM)
            kind = Attention.FULL if chunked else group.kind
            key = (kind, group.window if windowed and not chunked else None, group.cross_tokens)
            by_kind[key] = by_kind.get(key, 0) + count
        smallest, largest = min(by_kind.values()), max(by_kind.values())
        size = largest if largest < smallest * _SIMILAR else smallest
        return tuple(
            Group(kind=kind, layers=size, window=window, cross_tokens=cross)
            for (kind, window, cross), count in by_kind.items()
            for _ in range(ceil_div(count, size))
        )
