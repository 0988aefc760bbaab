"""The reader's own copies of the lessons: renewed while untouched, never overwritten once changed."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

from neuclip_lib.files import atomic_path, ensure_writable, read_json, write_json

_REGISTER = ".copied.json"


def copy_lessons(root: Path, folder: Path | str) -> list[str]:
    """Copy every lesson to ``folder`` and say, one line each, what was done.

    A file that the reader changed stays as it is; a newer lesson then lies beside it as ``NN_name.new.ipynb``.

    Raises:
        ValueError: when ``folder`` is the course's own lessons folder.
        RuntimeError: when it cannot be written.
    """
    folder = Path(folder).resolve()
    if folder in ((root / "lessons").resolve(), (root / "solutions").resolve()):
        raise ValueError(f"{folder.name}/ is generated; choose another folder for your own copy")
    ensure_writable(folder)
    register = folder / _REGISTER
    copied: dict[str, str] = read_json(register) if register.exists() else {}
    lines = []
    for lesson in sorted((root / "lessons").glob("*.ipynb")):
        new, old = _hash(lesson), copied.get(lesson.name)
        if new == old and (folder / lesson.name).exists():
            continue
        target = next(path for path in _names(folder, lesson.stem) if not path.exists() or _hash(path) in (old, new))
        if target.name == lesson.name:
            lines.append(f"{lesson.name}: {'renewed' if target.exists() else 'copied'}")
        else:
            lines.append(f"{lesson.name}: yours is kept as it is; the new version is {target.name}")
        with atomic_path(target) as temporary:
            shutil.copyfile(lesson, temporary)
        copied[lesson.name] = new
    write_json(register, copied)
    return lines


def _names(folder: Path, stem: str) -> Iterator[Path]:
    yield folder / f"{stem}.ipynb"
    yield folder / f"{stem}.new.ipynb"
    yield from (folder / f"{stem}.new{number}.ipynb" for number in itertools.count(2))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
