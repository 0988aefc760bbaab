"""start_at: begin a lesson at any section; the solved cells before it are run first, unless they have been."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from neuclip_lib.course.optional import need
from neuclip_lib.course.params import assigned_names, were_validated
from neuclip_lib.course.replay import is_replaying, replaying
from neuclip_lib.course.source import Cell, Lesson, course_root, find_source, read_lesson, sources

_REPLAYED = "_neuclip_replayed"
"""Name, in the notebook's namespace, of the sources that were run by ``start_at``."""


def start_at(section: str, lesson: str | None = None) -> None:
    """Run what comes before a section and has not been run: solved, at quick size, in the calling notebook.

    In a run from the top it does and prints nothing. Checks in the cells it runs credit nothing to the reader.

    Args:
        section: as in the notebook's own call, ``start_at("3")``.
        lesson: for instance ``"00_start_here"``; not needed where the editor tells the kernel the notebook's name.

    Raises:
        ValueError: for a section that the lesson does not have.
        RuntimeError: when nothing has been run and the lesson's source is not found, or a cell fails.
    """
    namespace = sys._getframe(1).f_globals
    if is_replaying() or "In" not in namespace:  # a plain script always runs from the top
        return
    source = _source(lesson or _notebook_name(namespace), namespace)
    if source is None:
        return
    before = cells_before(source, section)
    history = [*namespace["In"][1:-1], *namespace.get(_REPLAYED, [])]
    missing = not_run(before, history)
    if not missing:
        return
    share = f"{len(missing)} of the {len(before)} cells" if len(missing) < len(before) else f"the {len(before)} cells"
    print(f"Section {section} of {source.name}: running {share} before it, solved and at quick size.")
    for cell in missing:
        print(f"  {_title(cell)}")
        _run(source, cell, namespace)
        namespace.setdefault(_REPLAYED, []).append(cell.source)


def cells_before(lesson: Lesson, section: str) -> list[Cell]:
    """Code cells before the one that calls ``start_at(section)``.

    Raises:
        ValueError: listing the sections there are.
    """
    calls = [re.findall(r"start_at\(\s*[\"']([^\"']+)[\"']", cell.source) for cell in lesson.code]
    for place, found in enumerate(calls):
        if section in found:
            return lesson.code[:place]
    known = ", ".join(one for found in calls for one in found)
    raise ValueError(f"{lesson.name} has no cell with start_at({section!r}); it has {known or 'none'}")


def not_run(cells: Sequence[Cell], history: Sequence[str]) -> list[Cell]:
    """The cells that the history does not account for, in order.

    A cell has been run when its very text has, or an edited form of it: a text that is no other cell's and binds the
    same names (a solved exercise, a changed parameter). A cell that binds no name (a picture, a check of something)
    counts as run unless a cell before it has to be run.
    """
    texts = {_normal(cell.source) for cell in cells}
    ran = {_normal(text) for text in history}
    edited = [_names(text) for text in history if _normal(text) not in texts]
    missing: list[Cell] = []
    for cell in cells:
        if _normal(cell.source) in ran:
            continue
        names = _names(cell.source)
        stand_in = next((found for found in edited if names and names <= found), None)
        if stand_in is not None:
            edited.remove(stand_in)
        elif names or missing:
            missing.append(cell)
    return missing


def _names(text: str) -> set[str]:
    """What a cell binds; imports count only where there is nothing else, since a reader may drop one."""
    return assigned_names(text, imports=False) or assigned_names(text)


def _normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _notebook_name(namespace: dict[str, Any]) -> str | None:
    """The notebook's name without suffix: JupyterLab gives the path in the environment, VS Code in the namespace."""
    path = os.environ.get("JPY_SESSION_NAME") or namespace.get("__vsc_ipynb_file__")
    return PurePath(path).stem if path else None


def _source(name: str | None, namespace: dict[str, Any]) -> Lesson | None:
    """The lesson's source; None when it is not found but the notebook was begun from the top."""
    try:
        root = course_root()
        if name is None:
            raise ValueError("the notebook's name is not known here")
        copies = [path for path in sources(root) if name.startswith(path.stem)]  # "00_start_here-Copy1" is lesson 0 too
        return read_lesson(copies[0] if copies else find_source(root, name))
    except (ValueError, RuntimeError) as error:
        if were_validated(namespace):
            return None
        raise RuntimeError(
            f"cannot start here ({error}); run the cells above first, or name the lesson: "
            'start_at("3", lesson="00_start_here") in a clone of the course'
        ) from error


def _title(cell: Cell) -> str:
    lines = [line.strip() for line in cell.source.splitlines() if line.strip() and not line.strip().startswith("#")]
    return lines[0][:90] if lines else "(comments)"


def _run(lesson: Lesson, cell: Cell, namespace: dict[str, Any]) -> None:
    """Run one cell silently; its source stays readable for tracebacks and ``inspect``."""
    name = f"<{lesson.name}:{cell.line}>"
    linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(keepends=True), name)
    try:
        with replaying(), need("IPython.utils.capture").capture_output():
            exec(compile(cell.source, name, "exec"), namespace)
    except Exception as error:
        raise RuntimeError(
            f"cannot start here: the cell at {lesson.where(cell)} failed with {type(error).__name__}: {error}"
        ) from error
    if "parameters" in cell.tags and "preset" in namespace:
        namespace["preset"] = "quick"
