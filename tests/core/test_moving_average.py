"""The moving average: mirror and proximal steps, first visits, repeated samples, rates, small and large numbers."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.normalizers import BatchNormalizer, MovingAverageNormalizer, MovingAverageOptions
from neuclip_lib.normalizers.moving_average import gamma_of_epoch, log_mean_of_repeats, suggested_gamma
from neuclip_lib.ranks import ONE

pytestmark = pytest.mark.quick
F64 = torch.float64
RATES = ["constant", "cosine", "per sample"]
WORLDS = [1, 2, 3, 4]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(*shape, seed=0):
    return normalize(random(*shape, seed=seed), dim=-1)


def scalar(value):
    return torch.tensor(value, dtype=F64)


def normalizer(n=20, steps=2, epochs=6, rate="constant", ranks=ONE, dtype=F64, **options):
    options = {"gamma": 0.3, "eps": 1e-3, "log_step": 0.5, **options}
    return MovingAverageNormalizer(n, steps, epochs, rate, MovingAverageOptions(**options), ranks, dtype=dtype)


def feed(average, index, log_g, update=True):
    """Shows one batch whose log_g ``[2, B]`` is given; gives alpha of this rank's anchors ``[2, b]``."""
    ranks, index = average.table.ranks, torch.as_tensor(index)
    own = len(index) // ranks.size
    rows = slice(ranks.rank * own, (ranks.rank + 1) * own)
    e = unit(len(index), 3).to(log_g)
    batch, mine = GlobalBatch(e, e, index, ranks=ranks, rows=rows), (log_g[0, rows], log_g[1, rows])
    if update:
        average.update(batch, mine, scalar(0.07))
    return torch.stack(average(e[rows], e[rows], mine, batch, scalar(0.07)))


def close(got, expected, bound=1e-14):
    """Within ``bound``, relative where the numbers are above 1."""
    got, expected = torch.as_tensor(got, dtype=F64), torch.as_tensor(expected, dtype=F64)
    return bool(((got - expected).abs() <= bound * expected.abs().clamp_min(1)).all())


# -- one step ---------------------------------------------------------------------------------------------------------


def f_star(y):
    return -1 - torch.log(-y)


def bregman(function, point, base):
    """``D(point, base)`` from its definition; ``base`` is held."""
    base = base.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(base).sum(), base)
    return function(point) - function(base.detach()) - slope * (point - base.detach())


def minimum(objective, low, high):
    """Where the slope, by autograd, of a function with one minimum changes sign; bisection."""
    for _ in range(200):
        middle = ((low + high) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(objective(middle).sum(), middle)
        low, high = torch.where(slope < 0, middle.detach(), low), torch.where(slope < 0, high, middle.detach())
    return (low + high) / 2


def two_steps(rate, **options):
    """Alpha before and after the step of interest, log(eps + g) of that step; epoch 1, every sample visited."""
    average = normalizer(n=8, steps=1, rate=rate, **options)
    before = feed(average, range(8), 2 * random(2, 8, seed=1))
    log_g = 2 * random(2, 8, seed=2)
    after = feed(average, range(8), log_g)
    return before, after, torch.log(average.eps + log_g.exp())


@pytest.mark.parametrize("gamma", [0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("eps", [0.0, 1e-14, 0.1])
def test_a_step_is_the_mirror_step_with_the_conjugate_as_mirror_map(gamma, eps):
    """argmin over y < 0 of gamma F'(y_t) y + D(y, y_t), F(y) = f*(y) - y (eps + g), y = -e^-alpha."""
    before, after, log_x = two_steps("constant", gamma=gamma, eps=eps)
    y_before, x = -torch.exp(-before), log_x.exp()
    start = y_before.clone().requires_grad_()
    (slope,) = torch.autograd.grad((f_star(start) - start * x).sum(), start)
    # Searched over log(-y), where the objective has one minimum too and its digits are relative ones.
    found = minimum(
        lambda a: gamma * slope * -torch.exp(-a) + bregman(f_star, -torch.exp(-a), y_before),
        torch.full_like(before, -20),
        torch.full_like(before, 20),
    )
    assert close(after, found)


@pytest.mark.parametrize("eta", [0.1, 1.0, 7.0])
def test_a_step_is_the_proximal_step_with_gamma_eta_over_one_plus_eta(eta):
    before, after, log_x = two_steps("constant", gamma=eta / (1 + eta))
    found = minimum(
        lambda a: (
            f_star(-torch.exp(-a)) + torch.exp(log_x - a) + bregman(f_star, -torch.exp(-a), -(-before).exp()) / eta
        ),
        torch.full_like(before, -20),
        torch.full_like(before, 20),
    )
    assert close(after, found)


@pytest.mark.parametrize("log_step", [-3.0, 0.5, 10.0])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_the_rate_per_sample_is_the_proximal_step_of_scent(log_step, eps):
    """argmin over alpha of e^-alpha (eps + g) + alpha + D(alpha, alpha_t)/a for the function e^-alpha."""
    before, after, log_x = two_steps("per sample", eps=eps, log_step=log_step)
    a, x = math.exp(log_step), log_x.exp()
    closed = before + torch.log(1 + a * x) - torch.log(1 + a * before.exp())
    assert close(after, closed)
    found = minimum(
        lambda alpha: torch.exp(log_x - alpha) + alpha + bregman(lambda t: torch.exp(-t), alpha, before) / a,
        torch.full_like(before, -20),
        torch.full_like(before, 20),
    )
    assert close(after, found, 1e-13)  # the objective's own rounding, of which the step's is a part of a


# -- which alpha -------------------------------------------------------------------------------------------------------


def test_gamma_one_is_the_decoupled_batch_loss():
    average = normalizer(rate="constant", gamma=1.0, steps=1, eps=1e-14)
    for step in range(3):
        index, log_g = list(range(step, step + 8)), 5 * random(2, 8, seed=step)
        alpha = feed(average, index, log_g)
        e = unit(8, 3)
        expected = BatchNormalizer(1e-14)(e, e, (log_g[0], log_g[1]), GlobalBatch(e, e), scalar(0.07))
        assert torch.equal(alpha, torch.stack(expected))


@pytest.mark.parametrize("rate", RATES)
def test_a_first_visit_in_a_late_epoch_takes_g_itself(rate):
    average = normalizer(rate=rate, steps=1)
    for step in range(5):
        feed(average, range(4), random(2, 4, seed=step))
    log_g = random(2, 4, seed=9)
    alpha = feed(average, [2, 7, 11, 3], log_g)
    assert average.epoch == 6
    assert torch.equal(average.table.values[:, [7, 11]], log_g[:, 1:3])
    assert close(alpha[:, 1:3], torch.log(1e-3 + log_g[:, 1:3].exp()))
    assert not close(alpha[:, [0, 3]], torch.log(1e-3 + log_g[:, [0, 3]].exp()), 1e-2)


@pytest.mark.parametrize("world", WORLDS)
def test_alpha_of_a_sample_never_visited_is_this_batchs_own(on_ranks, world):
    log_g = random(2, 12, seed=3)

    def run(ranks):
        average = normalizer(ranks=ranks)
        return feed(average, range(12), log_g, update=False), average.step, average.table.values

    results = on_ranks(world, run)
    assert close(torch.cat([alpha for alpha, _, _ in results], 1), torch.log(1e-3 + log_g.exp()))
    assert all(step == 0 and bool((values == -math.inf).all()) for _, step, values in results)


def test_alpha_without_an_update_is_the_tables():
    average = normalizer()
    first = random(2, 4, seed=1)
    feed(average, [3, 1, 4, 5], first)
    alpha = feed(average, [5, 9, 3, 10], random(2, 4, seed=2), update=False)
    assert close(alpha[:, [0, 2]], torch.log(1e-3 + first[:, [3, 0]].exp()))


# -- repeated samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8, 13, 64])
@pytest.mark.parametrize("names", [1, 2, 5, 40])
def test_log_mean_of_repeats_equals_brute_force(size, names):
    index = torch.randint(names, (size,), generator=torch.Generator().manual_seed(size)) * 7
    x = 3 * random(2, size, seed=names)
    got = log_mean_of_repeats(index, x)
    for side in (0, 1):
        for i in range(size):
            values = [math.exp(v) for v, j in zip(x[side].tolist(), index.tolist(), strict=True) if j == index[i]]
            assert close(got[side, i], math.log(sum(values) / len(values)))
            if len(values) == 1:
                assert got[side, i] == x[side, i]
    for i in index.unique():
        assert len(got[0, index == i].unique()) == 1  # the same bits, so that any of them may be written


def test_log_mean_of_repeats_does_not_overflow():
    x = torch.tensor([200.0, -200.0, 200.0, -200.0, -200.0, 0.0])
    got = log_mean_of_repeats(torch.tensor([4, 9, 4, 9, 4, 9]), x)
    assert got.tolist() == pytest.approx([200 + math.log(2 / 3), -math.log(3)] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("world", "index"),
    [
        (1, [5, 5, 2, 7]),
        (2, [5, 2, 5, 7]),
        (2, [5, 5, 2, 7]),
        (3, [5, 2, 5, 7, 5, 1]),
        (4, [5, 5, 5, 2, 7, 5, 7, 1]),
    ],
)
def test_a_repeated_sample_moves_once_by_the_mean_of_its_g(on_ranks, world, index):
    log_g = random(2, len(index), seed=4)

    def run(ranks):
        average = normalizer(ranks=ranks, steps=1)
        feed(average, [5, 2, 7, 1] * (len(index) // 4) + [3] * (len(index) % 4), torch.zeros(2, len(index), dtype=F64))
        return feed(average, index, log_g), average.state_dict()["log_u"]

    results = on_ranks(world, run)
    alpha = torch.cat([result[0] for result in results], 1)
    for i in set(index):
        places = [place for place, other in enumerate(index) if other == i]
        u = 0.7 * 1 + 0.3 * log_g[:, places].exp().mean(1)
        assert close(results[0][1][:, i], u.log())
        assert close(alpha[:, places], torch.log(1e-3 + u)[:, None].expand(2, len(places)))


# -- rates ------------------------------------------------------------------------------------------------------------


def test_rates_by_hand():
    """Cosine from 1 to .2 over 18 epochs (CC3M's recipe): cos(pi/3) = 1/2 at 6, 0 at 9, -1/2 at 12."""
    assert [gamma_of_epoch("constant", epoch, 0.2, 18) for epoch in (0, 1, 2, 50)] == [1, 0.2, 0.2, 0.2]
    cosine = [gamma_of_epoch("cosine", epoch, 0.2, 18) for epoch in (0, 6, 9, 12, 18, 19, 36)]
    assert cosine == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], abs=1e-15)
    assert [gamma_of_epoch("cosine", epoch, 0.2, 1) for epoch in (0, 1, 2)] == [1, 0.2, 0.2]
    assert [gamma_of_epoch("cosine", epoch, 1.0, 4) for epoch in range(6)] == [1] * 6
    assert gamma_of_epoch("per sample", 0, 0.2, 18) == 1
    with pytest.raises(ValueError, match=r"in epoch 1 .* every sample has its own gamma"):
        gamma_of_epoch("per sample", 1, 0.2, 18)
    with pytest.raises(ValueError, match="must be one of 'constant', 'cosine', 'per sample', got 'linear'"):
        gamma_of_epoch("linear", 0, 0.2, 18)


def test_the_suggested_gamma():
    """4.177/E^.7265, by logarithms: E = 10, 4.177/5.3272; E = 37, 4.177/13.782."""
    assert [suggested_gamma(epochs) for epochs in (1, 3, 7)] == [1, 1, 1]
    assert suggested_gamma(10) == pytest.approx(0.7841, abs=5e-5)
    assert suggested_gamma(37) == pytest.approx(0.3031, abs=5e-5)


def test_what_is_left_to_the_run_follows_its_epochs():
    options = MovingAverageOptions()
    assert (options.gamma, options.decay_epochs, options.eps, options.log_step) == (None, None, 1e-14, 10.0)
    for epochs, gamma, decay in ((37, 0.3031, 18), (33, 0.3294, 16), (1, 1, 1), (2, 1, 1)):
        average = MovingAverageNormalizer(4, 1, epochs, "cosine", options)
        assert average.gamma_min == pytest.approx(gamma, abs=5e-5) and average.decay_epochs == decay
    average = MovingAverageNormalizer(4, 1, 37, "cosine", MovingAverageOptions(gamma=0.25, decay_epochs=3))
    assert (average.gamma_min, average.decay_epochs) == (0.25, 3)


@pytest.mark.parametrize("rate", RATES)
def test_the_rate_changes_with_the_epoch_not_with_the_step(rate):
    """From u = 1 to g = e^2 in the last step of an epoch and the first of the next."""
    for epoch in range(1, 4):
        average = normalizer(n=4, steps=3, epochs=4, rate=rate)
        for step in range(3 * epoch + 1):
            assert average.epoch == step // 3
            start = average.table.values.clone()
            feed(average, range(4), torch.full((2, 4), 2.0 * (step % 2), dtype=F64))
        u, g = start.exp(), math.exp(2.0 * (step % 2))
        gamma = gamma_of_epoch(rate, epoch, 0.3, 2) if rate != "per sample" else torch.sigmoid((1e-3 + u).log() + 0.5)
        assert close(average.table.values, torch.log((1 - gamma) * u + gamma * g))


# -- numerics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("eps", [0.0, 1e-14])
def test_float32_neither_overflows_nor_loses_what_is_small(on_ranks, world, rate, eps):
    """tau = .01 gives log_g from -200 to 200; exp of either is infinite or zero in float32."""
    rows = torch.tensor([[200.0, -200.0, 200.0, -200.0], [-200.0, 200.0, -200.0, 200.0]])

    def run(ranks):
        average = normalizer(n=4, steps=1, rate=rate, ranks=ranks, dtype=torch.float32, eps=eps, log_step=10.0)
        alphas = []
        for step in range(6):
            alphas.append(feed(average, range(4), rows if step % 2 == 0 else -rows))
        return torch.stack(alphas), average.table.values

    reference = normalizer(n=4, steps=1, rate=rate, eps=eps, log_step=10.0)
    expected = torch.stack(
        [feed(reference, range(4), (rows if step % 2 == 0 else -rows).double()) for step in range(6)]
    )
    results = on_ranks(world, run)
    alpha = torch.cat([result[0] for result in results], -1)
    assert alpha.dtype == torch.float32 and bool(torch.isfinite(alpha).all())
    assert all(bool(torch.isfinite(values).all()) for _, values in results)
    assert close(alpha.double(), expected, 1e-6)
    assert alpha[0, 0].tolist() == pytest.approx([200, math.log(eps) if eps else -200] * 2, rel=1e-6)
