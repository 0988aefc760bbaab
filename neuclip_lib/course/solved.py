"""Which exercises the reader has solved: kept in memory, and in a file when a person watches or asks for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from neuclip_lib.course.replay import is_replaying
from neuclip_lib.course.watched import is_watched
from neuclip_lib.files import read_json, write_json
from neuclip_lib.home import runs_dir

_memory: dict[str, dict[str, Any]] = {}


def state_file() -> Path | None:
    """The reader's state file: ``$NEUCLIP_PROGRESS_FILE``, else beside the runs when a person watches, else none."""
    if given := os.environ.get("NEUCLIP_PROGRESS_FILE"):
        return Path(given).expanduser()
    return runs_dir() / "exercises.json" if is_watched() else None


def solved() -> dict[str, dict[str, Any]]:
    """By exercise: ``state`` of the last check, ``passed`` ever, ``wrong`` the named mistake last made or empty.

    Raises:
        RuntimeError: when the state file is damaged.
    """
    file = state_file()
    return (read_json(file) if file and file.exists() else {}) | _memory


def remember(name: str, state: str, wrong: str) -> str:
    """Keep the outcome of one check; says in one line why it could not, if it could not."""
    if is_replaying():  # solved cells that start_at runs are not the reader's work
        return ""
    try:
        before = solved()
        entry = {
            "state": state,
            "passed": state == "passed" or bool(before.get(name, {}).get("passed")),
            "wrong": wrong,
        }
        _memory[name] = entry
        if file := state_file():
            write_json(file, before | {name: entry})
    except (OSError, RuntimeError) as error:
        return f"(not recorded: {error})"
    return ""
