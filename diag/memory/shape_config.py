"""A Hugging Face config.json -> `ModelShape`.

In: the parsed JSON of one model (text, multimodal, hybrid, MoE). Out: weights by component and cache by layer.
Key names are those of the public configs; a key that decides sizes and is missing is an error, not a guess.
"""

from __future__ import annotations

from collections.abc import Mapping

from diag.memory.quantization import of_config
from diag.memory.shape_layers import ENCODERS, LayerPlan, block
from diag.memory.shape_reader import MAX_LAYERS, Config, Reader, text_config
from diag.memory.shapes import Block, ModelShape, Split

_TIED = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "gpt2", "gpt_bigcode", "opt", "bloom", "mpt",
     "falcon", "whisper", "starcoder2"}
)  # fmt: skip


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
    read = Reader(text, name)
    layers = read.find("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    if not layers or layers > MAX_LAYERS:
        layers = read.need("num_hidden_layers")
    hidden = read.need("hidden_size", "n_embd", "d_model", "dim")
    heads = read.need("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
    kv_heads = _kv_heads(read, heads)
    head_dim = read.find("head_dim", "kv_channels", "attention_head_dim") or hidden // heads
    vocab = read.find("padded_vocab_size") or read.need("vocab_size")
    plan = LayerPlan(read, layers, hidden, heads, kv_heads, head_dim)
    pooling = read.kind in ENCODERS or not head
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


def _kv_heads(read: Reader, heads: int) -> int:
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


def _context(read: Reader) -> int | None:
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


def _vocabulary(read: Reader, hidden: int, vocab: int, *, tied: bool, head: bool) -> list[Block]:
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
    if read.kind in ("gpt2", "opt", "whisper", *ENCODERS):
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


# --- towers beside the language model ---------------------------------------------------------------------------


def _side(config: Config, hidden: int, stated: int | None) -> list[Block]:
    """Vision or audio tower: as stated, or estimated from its config (within about 10 %)."""
    if stated:
        return [block("vision", "visual", stated, Split.RANKS)]
    if config.get("model_type") == "whisper":
        wide = Reader(config, "encoder")
        size = 4 * wide.need("d_model") ** 2 + 2 * wide.need("d_model") * wide.need(
            "encoder_ffn_dim"
        )
        count = wide.need("encoder_layers")
        return [block("encoder", "model.encoder", size * count, Split.RANKS)]
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
    read = Reader(body, "vision_config")
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
        block(
            "vision",
            "visual",
            depth * (4 * wide_of**2 + gated * wide_of * inter) + merge,
            Split.RANKS,
        )
    ]
