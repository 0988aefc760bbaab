"""A comparison's tables: scores, paired differences, normalizer errors, and how to measure a row again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neuclip_lib.studies.grid import Grid, Row
from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.measure import best_rate, read_row, require_current_rates
from neuclip_lib.studies.pages import markdown
from neuclip_lib.studies.statistics import Interval, Spread, paired_interval, spread

Result = dict[str, Any]
Figure = Callable[[Result], float | None]


@dataclass(frozen=True)
class Found:
    """What is measured of a grid so far.

    Args:
        results: by row, failed ones too.
        rates: the learning rate of each variant that has one.
    """

    grid: Grid
    results: dict[Row, Result]
    rates: dict[str, float]

    def values(self, cell: str, variant: str, figure: Figure) -> dict[int, float]:
        """By seed, of the runs that did not fail and have the figure."""
        found = {}
        for row, result in self.results.items():
            if (row.cell.name, row.variant.name) == (cell, variant) and not result["error"]:
                value = figure(result)
                if value is not None:
                    found[row.seed] = value
        return found

    def spread(self, cell: str, variant: str, figure: Figure) -> Spread | None:
        """Over the seeds; None when nothing is measured."""
        values = self.values(cell, variant, figure)
        return spread(list(values.values())) if values else None

    def seeds_of_all(self, cell: str) -> list[int]:
        """The seeds that every variant has a run of: means over others would compare different seeds."""
        per_variant = [self.values(cell, variant.name, recall).keys() for variant in self.grid.variants]
        return sorted(set.intersection(*map(set, per_variant)))

    def best(self, cell: str, figure: Figure) -> list[str]:
        """The variants with the highest mean over the seeds that all share; none when there is no such seed."""
        seeds = self.seeds_of_all(cell)
        means = {}
        for variant in self.grid.variants:
            values = self.values(cell, variant.name, figure)
            if seeds and all(seed in values for seed in seeds):
                means[variant.name] = spread([values[seed] for seed in seeds]).mean
        return [name for name, mean in means.items() if mean == max(means.values())]

    def failures(self, cell: str, variant: str) -> int:
        """How many runs failed there."""
        return sum((row.cell.name, row.variant.name) == (cell, variant) for row in self.failed)

    def difference(self, variant: str, reference: str, figure: Figure, cells: Sequence[str] = ()) -> Interval | None:
        """``variant - reference`` over all pairs of runs that share cell and seed; None without a pair."""
        left, right = [], []
        for cell in cells or [cell.name for cell in self.grid.cells]:
            ours, theirs = self.values(cell, variant, figure), self.values(cell, reference, figure)
            for seed in sorted(ours.keys() & theirs.keys()):
                left.append(ours[seed])
                right.append(theirs[seed])
        return paired_interval(left, right) if left else None

    @property
    def failed(self) -> dict[Row, str]:
        """The error of each run that failed."""
        return {row: result["error"] for row, result in self.results.items() if result["error"]}


def read(grid: Grid, kept: Kept) -> Found:
    """What is there of a study, finished or not, with every seed that it has.

    Raises:
        RuntimeError: when figures are damaged, or have another learning rate than validation chooses.
    """
    grid = replace(grid, seeds=tuple(dict.fromkeys([*kept.about()["seeds"], *grid.seeds])))
    require_current_rates(grid, kept)
    results = {row: read_row(row, kept) for row in grid.rows() if kept.has(row.name)}
    rates = {}
    for variant in grid.variants:
        rows = [row for row in grid.tuning_rows() if row.variant == variant]
        if rows and all(kept.has(row.name) for row in rows) and (rate := best_rate(rows, kept)) is not None:
            rates[variant.name] = rate
    return Found(grid, results, rates)


def recall(result: Result) -> float | None:
    """Mean of the two R@1 in percent."""
    return result["r@1"]


def own_error(result: Result) -> float | None:
    """Mean square error of the method's own normalizer in its own run, before cap and share."""
    return result["normalizer_error"].get(result["method"], {}).get("mse")


def unseen(task: str) -> Figure:
    """Top-1 accuracy in percent of a task on data of another origin."""
    return lambda result: result["unseen"].get(task, {}).get("top1")


def scores_table(found: Found, figure: Figure = recall) -> str:
    """Variants x cells: mean and standard deviation over the seeds; bold is the highest over the seeds all share."""
    cells = [cell.name for cell in found.grid.cells]
    best = {cell: found.best(cell, figure) for cell in cells}
    rows = []
    for name in [variant.name for variant in found.grid.variants]:
        shown = []
        for cell in cells:
            one, failures = found.spread(cell, name, figure), found.failures(cell, name)
            text = "-" if one is None else str(one)
            text = f"**{text}**" if name in best[cell] else text
            shown.append(f"{text} ({failures} failed)" if failures else text)
        rows.append([name, *shown])
    return markdown(["method", *cells], rows)


def what_is_shown(found: Found) -> str:
    """What the figures of :func:`scores_table` are, and how many runs there are."""
    grid = found.grid
    part = "validation" if grid.split == "tune" else "test"
    return (
        f"{len(found.results)} of {len(list(grid.rows()))} runs, {len(found.failed)} of them failed. Figures are the "
        f"mean of the two R@1 in percent on the {part} part of {grid.data}, "
        f"mean ± standard deviation over the seeds {', '.join(map(str, grid.seeds))}; "
        + (f"{grid.passes:g} passes over the training pairs." if grid.passes else "the preset's number of steps.")
    )


def winners(found: Found) -> str:
    """Who has the highest mean where all methods have runs of the same seeds; empty when there is no such setting."""
    first: dict[str, list[str]] = {}
    for cell in found.grid.cells:
        if names := found.best(cell.name, recall):
            first.setdefault(" and ".join(names), []).append(cell.name)
    whole = len(found.grid.cells)
    parts = []
    for name, cells in sorted(first.items(), key=lambda item: -len(item[1])):
        where = "every setting" if len(cells) == whole > 1 else f"{len(cells)} of {whole} settings ({', '.join(cells)})"
        parts.append(f"{name} in {where}")
    return f"Highest mean R@1: {'; '.join(parts)}." if parts else ""


def differences_table(found: Found, figure: Figure = recall) -> str:
    """Every other variant less the first: over all cells, and the cells where it is lower."""
    reference = found.grid.variants[0].name
    rows = []
    for variant in found.grid.variants[1:]:
        whole = found.difference(variant.name, reference, figure)
        if whole is None:
            continue
        lower = []
        for cell in found.grid.cells:
            one = found.difference(variant.name, reference, figure, [cell.name])
            if one is not None and one.mean < 0:
                lower.append(f"{cell.name} ({one.mean:+.1f})")
        rows.append([variant.name, str(whole), verdict(whole), ", ".join(lower) or "none"])
    return markdown(["method", f"less {reference}, 95 %", "so it is", "lower in"], rows)


def verdicts(found: Found, figure: Figure = recall) -> str:
    """What may be said of every other variant against the first, over all settings; empty when nothing can be."""
    reference = found.grid.variants[0].name
    said: dict[str, list[str]] = {}
    for variant in found.grid.variants[1:]:
        if (whole := found.difference(variant.name, reference, figure)) is not None:
            said.setdefault(verdict(whole), []).append(variant.name)
    parts = [f"{', '.join(said[word])} {word}" for word in ("better", "not told apart", "worse") if word in said]
    return f"Against {reference}, over all settings: {'; '.join(parts)}." if parts else ""


def verdict(interval: Interval) -> str:
    """What an interval of paired differences allows to be said."""
    if interval.says_worse:
        return "worse"
    return "better" if interval.says_better else "not told apart"


def errors_table(found: Found) -> str:
    """Mean square error of the normalizers: of each method in its own run, and on one run's embeddings for all."""
    cells = [cell.name for cell in found.grid.cells]
    rows = []
    for variant in found.grid.variants:
        spreads = [found.spread(cell, variant.name, own_error) for cell in cells]
        if any(spreads):
            rows.append([f"{variant.name}, own run", *(f"{one.mean:.2f}" if one else "-" for one in spreads)])
    for variant in found.grid.variants:
        for name in variant.options.get("shadows", ()):

            def shadow(result: Result, name: str = name) -> float | None:
                return result["normalizer_error"].get(name, {}).get("mse")

            spreads = [found.spread(cell, variant.name, shadow) for cell in cells]
            rows.append([f"{name}, riding in {variant.name}", *(f"{one.mean:.2f}" if one else "-" for one in spreads)])
    return markdown(["normalizer, where", *cells], rows)


def rates_table(found: Found) -> str:
    """The learning rate that validation chose for each variant."""
    return markdown(["method", "learning rate"], [[name, f"{rate:g}"] for name, rate in found.rates.items()])


def report(found: Found, command: str) -> str:
    """The study as a Markdown page.

    Args:
        command: to which ``--only ROW`` is added to measure a row again.
    """
    grid = found.grid
    parts = [f"# {grid.study}: {grid.question}", winners(found), what_is_shown(found), scores_table(found)]
    if len(grid.variants) > 1:
        parts += [
            f"Paired differences from {grid.variants[0].name}: runs that share setting and seed; "
            "the interval is Student's, over settings and seeds as if they were independent, and not corrected for the "
            "number of methods.",
            differences_table(found),
        ]
    for task in sorted({task for result in found.results.values() for task in result.get("unseen", {})}):
        parts += [f"Top-1 accuracy in percent on {task}, data of another origin.", scores_table(found, unseen(task))]
    parts += [
        "Mean square error of the log-normalizer over all training pairs. Compare estimators only where they ride in "
        "the same run: in its own run each is asked about other embeddings. NeuCLIP's is that of the prototypes, "
        "before a cap or a share of the batch changes alpha.",
        errors_table(found),
    ]
    if found.rates:
        parts += ["Learning rates, chosen on validation in one setting with one seed.", rates_table(found)]
    if found.failed:
        parts += ["Failed runs:", "\n".join(f"- {row.name}: {error}" for row, error in found.failed.items())]
    example = next(grid.rows()).name
    parts.append(f"To measure a run again: `{command} --only ROW --again`, with ROW for instance `{example}`.")
    return "\n\n".join(part for part in parts if part) + "\n"
