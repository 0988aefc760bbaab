"""Files that are whole or absent: write beside the target, flush, then rename over it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def ensure_writable(folder: Path | str) -> Path:
    """Create ``folder`` and prove that a file can be written there.

    Raises:
        RuntimeError: naming the folder and what to do, when it cannot be created or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RuntimeError(
            f"cannot write in {folder} ({error.strerror or error}); "
            "choose another folder, or set NEUCLIP_HOME to a writable one"
        ) from error
    return folder


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Give a temporary path in the target's folder; rename it onto ``path`` if the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Give a temporary folder beside ``path``; swap it in for ``path`` if the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        if path.exists():
            path.replace(old)
        try:
            temporary.replace(path)
        except OSError:
            if old.exists():
                old.replace(path)  # the only whole copy goes back to its place
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path | str, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically, keys in the order given, refusing NaN and infinity."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read JSON; a number that is not finite, which :func:`write_json` never writes, counts as damage.

    Raises:
        RuntimeError: naming the file, when it is missing or damaged.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except FileNotFoundError as error:
        raise RuntimeError(f"{path} is missing") from error
    except (ValueError, RecursionError, OSError) as error:  # ValueError: no UTF-8, no JSON, or a number that is none
        raise RuntimeError(f"{path} is damaged or cannot be read ({error})") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def sha256_of(path: Path | str) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("r+b") as file:  # Windows flushes only what may be written
        os.fsync(file.fileno())
