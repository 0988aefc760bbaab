"""What a lesson's parameter may be: a type, a choice, a number within bounds, or a device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A test of one value, in words and as code.

    Args:
        expected: what is right, in words that follow "expected".
        accepts: the test; it converts nothing.
        example: a value to show how one is passed.
    """

    expected: str
    accepts: Callable[[Any], bool]
    example: Any


_WORDS: dict[type, tuple[str, Any]] = {
    bool: ("True or False", False),
    int: ("a whole number", 7),
    float: ("a number", 0.07),
    str: ("a text", "cpu"),
    list: ("a list", [1, 2]),
}


def _is_a(wanted: type, value: Any) -> bool:
    if wanted is float:  # 1 is a number too; True and "1" are not
        return type(value) in (int, float) and not math.isnan(value)
    return type(value) is wanted


def of_type(wanted: type) -> Kind:
    """Exactly this type (a whole number counts as a number, True does not count as 1)."""
    if wanted not in _WORDS:
        raise ValueError(f"a parameter cannot be a {wanted.__name__}; use one of {[one.__name__ for one in _WORDS]}")
    words, example = _WORDS[wanted]
    return Kind(words, lambda value: _is_a(wanted, value), example)


def one_of(*choices: Any) -> Kind:
    """One of these values, of the same type."""
    listed = ", ".join(map(repr, choices))

    def accepts(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in choices)

    return Kind(f"one of {listed}", accepts, choices[-1])


def between(low: float, high: float) -> Kind:
    """A number in [low, high]; a whole number when both bounds are whole."""
    base = of_type(int if isinstance(low, int) and isinstance(high, int) else float)

    def accepts(value: Any) -> bool:
        return base.accepts(value) and low <= value <= high

    return Kind(f"{base.expected} from {low} to {high}", accepts, low)


def at_least(low: float) -> Kind:
    """A finite number of at least ``low``; a whole number when ``low`` is whole."""
    base = of_type(int if isinstance(low, int) else float)

    def accepts(value: Any) -> bool:
        return base.accepts(value) and math.isfinite(value) and value >= low

    return Kind(f"{base.expected} of at least {low}", accepts, low)


def _device_exists(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|mps|cuda(:\d+)?", value):
        return False
    import torch

    if value == "cpu":
        return True
    if value == "mps":
        return torch.backends.mps.is_available()
    number = int(value.partition(":")[2] or 0)
    return torch.cuda.is_available() and number < torch.cuda.device_count()


a_device = Kind("'cpu', or 'cuda', 'cuda:N' or 'mps' where this machine has one", _device_exists, "cpu")
"""A torch device that this machine has."""


def as_kind(given: Any) -> Kind:
    """Read one entry of a schema: a Kind, a type, or the choices.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(given, Kind):
        return given
    if isinstance(given, type):
        return of_type(given)
    if isinstance(given, (tuple, list)) and given:
        return one_of(*given)
    raise ValueError(f"a parameter is declared by a type, its choices or a kind, got {given!r}")
