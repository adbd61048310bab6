"""Keys of a config.json: the language model's part, older spellings, counts checked once.

In: the parsed JSON. Out: a `Reader`. A value that is no count is an error here, so that nothing behind it has to check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diag.errors import UsageError

Config = Mapping[str, Any]

MAX_LAYERS = 2_000
_MAX_COUNT = 10**8
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "language_model")


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


class Reader:
    """Keys of a config with their older spellings; counts are checked once, here."""

    def __init__(self, config: Config, name: str) -> None:
        self.config = config
        self.name = name
        self.kind = str(config.get("model_type") or "").lower()

    def find(self, *keys: str) -> int | None:
        """The first of these keys that holds a count. Raises UsageError for a number that is none."""
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
        """As `find`, at least 1. Raises UsageError when there is none."""
        value = self.find(*keys)
        if value is None or value < 1:
            raise UsageError(
                f"{self.name}: config has no {keys[0]}",
                hint="give the config.json of a language model",
            )
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A truth value, or the default."""
        value = self.config.get(key)
        return default if value is None else bool(value)

    def types(self) -> list[str]:
        """The kind of each layer, when the config lists them."""
        for key in ("layer_types", "layers_block_type", "attn_type_list"):
            value = self.config.get(key)
            if isinstance(value, Sequence) and not isinstance(value, str):
                return [str(item) for item in value[:MAX_LAYERS]]
        return []
