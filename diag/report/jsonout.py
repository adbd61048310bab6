"""A Diagnosis as JSON text, and the JSON Schema (2020-12) of that JSON, read off the dataclasses.

Sizes are raw bytes and key order is stable. Strings are cleaned as in every other format; a number
that JSON does not know (infinite, not a number) is null.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from diag import __version__
from diag.errors import OomdocError
from diag.report.model import SCHEMA_VERSION, Diagnosis
from diag.report.safe import MAX_COMMAND, clean, clean_block

_SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number"}
_BOUNDS = {"confidence": {"minimum": 0, "maximum": 1}}
_HEADER = {
    "schema_version": {"type": "integer", "const": SCHEMA_VERSION},
    "oomdoc_version": {"type": "string"},
}


def to_json(diagnosis: Diagnosis, indent: int | None = 2) -> str:
    """One document, without a newline at its end."""
    return dump(document(diagnosis), indent)


def to_jsonl(diagnoses: Iterable[Diagnosis]) -> str:
    """One document a line; every line ends in a newline."""
    return "".join(f"{to_json(item, indent=None)}\n" for item in diagnoses)


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """`Diagnosis.to_dict()` with cleaned strings and JSON's numbers only."""
    found: dict[str, Any] = _safe(diagnosis.to_dict())
    return found


def error_document(name: str, error: OomdocError) -> dict[str, Any]:
    """What stands in for a source that could not be read, so that order and count hold."""
    return {
        "schema_version": SCHEMA_VERSION,
        "oomdoc_version": __version__,
        "source": {"name": clean(name)},
        "error": {
            "message": clean(error.message),
            "hint": None if error.hint is None else clean(error.hint),
            "line": error.location.line if error.location else None,
        },
    }


def dump(data: object, indent: int | None = 2) -> str:
    """JSON text; one line when `indent` is None. Raises ValueError for infinite numbers."""
    separators = (",", ":") if indent is None else None
    return json.dumps(
        data, indent=indent, ensure_ascii=False, allow_nan=False, separators=separators
    )


def json_schema() -> dict[str, Any]:
    """The schema of `document`; `$defs/ErrorDocument` is the shape of an unreadable source."""
    defs: dict[str, Any] = {}
    root = _object(Diagnosis, defs)
    root["properties"] = {**_HEADER, **root["properties"]}
    root["required"] = [*_HEADER, *root["required"]]
    defs["ErrorDocument"] = _error_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "oomdoc diagnosis",
        **root,
        "$defs": dict(sorted(defs.items())),
    }


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return clean_block(value, MAX_COMMAND)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {clean(key): _safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_safe(item) for item in value]
    return value


def _schema(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type hint; dataclasses and enums go to `defs`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union([_schema(arg, defs) for arg in args])
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0], defs)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(args[1], defs)}
    if hint is type(None):
        return {"type": "null"}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    return _reference(hint, defs)


def _union(options: list[dict[str, Any]]) -> dict[str, Any]:
    if all(set(option) == {"type"} for option in options):
        return {"type": list(dict.fromkeys(option["type"] for option in options))}
    return {"anyOf": options}


def _reference(kind: type[Any], defs: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in defs:
        defs[kind.__name__] = {}  # holds the place while the members are read
        if issubclass(kind, Enum):
            defs[kind.__name__] = {
                "description": _first_paragraph(kind),
                "type": "string",
                "enum": [member.value for member in kind],
            }
        elif is_dataclass(kind):
            defs[kind.__name__] = _object(kind, defs)
        else:
            raise TypeError(f"no JSON schema for {kind!r}")
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _object(kind: type[Any], defs: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    properties = {
        item.name.rstrip("_"): {**_schema(hints[item.name], defs), **_BOUNDS.get(item.name, {})}
        for item in fields(kind)
    }
    return {
        "description": _first_paragraph(kind),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _error_schema() -> dict[str, Any]:
    def closed(properties: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    error = {
        "message": {"type": "string"},
        "hint": {"type": ["string", "null"]},
        "line": {"type": ["integer", "null"]},
    }
    source = closed({"name": {"type": "string"}})
    return {
        "description": "Stands in for a source that could not be read, among several.",
        **closed({**_HEADER, "source": source, "error": closed(error)}),
    }


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())
