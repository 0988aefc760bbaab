"""What several runs measured, side by side: read from their folders, shown as text or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip_lib.files import read_json

RECALLS = ("r@1", "r@5", "r@10")
WAYS = ("image_to_text", "text_to_image")
HEAD = ("method", *RECALLS, *RECALLS, "error", "seconds")
Result = dict[str, Any]


def read_result(folder: Path) -> Result:
    """All figures of one evaluated run.

    Returns:
        ``method``, ``title``, ``seed``, ``config``, ``versions``, ``data``, ``seconds`` of training, ``curves`` (probe
        loss and normalizer error over the steps), and what ``evaluation.json`` holds.

    Raises:
        RuntimeError: when the run or its evaluation is missing or damaged.
    """
    from neuclip_lib.methods import get_method
    from neuclip_lib.training import Run
    from neuclip_lib.training.config import to_json
    from neuclip_lib.training.evaluate import evaluation_file
    from neuclip_lib.training.log import training_seconds

    run = Run(folder)
    measured = read_json(evaluation_file(run))
    facts = run.versions()
    kept = ("settings", "retrieval", "zero_shot", "normalizer_error", "geometry")
    return {
        "method": run.config.method,
        "title": get_method(run.config.method).title,
        "seed": run.config.seed,
        "config": to_json(run.config),
        "versions": facts["versions"],
        "data": facts["data"],
        "model": facts["model"],
        "seconds": training_seconds(run.metrics("train"), run.config.batch_size),
        "curves": _curves(run.metrics()),
        **{name: measured[name] for name in kept},
    }


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What the run measured of itself over its steps, without what only the record needs."""
    errors = [row for row in rows if row["kind"] == "normalizer_error"]
    return {
        "probe": [{"step": row["step"], "loss": row["loss"]} for row in rows if row["kind"] == "probe"],
        "normalizer_error": [
            {"step": row["step"], "mse": {name: one["mse"] for name, one in row["estimators"].items()}}
            for row in errors
        ],
    }


def rows_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The table's cells, the head and the row of chance included."""
    rows: list[tuple[str, ...]] = [HEAD]
    for result in results:
        recalls = [_number(result["retrieval"][way][key], 1) for way in WAYS for key in RECALLS]
        error, seconds = _number(result["normalizer_error"]["mse"], 2), _number(result["seconds"], 0)
        rows.append((result["title"], *recalls, error, seconds))
    if results:
        chances = [results[0]["retrieval"][way]["chance"][key] for way in WAYS for key in RECALLS]
        rows.append(("chance", *(_number(chance, 1) for chance in chances), "", ""))
    return rows


def notes_of(results: Sequence[Result]) -> list[str]:
    """What the table's columns mean, and what estimators that rode along found."""
    if not results:
        return []
    first = results[0]
    n, data = first["retrieval"]["image_to_text"]["n"], first["config"]["data"]
    notes = [
        f"Recall at 1, 5, 10 in percent, image to text and text to image, on {n} held-out pairs of {data}; "
        f"{first['config']['steps']} steps of {first['config']['batch_size']} pairs, "
        f"temperature {first['settings']['tau']:.3g}, seed {first['seed']}.",
        "error: mean square error of the method's log-normalizer over the whole training set, in its own run and with "
        "the method's own constant inside the logarithm: OpenCLIP's 1/(B-1) is most of its figure. Estimators compare "
        "on the same embeddings only. seconds: of the training steps, one thread.",
    ]
    for result in results:
        estimators = result["normalizer_error"]["estimators"]
        shadows = result["config"]["shadows"]
        if shadows:
            figures = {name: estimators[name]["mse"] for name in (*shadows, "batch")}
            listed = ", ".join(f"{name} {_number(value, 2)}" for name, value in figures.items())
            notes.append(
                f"On the very embeddings of the {result['title']} run, where {' and '.join(shadows)} rode along "
                f"without steering it (its seconds include that): error {listed}."
            )
    return notes


def as_text(results: Sequence[Result]) -> str:
    """The table for a terminal."""
    rows = rows_of(results)
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    blocks = [(0, 1), (1, 4), (4, 7), (7, 8), (8, 9)]  # columns that share a title
    titles = ("", "image to text", "text to image", "normalizer", "training")
    for (begin, end), title in zip(blocks, titles, strict=True):
        room = sum(widths[begin:end]) + 2 * (end - begin - 1)
        widths[begin] += max(0, len(title) - room)
    spans = [sum(widths[begin:end]) + 2 * (end - begin - 1) for begin, end in blocks]
    lines = ["  ".join(title.rjust(span) for title, span in zip(titles, spans, strict=True))]
    for name, *figures in rows:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(results: Sequence[Result]) -> str:
    """The table for a page; the three recalls of a way share a cell."""
    head = ("method", "image to text R@1, 5, 10", "text to image R@1, 5, 10", "normalizer error", "seconds")
    lines = [head, ("---", "---", "---", "---:", "---:")]
    for row in rows_of(results)[1:]:
        lines.append((row[0], " / ".join(row[1:4]), " / ".join(row[4:7]), row[7], row[8]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
