"""Every lesson, its exercises undone, under strict nbval; a file of its own, so that it runs beside the solved ones."""

from pathlib import Path

import pytest

from neuclip_lib.course.source import course_root, read_lesson, sources
from neuclip_lib.course.strict import strict_problems

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("source", sources(course_root(Path(__file__))), ids=lambda source: source.stem)
def test_lesson_agrees_strictly(source):
    assert strict_problems(read_lesson(source).notebook("lesson")) == []
