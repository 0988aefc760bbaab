"""``results/STUDY``: one small file a part, written as soon as it is measured, so that nothing is measured twice."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from neuclip_lib.course.studies import ABOUT, config_sha256, read_about
from neuclip_lib.files import ensure_writable, read_json, write_json
from neuclip_lib.training.folder import versions

__all__ = ["ABOUT", "Kept", "find_study", "open_study"]

LOCK = ".lock"


@dataclass(frozen=True)
class Kept:
    """The results of a study, finished or not.

    Args:
        folder: ``results/STUDY``.
    """

    folder: Path

    def has(self, part: str) -> bool:
        """Whether this part is measured.

        Raises:
            RuntimeError: when something else has its name.
        """
        file = self._file(part)
        if file.exists() and not file.is_file():
            raise RuntimeError(f"{file} is no file; move it away, figures are kept under this name")
        return file.is_file()

    def read(self, part: str, needed: Sequence[str] = ()) -> dict[str, Any]:
        """What :meth:`write` kept.

        Args:
            needed: names of figures that must be there.

        Raises:
            RuntimeError: when it is missing or damaged.
        """
        found = read_json(self._file(part))
        if not isinstance(found, dict):
            raise self.damaged(part, "it holds no figures by name")
        if lacking := [name for name in needed if name not in found]:
            raise self.damaged(part, f"it lacks {', '.join(lacking)}")
        return found

    def damaged(self, part: str, reason: str) -> RuntimeError:
        """The error to raise for a part that is not what its name says."""
        return RuntimeError(f"{self._file(part)} is damaged: {reason}; remove it, and it is measured again")

    def write(self, part: str, result: Mapping[str, Any]) -> None:
        """Keep a part; whole or not at all."""
        write_json(self._file(part), dict(result))

    def forget(self, part: str) -> None:
        """Let a part be measured again."""
        self._file(part).unlink(missing_ok=True)

    def about(self) -> dict[str, Any]:
        """Command, date, configuration and its hash, versions, machine, seeds."""
        return read_about(self.folder)

    def parts(self) -> list[str]:
        """The names of all parts that are there."""
        return sorted(path.stem for path in self.folder.glob("*.json") if path.name != ABOUT)

    def _file(self, part: str) -> Path:
        return self.folder / f"{part}.json"


def find_study(folder: Path, config: Mapping[str, Any], growing: Sequence[str] = ()) -> Kept | None:
    """The study that is there, without writing anything; None when there is none.

    Args:
        folder: ``results/STUDY``.
        config: as of :func:`open_study`.
        growing: as of :func:`open_study`.

    Raises:
        RuntimeError: when the folder holds a study of another configuration, or parts of an unknown one.
    """
    kept, config = Kept(folder), _as_json(config)
    if not (folder / ABOUT).exists():
        if parts := kept.parts():
            raise RuntimeError(
                f"{folder} holds figures ({', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}) but no {ABOUT} "
                "that says what was measured; bring it back, move the folder away, or give another one with --out"
            )
        return None
    old = kept.about()["config"]
    if old != config and not _has_grown(old, config, growing):
        changed = [key for key in sorted({*old, *config}) if old.get(key) != config.get(key)]
        raise RuntimeError(
            f"{folder} holds a study of another configuration ({', '.join(changed)} differ); move it away, or give "
            "another folder with --out"
        )
    return kept


def open_study(
    folder: Path, command: str, config: Mapping[str, Any], seeds: Sequence[int], growing: Sequence[str] = ()
) -> Kept:
    """Begin a study, or go on with it.

    Args:
        folder: ``results/STUDY``; its parent must be writable.
        command: what measures it, for a reader who wants to do it again.
        config: all that decides the figures, as JSON values.
        seeds: of its parts; a later call may add some.
        growing: fields of the config that are lists of parts with a ``name``, to which a later call may add some.

    Raises:
        RuntimeError: when the folder holds a study of another configuration, or parts of an unknown one.
    """
    find_study(folder, config, growing)  # refuses before it writes
    ensure_writable(folder)
    try:
        with FileLock(folder / LOCK, timeout=60):
            return _opened(folder, command, config, seeds, growing)
    except Timeout:
        raise RuntimeError(f"another process holds {folder / LOCK}; wait for it, or end it") from None


def _opened(
    folder: Path, command: str, config: Mapping[str, Any], seeds: Sequence[int], growing: Sequence[str]
) -> Kept:
    config = _as_json(config)
    wanted = config_sha256(config)
    if (kept := find_study(folder, config, growing)) is not None:
        about = kept.about()
        # In the order in which they came: the first one chooses learning rates.
        seeds = list(dict.fromkeys([*about["seeds"], *seeds]))
        if (about["config_sha256"], about["seeds"]) != (wanted, seeds):
            write_json(folder / ABOUT, {**about, "config": config, "config_sha256": wanted, "seeds": seeds})
        return kept
    write_json(
        folder / ABOUT,
        {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "config": config,
            "config_sha256": wanted,
            "versions": versions(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "seeds": list(seeds),
        },
    )
    return Kept(folder)


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """As it is read back: lists for tuples."""
    return dict(json.loads(json.dumps(config)))


def _has_grown(old: Mapping[str, Any], new: Mapping[str, Any], growing: Sequence[str]) -> bool:
    """Whether all that was there is there as it was, and only parts of growing fields have come."""

    def rest(config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in growing}

    return rest(old) == rest(new) and all(
        part in new[key] and [one["name"] for one in new[key]].count(part["name"]) == 1
        for key in growing
        for part in old[key]
    )
