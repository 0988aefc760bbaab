"""The reader's own copies of the lessons: renewed while untouched, never overwritten once changed."""

from __future__ import annotations

import hashlib
import shutil
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
        new, target = _hash(lesson), folder / lesson.name
        if copied.get(lesson.name) == new and target.exists():
            continue
        if not target.exists() or _hash(target) in (copied.get(lesson.name), new):
            lines.append(f"{lesson.name}: {'renewed' if target.exists() else 'copied'}")
        else:
            target = folder / f"{lesson.stem}.new.ipynb"
            lines.append(f"{lesson.name}: yours is kept as it is; the new version is {target.name}")
        with atomic_path(target) as temporary:
            shutil.copyfile(lesson, temporary)
        copied[lesson.name] = new
    write_json(register, copied)
    return lines


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
