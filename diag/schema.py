"""Bodies of data files -> frozen dataclasses: `build` trusts a shipped file, `validated` checks an edited one.

The dataclass is the only definition of a shape. pydantic, which reports every wrong key at once, is imported by the
check alone: it costs more than the rest of `oomdoc explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from diag.errors import RuleFileError

T = TypeVar("T")

# Keys of YAML that are no names for a field of a class.
_KEYWORDS = {"in": "in_", "schema": "schema_", "from": "from_"}


class Strict:
    """Base of the shapes: an unknown key is an error when a file is checked."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def renamed(body: Any) -> Any:
    """The body with Python's keywords renamed as the fields are: `in` -> `in_`."""
    if isinstance(body, Mapping):
        return {_KEYWORDS.get(str(key), str(key)): renamed(item) for key, item in body.items()}
    return [renamed(item) for item in body] if isinstance(body, list) else body


def build(kind: type[T], body: Mapping[str, Any]) -> T:
    """An instance from a body known to be right. Raises TypeError, KeyError or ValueError when it is not."""
    return _build(kind, renamed(body))


def validated(kind: type[T], body: Any, file: str) -> T:
    """An instance from a body that may be wrong. Raises RuleFileError with one message for each wrong key."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(renamed(body))
    except ValidationError as error:
        raise RuleFileError(
            [
                f"{file}: {'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}"
                for item in error.errors()
            ]
        ) from error


@lru_cache(maxsize=64)
def _converters(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    return {item.name: _converter(hints[item.name]) for item in fields(kind)}


def _same(value: Any) -> Any:
    return value


def _converter(hint: Any) -> Callable[[Any], Any]:
    """What turns a plain value into the type a field declares."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        inner = [_converter(arg) for arg in args if arg is not NoneType]
        return _optional(inner[0]) if len(inner) == 1 else _same
    if origin is tuple:
        item = _converter(args[0])
        return lambda value: tuple(item(part) for part in value)
    if origin in (dict, Mapping):
        item = _converter(args[1])
        return lambda value: {key: item(part) for key, part in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: _build(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return _same


def _optional(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else inner(value)


def _build(kind: type[T], body: Mapping[str, Any]) -> T:
    convert = _converters(kind)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{key: convert[key](item) for key, item in body.items()})
