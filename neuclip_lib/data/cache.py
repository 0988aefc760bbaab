"""Built sets on disk: one folder a set, used only when it is whole and made from what is installed now.

A folder holds ``images.npy`` (uint8 [n, 3, H, W]), ``columns.json`` (captions, groups, keys, fields) and
``manifest.json`` (hashes of both, of the builder's source, and the versions of the packages it came from).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from neuclip_lib import home
from neuclip_lib.data.spec import RawSet, SetSpec
from neuclip_lib.data.splits import part_of
from neuclip_lib.files import write_json

FORMAT = 1
IMAGES, COLUMNS, MANIFEST = "images.npy", "columns.json", "manifest.json"
EXTRA = "neuclip-course[data]"


@dataclass(frozen=True)
class Cached:
    """A whole set as read from disk."""

    images: np.ndarray
    columns: dict[str, Any]
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Status:
    """Whether a built set can be used, and why not; ``cached`` is there when it can."""

    state: Literal["ready", "missing", "stale", "damaged"]
    reason: str = ""
    cached: Cached | None = None


def folder_of(spec: SetSpec) -> Path:
    """Where the built set lives."""
    return home.data_dir() / spec.name


def missing_packages(spec: SetSpec) -> list[str]:
    """The pip distributions that the builder needs and that are not installed."""
    return [package for package in spec.packages if _version(package) is None]


def sources(spec: SetSpec) -> dict[str, str]:
    """What the set would be made from now: package versions, and sources outside pip.

    Raises:
        RuntimeError: naming what is missing and how to get it.
    """
    if missing := missing_packages(spec):
        plural = "s" if len(missing) > 1 else ""
        raise RuntimeError(
            f"data set {spec.name!r} needs the package{plural} {', '.join(missing)}, not installed here; "
            f"run: pip install '{EXTRA}'   (or only: pip install {' '.join(missing)})"
        )
    found = {package: _version(package) or "" for package in spec.packages}
    return found | dict(spec.system() if spec.system is not None else {})


def builder_hash(spec: SetSpec) -> str:
    """SHA-256 of the source that decides what is built: the builder's module and its helpers."""
    assert spec.produce is not None
    files = [inspect.getsourcefile(spec.produce)]
    for module in spec.helpers:
        found = importlib.util.find_spec(module)
        files.append(found.origin if found else None)
    digest = hashlib.sha256()
    for file in files:
        if file is None:
            raise RuntimeError(f"data set {spec.name!r}: the source of its builder or of {spec.helpers} was not found")
        digest.update(Path(file).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def inspect_cache(spec: SetSpec) -> Status:
    """Read the built set and compare every hash and version."""
    folder = folder_of(spec)
    if not folder.is_dir():
        return Status("missing")
    try:
        manifest = _read_manifest(folder / MANIFEST)
        if reason := _stale_reason(spec, manifest):
            return Status("stale", reason)
        # Hash the bytes that are used, not the file: another process may swap the folder in between.
        parts = {name: _read_checked(folder / name, digest) for name, digest in manifest["files"].items()}
        images = np.load(io.BytesIO(parts[IMAGES]), allow_pickle=False)
        return Status("ready", cached=Cached(images, json.loads(parts[COLUMNS]), manifest))
    except (OSError, ValueError, KeyError) as error:
        return Status("damaged", _reason(error))


def write_cache(folder: Path, spec: SetSpec, raw: RawSet, made_from: Mapping[str, str]) -> dict[str, Any]:
    """Write a set into an empty folder and return its manifest."""
    columns = {name: getattr(raw, name) for name in ("captions", "group", "split_key", "key")} | {"fields": raw.fields}
    texts = json.dumps(columns, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(raw.images), allow_pickle=False)
    contents = {IMAGES: buffer.getvalue(), COLUMNS: texts}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    files = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    counts = Counter(part_of(key) for key in raw.split_key)
    manifest = {
        "format": FORMAT,
        "name": spec.name,
        "content_hash": hashlib.sha256("".join(files.values()).encode()).hexdigest(),
        "counts": {part: counts[part] for part in ("train", "validation", "test")},
        "made_from": dict(made_from),
        "builder": builder_hash(spec),
        "files": files,
    }
    write_json(folder / MANIFEST, manifest | {"seal": _seal(manifest)})
    return manifest


def _stale_reason(spec: SetSpec, manifest: dict[str, Any]) -> str:
    """Why a whole cache must not be used. A package that is gone has not changed: the cache stays good without it."""
    if manifest["format"] != FORMAT:
        return f"written in format {manifest['format']}, now {FORMAT}"
    if manifest["builder"] != builder_hash(spec):
        return "its builder has changed"
    try:
        now = sources(spec)
    except RuntimeError:
        now = {package: version for package in spec.packages if (version := _version(package)) is not None}
    before = manifest["made_from"]
    changed = [f"{what} {before.get(what, 'absent')} -> {version}" for what, version in now.items()]
    return ", ".join(text for text, what in zip(changed, now, strict=True) if before.get(what) != now[what])


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.pop("seal", None) != _seal(manifest):
        raise ValueError(f"{path.name} is not as it was written")
    return manifest


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_checked(path: Path, digest: str) -> bytes:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{path.name} ({len(data)} bytes) is not as it was written")
    return data


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return f"{MANIFEST} has no {error}" if isinstance(error, KeyError) else str(error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
