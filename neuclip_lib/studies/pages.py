"""What all studies are shown with: tables in Markdown, and pictures that are equal files when they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_lib.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def save_picture(figure: Figure, path: Path, dpi: int) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_path(path) as temporary:
        # No software version inside: equal pictures are equal files.
        figure.savefig(temporary, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
