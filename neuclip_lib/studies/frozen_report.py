"""Tables and the picture of the frozen-features study, made from its parts."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.pages import markdown, save_picture
from neuclip_lib.training.pictures import LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = {
    "bias": "bias",
    "direction": "bias after the best scale",
    "cosine": "cosine",
    "scale": "scale",
    "variance": "variance",
    "noise": "noise of the bias",
}


class Found:
    """All parts of a folder, by setting.

    Raises:
        RuntimeError: when there is none yet.
    """

    def __init__(self, kept: Kept) -> None:
        if not (names := kept.parts()):
            raise RuntimeError(f"nothing is measured in {kept.folder} yet")
        self.common: dict[str, list[dict[str, Any]]] = {}
        self.own: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name in names:
            part = kept.read(name, ("setting",))
            if "measured" in part:
                self.common.setdefault(part["setting"], []).append(part)
            else:
                self.own.setdefault(part["setting"], {}).setdefault(part["method"], []).append(part)
        config = kept.about()["config"]
        self.settings = [setting["name"] for setting in config["settings"]]
        self.methods: list[str] = config["methods"]
        self.tau, self.eps = config["tau"], config["prototypes"]["eps"]
        self.batches = {setting["name"]: setting["batches"] for setting in config["settings"]}

    def mean(self, setting: str, at: int, name: str, key: str) -> float | None:
        """Mean over the seeds of one figure of the measurement ``at``; None where a seed has none."""
        values = [part["measured"][at]["gradients"][name][key] for part in self.common[setting]]
        return None if None in values else statistics.fmean(values)


def table(kept: Kept) -> str:
    """Markdown: for every setting the gradients' figures, and the held-out recall.

    Raises:
        RuntimeError: when nothing is measured yet.
    """
    found = Found(kept)
    lines = [
        f"Gradients of fresh batches at tau = {found.tau}, in units of the length of the exact gradient over all pairs "
        "(the variance in units of its square; eps = 0, the same for every method; a method's factor tau is divided "
        "out). The noise is the length by which the mean of so many batches is off by chance: it is taken off the "
        "bias, but a bias well below it is not told from none. All methods see the same batches. `exact` is the exact "
        "normalizer, held, without a cap; NeuCLIP's and the mixed one's weights have their cap.",
    ]
    for setting in found.settings:
        if setting in found.common:
            lines += ["", *_gradients(found, setting)]
        if setting in found.own:
            lines += ["", *_recalls(found, setting)]
    return "\n".join(lines)


def _gradients(found: Found, setting: str) -> list[str]:
    parts = found.common[setting]
    n, size = parts[0]["n"], parts[0]["batch_size"]
    about = f"{setting}: n = {n}, B = {size}, {found.batches[setting]} batches, mean of {_seeds(len(parts))}."
    rows = []
    for at, measured in enumerate(parts[0]["measured"]):
        for name in measured["gradients"]:
            cells = [found.mean(setting, at, name, key) for key in FIGURES]
            rows.append([name, str(measured["passes"]), *("-" if cell is None else f"{cell:.3f}" for cell in cells)])
        mean, below = (
            statistics.fmean(p["measured"][at]["log_g"][key] for p in parts) for key in ("mean", "below_eps")
        )
        about += (
            f" After pass {measured['passes']} the exact log g is {mean:.2f} on average, "
            f"and {100 * below:.0f} % are below NeuCLIP's log eps ({math.log(found.eps):.1f})."
        )
    head = ["gradient", "passes", *FIGURES.values()]
    return [about, "", markdown(head, rows)]


def _seeds(count: int) -> str:
    return f"{count} seed" + ("s" if count > 1 else "")


def _recalls(found: Found, setting: str) -> list[str]:
    own = found.own[setting]
    rows = []
    for name in (name for name in found.methods if name in own):
        by_split = [[part["recall"][split]["r@1"] for part in own[name]] for split in ("validation", "test")]
        rows.append([name, *map(_mean_and_range, by_split)])
    chance = next(iter(own.values()))[0]["recall"]["test"]["chance"]
    title = f"{setting}: R@1 in percent of each method's own run, mean of both ways (chance {chance:.2f} on test)."
    return [title, "", markdown(["method", "validation", "test"], rows)]


def _mean_and_range(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.1f} to {max(values):.1f})"


def draw(kept: Kept, path: Path) -> None:
    """For every setting two panels over passes: the bias after the best scale, and the variance.

    Raises:
        RuntimeError: when nothing is measured yet.
    """
    from matplotlib.figure import Figure

    found = Found(kept)
    settings = [setting for setting in found.settings if setting in found.common]
    figure = Figure(figsize=(10, 3.8 * max(1, len(settings)) + 0.8), layout="constrained")
    grid = figure.subplots(max(1, len(settings)), 2, squeeze=False)
    for row, setting in enumerate(settings):
        part = found.common[setting][0]
        about = f"{setting}: n = {part['n']}, B = {part['batch_size']}"
        for axis, key in zip(grid[row], ("direction", "variance"), strict=True):
            _panel(axis, found, setting, key)
            axis.set_title(about, fontsize=10)
            axis.set_ylabel(f"{FIGURES[key]} / exact gradient" + ("²" if key == "variance" else ""), fontsize=9)
    if settings:
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9)
    save_picture(figure, path, 80)


def _panel(axis: Axes, found: Found, setting: str, key: str) -> None:
    """One line a method; a figure that was not told from noise is left out."""
    measured = found.common[setting][0]["measured"]
    for place, name in enumerate(measured[0]["gradients"]):
        points = [(row["passes"], found.mean(setting, at, name, key)) for at, row in enumerate(measured)]
        there = [(passes, value) for passes, value in points if value is not None]
        colour, style, marker = LINES[place % len(LINES)]
        x, y = [passes for passes, _ in there], [value for _, value in there]
        axis.plot(x, y, color=colour, linestyle=style, marker=marker, markersize=5, label=name)
    passes = [row["passes"] for row in measured]
    axis.set(xscale="log", xlabel="passes over the data")
    axis.set_xticks(passes, [str(each) for each in passes], minor=False)
    axis.set_xticks([], minor=True)
    if key == "variance":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
