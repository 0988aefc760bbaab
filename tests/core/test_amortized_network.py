"""AmorLIP's residual network and the losses that fit it, against their definitions."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.conjugate import psi
from neuclip_lib.normalizers.amortized_network import LOG_PART, ResidualNetwork, fit_loss

pytestmark = pytest.mark.quick
F64 = torch.float64
DIM = 6


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), dim=-1)


def by_hand(weights, e, dim, hidden):
    """One side's network, one anchor at a time, in numpy; ``weights`` in the order of the layers."""
    weights, at = weights.numpy(), 0

    def take(*shape):
        nonlocal at
        part = weights[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
        return part

    w1, b1, scale1, shift1 = take(hidden, dim), take(hidden), take(hidden), take(hidden)
    w2, b2, scale2, shift2 = take(dim, hidden), take(dim), take(dim), take(dim)
    w3, b3 = take(dim), take(1)
    assert at == len(weights)

    def norm(x, scale, shift):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale + shift

    values = []
    for row in e.numpy():
        x = norm(np.maximum(w1 @ row + b1, 0), scale1, shift1)
        y = norm(np.maximum(w2 @ x + b2, 0), scale2, shift2)
        values.append(w3 @ np.maximum(y + row, 0) + b3[0])
    return torch.tensor(np.array(values))


@pytest.mark.parametrize("hidden", [6, 3, 1, 11])
def test_the_network_equals_the_formula_on_each_side(hidden):
    network = ResidualNetwork(DIM, hidden)
    assert network.size == 2 * DIM * hidden + 3 * hidden + 4 * DIM + 1
    weights = torch.randn(2, network.size, generator=torch.Generator().manual_seed(1), dtype=F64)
    e = unit(2, 12, DIM)
    got = network(weights, e)
    for side in (0, 1):
        expected = by_hand(weights[side], e[side], DIM, hidden)
        assert (got[side] - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_first_weights_are_bounded_by_their_inputs_and_the_norms_are_the_identity():
    network = ResidualNetwork(16, 4)
    weights = network.initial(torch.Generator().manual_seed(3), "cpu", F64)
    w1, b1, scale1, shift1, w2, b2, scale2, shift2, w3, b3 = network._layers(weights)
    for parts, inputs in (((w1, b1), 16), ((w2, b2), 4), ((w3, b3), 16)):
        largest = torch.cat([part.flatten() for part in parts]).abs().max().item()
        assert 0.9 / math.sqrt(inputs) < largest <= 1 / math.sqrt(inputs)
    assert scale1.unique().tolist() == scale2.unique().tolist() == [1]
    assert not shift1.any() and not shift2.any()
    assert not torch.equal(weights[0], weights[1])
    again = network.initial(torch.Generator().manual_seed(3), "cpu", torch.float32)
    assert torch.equal(again, weights.float())
    assert not torch.equal(network.initial(torch.Generator().manual_seed(4), "cpu", F64), weights)


def test_the_networks_stay_in_their_own_precision_under_autocast():
    network = ResidualNetwork(DIM, DIM)
    weights = network.initial(torch.Generator().manual_seed(0), "cpu", torch.float32)
    e = unit(2, 12, DIM).float()
    plain = network(weights, e)
    with torch.autocast("cpu", torch.bfloat16):
        inside = network(weights, e)
    assert torch.equal(inside, plain) and inside.dtype == torch.float32


@pytest.mark.parametrize("kind", ["kl", "js"])
def test_divergences_equal_their_definition_over_the_negatives(kind):
    """Between exp(s/tau)/target and exp(s/tau)/lambda, where the target is their sum; the mass terms are kept."""
    log_terms = torch.randn(2, 5, 7, dtype=F64, generator=torch.Generator().manual_seed(1))
    log_lambda = torch.randn(2, 5, dtype=F64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    log_target = torch.logsumexp(log_terms, 2)
    p, q = (log_terms - log_target[:, :, None]).exp(), (log_terms - log_lambda[:, :, None]).exp()

    def kl(a, b):
        return (a * torch.log(a / b) - a + b).sum(2)

    divergence = kl(p, q) if kind == "kl" else (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
    gap = log_target - log_lambda
    expected = divergence.mean(1).sum() + LOG_PART * (gap**2).mean(1).sum()
    got = fit_loss(gap, kind)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    slopes = [torch.autograd.grad(value, log_lambda, retain_graph=True)[0] for value in (got, expected)]
    assert torch.allclose(*slopes, rtol=1e-11, atol=1e-13)


def test_the_log_loss_is_the_mean_square_and_kl_is_the_excess_of_the_conjugate_rewrite():
    gap = torch.randn(2, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert fit_loss(gap, "log").item() == pytest.approx((gap**2).sum().item() / 5, rel=1e-12)
    expected = (psi(gap) + LOG_PART * gap**2).sum().item() / 5
    assert fit_loss(gap, "kl").item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["log", "kl", "js"])
def test_losses_are_smallest_at_no_gap_and_finite_with_their_slope_far_away(kind):
    at_zero = torch.zeros(2, 3, dtype=F64, requires_grad=True)
    loss = fit_loss(at_zero, kind)
    assert loss.item() == 0 and torch.autograd.grad(loss, at_zero)[0].abs().max() < 1e-15
    for u in (-400.0, -30.0, 29.0, 31.0, 400.0):
        gap = torch.full((2, 3), u, requires_grad=True)
        loss = fit_loss(gap, kind)
        slope = torch.autograd.grad(loss, gap)[0]
        assert loss.isfinite() and loss > 0 and slope.square().isfinite().all()
        assert (slope.sign() == math.copysign(1, u)).all()


@pytest.mark.parametrize("kind", ["kl", "js"])
def test_the_straight_continuation_joins_without_a_step_or_a_kink(kind):
    top = math.log(torch.finfo(torch.float32).max) / 3
    ends = []
    for u in (top * (1 - 2e-6), top * (1 + 2e-6)):
        gap = torch.full((2, 1), u, dtype=torch.float32, requires_grad=True)
        loss = fit_loss(gap, kind)
        ends.append((loss.item(), torch.autograd.grad(loss, gap)[0][0].item()))
    assert ends[0] == pytest.approx(ends[1], rel=2e-4)
