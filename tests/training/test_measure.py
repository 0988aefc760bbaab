"""The figures of a step against sums written out by hand; the augmentation's seeds."""

import math

import pytest
import torch

from neuclip_lib import presets
from neuclip_lib.training import train
from neuclip_lib.training.feed import step_generator
from neuclip_lib.training.measure import Window, normalizer_errors
from neuclip_lib.training.step import Seen


def seen(loss, alpha, log_x):
    nothing = (torch.zeros(2), torch.zeros(2))
    one = torch.tensor(1.0)
    return Seen(torch.tensor(loss), nothing, alpha, log_x, one, nothing, torch.arange(2), one, torch.tensor(False))


def test_a_row_is_the_mean_over_steps_and_the_largest_weight_of_either_side():
    window = Window(torch.device("cpu"))
    alpha = torch.tensor([0.0, 1.0]), torch.tensor([2.0, -1.0])
    log_x = torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.2])  # the text side holds the largest weight, e^1.2
    window.add(seen(3.0, alpha, log_x))
    window.add(seen(5.0, log_x, log_x))
    row = window.take()
    r = [1 - math.exp(gap) for gap in (0.5, -1.0, -1.0, 1.2)]
    assert row["loss"] == pytest.approx(4.0)
    assert row["mean_alpha"] == pytest.approx((2.0 / 4 + 1.7 / 4) / 2)
    assert row["mean_r"] == pytest.approx(sum(r) / 4 / 2, abs=1e-6)
    assert row["largest_weight"] == pytest.approx(math.exp(1.2), rel=1e-6)
    assert window.take() == {"loss": 0.0, "mean_alpha": 0.0, "mean_r": 0.0, "largest_weight": 0.0}


def test_a_loss_without_a_normalizer_has_no_such_figures_and_skipped_steps_are_counted():
    window = Window(torch.device("cpu"))
    nothing, one = (torch.zeros(2), torch.zeros(2)), torch.tensor(1.0)
    for overflowed in (False, True, True):
        flag = torch.tensor(overflowed)
        window.add(Seen(torch.tensor(2.0), None, None, None, one, nothing, torch.arange(2), one, flag))
    other = Window(torch.device("cpu"))
    other.load_state_dict(window.state_dict())
    assert window.take() == other.take() == {"loss": 2.0, "overflows": 2}


def test_ranks_report_the_mean_of_their_figures_and_the_largest_of_their_weights(on_ranks):
    alphas = torch.tensor([[0.0, 1.0], [2.0, -1.0]])

    def figures(ranks):
        window = Window(torch.device("cpu"), ranks)
        own = alphas[ranks.rank] if ranks.size > 1 else alphas.flatten()
        window.add(seen(3.0, (own, own), (own + 0.1 * own.abs(), own)))
        return window.take()

    alone = on_ranks(1, figures)[0]
    for shared in on_ranks(2, figures):
        assert shared == pytest.approx(alone, rel=1e-6)


def test_every_step_and_every_seed_moves_images_differently():
    draws = {torch.randint(0, 2**60, (1,), generator=step_generator(*key)).item() for key in [(0, 3), (0, 4), (1, 3)]}
    assert len(draws) == 3
    again = torch.randint(0, 2**60, (1,), generator=step_generator(0, 3)).item()
    assert again in draws


def test_a_learned_temperature_is_the_one_that_the_error_is_measured_at(tmp_path):
    config = presets.tiny("openclip", learned=True, **{"temperature.lr": 0.05})
    run = train(config, tmp_path / "run", quiet=True)
    row, tau = run.metrics("normalizer_error")[-1], run.tau()
    assert abs(tau - config.temperature.init) > 0.1 * config.temperature.init
    assert row["tau"] == pytest.approx(tau, rel=1e-6)
    own = {"openclip": run.load_normalizer()}
    assert own["openclip"] is not None
    again = normalizer_errors(run.load_model(), run.train_pairs(), own, torch.tensor(tau), config.batch_size)
    assert row["estimators"]["openclip"]["mse"] == pytest.approx(again["openclip"]["mse"], rel=1e-5)
