"""How settings become a checked model: TOML file, dotted overrides, pydantic, and errors a person can act on.

Only the mechanism lives here. Each room defines its own options next to their reader; `agentrl/conductor/config.py`
joins them.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from agentrl.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
Settings = dict[str, Any]


def load(model: type[Model], path: Path | None = None, overrides: Sequence[str] = ()) -> Model:
    """Read `path` (TOML), apply overrides such as `train.lr=1e-4`, and validate; ConfigError lists every fault."""
    text, settings = "", {}
    if path is not None:
        text = _read(path)
        try:
            settings = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    overridden = set()
    for override in overrides:
        overridden.add(_apply(settings, override))
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_explain(error, model, path, text, overridden)) from error


def to_toml(model: BaseModel) -> str:
    """The model as TOML that `load` reads back to an equal model, and the defaults as comments below.

    Only what was set is written as settings: a default that has no effect in the chosen mode may not be *given*.
    """
    given = _without_none(model.model_dump(mode="json", exclude_unset=True))
    whole = tomli_w.dumps(_without_none(model.model_dump(mode="json")))
    comments = "".join(f"# {line}".rstrip() + "\n" for line in whole.splitlines())
    return f"{tomli_w.dumps(given)}\n# Everything, defaults included:\n#\n{comments}"


def resolve_object(spec: str, *, base: Path | None = None) -> Any:
    """The object that `pkg.module:Name` or `path/file.py:Name` names; a relative path counts from `base`.

    ConfigError says whether the module, its import or the name is at fault.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{spec!r} names no object: write 'package.module:Name' or 'path/to/file.py:Name'")
    found: Any = _load_file(place, base or Path.cwd()) if place.endswith(".py") else _load_module(place)
    for part in name.split("."):
        if part not in vars(found):
            near = _nearest(part, [n for n in vars(found) if not n.startswith("_")])
            raise ConfigError(f"{place} has no {part!r}{near}")
        found = vars(found)[part]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error


def _apply(settings: Settings, override: str) -> tuple[str, ...]:
    key, equals, raw = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {override!r} is not of the form 'section.key=value', e.g. 'train.lr=1e-4'")
    table = settings
    for depth, part in enumerate(path[:-1]):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(path[: depth + 1])} is a value, not a section")
        table = inner
    table[path[-1]] = _value(raw.strip())
    return path


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw  # a bare word or path needs no quotes on a command line


def _explain(
    error: ValidationError, model: type[BaseModel], path: Path | None, text: str, overridden: set[tuple[str, ...]]
) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        keys = tuple(str(part) for part in fault["loc"])
        dotted = ".".join(keys)
        line = _line_of(text, keys)
        if keys in overridden or (line is None and any(given[: len(keys)] == keys != () for given in overridden)):
            where = f"override {dotted}: "
        else:
            place = f"{path}:{line}" if line else f"{path or 'config'}"
            where = f"{place}: {dotted}: " if dotted else f"{place}: "
        lines.append(where + _reason(fault, model, keys))
    return "\n".join(lines)


def _reason(fault: Any, model: type[BaseModel], keys: tuple[str, ...]) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown key {keys[-1]!r}{_suggestion(model, keys)}"
    if fault["type"] == "missing":
        return "is required and has no default"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message
    return f"{message[:1].lower()}{message[1:]}, got {fault['input']!r}"


def _suggestion(model: type[BaseModel], keys: tuple[str, ...]) -> str:
    section = _section(model, keys[:-1])
    names = list(section.model_fields) if section else []
    if near := _nearest(keys[-1], names):
        return near
    everywhere = {dotted.rpartition(".")[2]: dotted for dotted in _all_keys(model)}
    if elsewhere := everywhere.get(keys[-1]):
        return f"; there is {elsewhere!r}"
    return f"; known here: {', '.join(names)}" if names else ""


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _section(model: type[BaseModel], keys: Sequence[str]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for key in keys:
        field = found.model_fields.get(key) if found else None
        if field is None:
            continue  # an index of a list, or the tag of a union
        found = next(_models(field.annotation), None)
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            yield annotation
    elif get_origin(annotation) in (Union, UnionType, list, tuple, dict):
        for argument in get_args(annotation):
            yield from _models(argument)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models(field.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")


_TABLE = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([\w.\"' -]+?)\s*=")


def _line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """The line that sets `keys`, or the nearest enclosing one: tomllib keeps no positions."""
    table: tuple[str, ...] = ()
    best, depth = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TABLE.match(line):
            table = _parts(header[1])
            here = table
        elif key := _KEY.match(line):
            here = table + _parts(key[1])
        else:
            continue
        if here == keys[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    return best


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _load_module(place: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(
                f"there is no module {place!r} (no {error.name!r}): install its package, or give the path of its file"
            ) from error
        raise ConfigError(f"{place} cannot be imported: {error}") from error
    except Exception as error:
        # Importing runs the user's code: a process-like boundary, where anything may be raised.
        raise ConfigError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(place: str, base: Path) -> ModuleType:
    path = (base / place).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    name = f"agentrl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _importable(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _importable(folder: Path) -> None:
    """Last on the path, as for a script next to its helpers, but without hiding an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
