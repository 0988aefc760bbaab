"""``python -m neuclip_lib compare``: methods x settings x seeds on one budget, resumable, failures reported."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neuclip_lib import data as data_sets
from neuclip_lib import home
from neuclip_lib.cli._jobs import Job, Stage, run_jobs
from neuclip_lib.cli._machine import usable_cores
from neuclip_lib.cli.run import steps_of
from neuclip_lib.files import ensure_writable, write_text
from neuclip_lib.studies import pictures, tables
from neuclip_lib.studies.grid import Cell, Grid, Row, Variant, config_of
from neuclip_lib.studies.keep import Kept, open_study
from neuclip_lib.studies.known import GRIDS, OWN, get_grid
from neuclip_lib.studies.measure import measure_row, training_pairs

CUSTOM = "custom"


def main(arguments: list[str]) -> int:
    """Run what is not measured yet, print and write the tables; 1 when a run failed.

    Raises:
        ValueError, RuntimeError: for names and values that make no sense, before any work.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.study in OWN:
        return _own(chosen)
    grid = _grid(chosen)
    grid.check()
    if chosen.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {chosen.jobs}")
    for name in (grid.data, *grid.unseen):
        if data_sets.card(name).state != "made on the fly":
            data_sets.build(name, quiet=chosen.only is not None)
    command = shlex.join(["python", "-m", "neuclip_lib", "compare", *_naming(arguments)])
    folder = (chosen.out or Path("results") / grid.study).resolve()
    runs = (chosen.runs or home.runs_dir() / grid.study).resolve()
    kept = open_study(folder, command, grid.as_json(), grid.seeds, growing=("variants", "cells"))
    ensure_writable(runs)
    if chosen.only is not None:
        return _one(grid, chosen.only, kept, runs, chosen.again)
    if not chosen.table:
        if chosen.retry:
            _forget_failures(grid, kept)
        broken = _measure(grid, kept, runs, chosen.jobs, _naming(arguments))
        for text in broken:
            print(f"error: {text}", file=sys.stderr)
        if broken:
            return 1
    found = tables.read(grid, kept)
    page = tables.report(found, command)
    write_text(folder / "report.md", page)
    pictures.save(found, folder)
    print(page)
    print(f"kept in {folder}: report.md, *.png and one file a run; the runs are in {runs}", file=sys.stderr)
    return 1 if found.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m neuclip_lib compare",
        description="Train methods in the same settings on the same budget, choose each one's learning rate on "
        "validation, evaluate on test, and print means, spreads and paired differences. Started again, it goes on "
        f"where it stopped. Comparisons with a name: {', '.join([*GRIDS, *OWN])}.",
        allow_abbrev=False,
    )
    parser.add_argument("study", nargs="?", help="a comparison with a name; without one, your own by the options")
    own = parser.add_argument_group("your own comparison (the first method is what the others are compared with)")
    own.add_argument("--methods", nargs="+", help="two or more methods")
    own.add_argument("--name", default=CUSTOM, help=f"of its folder in results/ (default: {CUSTOM})")
    own.add_argument("--preset", default="laptop", help="where the other values come from (default: laptop)")
    own.add_argument("--data", default="icons", help="data set (default: icons)")
    own.add_argument("--batch-sizes", nargs="+", type=int, default=[], help="settings: with every --taus")
    own.add_argument("--taus", nargs="+", type=float, default=[], help="settings: with every --batch-sizes")
    own.add_argument("--passes", type=float, help="over the training pairs (default: the preset's number of steps)")
    own.add_argument("--rates", nargs="*", type=float, default=[], help="learning rates to choose from on validation")
    parser.add_argument("--seeds", nargs="+", type=int, help="of every method in every setting")
    parser.add_argument("--jobs", type=int, default=min(2, usable_cores()), help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="where the figures are kept (default: results/NAME)")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: RUNS/NAME)")
    parser.add_argument("--only", metavar="ROW", help="measure this one run, here and now")
    parser.add_argument("--again", action="store_true", help="with --only: train it anew and compare with what is kept")
    parser.add_argument("--retry", action="store_true", help="measure failed runs again")
    parser.add_argument("--table", action="store_true", help="only print and write the tables of what is there")
    return parser


def _own(chosen: argparse.Namespace) -> int:
    """A study that trains no encoder: measured in this process."""
    if chosen.methods or chosen.only or chosen.again or chosen.retry or chosen.runs:
        raise ValueError(f"{chosen.study} is measured as it is; it takes only --seeds, --out and --table")
    measure, table, seeds = OWN[chosen.study]
    folder = (chosen.out or Path("results") / chosen.study).resolve()
    if not chosen.table:
        measure(folder, chosen.seeds or seeds)
    page = table(Kept(folder))
    write_text(folder / "report.md", page)
    print(page)
    print(f"kept in {folder}", file=sys.stderr)
    return 0


def _grid(chosen: argparse.Namespace) -> Grid:
    if chosen.study is not None:
        if chosen.methods:
            raise ValueError(f"{chosen.study} has its own methods; leave --methods out, or leave the name out")
        grid = get_grid(chosen.study)
    elif not chosen.methods:
        raise ValueError(f"give a comparison's name ({', '.join([*GRIDS, *OWN])}) or --methods")
    else:
        grid = Grid(
            chosen.name,
            "your own comparison",
            tuple(Variant(name, name) for name in chosen.methods),
            _cells(chosen.batch_sizes, chosen.taus),
            passes=chosen.passes,
            learning_rates=tuple(chosen.rates),
            preset=chosen.preset,
            data=chosen.data,
        )
    if chosen.seeds:
        grid = replace(grid, seeds=tuple(chosen.seeds))
    return grid


def _cells(batch_sizes: Sequence[int], taus: Sequence[float]) -> tuple[Cell, ...]:
    cells = []
    sizes: list[int | None] = list(batch_sizes) or [None]
    temperatures: list[float | None] = list(taus) or [None]
    for size, tau in itertools.product(sizes, temperatures):
        named = {"batch_size": size, "temperature.init": tau}
        given = {key: value for key, value in named.items() if value is not None}
        shown = {"batch_size": "B", "temperature.init": "tau"}
        cells.append(Cell(" ".join(f"{shown[key]}={value:g}" for key, value in given.items()) or "preset", given))
    return tuple(cells)


def _naming(arguments: Sequence[str]) -> list[str]:
    """The arguments that say which comparison it is and where, without those that say what to do with it."""
    kept, skip = [], 0
    for word in arguments:
        if skip:
            skip -= 1
        elif word in ("--only", "--jobs"):
            skip = 1
        elif word not in ("--again", "--retry", "--table") and not word.startswith(("--only=", "--jobs=")):
            kept.append(word)
    return kept


def _forget_failures(grid: Grid, kept: Kept) -> None:
    for row in (*grid.tuning_rows(), *grid.rows()):
        if kept.has(row.name) and kept.read(row.name)["error"]:
            kept.forget(row.name)


def _measure(grid: Grid, kept: Kept, runs: Path, jobs: int, naming: list[str]) -> list[str]:
    """First the runs that choose learning rates, then the others; those of one kind ``jobs`` at a time.

    Returns:
        What kept a run from being measured at all; a run that fails is measured.
    """
    for rows in (list(grid.tuning_rows()), list(grid.rows())):
        waiting = {row: _job(grid, row, kept, runs, naming) for row in rows if not kept.has(row.name)}
        if waiting:
            print(f"{len(waiting)} of {len(rows)} runs to do; what they print: {runs}/*.log", file=sys.stderr)
            run_jobs(list(waiting.values()), jobs)
        if broken := [f"{job.name}: {job.error}" for row, job in waiting.items() if not kept.has(row.name)]:
            return broken
    return []


def _job(grid: Grid, row: Row, kept: Kept, runs: Path, naming: list[str]) -> Job:
    steps = config_of(grid, row, training_pairs(grid, row), None).steps
    stage = Stage("training", ["compare", *naming, "--only", row.name])
    return Job(row.name, [stage], runs / f"{row.name}.log", steps, steps_of(runs / row.name))


def _one(grid: Grid, name: str, kept: Kept, runs: Path, again: bool) -> int:
    """Measure one run in this process and print its figures; 1 when it fails."""
    rows = {row.name: row for row in (*grid.tuning_rows(), *grid.rows())}
    if name not in rows:
        raise ValueError(f"there is no run {name!r} in {grid.study}; there are {', '.join(rows)}")
    before = kept.read(name) if kept.has(name) else None
    if before is not None and not again:
        result = before
    else:
        result = measure_row(grid, rows[name], kept, _fresh(runs, name) if again else runs)
    if result["error"]:
        print(f"error: {result['error']}", file=sys.stderr)
        return 1
    print(f"{name}: R@1 {result['r@1']:.2f} (mean of both ways), learning rate {result['lr']:g}")
    if before is not None and again and not before["error"]:
        print(f"it was {before['r@1']:.2f}")
    return 0


def _fresh(runs: Path, name: str) -> Path:
    """A folder beside the others in which this run has not been trained."""
    number = 1
    while (runs / f"again-{number}" / name).exists():
        number += 1
    return ensure_writable(runs / f"again-{number}")
