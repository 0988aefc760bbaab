"""AmorLIP's normalizer: log Z, alpha and the encoders' gradient against their definitions."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.normalizers.amortized import AmortizedNormalizer, AmortizedOptions

pytestmark = pytest.mark.quick
F64 = torch.float64
SIZE, DIM = 12, 6


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), dim=-1)


def scalar(value):
    return torch.tensor(value, dtype=F64)


def per_anchor(size=SIZE, seed=9):
    return 0.04 + 0.1 * torch.rand(2, size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pairs(step, size=SIZE, dim=DIM):
    """A batch that depends on the step alone."""
    return unit(size, dim, seed=100 + step), unit(size, dim, seed=200 + step)


def normalizer(size=SIZE, dim=DIM, steps_per_epoch=4, epochs=3, seed=0, **options):
    options = AmortizedOptions(**options)
    return AmortizedNormalizer(dim, size, steps_per_epoch, epochs, options, seed, dtype=F64)


def feed(amortized, step, tau=0.07):
    """One update; gives what a call needs after it."""
    e1, e2 = pairs(step)
    batch, tau = GlobalBatch(e1, e2), torch.as_tensor(tau, dtype=F64)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    amortized.update(batch, log_g, tau)
    return e1, e2, log_g, batch, tau


def naive_log_z(e1, e2, tau, pos_coef, bias, side):
    """The definition, a sum over pairs."""
    values = []
    for i in range(len(e1)):
        t = tau if tau.ndim == 0 else tau[side, i]
        total = 0.0
        for j in range(len(e1)):
            s = torch.dot(e1[i], e2[j]) if side == 0 else torch.dot(e1[j], e2[i])
            total = total + (pos_coef if i == j else 1) * torch.exp(s / t + bias)
        values.append(torch.log(total))
    return torch.stack(values)


def test_nothing_draws_from_the_global_generator():
    before = torch.random.get_rng_state()
    feed(normalizer(), 0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("bias", [0.0, -1.5])
@pytest.mark.parametrize("pos_coef", [1.0, 1e-3, 0.0])
@pytest.mark.parametrize("tau", [scalar(0.07), scalar(0.5), per_anchor()], ids=["0.07", "0.5", "per anchor"])
def test_log_z_equals_the_sum_over_pairs(tau, pos_coef, bias):
    amortized = normalizer(pos_coef=pos_coef, bias=bias)
    assert amortized.eps == pos_coef / (SIZE - 1)
    e1, e2 = pairs(0)
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    got = amortized._log_z(torch.stack((e1, e2)), log_g, batch.own_tau(tau))
    for side in (0, 1):
        assert (got[side] - naive_log_z(e1, e2, tau, pos_coef, bias, side)).abs().max() < 1e-12


def test_another_batch_size_counts_with_its_mean():
    """Lambda is a sum over B - 1 negatives; the same mean over fewer of them must give the same log Z."""
    small, large = normalizer(size=7), normalizer(size=13)
    e = torch.stack(pairs(0))
    log_g = (torch.full((SIZE,), 0.3, dtype=F64), torch.full((SIZE,), -0.2, dtype=F64))
    difference = large._log_z(e, log_g, scalar(0.07)) - small._log_z(e, log_g, scalar(0.07))
    mean = torch.stack(log_g).exp()
    assert torch.allclose(difference, torch.log((1 + 12 * mean) / (1 + 6 * mean)), atol=1e-12)


@pytest.mark.parametrize("bias", [0.0, 2.0])
@pytest.mark.parametrize("tau", [scalar(0.07), per_anchor()], ids=["scalar", "per anchor"])
def test_alpha_is_log_of_eps_plus_g_where_lambda_is_z(tau, bias, monkeypatch):
    amortized = normalizer(pos_coef=0.3, bias=bias)
    e1, e2, log_g, batch, _ = feed(amortized, 0)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    log_z = torch.stack([naive_log_z(e1, e2, tau, 0.3, bias, side) for side in (0, 1)])
    monkeypatch.setattr(amortized, "network", lambda weights, e: log_z)
    alpha = amortized(e1, e2, log_g, batch, tau)
    for side in (0, 1):
        assert torch.allclose(alpha[side], torch.log(amortized.eps + log_g[side].exp()), atol=1e-12)


@pytest.mark.parametrize("target", ["network", "combined"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bias", [0.0, -0.7])
def test_encoder_gradient_is_half_that_of_amorlips_own_loss(exact, bias, target, monkeypatch):
    """-2 mean s_ii/tau + mean Z_i/lambda_i + mean Z'_i/lambda'_i with lambda held, by autograd of the definition."""
    from neuclip_lib.losses import Objective, global_contrastive_loss

    amortized = normalizer(pos_coef=0.3, bias=bias, target=target, steps_per_epoch=1, epochs=2)
    feed(amortized, 0)
    feed(amortized, 1)
    e1, e2 = (e.requires_grad_() for e in pairs(2))
    tau = scalar(0.2).requires_grad_()
    z = [naive_log_z(e1, e2, tau, 0.3, bias, side) for side in (0, 1)]
    noise = torch.randn(2, SIZE, dtype=F64, generator=torch.Generator().manual_seed(5))
    predicted = log_lambda = torch.stack(z).detach() + (0 if exact else noise)
    monkeypatch.setattr(amortized, "network", lambda weights, e: predicted)
    if target == "combined":
        beta = amortized.prior
        assert beta > 0.3
        log_lambda = torch.log(beta * predicted.exp() + (1 - beta) * torch.stack(z).detach().exp())
    own = -2 * ((e1 * e2).sum(1) / tau).mean() + sum((a - b).exp().mean() for a, b in zip(z, log_lambda, strict=True))
    expected = torch.autograd.grad(own, (e1, e2, tau))

    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    alpha = amortized(e1, e2, log_g, batch, tau)
    objective = Objective(amortized.eps, "one")
    loss = global_contrastive_loss(e1, e2, alpha, batch, tau, objective, log_g)
    got = torch.autograd.grad(loss, (e1, e2, tau))
    for a, b in zip(got, expected, strict=True):
        assert (a - b / 2).abs().max() <= 1e-12 * b.abs().max()
    constant = (log_lambda.mean() - bias) - math.log(SIZE - 1) - 1
    assert loss.item() == pytest.approx(own.item() / 2 + constant.item(), abs=1e-12)


def test_the_temperatures_gradient_is_held_tau_times_half_the_loss():
    from neuclip_lib.losses import Objective, global_contrastive_loss

    amortized = normalizer()
    e1, e2, _, batch, _ = feed(amortized, 0)
    tau = scalar(0.2).requires_grad_()
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    gradients = []
    for factor, rho in (("one", 0.0), ("held tau", 3.0)):
        alpha = amortized(e1, e2, log_g, batch, tau)
        loss = global_contrastive_loss(e1, e2, alpha, batch, tau, Objective(amortized.eps, factor, rho), log_g)
        gradients.append(torch.autograd.grad(loss, tau)[0].item())
    assert gradients[1] == pytest.approx(0.2 * gradients[0] + 3, rel=1e-12)
    assert abs(gradients[0]) > 0.1


def test_alpha_is_attached_to_the_positive_and_tau_alone():
    amortized = normalizer()
    e1, e2, log_g, batch, _ = feed(amortized, 0)
    e1.requires_grad_(), e2.requires_grad_()
    tau = per_anchor().requires_grad_()
    alpha = amortized(e1, e2, log_g, batch, tau)
    d_e1, d_e2, d_tau = torch.autograd.grad(alpha[0].sum() + 2 * alpha[1].sum(), (e1, e2, tau))
    push = (1 / tau[0] + 2 / tau[1]).detach()[:, None]
    assert torch.allclose(d_e1, -push * e2, atol=1e-12) and torch.allclose(d_e2, -push * e1, atol=1e-12)
    expected = torch.tensor([[1.0], [2.0]], dtype=F64) * (e1 * e2).sum(1) / tau**2
    assert torch.allclose(d_tau, expected, atol=1e-12)


def test_alpha_is_from_the_averaged_network_or_from_the_combined_target():
    for target in ("network", "combined"):
        amortized = normalizer(target=target, average=0.6, steps_per_epoch=1, epochs=2, lr=0.05)
        for step in range(3):
            e1, e2, log_g, batch, tau = feed(amortized, step)
        alpha = torch.stack(amortized(e1, e2, log_g, batch, tau))
        shift = (e1 * e2).sum(1) / tau + math.log(SIZE - 1)
        e = torch.stack((e1, e2))
        expected = amortized.network(amortized.averaged, e)
        if target == "combined":
            z = torch.stack([naive_log_z(e1, e2, tau, 1.0, 0.0, side).exp() for side in (0, 1)])
            expected = torch.log(0.8 * amortized.network(amortized.previous, e).exp() + 0.2 * z)
        assert torch.allclose(alpha, expected - shift, atol=1e-11)


@pytest.mark.parametrize("loss", ["log", "kl", "js"])
@pytest.mark.parametrize("target", ["network", "combined"])
def test_the_lowest_temperature_stays_finite_in_float32(loss, target):
    """Positives at -1 and negatives at 1: log Z is 100 + log(B-1) where lambda starts near 1."""
    amortized = AmortizedNormalizer(DIM, SIZE, 2, 3, AmortizedOptions(loss=loss, target=target, average=0.5))
    e = unit(1, DIM).float()
    signs = torch.tensor([1.0, -1.0]).repeat(SIZE // 2)[:, None]
    e1, e2 = (signs * e).requires_grad_(), (-signs * e).requires_grad_()
    batch, tau = GlobalBatch(e1, e2), torch.tensor(0.01, requires_grad=True)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    for _ in range(5):
        amortized.update(batch, log_g, tau)
        alpha = amortized(e1, e2, log_g, batch, tau)
        assert all(part.isfinite().all() for part in (*amortized._parts.values(), *alpha))
    assert log_g[0].max() > 199
    gradients = torch.autograd.grad(alpha[0].sum() + alpha[1].sum(), (e1, e2, tau))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_nothing_waits_for_the_host_in_update_and_call():
    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for target in ("network", "combined"):
        amortized = normalizer(steps_per_epoch=1, epochs=2, target=target, warm_start=True)
        for step in range(3):
            e1, e2 = pairs(step)
            batch, tau = GlobalBatch(e1, e2), scalar(0.07)
            log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
            with Record() as record:
                amortized.remember(batch)
                amortized.update(batch, log_g, tau)
                amortized(e1, e2, log_g, batch, tau)
            assert "_fused_adam_" in record.names
            assert not record.names & {
                "_local_scalar_dense",
                "is_nonzero",
                "nonzero",
                "equal",
                "masked_select",
                "_unique2",
            }


def test_asking_before_the_first_batch_is_an_error_and_no_index_or_table_is_needed():
    amortized = normalizer()
    e1, e2 = pairs(0)
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, scalar(0.07))
    with pytest.raises(RuntimeError, match="learned nothing yet: call update"):
        amortized(e1, e2, log_g, batch, scalar(0.07))
    assert not amortized.needs_index and amortized.bytes_for(10**9) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": 0}, "amortized.hidden must be at least 1"),
        ({"prior_epochs": 0}, "amortized.prior_epochs must be at least 1"),
        ({"updates": 0}, "amortized.updates must be at least 1"),
        ({"every": 0}, "amortized.every must be at least 1"),
        ({"average_every": 0}, "amortized.average_every must be at least 1"),
        ({"lr": 0.0}, "amortized.lr must be positive"),
        ({"lr": math.inf}, "amortized.lr must be positive and finite"),
        ({"pos_coef": -1.0}, "amortized.pos_coef must be finite"),
        ({"bias": math.nan}, "amortized.bias must be finite"),
        ({"average": 1.0}, "amortized.average must be from 0 to below 1"),
        ({"prior_weight": 1.0}, "amortized.prior_weight must be from 0 to below 1"),
        ({"prior_weight": math.nan}, "amortized.prior_weight must be from 0 to below 1"),
        ({"loss": "l2"}, "amortized.loss must be one of log, kl, js, got 'l2'"),
        ({"target": "both"}, "amortized.target must be one of network, combined, got 'both'"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        normalizer(**options)


@pytest.mark.parametrize(
    ("numbers", "words"), [((1, 1, 1), "2 pairs"), ((8, 0, 1), "got 0 and 1"), ((8, 1, 0), "1 and 0")]
)
def test_a_batch_or_a_run_without_content_is_refused(numbers, words):
    with pytest.raises(ValueError, match=words):
        AmortizedNormalizer(4, *numbers, AmortizedOptions())


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AmortizedOptions().lr = 1.0
