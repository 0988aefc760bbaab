"""Batch runs of the tiny lesson: from another folder, with other parameters, and what their report says."""

import copy
import json
import os

import numpy as np
import pytest

from neuclip_lib.course.execute import WIDGET, clean, cleaned_outputs
from neuclip_lib.course.first_cells import first_cells_problems
from neuclip_lib.course.optional import need
from neuclip_lib.course.proof import prove_parameter
from neuclip_lib.course.report import run_lesson
from neuclip_lib.course.source import generate, read_lesson


def test_run_with_another_seed_reports_its_own_results(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    run = run_lesson(read_lesson(built), "lesson", "out", {"seed": 5})
    assert dict(os.environ) == before
    report = json.loads((tmp_path / "out" / "90_tiny.report.json").read_text(encoding="utf-8"))
    x = np.random.default_rng(5).normal(size=100)
    assert report["results"]["mean"] == pytest.approx(sum(x) / 100, rel=1e-12)
    assert report["parameters"] == {"preset": "quick", "seed": 5, "scale": 1.0} and report["seed"] == 5
    assert report["versions"]["numpy"] == np.__version__ and report["source_sha256"] == read_lesson(built).sha256
    assert len(report["cells"]) == 9 and sum(cell["seconds"] for cell in report["cells"]) <= report["seconds"]
    assert not report["defaults"] and any("says mean: stored 0.081" in line for line in report["differences"])
    text = run.notebook.read_text(encoding="utf-8")
    assert f"the mean is {x.mean():.3f}" in text and "the mean is 0.081" not in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["90_tiny.ipynb", "90_tiny.report.json"]


def test_run_with_defaults_agrees_with_what_is_stored(built, tmp_path):
    report = run_lesson(read_lesson(built), "solution", tmp_path).report
    assert report.defaults and report.differences == [] and report.error is None


def test_cell_that_fails_is_reported_with_its_source(copy_of_built, tmp_path):
    with pytest.raises(RuntimeError, match=r"expected one of \['quick', 'full'\]") as caught:
        run_lesson(read_lesson(copy_of_built), "lesson", tmp_path / "out", {"preset": "fast"})
    assert "validate(globals(), preset=" in str(caught.value) and "90_tiny.report.json" in str(caught.value)
    report = json.loads((tmp_path / "out" / "90_tiny.report.json").read_text(encoding="utf-8"))
    assert "ValueError" in report["error"] and report["results"] == {}


def test_changed_source_is_not_run(copy_of_built, tmp_path):
    copy_of_built.write_text(copy_of_built.read_text(encoding="utf-8") + "\n")
    with pytest.raises(ValueError, match="changed since it was built; run: python -m neuclip_lib lessons build 90"):
        run_lesson(read_lesson(copy_of_built), "lesson", tmp_path)


def test_effect_of_a_parameter_is_proved_or_missed(built, copy_of_built, tmp_path):
    run, problems = prove_parameter(read_lesson(built), "scale", tmp_path / "right")
    x = np.random.default_rng(0).normal(size=100)
    assert problems == [] and run.report.results["spread"] == pytest.approx(2 * x.std(), rel=1e-12)
    # The same lesson claiming that the scale changes the number of draws; only the claim differs from what was built.
    lesson = read_lesson(copy_of_built)
    copy_of_built.write_text(
        copy_of_built.read_text(encoding="utf-8").replace("[try 2.0: spread]", "[try 2.0: spread, n]")
    )
    claim = read_lesson(copy_of_built)
    notebook = copy_of_built.parent.parent / "lessons" / "90_tiny.ipynb"
    text = notebook.read_text(encoding="utf-8").replace(lesson.sha256, claim.sha256)
    notebook.write_text(text.replace("[try 2.0: spread]", "[try 2.0: spread, n]"), encoding="utf-8")
    _, problems = prove_parameter(claim, "scale", tmp_path / "wrong")
    assert problems == ["90_tiny: scale=2.0 must change 'n'; it is still 100"]


def test_second_cell_that_refuses_too_little_is_found(make_course):
    problems = first_cells_problems(read_lesson(make_course()))  # its own validate looks at the preset's value only
    assert problems == [
        "90_tiny.py: no_such_parameter=1 is not refused by the cell after the parameters",
        "90_tiny.py: seed='3' is not refused by the cell after the parameters",
        "90_tiny.py: scale='0.1' is not refused by the cell after the parameters",
    ]


def test_second_cell_that_refuses_a_preset_is_found(make_course):
    problems = first_cells_problems(read_lesson(make_course(('preset=["quick", "full"])', 'preset=["quick"])'))))
    assert problems[0].startswith("90_tiny.py: preset='full' is refused: ValueError: preset is 'full'")


def test_outputs_lose_widgets_and_join_streams():
    v4 = need("nbformat.v4")
    shown = v4.new_output("execute_result", {WIDGET: {"model_id": "1"}, "image/png": "x", "text/plain": "At 3."})
    pieces = [v4.new_output("stream", name="stdout", text=text) for text in ("a", "b\n", "c\n")]
    outputs = cleaned_outputs([pieces[0], pieces[1], shown, pieces[2]], 4, "here")
    assert [output.get("text") for output in outputs] == ["ab\n", None, "c\n"]
    assert set(outputs[1].data) == {"image/png", "text/plain"} and outputs[1].execution_count == 4
    bare = v4.new_output("display_data", {WIDGET: {"model_id": "1"}, "text/plain": "IntSlider(value=0)"})
    with pytest.raises(ValueError, match="here: a widget is shown without a picture"):
        cleaned_outputs([bare], 1, "here")


def test_cleaned_notebook_counts_from_one_and_keeps_only_the_sources_metadata(make_course):
    generated = generate(read_lesson(make_course()), "lesson")
    notebook = copy.deepcopy(generated)
    notebook.metadata["widgets"] = {"state": {}}
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(codes):
        cell.execution_count = 7 * number
        cell.metadata["execution"] = {"iopub.execute_input": "2026-01-01"}
    result = need("nbformat.v4").new_output("execute_result", {"text/plain": "1"}, execution_count=14)
    codes[2].outputs = [result]
    clean(notebook, generated, str)
    assert [cell.execution_count for cell in codes] == list(range(1, 9)) and result.execution_count == 3
    assert notebook.metadata == generated.metadata and "widgets" not in notebook.metadata
    assert [cell.metadata for cell in notebook.cells] == [cell.metadata for cell in generated.cells]
