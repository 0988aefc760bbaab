"""``results/STUDY``: one small file a part, written as soon as it is measured, so that nothing is measured twice."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip_lib.course.studies import config_sha256
from neuclip_lib.files import ensure_writable, read_json, write_json
from neuclip_lib.training.folder import versions

ABOUT = "study.json"


@dataclass(frozen=True)
class Kept:
    """The results of a study, finished or not.

    Args:
        folder: ``results/STUDY``.
    """

    folder: Path

    def has(self, part: str) -> bool:
        """Whether this part is measured."""
        return self._file(part).is_file()

    def read(self, part: str) -> Any:
        """What :meth:`write` kept.

        Raises:
            RuntimeError: when it is missing or damaged.
        """
        return read_json(self._file(part))

    def write(self, part: str, result: Mapping[str, Any]) -> None:
        """Keep a part; whole or not at all."""
        write_json(self._file(part), dict(result))

    def forget(self, part: str) -> None:
        """Let a part be measured again."""
        self._file(part).unlink(missing_ok=True)

    def about(self) -> dict[str, Any]:
        """Command, date, configuration and its hash, versions, machine, seeds."""
        return dict(read_json(self.folder / ABOUT))

    def _file(self, part: str) -> Path:
        return self.folder / f"{part}.json"


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
        RuntimeError: when the folder holds a study of another configuration.
    """
    kept = Kept(folder)
    wanted = config_sha256(config)
    if (folder / ABOUT).is_file():
        about = kept.about()
        if about["config_sha256"] != wanted and not _has_grown(about["config"], config, growing):
            raise RuntimeError(
                f"{folder} holds a study of another configuration; move it away, or give another folder with --out"
            )
        seeds = sorted({*seeds, *about["seeds"]})
        if (about["config_sha256"], about["seeds"]) != (wanted, seeds):
            write_json(folder / ABOUT, {**about, "config": config, "config_sha256": wanted, "seeds": seeds})
        return kept
    write_json(
        ensure_writable(folder) / ABOUT,
        {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "config": config,
            "config_sha256": wanted,
            "versions": versions(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "seeds": sorted(seeds),
        },
    )
    return kept


def _has_grown(old: Mapping[str, Any], new: Mapping[str, Any], growing: Sequence[str]) -> bool:
    """Whether all that was there is there as it was, and only parts of growing fields have come."""

    def rest(config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in growing}

    return rest(old) == rest(new) and all(
        part in new[key] and [one["name"] for one in new[key]].count(part["name"]) == 1
        for key in growing
        for part in old[key]
    )
