"""The controls of an explorer: a range (start, stop, step, value) or a list of choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Control:
    """One control: its name, every setting it can take in order, and the one it starts at."""

    name: str
    settings: tuple[Any, ...]
    start: Any
    is_range: bool

    @property
    def label(self) -> str:
        """The name as a reader sees it."""
        return self.name.replace("_", " ")

    @property
    def step(self) -> Any:
        """Distance between two settings of a range."""
        return self.settings[1] - self.settings[0]

    def setting(self, value: Any) -> Any:
        """The setting meant by ``value``: a slider in a browser returns 0.30000000000000004 for 0.3.

        Raises:
            ValueError: when there is no such setting.
        """
        for one in self.settings:
            if type(one) is type(value) and one == value:
                return one
        if self.is_range and isinstance(value, (int, float)) and not isinstance(value, bool):
            nearest = min(self.settings, key=lambda one: abs(one - value))
            if abs(nearest - value) <= 1e-6 * self.step:
                return nearest
        shown = (
            f"{self.settings[0]} to {self.settings[-1]} in steps of {self.step:g}" if self.is_range else self.settings
        )
        raise ValueError(f"the control {self.name!r} has no setting {value!r}; it takes {shown}")


def control(name: str, given: Any) -> Control:
    """Read one control as a lesson writes it.

    Raises:
        ValueError: saying what a control is.
    """
    if isinstance(given, list):
        return _choices(name, given)
    if isinstance(given, tuple) and len(given) == 4 and all(type(one) in (int, float) for one in given):
        return _range(name, *given)
    raise ValueError(
        f"the control {name!r} got {given!r}; give a range (start, stop, step, value) of four numbers, "
        "or a list of choices whose first one is shown first"
    )


def _choices(name: str, given: list[Any]) -> Control:
    if len(given) < 2:
        raise ValueError(f"the control {name!r} got {given!r}; a list of choices needs at least two")
    if len({str(one) for one in given}) < len(given):
        raise ValueError(f"the control {name!r} got {given!r}; two choices read the same")
    return Control(name, tuple(given), given[0], is_range=False)


def _range(name: str, start: float, stop: float, step: float, value: float) -> Control:
    if not all(map(math.isfinite, (start, stop, step, value))) or step <= 0 or stop <= start:
        raise ValueError(f"the control {name!r} got {(start, stop, step, value)}; it needs start < stop and step > 0")
    count = round((stop - start) / step)
    if not math.isclose(start + count * step, stop, rel_tol=0, abs_tol=1e-6 * step):
        raise ValueError(f"the control {name!r}: {stop} is not {start} plus a whole number of steps of {step}")
    whole = all(type(one) is int for one in (start, stop, step, value))
    settings = tuple(start + k * step if whole else round(start + k * step, 10) for k in range(count + 1))
    made = Control(name, settings, value, is_range=True)
    return Control(name, settings, made.setting(value), is_range=True)
