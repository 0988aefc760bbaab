"""Strict nbval of the tiny lesson: passes as built, fails when an output or a number in its prose is another one."""

import json

import pytest

from neuclip_lib.course.strict import strict_problems


@pytest.fixture
def spoiled(copy_of_built):
    """Change the built lesson as plain JSON and execute it strictly."""

    def run(how):
        path = copy_of_built.parent.parent / "lessons" / "90_tiny.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        how(notebook)
        path.write_text(json.dumps(notebook), encoding="utf-8")
        return strict_problems(path)

    return run


def test_built_lesson_agrees(spoiled):
    assert spoiled(lambda notebook: None) == []


def test_number_in_prose_that_does_not_come_out_names_cell_value_stored_and_got(spoiled):
    def change(notebook):
        cell = next(cell for cell in notebook["cells"] if "values" in cell["metadata"].get("neuclip", {}))
        cell["metadata"]["neuclip"]["values"][1]["value"] = 0.0812
        notebook["metadata"]["neuclip"]["recorded"]["n"]["value"] = 99  # within no tolerance, though its text says 100
        change.id = cell["id"]

    problems = spoiled(change)
    assert problems == [
        f"90_tiny.ipynb: cell {change.id} says mean: stored 0.0812, got 0.08109669349071558 (tolerance 8.11e-05)"
    ]


def test_output_that_differs(spoiled):
    def change(notebook):
        cell = next(cell for cell in notebook["cells"] if "draws between" in "".join(cell["source"]))
        cell["outputs"][0]["text"] = ["100 draws between -2.34 and 2.00\n"]

    (problem,) = spoiled(change)
    assert "7 of 8 code cells agree" in problem and "between -2.34" in problem and "between -2.33" in problem


def test_cell_that_is_skipped_is_no_pass(spoiled):
    def change(notebook):
        cell = next(cell for cell in notebook["cells"] if "draws between" in "".join(cell["source"]))
        cell["source"].insert(0, "# NBVAL_SKIP\n")
        cell["outputs"] = []
        notebook["cells"] = notebook["cells"][: notebook["cells"].index(cell) + 1]

    (problem,) = spoiled(change)
    assert "2 of 3 code cells agree" in problem
