"""Comparing what an execution recorded with the values stored in the notebook, most of them printed in its prose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuclip_lib.course.record import Recorded, differences, from_json


def stored_records(notebook: Any) -> dict[str, Recorded]:
    """What the build recorded."""
    return from_json(notebook.metadata.neuclip.recorded)


def execution_differences(notebook: Any, got: Mapping[str, Recorded]) -> list[str]:
    """Values that left their tolerance, one line each: the cell whose prose prints it, the name, stored and got."""
    stored = stored_records(notebook)
    lines = []
    printed = set()
    for cell in notebook.cells:
        for row in cell.metadata.get("neuclip", {}).get("values", []):
            printed.add(row["name"])
            found = differences({row["name"]: Recorded(row["value"], row["tol"])}, _only(got, {row["name"]}))
            lines += [f"cell {cell.id} says {line}" for line in found]
    rest = set(stored) | set(got)
    return lines + differences(_only(stored, rest - printed), _only(got, rest - printed))


def unchanged(notebook: Any, got: Mapping[str, Recorded], names: tuple[str, ...]) -> list[str]:
    """Those of ``names`` whose value is still within the stored tolerance: the parameter had no effect on them."""
    stored = stored_records(notebook)
    return [name for name in names if name not in got or stored[name].agrees_with(got[name])]


def _only(records: Mapping[str, Recorded], names: set[str]) -> dict[str, Recorded]:
    return {name: entry for name, entry in records.items() if name in names}
