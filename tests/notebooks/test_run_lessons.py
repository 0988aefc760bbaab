"""Every lesson in batch from another folder: one parameter's effect proved, wrong ones refused, in time."""

from pathlib import Path

import pytest

from neuclip_lib.course.declared import trial_of_the_day
from neuclip_lib.course.first_cells import first_cells_problems
from neuclip_lib.course.proof import prove_parameter
from neuclip_lib.course.source import course_root, read_lesson, sources

pytestmark = pytest.mark.slow
LESSONS = sources(course_root(Path(__file__)))
# 45 s of processor time alone; beside another worker on sibling threads the same work was seen to take a third more.
SECONDS_AT_QUICK = 60


@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.stem)
def test_parameter_has_its_effect(source, tmp_path, monkeypatch, record_property):
    lesson = read_lesson(source)
    changed = trial_of_the_day(lesson)
    monkeypatch.chdir(tmp_path)
    run, problems = prove_parameter(lesson, changed.name, tmp_path / "out")
    record_property("lesson", f"{lesson.name} with {changed.name}={changed.trial.value!r}")
    record_property("seconds", run.report.seconds)
    record_property("cpu_seconds", run.report.cpu_seconds)
    assert problems == []
    assert run.report.results
    # Processor time where the system counts it: the wall clock is shared with other tests.
    assert (run.report.cpu_seconds or run.report.seconds) <= SECONDS_AT_QUICK


@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.stem)
def test_wrong_parameters_are_refused(source):
    assert first_cells_problems(read_lesson(source)) == []
