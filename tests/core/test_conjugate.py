"""The rewrite against its definition, its minimum and its excess."""

import math

import pytest
import torch

from neuclip_lib.conjugate import f_star, psi, residual, rewrite

pytestmark = pytest.mark.quick


def test_f_star_is_the_conjugate_of_minus_log():
    x = torch.logspace(-6, 6, 400_001, dtype=torch.float64)
    for y in (-0.1, -1.0, -7.5):
        brute = (x * y + torch.log(x)).max().item()
        assert f_star(torch.tensor(y, dtype=torch.float64)).item() == pytest.approx(brute, abs=1e-8)
    assert f_star(torch.tensor(0.0)).item() == math.inf


def test_rewrite_is_the_conjugate_form_and_its_minimum_is_the_log():
    log_x = torch.linspace(-20, 20, 9, dtype=torch.float64)
    alpha = torch.linspace(-25, 25, 500_001, dtype=torch.float64)
    for target in log_x:
        h = rewrite(alpha, target)
        assert h.min().item() == pytest.approx(target.item(), abs=1e-6)
        assert alpha[h.argmin()].item() == pytest.approx(target.item(), abs=1e-3)
    a, z = torch.tensor(0.3, dtype=torch.float64), torch.tensor(-0.4, dtype=torch.float64)
    y = -torch.exp(-a)
    assert rewrite(a, z).item() == pytest.approx((-y * z.exp() + f_star(y)).item(), abs=1e-12)


def test_residual_is_the_slope_in_alpha():
    alpha = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    log_x = torch.linspace(2, -2, 13, dtype=torch.float64)
    (slope,) = torch.autograd.grad(rewrite(alpha, log_x).sum(), alpha)
    assert torch.allclose(slope, residual(alpha.detach(), log_x), rtol=1e-13, atol=1e-15)


def test_excess_equals_psi_and_psi_is_lopsided():
    log_x = torch.linspace(-3, 3, 25, dtype=torch.float64)
    for gap in (-4.0, -2.0, -0.3, 0.0, 0.3, 2.0, 4.0):
        excess = rewrite(log_x - gap, log_x) - log_x
        assert torch.allclose(excess, psi(torch.full_like(log_x, gap)), atol=1e-13)
    assert psi(torch.tensor(2.0)).item() == pytest.approx(4.389, abs=5e-4)
    assert psi(torch.tensor(-2.0)).item() == pytest.approx(1.135, abs=5e-4)


def test_psi_keeps_its_digits_near_zero():
    u = torch.tensor([1e-9, -1e-9, 1e-4, 9.99e-3, 1.01e-2, -9.99e-3], dtype=torch.float64)
    exact = torch.stack([sum(u**k / math.factorial(k) for k in range(2, 12))]).squeeze(0)
    assert torch.allclose(psi(u), exact, rtol=1e-11, atol=0)
