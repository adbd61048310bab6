"""Which layer of a model does what: attention, latent attention, state, MLP, experts.

In: the reader of a config and the counts that all layers share. Out: weights (`Block`) and cache (`CacheLayers`) by
layer.
"""

from __future__ import annotations

from diag.memory.kv_cache import Attention
from diag.memory.shape_reader import MAX_LAYERS, Reader
from diag.memory.shape_states import StateLayer
from diag.memory.shapes import Block, CacheLayers, Split

# What a config leaves unsaid and the model's code decides.
_TWO_MATRICES = frozenset(
    {"gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "starcoder2", "phi", "gpt_neox", "gptj", "nemotron",
     "nemotron_h", "whisper", "bert", "roberta", "xlm-roberta", "xlm_roberta", "apertus", "arcee", "deberta-v2"}
)  # fmt: skip
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "gpt2", "gpt_bigcode", "opt", "bloom", "phi",
                       "starcoder2", "bert", "roberta", "xlm-roberta", "glm4", "chatglm", "glm4_moe"})  # fmt: skip
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "xlm_roberta", "deberta-v2"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
_QWEN35 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "cohere2": 4,
    "gpt_oss": 2,
    "olmo3": 4,
    "exaone4": 4,
}


class LayerPlan:
    """Which layer does what: attention, latent attention, state, MLP, experts."""

    def __init__(
        self, read: Reader, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int
    ) -> None:
        self.read, self.layers, self.hidden = read, layers, hidden
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.pattern = str(read.config.get("hybrid_override_pattern") or "")[:MAX_LAYERS]
        keys = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        self.experts = read.find(*keys) or 0
        if self.experts == 1:
            self.experts = 0
        inter = read.find(
            "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"
        )
        self.inter = inter or (0 if self.experts else 4 * hidden)
        self.moe_inter = read.find("moe_intermediate_size", "expert_ffn_hidden_size") or self.inter
        if read.kind in ("llama4", "llama4_text"):
            self.inter = read.find("intermediate_size_mlp") or self.inter
        self.matrices = 2 if read.kind in _TWO_MATRICES else 3
        self.state_layers = self._state_layers()
        self.moe_layers = self._moe_layers()

    # --- which layers --------------------------------------------------------------------------------------------

    def _state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state instead of a KV cache."""
        read, everyone = self.read, range(self.layers)
        if self.pattern:
            return tuple(i for i, mark in enumerate(self.pattern) if mark == "M")
        types = read.types()
        if types and read.kind == "minimax_m1":
            return tuple(i for i in everyone if i < len(types) and types[i] == "0")
        stateful = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
        found = tuple(i for i, kind in enumerate(types[: self.layers]) if kind in stateful)
        if found:
            return found
        interval = read.find("full_attention_interval")
        if interval and read.find("linear_num_value_heads"):
            return tuple(i for i in everyone if (i + 1) % interval)
        period = read.find("attn_layer_period")
        if period and read.kind == "jamba":
            offset = read.find("attn_layer_offset") or 0
            return tuple(i for i in everyone if i % period != offset)
        if read.kind in ("mamba", "mamba2", "falcon_mamba"):
            return tuple(everyone)
        return ()

    def attention_layers(self) -> tuple[int, ...]:
        """Layers with a KV cache."""
        if self.pattern:
            return tuple(i for i, mark in enumerate(self.pattern) if mark == "*")
        return tuple(i for i in range(self.layers) if i not in set(self.state_layers))

    def _moe_layers(self) -> tuple[int, ...]:
        if not self.experts:
            return ()
        read, everyone = self.read, range(self.layers)
        if self.pattern:
            return tuple(i for i, mark in enumerate(self.pattern) if mark == "E")
        period = read.find("expert_layer_period")
        if period:
            offset = read.find("expert_layer_offset") or 0
            return tuple(i for i in everyone if i % period == offset)
        if read.kind in ("llama4", "llama4_text"):
            step = max(1, read.find("interleave_moe_layer_step") or 1)
            return tuple(i for i in everyone if (i + 1) % step == 0)
        first = read.find("first_k_dense_replace", "moe_layer_start_index") or 0
        step = max(1, read.find("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval") or 1)
        dense = read.config.get("mlp_only_layers")
        skipped = set(dense) if isinstance(dense, list) else set()
        return tuple(i for i in everyone if i >= first and (i + 1) % step == 0 and i not in skipped)

    def _dense_layers(self) -> tuple[int, ...]:
        if self.pattern:
            return tuple(i for i, mark in enumerate(self.pattern) if mark == "-")
        moe = set(self.moe_layers)
        return tuple(i for i in range(self.layers) if i not in moe)

    # --- weights -------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        """Weights of all layers, and the last norm."""
        attention = self.attention_layers()
        found = self._latent(attention) if self._is_latent() else self._attention(attention)
        found += self._states()
        found += self._mlp()
        norms = self.hidden * (4 if self.read.kind in _FOUR_NORMS else 2)
        if self.pattern:
            norms = self.hidden
        every = tuple(range(self.layers))
        found.append(block("norm", "model.layers.{i}.input_layernorm", norms, Split.NONE, every))
        found.append(block("norm", "model.norm", self.hidden, Split.NONE))
        if self.read.kind == "whisper":
            found += self._cross_attention(every)
        return found

    def _is_latent(self) -> bool:
        return bool(self.read.find("kv_lora_rank"))

    def _attention(self, layers: tuple[int, ...]) -> list[Block]:
        if not layers:
            return []
        read, path = self.read, "model.layers.{i}.self_attn."
        bias = read.kind in _QKV_BIAS or read.flag("attention_bias") or read.flag("qkv_bias")
        queries = self.heads * self.head_dim
        gated = read.flag("attn_output_gate", default=read.kind in ("qwen3_next", *_QWEN35))
        found: list[Block] = []
        for heads, dim, some in self._by_heads(layers):
            keys = heads * dim
            wide = self.heads * dim if dim != self.head_dim else queries
            q = self.hidden * wide * (2 if gated else 1) + wide * bias
            kv = 2 * (self.hidden * keys + keys * bias)
            found += [
                block("attention", f"{path}q_proj", q, Split.RANKS, some),
                block("attention", f"{path}k_proj", kv, Split.KV_HEADS, some),
                block("attention", f"{path}o_proj", wide * self.hidden, Split.RANKS, some),
            ]
        return found

    def _by_heads(self, layers: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
        """KV heads, head size and layers; global layers may have their own heads."""
        full = set(self.full_layers(layers))
        heads = self.read.find("num_global_key_value_heads") or self.kv_heads
        dim = self.read.find("global_head_dim") or self.head_dim
        if (heads, dim) == (self.kv_heads, self.head_dim):
            return [(heads, dim, layers)]
        return [
            (heads, dim, tuple(i for i in layers if i in full)),
            (self.kv_heads, self.head_dim, tuple(i for i in layers if i not in full)),
        ]

    def _latent(self, layers: tuple[int, ...]) -> list[Block]:
        """Latent attention: small down-projections on every rank, the rest divided by heads."""
        read, path = self.read, "model.layers.{i}.self_attn."
        rank, rope = read.need("kv_lora_rank"), read.find("qk_rope_head_dim") or 64
        nope, value = read.need("qk_nope_head_dim"), read.need("v_head_dim")
        q_rank = read.find("q_lora_rank") or 0
        down = self.hidden * (rank + rope) + self.hidden * q_rank
        q = (q_rank or self.hidden) * self.heads * (nope + rope)
        up = rank * self.heads * (nope + value)
        found = [
            block("attention", f"{path}kv_a_proj_with_mqa", down, Split.NONE, layers),
            block("attention", f"{path}q_b_proj", q, Split.RANKS, layers),
            block("attention", f"{path}kv_b_proj", up, Split.RANKS, layers),
            block(
                "attention", f"{path}o_proj", self.heads * value * self.hidden, Split.RANKS, layers
            ),
        ]
        index_heads, index_dim = read.find("index_n_heads"), read.find("index_head_dim")
        if index_heads and index_dim:
            index = q_rank * index_heads * index_dim + self.hidden * (index_dim + index_heads)
            found.append(block("attention", f"{path}indexer", index, Split.NONE, layers))
        return found

    def _cross_attention(self, layers: tuple[int, ...]) -> list[Block]:
        size = 4 * self.hidden * self.hidden + self.hidden
        return [block("attention", "model.layers.{i}.encoder_attn", size, Split.RANKS, layers)]

    def _state_layer(self) -> StateLayer:
        return StateLayer(self.read, self.hidden, self.heads, self.head_dim)

    def _states(self) -> list[Block]:
        size = self._state_layer().params() if self.state_layers else 0
        if not size:
            return []
        path = "model.layers.{i}.linear_attn"
        return [block("linear_attention", path, size, Split.RANKS, self.state_layers)]

    def _mlp(self) -> list[Block]:
        read = self.read
        found: list[Block] = []
        dense = self._dense_layers()
        if dense and self.inter:
            size = self.matrices * self.hidden * self.inter
            component = "experts" if read.kind == "jamba" else "mlp"  # vLLM runs them as one expert
            found.append(
                block(component, "model.layers.{i}.mlp.down_proj", size, Split.RANKS, dense)
            )
        if not self.moe_layers:
            shared = read.find("shared_intermediate_size")
            if shared and not self.inter:
                size = 3 * self.hidden * shared
                found.append(block("mlp", "model.layers.{i}.shared_mlp", size, Split.RANKS, dense))
            return found
        one = self.matrices * self.hidden * self.moe_inter
        if read.kind == "gpt_oss":
            one += 2 * self.moe_inter + self.hidden  # biases
        path = "model.layers.{i}.mlp."
        found += [
            block(
                "experts",
                f"{path}experts.0.down_proj",
                one * self.experts,
                Split.EXPERTS,
                self.moe_layers,
            ),
            block("router", f"{path}gate", self.hidden * self.experts, Split.NONE, self.moe_layers),
        ]
        if shared := self._shared():
            size = self.matrices * self.hidden * shared
            found.append(
                block("mlp", f"{path}shared_experts.down_proj", size, Split.RANKS, self.moe_layers)
            )
        return found

    def _shared(self) -> int:
        """Intermediate width of the experts that every token passes."""
        read = self.read
        wide = read.find("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                         "shared_intermediate_size")  # fmt: skip
        if wide:
            return wide
        if read.kind in ("llama4", "llama4_text"):
            return self.moe_inter
        count = read.find(
            "n_shared_experts", "moe_num_shared_experts", "num_shared_experts", "num_shared_expert"
        )
        return (count or 0) * self.moe_inter

    # --- cache ---------------------------------------------------------------------------------------------------

    def full_layers(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Of the attention layers those that see everything."""
        return tuple(i for i in layers if i not in set(self._windowed(layers)))

    def _windowed(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Attention layers with a sliding window or a chunk."""
        read = self.read
        types = read.types()
        if any(kind in ("sliding_attention", "chunked_attention") for kind in types):
            windowed = ("sliding_attention", "chunked_attention")
            return tuple(i for i in layers if i < len(types) and types[i] in windowed)
        if read.kind in ("llama4", "llama4_text"):
            return tuple(i for i in layers if (i + 1) % 4)
        if not self._window() or read.config.get("use_sliding_window") is False:
            return ()
        pattern = read.find("sliding_window_pattern", "_sliding_window_pattern")
        if pattern is None and read.kind in _PATTERNS:
            pattern = _PATTERNS[read.kind]
        if pattern and pattern > 1:
            return tuple(i for i in layers if (i + 1) % pattern)
        return layers

    def _window(self) -> int | None:
        read = self.read
        if read.kind in ("llama4", "llama4_text"):
            return read.find("attention_chunk_size")
        if read.kind in (
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen2_vl",
            "qwen2_5_vl",
        ) and not read.flag("use_sliding_window"):
            return None
        return read.find("sliding_window", "sliding_window_size")

    def cache(self) -> tuple[CacheLayers, ...]:
        """Layers by the way they keep their past."""
        read, layers = self.read, self.attention_layers()
        if read.kind in ENCODERS:
            return ()
        found: list[CacheLayers] = []
        windowed = self._windowed(layers)
        shared = read.find("num_kv_shared_layers") or 0  # the last ones reuse earlier layers' cache
        keeping = {i for i in layers if i < self.layers - shared}
        if self._is_latent():
            latent = read.need("kv_lora_rank") + (read.find("qk_rope_head_dim") or 64)
            index = read.find("index_head_dim") if read.find("index_n_heads") else None
            extra = index + 4 * (index // 128) if index else 0
            return self._with_state(
                [CacheLayers(kind=Attention.FULL, layers=layers, latent=latent, extra_bytes=extra)]
            )
        for heads, dim, some in self._by_heads(layers):
            full = tuple(i for i in some if i not in set(windowed) and i in keeping)
            local = tuple(i for i in some if i in set(windowed) and i in keeping)
            if full:
                found.append(_cache(Attention.FULL, full, heads, dim))
            if local:
                kind = Attention.CHUNKED if read.kind.startswith("llama4") else Attention.SLIDING
                found.append(_cache(kind, local, heads, dim, self._window()))
        if read.kind == "whisper":
            tokens = read.find("max_source_positions") or 1500
            cross = _cache(Attention.FULL, layers, self.kv_heads, self.head_dim)
            found.append(
                CacheLayers(
                    kind=cross.kind,
                    layers=layers,
                    kv_heads=cross.kv_heads,
                    head_dim=cross.head_dim,
                    head_dim_v=cross.head_dim_v,
                    cross_tokens=tokens,
                )
            )
        return self._with_state(found)

    def _with_state(self, found: list[CacheLayers]) -> tuple[CacheLayers, ...]:
        state = self._state_layer().state() if self.state_layers else None
        if state is not None:
            found.append(CacheLayers(kind=Attention.STATE, layers=self.state_layers, state=state))
        return tuple(found)


def _cache(
    kind: Attention, layers: tuple[int, ...], heads: int, dim: int, window: int | None = None
) -> CacheLayers:
    return CacheLayers(
        kind=kind, layers=layers, kv_heads=heads, head_dim=dim, head_dim_v=dim, window=window
    )


def block(
    component: str, module: str, params: int, split: Split, layers: tuple[int, ...] | None = None
) -> Block:
    """A block of weights; `params` of one layer."""
    return Block(component=component, module=module, params=params, split=split, layers=layers)
