"""The figures of ``run``: kept as small JSON files under ``results``, and README.md's first table made from them."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip_lib.cli._table import Result, as_markdown, notes_of
from neuclip_lib.course.studies import config_sha256
from neuclip_lib.files import atomic_folder, read_json, write_json

STUDY = "laptop"


def record(root: Path, study: str, command: str, results: Sequence[Result]) -> Path:
    """Write ``results/STUDY``: ``study.json`` and one file a run; return the folder.

    Args:
        root: the checkout.
        command: what measured it, for the reader who wants to do it again.
    """
    folder = root / "results" / study
    config = {result["method"]: result["config"] for result in results}
    about: dict[str, Any] = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "config": config,
        "config_sha256": config_sha256(config),
        "versions": results[0]["versions"],
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seeds": sorted({result["seed"] for result in results}),
        "methods": list(config),
    }
    with atomic_folder(folder) as temporary:
        write_json(temporary / "study.json", about)
        for result in results:
            write_json(temporary / f"{result['method']}.json", result)
    return folder


def laptop_section(root: Path) -> str:
    """The laptop preset's table for README.md, made from ``results/laptop``.

    Raises:
        RuntimeError: when the study is missing or damaged.
    """
    folder = root / "results" / STUDY
    about = read_json(folder / "study.json")
    results = [read_json(folder / f"{method}.json") for method in about["methods"]]
    versions = about["versions"]
    told = (
        f"Measured on {about['date']} by `{about['command']}` ({about['machine']}, Python {versions['python']}, "
        f"torch {versions['torch']})."
    )
    return "\n\n".join([as_markdown(results), told, *notes_of(results)])
