"""Building: what the two notebooks of the tiny lesson hold, and what stops a build."""

import json

import numpy as np
import pytest

from neuclip_lib.course.build import build, executed
from neuclip_lib.course.gates import lesson_problems
from neuclip_lib.course.source import read_lesson


def load(source, folder):
    return json.loads((source.parent.parent / folder / f"{source.stem}.ipynb").read_text(encoding="utf-8"))


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def by_id(notebook, identity):
    return next(cell for cell in notebook["cells"] if cell["id"] == identity)


@pytest.mark.parametrize("folder", ["lessons", "solutions"])
def test_notebook_is_executed_in_order_without_timing(built, folder):
    notebook = load(built, folder)
    assert [cell["execution_count"] for cell in code(notebook)] == list(range(1, 9))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"]["neuclip"]["sha256"] == read_lesson(built).sha256
    assert set().union(*(cell["metadata"] for cell in notebook["cells"])) == {"tags", "neuclip"}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"]) == 12


def test_stub_and_solution(built):
    lesson, solution = (by_id(load(built, folder), "tiny-average") for folder in ("lessons", "solutions"))
    body = "".join(lesson["source"]).splitlines()[2:4]
    assert body == ["    # Your code, about 2 lines: add, then divide", "    ..."]
    assert "total = values.sum()" in "".join(solution["source"]) and "total" not in "".join(lesson["source"])
    assert printed(lesson) == "not done yet; what follows uses the reference\n"
    assert printed(solution) == "passed\n"


@pytest.mark.parametrize("folder", ["lessons", "solutions"])
def test_prose_numbers_are_the_recorded_ones(built, folder):
    x = np.random.default_rng(0).normal(size=100)
    notebook = load(built, folder)
    text = next("".join(cell["source"]) for cell in notebook["cells"] if "Of 100 draws" in "".join(cell["source"]))
    assert f"the mean is {sum(x) / 100:.3f} and the spread {((x - x.mean()) ** 2).mean() ** 0.5:.2f}" in text
    assert r"$f_{value}=\{x\}$" in text and '`{"value": 1}`' in text and "`{value:.2f}`" in text
    stored = notebook["metadata"]["neuclip"]["recorded"]
    assert stored["n"] == {"tol": 0.0, "value": 100} and stored["spread"]["tol"] == 0.01
    assert stored["mean"]["tol"] == pytest.approx(1e-3 * abs(x.mean()))


def test_two_builds_are_equal_to_the_byte_pictures_too(built, make_course):
    other = make_course()
    build(other)
    for folder in ("lessons", "solutions"):
        first, second = (path.parent.parent / folder / "90_tiny.ipynb" for path in (built, other))
        assert first.read_bytes() == second.read_bytes()
    assert "image/png" in (other.parent / "90_tiny.ipynb").read_text(encoding="utf-8")
    assert lesson_problems(other) == []


def test_another_kernel_of_the_same_name_is_not_used(make_course, tmp_path, monkeypatch):
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": ["no-such-python"], "display_name": "Other", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    notebook = executed(read_lesson(make_course()), "solution")
    assert code(notebook)[-1]["execution_count"] == 8


def stopped(source, message):
    before = sorted(source.parent.parent.rglob("*"))
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        build(source)
    assert sorted(source.parent.parent.rglob("*")) == before, "something was written"
    return str(caught.value)


def test_failing_cell_is_shown_with_line_source_and_traceback(make_course):
    source = make_course(("record(n=n)\n", "1 / 0\n"))
    message = stopped(source, "ZeroDivisionError")
    line = source.read_text(encoding="utf-8").splitlines().index("# %%", 42) + 1
    assert f"90_tiny.py:{line} (solution)" in message and "draws between" in message and "\x1b" not in message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(30)\n", "timed out while it was being executed, after 2 seconds"),
        ("import os; os._exit(1)\n", "Kernel died"),
    ],
)
def test_cell_that_takes_too_long_or_kills_the_kernel_is_shown(make_course, code, message):
    source = make_course(("import numpy as np\n", code))
    with pytest.raises(RuntimeError, match=message) as caught:
        build(source, timeout=2)
    assert "this cell failed, nothing is written" in str(caught.value) and code.strip() in str(caught.value)


def test_prose_number_that_nothing_records_stops_the_build(make_course):
    message = stopped(make_course(("{value:mean:.3f}", "{value:median:.3f}")), "nothing recorded 'median'")
    assert "90_tiny.py:41" in message and "recorded: average, mean, n, spread" in message


def test_lesson_whose_results_differ_from_the_solution_stops_the_build(make_course):
    source = make_course(("return np.mean\n", "return np.max\n"))
    largest = float(np.random.default_rng(0).normal(size=100).max())
    assert f"average: stored 0.08109669349071558, got {largest!r}" in stopped(source, "differ from the solution's")


def test_files_left_in_the_source_tree_stop_the_build(make_course):
    source = make_course(("record(n=n)\n", "record(n=n)\nopen('left.txt', 'w').close()\n"))
    with pytest.raises(RuntimeError, match=r"left left\.txt in solutions/"):
        build(source)
    assert not source.with_suffix(".ipynb").exists()


def test_one_name_with_two_values_stops_the_build(make_course):
    stopped(make_course(("record(n=n)\n", "record(n=n)\nrecord(n=n + 1)\n")), r"record\(n=\.\.\.\) was called with 100")


def test_wrong_source_stops_before_anything_runs(make_course):
    stopped(make_course(("record(n=n)\n", "raise SystemExit;\n")), "line 3 of the cell ends with ';'")
