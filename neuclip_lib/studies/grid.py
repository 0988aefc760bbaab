"""A comparison as data: methods x settings x seeds on one budget; every row is one training run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from neuclip_lib.presets import get_preset
from neuclip_lib.studies.oracle import Oracle
from neuclip_lib.training import TrainConfig, options

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """A method with its options.

    Args:
        name: of its rows.
        method: a name of ``method_names()``.
        options: what differs from the preset, by name.
        oracle: put the exact normalizer in the place of the method's own.
    """

    name: str
    method: str
    options: Options = field(default_factory=dict, hash=False)
    oracle: Oracle | None = None


@dataclass(frozen=True)
class Cell:
    """A setting that all methods share.

    Args:
        name: of its rows.
        options: what differs from the preset, by name; ``batch_size`` among them.
    """

    name: str
    options: Options = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Grid:
    """A comparison.

    Args:
        study: its name, that of its folder in ``results``.
        question: one line.
        variants: what is compared; the first is what the others' differences are taken from.
        cells: the settings.
        seeds: of every variant in every cell.
        passes: over the training pairs; None for the preset's number of steps.
        learning_rates: tried once for each variant, in ``tuning_cell``, on the validation part; none: the preset's.
        tuning_cell: name of a cell; the first if not given.
        preset: where the other values come from.
        options: what differs from the preset in every row, by name.
        data: a name of ``data.names()``.
        split: ``tune`` for a study that chooses: every row then trains on train alone and is measured on validation.
        unseen: data sets whose zero-shot tasks are measured as well.
    """

    study: str
    question: str
    variants: tuple[Variant, ...]
    cells: tuple[Cell, ...] = (Cell("preset"),)
    seeds: tuple[int, ...] = (0, 1)
    passes: float | None = None
    learning_rates: tuple[float, ...] = ()
    tuning_cell: str | None = None
    preset: str = "laptop"
    options: Options = field(default_factory=dict, hash=False)
    data: str = "icons"
    split: Literal["tune", "final"] = "final"
    unseen: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError for names that are used twice or stand for nothing, and for configs that make no sense."""
        for what, names in (
            ("variants", [variant.name for variant in self.variants]),
            ("cells", [cell.name for cell in self.cells]),
            ("seeds", list(self.seeds)),
            ("learning rates", list(self.learning_rates)),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"the {what} of a comparison must differ, got {', '.join(map(str, names))}")
        if not plain(self.study) or plain(self.study) != self.study or self.study.startswith("."):
            raise ValueError(f"a comparison's name is that of a folder: letters, digits and -, not {self.study!r}")
        if not (self.variants and self.cells and self.seeds):
            raise ValueError("a comparison needs at least one method, one setting and one seed")
        if self.tuning_cell not in (None, *(cell.name for cell in self.cells)):
            raise ValueError(f"there is no cell {self.tuning_cell!r} to tune in")
        if self.passes is not None and not 0 < self.passes < math.inf:
            raise ValueError(f"passes must be positive and finite, got {self.passes}")
        named: dict[str, Row] = {}
        for row in self.all_rows():
            config_of(self, row, pairs=10**6, learning_rate=None)
            if (other := named.setdefault(row.name.casefold(), row)) is not row:
                raise ValueError(
                    f"two runs would be kept as {row.name} and {other.name}: give them names that differ more"
                )

    def rows(self) -> Iterator[Row]:
        """All rows: cell by cell, seed by seed, so that a half-finished study compares what is there."""
        for cell in self.cells:
            for seed in self.seeds:
                for variant in self.variants:
                    yield Row(cell, variant, seed, self.split)

    def all_rows(self) -> Iterator[Row]:
        """First those that choose learning rates, then the others."""
        yield from self.tuning_rows()
        yield from self.rows()

    def tuning_rows(self) -> Iterator[Row]:
        """The rows that choose learning rates: one seed, the validation part."""
        cell = next(cell for cell in self.cells if cell.name == self._tuning_cell)
        for variant in self.variants:
            for rate in self.learning_rates:
                # What chooses never sees the test part.
                yield Row(cell, variant, self.seeds[0], "tune", rate)

    @property
    def _tuning_cell(self) -> str:
        return self.tuning_cell or self.cells[0].name

    def as_json(self) -> dict[str, Any]:
        """All that decides a run's figures; the seeds are left out, so that more can be added."""
        values = dataclasses.asdict(self)
        del values["seeds"]
        if self.learning_rates:
            values["tuning_cell"] = self._tuning_cell  # by name: a cell that is put in front must not move it
        # As JSON gives it back: lists for tuples.
        preset = get_preset(self.preset)(data=self.data, **self.options)
        return json.loads(json.dumps({**values, "config": options.to_dict(preset)}))


@dataclass(frozen=True)
class Row:
    """One run of a grid; with a ``rate`` it is one that chooses the learning rate."""

    cell: Cell
    variant: Variant
    seed: int
    split: Literal["tune", "final"]
    rate: float | None = None

    @property
    def name(self) -> str:
        """A plain name, unique in the grid."""
        end = f"s{self.seed}" if self.rate is None else f"lr{self.rate:g}"
        return "_".join(plain(part) for part in (self.cell.name, self.variant.name, end))


def plain(text: str) -> str:
    """``text`` as a file name: letters, digits, ``.``, ``+``, ``-``; ``=`` is left out."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text.replace("=", "")).strip("-")


def base_of(grid: Grid, row: Row) -> TrainConfig:
    """The run of a row before its budget and learning rate are set.

    Raises:
        ValueError: for options that make no sense.
    """
    chosen = {**grid.options, **row.cell.options, **row.variant.options}
    return get_preset(grid.preset)(method=row.variant.method, data=grid.data, seed=row.seed, split=row.split, **chosen)


def config_of(grid: Grid, row: Row, pairs: int, learning_rate: float | None) -> TrainConfig:
    """The run of a row.

    Args:
        pairs: in the data that it trains on.
        learning_rate: the one that was chosen; None for the preset's.

    Raises:
        ValueError: for options that make no sense, and for fewer pairs than a batch has.
    """
    config = base_of(grid, row)
    if pairs < config.batch_size:
        raise ValueError(f"{row.name}: a batch of {config.batch_size} is more than the {pairs} pairs of {grid.data}")
    rate = learning_rate if row.rate is None else row.rate
    steps = config.steps
    if grid.passes is not None:
        steps = max(1, round(grid.passes * (pairs // config.batch_size)))
    # A warm-up is a share of the run; what is measured and saved on the way depends on its length too.
    warmup = round(steps * config.optim.warmup / config.steps)
    tenth = max(1, steps // 10)
    budgeted = options.override(
        config,
        {
            "steps": steps,
            "optim.warmup": warmup,
            "probe_every": max(1, steps // 20),
            "error_every": 0,
            "log_every": max(1, min(config.log_every, tenth)),
            "checkpoint_every": tenth,
            "keep_last": 1,
            **({} if rate is None else {"optim.lr": rate}),
        },
    )
    budgeted.check()
    return budgeted
