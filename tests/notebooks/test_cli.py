"""``python -m neuclip_lib lessons``: what each action prints, writes and returns."""

import json
import os
import time

import pytest

from neuclip_lib.__main__ import main
from neuclip_lib.course.copies import copy_lessons


@pytest.fixture
def lessons(copy_of_built, monkeypatch, capsys):
    """Run an action in the copied course; give (exit code, printed, printed as errors)."""
    monkeypatch.chdir(copy_of_built.parent)

    def run(*arguments):
        code = main(["lessons", *arguments])
        return (code, *capsys.readouterr())

    return run


def test_build_makes_only_what_changed(lessons, copy_of_built):
    notebook = copy_of_built.with_suffix(".ipynb")
    os.utime(notebook, (1, 1))
    assert lessons("build") == (0, "[1/1] 90_tiny: up to date\n", "")
    assert notebook.stat().st_mtime == 1
    copy_of_built.write_text(copy_of_built.read_text(encoding="utf-8").replace("record(n=n)", "record(n=n + 0)"))
    code, out, _ = lessons("build", "90")
    assert code == 0 and "building" in out and "solutions/90_tiny.ipynb" in out and "lessons/90_tiny.ipynb" in out
    assert notebook.stat().st_mtime > 1 and "n=n + 0" in notebook.read_text(encoding="utf-8")
    assert lessons("build")[1] == "[1/1] 90_tiny: up to date\n"
    whole = notebook.read_bytes()
    notebook.write_bytes(whole[:1000])
    assert "building" in lessons("build")[1] and notebook.read_bytes() == whole


def test_failing_build_is_an_error_with_the_cell(lessons, copy_of_built):
    copy_of_built.write_text(copy_of_built.read_text(encoding="utf-8").replace("record(n=n)", "record(n=len(1))"))
    code, _, err = lessons("build")
    assert code == 1 and "TypeError" in err and "record(n=len(1))" in err and "nothing is written" in err


def test_check_counts_problems(lessons, copy_of_built):
    assert lessons("check") == (0, "1 lessons, all rules kept\n", "")
    begun = time.monotonic()
    (copy_of_built.parent.parent / "lessons" / "90_tiny.ipynb").unlink()
    code, out, err = lessons("check")
    assert code == 1 and "1 problems" in out and "90_tiny.ipynb is no readable notebook" in err
    assert time.monotonic() - begun < 5


def test_list_names_parameters(lessons):
    code, out, _ = lessons("list")
    assert code == 0 and "90_tiny: A tiny lesson (built)" in out and "12 cells, 1 exercises, 4 numbers in prose" in out
    assert '-p preset "quick": str, quick or full' in out and "-p scale 1.0: float, width of the draws" in out


def test_run_prints_results_and_places(lessons, tmp_path):
    code, out, _ = lessons("run", "90", "--out", str(tmp_path / "out"), "-p", "scale", "-0.5", "--preset", "full")
    assert code == 0 and "n = 200" in out
    assert f"notebook: {tmp_path / 'out' / '90_tiny.ipynb'}" in out
    report = json.loads((tmp_path / "out" / "90_tiny.report.json").read_text(encoding="utf-8"))
    assert report["parameters"] == {"preset": "full", "seed": 0, "scale": -0.5}


def test_run_whose_results_are_not_the_printed_ones_fails(lessons, copy_of_built, tmp_path):
    notebook = copy_of_built.parent.parent / "lessons" / "90_tiny.ipynb"
    notebook.write_text(notebook.read_text(encoding="utf-8").replace('"value": 100', '"value": 101'), encoding="utf-8")
    code, _, err = lessons("run", "90", "--out", str(tmp_path / "out"))
    assert code == 1 and "says n: stored 101, got 100 (tolerance 0)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "7"], "there is no lesson '7'; lessons: 90_tiny"),
        (["run", "90", "-p", "sead", "1"], "no parameter 'sead', did you mean 'seed'?"),
        (["run", "90", "-p", "seed"], "-p takes a name and a value"),
        (["run", "90", "-p", "seed", "1", "-p", "seed", "2"], "parameter seed is given twice"),
        (["run", "90", "-p", "preset", "full", "--preset", "quick"], "the preset is given twice"),
        (["build", "-p", "seed", "1"], "-p NAME VALUE belongs to: lessons run"),
        (["copy", "../lessons"], "lessons/ is generated"),
    ],
)
def test_wrong_use_has_a_message(lessons, arguments, message):
    code, _, err = lessons(*arguments)
    assert code == 1 and message in err


def test_copies_are_renewed_while_untouched_and_kept_once_changed(copy_of_built, tmp_path):
    root, mine = copy_of_built.parent.parent, tmp_path / "mine"
    lesson, copy = root / "lessons" / "90_tiny.ipynb", mine / "90_tiny.ipynb"
    first = lesson.read_text(encoding="utf-8")
    assert copy_lessons(root, mine) == ["90_tiny.ipynb: copied"] and copy.read_text(encoding="utf-8") == first
    assert copy_lessons(root, mine) == []
    lesson.write_text(first + " ", encoding="utf-8")
    assert copy_lessons(root, mine) == ["90_tiny.ipynb: renewed"] and copy.read_text(encoding="utf-8") == first + " "
    copy.write_text("mine", encoding="utf-8")
    assert copy_lessons(root, mine) == []
    lesson.write_text(first + "  ", encoding="utf-8")
    kept = "90_tiny.ipynb: yours is kept as it is; the new version is 90_tiny.new"
    assert copy_lessons(root, mine) == [kept + ".ipynb"] and copy.read_text(encoding="utf-8") == "mine"
    (mine / "90_tiny.new.ipynb").write_text("mine too", encoding="utf-8")
    lesson.write_text(first + "   ", encoding="utf-8")
    assert copy_lessons(root, mine) == [kept + "2.ipynb"]
    assert (mine / "90_tiny.new.ipynb").read_text(encoding="utf-8") == "mine too"
