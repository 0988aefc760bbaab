"""Evaluating a run: every figure against its own computation, files, splits, and runs that cannot be evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from neuclip_lib import data as data_sets
from neuclip_lib import presets
from neuclip_lib.evaluation.embed import embed_pairs
from neuclip_lib.evaluation.geometry import geometry
from neuclip_lib.evaluation.zero_shot import zero_shot
from neuclip_lib.training import Run, checkpoint, train
from neuclip_lib.training import evaluate as module
from neuclip_lib.training.evaluate import evaluate, evaluation_file, pictures_folder

# With these the validation part has two pairs of one concept, and the seed changes the pictures.
OPTIONS = {"n": 400, "seed": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with a shadow, never written to by a test."""
    config = presets.tiny("neuclip", data_options=OPTIONS, shadows=("openclip",), probe_every=10, error_every=20)
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(config, folder, quiet=True)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_every_figure_is_what_its_part_gives_on_the_runs_data(folder: Path) -> None:
    run = Run(folder)
    got = evaluate(run, split="validation", draw=False, quiet=True)
    pairs = data_sets.load("captions", "validation", **OPTIONS)
    assert len(pairs.group.unique()) < len(pairs)
    e1, e2 = embed_pairs(run.load_model(), pairs)
    scores, group = e1.double() @ e2.double().T, pairs.group
    hits = {"image_to_text": scores, "text_to_image": scores.T}
    for name, s in hits.items():
        right = group[:, None] == group
        best = s.masked_fill(~right, -2).amax(1, keepdim=True)
        rank = 1 + ((s >= best) & ~right).sum(1)
        for k in (1, 5, 10):
            want = 100 * float((rank <= k).double().mean())
            assert got["retrieval"][name][f"r@{k}"] == pytest.approx(want, abs=1e-9)
        assert got["retrieval"][name]["n"] == len(pairs)
    assert got["retrieval"]["chance"]["r@1"] == pytest.approx(
        100 * float((group[:, None] == group).double().mean()), rel=1e-12
    )
    tasks = {task.name: task for task in data_sets.zero_shot_tasks("captions", "validation", **OPTIONS)}
    assert got["zero_shot"].keys() == tasks.keys() and tasks
    for name, task in tasks.items():
        assert got["zero_shot"][name] == zero_shot(run.load_model(), task)
    assert got["geometry"] == geometry(e1, e2)


def test_the_normalizer_error_is_what_the_run_measured_after_its_last_step(folder: Path) -> None:
    run = Run(folder)
    got = evaluate(run, draw=False, quiet=True)["normalizer_error"]
    (row,) = [row for row in run.metrics("normalizer_error") if row["step"] == 20]
    assert list(got["estimators"]) == ["neuclip", "openclip", "batch"]
    assert got["estimators"] == row["estimators"]
    own = {key: value for key, value in got.items() if key != "estimators"}
    assert own == got["estimators"]["neuclip"]
    assert own["n"] == len(run.train_pairs())
    assert own["mse"] != got["estimators"]["openclip"]["mse"]


def test_the_file_holds_what_is_returned_a_second_time_is_the_same_and_the_run_is_left_alone(folder: Path) -> None:
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    random = torch.get_rng_state()
    returned = evaluate(folder, quiet=True)
    assert torch.equal(random, torch.get_rng_state())
    assert {path: path.read_bytes() for path in kept} == kept
    first = (folder / "evaluation.json").read_bytes()
    assert json.loads(first) == returned
    drawn = {path.name: path.read_bytes() for path in (folder / "pictures").iterdir()}
    assert sorted(drawn) == ["curves.png", "image-to-text.png", "text-to-image.png"]
    evaluate(folder, quiet=True)
    assert (folder / "evaluation.json").read_bytes() == first
    assert {path.name: path.read_bytes() for path in (folder / "pictures").iterdir()} == drawn
    assert [path.name for path in folder.iterdir() if path.name.endswith((".tmp", ".old"))] == []
    run, settings = returned["run"], returned["settings"]
    assert (run["method"], run["steps"], run["batch_size"], run["seed"]) == ("neuclip", 20, 16, 0)
    assert (settings["split"], settings["pairs"]) == ("test", returned["retrieval"]["image_to_text"]["n"])
    assert settings["content_hash"] == Run(folder).train_pairs().content_hash
    assert settings["tau"] == pytest.approx(0.05)


def test_another_split_has_its_own_file(folder: Path) -> None:
    evaluate(folder, draw=False, quiet=True)
    before = (folder / "evaluation.json").read_bytes()
    got = evaluate(folder, split="validation", quiet=True)
    assert (folder / "evaluation.json").read_bytes() == before
    assert json.loads((folder / "evaluation-validation.json").read_text()) == got
    assert got["settings"]["split"] == "validation"
    assert got["settings"]["pairs"] == len(data_sets.load("captions", "validation", **OPTIONS))
    run = Run(folder)
    assert evaluation_file(run) == evaluation_file(run, "test") == folder / "evaluation.json"
    assert pictures_folder(run, "validation").is_dir() and not pictures_folder(run).exists()


def test_an_error_on_the_way_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(folder, draw=False, quiet=True)
    before = (folder / "evaluation.json").read_bytes()

    def fails(*_: Any) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(module, "geometry", fails)
    with pytest.raises(RuntimeError, match="no more memory"):
        evaluate(folder, draw=False, quiet=True)
    assert (folder / "evaluation.json").read_bytes() == before


def test_runs_that_cannot_be_evaluated_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing is not the folder of a run: it does not exist"):
        evaluate(tmp_path / "nothing")
    with pytest.raises(RuntimeError, match=r"has no config\.json"):
        evaluate(tmp_path)
    with pytest.raises(ValueError, match="tset"):
        evaluate(folder, split="tset")
    with pytest.raises(ValueError, match="there is no device 'cuda:77' on this machine"):
        evaluate(folder, device="cuda:77")
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        evaluate(folder, batch_size=0)
    shutil.rmtree(checkpoint.step_folder(folder / "checkpoints", 20))
    with pytest.raises(RuntimeError, match="not finished: 15 of 20 steps are saved; run the command"):
        evaluate(folder)
    assert not (folder / "evaluation.json").exists()


def test_a_run_that_tunes_is_evaluated_on_validation_and_never_on_test(tmp_path: Path) -> None:
    config = presets.tiny("openclip", data_options={"n": 120}, steps=3, warmup=1, split="tune", probe_every=0)
    run = train(config, tmp_path / "run", quiet=True)
    got = evaluate(run, draw=False, quiet=True)
    assert got["settings"]["split"] == "validation"
    assert (run.folder / "evaluation.json").is_file()
    with pytest.raises(ValueError, match="run for tuning"):
        evaluate(run, split="test", quiet=True)


def test_a_run_without_a_step_says_why_there_is_no_normalizer_error(tmp_path: Path) -> None:
    config = presets.tiny("neuclip", data_options={"n": 120}, steps=0, warmup=0, probe_every=0, error_every=0)
    got = evaluate(train(config, tmp_path / "run", quiet=True), draw=False, quiet=True)["normalizer_error"]
    assert (got["mse"], got["n"], got["estimators"]) == (None, 0, {})
    assert "no step was taken" in got["why"]
