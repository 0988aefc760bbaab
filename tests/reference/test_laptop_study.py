"""What the project says of the laptop preset, against the stored figures and, in the full tests, against new runs."""

import os
import statistics

import pytest

from neuclip_lib import presets
from neuclip_lib.course.source import course_root
from neuclip_lib.files import read_json
from neuclip_lib.training import train
from neuclip_lib.training.config import to_json

SECOND_FILLING = 200
FULL = pytest.mark.skipif(os.environ.get("NEUCLIP_FULL") != "1", reason="minutes; part of make test-full")


def stored(method):
    return read_json(course_root() / "results" / "laptop" / f"{method}.json")


def share_of_the_batch_error(rows):
    """Mean square error of the prototypes over that of the batch's guess, after the second filling."""
    late = [row for row in rows if row["step"] > SECOND_FILLING]
    assert len(late) >= 4
    return statistics.fmean(row["neuclip"] for row in late) / statistics.fmean(row["batch"] for row in late)


def measured(run):
    return [
        {"step": row["step"], **{name: one["mse"] for name, one in row["estimators"].items()}}
        for row in run.metrics("normalizer_error")
    ]


def test_stored_runs_are_the_preset_as_it_is_now():
    for method in ("openclip", "gcl-batch", "neuclip"):
        shadows = ["neuclip"] if method == "openclip" else []
        assert stored(method)["config"] == to_json(presets.laptop(method, shadows=tuple(shadows)))


def test_all_three_find_two_fifths_and_both_decoupled_losses_are_ahead_of_openclip():
    recall = {name: stored(name)["retrieval"]["image_to_text"] for name in ("openclip", "gcl-batch", "neuclip")}
    assert {one["n"] for one in recall.values()} == {1040}
    assert min(one["r@1"] for one in recall.values()) >= 40
    assert min(recall["gcl-batch"]["r@1"], recall["neuclip"]["r@1"]) > recall["openclip"]["r@1"]


def test_the_prototypes_that_rode_along_have_less_than_two_fifths_of_the_batch_error():
    rows = [{"step": row["step"], **row["mse"]} for row in stored("openclip")["curves"]["normalizer_error"]]
    assert share_of_the_batch_error(rows) <= 0.4


@FULL
@pytest.mark.slow
@pytest.mark.parametrize(("updates", "learns"), [(10, True), (0, False)])
def test_learning_and_not_filling_brings_the_error_down(updates, learns, tmp_path):
    """With restarts alone the prototypes are a queue of recent embeddings; their updates must do the rest."""
    config = presets.laptop("openclip", shadows=("neuclip",), updates=updates)
    assert (share_of_the_batch_error(measured(train(config, tmp_path, quiet=True))) <= 0.4) == learns
