"""Frozen dataclasses of options: to and from JSON exactly, overridden by name, compared field by field."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def closest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name nearest to ``name``, or nothing when none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_dict(options: Any) -> dict[str, Any]:
    """Nested dict of JSON values; floats survive the way there and back to the bit."""
    return {field.name: _plain(getattr(options, field.name)) for field in dataclasses.fields(options)}


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build ``cls`` from a nested dict; a field that is absent takes its default.

    Raises:
        ValueError: for an unknown field (with the closest match) or a value of the wrong type.
    """
    hints = _hints(cls)
    for name in values:
        if name not in hints:
            raise ValueError(f"there is no option {where + str(name)!r}{closest(name, hints)}")
    return cls(**{name: convert(value, hints[name], where + name) for name, value in values.items()})


def names(options: Any, prefix: str = "") -> list[str]:
    """Dotted names of all fields, groups before their members."""
    found = []
    for field in dataclasses.fields(options):
        found.append(prefix + field.name)
        if dataclasses.is_dataclass(value := getattr(options, field.name)):
            found += names(value, f"{prefix}{field.name}.")
    return found


def override(options: T, changes: Mapping[str, Any]) -> T:
    """A copy with fields replaced, named in full (``"optim.lr"``) or by a last part that only one field has (``m``).

    Raises:
        ValueError: for an unknown name, a short name that several fields share, or a value of the wrong type.
    """
    for name, value in changes.items():
        options = _replace(options, _full_name(options, name).split("."), value, name)
    return options


def differences(left: Any, right: Any) -> dict[str, tuple[Any, Any]]:
    """The dotted names of the fields that differ, each with both values."""
    leaves_left, leaves_right = _leaves(to_dict(left)), _leaves(to_dict(right))
    absent = object()
    changed = {}
    for name in sorted(leaves_left.keys() | leaves_right.keys()):
        pair = leaves_left.get(name, absent), leaves_right.get(name, absent)
        if pair[0] != pair[1] or type(pair[0]) is not type(pair[1]):
            changed[name] = (None if pair[0] is absent else pair[0], None if pair[1] is absent else pair[1])
    return changed


def convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type ``hint`` says: a list becomes a tuple, an int a float; nothing else is changed.

    Raises:
        ValueError: naming the field, the value and the type expected.
    """
    try:
        return _convert(value, hint, where)
    except TypeError:
        raise ValueError(f"{where} must be {_describe(hint)}, got {value!r}") from None


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_fit(value, arguments, where)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be {_describe(hint)}, got {value!r}{closest(value, map(str, arguments))}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(item, arguments[0], where) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {_convert(k, arguments[0], where): _convert(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_dict(typing.cast(type, hint), value, f"{where}.")
    if isinstance(hint, type) and _is_a(value, hint):
        return _finite(float(value), where) if hint is float else value
    raise TypeError


def _first_fit(value: Any, hints: tuple[Any, ...], where: str) -> Any:
    # Exact types first: 3 stays an int where int and float are both allowed.
    for hint in sorted(hints, key=lambda hint: type(value) is not hint):
        try:
            return _convert(value, hint, where)
        except TypeError:
            continue
    raise TypeError


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, got {value}")
    return value


def _describe(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, arguments))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_describe(arguments[0])}"
    if typing.get_origin(hint) is dict:
        return f"a mapping from {_describe(arguments[0])} to {_describe(arguments[1])}"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _hints(cls: type) -> dict[str, Any]:
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def _full_name(options: Any, name: str) -> str:
    known = names(options)
    if name in known:
        return name
    candidates = [full for full in known if full.rsplit(".", 1)[-1] == name]
    if len(candidates) > 1:
        raise ValueError(f"{name!r} may mean {' or '.join(candidates)}; write the full name")
    if not candidates:
        shorts = {full.rsplit(".", 1)[-1] for full in known}
        raise ValueError(f"there is no option {name!r}{closest(name, [*known, *shorts])}")
    return candidates[0]


def _replace(options: Any, path: list[str], value: Any, name: str) -> Any:
    field, *rest = path
    if rest:
        new = _replace(getattr(options, field), rest, value, name)
    else:
        new = convert(value, _hints(type(options))[field], name)
    return dataclasses.replace(options, **{field: new})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
