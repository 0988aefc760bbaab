"""Everything, once: ``python tests/full.py`` runs every test file with the slow tests, and every lesson in full.

It takes hours, so each check is done once and kept in ``results/test-full.json``: started again, it goes on with the
checks that are missing, have failed, or whose library, test or lesson has changed. ``--check`` runs nothing and fails
when a lesson has changed since it last passed in full.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip_lib.course.report import versions
from neuclip_lib.course.source import read_lesson, sources
from neuclip_lib.files import read_json, write_json
from neuclip_lib.home import runs_dir

ROOT = Path(__file__).resolve().parent.parent
LESSON = "lesson "


@dataclass(frozen=True)
class Check:
    """One thing to run.

    Args:
        name: in the record.
        source: the SHA-256 of the test file or lesson.
        command: what runs it, from the root of the checkout.
    """

    name: str
    source: str
    command: tuple[str, ...]


def all_checks(root: Path = ROOT) -> list[Check]:
    """Every test file, then every lesson."""
    checks = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        command = (sys.executable, "-m", "pytest", "-m", "slow or not slow", name)
        checks.append(Check(name, hashlib.sha256(path.read_bytes()).hexdigest(), command))
    for path in sources(root):
        lesson = read_lesson(path)
        command = (sys.executable, "-m", "neuclip_lib", "lessons", "test", "--every", lesson.name)
        checks.append(Check(f"{LESSON}{lesson.name}", lesson.sha256, command))
    return checks


def library_sha256(root: Path = ROOT) -> str:
    """One hash of all that the library and its pins are."""
    digest = hashlib.sha256()
    for path in [*sorted((root / "neuclip_lib").rglob("*.py")), root / "requirements.txt"]:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def is_current(entry: dict[str, Any] | None, check: Check, library: str) -> bool:
    """Whether the check has passed with this very library and source."""
    return bool(entry and entry["passed"] and entry["source_sha256"] == check.source and entry["library"] == library)


def run(checks: Sequence[Check], record: Path, logs: Path, library: str, root: Path = ROOT) -> list[str]:
    """Run what is not current, keep each outcome at once; the names of those that fail."""
    kept: dict[str, Any] = read_json(record)["checks"] if record.exists() else {}
    todo = [check for check in checks if not is_current(kept.get(check.name), check, library)]
    print(f"{len(checks)} checks, {len(checks) - len(todo)} done already", flush=True)
    failed, begun = [], time.monotonic()
    for number, check in enumerate(todo):
        took = time.monotonic() - begun
        left = f", about {took / number * (len(todo) - number) / 60:.0f} min left" if number else ""
        print(f"[{number + 1}/{len(todo)}] {check.name}{left}", flush=True)
        entry = perform(check, logs / f"{check.name.replace('/', '-')}.log", root)
        kept[check.name] = entry | {"source_sha256": check.source, "library": library}
        write_json(record, {"versions": versions(), "checks": dict(sorted(kept.items()))})
        if not entry["passed"]:
            failed.append(check.name)
            print(f"  failed: {logs / check.name.replace('/', '-')}.log", flush=True)
    return failed


def perform(check: Check, log: Path, root: Path) -> dict[str, Any]:
    """Run one check; its outcome, without its hashes. No test collected (exit code 5) is no failure of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    environment = os.environ | {"NEUCLIP_FULL": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as file:
        done = subprocess.run(
            check.command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return {
        "passed": done.returncode in (0, 5),
        "last_line": next((line for line in reversed(lines) if line.strip()), ""),
        "seconds": round(time.monotonic() - begun, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def stale_lessons(checks: Sequence[Check], record: Path) -> list[str]:
    """Lessons that have not passed in full as they stand now."""
    kept = read_json(record)["checks"] if record.exists() else {}
    lessons = [check for check in checks if check.name.startswith(LESSON)]
    entries = {check.name: kept.get(check.name) for check in lessons}
    return [
        check.name
        for check in lessons
        if not (entry := entries[check.name]) or not entry["passed"] or entry["source_sha256"] != check.source
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, list or check; 1 when something fails or is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", help="only checks with this text in their name")
    parser.add_argument("--list", action="store_true", help="list the checks and which are done")
    parser.add_argument("--check", action="store_true", help="run nothing; fail when a lesson's entry is out of date")
    chosen = parser.parse_args(arguments)
    record = ROOT / "results" / "test-full.json"
    checks = all_checks()
    if chosen.check:
        stale = stale_lessons(checks, record)
        for name in stale:
            print(f"{name} has changed since it last passed in full; run: make test-full ARGS='--only {name[7:]}'")
        return 1 if stale else 0
    checks = [check for check in checks if not chosen.only or chosen.only in check.name]
    if not checks:
        print(f"no check has {chosen.only!r} in its name", file=sys.stderr)
        return 2
    library = library_sha256()
    if chosen.list:
        kept = read_json(record)["checks"] if record.exists() else {}
        for check in checks:
            print(f"{'done' if is_current(kept.get(check.name), check, library) else 'to do'}  {check.name}")
        return 0
    failed = run(checks, record, runs_dir() / "test-full", library)
    print(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
