"""Exact sizes of a local checkpoint from the headers of its safetensors files.

In: a folder. Out: bytes by component. Only the 8-byte length and the JSON header of each file are read, never a
tensor; a file that is no safetensors file counts as not there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_FILES = 2_000
_PARTS = (
    ("draft", re.compile(r"(?:^|\.)mtp\b|nextn|eh_proj|enorm|hnorm")),
    ("vision", re.compile(r"visual|vision|vit\b|audio|multi_modal|mm_projector|mlp1\.|image")),
    ("embedding", re.compile(r"embed_tokens|tok_embeddings|word_embeddings|wte|embed_positions|wpe|embedding")),
    ("head", re.compile(r"lm_head|^output\.weight|embed_out")),
    ("experts", re.compile(r"experts?\.(?!.*shared)|block_sparse_moe\.experts")),
    ("norm", re.compile(r"norm|ln_|layernorm")),
    ("linear_attention", re.compile(r"linear_attn|mamba|mixer\.(?:in_proj|conv1d|A_log|D|dt_bias|out_proj)")),
    ("attention", re.compile(r"attn|attention|[qkvo]_proj|wqkv|query_key_value")),
    ("router", re.compile(r"\.gate\.|router")),
)  # fmt: skip


def sizes_by_component(folder: Path) -> dict[str, int]:
    """Bytes of all tensors, by component; empty when there are no safetensors files."""
    sizes: Counter[str] = Counter()
    for name, length in _tensors(folder):
        sizes[_component(name)] += length
    return dict(sizes)


def indexed_size(folder: Path) -> int | None:
    """The total that `model.safetensors.index.json` states, in bytes; None when there is none."""
    try:
        with (folder / "model.safetensors.index.json").open("rb") as stream:
            body = json.loads(stream.read(_MAX_HEADER))
        size = body["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return round(size) if isinstance(size, (int, float)) and 0 < size < 1e15 else None


def read_header(path: Path) -> Mapping[str, Any]:
    """The header of one file: tensor name -> dtype, shape, offsets; empty when it is no such file."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                return {}
            body = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _tensors(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes. `consolidated*` files repeat the weights in Mistral's layout and are left out."""
    files = sorted(folder.glob("*.safetensors"))[:_MAX_FILES]
    usual = [path for path in files if not path.name.startswith("consolidated")]
    for path in usual or files:
        for name, tensor in read_header(path).items():
            offsets = tensor.get("data_offsets") if isinstance(tensor, Mapping) else None
            if isinstance(offsets, list) and len(offsets) == 2 and name != "__metadata__":
                yield name, max(0, int(offsets[1]) - int(offsets[0]))


def _component(name: str) -> str:
    return next((part for part, pattern in _PARTS if pattern.search(name)), "mlp")
