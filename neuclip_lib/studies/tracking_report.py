"""Tables and the picture of the tracking study, made from its parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip_lib.methods import get_method
from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.pages import markdown, save_picture
from neuclip_lib.training.pictures import LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECENT = "recent pairs"
"""The estimator that is no method's: as many of the last pairs as the prototype network has prototypes."""

Setting = tuple[int, int]
"""(n, B)."""


class Found:
    """All parts of a folder, by setting.

    Raises:
        RuntimeError: when there is none yet.
    """

    def __init__(self, kept: Kept) -> None:
        if not (names := kept.parts()):
            raise RuntimeError(f"nothing is measured in {kept.folder} yet")
        self.parts: dict[Setting, list[dict[str, Any]]] = {}
        for name in names:
            part = kept.read(name, ("n", "batch_size", "curve"))
            self.parts.setdefault((part["n"], part["batch_size"]), []).append(part)
        self.settings = sorted(self.parts, key=lambda setting: (-setting[1], setting[0]))
        self.estimators = list(self.parts[self.settings[0]][0]["curve"][-1]["errors"])

    def values(self, setting: Setting, estimator: str, key: str, at: int = -1) -> list[float]:
        """One figure a seed, of the last measurement unless told otherwise."""
        return [part["curve"][at]["errors"][estimator][key] for part in self.parts[setting]]

    def mean(self, setting: Setting, estimator: str, key: str = "mse") -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values(setting, estimator, key))

    def along_n(self) -> list[Setting]:
        """The settings with the batch that most of them share, by n."""
        shared = statistics.mode(size for _, size in self.settings)
        return sorted(setting for setting in self.settings if setting[1] == shared)

    def along_b(self) -> list[Setting]:
        """The settings with the n that most of them share, by B."""
        shared = statistics.mode(n for n, _ in self.settings)
        return sorted((setting for setting in self.settings if setting[0] == shared), key=lambda setting: setting[1])


def title(estimator: str) -> str:
    """An estimator in words, with the method whose it is."""
    if estimator == RECENT:
        return "the last m pairs in the place of prototypes"
    return f"{get_method(estimator).normalizer} ({estimator})"


def table(kept: Kept) -> str:
    """Markdown: the error by setting, by what it grows, and its bias and correlation.

    Raises:
        RuntimeError: when nothing is measured yet.
    """
    found = Found(kept)
    counts = [len(parts) for parts in found.parts.values()]
    seeds = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    last = found.parts[found.settings[0]][0]["curve"][-1]["step"]
    lines = [
        f"Mean square error of alpha after {last} steps, mean of {seeds} seeds (range of them); the lowest is bold.",
        "",
    ]
    lines.append(_by_setting(found, lambda setting, name: _mse(found, setting, name)))
    lines += ["", "An anchor whose own pair is among the last m cannot be told less than log(1/m) by them."]
    few, many = found.along_n()[0], found.along_n()[-1]
    least, most = found.along_b()[0], found.along_b()[-1]
    lines += ["", "What the error is multiplied by.", ""]
    ratios = {
        f"n {few[0]} to {many[0]}, B {few[1]}": (many, few),
        f"B {most[1]} to {least[1]}, n {least[0]}": (least, most),
    }
    rows = [
        [title(name), *(f"{found.mean(to, name) / found.mean(start, name):.2f}" for to, start in ratios.values())]
        for name in found.estimators
    ]
    lines.append(markdown(["estimator", *ratios], rows))
    lines += ["", "Bias (mean of estimate - target) / correlation with the target.", ""]
    lines.append(
        _by_setting(
            found,
            lambda setting, name: (
                f"{found.mean(setting, name, 'bias'):+.2f} / {found.mean(setting, name, 'correlation'):.2f}"
            ),
        )
    )
    return "\n".join(lines)


def _by_setting(found: Found, cell: Callable[[Setting, str], str]) -> str:
    steps = found.parts[found.settings[0]][0]["curve"][-1]["step"]
    # How often a sample came up is what a moving average lives on.
    head = ["estimator", *(f"n {n}, B {size} ({steps * size / n:.1f} passes)" for n, size in found.settings)]
    return markdown(head, [[title(k), *(cell(setting, k) for setting in found.settings)] for k in found.estimators])


def _mse(found: Found, setting: Setting, name: str) -> str:
    values = found.values(setting, name, "mse")
    text = f"{statistics.fmean(values):.3f}"
    if name == min(found.estimators, key=lambda other: found.mean(setting, other)):
        text = f"**{text}**"
    return text if len(values) == 1 else f"{text} ({min(values):.3f} to {max(values):.3f})"


def draw(kept: Kept, path: Path) -> None:
    """Three panels: the error over n, over B, and over the steps of the largest n.

    Raises:
        RuntimeError: when nothing is measured yet.
    """
    from matplotlib.figure import Figure

    found = Found(kept)
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    over_n, over_b, over_steps = figure.subplots(1, 3, sharey=True)
    by_n, by_b = found.along_n(), found.along_b()
    _lines(over_n, found, by_n, [n for n, _ in by_n], f"over the number of pairs (B = {by_n[0][1]})", "pairs n")
    _lines(over_b, found, by_b, [size for _, size in by_b], f"over the batch (n = {by_b[0][0]})", "global batch B")
    largest = by_n[-1]
    steps = [row["step"] for row in found.parts[largest][0]["curve"]]
    for place, name in enumerate(found.estimators):
        each = [statistics.fmean(found.values(largest, name, "mse", at)) for at in range(len(steps))]
        _line(over_steps, place, steps, each)
    over_steps.set(xlabel="step", yscale="log")
    over_steps.set_title(f"over training (n = {largest[0]}, B = {largest[1]})", fontsize=10)
    over_steps.grid(alpha=0.3)
    over_n.set_ylabel("mean square error of alpha")
    handles = [over_steps.get_lines()[place] for place in range(len(found.estimators))]
    figure.legend(handles, [title(name) for name in found.estimators], loc="outside lower center", ncols=2, fontsize=9)
    save_picture(figure, path, 110)


def _lines(axis: Axes, found: Found, settings: list[Setting], at: list[int], name: str, below: str) -> None:
    for place, estimator in enumerate(found.estimators):
        _line(axis, place, at, [found.mean(setting, estimator) for setting in settings])
        for setting, x in zip(settings, at, strict=True):
            values = found.values(setting, estimator, "mse")
            axis.vlines(x, min(values), max(values), color=LINES[place][0])
    axis.set(xscale="log", yscale="log", xlabel=below)
    axis.set_xticks(at, [str(x) for x in at], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_title(name, fontsize=10)
    axis.grid(alpha=0.3)


def _line(axis: Axes, place: int, x: Sequence[float], y: Sequence[float]) -> None:
    colour, style, marker = LINES[place % len(LINES)]
    axis.plot(x, y, color=colour, linestyle=style, marker=marker, markersize=4)
