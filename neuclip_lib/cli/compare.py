"""``python -m neuclip_lib compare``: methods x settings x seeds on one budget, resumable, failures reported."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from neuclip_lib import data as data_sets
from neuclip_lib import home
from neuclip_lib.cli._jobs import Job, Stage, run_jobs
from neuclip_lib.cli._machine import usable_cores
from neuclip_lib.cli.run import steps_of
from neuclip_lib.files import ensure_writable, write_text
from neuclip_lib.studies import pictures, tables
from neuclip_lib.studies.grid import Cell, Grid, Row, Variant
from neuclip_lib.studies.keep import Kept, find_study, open_study
from neuclip_lib.studies.known import GRIDS, OWN, get_grid
from neuclip_lib.studies.measure import measure_row, read_row, require_current_rates, row_config

CUSTOM = "custom"
GROWING = ("variants", "cells")
"""What a comparison may get more of while it is half-finished."""


def main(arguments: list[str]) -> int:
    """Run what is not measured yet, print and write the tables; 1 when a run failed.

    Raises:
        ValueError, RuntimeError: for names and values that make no sense, before any work.
    """
    arguments = [word for word in arguments if word != "--"]  # nothing after it would be read by the children
    chosen = _parser().parse_args(arguments)
    _require_one_task(chosen)
    if chosen.study in OWN:
        return _own(chosen)
    grid = _grid(chosen)
    grid.check()
    folder = (chosen.out or Path("results") / grid.study).resolve()
    # The seeds that are kept already, in the order in which they came: the first one chooses learning rates.
    before = find_study(folder, grid.as_json(), GROWING)
    if before is not None:
        grid = replace(grid, seeds=tuple(dict.fromkeys([*before.about()["seeds"], *grid.seeds])))
    rows = {row.name: row for row in grid.all_rows()}
    if chosen.only is not None and chosen.only not in rows:
        raise ValueError(f"there is no run {chosen.only!r} in {grid.study}; there are {', '.join(rows)}")
    command = shlex.join(["python", "-m", "neuclip_lib", "compare", *_naming(arguments)])
    if chosen.table:
        if before is None:
            raise ValueError(f"nothing is measured in {folder} yet: {command}")
        return _show(grid, before, command)
    for name in (grid.data, *grid.unseen):
        if data_sets.card(name).state != "made on the fly":
            data_sets.build(name, quiet=chosen.only is not None)
    for row in rows.values():
        row_config(grid, row)
    runs = (chosen.runs or home.runs_dir() / grid.study).resolve()
    kept = open_study(folder, command, grid.as_json(), grid.seeds, GROWING)
    ensure_writable(runs)
    if chosen.only is not None:
        return _one(grid, rows[chosen.only], kept, runs, chosen.again)
    if chosen.retry:
        _forget_failures(grid, kept)
    if broken := _measure(grid, kept, runs, chosen.jobs or min(2, usable_cores()), _naming(arguments)):
        for text in broken:
            print(f"error: {text}", file=sys.stderr)
        return 1
    print(f"the runs are in {runs}", file=sys.stderr)
    return _show(grid, kept, command)


def _show(grid: Grid, kept: Kept, command: str) -> int:
    """Print and write the tables and pictures of what is there; 1 when a run failed."""
    found = tables.read(grid, kept)
    page = tables.report(found, command)
    write_text(kept.folder / "report.md", page)
    pictures.save(found, kept.folder)
    print(page)
    print(f"kept in {kept.folder}: report.md, *.png and one file a run", file=sys.stderr)
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
    own.add_argument("--name", help=f"of its folder in results/ (default: {CUSTOM})")
    own.add_argument("--preset", help="where the other values come from (default: laptop)")
    own.add_argument("--data", help="data set (default: icons)")
    own.add_argument("--batch-sizes", nargs="+", type=int, help="settings: with every --taus")
    own.add_argument("--taus", nargs="+", type=float, help="settings: with every --batch-sizes")
    own.add_argument("--passes", type=float, help="over the training pairs (default: the preset's number of steps)")
    own.add_argument("--rates", nargs="+", type=float, help="learning rates to choose from on validation")
    parser.add_argument("--seeds", nargs="+", type=int, help="of every method in every setting")
    parser.add_argument("--jobs", type=int, help="runs at a time, one thread each (default: 2)")
    parser.add_argument("--out", type=Path, help="where the figures are kept (default: results/NAME)")
    parser.add_argument("--runs", type=Path, help="folder of the runs (default: RUNS/NAME)")
    parser.add_argument("--only", metavar="ROW", help="measure this one run, here and now")
    parser.add_argument("--again", action="store_true", help="with --only: train it anew and compare with what is kept")
    parser.add_argument("--retry", action="store_true", help="measure failed runs again")
    parser.add_argument("--table", action="store_true", help="only print and write the tables of what is there")
    return parser


def _require_one_task(chosen: argparse.Namespace) -> None:
    """Refuse options that say nothing together, rather than drop one of them."""
    given = {name for name, value in vars(chosen).items() if value is not None and value is not False}
    own = {"methods", "name", "preset", "data", "batch_sizes", "taus", "passes", "rates"} & given
    if chosen.study is not None and own:
        raise ValueError(
            f"{chosen.study} has its own methods and settings; leave {_options(own)} out, or leave the name out"
        )
    if chosen.study in OWN and (odd := given - {"study", "seeds", "out", "table"}):
        raise ValueError(
            f"{chosen.study} is measured as it is; it takes only --seeds, --out and --table, not {_options(odd)}"
        )
    if "only" in given and (odd := given & {"retry", "table", "jobs"}):
        raise ValueError(f"--only measures one run; leave {_options(odd)} out (--again trains it anew)")
    if "again" in given and "only" not in given:
        raise ValueError("--again belongs to --only ROW; --retry measures all failed runs again")
    if "table" in given and (odd := given & {"retry", "jobs"}):
        raise ValueError(f"--table measures nothing; leave {_options(odd)} out")
    if chosen.jobs is not None and chosen.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {chosen.jobs}")
    if chosen.seeds and len(set(chosen.seeds)) < len(chosen.seeds):
        raise ValueError(f"the seeds of a comparison must differ, got {', '.join(map(str, chosen.seeds))}")


def _options(names: Iterable[str]) -> str:
    return ", ".join(sorted(f"--{name.replace('_', '-')}" for name in names))


def _own(chosen: argparse.Namespace) -> int:
    """A study that trains no encoder: measured in this process."""
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
        grid = get_grid(chosen.study)
    elif not chosen.methods:
        raise ValueError(f"give a comparison's name ({', '.join([*GRIDS, *OWN])}) or --methods")
    elif chosen.name in (*GRIDS, *OWN):
        raise ValueError(f"{chosen.name} is a comparison of this project; give yours another --name")
    else:
        grid = Grid(
            CUSTOM if chosen.name is None else chosen.name,
            "your own comparison",
            tuple(Variant(name, name) for name in chosen.methods),
            _cells(chosen.batch_sizes or (), chosen.taus or ()),
            passes=chosen.passes,
            learning_rates=tuple(chosen.rates or ()),
            preset="laptop" if chosen.preset is None else chosen.preset,
            data="icons" if chosen.data is None else chosen.data,
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
    for row in grid.all_rows():
        if kept.has(row.name) and read_row(row, kept)["error"]:
            kept.forget(row.name)


def _measure(grid: Grid, kept: Kept, runs: Path, jobs: int, naming: list[str]) -> list[str]:
    """First the runs that choose learning rates, then the others; those of one kind ``jobs`` at a time.

    Returns:
        What kept a run from being measured at all; a run that fails is measured.
    """
    for rows in (list(grid.tuning_rows()), list(grid.rows())):
        # What is there is looked at first: hours of training before a damaged file is found help nobody.
        for row in rows:
            if kept.has(row.name):
                read_row(row, kept)
        require_current_rates(grid, kept)
        waiting = {row: _job(grid, row, runs, naming) for row in rows if not kept.has(row.name)}
        if waiting:
            print(f"{len(waiting)} of {len(rows)} runs to do; what they print: {runs}/*.log", file=sys.stderr)
            run_jobs(list(waiting.values()), jobs)
        if broken := [f"{job.name}: {job.error}" for row, job in waiting.items() if not kept.has(row.name)]:
            return broken
    return []


def _job(grid: Grid, row: Row, runs: Path, naming: list[str]) -> Job:
    stage = Stage("training", ["compare", *naming, "--only", row.name])
    return Job(row.name, [stage], runs / f"{row.name}.log", row_config(grid, row).steps, steps_of(runs / row.name))


def _one(grid: Grid, row: Row, kept: Kept, runs: Path, again: bool) -> int:
    """Measure one run in this process and print its figures; 1 when it fails.

    What is kept stays: a run that is trained anew is only compared with it.
    """
    before = read_row(row, kept) if kept.has(row.name) else None
    if before is not None and not again:
        result = before
    else:
        result = measure_row(grid, row, kept, _fresh(runs, row.name) if again else runs)
        if before is None:
            kept.write(row.name, result)
    if result["error"]:
        print(f"error: {result['error']}", file=sys.stderr)
    else:
        print(f"{row.name}: R@1 {result['r@1']:.2f} (mean of both ways), learning rate {result['lr']:g}")
    if again and before is not None:
        was = f"failed: {before['error']}" if before["error"] else f"R@1 {before['r@1']:.2f}"
        print(f"kept, and left as it is: {was}")
    return 1 if result["error"] else 0


def _fresh(runs: Path, name: str) -> Path:
    """A folder beside the others in which this run has not been trained."""
    number = 1
    while (runs / f"again-{number}" / name).exists():
        number += 1
    return ensure_writable(runs / f"again-{number}")
