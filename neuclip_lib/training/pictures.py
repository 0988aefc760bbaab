"""Pictures of a run: what it retrieves, right and wrong marked, and its loss and normalizer error over steps.

Figures stand alone (no pyplot), in colours that colour-blind readers can tell apart (Okabe and Ito), and every meaning
of a colour is also a sign, a line style or a word.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.evaluation.retrieval import top_matches
from neuclip_lib.files import atomic_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from neuclip_lib.training.run import Run

QUERIES, TOP, SEED = 12, 5, 0
RIGHT, WRONG = "#009E73", "#D55E00"
LINES = [("#0072B2", "-", "o"), ("#E69F00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D")]
LINES += [("#56B4E9", "--", "v"), ("#D55E00", "-.", "x"), ("#000000", ":", "+")]


def save_all(run: Run, pairs: Pairs, e1: Tensor, e2: Tensor, folder: Path, credit: str = "") -> list[Path]:
    """Write the three pictures of a run; the folder is replaced as a whole.

    Args:
        pairs: n pairs with embeddings e1 [n, d] (images) and e2 [n, d] (texts), on the CPU.
        credit: a line to print under pictures of the data.
    """
    about = f"{run.config.method} on {run.config.data}, {pairs.split}"
    figures = {
        "text-to-image.png": text_to_image_figure(pairs, e1, e2, about, credit),
        "image-to-text.png": image_to_text_figure(pairs, e1, e2, about, credit),
        "curves.png": curves_figure(run.metrics(), run.config.method),
    }
    with atomic_folder(folder) as temporary:
        for name, figure in figures.items():
            # No software version inside: equal pictures are equal files.
            figure.savefig(temporary / name, dpi=110, facecolor="white", metadata={"Software": None})
    return [folder / name for name in figures]


def query_places(n: int, count: int = QUERIES) -> Tensor:
    """The queries shown: ``min(count, n)`` of n places, drawn by a fixed seed: the same for every run on the data."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(SEED))[:count].sort().values


def text_to_image_figure(pairs: Pairs, e1: Tensor, e2: Tensor, about: str = "", credit: str = "") -> Figure:
    """A dozen captions, each with the five images nearest to it, best first; right ones marked.

    Args:
        pairs: n pairs with embeddings e1 [n, d] and e2 [n, d], on the CPU.
        about: a line above, such as the method and the data.
        credit: a line below.
    """
    queries, top, right = _matches(e2, e1, pairs.group)
    figure = _figure(7.2, 1.0 * len(queries) + 1, f"Images nearest to a caption, best first. {about}", credit)
    grid = figure.subplots(len(queries), 1 + TOP, squeeze=False, width_ratios=[1.6, *[1] * TOP])
    images = pairs.images_at(top.flatten())
    for row, caption in enumerate(pairs.captions_at(queries)):
        _write(grid[row, 0], "\n".join(textwrap.wrap(caption, 22, max_lines=4)))
        for column in range(TOP):
            if column >= top.shape[1]:
                grid[row, 1 + column].set_axis_off()
                continue
            _paint(grid[row, 1 + column], images[row * top.shape[1] + column], bool(right[row, column]))
    return figure


def image_to_text_figure(pairs: Pairs, e1: Tensor, e2: Tensor, about: str = "", credit: str = "") -> Figure:
    """A dozen images, each with the five captions nearest to it, best first; right ones marked. As above."""
    queries, top, right = _matches(e1, e2, pairs.group)
    down = math.ceil(len(queries) / 2)
    figure = _figure(10, 1.25 * down + 1, f"Captions nearest to an image, best first. {about}", credit)
    grid = figure.subplots(down, 4, squeeze=False, width_ratios=[1, 3, 1, 3])
    captions = pairs.captions_at(top.flatten())
    for axis in grid.flat:
        axis.set_axis_off()
    for row, image in enumerate(pairs.images_at(queries)):
        at = row % down, 2 * (row // down)
        grid[at].set_axis_on()
        _paint(grid[at], image, None)
        for column in range(top.shape[1]):
            good = bool(right[row, column])
            place = {"y": 0.92 - 0.19 * column, "fontsize": 9, "va": "top", "fontweight": "bold" if good else "normal"}
            text = textwrap.shorten(captions[row * top.shape[1] + column], 46, placeholder=" ...")
            beside = grid[at[0], at[1] + 1]
            beside.text(0, s=_sign(good), color=RIGHT if good else WRONG, **place)
            beside.text(0.07, s=text, parse_math=False, **place)
    return figure


def curves_figure(rows: list[dict[str, Any]], method: str) -> Figure:
    """Exact probe loss, the loss that is minimised, and the normalizer error of every estimator, over steps.

    Args:
        rows: of ``metrics.jsonl``.
        method: whose run it is.
    """
    figure = _figure(11, 3.6, "", "")
    loss, probe, error = figure.subplots(1, 3)
    _curve(loss, _series(rows, "train", "loss"), 0, "loss of a batch")
    _label(loss, f"Loss that {method} minimises", "not comparable between methods")
    _curve(probe, _series(rows, "probe", "loss"), 0, "probe loss")
    _label(probe, "Exact loss on the probe set", "mean log g over fixed training pairs")
    measured = [row for row in rows if row["kind"] == "normalizer_error"]
    names = list(dict.fromkeys(name for row in measured for name in row["estimators"]))
    for place, name in enumerate(names):
        points = [(row["step"], row["estimators"].get(name, {}).get("mse")) for row in measured]
        _curve(error, points, place, name)
    _label(error, "Normalizer error", "mean square error of alpha")
    if any(value for line in error.get_lines() for value in line.get_ydata()):
        error.set_yscale("log")
    for axis in (loss, probe, error):
        if not axis.get_lines():
            axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
    if names:
        error.legend(fontsize=8)
    return figure


def _matches(queries: Tensor, candidates: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the queries shown [q], their best candidates [q, k], and which of those are right."""
    places = query_places(len(queries))
    top = top_matches(queries[places], candidates, TOP)
    return places, top, group[top] == group[places][:, None]


def _figure(width: float, height: float, title: str, credit: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(f"{title}\n{_sign(True)} right   {_sign(False)} wrong", fontsize=10, parse_math=False)
    if credit:
        figure.supxlabel("\n".join(textwrap.wrap(credit, 100)), fontsize=7, parse_math=False)
    return figure


def _sign(right: bool) -> str:
    return "\u2713" if right else "\u2717"


def _write(axis: Axes, text: str) -> None:
    axis.set_axis_off()
    axis.text(0, 0.5, text, fontsize=9, va="center", transform=axis.transAxes, parse_math=False)


def _paint(axis: Axes, image: Tensor, right: bool | None) -> None:
    """One uint8 image [3, H, W]; a match has its sign and a frame, solid when right and dashed when wrong."""
    axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    colour = "#888888" if right is None else RIGHT if right else WRONG
    for side in axis.spines.values():
        side.set(color=colour, linewidth=1 if right is None else 2.5, linestyle="--" if right is False else "-")
    if right is not None:
        axis.set_xlabel(_sign(right), color=colour, fontsize=10, labelpad=1)


def _series(rows: list[dict[str, Any]], kind: str, name: str) -> list[tuple[int, float | None]]:
    return [(row["step"], row.get(name)) for row in rows if row["kind"] == kind]


def _curve(axis: Axes, points: list[tuple[int, float | None]], place: int, label: str) -> None:
    """A line through what was measured; a figure that was not finite is left out."""
    there = [(step, value) for step, value in points if value is not None]
    if not there:
        return
    colour, style, marker = LINES[place % len(LINES)]
    marks = marker if len(there) <= 40 else None
    axis.plot(*zip(*there, strict=True), color=colour, linestyle=style, marker=marks, markersize=3.5, label=label)


def _label(axis: Axes, title: str, below: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel(below, fontsize=8)
    axis.grid(alpha=0.3)
