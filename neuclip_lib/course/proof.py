"""Proof that a parameter does something: a batch run with its trial value must move the results it names."""

from __future__ import annotations

from pathlib import Path

from neuclip_lib.course.compare import unchanged
from neuclip_lib.course.declared import parameters
from neuclip_lib.course.gates import read_notebook
from neuclip_lib.course.report import BatchRun, run_lesson
from neuclip_lib.course.source import Kind, Lesson


def prove_parameter(lesson: Lesson, name: str, out: Path, kind: Kind = "lesson") -> tuple[BatchRun, list[str]]:
    """Run a lesson with one parameter at its trial value; give the run and what did not change although it must.

    Raises:
        ValueError: when the source declares no trial for that parameter.
    """
    trial = parameters(lesson)[name].trial
    if trial is None:
        raise ValueError(f"{lesson.name}: parameter {name} declares no [try value: recorded_name]")
    run = run_lesson(lesson, kind, out, {name: trial.value})
    stored = read_notebook(lesson.notebook(kind))
    same = unchanged(stored, run.records, trial.changes)
    return run, [
        f"{lesson.name}: {name}={trial.value!r} must change {result!r}; it is still {run.report.results.get(result)!r}"
        for result in same
    ]
