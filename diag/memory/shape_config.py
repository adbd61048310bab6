"""A Hugging Face config.json -> `ModelShape`.

In: the parsed JSON of one model (text, multimodal, hybrid, MoE). Out: weights by component and cache by layer.
Key names are those of the public configs; a key that decides sizes and is missing is an error, not a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diag.errors import UsageError
from diag.memory.kv_cache import Attention
from diag.memory.quantization import of_config
from diag.memory.shapes import Block, CacheLayers, ModelShape, Split, State

Config = Mapping[str, Any]

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "language_model")
_MAX_LAYERS, _MAX_COUNT = 2_000, 10**8
# What a config leaves unsaid and the model's code decides.
_TIED = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "gpt2", "gpt_bigcode", "opt", "bloom", "mpt",
     "falcon", "whisper", "phimoe_tied", "starcoder2"}
)  # fmt: skip
_TWO_MATRICES = frozenset(
    {"gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "starcoder2", "phi", "gpt_neox", "gptj", "nemotron",
     "nemotron_h", "whisper", "bert", "roberta", "xlm-roberta", "xlm_roberta", "apertus", "arcee", "deberta-v2"}
)  # fmt: skip
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "gpt2", "gpt_bigcode", "opt", "bloom", "phi",
                       "starcoder2", "bert", "roberta", "xlm-roberta", "glm4", "chatglm", "glm4_moe"})  # fmt: skip
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "xlm_roberta", "deberta-v2"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})


def text_config(config: Config) -> Config:
    """The language model's part of a config, with dtype and tying of the outer one where it is silent."""
    inner: Config = config
    for _ in range(2):  # Qwen-Omni nests twice
        body = next((inner[key] for key in _TEXT if isinstance(inner.get(key), Mapping)), None)
        if body is None:
            break
        inner = body
    if inner is config:
        return config
    outer = {
        key: config[key]
        for key in ("torch_dtype", "dtype", "tie_word_embeddings", "architectures")
        if config.get(key) is not None
    }
    return {**outer, **{key: value for key, value in inner.items() if value is not None}}


class _Reader:
    """Keys of a config with their older spellings; counts are checked once, here."""

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name
        self.kind = str(config.get("model_type") or "").lower()

    def find(self, *keys: str) -> int | None:
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, (list, tuple)) and value and len(set(map(str, value))) == 1:
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not 0 <= value <= _MAX_COUNT:
                raise UsageError(f"{self.name}: {key} is {value}, not a count")
            return int(value)
        return None

    def need(self, *keys: str) -> int:
        value = self.find(*keys)
        if value is None or value < 1:
            raise UsageError(
                f"{self.name}: config has no {keys[0]}",
                hint="give the config.json of a language model",
            )
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def types(self) -> list[str]:
        """The kind of each layer, when the config lists them."""
        for key in ("layer_types", "layers_block_type", "attn_type_list"):
            value = self.config.get(key)
            if isinstance(value, Sequence) and not isinstance(value, str):
                return [str(item) for item in value[:_MAX_LAYERS]]
        return []


def from_config(
    config: Config,
    *,
    name: str,
    source: str,
    vision_params: int | None = None,
    head: bool = True,
) -> ModelShape:
    """The shape a config describes.

    Args: vision_params of the towers beside the language model, when known (else estimated from the config); head
        is False for embedding models, which load none.
    Raises: UsageError when it lacks a count that decides a size.
    """
    text = text_config(config)
    read = _Reader(text, name)
    layers = read.find("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    if not layers or layers > _MAX_LAYERS:
        layers = read.need("num_hidden_layers")
    hidden = read.need("hidden_size", "n_embd", "d_model", "dim")
    heads = read.need("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
    kv_heads = _kv_heads(read, heads)
    head_dim = read.find("head_dim", "kv_channels", "attention_head_dim") or hidden // heads
    vocab = read.find("padded_vocab_size") or read.need("vocab_size")
    plan = _Plan(read, layers, hidden, heads, kv_heads, head_dim)
    pooling = read.kind in _ENCODERS or not head
    tied = read.flag("tie_word_embeddings", default=read.kind in _TIED)
    blocks = (
        *_vocabulary(read, hidden, vocab, tied=tied, head=not pooling),
        *plan.blocks(),
        *_side(config, hidden, vision_params),
    )
    return ModelShape(
        name=name,
        source=source,
        kind=str(config.get("model_type") or read.kind),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=plan.inter,
        vocab=vocab,
        context=_context(read),
        dtype=_dtype(config, text),
        tied=tied,
        blocks=tuple(blocks),
        cache=plan.cache(),
        experts=plan.experts,
        experts_per_token=read.find("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts")
        or (1 if plan.experts else 0),
        moe_intermediate=plan.moe_inter if plan.experts else 0,
        multimodal=bool(vision_params)
        or any(key in config for key in ("vision_config", "audio_config", "visual")),
        pooling=pooling,
        quantization=of_config(config) or of_config(text),
    )


def _kv_heads(read: _Reader, heads: int) -> int:
    if read.kind == "falcon" and not read.flag("new_decoder_architecture"):
        return 1 if read.flag("multi_query", default=True) else heads
    if read.kind == "gpt_bigcode":
        return 1 if read.flag("multi_query", default=True) else heads
    keys = (
        "num_key_value_heads",
        "multi_query_group_num",
        "num_kv_heads",
        "n_kv_heads",
        "kv_n_heads",
    )
    return read.find(*keys) or heads


def _context(read: _Reader) -> int | None:
    keys = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length",
            "model_max_length", "max_target_positions")  # fmt: skip
    found = read.find(*keys)
    scaling = read.config.get("rope_scaling") or read.config.get("rope_parameters")
    if (
        found
        and isinstance(scaling, Mapping)
        and "original_max_position_embeddings" not in read.config
    ):
        kind = scaling.get("rope_type") or scaling.get("type")
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        if kind == "yarn" and isinstance(original, int) and isinstance(factor, (int, float)):
            return max(found, round(original * min(factor, 1000)))
    return found


def _dtype(config: Config, text: Config) -> str:
    for body in (config, text):
        value = body.get("torch_dtype") or body.get("dtype")
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return "bfloat16"


def _vocabulary(read: _Reader, hidden: int, vocab: int, *, tied: bool, head: bool) -> list[Block]:
    width = read.find("word_embed_proj_dim") or hidden
    blocks = [
        Block(
            component="embedding",
            module="model.embed_tokens",
            params=vocab * width,
            split=Split.VOCAB,
            width=width,
        )
    ]
    if read.kind in ("gpt2", "opt", "whisper", *_ENCODERS):
        positions = _context(read) or 0
        blocks.append(
            Block(
                component="embedding",
                module="model.embed_positions",
                params=(positions + 2 * (read.kind == "opt")) * hidden,
                split=Split.NONE,
            )
        )
    if head and not tied:
        blocks.append(
            Block(
                component="head",
                module="lm_head",
                params=vocab * hidden,
                split=Split.VOCAB,
                width=hidden,
            )
        )
    return blocks


class _Plan:
    """Which layer does what: attention, latent attention, state, MLP, experts."""

    def __init__(
        self, read: _Reader, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int
    ) -> None:
        self.read, self.layers, self.hidden = read, layers, hidden
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.pattern = str(read.config.get("hybrid_override_pattern") or "")[:_MAX_LAYERS]
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
        found = tuple(
            i for i in everyone if i >= first and (i + 1) % step == 0 and i not in skipped
        )
        return found

    def _dense_layers(self) -> tuple[int, ...]:
        if self.pattern:
            return tuple(i for i, mark in enumerate(self.pattern) if mark == "-")
        moe = set(self.moe_layers)
        return tuple(i for i in range(self.layers) if i not in moe)

    # --- weights -------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        attention = self.attention_layers()
        found = self._latent(attention) if self._is_latent() else self._attention(attention)
        found += self._states()
        found += self._mlp()
        norms = self.hidden * (4 if self.read.kind in _FOUR_NORMS else 2)
        if self.pattern:
            norms = self.hidden
        every = tuple(range(self.layers))
        found.append(_block("norm", "model.layers.{i}.input_layernorm", norms, Split.NONE, every))
        found.append(_block("norm", "model.norm", self.hidden, Split.NONE))
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
                _block("attention", f"{path}q_proj", q, Split.RANKS, some),
                _block("attention", f"{path}k_proj", kv, Split.KV_HEADS, some),
                _block("attention", f"{path}o_proj", wide * self.hidden, Split.RANKS, some),
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
            _block("attention", f"{path}kv_a_proj_with_mqa", down, Split.NONE, layers),
            _block("attention", f"{path}q_b_proj", q, Split.RANKS, layers),
            _block("attention", f"{path}kv_b_proj", up, Split.RANKS, layers),
            _block(
                "attention", f"{path}o_proj", self.heads * value * self.hidden, Split.RANKS, layers
            ),
        ]
        index_heads, index_dim = read.find("index_n_heads"), read.find("index_head_dim")
        if index_heads and index_dim:
            index = q_rank * index_heads * index_dim + self.hidden * (index_dim + index_heads)
            found.append(_block("attention", f"{path}indexer", index, Split.NONE, layers))
        return found

    def _cross_attention(self, layers: tuple[int, ...]) -> list[Block]:
        size = 4 * self.hidden * self.hidden + self.hidden
        return [_block("attention", "model.layers.{i}.encoder_attn", size, Split.RANKS, layers)]

    def _states(self) -> list[Block]:
        size = self._state_params()
        if not size or not self.state_layers:
            return []
        path = "model.layers.{i}.linear_attn"
        return [_block("linear_attention", path, size, Split.RANKS, self.state_layers)]

    def _state_params(self) -> int:
        read, hidden = self.read, self.hidden
        if read.find("linear_num_value_heads"):  # gated delta net
            key, value, heads = self._delta()
            conv = read.find("linear_conv_kernel_dim") or 4
            return (
                hidden * (2 * key + 2 * value + 2 * heads)
                + (2 * key + value) * conv
                + value * hidden
            )
        if read.kind == "jamba" or read.find("mamba_dt_rank", "time_step_rank"):  # Mamba 1
            inner = (read.find("mamba_expand", "expand") or 2) * hidden
            state = read.find("mamba_d_state", "state_size") or 16
            rank = read.find("mamba_dt_rank", "time_step_rank") or hidden // 16
            conv = (read.find("mamba_d_conv", "conv_kernel") or 4) + 1
            return 3 * hidden * inner + inner * (conv + rank + 2 * state + rank + 2 + state)
        heads = read.find("mamba_n_heads", "mamba_num_heads", "num_heads")
        if heads and self.state_layers:  # Mamba 2
            inner, groups, state = self._mamba2()
            conv = (read.find("mamba_d_conv", "conv_kernel") or 4) + 1
            mixed = inner + 2 * groups * state
            return hidden * (inner + mixed + heads) + mixed * conv + inner * hidden + inner
        if read.kind == "minimax_m1":
            return 5 * hidden * self.heads * self.head_dim
        if read.kind.startswith("lfm2"):
            return 4 * hidden * hidden + hidden * (read.find("conv_L_cache") or 3)
        return 0

    def _delta(self) -> tuple[int, int, int]:
        """Key and value widths and value heads of a gated delta net."""
        read = self.read
        heads = read.need("linear_num_value_heads")
        key = read.need("linear_num_key_heads") * read.need("linear_key_head_dim")
        return key, heads * read.need("linear_value_head_dim"), heads

    def _mamba2(self) -> tuple[int, int, int]:
        """Inner width, groups and state size of a Mamba-2 layer."""
        read = self.read
        heads = read.need("mamba_n_heads", "mamba_num_heads", "num_heads")
        size = read.find("mamba_d_head", "mamba_head_dim") or 64
        state = read.find("mamba_d_state", "ssm_state_size", "state_size") or 128
        return heads * size, read.find("mamba_n_groups", "n_groups") or 1, state

    def _mlp(self) -> list[Block]:
        read = self.read
        found: list[Block] = []
        dense = self._dense_layers()
        if dense and self.inter:
            size = self.matrices * self.hidden * self.inter
            component = "experts" if read.kind == "jamba" else "mlp"  # vLLM runs them as one expert
            found.append(
                _block(component, "model.layers.{i}.mlp.down_proj", size, Split.RANKS, dense)
            )
        if not self.moe_layers:
            shared = read.find("shared_intermediate_size")
            if shared and not self.inter:
                size = 3 * self.hidden * shared
                found.append(_block("mlp", "model.layers.{i}.shared_mlp", size, Split.RANKS, dense))
            return found
        one = self.matrices * self.hidden * self.moe_inter
        if read.kind == "gpt_oss":
            one += 2 * self.moe_inter + self.hidden  # biases
        path = "model.layers.{i}.mlp."
        found += [
            _block(
                "experts",
                f"{path}experts.0.down_proj",
                one * self.experts,
                Split.EXPERTS,
                self.moe_layers,
            ),
            _block(
                "router", f"{path}gate", self.hidden * self.experts, Split.NONE, self.moe_layers
            ),
        ]
        if shared := self._shared():
            size = self.matrices * self.hidden * shared
            found.append(
                _block("mlp", f"{path}shared_experts.down_proj", size, Split.RANKS, self.moe_layers)
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
        read, layers = self.read, self.attention_layers()
        if read.kind in _ENCODERS:
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
        state = self._state()
        if state is not None and self.state_layers:
            found.append(CacheLayers(kind=Attention.STATE, layers=self.state_layers, state=state))
        return tuple(found)

    def _state(self) -> State | None:
        read = self.read
        dtype = read.config.get("mamba_ssm_dtype")
        named = str(dtype) if isinstance(dtype, str) else None
        if read.find("linear_num_value_heads"):
            key, value, _ = self._delta()
            conv = (read.find("linear_conv_kernel_dim") or 4) - 1
            size = value * read.need("linear_key_head_dim")
            return State(conv_elements=(2 * key + value) * conv, ssm_elements=size, ssm_dtype=named)
        if read.kind == "jamba":
            inner = (read.find("mamba_expand") or 2) * self.hidden
            conv = (read.find("mamba_d_conv") or 4) - 1
            return State(
                conv_elements=inner * conv, ssm_elements=inner * (read.find("mamba_d_state") or 16)
            )
        if read.find("mamba_n_heads", "mamba_num_heads") and self.state_layers:
            inner, groups, state = self._mamba2()
            conv = (read.find("mamba_d_conv", "conv_kernel") or 4) - 1
            mixed = inner + 2 * groups * state
            return State(conv_elements=mixed * conv, ssm_elements=inner * state, ssm_dtype=named)
        if read.kind == "minimax_m1":
            size = self.heads * self.head_dim * self.head_dim
            return State(conv_elements=0, ssm_elements=size, ssm_dtype="float32")
        if read.kind.startswith("lfm2"):
            return State(
                conv_elements=self.hidden * ((read.find("conv_L_cache") or 3) - 1), ssm_elements=0
            )
        return None


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


def _cache(
    kind: Attention, layers: tuple[int, ...], heads: int, dim: int, window: int | None = None
) -> CacheLayers:
    return CacheLayers(
        kind=kind, layers=layers, kv_heads=heads, head_dim=dim, head_dim_v=dim, window=window
    )


def _block(
    component: str, module: str, params: int, split: Split, layers: tuple[int, ...] | None = None
) -> Block:
    return Block(component=component, module=module, params=params, split=split, layers=layers)


# --- towers beside the language model ---------------------------------------------------------------------------


def _side(config: Config, hidden: int, stated: int | None) -> list[Block]:
    """Vision or audio tower: as stated, or estimated from its config (within about 10 %)."""
    if stated:
        return [_block("vision", "visual", stated, Split.RANKS)]
    if config.get("model_type") == "whisper":
        wide = _Reader(config, "encoder")
        size = 4 * wide.need("d_model") ** 2 + 2 * wide.need("d_model") * wide.need(
            "encoder_ffn_dim"
        )
        count = wide.need("encoder_layers")
        return [_block("encoder", "model.encoder", size * count, Split.RANKS)]
    body = next(
        (
            config[key]
            for key in ("vision_config", "visual")
            if isinstance(config.get(key), Mapping)
        ),
        None,
    )
    if body is None:
        return []
    read = _Reader(body, "vision_config")
    wide_of = (
        read.find("embed_dim", "width")
        if "embed_dim" in body
        else read.find("hidden_size", "width")
    )
    depth = read.find("depth", "num_hidden_layers", "layers")
    if not wide_of or not depth:
        return []
    inter = read.find("intermediate_size") or round(wide_of * float(body.get("mlp_ratio") or 4))
    gated = 3 if body.get("hidden_act") == "silu" else 2
    merged = wide_of * (read.find("spatial_merge_size") or 1) ** 2
    mergers = 1 + len(body.get("deepstack_visual_indexes") or ())
    out = read.find("out_hidden_size") or hidden
    merge = (
        mergers * (merged * merged + merged * out)
        if "spatial_merge_size" in body
        else (wide_of + out) * out
    )
    return [
        _block(
            "vision",
            "visual",
            depth * (4 * wide_of**2 + gated * wide_of * inter) + merge,
            Split.RANKS,
        )
    ]
