"""A comparison in pictures: scores with their spread, and the loss on the probe set over the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuclip_lib.studies.pages import save_picture
from neuclip_lib.studies.tables import Found, recall
from neuclip_lib.training.pictures import LINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(found: Found, folder: Path) -> list[Path]:
    """Write ``scores.png`` and ``curves.png``; nothing while nothing is measured."""
    if not found.results or len(found.failed) == len(found.results):
        return []
    figures = {"scores.png": scores_figure(found), "curves.png": curves_figure(found)}
    for name, figure in figures.items():
        save_picture(figure, folder / name, 90)
    return [folder / name for name in figures]


def scores_figure(found: Found) -> Figure:
    """A panel a setting: every seed of every method as a dot, their mean as a bar's end."""
    from matplotlib.figure import Figure

    grid = found.grid
    names = [variant.name for variant in grid.variants]
    figure = Figure(figsize=(1.5 + 2.4 * len(grid.cells), 1.3 + 0.4 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(grid.cells), sharey=True, squeeze=False)[0]
    for panel, cell in zip(panels, grid.cells, strict=True):
        for place, name in enumerate(names):
            color, _, mark = LINES[place % len(LINES)]
            values = list(found.values(cell.name, name, recall).values())
            if values:
                panel.plot([sum(values) / len(values)], [place], "|", color=color, markersize=18, markeredgewidth=2)
                panel.plot(values, [place] * len(values), mark, color=color, markersize=6, alpha=0.8)
        panel.set_title(cell.name, fontsize=10)
        panel.set_xlabel("R@1 in percent")
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)  # the first on top
    figure.suptitle(f"{grid.study}: dots are seeds, strokes their means ({grid.data})", fontsize=10)
    return figure


def curves_figure(found: Found) -> Figure:
    """A panel a setting: the exact loss on the probe set over the steps, first seed."""
    from matplotlib.figure import Figure

    grid = found.grid
    figure = Figure(figsize=(1.5 + 3.0 * len(grid.cells), 3.2), layout="constrained")
    panels = figure.subplots(1, len(grid.cells), squeeze=False)[0]
    for panel, cell in zip(panels, grid.cells, strict=True):
        for row, result in found.results.items():
            if row.cell == cell and row.seed == grid.seeds[0] and not result["error"] and result["probe"]:
                place = grid.variants.index(row.variant)
                color, line, mark = LINES[place % len(LINES)]
                steps, losses = zip(*result["probe"], strict=True)
                # Colours come again after a while; then marks tell the lines apart.
                again = {"marker": mark, "markersize": 4, "markevery": 3} if place >= len(LINES) else {}
                panel.plot(steps, losses, line, color=color, label=row.variant.name, **again)
        panel.set_title(cell.name, fontsize=10)
        panel.set_xlabel("steps")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("loss on the probe set")
    panels[-1].legend(fontsize=7)
    return figure
