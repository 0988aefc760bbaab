"""A comparison's rows: the same budget for all, learning rates chosen on validation, failures kept."""

import json
from dataclasses import replace

import pytest

from neuclip_lib import data
from neuclip_lib.studies import measure, tables
from neuclip_lib.studies.grid import Cell, Grid, Variant, config_of, plain
from neuclip_lib.studies.keep import open_study
from neuclip_lib.studies.known import GRIDS, get_grid
from neuclip_lib.training.step import Diverged

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
    facts = {**measure.facts_of(row), "lr": row.rate or 2e-3, "error": error}
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


def test_options_of_the_whole_comparison_hold_in_every_row_and_give_way_to_those_of_cell_and_variant():
    common = {"prototypes.m": 32, "batch_size": 4, "prototypes.updates": 7}
    rows = {row.name: row for row in GRID.rows()}
    grid = replace(GRID, options=common)
    plain_row = config_of(grid, rows["B8_gcl-batch_s0"], pairs=100, learning_rate=None)
    wide = config_of(grid, rows["B8_wide_s0"], pairs=100, learning_rate=None)
    assert (plain_row.prototypes.m, plain_row.prototypes.updates, plain_row.batch_size) == (32, 7, 8)
    assert (wide.prototypes.m, wide.prototypes.updates) == (64, 7)
    assert grid.as_json()["options"] == common
    assert grid.as_json()["config"]["prototypes"]["m"] == 32


def test_passes_are_counted_in_the_pairs_that_the_rows_run_trains_on():
    # The tiny preset makes 256 captions; the set itself would make many more.
    row = next(GRID.rows())
    config = measure.row_config(GRID, row)
    pairs = data.load("captions", "train+validation", n=256)
    assert config.data_options == {"n": 256}
    assert config.steps == round(3 * (len(pairs) // 8)) < 100
    tuned = measure.row_config(GRID, next(GRID.tuning_rows()))
    assert tuned.steps == round(3 * (len(data.load("captions", "train", n=256)) // 16))
    with pytest.raises(ValueError, match="a batch of 512 is more than the"):
        measure.row_config(
            replace(GRID, cells=(Cell("B=16", {"batch_size": 512}),)),
            replace(row, cell=Cell("B=16", {"batch_size": 512})),
        )


def study_of(tmp_path, scores=(4.0, 3.0, 5.0, 9.0)):
    """A study whose learning rates are chosen: 1e-3 for gcl-batch, 2e-3 for wide."""
    kept = open_study(tmp_path / "shape", "command", GRID.as_json(), GRID.seeds)
    for row, score in zip(GRID.tuning_rows(), scores, strict=True):
        kept.write(row.name, result(row, score))
    return kept


def test_a_row_at_another_rate_than_the_chosen_one_is_refused(tmp_path):
    kept = study_of(tmp_path)
    rows = {row.name: row for row in GRID.rows()}
    kept.write("B8_gcl-batch_s0", result(rows["B8_gcl-batch_s0"], 50.0) | {"lr": 1e-3})
    kept.write("B8_wide_s0", result(rows["B8_wide_s0"], 51.0) | {"lr": 2e-3})
    assert len(tables.read(GRID, kept).results) == 2
    # A rate that had failed is measured again and turns out to be the best.
    kept.write("B16_gcl-batch_lr0.002", result(list(GRID.tuning_rows())[1], 8.0))
    with pytest.raises(RuntimeError, match=r"B8_gcl-batch_s0 at 0.001, chosen is 0.002\n"):
        tables.read(GRID, kept)
    kept.forget("B16_gcl-batch_lr0.002")  # not chosen yet: nothing to hold it against
    assert len(tables.read(GRID, kept).results) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed is 1 there and 0 in this run"),
        ({"variant": "gcl-batch"}, "variant is 'gcl-batch' there"),
        ({"split": "tune"}, "split is 'tune' there"),
        ({"cell": "B=16"}, "cell is 'B=16' there"),
        ({"method": None}, "method is None there"),
        ({"error": 3}, "does not say whether the run failed"),
        ({"r@1": None}, "r@1 is None"),
        ({"unseen": []}, r"unseen is \[\]"),
    ],
)
def test_figures_of_another_run_are_not_taken_for_this_ones(tmp_path, change, words):
    kept = study_of(tmp_path)
    row = next(row for row in GRID.rows() if row.name == "B8_wide_s0")
    kept.write(row.name, result(row, 51.0) | change)
    with pytest.raises(RuntimeError, match=words):
        tables.read(GRID, kept)


def test_the_setting_that_chooses_rates_cannot_move_and_more_settings_may_come(tmp_path):
    grid = replace(GRID, tuning_cell=None)
    open_study(tmp_path / "shape", "command", grid.as_json(), grid.seeds)
    more = replace(grid, cells=(*grid.cells, Cell("B=4", {"batch_size": 4})))
    open_study(tmp_path / "shape", "command", more.as_json(), grid.seeds, growing=("variants", "cells"))
    front = replace(more, cells=more.cells[::-1])
    with pytest.raises(RuntimeError, match="tuning_cell differ"):
        open_study(tmp_path / "shape", "command", front.as_json(), grid.seeds, growing=("variants", "cells"))


def test_tables_show_every_seed_that_is_kept(tmp_path):
    kept = study_of(tmp_path)
    for row in GRID.rows():
        kept.write(row.name, result(row, 50.0 + row.seed) | {"lr": 1e-3 if row.variant.name == "gcl-batch" else 2e-3})
    page = tables.report(tables.read(replace(GRID, seeds=(1,)), kept), "the command")
    assert "8 of 8 runs" in page
    assert "over the seeds 0, 1;" in page


def test_a_run_that_diverges_is_a_result_and_one_that_cannot_be_measured_is_not(tmp_path, monkeypatch):
    kept = study_of(tmp_path)
    row = next(GRID.rows())

    def broken(error):
        def train(config, out):
            raise error

        monkeypatch.setattr(measure, "train", train)

    broken(Diverged("not finite"))
    assert measure.measure_row(GRID, row, kept, tmp_path)["error"] == "not finite"
    broken(RuntimeError("another process is training in there"))
    with pytest.raises(RuntimeError, match="another process"):
        measure.measure_row(GRID, row, kept, tmp_path)
    assert not kept.has(row.name)


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
        ({"passes": float("inf")}, "passes must be positive and finite"),
        ({"learning_rates": (0.0,)}, "optim.lr must be above 0"),
        ({"learning_rates": (-1.0, 1e-3)}, "optim.lr must be above 0"),
        ({"learning_rates": (1e-3, 1.0000001e-3)}, "two runs would be kept as"),
        ({"variants": (Variant("a b", "neuclip"), Variant("A=-b", "neuclip"))}, "two runs would be kept as"),
        ({"study": "../elsewhere"}, "is that of a folder"),
        ({"study": ""}, "is that of a folder"),
        ({"study": ".hidden"}, "is that of a folder"),
        ({"study": "a/b"}, "is that of a folder"),
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
