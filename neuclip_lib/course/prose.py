"""Numbers in prose: ``{value:NAME:FORMAT}`` in a lesson's text becomes what the notebook recorded under that name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from neuclip_lib.course.record import Recorded

PATTERN = re.compile(r"\{value:([A-Za-z_]\w*)(?::([^{}\n]*))?\}")


def names_in(template: str) -> list[str]:
    """The names that a text asks for, in order of appearance."""
    return [match[1] for match in PATTERN.finditer(template)]


def fill(template: str, records: Mapping[str, Recorded]) -> tuple[str, list[dict[str, Any]]]:
    """The text with its numbers, and what was put in: name, value, tolerance and format, in order of appearance.

    Raises:
        ValueError: for a name that was not recorded (with the ones that were) or a format that does not fit.
    """
    used: list[dict[str, Any]] = []

    def put(match: re.Match[str]) -> str:
        name, spec = match[1], match[2] or ""
        if name not in records:
            known = ", ".join(sorted(records)) or "nothing"
            raise ValueError(f"{match[0]}: nothing recorded {name!r}; recorded: {known}")
        entry = records[name]
        try:
            text = format(entry.value, spec)
        except ValueError as error:
            raise ValueError(f"{match[0]}: the format {spec!r} does not fit {entry.value!r} ({error})") from error
        used.append({"name": name, "value": entry.value, "tol": entry.tol, "format": spec})
        return text

    return PATTERN.sub(put, template), used


def refilled(template: str, stored: list[Mapping[str, Any]]) -> str:
    """The text that a notebook must show, from the values stored in its cell.

    Raises:
        ValueError: when the stored values are not the ones that the text asks for.
    """
    wanted = [(match[1], match[2] or "") for match in PATTERN.finditer(template)]
    if wanted != [(row["name"], row["format"]) for row in stored]:
        raise ValueError("the stored prose values are not the ones that the source asks for")
    rows = iter(stored)
    return PATTERN.sub(lambda match: format(next(rows)["value"], match[2] or ""), template)
