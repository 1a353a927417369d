"""Argument values that a model wrote as bare text, read as what the tool's schema asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.endpoint.lenient import Bad, decode

_MAX_DEPTH = 8
_UNKNOWN: frozenset[str] = frozenset()
_NULLS = ("null", "none")


def schema_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The JSON schema of a tool's parameters; empty where there is none."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def typed(raw: str, key: str, schema: Mapping[str, Any]) -> Any:
    """The value of the parameter `key` as its schema asks; the text itself where that is unknown or does not fit, so
    that the tool's own check of its arguments can say so.

    Text stays text wherever the schema admits text, unless it is the JSON of another type that it admits too.
    """
    properties = schema.get("properties")
    kinds = _kinds(properties.get(key), schema, 0) if isinstance(properties, Mapping) else _UNKNOWN
    if kinds <= {"string"}:
        return raw
    bare = raw.strip().lower()
    if "null" in kinds and bare in _NULLS:
        return None
    if "boolean" in kinds and bare in ("true", "false"):
        return bare == "true"
    try:
        value, end = decode(raw, 0)
    except Bad:
        return raw
    fits = "string" not in kinds or bool(_kinds_of(value) & (kinds - {"string"}))
    return value if fits and not raw[end:].strip() else raw


def _kinds(spec: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """The JSON types that a schema admits, as far as it says; empty where it does not."""
    if not isinstance(spec, Mapping) or depth > _MAX_DEPTH:
        return _UNKNOWN
    found = _own(spec)
    for word in ("anyOf", "oneOf", "allOf"):
        options = spec.get(word)
        for option in options if isinstance(options, (list, tuple)) else ():
            found |= _kinds(option, root, depth + 1)
    if isinstance(spec.get("$ref"), str):
        found |= _kinds(_referred(spec["$ref"], root), root, depth + 1)
    return found | {"null"} if found and spec.get("nullable") is True else found


def _own(spec: Mapping[str, Any]) -> frozenset[str]:
    kind = spec.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, (list, tuple)):
        return frozenset(k for k in kind if isinstance(k, str))
    if "const" in spec:
        return _kinds_of(spec["const"])
    if isinstance(spec.get("enum"), (list, tuple)):
        return _UNKNOWN.union(*map(_kinds_of, spec["enum"]))
    return frozenset(kind for word, kind in (("properties", "object"), ("items", "array")) if word in spec)


def _kinds_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"object" if isinstance(value, Mapping) else "array"})


def _referred(path: str, root: Mapping[str, Any]) -> Any:
    if not path.startswith("#/"):
        return None
    at: Any = root
    for step in path.removeprefix("#/").split("/"):
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at
