"""Recorded results: what a lesson measured, by name, kept so that every later execution can be compared.

A lesson calls ``record(mse_npn=0.0123, tol=0.002)``. Prose in the source may then say ``{value:mse_npn:.3f}``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RELATIVE_TOLERANCE = 1e-3
VARIABLE = "NEUCLIP_RECORD"


@dataclass(frozen=True)
class Recorded:
    """One recorded number and the absolute difference that a later execution may show."""

    value: int | float
    tol: float

    def agrees_with(self, other: Recorded) -> bool:
        """Whether another execution's value lies within this one's tolerance."""
        return abs(self.value - other.value) <= self.tol


_recorded: dict[str, Recorded] = {}


def record(*, tol: float | None = None, **values: Any) -> None:
    """Keep numbers of this notebook by name; prints nothing.

    Args:
        tol: largest absolute difference, for every value of this call, that another execution may show. Without it a
            whole number must come out equal and any other within 0.1 %, so give it for anything trained or tiny.
        values: finite numbers, or tensors and arrays of one element.

    Raises:
        ValueError: for a value that is no finite number, or a negative tolerance.
    """
    if not values:
        raise ValueError("record() got no value; write for instance record(mse_npn=mse, tol=0.002)")
    if tol is not None and not (isinstance(tol, int | float) and math.isfinite(tol) and tol >= 0):
        raise ValueError(f"tol is {tol!r}; expected a number of at least 0")
    new = {name: _as_recorded(name, value, tol) for name, value in values.items()}
    _recorded.update(new)
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"name": name, **asdict(entry)}) + "\n" for name, entry in new.items())


def recorded() -> dict[str, int | float]:
    """What this process has recorded so far, by name."""
    return {name: entry.value for name, entry in _recorded.items()}


def read_records(path: Path | str) -> dict[str, Recorded]:
    """Read what one execution of a notebook recorded; the file may be absent (nothing was recorded).

    Raises:
        ValueError: when one execution recorded two different values under one name.
    """
    path = Path(path)
    found: dict[str, Recorded] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        row = json.loads(line)
        name, new = row["name"], Recorded(row["value"], row["tol"])
        if name in found and not found[name].agrees_with(new):
            raise ValueError(
                f"record({name}=...) was called with {found[name].value!r} and with {new.value!r} in one execution; "
                "give each value a name of its own"
            )
        found.setdefault(name, new)
    return found


def to_json(records: Mapping[str, Recorded]) -> dict[str, dict[str, float]]:
    """Records as plain JSON values, sorted by name."""
    return {name: asdict(records[name]) for name in sorted(records)}


def from_json(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Recorded]:
    """The inverse of :func:`to_json`."""
    return {name: Recorded(row["value"], row["tol"]) for name, row in rows.items()}


def differences(stored: Mapping[str, Recorded], got: Mapping[str, Recorded]) -> list[str]:
    """What another execution recorded differently from the stored values, one line each."""
    lines = []
    for name, old in stored.items():
        if name not in got:
            lines.append(f"{name}: stored {old.value!r}, this execution recorded nothing under that name")
        elif not old.agrees_with(got[name]):
            lines.append(f"{name}: stored {old.value!r}, got {got[name].value!r} (tolerance {old.tol:.3g})")
    return lines + [f"{name}: recorded now, but not stored; build the lesson again" for name in _only(got, stored)]


def _only(these: Iterable[str], those: Iterable[str]) -> list[str]:
    return sorted(set(these) - set(those))


def _as_recorded(name: str, value: Any, tol: float | None) -> Recorded:
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"record({name}=...) got a {type(value).__name__} of several elements: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"record({name}=...) got {value!r}; expected a number (assert a truth value instead)")
    if not math.isfinite(value):
        raise ValueError(f"record({name}=...) got {value!r}; expected a finite number")
    if tol is None:
        tol = 0.0 if isinstance(value, int) else RELATIVE_TOLERANCE * abs(value)
    return Recorded(value, float(tol))
