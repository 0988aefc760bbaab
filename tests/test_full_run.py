"""The long run of everything: resumable, honest about failures, and it knows what has changed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def full() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("neuclip_full_run", HERE / "full.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def script(full: ModuleType, tmp_path: Path, name: str, source: str, code: str) -> object:
    text = f"open({str(tmp_path / 'done')!r}, 'a').write({name!r} + ' ')\n{code}"
    return full.Check(name, source, (sys.executable, "-c", text))


def done(tmp_path: Path) -> list[str]:
    file = tmp_path / "done"
    text = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    return text.split()


def test_it_goes_on_where_it_stopped_and_repeats_what_failed_or_changed(full: ModuleType, tmp_path: Path) -> None:
    record, logs = tmp_path / "results" / "test-full.json", tmp_path / "logs"
    good = script(full, tmp_path, "good", "1", "print('3 passed')")
    bad = script(full, tmp_path, "bad", "1", "raise SystemExit(1)")
    none = script(full, tmp_path, "none", "1", "raise SystemExit(5)")
    assert full.run([good, bad, none], record, logs, "library", tmp_path) == ["bad"]
    assert done(tmp_path) == ["good", "bad", "none"]
    entries = json.loads(record.read_text())["checks"]
    assert [entries[name]["passed"] for name in ("good", "bad", "none")] == [True, False, True]
    assert entries["good"]["last_line"] == "3 passed" and (logs / "good.log").read_text() == "3 passed\n"

    assert full.run([good, bad, none], record, logs, "library", tmp_path) == ["bad"]
    assert done(tmp_path) == ["bad"]
    changed = script(full, tmp_path, "good", "2", "")
    assert full.run([changed, none], record, logs, "library", tmp_path) == []
    assert done(tmp_path) == ["good"]
    assert full.run([changed, none], record, logs, "another library", tmp_path) == []
    assert done(tmp_path) == ["good", "none"]


def test_each_outcome_is_kept_before_the_next_check_starts(full: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "test-full.json"
    first = script(full, tmp_path, "first", "1", "")
    look = f"import json; assert 'first' in json.load(open({str(record)!r}))['checks']"
    assert full.run([first, script(full, tmp_path, "second", "1", look)], record, tmp_path, "l", tmp_path) == []


def test_children_see_that_it_is_the_full_run(full: ModuleType, tmp_path: Path) -> None:
    look = "import os; assert os.environ['NEUCLIP_FULL'] == '1' == os.environ['OMP_NUM_THREADS']"
    check = script(full, tmp_path, "one", "1", look)
    assert full.run([check], tmp_path / "r.json", tmp_path, "l", tmp_path) == []


def test_a_lesson_that_changed_failed_or_never_ran_is_stale(full: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "test-full.json"
    lessons = [full.Check(f"lesson {name}", "now", ()) for name in ("a", "b", "c", "d")]
    tests = [full.Check("tests/test_x.py", "now", ())]
    assert full.stale_lessons(lessons + tests, record) == [check.name for check in lessons]
    entries = {
        "lesson a": {"passed": True, "source_sha256": "now"},
        "lesson b": {"passed": True, "source_sha256": "before"},
        "lesson c": {"passed": False, "source_sha256": "now"},
    }
    record.write_text(json.dumps({"checks": entries}))
    assert full.stale_lessons(lessons + tests, record) == ["lesson b", "lesson c", "lesson d"]


def test_every_test_file_and_every_lesson_is_a_check(full: ModuleType) -> None:
    names = {check.name for check in full.all_checks()}
    assert {path.relative_to(HERE.parent).as_posix() for path in HERE.rglob("test_*.py")} <= names
    for path in (HERE.parent / "solutions").glob("[0-9]*.py"):
        assert f"lesson {path.stem}" in names


def test_the_library_hash_sees_a_change_anywhere(full: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "neuclip_lib" / "deep").mkdir(parents=True)
    (tmp_path / "requirements.txt").write_text("a==1\n")
    file = tmp_path / "neuclip_lib" / "deep" / "x.py"
    hashes = set()
    for text in ("x = 1\n", "x = 2\n"):
        file.write_text(text)
        hashes.add(full.library_sha256(tmp_path))
    file.rename(file.with_name("y.py"))
    hashes.add(full.library_sha256(tmp_path))
    (tmp_path / "requirements.txt").write_text("a==2\n")
    hashes.add(full.library_sha256(tmp_path))
    assert len(hashes) == 4
