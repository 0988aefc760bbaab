"""Files are whole or absent, whatever happens while they are written."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from neuclip_lib import files

pytestmark = pytest.mark.quick


def everything_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_file_appears_only_when_the_block_has_succeeded(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.bin"
    with files.atomic_path(target) as temporary:
        temporary.write_bytes(b"half")
        assert not target.exists()
        assert temporary.parent == target.parent, "a rename is atomic only inside one file system"
    assert target.read_bytes() == b"half"
    assert everything_in(tmp_path) == ["new", "new/file.bin"]


def test_a_failed_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), files.atomic_path(target) as temporary:
        temporary.write_text("half of the n")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert everything_in(tmp_path) == ["file.txt"]


def test_the_data_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tmp_path / "file.txt", []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(target.exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_text(target, "text")
    assert seen == [False]
    with files.atomic_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("1")
        (folder / "b").write_text("2")
    assert len(seen) == 3


def test_a_folder_is_swapped_whole(tmp_path: Path) -> None:
    target = tmp_path / "set"
    for name in ("first", "second"):
        with files.atomic_folder(target) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / name).write_text(name)
            assert not (target / "deep" / name).exists()
        assert everything_in(tmp_path) == ["set", "set/deep", f"set/deep/{name}"]


def test_a_failed_block_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "set"
    with files.atomic_folder(target) as folder:
        (folder / "good").write_text("good")
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(target) as folder:
        (folder / "bad").write_text("bad")
        raise KeyboardInterrupt
    assert everything_in(tmp_path) == ["set", "set/good"]


def test_a_leftover_of_a_killed_process_is_not_taken_over(tmp_path: Path) -> None:
    leftover = tmp_path / f".set.{os.getpid()}.tmp"
    leftover.mkdir()
    (leftover / "stale").write_text("stale")
    with files.atomic_folder(tmp_path / "set") as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["new"]


def test_json_goes_there_and_back_in_the_order_given(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": "Zürich – 東京"}
    files.write_json(tmp_path / "value.json", value)
    assert files.read_json(tmp_path / "value.json") == value
    assert list(files.read_json(tmp_path / "value.json")) == ["b", "a"]
    assert (tmp_path / "value.json").read_text(encoding="utf-8").endswith("}\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_know_are_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "value.json", {"x": value})
    assert everything_in(tmp_path) == []


def test_reading_json_names_the_file(tmp_path: Path) -> None:
    missing, cut, binary = tmp_path / "missing.json", tmp_path / "cut.json", tmp_path / "binary.json"
    cut.write_text(json.dumps({"a": [1, 2]})[:-3])
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RuntimeError, match=r"missing\.json is missing"):
        files.read_json(missing)
    for damaged in (cut, binary):
        with pytest.raises(RuntimeError, match=rf"{damaged.name} is damaged"):
            files.read_json(damaged)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_the_hash_is_that_of_all_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    assert files.sha256_of(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_a_writable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = files.ensure_writable(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    assert everything_in(folder) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write in .*file.*NEUCLIP_HOME"):
        files.ensure_writable(tmp_path / "file")
    with pytest.raises(RuntimeError, match=r"cannot write in .*below.*NEUCLIP_HOME"):
        files.ensure_writable(tmp_path / "file" / "below")

    # root may write anywhere, so the refusal itself is played
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    with pytest.raises(RuntimeError, match="Permission denied"):
        files.ensure_writable(tmp_path)


def test_when_the_second_rename_fails_the_old_folder_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "set"
    with files.atomic_folder(target) as folder:
        (folder / "a").write_text("old")
    rename = Path.replace

    def fail(self: Path, to: Path) -> Path:
        if self.name.endswith(".tmp") and Path(to) == target:
            raise OSError("no such luck")
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no such luck"), files.atomic_folder(target) as folder:
        (folder / "a").write_text("new")
    assert (target / "a").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]
