"""validate: the second cell of a lesson refuses what the first one, papermill or a reader got wrong."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from neuclip_lib.course.kinds import Kind, as_kind
from neuclip_lib.course.replay import is_replaying

_PLAIN = (bool, int, float, str, list, dict, tuple, type(None))
"""The types that papermill can put into a notebook; modules, functions and classes come from imports."""

_STATE = "_neuclip_parameters"
"""Name, in the notebook's namespace, of (cells run at the last validation, whether one has passed)."""


class Parameters(Mapping[str, Any]):
    """The validated parameters: ``P.seed``, ``P["seed"]``, ``**P``; read only."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__["_values"] = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"there is no parameter {name!r}; there are {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"parameters are read only; change {name} in the first cell and run it and this one again")

    def __getitem__(self, name: str) -> Any:
        return self.__dict__["_values"][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_values"])

    def __len__(self) -> int:
        return len(self.__dict__["_values"])

    def __repr__(self) -> str:
        return ", ".join(f"{name} {value!r}" for name, value in self.items())

    def pick(self, **by_preset: Any) -> Any:
        """The value that belongs to the present preset: ``P.pick(quick=120, full=2000)``.

        Raises:
            ValueError: when the present preset is not among them.
        """
        if self["preset"] not in by_preset:
            raise ValueError(f"pick has no value for preset {self['preset']!r}, only for {', '.join(by_preset)}")
        return by_preset[self["preset"]]


def validate(values: Mapping[str, Any] | None = None, /, **schema: Any) -> Parameters:
    """Hold the parameters against their kinds: ``P = validate(preset=("quick", "full"), seed=at_least(0))``.

    Nothing is converted. Without ``values`` the calling notebook's own are meant. The first time, every plain value
    bound in the notebook must be declared here, so that a name that papermill injected and the lesson does not know is
    refused; when the cell runs again, the cells run since are looked at. Names refused as unknown are removed from the
    notebook, so that a corrected cell passes.

    Args:
        values: given values by name, in place of the notebook's.
        schema: by name a type, the choices in a tuple, or a kind: ``at_least(0)``, ``between(.01, 1.0)``, ``a_device``.

    Raises:
        ValueError: one line a problem: what was given, what was expected, how to pass it.
    """
    kinds = {name: as_kind(given) for name, given in schema.items()}
    namespace = sys._getframe(1).f_globals
    if values is not None and values is not namespace:
        return _validated(values, kinds)
    cells = _cells(namespace)
    seen, passed = namespace.get(_STATE, (0, False))
    beside = _beside(namespace, cells[seen:], set(kinds), first=not passed)
    unknown = [] if is_replaying() else sorted(beside - set(kinds))
    values = {name: namespace.get(name) for name in unknown}
    values |= {name: namespace[name] for name in kinds if name in namespace}
    namespace[_STATE] = len(cells), passed
    try:
        result = _validated(values, kinds)
    except ValueError:
        for name in unknown:
            if type(namespace[name]) in _PLAIN:
                del namespace[name]
        raise
    namespace[_STATE] = len(cells), True
    return result


def _validated(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Parameters:
    problems = [_unknown(name, kinds) for name in values if name not in kinds]
    for name, kind in kinds.items():
        if name not in values:
            problems.append(f"{name} is missing: expected {kind.expected}; the first cell must set it")
        elif not kind.accepts(values[name]):
            problems.append(_ill_typed(name, values[name], kind))
    if problems:
        raise ValueError("\n".join(["this notebook cannot run with these parameters:", *problems]))
    return Parameters({name: values[name] for name in kinds})


def were_validated(namespace: Mapping[str, Any]) -> bool:
    """True when ``validate`` has passed in this notebook."""
    return bool(namespace.get(_STATE, (0, False))[1])


def assigned_names(source: str, imports: bool = True) -> set[str]:
    """Names that a cell binds at its top level (empty for a cell that is not Python, such as one with a magic).

    Args:
        imports: whether imported names count.
    """
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return set()
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names if imports}
        else:
            names |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    return names


def _cells(namespace: Mapping[str, Any]) -> list[str]:
    """Sources of the cells run so far, this one last; empty outside IPython."""
    history = namespace.get("In")
    return [one for one in history if isinstance(one, str)] if isinstance(history, list) else []


def _beside(namespace: Mapping[str, Any], cells: list[str], declared: set[str], first: bool) -> set[str]:
    """Names that stand beside the parameters and so must be declared; the last of ``cells`` is the validating one."""
    names: set[str] = set()
    for cell in cells[:-1]:
        found = assigned_names(cell)
        if cell.startswith("# Parameters") or found & declared:  # papermill's first line; the parameters cell itself
            names |= found
    if first:
        here = assigned_names(cells[-1]) if cells else set()
        names |= {name for name, value in namespace.items() if type(value) in _PLAIN} - here - {"In", "Out"}
    return {name for name in names if not name.startswith("_") and name in namespace}


def _unknown(name: str, kinds: Mapping[str, Kind]) -> str:
    close = difflib.get_close_matches(name, kinds, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{name} is not a parameter of this lesson{hint} (they are {', '.join(kinds)})"


def _ill_typed(name: str, value: Any, kind: Kind) -> str:
    got = f"the text {value!r}" if isinstance(value, str) else f"{value!r} ({type(value).__name__})"
    simple = isinstance(kind.example, (str, int, float))
    by_p = f"-p {name} {kind.example}, or " if simple else ""
    example = kind.example if not isinstance(kind.example, bool) else str(kind.example).lower()
    return f"{name}: got {got}, expected {kind.expected}; with papermill: {by_p}-y '{name}: {example}'"
