"""Random Llama models small enough for any machine, written with the standard library only.

In: a shape and a folder. Out: the folder with config, byte-level tokenizer and, if wanted, safetensors weights in
bfloat16. KV bytes per token: 2 (keys, values) x layers x kv_heads x head_dim x 2 (bfloat16).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LENGTH = 131_072
_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Counts of a Llama model; `weights` False: vLLM fills them itself (--load-format dummy)."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 512
    vocabulary: int = 512
    weights: bool = True

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes as a Llama checkpoint has them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            yield f"{layer}.self_attn.q_proj.weight", (queries, self.hidden)
            yield f"{layer}.self_attn.k_proj.weight", (keys, self.hidden)
            yield f"{layer}.self_attn.v_proj.weight", (keys, self.hidden)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, queries)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{layer}.mlp.gate_proj.weight", (self.inner, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.inner, self.hidden)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.inner)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in bfloat16."""
        return 2 * sum(_count(shape) for _, shape in self.tensors())


def write_model(folder: Path, shape: Shape, seed: int = 0) -> None:
    """The whole model folder. Raises OSError when it can't be written."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "tokenizer.json", _tokenizer())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_LENGTH,
            "pad_token": _SPECIAL[0],
            "bos_token": _SPECIAL[1],
            "eos_token": _SPECIAL[2],
        },
    )
    if shape.weights:
        _write_weights(folder / "model.safetensors", shape, seed)


def _write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer() -> dict[str, object]:
    """One token a byte: a byte-level BPE without merges."""
    words = {text: index for index, text in enumerate((*_SPECIAL, *_byte_letters()))}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": text, "special": True, "single_word": False}
            | {"lstrip": False, "rstrip": False, "normalized": False}
            for index, text in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }


def _byte_letters() -> Iterator[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be seen, else one from 256 on."""
    hidden = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte)
        else:
            yield chr(256 + hidden)
            hidden += 1


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _write_weights(path: Path, shape: Shape, seed: int) -> None:
    tensors = list(shape.tensors())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in tensors:
        end = offset + 2 * _count(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    source = random.Random(seed)  # noqa: S311
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in tensors:
            ones = "norm" in name
            file.write(b"\x80\x3f" * _count(size) if ones else _noise(source, _count(size)))


# The upper byte of a bfloat16 between 2**-7 and 2**-5 in size, either sign.
_UPPER = bytes(0x3C if byte < 128 else 0xBC for byte in range(256))


def _noise(source: random.Random, count: int) -> bytes:
    numbers = bytearray(source.randbytes(2 * count))
    numbers[1::2] = bytes(numbers[1::2]).translate(_UPPER)
    return bytes(numbers)
