"""Executing a notebook in one thread with a clean environment, and removing what differs between two executions."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuclip_lib.course.optional import need
from neuclip_lib.course.record import VARIABLE, Recorded, read_records
from neuclip_lib.course.source import course_root
from neuclip_lib.progress import track

WIDGET = "application/vnd.jupyter.widget-view+json"
QUIET = ["--log-level=40"]  # the kernel warns on every start that it talks over plain TCP
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# What a shell may carry that has no say here: who watches, the reader's own state, figures, warnings, line widths.
_DROPPED = {
    *("JPY_SESSION_NAME", "NEUCLIP_PROGRESS", "NEUCLIP_PROGRESS_FILE"),
    *("MPLBACKEND", "PYTHONWARNINGS", "COLUMNS", "LINES"),
}


class CellFailed(RuntimeError):
    """A cell raised: ``index`` is its place among all cells, ``trace`` the traceback without colours."""

    def __init__(self, index: int, source: str, trace: str) -> None:
        super().__init__(f"cell {index + 1} failed\n\n{source}\n\n{trace}")
        self.index, self.source, self.trace = index, source, trace


def kernel_environment(records: Path, scratch: Path) -> dict[str, str]:
    """Environment for a kernel: one thread, this environment's own Python kernel, records appended to ``records``."""
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    environment |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",  # a user-wide kernel of the same name must not win
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "IPYTHONDIR": str(scratch / "ipython"),  # the reader's own start-up files have no say
        VARIABLE: str(records),
    }
    if "NEUCLIP_HOME" not in environment:
        environment["NEUCLIP_HOME"] = str(_home())
    return environment


@contextmanager
def prepared_kernel() -> Iterator[tuple[dict[str, str], Path]]:
    """Environment for one execution, and the file of its records; both last as long as the block."""
    import matplotlib.font_manager  # noqa: F401  builds the font cache here: in a kernel that writes into an output

    with tempfile.TemporaryDirectory(prefix="neuclip-") as folder:
        records = Path(folder) / "records.jsonl"
        yield kernel_environment(records, Path(folder)), records


@contextmanager
def swapped(environment: dict[str, str]) -> Iterator[None]:
    """Give this process another environment for a while: which kernel is found and what it inherits depend on it."""
    kept = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def execute(notebook: Any, folder: Path, label: str, timeout: float | None = None) -> dict[str, Recorded]:
    """Execute a notebook in place, cell by cell in ``folder``, and give what it recorded.

    Args:
        label: what the progress lines say.
        timeout: seconds a single cell may take; without it a cell may take any time.

    Raises:
        CellFailed: with the source and the traceback of the first cell that raised.
        RuntimeError: when the notebook left files in ``folder``.
    """
    nbclient = need("nbclient")
    before = _listing(folder)
    ticks = Ticks(notebook, label)
    with prepared_kernel() as (environment, records):
        client = nbclient.NotebookClient(
            notebook,
            kernel_name="python3",
            extra_arguments=QUIET,
            timeout=timeout,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=ticks,
        )
        with swapped(environment), client.setup_kernel():
            for index, cell in enumerate(notebook.cells):
                try:
                    client.execute_cell(cell, index)
                except nbclient.exceptions.CellExecutionError as error:
                    raise CellFailed(index, cell.source, plain(error.traceback)) from None
                except (nbclient.exceptions.CellTimeoutError, nbclient.exceptions.DeadKernelError) as error:
                    raise CellFailed(index, cell.source, plain(str(error))) from None
        found = read_records(records)
    if left := sorted(_listing(folder) - before):
        raise RuntimeError(f"{label} left {', '.join(left)} in {folder.name}/; a lesson writes in a temporary folder")
    return found


class Ticks:
    """A hook for nbclient and papermill that reports each executed cell with the time left."""

    def __init__(self, notebook: Any, label: str) -> None:
        cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code" and cell.source.strip()]
        self._steps = track(cells, label)
        next(self._steps, None)

    def __call__(self, **_: Any) -> None:
        next(self._steps, None)


def clean(notebook: Any, generated: Any, where: Callable[[int], str]) -> None:
    """Remove timing, widgets and random ids from an executed notebook; count the code cells 1..n.

    Args:
        generated: the same notebook before execution, whose metadata is the one to keep.
        where: names a cell's place, for messages.

    Raises:
        ValueError: for a widget shown without a picture beside it (without a kernel a reader would see nothing).
    """
    notebook.metadata = generated.metadata.copy()
    count = 0
    for index, (cell, original) in enumerate(zip(notebook.cells, generated.cells, strict=True)):
        cell.metadata = original.metadata.copy()
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = cleaned_outputs(cell.outputs, count, where(index))


def cleaned_outputs(outputs: list[Any], count: int, where: str) -> list[Any]:
    """Outputs with neighbouring pieces of one stream joined and widget views dropped."""
    kept: list[Any] = []
    for output in outputs:
        output.pop("transient", None)
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
            continue
        if output.output_type == "execute_result":
            output.execution_count = count
        if WIDGET in output.get("data", {}):
            del output.data[WIDGET]
            if "image/png" not in output.data:
                raise ValueError(f"{where}: a widget is shown without a picture; use explore() or progress()")
        kept.append(output)
    return kept


def plain(text: str) -> str:
    """Text without terminal colours."""
    return _ANSI.sub("", text)


def _listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".ipynb" and not path.name.startswith(".")}


def _home() -> Path:
    """Where a kernel that works in lessons/ finds the checkout's data and runs."""
    from neuclip_lib.home import data_dir

    try:
        root = course_root()
    except RuntimeError:
        root = None
    return root if root and os.access(root, os.W_OK) else data_dir().parent.parent
