"""What lies in lessons/ and solutions/ keeps every rule, and the first lesson builds the same twice."""

from pathlib import Path

import pytest

from neuclip_lib.course.build import as_text, executed
from neuclip_lib.course.gates import course_problems
from neuclip_lib.course.source import course_root, read_lesson, sources

ROOT = course_root(Path(__file__))


def test_every_lesson_keeps_every_rule():
    assert course_problems(ROOT) == []


@pytest.mark.slow
@pytest.mark.parametrize("source", sources(ROOT)[:1], ids=lambda source: source.stem)
def test_two_builds_on_one_machine_are_equal_to_the_byte(source):
    lesson = read_lesson(source)
    first, second = (as_text(executed(lesson, "solution")) for _ in range(2))
    assert first == second
