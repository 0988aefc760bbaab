"""Strict nbval of one notebook in a process of its own: every output agrees, and so does every recorded number."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from neuclip_lib.course.compare import execution_differences
from neuclip_lib.course.execute import plain, prepared_kernel
from neuclip_lib.course.gates import read_notebook
from neuclip_lib.course.optional import need
from neuclip_lib.course.record import read_records


def strict_problems(path: Path | str, timeout: float = 1800) -> list[str]:
    """Execute a notebook under ``pytest --nbval`` in its own folder and environment; an empty list is a pass.

    Args:
        timeout: seconds for the whole notebook.
    """
    need("nbval")
    path = Path(path).resolve()
    notebook = read_notebook(path)
    with tempfile.TemporaryDirectory(prefix="neuclip-nbval-") as scratch, prepared_kernel() as (environment, records):
        report, settings = Path(scratch) / "report.xml", Path(scratch) / "pytest.ini"
        settings.write_text("[pytest]\n", encoding="utf-8")
        # No xdist here: it would hand the cells of one notebook to several processes.
        command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "--color=no"]
        command += ["-p", "no:xdist", "-p", "no:cacheprovider", "-c", str(settings), "--rootdir", scratch]
        command += [f"--junitxml={report}", str(path)]
        environment.pop("PYTEST_ADDOPTS", None)
        try:
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return [f"{path.name}: nbval did not finish in {timeout:.0f} s"]
        passed = _passed(report)
        found = read_records(records)
    expected = sum(cell.cell_type == "code" for cell in notebook.cells)
    if done.returncode != 0 or passed != expected:
        # A cell that failed leaves the rest undefined: its own report says more than a list of differences.
        output = plain(done.stdout[-6000:]) + done.stderr[-2000:]
        return [f"{path.name}: {passed} of {expected} code cells agree with nbval\n{output}"]
    return [f"{path.name}: {line}" for line in execution_differences(notebook, found)]


def _passed(report: Path) -> int:
    """Cells that ran and agreed: neither failed nor skipped."""
    if not report.exists():
        return 0
    cases = ElementTree.parse(report).iter("testcase")
    return sum(not any(child.tag in ("failure", "error", "skipped") for child in case) for case in cases)
