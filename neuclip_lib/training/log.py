"""The record of a run: ``metrics.jsonl``, one row a measurement, and TensorBoard written from it.

Every row has ``step`` (the number of finished steps, the same count as in checkpoints and on TensorBoard's axis) and
``kind``:

    train             means over the steps since the last such row: loss (the surrogate), mean_alpha, mean_r (about zero
                      when alpha follows), largest_weight (the maximum of exp(-alpha)(eps + g)), and of the last step
                      tau (the mean where samples have their own), learning_rate, gradient_norm; epoch;
                      samples_per_second (not reproducible to the bit). A loss without a normalizer has no mean_alpha,
                      mean_r and largest_weight; in float16, overflows counts the steps that were skipped
    probe             loss = mean of (log g1 + log g2)/2 over a fixed set of n training pairs (eval mode, no
                      augmentation, eps = 0) at tau: comparable between methods, as the surrogate is not
    normalizer_error  estimators = {name: {mse, bias, correlation, n, ...}} on training pairs at tau

A figure that is not a finite number is null, as JSON has no other way to say so.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip_lib.files import write_text

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All whole rows; a last line that a killed process left unfinished is no row.

    Raises:
        RuntimeError: naming file and line, when a finished line is damaged.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            row["step"], row["kind"]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise RuntimeError(f"{path}, line {number} is damaged: {line.strip()[:80]!r}") from error
        rows.append(row)
    return rows


class MetricsLog:
    """Appends rows; opened for a run that goes on after ``step``, it first drops the rows behind it.

    Args:
        folder: of the run.
        step: finished steps of the checkpoint that the run continues from; None when it starts afresh.
        expected: rows that the run had written by then; fewer are reported, since the record was cut or lost.
    """

    def __init__(self, folder: Path, step: int | None = None, expected: int = 0) -> None:
        path = folder / METRICS
        rows = [] if step is None else [row for row in read_rows(path) if row["step"] <= step]
        if len(rows) < expected:
            print(
                f"{path} lacks {expected - len(rows)} of {expected} rows up to step {step}: it was cut, and "
                "the figures of those steps are lost (the weights are not)",
                file=sys.stderr,
                flush=True,
            )
        self.count = len(rows)
        write_text(path, "".join(map(_line, rows)))
        self._file = path.open("a", encoding="utf-8")
        self._board = _Board(folder / TENSORBOARD, rows)

    def write(self, row: Row) -> None:
        """Append one row (``step`` and ``kind`` first)."""
        self.count += 1
        self._file.write(_line(row))
        self._file.flush()
        self._board.write(row)

    def sync(self) -> None:
        """Make all rows safe on disk: before a checkpoint, so that none is missing when the run continues from it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        """Flush and close both files."""
        self.sync()
        self._file.close()
        self._board.close()


class NoLog:
    """The record of a rank that is not the first: it writes nothing."""

    count = 0

    def write(self, row: Row) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Board:
    """TensorBoard's event files, rebuilt from the rows at every start: no step ever goes backwards in them."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row under their TensorBoard names, such as ``train/loss`` or ``normalizer_error/batch/mse``."""
    estimators = row.get("estimators", {})
    for name, figures in [("", row), *estimators.items()]:
        for key, value in figures.items():
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield "/".join(part for part in (row["kind"], name, key) if part), value


def _line(row: Row) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def training_seconds(rows: Sequence[Mapping[str, Any]], batch_size: int) -> float:
    """Seconds of the steps themselves, without measuring and saving; stays right over resumed runs."""
    before, seconds = 0, 0.0
    for row in rows:
        seconds += (row["step"] - before) * batch_size / row["samples_per_second"]
        before = row["step"]
    return round(seconds, 1)
