"""``python -m neuclip_lib readme``: the parts of README.md that are made from the figures in ``results``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from neuclip_lib.cli._study import laptop_section
from neuclip_lib.course.source import course_root
from neuclip_lib.files import read_json, write_text
from neuclip_lib.studies import tables
from neuclip_lib.studies.keep import ABOUT, Kept
from neuclip_lib.studies.known import get_grid

MAP = "map"


def main(arguments: list[str]) -> int:
    """Make the sections anew, or with ``--check`` only compare them.

    Raises:
        RuntimeError: when figures are missing, the page lacks its marks, or with ``--check`` differs.
    """
    parser = argparse.ArgumentParser(prog="python -m neuclip_lib readme", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when README.md is not up to date")
    chosen = parser.parse_args(arguments)
    root = course_root()
    if not chosen.check:
        write(root)
    elif not is_current(root):
        raise RuntimeError("README.md is not what results/ gives; run: python -m neuclip_lib readme")
    return 0


def write(root: Path) -> None:
    """Make all sections of README.md anew."""
    page = root / "README.md"
    write_text(page, filled(page.read_text(encoding="utf-8"), root))


def is_current(root: Path) -> bool:
    """Whether every section of README.md is what the stored figures give."""
    page = (root / "README.md").read_text(encoding="utf-8")
    return page == filled(page, root)


def filled(page: str, root: Path) -> str:
    """The page with every section between its marks.

    Raises:
        RuntimeError: when the page lacks marks, or figures are missing.
    """
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise RuntimeError(f"README.md has no {begin} ... {end}; put both marks back")
        page = f"{before}{begin}\n{section(root)}\n{end}{after}"
    return page


def first_table(root: Path) -> str:
    """The laptop preset's table, and what the map says of its ranking."""
    text = laptop_section(root)
    if is_measured(root):
        found = _map(root)[0]
        if told := tables.winners(found):
            told = f"{told} {tables.verdicts(found)}"
            text += f"\n\nThe map below has more seeds and settings, and a learning rate chosen for each method. {told}"
    return text


def map_section(root: Path) -> str:
    """The table of ``compare map``, its paired differences, and where the rest is."""
    if not is_measured(root):
        return "Not measured yet: `python -m neuclip_lib compare map` does it."
    found, about = _map(root)
    versions = about["versions"]
    parts = [
        tables.winners(found),
        tables.scores_table(found),
        tables.what_is_shown(found),
        tables.differences_table(found),
        f"Begun on {about['date']} by `{about['command']}`, which goes on where it stops ({about['machine']}, Python "
        f"{versions['python']}, torch {versions['torch']}). Curves, normalizer errors, learning rates and the "
        f"command for a single row: [results/{MAP}/report.md](results/{MAP}/report.md).",
    ]
    return "\n\n".join(part for part in parts if part)


def is_measured(root: Path) -> bool:
    """Whether ``compare map`` has begun."""
    return (root / "results" / MAP / ABOUT).is_file()


def _map(root: Path) -> tuple[tables.Found, dict]:
    folder = root / "results" / MAP
    about = read_json(folder / ABOUT)
    return tables.read(get_grid(MAP), Kept(folder)), about


SECTIONS: dict[str, Callable[[Path], str]] = {"results": first_table, "map": map_section}
"""The text between each pair of marks."""
