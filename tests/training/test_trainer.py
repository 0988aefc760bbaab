"""The trainer's folder, record, shadows, errors and other ends."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from neuclip_lib import data as data_sets
from neuclip_lib.evaluation.embed import embed_pairs
from neuclip_lib.models import build_model
from neuclip_lib.training import Run, TrainConfig, checkpoint, measure, train
from neuclip_lib.training.feed import Feed, step_generator
from neuclip_lib.training.step import Batch

Small = Callable[..., TrainConfig]
Weights = Callable[[Path], bytes]


def test_log_checkpoint_and_schedule_count_the_same_steps(tmp_path: Path, small: Small) -> None:
    config = small("neuclip", steps=12, log_every=5, probe_every=6, error_every=12, checkpoint_every=5, warmup=4)
    run = train(config, tmp_path / "run", quiet=True)
    assert [row["step"] for row in run.metrics("train")] == [5, 10, 12]
    assert [row["step"] for row in run.metrics("probe")] == [0, 6, 12]
    assert [row["step"] for row in run.metrics("normalizer_error")] == [12]
    assert checkpoint.steps_in(run.checkpoints) == [10, 12]
    last = checkpoint.load_state(run.checkpoint())
    assert last["step"] == run.step == 12
    assert {entry["step"].item() for entry in last["optimizer"]["state"].values()} == {12.0}
    assert last["normalizer"]["counters"][3] == 12
    peak = 2e-3
    assert run.metrics("train")[0]["learning_rate"] == peak  # the fifth step is the first after the warm-up
    assert run.metrics("train")[-1]["learning_rate"] == last["optimizer"]["param_groups"][0]["lr"]
    per_epoch = run.versions()["data"]["pairs"] // 16
    assert [row["epoch"] for row in run.metrics("train")] == [4 // per_epoch, 9 // per_epoch, 11 // per_epoch]


def test_the_train_row_is_the_mean_over_its_steps_and_the_maximum_of_the_weights(tmp_path: Path, small: Small) -> None:
    fine = train(small("neuclip", steps=6, log_every=1), tmp_path / "fine", quiet=True).metrics("train")
    rows = train(small("neuclip", steps=6, log_every=3), tmp_path / "coarse", quiet=True).metrics("train")
    for row, part in zip(rows, (fine[:3], fine[3:]), strict=True):
        for name in ("loss", "mean_alpha", "mean_r"):
            assert row[name] == pytest.approx(sum(one[name] for one in part) / 3, rel=1e-5, abs=1e-7)
        assert row["largest_weight"] == max(one["largest_weight"] for one in part)
        assert row["gradient_norm"] == part[-1]["gradient_norm"]


def test_the_probe_is_the_exact_loss_written_out(tmp_path: Path, small: Small) -> None:
    run = train(small("openclip", probe_every=20), tmp_path / "run", quiet=True)
    model, pairs = run.load_model(), run.train_pairs()
    e1, e2 = (e.double() for e in embed_pairs(model, pairs))
    n, tau, total = len(pairs), run.tau(), 0.0
    s = e1 @ e2.T
    for i in range(n):
        others = [j for j in range(n) if j != i]
        total += 0.5 * torch.exp((s[i, others] - s[i, i]) / tau).mean().log().item()
        total += 0.5 * torch.exp((s[others, i] - s[i, i]) / tau).mean().log().item()
    row = run.metrics("probe")[-1]
    assert row["n"] == n < measure.PROBE_SIZE
    assert row["loss"] == pytest.approx(total / n, abs=1e-4)
    assert run.metrics("probe")[0]["loss"] > row["loss"] + 0.3


def test_measuring_and_shadows_leave_the_weights_alone(tmp_path: Path, small: Small, weights: Weights) -> None:
    state = torch.get_rng_state()
    plain = train(small("openclip", log_every=20), tmp_path / "plain", quiet=True)
    watched = train(
        small("openclip", shadows=("neuclip", "gcl-batch"), probe_every=3, error_every=4, checkpoint_every=7),
        tmp_path / "watched",
        quiet=True,
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert weights(plain.folder) == weights(watched.folder)
    row = watched.metrics("normalizer_error")[-1]
    assert list(row["estimators"]) == ["openclip", "neuclip", "gcl-batch", "batch"]
    assert row["estimators"]["gcl-batch"]["mse"] == row["estimators"]["batch"]["mse"] > 0
    assert watched.load_shadows()["neuclip"].state_dict()["counters"][3] == 20


def test_the_order_and_the_augmentation_are_functions_of_seed_and_step(small: Small) -> None:
    pairs = data_sets.load("captions", "train", n=128)
    model = build_model("small", pairs.vocabulary_texts(), pairs.image_size, 0)

    def batch(seed: int, step: int, pixels: int = 2) -> Batch:
        return Feed(pairs, model, 16, seed, pixels, torch.device("cpu")).batch(step)

    first, again = batch(0, 3), batch(0, 3)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.index, again.index)
    assert not torch.equal(batch(1, 3).index, first.index)
    draws = {step_generator(seed, step).initial_seed() for seed in range(3) for step in range(5)}
    assert len(draws) == 15
    still = batch(0, 3, pixels=0)
    assert torch.equal(still.index, first.index)
    assert not torch.equal(still.images, first.images)
    per_epoch = len(pairs) // 16
    seen = torch.cat([batch(0, step).index for step in range(per_epoch)])
    assert len(seen.unique()) == len(seen)
    places = {int(index): place for place, index in enumerate(pairs.index)}
    i = torch.tensor([places[int(index)] for index in first.index])
    assert torch.equal(first.tokens, model.tokenize(pairs.captions_at(i)))


def test_a_folder_of_another_config_is_refused_with_the_fields(tmp_path: Path, small: Small) -> None:
    config = small("openclip", steps=2)
    run = train(config, tmp_path / "run", quiet=True)
    other = dataclasses.replace(config, steps=3, optim=dataclasses.replace(config.optim, lr=0.5))
    with pytest.raises(RuntimeError, match=r"another config:\n  optim.lr: 0.002 in the folder, 0.5 now\n  steps: 2"):
        train(other, run.folder, quiet=True)
    with pytest.raises(RuntimeError, match="resuming is switched off"):
        train(config, run.folder, resume=False, quiet=True)
    assert train(dataclasses.replace(config, preset="elsewhere"), run.folder, quiet=True).finished


def test_remains_without_a_config_are_not_written_over(tmp_path: Path, small: Small) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious\n")
    with pytest.raises(RuntimeError, match=r"has metrics.jsonl but no config.json"):
        train(small("openclip"), tmp_path, quiet=True)
    assert (tmp_path / "metrics.jsonl").read_text() == "precious\n"


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path, small: Small) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(RuntimeError, match="another process is training in"):
        train(small("openclip"), tmp_path, quiet=True)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sets, "load", lambda *a, **k: pytest.fail("work has started"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write in .*file/run.*choose another folder"):
        train(small("openclip"), tmp_path / "file" / "run", quiet=True)


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(tmp_path: Path, small: Small) -> None:
    config = small("openclip", batch_size=129)
    with pytest.raises(ValueError, match=r"batch_size 129 is larger than the \d+ pairs of 'captions'"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "config.json").exists()


def test_data_that_changed_since_the_start_are_refused(tmp_path: Path, small: Small) -> None:
    config = small("openclip", steps=3)
    run = train(config, tmp_path / "run", quiet=True)
    facts = run.versions()
    facts["data"]["content_hash"] = "0" * 64
    (run.folder / "versions.json").write_text(json.dumps(facts))
    checkpoint.discard_after(run.checkpoints, None)
    with pytest.raises(RuntimeError, match="has changed since the run"):
        train(config, run.folder, quiet=True)
    with pytest.raises(RuntimeError, match="differs from the one of"):
        run.train_pairs()


def test_taken_up_with_other_versions_it_says_so_and_writes_it_down(
    tmp_path: Path, small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("openclip", steps=4, checkpoint_every=2)
    run = train(config, tmp_path / "run", quiet=True)
    assert run.versions()["resumed"] == []
    facts = run.versions()
    facts["versions"]["torch"] = "2.0.0"
    (run.folder / "versions.json").write_text(json.dumps(facts))
    checkpoint.discard_after(run.checkpoints, 2)
    train(config, run.folder, quiet=True)
    now = version("torch")
    assert f"the last bits may differ: torch 2.0.0 -> {now}" in capsys.readouterr().err
    assert run.versions()["resumed"] == [{"step": 2, "changed": {"torch": ["2.0.0", now]}}]


def test_taken_up_it_says_from_which_step(tmp_path: Path, small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    config = small("openclip", steps=4, checkpoint_every=2)
    run = train(config, tmp_path / "run")
    assert "going on" not in capsys.readouterr().out
    checkpoint.discard_after(run.checkpoints, 2)
    train(config, run.folder)
    assert "going on from step 2 of 4" in capsys.readouterr().out


def test_no_steps_at_all_end_with_a_checkpoint(tmp_path: Path, small: Small) -> None:
    run = train(small("neuclip", steps=0), tmp_path / "run", quiet=True)
    assert run.finished
    assert run.metrics() == []
    assert run.load_model().dim > 0
    assert train(small("neuclip", steps=0), run.folder, quiet=True).finished


def test_stale_launcher_variables_stop_it_before_anything_is_written(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=4"):
        train(small("openclip"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_with_the_state_before_that_step(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    good = train(small("neuclip", steps=20, checkpoint_every=5, keep_last=None), tmp_path / "good", quiet=True)
    real = Feed.batch

    def poisoned(feed: Feed, step: int) -> Batch:
        batch = real(feed, step)
        if step == 10:
            batch.images[2] = float("inf")
        return batch

    monkeypatch.setattr(Feed, "batch", poisoned)
    config = small("neuclip", steps=20, checkpoint_every=7, keep_last=None)
    with pytest.raises(RuntimeError, match=r"not a finite number: step 11, loss nan.*Try a smaller optim.lr") as error:
        train(config, tmp_path / "bad", quiet=True)
    assert str(tmp_path / "bad" / "failure") in str(error.value)
    saved, expected = tmp_path / "bad" / "failure", checkpoint.step_folder(good.checkpoints, 10)
    assert (saved / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    state, other = checkpoint.load_state(saved), checkpoint.load_state(expected)
    assert torch.equal(state["normalizer"]["w"], other["normalizer"]["w"])
    assert torch.equal(state["normalizer"]["queue"], other["normalizer"]["queue"])
    seen = json.loads((tmp_path / "bad" / "failure.json").read_text())
    assert seen["step"] == 11
    assert len(seen["samples"]) == 16
    # The cause removed, the run goes on from its checkpoint and the report of the failure goes away.
    monkeypatch.undo()
    run = train(config, tmp_path / "bad", quiet=True)
    assert weights(run.folder) == weights(good.folder)
    assert not saved.exists()
    assert not saved.with_suffix(".json").exists()


def test_a_run_opens_its_parts_and_refuses_what_is_not_there(tmp_path: Path, small: Small) -> None:
    run = train(small("neuclip", steps=4, checkpoint_every=2), tmp_path / "run", quiet=True)
    again = Run(str(run.folder))
    assert again.config == run.config
    assert again.load_normalizer().state_dict()["counters"][3] == 4
    assert again.load_normalizer(2).state_dict()["counters"][3] == 2
    assert again.tau() == pytest.approx(0.05)
    assert again.versions()["versions"]["torch"] == version("torch")
    assert again.eval_pairs().split == "test"
    with pytest.raises(RuntimeError, match=r"no checkpoint of step 3 \(steps saved: 2, 4\)"):
        again.load_model(3)
    with pytest.raises(RuntimeError, match=r"not the folder of a run: it does not exist"):
        Run(tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match=r"has no config.json"):
        Run(tmp_path)


def test_a_run_that_tunes_never_gives_test_away(tmp_path: Path, small: Small) -> None:
    run = train(small("openclip", steps=0, split="tune"), tmp_path / "run", quiet=True)
    assert (run.train_pairs().split, run.eval_pairs().split) == ("train", "validation")
    for split in ("test", "all"):
        with pytest.raises(ValueError, match="a run for tuning"):
            run.eval_pairs(split)


def test_a_warm_up_longer_than_the_run_warns(tmp_path: Path, small: Small) -> None:
    with pytest.warns(UserWarning, match="warm-up of 2 steps is longer than the run of 1"):
        train(small("openclip", steps=1), tmp_path / "run", quiet=True)


def test_threads_are_given_back(tmp_path: Path, small: Small) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(small("openclip", steps=2, threads=1), tmp_path / "run", quiet=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_quiet_it_reports_progress_and_with_it_nothing(
    tmp_path: Path, small: Small, capfd: pytest.CaptureFixture[str]
) -> None:
    train(small("openclip", steps=2), tmp_path / "run", quiet=True)
    assert capfd.readouterr() == ("", "")
    train(small("openclip", steps=2), tmp_path / "run")
    assert "is finished: 2 steps of openclip" in capfd.readouterr().out


def test_the_default_folder_is_named_by_preset_and_method(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "NEUCLIP_HOME", str(tmp_path))
    run = train(small("openclip", steps=2), quiet=True)
    assert run.folder == tmp_path.resolve() / "runs" / "tiny" / "openclip"
