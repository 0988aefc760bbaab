"""Running a lesson in batch: papermill from any folder, and a report of what it used, how long it took and found."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from neuclip_lib.course.compare import execution_differences
from neuclip_lib.course.declared import parameters
from neuclip_lib.course.execute import QUIET, Ticks, cleaned_outputs, plain, prepared_kernel, swapped
from neuclip_lib.course.gates import read_notebook
from neuclip_lib.course.optional import need
from neuclip_lib.course.prose import fill
from neuclip_lib.course.record import Recorded, read_records
from neuclip_lib.course.source import Kind, Lesson
from neuclip_lib.files import ensure_writable, write_json, write_text

PACKAGES = (
    "neuclip-course",
    "torch",
    "torchvision",
    "open_clip_torch",
    "numpy",
    "matplotlib",
    "ipykernel",
    "papermill",
)


@dataclass(frozen=True)
class CellTime:
    """Wall seconds of one executed code cell."""

    id: str
    first_line: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """What one batch run was and gave; written as JSON beside the executed notebook.

    ``differences`` are the values that left their stored tolerance; they count as a failure only when every parameter
    has its default (``defaults``).
    """

    lesson: str
    kind: Kind
    source_sha256: str
    finished: str
    parameters: dict[str, Any]
    seed: int | None
    device: str | None
    versions: dict[str, str]
    machine: str
    seconds: float
    cpu_seconds: float | None
    cells: list[CellTime]
    results: dict[str, int | float]
    defaults: bool
    differences: list[str]
    error: str | None


@dataclass(frozen=True)
class BatchRun:
    """An executed notebook, its report and the file of the report."""

    notebook: Path
    report_path: Path
    report: Report
    records: dict[str, Recorded]


def run_lesson(lesson: Lesson, kind: Kind, out: Path | str, given: Mapping[str, Any] | None = None) -> BatchRun:
    """Execute a built lesson with papermill in the folder ``out``, one thread, and report.

    Args:
        given: values of parameters, by name, as :func:`neuclip_lib.course.declared.choose` gives them.

    Raises:
        ValueError: when the notebook is missing, or built from another source.
        RuntimeError: when a cell failed (the notebook so far and the report are in ``out`` and named).
    """
    given = dict(given or {})
    stored = read_notebook(lesson.notebook(kind))
    if stored.metadata.get("neuclip", {}).get("sha256") != lesson.sha256:
        raise ValueError(
            f"{lesson.name} changed since it was built; run: python -m neuclip_lib lessons build {lesson.number}"
        )
    out = ensure_writable(out).resolve()
    target, report_path = out / f"{lesson.name}.ipynb", out / f"{lesson.name}.report.json"
    begun, cpu = time.monotonic(), _cpu_of_children()
    with prepared_kernel() as (environment, records_file):
        environment["NEUCLIP_PROGRESS"] = str(out)
        with swapped(environment):
            error = _papermill(lesson.notebook(kind), target, given, out, Ticks(stored, f"lesson {lesson.name}"))
        records = read_records(records_file)
    seconds = time.monotonic() - begun
    executed = _finish(target, lesson, records)
    declared = {name: entry.default for name, entry in parameters(lesson).items()}
    used = {**declared, **given}
    report = Report(
        lesson=lesson.name,
        kind=kind,
        source_sha256=lesson.sha256,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        parameters=used,
        seed=used.get("seed"),
        device=used.get("device"),
        versions=versions(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread used",
        seconds=round(seconds, 3),
        cpu_seconds=None if cpu is None else round((_cpu_of_children() or 0.0) - cpu, 3),
        cells=_cell_times(executed),
        results={name: records[name].value for name in sorted(records)},
        defaults=used == declared,
        differences=[] if error else execution_differences(stored, records),
        error=error,
    )
    write_json(report_path, asdict(report))
    if error:
        raise RuntimeError(f"{error}\n\nthe notebook so far: {target}\nreport: {report_path}")
    return BatchRun(target, report_path, report, records)


def versions() -> dict[str, str]:
    """Python and the packages that a result may depend on; ``not installed`` for one that is missing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _papermill(source: Path, target: Path, given: dict[str, Any], folder: Path, ticks: Ticks) -> str | None:
    """Run papermill; give the failing cell's source and traceback, if one failed."""
    papermill = need("papermill")
    try:
        papermill.execute_notebook(
            source,
            target,
            parameters=given,
            kernel_name="python3",
            cwd=folder,
            progress_bar=False,
            extra_arguments=QUIET,
            on_cell_executed=ticks,
        )
    except papermill.exceptions.PapermillExecutionError as error:
        trace = plain("\n".join(error.traceback))
        return f"cell [{error.exec_count}] of {source.name} failed\n\n{error.source}\n\n{trace}"
    return None


def _finish(target: Path, lesson: Lesson, records: Mapping[str, Recorded]) -> Any:
    """Drop live widgets (nobody can move them) and put this run's numbers into the prose."""
    notebook = read_notebook(target)
    templates = lesson.prose_templates()
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = cleaned_outputs(cell.outputs, cell.execution_count or 0, cell.get("id", ""))
        elif cell.get("id") in templates:
            with contextlib.suppress(ValueError):  # a run that failed has not recorded everything
                cell.source, used = fill(templates[cell.id], records)
                cell.metadata |= {"neuclip": {"values": used}} if used else {}
    write_text(target, str(need("nbformat").writes(notebook, version=4)) + "\n")
    return notebook


def _cell_times(notebook: Any) -> list[CellTime]:
    times = []
    for cell in notebook.cells:
        seconds = cell.metadata.get("papermill", {}).get("duration")
        if cell.cell_type == "code" and seconds is not None:
            times.append(CellTime(cell.get("id", ""), cell.source.splitlines()[0], round(seconds, 3)))
    return times


def _cpu_of_children() -> float | None:
    """Processor seconds of finished child processes; absent on systems that do not count them."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
