"""One row of a comparison: train it, evaluate it, and keep the few figures that the tables need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip_lib import data as data_sets
from neuclip_lib.evaluation.zero_shot import zero_shot
from neuclip_lib.studies.grid import Grid, Row, config_of
from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.oracle import oracle_figures
from neuclip_lib.training import Run, train
from neuclip_lib.training.evaluate import evaluate
from neuclip_lib.training.log import training_seconds

WAYS = ("image_to_text", "text_to_image")


def training_pairs(grid: Grid, row: Row) -> int:
    """How many pairs this row trains on."""
    return len(data_sets.load(grid.data, "train" if row.split == "tune" else "train+validation"))


def chosen_rate(grid: Grid, variant: str, kept: Kept) -> float | None:
    """The learning rate with the best score on validation; None when the grid tries none.

    Raises:
        RuntimeError: when a row that chooses is not measured yet, or all have failed.
    """
    rows = [row for row in grid.tuning_rows() if row.variant.name == variant]
    if not rows:
        return None
    _require_measured(rows, variant, kept)
    if (best := best_rate(rows, kept)) is None:
        raise RuntimeError(f"every learning rate has failed for {variant}; the errors are in {kept.folder}")
    return best


def best_rate(rows: Sequence[Row], kept: Kept) -> float | None:
    """That of the measured row with the best score; None when all have failed."""
    scores = {row.rate: score(kept.read(row.name)) for row in rows}
    good = {rate: value for rate, value in scores.items() if value is not None}
    return max(good, key=lambda rate: good[rate], default=None)


def _require_measured(rows: Sequence[Row], variant: str, kept: Kept) -> None:
    if missing := [row.name for row in rows if not kept.has(row.name)]:
        raise RuntimeError(f"the learning rate of {variant} is not chosen yet: {', '.join(missing)} not measured")


def score(result: dict[str, Any]) -> float | None:
    """Mean of the two R@1 in percent; None for a run that failed."""
    return None if result["error"] else result["r@1"]


def measure_row(grid: Grid, row: Row, kept: Kept, runs: Path) -> dict[str, Any]:
    """Train and evaluate a row, going on where an earlier call stopped, and keep its figures.

    A run that fails is kept with its error: a table that left it out would flatter the method.

    Args:
        runs: folder of the runs.

    Raises:
        RuntimeError: when the learning rate is not chosen yet.
    """
    # An oracle keeps no run folder: it is trained from the beginning each time.
    variant = row.variant
    facts: dict[str, Any] = {"cell": row.cell.name, "variant": variant.name, "method": variant.method}
    facts |= {"seed": row.seed, "split": row.split}
    if row.rate is None:
        _require_measured([one for one in grid.tuning_rows() if one.variant.name == variant.name], variant.name, kept)
    try:
        rate = chosen_rate(grid, variant.name, kept) if row.rate is None else None
        config = config_of(grid, row, training_pairs(grid, row), rate)
        facts |= {"lr": config.optim.lr, "steps": config.steps, "batch_size": config.batch_size}
        if variant.oracle is None:
            figures = figures_of(train(config, runs / row.name), grid)
        else:
            found = oracle_figures(config, variant.oracle)
            figures = {**_recalls(found.pop("retrieval")), "unseen": {}, "normalizer_error": {}, **found}
    except (RuntimeError, ValueError) as error:
        result = {**facts, "error": str(error)}
    else:
        result = {**facts, "error": None, **figures}
    kept.write(row.name, result)
    return result


def figures_of(run: Run, grid: Grid) -> dict[str, Any]:
    """Recalls in percent, normalizer errors, the curve of the probe loss, seconds of the training steps."""
    if run.metrics("probe")[-1].get("loss") is None:
        raise RuntimeError("the run has diverged: its loss on the probe set is not a finite number at the end")
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
