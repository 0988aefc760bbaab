"""``python -m neuclip_lib readme``: the parts of README.md that are made from the figures in ``results``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from neuclip_lib.cli._study import laptop_section
from neuclip_lib.course.source import course_root
from neuclip_lib.course.studies import read_about
from neuclip_lib.files import write_text
from neuclip_lib.studies import tables
from neuclip_lib.studies.keep import find_study
from neuclip_lib.studies.known import get_grid

MAP = "map"
PAGE = "README.md"


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
    write_text(root / PAGE, filled(_page(root).replace("\r\n", "\n"), root))


def is_current(root: Path) -> bool:
    """Whether every section of README.md is what the stored figures give."""
    page = _page(root)
    return page == filled(page.replace("\r\n", "\n"), root)


def _page(root: Path) -> str:
    """README.md as it is, line ends too.

    Raises:
        RuntimeError: when it is missing or no text.
    """
    try:
        return (root / PAGE).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeError(f"{root / PAGE} cannot be read ({error})") from error


def filled(page: str, root: Path) -> str:
    """The page with every section between its marks.

    Raises:
        RuntimeError: when the page lacks marks, or figures are missing.
    """
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not closed or page.count(begin) != 1 or page.count(end) != 1:
            raise RuntimeError(f"README.md must have {begin} ... {end} once; put both marks back, once each")
        page = f"{before}{begin}\n{section(root)}\n{end}{after}"
    return page


def first_table(root: Path) -> str:
    """The laptop preset's table, and what the map says of its ranking."""
    text = laptop_section(root)
    if (found := _map(root)) is not None and (told := tables.winners(found)):
        told = f"{told} {tables.verdicts(found)}"
        text += f"\n\nThe map below has more seeds and settings, and a learning rate chosen for each method. {told}"
    return text


def map_section(root: Path) -> str:
    """The table of ``compare map``, its paired differences, and where the rest is."""
    if (found := _map(root)) is None:
        return "Not measured yet: `python -m neuclip_lib compare map` does it."
    about = read_about(root / "results" / MAP)
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


def _map(root: Path) -> tables.Found | None:
    """What is measured of ``compare map``; None before it has begun.

    Raises:
        RuntimeError: when the figures are damaged or not those of the comparison as it is defined now.
    """
    grid = get_grid(MAP)
    kept = find_study(root / "results" / MAP, grid.as_json(), ("variants", "cells"))
    return None if kept is None else tables.read(grid, kept)


SECTIONS: dict[str, Callable[[Path], str]] = {"results": first_table, "map": map_section}
"""The text between each pair of marks."""
