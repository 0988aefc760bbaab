"""Whether a lesson's second code cell refuses wrong parameters: run it on right and on wrong ones."""

from __future__ import annotations

from typing import Any

from neuclip_lib.course.declared import PRESETS, Parameter, parameters, parameters_cell
from neuclip_lib.course.execute import QUIET, prepared_kernel, swapped
from neuclip_lib.course.optional import need
from neuclip_lib.course.source import Lesson

# For each type a value that papermill or a reader may well put there by mistake.
WRONG: dict[str, Any] = {"str": 3, "int": "3", "float": "0.1", "bool": "false", "list": "[1]"}


def first_cells_problems(lesson: Lesson) -> list[str]:
    """Execute the first two code cells as papermill would with other parameters; an empty list is a pass.

    Every preset must be accepted; an unknown preset, an unknown name and an ill-typed value of each parameter refused.
    """
    declared = parameters(lesson)
    cases: list[tuple[str, Any, bool]] = [("preset", preset, True) for preset in PRESETS]
    cases += [("preset", "no_such_preset", False), ("no_such_parameter", 1, False)]
    cases += [(entry.name, _wrong(entry), False) for entry in declared.values()]
    outcomes = _run(lesson, [f"# Parameters\n{name} = {value!r}\n" for name, value, _ in cases])
    problems = []
    for (name, value, accepted), error in zip(cases, outcomes, strict=True):
        if accepted and error:
            problems.append(f"{name}={value!r} is refused: {error}")
        if not accepted and not error:
            problems.append(f"{name}={value!r} is not refused by the cell after the parameters")
    return [f"{lesson.path.name}: {line}" for line in problems]


def _wrong(entry: Parameter) -> Any:
    return WRONG[entry.type]


def _run(lesson: Lesson, injected: list[str]) -> list[str | None]:
    """The error of the validating cell after each injected cell, in one kernel; None where it passed."""
    nbclient, v4 = need("nbclient"), need("nbformat.v4")
    first, second = parameters_cell(lesson).source, lesson.code[1].source
    sources = [first, second]
    for cell in injected:
        sources += [first, cell, second]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])
    with prepared_kernel() as (environment, _), swapped(environment):
        client = nbclient.NotebookClient(
            notebook,
            kernel_name="python3",
            extra_arguments=QUIET,
            allow_errors=True,
            resources={"metadata": {"path": str(lesson.folder("lesson"))}},
        )
        client.execute()
    errors = [_error(cell) for cell in notebook.cells]
    if errors[1]:
        raise ValueError(f"{lesson.path.name}: the defaults are refused: {errors[1]}")
    return errors[4::3]


def _error(cell: Any) -> str | None:
    return next((f"{out.ename}: {out.evalue}" for out in cell.outputs if out.output_type == "error"), None)
