"""A comparison's rows: the same budget for all, learning rates chosen on validation, failures kept."""

import json
from dataclasses import replace

import pytest

from neuclip_lib.studies import measure, tables
from neuclip_lib.studies.grid import Cell, Grid, Variant, config_of, plain
from neuclip_lib.studies.keep import open_study
from neuclip_lib.studies.known import GRIDS, get_grid

GRID = Grid(
    "shape",
    "which is better?",
    (Variant("gcl-batch", "gcl-batch", {"shadows": ("neuclip",)}), Variant("wide", "neuclip", {"prototypes.m": 64})),
    (Cell("B=8", {"batch_size": 8}), Cell("B=16", {"batch_size": 16})),
    seeds=(0, 1),
    passes=3,
    learning_rates=(1e-3, 2e-3),
    tuning_cell="B=16",
    preset="tiny",
    data="captions",
)


def result(row, score, error=None):
    facts = {"method": row.variant.method, "seed": row.seed, "error": error}
    return {**facts, "r@1": score, "normalizer_error": {}, "unseen": {}, "probe": []}


def test_rows_share_budget_and_differ_in_what_they_name():
    rows = {row.name: row for row in GRID.rows()}
    assert list(rows)[:3] == ["B8_gcl-batch_s0", "B8_wide_s0", "B8_gcl-batch_s1"]
    small = config_of(GRID, rows["B8_wide_s1"], pairs=100, learning_rate=5e-4)
    large = config_of(GRID, rows["B16_wide_s0"], pairs=100, learning_rate=5e-4)
    assert (small.steps, large.steps) == (3 * 12, 3 * 6)  # three passes of whole batches
    assert (small.optim.warmup, large.optim.warmup) == (7, 4)  # a fifth of the run, as in the preset
    assert (small.seed, small.batch_size, small.prototypes.m) == (1, 8, 64)
    assert small.optim.lr == large.optim.lr == 5e-4
    assert small.split == "final"
    other = config_of(GRID, rows["B8_gcl-batch_s1"], pairs=100, learning_rate=None)
    assert (other.steps, other.optim.lr, other.shadows) == (36, 2e-3, ("neuclip",))


def test_rows_that_choose_a_rate_use_one_seed_one_setting_and_validation_alone():
    rows = list(GRID.tuning_rows())
    assert [(row.variant.name, row.rate) for row in rows] == [
        ("gcl-batch", 1e-3),
        ("gcl-batch", 2e-3),
        ("wide", 1e-3),
        ("wide", 2e-3),
    ]
    configs = [config_of(GRID, row, pairs=100, learning_rate=None) for row in rows]
    assert {config.split for config in configs} == {"tune"}
    assert {config.eval_split for config in configs} == {"validation"}
    assert {config.batch_size for config in configs} == {16}
    assert [config.optim.lr for config in configs] == [1e-3, 2e-3] * 2


def test_the_best_rate_on_validation_is_chosen_and_failed_ones_are_not(tmp_path):
    kept = open_study(tmp_path / "shape", "command", GRID.as_json(), GRID.seeds)
    rows = list(GRID.tuning_rows())
    with pytest.raises(RuntimeError, match="not chosen yet"):
        measure.chosen_rate(GRID, "wide", kept)
    for row, score, error in zip(rows, (4.0, 3.0, 9.0, 5.0), (None, None, "diverged", None), strict=True):
        kept.write(row.name, result(row, score, error))
    assert measure.chosen_rate(GRID, "gcl-batch", kept) == 1e-3
    assert measure.chosen_rate(GRID, "wide", kept) == 2e-3
    kept.write(rows[3].name, result(rows[3], 0.0, "diverged too"))
    with pytest.raises(RuntimeError, match="every learning rate has failed"):
        measure.chosen_rate(GRID, "wide", kept)


def found(scores):
    rows = {row.name: row for row in GRID.rows()}
    return tables.Found(GRID, {rows[name]: result(rows[name], *value) for name, value in scores.items()}, {})


def test_differences_pair_runs_of_one_setting_and_seed_and_leave_failed_ones_out():
    some = found(
        {
            "B8_gcl-batch_s0": (10.0,),
            "B8_wide_s0": (12.0,),
            "B8_gcl-batch_s1": (20.0,),  # its partner failed
            "B8_wide_s1": (99.0, "diverged"),
            "B16_gcl-batch_s0": (30.0,),
            "B16_wide_s0": (31.0,),
            "B16_wide_s1": (50.0,),  # no partner yet
        }
    )
    whole = some.difference("wide", "gcl-batch", tables.recall)
    assert (whole.mean, whole.n) == (1.5, 2)
    assert some.difference("wide", "gcl-batch", tables.recall, ["B=16"]).mean == 1.0
    page = tables.report(some, "the command")
    assert "7 of 8 runs, 1 of them failed" in page
    assert "- B8_wide_s1: diverged" in page
    # First is who is first over the seeds that both have, not who had a better seed to itself.
    assert "Highest mean R@1: wide in every setting." in page
    assert "| gcl-batch | 15.0 ± 7.1 | 30.0 |" in page
    assert "| wide | **12.0** (1 failed) | **40.5 ± 13.4** |" in page
    assert "the command --only ROW" in page


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ((-2.0, -2.2, -1.9), "worse"),
        ((2.0, 2.2, 1.9), "better"),
        ((-2.0, 2.2, 0.1), "not told apart"),
        ((-3.0,), "not told apart"),
    ],
)
def test_a_verdict_says_no_more_than_its_interval(differences, words):
    interval = tables.paired_interval(list(differences), [0.0] * len(differences))
    assert tables.verdict(interval).startswith(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seeds": (1, 1)}, "seeds of a comparison must differ"),
        ({"seeds": ()}, "at least one method"),
        ({"tuning_cell": "B=3"}, "no cell 'B=3'"),
        ({"passes": 0}, "passes must be positive"),
        ({"variants": (Variant("x", "neuklip"),)}, "there is no method 'neuklip'"),
        ({"cells": (Cell("one", {"batch_size": 1}),), "tuning_cell": None}, "batch_size must be at least 2"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(GRID, **change).check()


def test_the_named_grids_are_whole_and_their_configuration_is_json():
    for grid in GRIDS.values():
        grid.check()
        names = [row.name for row in (*grid.rows(), *grid.tuning_rows())]
        assert len(set(names)) == len(names)
        assert json.loads(json.dumps(grid.as_json())) == grid.as_json()
    assert len(list(get_grid("map").rows())) == 6 * 4 * 2
    with pytest.raises(ValueError, match="did you mean 'map'"):
        get_grid("mapp")


def test_names_of_rows_are_file_names():
    assert plain("B=32 tau=.05 / x") == "B32-tau.05-x"
