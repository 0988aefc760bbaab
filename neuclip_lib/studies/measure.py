"""One row of a comparison: train it, evaluate it, and keep the few figures that the tables need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from neuclip_lib import data as data_sets
from neuclip_lib.evaluation.zero_shot import zero_shot
from neuclip_lib.studies.grid import Grid, Row, base_of, config_of
from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.oracle import oracle_figures
from neuclip_lib.training import Run, TrainConfig, train
from neuclip_lib.training.evaluate import evaluate
from neuclip_lib.training.log import training_seconds
from neuclip_lib.training.step import Diverged

WAYS = ("image_to_text", "text_to_image")


class NoRate(RuntimeError):
    """Every learning rate of a variant has failed."""


def row_config(grid: Grid, row: Row, learning_rate: float | None = None) -> TrainConfig:
    """The run of a row, its budget counted in the pairs that it trains on.

    Args:
        learning_rate: the one that was chosen; None for the preset's.

    Raises:
        ValueError: for fewer pairs than a batch has.
    """
    base = base_of(grid, row)
    pairs = _pairs(base.data, base.train_split, tuple(base.data_options.items()))
    return config_of(grid, row, pairs, learning_rate)


@cache
def _pairs(data: str, split: str, chosen: tuple[tuple[str, Any], ...]) -> int:
    return len(data_sets.load(data, split, **dict(chosen)))


def facts_of(row: Row) -> dict[str, Any]:
    """Which run it is, as its figures say it."""
    variant = row.variant
    named = {"cell": row.cell.name, "variant": variant.name, "method": variant.method}
    return {**named, "seed": row.seed, "split": row.split}


def read_row(row: Row, kept: Kept) -> dict[str, Any]:
    """The figures of a row.

    Raises:
        RuntimeError: when they are missing, damaged, or those of another run.
    """
    found = kept.read(row.name)
    for key, value in facts_of(row).items():
        if found.get(key) != value:
            raise kept.damaged(row.name, f"{key} is {found.get(key)!r} there and {value!r} in this run")
    error = found.get("error", 0)
    if isinstance(error, str):
        return found
    if error is not None:
        raise kept.damaged(row.name, "it does not say whether the run failed")
    kinds: dict[str, Any] = {
        "r@1": (int, float),
        "lr": (int, float),
        "normalizer_error": dict,
        "unseen": dict,
        "probe": list,
    }
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise kept.damaged(row.name, f"{key} is {found.get(key)!r}")
    return found


def stale_rows(grid: Grid, kept: Kept) -> Iterator[str]:
    """Kept rows that were trained at another learning rate than validation chooses now, one line each."""
    for row in grid.rows() if grid.learning_rates else ():
        tuning = _tuning(grid, row.variant.name)
        if kept.has(row.name) and all(kept.has(one.name) for one in tuning):
            rate, best = read_row(row, kept).get("lr"), best_rate(tuning, kept)
            if rate is not None and rate != best:
                yield f"{row.name} at {rate:g}" + ("" if best is None else f", chosen is {best:g}")


def require_current_rates(grid: Grid, kept: Kept) -> None:
    """Refuse a study whose rows were not all trained at the chosen learning rates.

    Raises:
        RuntimeError: listing those rows.
    """
    if stale := list(stale_rows(grid, kept)):
        listed = "\n  ".join(stale)
        raise RuntimeError(
            f"these runs in {kept.folder} have another learning rate than validation chooses:\n  {listed}\n"
            "remove their figures there and their run folders, and they are measured again"
        )


def _tuning(grid: Grid, variant: str) -> list[Row]:
    return [row for row in grid.tuning_rows() if row.variant.name == variant]


def chosen_rate(grid: Grid, variant: str, kept: Kept) -> float | None:
    """The learning rate with the best score on validation; None when the grid tries none.

    Raises:
        NoRate: when all have failed.
        RuntimeError: when a row that chooses is not measured yet.
    """
    rows = _tuning(grid, variant)
    if not rows:
        return None
    _require_measured(rows, variant, kept)
    if (best := best_rate(rows, kept)) is None:
        raise NoRate(f"every learning rate has failed for {variant}; the errors are in {kept.folder}")
    return best


def best_rate(rows: Sequence[Row], kept: Kept) -> float | None:
    """That of the measured row with the best score; None when all have failed."""
    scores = {row.rate: score(read_row(row, kept)) for row in rows}
    good = {rate: value for rate, value in scores.items() if value is not None}
    return max(good, key=lambda rate: good[rate], default=None)


def _require_measured(rows: Sequence[Row], variant: str, kept: Kept) -> None:
    if missing := [row.name for row in rows if not kept.has(row.name)]:
        raise RuntimeError(f"the learning rate of {variant} is not chosen yet: {', '.join(missing)} not measured")


def score(result: dict[str, Any]) -> float | None:
    """Mean of the two R@1 in percent; None for a run that failed."""
    return None if result["error"] else result["r@1"]


def measure_row(grid: Grid, row: Row, kept: Kept, runs: Path) -> dict[str, Any]:
    """Train and evaluate a row, going on where an earlier call stopped, and give its figures.

    A run that diverges is kept with its error: a table that left it out would flatter the method. What only keeps a
    run from being measured, a full disk for instance, is raised.

    Args:
        runs: folder of the runs.

    Returns:
        The figures; the caller keeps them.

    Raises:
        RuntimeError: when the learning rate is not chosen yet, or the run cannot be measured.
    """
    # An oracle keeps no run folder: it is trained from the beginning each time.
    variant, facts = row.variant, facts_of(row)
    try:
        rate = chosen_rate(grid, variant.name, kept) if row.rate is None else None
        config = row_config(grid, row, rate)
        facts |= {"lr": config.optim.lr, "steps": config.steps, "batch_size": config.batch_size}
        if variant.oracle is None:
            figures = figures_of(train(config, runs / row.name), grid)
        else:
            found = oracle_figures(config, variant.oracle)
            figures = {**_recalls(found.pop("retrieval")), "unseen": {}, "normalizer_error": {}, **found}
    except (Diverged, NoRate) as error:
        return {**facts, "error": str(error)}
    return {**facts, "error": None, **figures}


def figures_of(run: Run, grid: Grid) -> dict[str, Any]:
    """Recalls in percent, normalizer errors, the curve of the probe loss, seconds of the training steps."""
    if run.metrics("probe")[-1].get("loss") is None:
        raise Diverged("the run has diverged: its loss on the probe set is not a finite number at the end")
    found = evaluate(run, draw=False, quiet=True)
    errors = found["normalizer_error"]["estimators"]
    curve = [[row["step"], round(row["loss"], 4)] for row in run.metrics("probe") if row["loss"] is not None]
    return {
        **_recalls(found["retrieval"]),
        "unseen": _unseen(run, grid),
        "normalizer_error": {
            name: {key: one[key] for key in ("mse", "bias", "correlation")} for name, one in errors.items()
        },
        "probe": curve,
        "seconds": training_seconds(run.metrics("train"), run.config.batch_size),
    }


def _recalls(retrieval: dict[str, Any]) -> dict[str, Any]:
    both = {way: {k: retrieval[way][k] for k in ("r@1", "r@5", "r@10")} for way in WAYS}
    return {"r@1": sum(both[way]["r@1"] for way in WAYS) / 2, **both}


def _unseen(run: Run, grid: Grid) -> dict[str, Any]:
    """Zero-shot accuracy on data of another origin, by task."""
    model = run.load_model()
    tasks = [task for name in grid.unseen for task in data_sets.zero_shot_tasks(name, "test")]
    found = {task.name: zero_shot(model, task) for task in tasks}
    return {name: {key: one[key] for key in ("top1", "chance", "n")} for name, one in found.items()}
