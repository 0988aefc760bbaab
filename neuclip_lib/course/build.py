"""Making a lesson's two notebooks from its source: stubs or solved code, executed, prose numbers filled in."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip_lib.course.execute import CellFailed, clean, execute
from neuclip_lib.course.gates import notebook_problems, pair_problems, read_notebook, source_problems
from neuclip_lib.course.optional import need
from neuclip_lib.course.prose import fill
from neuclip_lib.course.record import Recorded, to_json
from neuclip_lib.course.source import KINDS, Kind, Lesson, generate, read_lesson
from neuclip_lib.files import ensure_writable, write_text


@dataclass(frozen=True)
class Built:
    """One notebook that a build made: where it is and how long its cells took, the kernel's start included."""

    path: Path
    seconds: float


def build(source: Path | str, timeout: float | None = None) -> list[Built]:
    """Build the solution and the lesson notebook of one source; on any error nothing is written.

    Args:
        source: ``solutions/NN_name.py``; the lesson goes to the ``lessons`` folder beside ``solutions``.
        timeout: seconds a single cell may take; without it a cell may take any time.

    Raises:
        ValueError: listing what in the source or in the outputs breaks a rule.
        RuntimeError: with the source and traceback of a cell that failed.
    """
    lesson = read_lesson(source)
    _refuse(f"{lesson.path.name} is not built", source_problems(lesson))
    notebooks, built = {}, []
    for kind in KINDS:
        ensure_writable(lesson.folder(kind))
        begun = time.monotonic()
        notebooks[kind] = executed(lesson, kind, timeout)
        built.append(Built(lesson.notebook(kind), time.monotonic() - begun))
    problems = [line for kind in KINDS for line in notebook_problems(lesson, kind, notebooks[kind])]
    _refuse(f"{lesson.path.name} is not built", problems + pair_problems(lesson, notebooks))
    for kind in KINDS:
        write_text(lesson.notebook(kind), as_text(notebooks[kind]))
    return built


def executed(lesson: Lesson, kind: Kind, timeout: float | None = None) -> Any:
    """One notebook of a lesson, executed, cleaned and with its prose numbers, as it is written."""
    generated = generate(lesson, kind)
    notebook = deepcopy(generated)
    places: Callable[[int], str] = lambda index: f"{lesson.where(lesson.cells[index])} ({kind})"
    try:
        records = execute(notebook, lesson.folder(kind), f"{kind} {lesson.name}", timeout)
    except CellFailed as error:
        raise RuntimeError(
            f"{places(error.index)}: this cell failed, nothing is written\n\n{error.source}\n\n{error.trace}"
        ) from None
    clean(notebook, generated, places)
    fill_prose(lesson, notebook, records)
    return notebook


def fill_prose(lesson: Lesson, notebook: Any, records: dict[str, Recorded]) -> None:
    """Put recorded values into the markdown cells, and keep them in the metadata.

    Raises:
        ValueError: naming the cell, for a value that was not recorded or a format that does not fit.
    """
    notebook.metadata.neuclip["recorded"] = to_json(records)
    problems = []
    for cell, original in zip(notebook.cells, lesson.cells, strict=True):
        if cell.cell_type != "markdown":
            continue
        try:
            cell.source, used = fill(original.source, records)
        except ValueError as error:
            problems.append(f"{lesson.where(original)}: {error}")
            continue
        if used:
            cell.metadata["neuclip"] = {"values": used}
    _refuse(f"{lesson.path.name} is not built", problems)


def as_text(notebook: Any) -> str:
    """A notebook as the text of its file."""
    return str(need("nbformat").writes(notebook, version=4)).rstrip("\n") + "\n"


def is_built(lesson: Lesson) -> bool:
    """Whether both notebooks are there and are what this source generates, every rule kept."""
    try:
        return not any(notebook_problems(lesson, kind, read_notebook(lesson.notebook(kind))) for kind in KINDS)
    except ValueError:
        return False  # missing or damaged


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise ValueError("\n  ".join([what, *problems]))
