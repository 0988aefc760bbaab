"""Cap and share: the bounds they promise, and the part of the gradient that goes through the batch."""

import math

import pytest
import torch

from neuclip_lib.normalizers import Stabilised, cap_weight, share_with_batch

pytestmark = pytest.mark.quick
F64 = torch.float64


def draw(size=50, seed=0):
    g = torch.Generator().manual_seed(seed)
    alpha = [3 * torch.randn(size, dtype=F64, generator=g) for _ in range(2)]
    log_x = [3 * torch.randn(size, dtype=F64, generator=g) for _ in range(2)]
    return tuple(alpha), tuple(log_x)


def written_out(alpha, log_x, cap, share):
    """Both stabilisers with everything attached, for autograd."""
    if cap is not None:
        alpha = torch.maximum(alpha, log_x - math.log(cap))
    return torch.log((1 - share) * torch.exp(alpha) + share * torch.exp(log_x)) if share else alpha


def made(alpha, log_x, cap, share):
    out = Stabilised(alpha)
    out = out if cap is None else cap_weight(out, log_x, cap)
    return share_with_batch(out, log_x, share)


@pytest.mark.parametrize(("cap", "share"), [(5.0, 0.0), (1.0, 0.0), (None, 0.2), (None, 1.0), (5.0, 0.3), (2.0, 0.7)])
def test_value_and_both_parts_of_the_gradient_equal_autograd(cap, share):
    alpha, log_x = draw()
    inputs = [side.clone().requires_grad_() for side in (*alpha, *log_x)]
    got = made((inputs[0], inputs[1]), (inputs[2], inputs[3]), cap, share)
    for side in (0, 1):
        expected = written_out(inputs[side], inputs[2 + side], cap, share)
        by_alpha, by_batch = torch.autograd.grad(expected.sum(), (inputs[side], inputs[2 + side]))
        assert (got.alpha[side] - expected).abs().max() < 1e-13
        if got.alpha[side].requires_grad:
            own, batch = torch.autograd.grad(got.alpha[side].sum(), (inputs[side], inputs[2 + side]), allow_unused=True)
            assert (own - by_alpha).abs().max() < 1e-13
            assert batch is None, "the loss follows this part; in the graph it would count twice"
        assert (got.batch_part[side] - by_batch).abs().max() < 1e-13


def test_no_anchor_weighs_more_than_the_cap():
    alpha, log_x = draw(seed=1)
    capped = cap_weight(Stabilised(alpha), log_x, 5.0).alpha
    weight = torch.exp(torch.cat(log_x) - torch.cat(capped))
    assert weight.max().item() == pytest.approx(5.0, abs=1e-12)
    untouched = torch.cat(log_x) - torch.cat(alpha) < math.log(5)
    assert torch.equal(torch.cat(capped)[untouched], torch.cat(alpha)[untouched])


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_the_weight_under_a_share_stays_below_its_bound(share):
    """omega (eps + g) with omega = (1-q) exp(-alpha) + q/(eps+g); the bound is reached."""
    log_x = torch.zeros(4001, dtype=F64)
    raw = torch.linspace(-12, 12, 4001, dtype=F64)
    mixed = share_with_batch(Stabilised((raw, raw)), (log_x, log_x), share)
    q = mixed.batch_part[0]
    weight = (1 - q) * torch.exp(-mixed.alpha[0]) + q
    bound = (1 + share) ** 2 / (4 * share)
    assert weight.max().item() <= bound + 1e-12
    assert weight.max().item() == pytest.approx(bound, rel=1e-4)


def test_shares_of_nothing_and_of_everything():
    alpha, log_x = draw(seed=2)
    assert share_with_batch(Stabilised(alpha), log_x, 0.0).alpha is alpha
    all_batch = share_with_batch(Stabilised(alpha), log_x, 1.0)
    assert torch.equal(all_batch.alpha[0], log_x[0]) and torch.equal(all_batch.batch_part[1], torch.ones(50, dtype=F64))
