"""A course of one tiny lesson, built once a process; tests that spoil it take a copy."""

import shutil
from pathlib import Path

import pytest

from neuclip_lib.course.build import build

TINY = Path(__file__).parent / "fixtures" / "90_tiny.py"


@pytest.fixture
def make_course(tmp_path):
    """Make a checkout with the tiny lesson, some of its text replaced; give the path of its source."""

    def make(*replacements, name="90_tiny.py"):
        text = TINY.read_text(encoding="utf-8")
        for old, new in replacements:
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        return _checkout(tmp_path / "course", name, text)

    return make


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Source of the tiny lesson, built; not to be changed."""
    source = _checkout(tmp_path_factory.mktemp("built") / "course", TINY.name, TINY.read_text(encoding="utf-8"))
    build(source)
    return source


@pytest.fixture
def copy_of_built(built, tmp_path):
    """A copy of the built course that a test may spoil; give the path of its source."""
    root = tmp_path / "copy"
    shutil.copytree(built.parent.parent, root)
    return root / "solutions" / built.name


def _checkout(root, name, text):
    for folder in ("solutions", "lessons", "neuclip_lib/course"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").touch()
    (root / "solutions" / name).write_text(text, encoding="utf-8")
    return root / "solutions" / name
