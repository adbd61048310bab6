"""Finds the shape of a model: a local folder or config.json, the built-in table, or the Hugging Face hub.

In: a path or a model name as people give it to vLLM. Out: `ModelShape`. Quantised forks of a known model
("Qwen3-32B-AWQ") get the base shape and the quantisation that the name states.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from diag.errors import Location, RuleFileError, UsageError
from diag.memory import safetensors
from diag.memory.quantization import Quantization, named, of_name
from diag.memory.shape_config import from_config
from diag.memory.shapes import ModelShape
from diag.resources import data_names, read_data

_FOLDER = "corpus/models"
_HUB = "https://huggingface.co"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_MAX_CONFIG = 4_000_000  # bytes
_TIMEOUT_S = 10
_KEYS = {
    "type": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "inter": "intermediate_size",
    "moe_inter": "moe_intermediate_size",
    "shared_inter": "shared_expert_intermediate_size",
    "shared_experts": "n_shared_experts",
    "experts": "num_experts",
    "active": "num_experts_per_tok",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "window": "sliding_window",
    "tied": "tie_word_embeddings",
    "dtype": "torch_dtype",
    "pattern": "hybrid_override_pattern",
}  # fmt: skip
"""Keys of a table row -> keys of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One row of the table: its name, the other names it answers to, its config, how it is stored."""

    name: str
    names: frozenset[str]
    config: Mapping[str, Any]
    params: int
    vision_params: int | None = None
    head: bool = True
    stored: str | None = None

    def shape(self) -> ModelShape:
        """The shape by the row's counts. Raises UsageError when the row is wrong."""
        shape = from_config(
            self.config,
            name=self.name,
            source="built-in table",
            vision_params=self.vision_params,
            head=self.head,
        )
        quantization = named(self.stored) if self.stored else None
        return replace(shape, quantization=quantization)


@lru_cache(maxsize=1)
def known_models() -> tuple[KnownModel, ...]:
    """Every row of `corpus/models/`. Raises RuleFileError with every bad row."""
    found: list[KnownModel] = []
    problems: list[str] = []
    for name in data_names(_FOLDER):
        body = read_data(name)
        for row in body.get("models", ()):
            try:
                found.append(_known({**body.get("defaults", {}), **row}))
            except (KeyError, TypeError, ValueError) as error:
                problems.append(f"{name}: {row.get('id', row)!r}: {error!r}")
    if problems:
        raise RuleFileError(problems)
    return tuple(found)


def _known(row: Mapping[str, Any]) -> KnownModel:
    unknown = set(row) - set(_KEYS) - _OWN
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}")
    config: dict[str, Any] = {_KEYS[key]: value for key, value in row.items() if key in _KEYS}
    config.update(row.get("more", {}))
    config["max_position_embeddings"] = row["context"]
    layers = row["layers"]
    if "attention_at" in row:
        config["layer_types"] = [
            "attention" if i in row["attention_at"] else "mamba" for i in range(layers)
        ]
    if "attention_every" in row:
        every = row["attention_every"]
        config["attn_type_list"] = ["0" if (i + 1) % every else "1" for i in range(layers)]
    names = {row["id"], row["id"].rsplit("/", 1)[-1], *row.get("also", ())}
    return KnownModel(
        name=row["id"],
        names=frozenset(map(_plain, names)),
        config=config,
        stored=row.get("stored"),
        params=round(float(row["params"])),
        vision_params=round(float(row["vision_params"])) if "vision_params" in row else None,
        head=row.get("head", True),
    )


_OWN = {
    "id",
    "also",
    "more",
    "attention_at",
    "attention_every",
    "head",
    "stored",
    "params",
    "vision_params",
}


def _plain(name: str) -> str:
    """A name as it is compared: lower case, one spelling for separators."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def from_table(name: str) -> ModelShape | None:
    """The shape of a known model, or of a fork of one that keeps its name; None when the name is not known.

    >>> from_table("qwen3-32b").kv_heads, from_table("someone/Qwen3-32B-AWQ").quantization.method
    (8, 'awq')
    """
    exact = known_model(name)
    if exact is not None:
        return replace(exact.shape(), name=_last_part(name) if name.startswith("/") else name)
    base, found = of_name(_last_part(name))
    row = known_model(base)
    note: tuple[str, ...] = ()
    if row is None:
        row = _fork_of(_plain(base))
        note = (
            () if row is None else (f"The shape is that of {row.name}, which the name contains.",)
        )
    if row is None:
        return None
    shape = row.shape()
    return replace(shape, name=name, quantization=found or shape.quantization, notes=note)


def known_model(name: str) -> KnownModel | None:
    """The row that answers to a name as it is written, or to its last part."""
    for text in (_plain(name), _plain(_last_part(name))):
        found = _by_name().get(text)
        if found is not None:
            return found
    return None


@lru_cache(maxsize=1)
def _by_name() -> Mapping[str, KnownModel]:
    return {name: row for row in known_models() for name in row.names}


def _last_part(name: str) -> str:
    """The model's own name in a hub id, a path, or a folder of the hub's cache.

    >>> _last_part("/hub/models--Qwen--Qwen3-8B/snapshots/abc"), _last_part("/data/Qwen--Qwen3-8B/")
    ('Qwen3-8B', 'Qwen3-8B')
    """
    cached = re.search(r"models--[^/]+?--([^/]+)(?:/|$)", name)
    last = cached.group(1) if cached else name.rstrip("/").rsplit("/", 1)[-1]
    return last.split("--", 1)[1] if "--" in last else last


def _fork_of(name: str) -> KnownModel | None:
    """The known model whose name stands whole in a longer one, unless what is left names another size."""
    best = ""
    for known in _by_name():
        if len(known) > len(best) and re.search(rf"(?:^|[-.]){re.escape(known)}(?:[-.]|$)", name):
            best = known
    if len(best) < _LEAST_NAME or _SIZE.search(name.replace(best, " ")):
        return None
    return _by_name()[best]


_LEAST_NAME = 7  # characters of a name that may be looked for inside another
_SIZE = re.compile(r"(?<![a-z0-9.])\d+(?:\.\d+)?[bm](?![a-z0-9])|distill|draft|eagle|lora|adapter")


def find_shape(name: str, *, hub: bool = False) -> ModelShape:
    """The shape of a model given as people give it to vLLM.

    Args: name is a folder with a config.json, such a file, or a model's name. hub: whether huggingface.co may be
        asked when nothing local answers (HF_TOKEN is used when it is set).
    Raises: UsageError when nothing answers, with what to do.
    """
    path = Path(name)
    if path.exists():
        return from_path(path)
    known = from_table(name)
    if known is not None:
        return known
    if hub and _HUB_ID.fullmatch(name):
        return from_hub(name)
    raise UsageError(
        f"{name}: no such folder, and not in the built-in table",
        hint="give the folder with its config.json, or add --hub to ask huggingface.co",
    )


def from_path(path: Path) -> ModelShape:
    """The shape of a local model; weights to the byte when its safetensors files are there.

    Raises: UsageError when there is no readable config.json.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_CONFIG + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read config.json: {error.strerror or error}",
            location=Location(str(path)),
            hint="give a model folder or its config.json",
        ) from error
    folder = file.parent
    shape = from_config(_parse(text, str(file)), name=folder.name or str(path), source=str(file))
    quantization = shape.quantization or _separate_quantization(folder)
    shape = replace(shape, quantization=quantization)
    parts = safetensors.sizes_by_component(folder)
    if parts:
        return replace(
            shape,
            checkpoint_bytes=sum(parts.values()),
            checkpoint_parts=tuple(sorted(parts.items())),
        )
    return replace(shape, checkpoint_bytes=safetensors.indexed_size(folder))


def _separate_quantization(folder: Path) -> Quantization | None:
    """Some makers keep the format in a file of its own (ModelOpt, older AWQ and GPTQ)."""
    from diag.memory.quantization import of_config

    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        try:
            with (folder / name).open("rb") as stream:
                body = _parse(stream.read(_MAX_CONFIG + 1), name)
        except OSError:
            continue
        inner = body.get("quantization", body)
        method = {"quantize_config.json": "gptq", "quant_config.json": "awq"}.get(name)
        if isinstance(inner, Mapping):
            return of_config(
                {"quantization_config": {**({"quant_method": method} if method else {}), **inner}}
            )
    return None


def _parse(text: bytes, where: str) -> Mapping[str, Any]:
    if len(text) > _MAX_CONFIG:
        raise UsageError("is too large for a config.json", location=Location(where))
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON: {error}", location=Location(where)) from error
    if not isinstance(body, dict):
        raise UsageError("is not a config.json", location=Location(where))
    return body


def from_hub(name: str) -> ModelShape:
    """The shape by the hub's config.json. Raises: UsageError when the hub can't be reached or refuses."""
    config = _parse(_download(name, "config.json"), f"{name}/config.json")
    shape = from_config(config, name=name, source=f"{_HUB}/{name}")
    try:
        index = _parse(_download(name, "model.safetensors.index.json"), name)
    except UsageError:
        return shape
    total = index.get("metadata", {})
    size = total.get("total_size") if isinstance(total, Mapping) else None
    return replace(shape, checkpoint_bytes=size if isinstance(size, int) else None)


def _download(name: str, file: str) -> bytes:
    from urllib import error, request

    address = f"{_HUB}/{name}/resolve/main/{file}"
    asked = request.Request(address, headers={"User-Agent": "oomdoc"})  # noqa: S310 - always https
    token = os.environ.get("HF_TOKEN")
    if token:  # not sent on to the hosts that the hub redirects to
        asked.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with request.urlopen(asked, timeout=_TIMEOUT_S) as reply:  # noqa: S310
            body: bytes = reply.read(_MAX_CONFIG + 1)
            return body
    except error.HTTPError as failure:
        hint = (
            "set HF_TOKEN for gated models"
            if failure.code in (401, 403)
            else "check the model's name"
        )
        raise UsageError(
            f"{name}: huggingface.co answers {failure.code} for {file}", hint=hint
        ) from failure
    except (error.URLError, OSError, ValueError) as failure:
        raise UsageError(
            f"{name}: huggingface.co cannot be reached ({failure})",
            hint="give a local folder with the model's config.json",
        ) from failure
