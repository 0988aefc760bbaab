"""Rules that every lesson's source and both its notebooks keep, checked without executing anything.

Each function gives the broken rules, one line each; an empty list is a pass.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuclip_lib.course.declared import parameters
from neuclip_lib.course.optional import need
from neuclip_lib.course.output_rules import MEGABYTES, output_problems
from neuclip_lib.course.prose import names_in, refilled
from neuclip_lib.course.record import differences, from_json
from neuclip_lib.course.shape import shape_problems
from neuclip_lib.course.source import KINDS, Kind, Lesson, generate, read_lesson, sources
from neuclip_lib.course.source_rules import source_problems
from neuclip_lib.course.stubs import stray_stub_lines

__all__ = [
    "course_problems",
    "lesson_problems",
    "notebook_problems",
    "pair_problems",
    "read_notebook",
    "source_problems",
]


def read_notebook(path: Path | str) -> Any:
    """A notebook file as it is: nothing repaired, no version changed.

    Raises:
        ValueError: naming the file, when it is missing or no notebook.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return need("nbformat.v4.rwbase").rejoin_lines(need("nbformat").from_dict(raw))
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path.name} is no readable notebook ({error}); build the lesson again") from error


def course_problems(root: Path) -> list[str]:
    """Every broken rule of every lesson in a checkout, and notebooks without a source."""
    paths = sources(root)
    known = {path.stem for path in paths}
    problems = [
        f"{folder}/{path.name} has no source solutions/{path.stem}.py"
        for folder in ("lessons", "solutions")
        for path in sorted((root / folder).glob("*.ipynb"))
        if path.stem not in known
    ]
    for path in paths:
        problems += lesson_problems(path)
    return problems


def lesson_problems(source: Path) -> list[str]:
    """Every broken rule of one lesson: its source, its shape, both notebooks, and the two side by side."""
    try:
        lesson = read_lesson(source)
        notebooks = {kind: read_notebook(lesson.notebook(kind)) for kind in KINDS}
    except ValueError as error:
        return [str(error)]
    problems = source_problems(lesson) + shape_problems(lesson)
    for kind, notebook in notebooks.items():
        problems += notebook_problems(lesson, kind, notebook)
    return problems or pair_problems(lesson, notebooks)


def notebook_problems(lesson: Lesson, kind: Kind, notebook: Any) -> list[str]:
    """Broken rules of one generated notebook."""
    name = f"{lesson.folder(kind).name}/{lesson.name}.ipynb"
    own = notebook.get("metadata", {}).get("neuclip", {})
    if own.get("sha256") != lesson.sha256:
        return [f"{name} was built from another source; run: python -m neuclip_lib lessons build {lesson.number}"]
    if invalid := _validity(notebook):
        return [f"{name}: {line}" for line in invalid]
    problems = _metadata(lesson, kind, notebook)
    generated = generate(lesson, kind)
    if len(generated.cells) != len(notebook.cells):
        return [
            f"{name}: {line}"
            for line in [*problems, f"{len(notebook.cells)} cells; the source has {len(generated.cells)}"]
        ]
    count = 0
    for cell, expected in zip(notebook.cells, generated.cells, strict=True):
        problems += [f"cell {expected.id}: {line}" for line in _cell(cell, expected, own.get("recorded", {}))]
        if expected.cell_type == "code" and cell.cell_type == "code":
            count += 1
            if cell.get("execution_count") != count:
                problems.append(
                    f"cell {expected.id}: execution count {cell.get('execution_count')}; expected {count}"
                    " (every code cell executed, in order)"
                )
            problems += [f"cell {expected.id}: {line}" for line in output_problems(cell.get("outputs", []))]
    return [f"{name}: {line}" for line in problems]


def pair_problems(lesson: Lesson, notebooks: Mapping[Kind, Any]) -> list[str]:
    """Where the lesson and its solution do not belong together."""
    solution, stubbed = notebooks["solution"], notebooks["lesson"]
    problems = []
    for solved, stub in zip(solution.cells, stubbed.cells, strict=True):
        if solved.cell_type == "code":
            stray = stray_stub_lines(stub.source, solved.source)
            problems += [
                f"lessons/{lesson.name}.ipynb: cell {stub.id}: {line!r} is not in the solution" for line in stray
            ]
    records = [from_json(notebook.metadata.neuclip.recorded) for notebook in (solution, stubbed)]
    return problems + [
        f"{lesson.name}: the lesson's results differ from the solution's: {line}" for line in differences(*records)
    ]


def _validity(notebook: Any) -> list[str]:
    nbformat = need("nbformat")
    problems = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nbformat.validate(json.loads(json.dumps(notebook)))
    except Exception as error:  # a warning made an error, or nbformat's own
        problems.append(f"not a valid notebook: {str(error).splitlines()[0]}")
    ids = [cell.get("id") for cell in notebook.cells]
    if len(set(ids)) != len(ids) or None in ids:
        problems.append("cell ids are missing or not unique")
    if (size := len(json.dumps(notebook)) / 2**20) > MEGABYTES:
        problems.append(f"{size:.1f} MiB; at most {MEGABYTES}, draw fewer or smaller pictures")
    return problems


def _metadata(lesson: Lesson, kind: Kind, notebook: Any) -> list[str]:
    expected = generate(lesson, kind).metadata
    found = dict(notebook.metadata)
    own = dict(found.get("neuclip", {}))
    recorded = own.pop("recorded", None)
    found["neuclip"] = own
    problems = []
    for key in sorted(set(expected) | set(found)):
        if expected.get(key) != found.get(key):
            problems.append(f"metadata {key!r} is {found.get(key)!r}; expected {expected.get(key)!r}")
    if recorded is None:
        return [*problems, "metadata holds no recorded values"]
    for entry in parameters(lesson).values():
        missing = [name for name in (entry.trial.changes if entry.trial else ()) if name not in recorded]
        problems += [f"parameter {entry.name} must change {name!r}, which nothing records" for name in missing]
    return problems


def _cell(cell: Any, expected: Any, recorded: Mapping[str, Any]) -> list[str]:
    if (cell.cell_type, cell.get("id")) != (expected.cell_type, expected.id):
        return [f"is a {cell.cell_type} cell {cell.get('id')!r} in the notebook"]
    metadata = dict(cell.metadata)
    values = metadata.pop("neuclip", {}).get("values", []) if expected.cell_type == "markdown" else []
    problems = [] if metadata == expected.metadata else [f"metadata {metadata} differs from the source's"]
    source = expected.source
    if names_in(source) or values:
        try:
            source = refilled(source, values)
        except (ValueError, KeyError) as error:
            return [*problems, str(error)]
        problems += [
            f"the stored value of {row['name']} is {row['value']!r}, recorded is {recorded.get(row['name'])}"
            for row in values
            if recorded.get(row["name"]) != {"value": row["value"], "tol": row["tol"]}
        ]
    return problems if cell.source == source else [*problems, "its text differs from what the source generates"]
