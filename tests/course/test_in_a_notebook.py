"""The pieces inside a real kernel: what a cell's output holds, what papermill may pass, where progress goes."""

import json
import os
import subprocess
import sys

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("papermill")

PARAMETERS = 'preset: str = "quick"\nseed: int = 0\nverbose: bool = False'
VALIDATE = """
import matplotlib.pyplot as plt
from neuclip_lib.course import at_least, check, explore, progress, show, validate
P = validate(preset=("quick", "full"), seed=at_least(0), verbose=bool)
print(P)
"""
SHOW = """
fig, ax = plt.subplots(figsize=(2, 1))
show(fig, "An empty frame.")
"""
EXPLORE = '''
def draw(a, b):
    """An empty frame."""
    fig, ax = plt.subplots(figsize=(2, 1))
    return fig, {"sum": a + b}


explore(draw, a=(0, 2, 1, 1), b=[10, 20])
'''
PROGRESS = """
import time
from neuclip_lib import progress as lower

real, passed = time.monotonic, [0]
lower.time.monotonic = lambda: real() + 11 * passed[0]
for step in progress(range(3), "walk"):
    passed[0] += 1
lower.time.monotonic = real
"""
CHECK = "def recall_at_1(s):\n    ...\n\n\nrecall_at_1 = check.recall_at_1(recall_at_1)"
VIEW = "application/vnd.jupyter.widget-view+json"


def environment(folder):
    """What a kernel gets when pytest is not there: under pytest ipykernel leaves descriptor 2 alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JPY_", "NEUCLIP_"))}
    return kept | {
        "NEUCLIP_PROGRESS": str(folder / "progress"),
        "NEUCLIP_HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": str(folder / "matplotlib") if "MPLCONFIGDIR" not in os.environ else os.environ["MPLCONFIGDIR"],
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


def run_papermill(folder, cells, *arguments):
    """Execute the cells from another folder; give the executed notebook's path and what the runner was told."""
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in cells]
    cells[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "in.ipynb")
    (folder / "elsewhere").mkdir()
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(folder / "in.ipynb"),
        "out.ipynb",
        "--no-progress-bar",
        *arguments,
    ]
    run = subprocess.run(
        command, cwd=folder / "elsewhere", env=environment(folder), capture_output=True, text=True, check=False
    )
    return folder / "elsewhere" / "out.ipynb", run.returncode, run.stderr


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook run by papermill with two parameters changed, and what its runner's standard error got."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = (PARAMETERS, VALIDATE, SHOW, EXPLORE, PROGRESS, CHECK)
    path, code, said = run_papermill(folder, cells, "-p", "seed", "7", "-p", "verbose", "True")
    assert code == 0, said
    cells = nbformat.read(path, 4).cells
    assert cells.pop(1).source == "# Parameters\nseed = 7\nverbose = True\n"
    return path, cells, said


def printed(cell):
    """A cell's standard output; a busy machine may store it in pieces."""
    assert {(output.output_type, output.get("name")) for output in cell.outputs} == {("stream", "stdout")}
    return "".join(output.text for output in cell.outputs)


def test_the_parameters_reach_the_lesson(executed):
    _, cells, _ = executed
    assert printed(cells[1]) == "preset 'quick', seed 7, verbose True\n"


def test_a_picture_is_one_output_and_a_sentence(executed):
    _, cells, _ = executed
    picture, *sentence = cells[2].outputs
    assert picture.output_type == "display_data"
    assert set(picture.data) == {"text/plain", "image/png"}
    assert picture.metadata == {"image/png": {"alt": "An empty frame."}}
    assert "".join(output.text for output in sentence) == "An empty frame.\n"


def test_an_explorer_is_one_output_with_the_live_view_the_picture_and_the_sentence(executed):
    _, cells, _ = executed
    (output,) = cells[3].outputs
    assert set(output.data) == {VIEW, "image/png", "text/plain"}
    assert output.data["text/plain"] == "An empty frame. At a 1, b 10: sum 11."


def test_progress_leaves_one_line_in_the_cell_and_the_rest_on_the_runners_terminal(executed):
    path, cells, terminal = executed
    assert printed(cells[4]) == "walk: 3 of 3\n"
    assert "walk: 1/3, 22 s left" in terminal
    kept = json.loads((path.parents[1] / "progress" / "progress.json").read_text())
    assert (kept["label"], kept["done"], kept["state"]) == ("walk", 3, "done")


def test_an_undone_exercise_does_not_stop_the_notebook(executed):
    _, cells, _ = executed
    assert printed(cells[5]) == "recall_at_1: not done yet.\nThe cells below use the reference version.\n"


def test_nbval_agrees_in_every_cell(executed):
    pytest.importorskip("nbval")
    path, cells, _ = executed
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "--nbval-current-env",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [*command, "-c", os.devnull, f"--rootdir={path.parent}", str(path)],
        env=environment(path.parents[1]),
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{len(cells) + 1} passed" in run.stdout, run.stdout[-3000:]


def test_papermill_is_refused_what_the_lesson_does_not_declare_or_mean(tmp_path):
    wrong = ["-p", "verbose", "false", "-p", "sed", "7", "-y", "seed: 1.0", "-y", "plt: 3"]
    _, code, said = run_papermill(tmp_path, (PARAMETERS, VALIDATE), *wrong)
    assert code == 1
    assert "verbose: got the text 'false', expected True or False" in said
    assert "sed is not a parameter of this lesson; did you mean seed?" in said
    assert "seed: got 1.0 (float), expected a whole number of at least 0" in said
    assert "plt is not a parameter" in said
