"""Each rule for built notebooks, broken once by spoiling a file of the built tiny lesson."""

import json

import pytest

from neuclip_lib.course.gates import course_problems, lesson_problems

FOLDERS = ("lessons", "solutions")


@pytest.fixture
def spoil(copy_of_built):
    """Change one notebook as plain JSON and give the rules it breaks."""

    def change(how, folder="lessons"):
        path = copy_of_built.parent.parent / folder / "90_tiny.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        how(notebook)
        path.write_text(json.dumps(notebook), encoding="utf-8")
        return lesson_problems(copy_of_built)

    return change


def code(notebook, number):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][number - 1]


def prose(notebook):
    return next(cell for cell in notebook["cells"] if "values" in cell["metadata"].get("neuclip", {}))


def unexecuted(notebook):
    code(notebook, 4).update(execution_count=None, outputs=[])


def executed_twice(notebook):
    code(notebook, 4)["execution_count"] = 9


def typed_number(notebook):
    prose(notebook)["source"] = [line.replace("0.081", "0.091") for line in prose(notebook)["source"]]


def typed_number_and_store(notebook):
    typed_number(notebook)
    prose(notebook)["metadata"]["neuclip"]["values"][1]["value"] = 0.091


def looser_tolerance(notebook):
    prose(notebook)["metadata"]["neuclip"]["values"][1]["tol"] = 1.0


def lost_values(notebook):
    del prose(notebook)["metadata"]["neuclip"]


def edited_code(notebook):
    code(notebook, 3)["source"].append("\nprint(1)")


def solved_stub(notebook):
    code(notebook, 7)["source"] = ["average = lambda values: 0\n", "average = check.average(average)"]


def lost_tag(notebook):
    del code(notebook, 1)["metadata"]["tags"]


def new_id(notebook):
    code(notebook, 3)["id"] = "other"


def doubled_id(notebook):
    code(notebook, 3)["id"] = code(notebook, 4)["id"]


def lost_id(notebook):  # nbformat only warns
    del code(notebook, 3)["id"]


def lost_cell(notebook):
    del notebook["cells"][5]


def stale(notebook):
    notebook["metadata"]["neuclip"]["sha256"] = "0" * 64


def widgets(notebook):
    notebook["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}


def widget_view(notebook):
    code(notebook, 4)["outputs"][0]["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": "1"}


def timing(notebook):
    code(notebook, 4)["metadata"]["execution"] = {"iopub.execute_input": "2026-01-01"}


def other_kernel(notebook):
    notebook["metadata"]["kernelspec"]["name"] = "conda-env-foo-py"


def error_output(notebook):
    code(notebook, 3)["outputs"] = [{"output_type": "error", "ename": "KeyError", "evalue": "x", "traceback": []}]


def stream(text, name="stdout"):
    def write(notebook):
        code(notebook, 3)["outputs"] = [{"output_type": "stream", "name": name, "text": text}]

    return write


def no_output_type(notebook):
    code(notebook, 3)["outputs"] = [{"name": "stdout", "text": "x"}]


def too_large(notebook):
    stream("x" * (5 << 20))(notebook)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (unexecuted, "execution count None; expected 4"),
        (executed_twice, "execution count 9; expected 4"),
        (typed_number, "its text differs from what the source generates"),
        (typed_number_and_store, "the stored value of mean is 0.091, recorded is {"),
        (looser_tolerance, "the stored value of mean"),
        (lost_values, "stored prose values are not the ones"),
        (edited_code, "its text differs from what the source generates"),
        (solved_stub, "its text differs from what the source generates"),
        (lost_tag, "metadata {} differs from the source's"),
        (new_id, "is a code cell 'other' in the notebook"),
        (doubled_id, "ids are missing or not unique"),
        (lost_id, "not a valid notebook: Cell is missing an id field"),
        (lost_cell, "11 cells; the source has 12"),
        (stale, "was built from another source; run: python -m neuclip_lib lessons build 90"),
        (widgets, "metadata 'widgets'"),
        (widget_view, "a widget is stored"),
        (timing, "differs from the source's"),
        (other_kernel, "metadata 'kernelspec'"),
        (error_output, "an uncaught KeyError"),
        (stream("UserWarning: x", "stderr"), "written to stderr: 'UserWarning: x'"),
        (stream("<object at 0x7f93910abc40>"), "object address 0x7f93910abc40"),
        (stream("saved in /home/someone/runs"), "absolute path '/home/someone'"),
        (stream("train:  45%|####    | 9/20"), "progress bar"),
        (no_output_type, "not a valid notebook"),
        (too_large, "5.0 MiB; at most 4"),
    ],
)
def test_gate(spoil, how, message, folder):
    problems = spoil(how, folder)
    assert any(message in line for line in problems), problems


def test_untouched_copy_passes(spoil):
    for folder in FOLDERS:
        assert spoil(lambda notebook: None, folder) == []


def test_changed_source_makes_both_notebooks_stale(copy_of_built):
    copy_of_built.write_text(copy_of_built.read_text(encoding="utf-8").replace("record(n=n)", "record(n=n + 0)"))
    assert [line.partition(" was built")[0] for line in lesson_problems(copy_of_built)] == [
        "solutions/90_tiny.ipynb",
        "lessons/90_tiny.ipynb",
    ]


def test_lesson_result_other_than_the_solutions(spoil):
    def change(notebook):
        notebook["metadata"]["neuclip"]["recorded"]["n"]["value"] = 101
        prose(notebook)["metadata"]["neuclip"]["values"][0]["value"] = 101
        prose(notebook)["source"] = [line.replace("Of 100", "Of 101") for line in prose(notebook)["source"]]

    assert spoil(change) == [
        "90_tiny: the lesson's results differ from the solution's: n: stored 100, got 101 (tolerance 0)"
    ]


def test_damaged_or_missing_notebook(copy_of_built):
    notebook = copy_of_built.parent.parent / "lessons" / "90_tiny.ipynb"
    notebook.write_text(notebook.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    assert "90_tiny.ipynb is no readable notebook" in lesson_problems(copy_of_built)[0]
    notebook.unlink()
    assert "90_tiny.ipynb is no readable notebook" in lesson_problems(copy_of_built)[0]


def test_notebook_without_a_source(copy_of_built):
    root = copy_of_built.parent.parent
    assert course_problems(root) == []
    (root / "lessons" / "91_more.ipynb").write_text("{}")
    assert course_problems(root) == ["lessons/91_more.ipynb has no source solutions/91_more.py"]


def test_windows_line_ends_do_not_make_a_notebook_stale(copy_of_built):
    copy_of_built.write_bytes(copy_of_built.read_bytes().replace(b"\n", b"\r\n"))
    assert lesson_problems(copy_of_built) == []
