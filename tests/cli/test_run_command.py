"""The main job: what it plans, what it does, and what a second call leaves alone."""

import contextlib
import io
import json
import os
import time
from pathlib import Path

import pytest

from neuclip_lib import __main__ as program
from neuclip_lib.cli import run
from neuclip_lib.files import write_json
from neuclip_lib.training.config import to_json

METHODS = ["openclip", "neuclip"]


def call(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = program.main(["run", *arguments])
    return code, out.getvalue(), err.getvalue()


def tiny(out: Path) -> list[str]:
    return ["--preset", "tiny", "--methods", *METHODS, "--out", str(out), "--no-lesson"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, str, str]]:
    """A call in which one method cannot be trained: a file is where its folder should be."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    out.mkdir()
    (out / "openclip").write_text("in the way")
    outcome = call(*tiny(out))
    (out / "openclip").unlink()
    return out, outcome


@pytest.fixture(scope="module")
def second(first: tuple[Path, tuple[int, str, str]]) -> tuple[Path, tuple[int, str, str], dict[str, float]]:
    """The call again, after the file is gone; with when the other method's files had been written."""
    out, _ = first
    before = written(out / "neuclip")
    return out, call(*tiny(out)), before


def written(folder: Path) -> dict[str, float]:
    return {file.relative_to(folder).as_posix(): file.stat().st_mtime for file in folder.rglob("*") if file.is_file()}


def test_a_method_that_fails_is_reported_and_the_others_go_on(first: tuple[Path, tuple[int, str, str]]) -> None:
    out, (code, text, errors) = first
    assert code == 1
    assert "error: openclip: training failed: error: cannot write in" in errors
    assert str(out / "openclip.log") in errors
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["method", "NeuCLIP", "chance"]


def test_the_second_call_does_only_what_is_missing(
    second: tuple[Path, tuple[int, str, str], dict[str, float]],
) -> None:
    out, (code, text, errors), before = second
    assert code == 0, errors
    assert "openclip on captions: 20 steps each" in errors
    assert written(out / "neuclip") == before
    assert [line.split()[0] for line in text.splitlines()[2:6]] == ["method", "OpenCLIP", "NeuCLIP", "chance"]


def test_the_table_is_what_the_runs_measured(second: tuple[Path, tuple[int, str, str], dict[str, float]]) -> None:
    out, (_, text, _), _ = second
    row = next(line for line in text.splitlines() if line.startswith("NeuCLIP")).split()
    measured = json.loads((out / "neuclip" / "evaluation.json").read_text())
    ways = [measured["retrieval"][way] for way in ("image_to_text", "text_to_image")]
    expected = [f"{way[key]:.1f}" for way in ways for key in ("r@1", "r@5", "r@10")]
    assert row[1:8] == [*expected, f"{measured['normalizer_error']['mse']:.2f}"]
    for method in METHODS:
        assert str(out / method / "pictures") in text


def test_the_baseline_carries_the_prototypes_as_a_shadow(
    second: tuple[Path, tuple[int, str, str], dict[str, float]],
) -> None:
    out, (_, text, _), _ = second
    estimators = json.loads((out / "openclip" / "evaluation.json").read_text())["normalizer_error"]["estimators"]
    assert set(estimators) == {"openclip", "neuclip", "batch"}
    assert f"error neuclip {estimators['neuclip']['mse']:.2f}, batch {estimators['batch']['mse']:.2f}." in text
    configs = [json.loads((out / method / "config.json").read_text()) for method in METHODS]
    differing = {name for name in configs[0] if configs[0][name] != configs[1][name]}
    assert differing == {"method", "shadows"}, "same budget, batch, model, data and seed"


def test_the_third_call_does_nothing_and_says_the_same(
    second: tuple[Path, tuple[int, str, str], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, (_, text, _), _ = second

    def refuse(*_: object) -> None:
        raise AssertionError("a command was started")

    monkeypatch.setattr(run, "run_jobs", refuse)
    before, begun = written(out), time.monotonic()
    assert call(*tiny(out))[:2] == (0, text)
    assert time.monotonic() - begun < 10
    assert written(out) == before


def test_new_encoders_are_evaluated_again(
    second: tuple[Path, tuple[int, str, str], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = second[0]
    plans = run.make_plans(METHODS, "tiny", None, 0, out)
    assert [run.job_of(plan, out) for plan in plans] == [None, None]
    evaluation = out / "neuclip" / "evaluation.json"
    was = evaluation.stat().st_mtime
    os.utime(evaluation, (1, 1))
    job = run.job_of(plans[1], out)
    os.utime(evaluation, (was, was))
    assert job is not None
    assert [stage.arguments for stage in job.stages] == [["evaluate", str(out / "neuclip")]]


def test_a_folder_of_another_seed_is_refused_before_any_work(
    second: tuple[Path, tuple[int, str, str], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = second[0]
    code, text, errors = call(*tiny(out), "--seed", "1")
    assert (code, text) == (1, "")
    assert "openclip holds a run of another config:\n  seed: 0 there, 1 asked for\nchoose another folder" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "laptob"], "there is no preset 'laptob'"),
        (["--methods", "neuclib"], "neuclib"),
        (["--data", "icon"], "icon"),
        (["--methods", "neuclip", "neuclip"], "--methods must differ"),
    ],
)
def test_wrong_names_are_refused_before_any_work(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, text, errors = call("--out", str(tmp_path / "runs"), *arguments)
    assert (code, text) == (1, "")
    assert errors.startswith("error: ") and message in errors
    assert not (tmp_path / "runs").exists()


def test_the_laptop_plan_is_the_preset_for_every_method(tmp_path: Path) -> None:
    plans = run.make_plans(run.METHODS, "laptop", None, 5, tmp_path)
    assert [plan.method for plan in plans] == ["openclip", "gcl-batch", "neuclip"]
    shared = [{k: v for k, v in to_json(plan.config).items() if k not in ("method", "shadows")} for plan in plans]
    assert shared[0] == shared[1] == shared[2]
    assert (shared[0]["data"], shared[0]["seed"], shared[0]["steps"], shared[0]["batch_size"]) == ("icons", 5, 700, 128)
    job = run.job_of(plans[0], tmp_path)
    assert job is not None
    assert [stage.name for stage in job.stages] == ["training", "evaluating"]
    assert job.stages[0].arguments[-2:] == ["--shadows", "neuclip"]


def test_steps_are_read_from_a_record_that_is_being_written(tmp_path: Path) -> None:
    steps = run.steps_of(tmp_path)
    assert steps() == 0
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 10, "kind": "train"}\n{"step": 20, "kind": "train"}\n{"step": 3')
    assert steps() == 20
    record.write_text("damaged\n")
    assert steps() == 0


def test_an_executed_lesson_is_current_only_for_its_source_and_after_the_runs(tmp_path: Path) -> None:
    report, notebook = tmp_path / "00.report.json", tmp_path / "00.ipynb"
    write_json(report, {"source_sha256": "abc", "error": None})
    assert not run._lesson_is_current(report, notebook, "abc", 0.0)
    notebook.write_text("{}")
    assert run._lesson_is_current(report, notebook, "abc", 0.0)
    assert not run._lesson_is_current(report, notebook, "abd", 0.0)
    assert not run._lesson_is_current(report, notebook, "abc", report.stat().st_mtime + 1)
    write_json(report, {"source_sha256": "abc", "error": "cell 3 failed"})
    assert not run._lesson_is_current(report, notebook, "abc", 0.0)


@pytest.fixture
def lesson_job(monkeypatch: pytest.MonkeyPatch) -> list[run.Job]:
    """The job that executes the lesson, which is not run; set an error on it to let it fail."""
    jobs: list[run.Job] = []

    def take(given: list[run.Job], slots: int) -> None:
        jobs.extend(given)
        given[0].error = "executing failed: error: cell [3] failed" if len(jobs) > 1 else None

    monkeypatch.setattr(run, "run_jobs", take)
    monkeypatch.setattr(run, "_fits_lesson", lambda plans: True)
    return jobs


def test_lesson_0_is_executed_on_these_runs_and_its_failure_reported(
    second: tuple[Path, tuple[int, str, str], dict[str, float]],
    lesson_job: list[run.Job],
) -> None:
    from neuclip_lib.cli import lessons
    from neuclip_lib.course.declared import choose
    from neuclip_lib.course.source import course_root, find_source, read_lesson

    out = second[0]
    plans = run.make_plans(METHODS, "tiny", None, 0, out)
    notebook, problem = run._lesson(plans, out)
    lesson = read_lesson(find_source(course_root(), "0"))
    assert (notebook, problem) == (out / f"{lesson.name}.ipynb", None)
    (stage,) = lesson_job[0].stages
    assert stage.arguments[:2] == ["lessons", "run"]
    rest, given = lessons._take_parameters(stage.arguments[1:])
    options = lessons._parser().parse_args(rest)
    assert (options.lesson, options.out) == ("0", out)
    assert choose(lesson, given) == {"runs": str(out)}
    assert run._lesson(plans, out) == (None, "lesson 0: executing failed: error: cell [3] failed")


def test_without_a_checkout_the_lesson_is_left_out(
    second: tuple[Path, tuple[int, str, str], dict[str, float]],
    lesson_job: list[run.Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from neuclip_lib.course import source

    def refuse() -> Path:
        raise RuntimeError("no checkout of the course here")

    monkeypatch.setattr(source, "course_root", refuse)
    out = second[0]
    assert run._lesson(run.make_plans(METHODS, "tiny", None, 0, out), out) == (None, None)
    assert capsys.readouterr().err == "lesson 0 is left out: no checkout of the course here\n"
    assert lesson_job == []


@pytest.mark.parametrize(
    ("methods", "preset", "data", "fits"),
    [
        (run.METHODS, "laptop", None, True),
        (run.METHODS[::-1], "laptop", "icons", True),
        (run.METHODS[:2], "laptop", None, False),
        (run.METHODS, "laptop", "digits", False),
        (run.METHODS, "tiny", "icons", False),
    ],
)
def test_lesson_0_is_for_all_methods_of_the_laptop_preset_on_icons(
    tmp_path: Path, methods: tuple[str, ...], preset: str, data: str | None, fits: bool
) -> None:
    assert run._fits_lesson(run.make_plans(methods, preset, data, 0, tmp_path)) is fits
