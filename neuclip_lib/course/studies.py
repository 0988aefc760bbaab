"""results: what a long command measured and stored in results/STUDY, read back with where it comes from."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip_lib.course.source import course_root
from neuclip_lib.files import read_json

ABOUT = "study.json"
REQUIRED = ("command", "date", "config", "config_sha256", "versions", "machine", "seeds")


@dataclass(frozen=True)
class Study:
    """A stored study: ``study.json`` and its runs.

    Args:
        about: command, date (YYYY-MM-DD), config and its hash, versions, machine, seeds.
        runs: one mapping a run, in order of file name.
    """

    name: str
    about: Mapping[str, Any]
    runs: tuple[Mapping[str, Any], ...]

    def values(self, key: str, **where: Any) -> list[Any]:
        """One entry a run, by dotted path, of the runs whose top-level entries equal ``where``.

        For instance ``values("retrieval.image_to_text.r@1", method="neuclip")``.

        Raises:
            ValueError: when no run fits, or one lacks the entry.
        """
        fitting = [run for run in self.runs if all(run.get(name) == value for name, value in where.items())]
        if not fitting:
            raise ValueError(f"study {self.name} has no run with {where}; its {len(self.runs)} runs have other values")
        return [_entry(self.name, run, key) for run in fitting]

    def spread(self, key: str, **where: Any) -> tuple[float, float, float]:
        """Lowest, mean and highest of ``values``."""
        numbers = self.values(key, **where)
        return min(numbers), statistics.fmean(numbers), max(numbers)


def results(study: str, root: Path | None = None) -> Study:
    """Load ``results/STUDY`` and print its date and command.

    Args:
        root: the checkout; by default the one found from the current folder or from this package.

    Raises:
        ValueError: for a study that is not there, listing those that are.
        RuntimeError: for one that is damaged, incomplete, or whose configuration was changed by hand.
    """
    folder = (root or course_root()) / "results"
    if not (folder / study / ABOUT).is_file():
        known = sorted(path.parent.name for path in folder.glob(f"*/{ABOUT}"))
        raise ValueError(
            f"there is no study {study!r} in results/; there are {', '.join(known) or 'none'}. "
            "Studies are written by their own command, never inside a lesson"
        )
    about = read_about(folder / study)
    files = sorted(path for path in (folder / study).glob("*.json") if path.name != ABOUT)
    if not files:
        raise RuntimeError(f"results/{study} holds no run; run its command again: {about['command']}")
    print(f"Study {study}, measured on {about['date']} by: {about['command']}")
    return Study(study, about, tuple(read_json(file) for file in files))


def read_about(folder: Path) -> dict[str, Any]:
    """``study.json`` of a study's folder.

    Raises:
        RuntimeError: when it is missing, damaged, incomplete, or its configuration was changed by hand.
    """
    file = folder / ABOUT
    about = read_json(file)
    if not isinstance(about, dict):
        raise RuntimeError(f"{file} is damaged: it holds no entries by name")
    if lacking := [key for key in REQUIRED if key not in about]:
        raise RuntimeError(f"{file} lacks {', '.join(lacking)}; run the study's command again")
    if about["config_sha256"] != config_sha256(about["config"]):
        raise RuntimeError(f"{file}: the configuration is not the one it was measured with")
    return about


def config_sha256(config: Any) -> str:
    """SHA-256 of a configuration as compact JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _entry(name: str, run: Mapping[str, Any], key: str) -> Any:
    value: Any = run
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"a run of study {name} has no entry {key!r} (no {part!r}); it has {', '.join(run)}")
        value = value[part]
    return value
