"""Where data and runs live."""

import sys
from pathlib import Path

import pytest

from neuclip_lib import home

pytestmark = pytest.mark.quick


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that is no checkout, and a user's home of its own."""
    for name in ("NEUCLIP_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "user")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def make_checkout(folder: Path) -> Path:
    (folder / "neuclip_lib").mkdir(parents=True)
    (folder / "neuclip_lib" / "contrast.py").write_text("")
    (folder / "pyproject.toml").write_text("")
    return folder


def test_the_variable_comes_first(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_checkout(elsewhere / "checkout"))
    monkeypatch.setenv("NEUCLIP_HOME", str(elsewhere / "chosen"))
    assert home.data_dir() == elsewhere / "chosen" / "datasets" / "built"
    assert home.runs_dir() == elsewhere / "chosen" / "runs"


def test_the_variable_may_be_relative_or_start_with_a_tilde(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEUCLIP_HOME", "somewhere")
    assert home.runs_dir() == elsewhere / "here" / "somewhere" / "runs"
    monkeypatch.setenv("HOME", str(elsewhere / "user"))
    monkeypatch.setenv("USERPROFILE", str(elsewhere / "user"))
    monkeypatch.setenv("NEUCLIP_HOME", "~/neuclip")
    assert home.runs_dir() == elsewhere / "user" / "neuclip" / "runs"


def test_an_empty_variable_counts_as_unset(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEUCLIP_HOME", "")
    assert elsewhere / "user" in home.runs_dir().parents


def test_the_checkout_one_stands_in_comes_second(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_checkout(elsewhere / "checkout")
    for place in (checkout, checkout / "lessons", checkout / "my_lessons" / "deeper"):
        place.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(place)
        assert home.data_dir() == checkout / "datasets" / "built"
        assert home.runs_dir() == checkout / "runs"


def test_a_checkout_that_cannot_be_written_is_left_alone(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_checkout(elsewhere / "checkout"))
    monkeypatch.setattr(home.os, "access", lambda *_: False)
    assert elsewhere / "user" in home.data_dir().parents


def test_another_project_with_a_pyproject_is_no_checkout(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_checkout(elsewhere / "checkout")
    (checkout / "neuclip_lib" / "contrast.py").unlink()
    monkeypatch.chdir(checkout)
    assert elsewhere / "user" in home.runs_dir().parents


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", Path("user/.cache/neuclip")),
        ("darwin", Path("user/Library/Caches/neuclip")),
        ("win32", Path("user/AppData/Local/neuclip")),
    ],
)
def test_the_cache_of_each_system(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, platform: str, expected: Path
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert home.runs_dir() == elsewhere / expected / "runs"
    assert home.data_dir() == elsewhere / expected / "datasets" / "built"


def test_the_caches_own_variable_is_obeyed(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    assert home.runs_dir() == elsewhere / "cache" / "neuclip" / "runs"


def test_nothing_is_created_by_asking(elsewhere: Path) -> None:
    home.data_dir()
    home.runs_dir()
    assert [path.name for path in elsewhere.iterdir()] == ["here"]
