"""Build a set once, whole, and only by one process at a time."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from pathlib import Path

from filelock import FileLock

from neuclip_lib.data.cache import Cached, Status, folder_of, inspect_cache, sources, write_cache
from neuclip_lib.data.spec import SetSpec
from neuclip_lib.files import atomic_folder, ensure_writable


def build_set(spec: SetSpec, force: bool = False, quiet: bool = False) -> Path:
    """Make sure that a set is built, whole and up to date; return its folder.

    Args:
        force: build again even if it is.
        quiet: print nothing.

    Raises:
        ValueError: for a set that is never stored.
        RuntimeError: when a package or other source is missing, a picture fails, or the folder cannot be written.
    """
    ready(spec, force=force, quiet=quiet)
    return folder_of(spec)


def ready(spec: SetSpec, force: bool = False, quiet: bool = False) -> Cached:
    """The whole set from disk, built first when it is missing, stale or damaged (a line on standard error says so)."""
    if spec.produce is None:
        raise ValueError(f"data set {spec.name!r} is made on the fly and never stored; load it without building")
    if not force and (cached := inspect_cache(spec).cached):
        return cached
    folder = folder_of(spec)
    ensure_writable(folder.parent)
    with FileLock(folder.parent / f".{spec.name}.lock"):
        status = inspect_cache(spec)
        if status.cached and not force:  # another process built it while this one waited
            return status.cached
        made_from = _sources(spec, status)
        if not quiet:
            print(_line(spec, status, folder), file=sys.stderr, flush=True)
        _remove_leftovers(folder)
        _produce(spec, folder, made_from, quiet)
        built = inspect_cache(spec)
    if built.cached is None:
        raise RuntimeError(f"data set {spec.name!r} was just built in {folder} and is {built.state}: {built.reason}")
    return built.cached


def _produce(spec: SetSpec, folder: Path, made_from: dict[str, str], quiet: bool) -> None:
    assert spec.produce is not None
    silence = contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext()
    with silence:
        raw = spec.produce()
    with atomic_folder(folder) as temporary:
        write_cache(temporary, spec, raw, made_from)


def _sources(spec: SetSpec, status: Status) -> dict[str, str]:
    try:
        return sources(spec)
    except RuntimeError as error:
        if status.state in ("stale", "damaged"):
            found = f"the built set in {folder_of(spec)} is {status.state} ({status.reason})"
            raise RuntimeError(f"{found} and cannot be built again: {error}") from error
        raise


def _line(spec: SetSpec, status: Status, folder: Path) -> str:
    if status.state == "missing":
        return f"{spec.name}: building once into {folder}"
    why = "asked for" if status.state == "ready" else f"{status.state}: {status.reason}"
    return f"{spec.name}: building again into {folder} ({why})"


def _remove_leftovers(folder: Path) -> None:
    """Folders that a killed build left behind. Whoever holds the lock is the only one building."""
    for pattern in (f".{folder.name}.*.tmp", f".{folder.name}.*.old"):
        for left in folder.parent.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)
