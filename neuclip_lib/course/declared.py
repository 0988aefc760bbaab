"""What a lesson's parameters cell declares: names, types, defaults, help, and which recorded value each one changes.

One parameter a line, the trial in brackets at the end of its help::

    preset: str = "quick"  # quick or full [try "full": mse_npn]
    seed: int = 0  # seed of every draw [try 1: mse_npn, mse_batch]
    device: str = "cpu"  # cpu or cuda [not tried: needs a GPU]
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuclip_lib.course.source import Cell, Lesson

TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "list": list}
PRESETS = ("quick", "full")
_TRIAL = re.compile(r"\[try (.+): ([\w, ]+)\]\s*$")
_NOT_TRIED = re.compile(r"\[not tried: ([^\]]+)\]\s*$")


@dataclass(frozen=True)
class Trial:
    """Another value for a parameter, and the recorded names whose values must change under it."""

    value: Any
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """One declared parameter; ``trial`` is absent when the source gives a reason in ``not_tried``."""

    name: str
    type: str
    default: Any
    help: str
    trial: Trial | None
    not_tried: str

    def convert(self, text: str) -> Any:
        """A value typed on the command line as this parameter's type (``false`` is a boolean here).

        Raises:
            ValueError: naming the parameter, what was given and what was expected.
        """
        try:
            if self.type == "bool":
                return {"true": True, "false": False}[text.lower()]
            if self.type == "list":
                return _checked_list(json.loads(text))
            return TYPES[self.type](text)
        except (KeyError, ValueError) as error:
            expected = "true or false" if self.type == "bool" else f"a {self.type}"
            raise ValueError(f"parameter {self.name} got {text!r}; expected {expected} ({self.help})") from error


def parameters_cell(lesson: Lesson) -> Cell:
    """The one cell tagged ``parameters``, which is the first code cell.

    Raises:
        ValueError: when there is none, more than one, or it is not the first code cell.
    """
    tagged = [cell for cell in lesson.cells if "parameters" in cell.tags]
    if len(tagged) != 1:
        raise ValueError(f"{lesson.path.name}: {len(tagged)} cells are tagged 'parameters'; expected exactly one")
    if tagged[0] != lesson.code[0]:
        raise ValueError(f"{lesson.where(tagged[0])}: the parameters cell is not the first code cell")
    return tagged[0]


def parameters(lesson: Lesson) -> dict[str, Parameter]:
    """The declared parameters by name, in order.

    Raises:
        ValueError: for a line that is no ``name: type = literal  # help [try ...]``, or a trial that changes nothing.
    """
    cell = parameters_cell(lesson)
    lines = cell.source.splitlines()
    found = {}
    for statement in ast.parse(cell.source).body:
        line = lines[statement.lineno - 1]
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=kind), value=ast.expr() as value) if (
                kind in TYPES and statement.end_lineno == statement.lineno
            ):
                found[name] = _parameter(lesson, cell, name, kind, value, line[statement.end_col_offset or 0 :])
            case _:
                raise ValueError(
                    f"{lesson.where(cell)}: {line!r} is no parameter; write one a line as "
                    f"'name: type = value  # help [try value: recorded_name]', type one of {', '.join(TYPES)}"
                )
    return found


def choose(lesson: Lesson, given: Mapping[str, str]) -> dict[str, Any]:
    """Values typed on the command line, converted.

    Raises:
        ValueError: for a name that the lesson does not declare, a value of another type, or an unknown preset.
    """
    declared = parameters(lesson)
    for name in given:
        if name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ";"
            raise ValueError(f"{lesson.name} has no parameter {name!r}{hint} it has {', '.join(declared)}")
    if given.get("preset", "quick") not in PRESETS:
        raise ValueError(f"there is no preset {given['preset']!r}; presets: {', '.join(PRESETS)}")
    return {name: declared[name].convert(text) for name, text in given.items()}


def trial_of_the_day(lesson: Lesson) -> Parameter | None:
    """The parameter whose effect ``make test`` proves: it rotates with the source's hash; never the preset."""
    tried = [entry for entry in parameters(lesson).values() if entry.trial and entry.name != "preset"]
    return tried[int(lesson.sha256[:8], 16) % len(tried)] if tried else None


def _parameter(lesson: Lesson, cell: Cell, name: str, kind: str, value: ast.expr, comment: str) -> Parameter:
    where = f"{lesson.where(cell)}: parameter {name}"
    text = comment.strip().lstrip("#").strip()
    trial, reason = _TRIAL.search(text), _NOT_TRIED.search(text)
    if not trial and not reason:
        raise ValueError(f"{where} ends with neither [try value: recorded_name] nor [not tried: reason]: {comment!r}")
    help_text = _TRIAL.sub("", _NOT_TRIED.sub("", text)).strip()
    if not help_text:
        raise ValueError(f"{where} has no help text")
    default = _literal(where, ast.unparse(value), kind)
    if not trial:
        return Parameter(name, kind, default, help_text, None, reason[1] if reason else "")
    other = _literal(where, trial[1], kind)
    if other == default:
        raise ValueError(f"{where}: the trial value {other!r} is the default")
    names = tuple(part.strip() for part in trial[2].split(",") if part.strip())
    return Parameter(name, kind, default, help_text, Trial(other, names), "")


def _literal(where: str, text: str, kind: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{where}: {text} is no plain value (a word needs quotes)") from error
    right = type(value) is TYPES[kind] or (kind == "float" and type(value) is int)
    if not right:
        raise ValueError(f"{where}: {text} is no {kind}")
    return value


def _checked_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("expected a list such as [1, 2]")
    return value
