"""The global contrastive loss and its five gradients against autograd of the definition."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.conjugate import psi
from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import Objective, global_contrastive_loss

pytestmark = pytest.mark.quick


def draw(size, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    e1, e2 = (normalize(torch.randn(size, dim, generator=g, dtype=torch.float64), dim=1) for _ in range(2))
    return e1, e2, torch.randn(2, size, generator=g, dtype=torch.float64)


def identical(size, dim):
    e = normalize(torch.ones(size, dim, dtype=torch.float64), dim=1)
    return e, e.clone(), torch.linspace(-1, 1, 2 * size, dtype=torch.float64).reshape(2, size)


def duplicate_rows(size, dim):
    e1, e2, noise = draw(size, dim, seed=5)
    e1[1], e2[1], e2[2] = e1[0], e2[0], e2[0]
    return e1, e2, noise


def naive_loss(e1, e2, a1, a2, tau, objective):
    """The definition, entry by entry, for autograd."""
    size = len(e1)
    eps = 1 / (size - 1) if objective.eps is None else objective.eps
    s = e1 @ e2.T
    total = 0.0
    for i in range(size):
        g1 = sum(torch.exp((s[i, j] - s[i, i]) / tau) for j in range(size) if j != i) / (size - 1)
        g2 = sum(torch.exp((s[j, i] - s[i, i]) / tau) for j in range(size) if j != i) / (size - 1)
        total = total + torch.exp(-a1[i]) * (eps + g1) + a1[i] - 1 + torch.exp(-a2[i]) * (eps + g2) + a2[i] - 1
    factor = {"tau": tau, "held tau": tau.detach(), "one": 1}[objective.factor]
    return factor * total / (2 * size) + objective.rho * tau


CASES = {
    "plain": (*draw(6, 5), 0.07),
    "small temperature": (*draw(6, 5, 1), 0.01),
    "two pairs": (*draw(2, 3, 2), 0.05),
    "identical embeddings": (*identical(5, 4), 0.07),
    "duplicate rows": (*duplicate_rows(6, 7), 0.03),
    "large dimension": (*draw(4, 2048, 3), 0.02),
}
OBJECTIVES = [
    Objective(None, "one"),
    Objective(1e-14, "one"),
    Objective(1e-6, "tau", 6.5),
    Objective(0.0, "tau"),
    Objective(1e-3, "held tau", 2.0),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_value_and_five_gradients_equal_autograd(case, objective):
    e1, e2, noise, tau = CASES[case]
    t = torch.tensor(tau, dtype=torch.float64)
    log_g = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), t)
    exact = objective.log_eps_plus_g(log_g, len(e1))
    inputs = [x.clone().requires_grad_() for x in (e1, e2, exact[0] + noise[0], exact[1] + noise[1], t)]
    expected = naive_loss(*inputs, objective)
    expected_grads = torch.autograd.grad(expected, inputs)
    batch = GlobalBatch(inputs[0], inputs[1])
    got = global_contrastive_loss(*inputs[:2], (inputs[2], inputs[3]), batch, inputs[4], objective, log_g)
    got_grads = torch.autograd.grad(3 * got, inputs)
    scale = max(1.0, abs(expected.item()))
    assert abs(got.item() - expected.item()) < 1e-12 * scale
    for a, b in zip(got_grads, expected_grads, strict=True):
        assert (a / 3 - b).abs().max() <= 1e-12 * max(b.abs().max().item(), 1.0 / tau if b.abs().max() < 1e-10 else 0)


def test_gradient_at_the_exact_alpha_is_that_of_the_log_form():
    """Envelope theorem, and the excess over the log form is psi."""
    e1, e2, noise = draw(7, 5)
    t = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    objective = Objective(1e-3, "tau", 2.0)
    e1.requires_grad_(), e2.requires_grad_()
    log_g = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), t)
    log_x = objective.log_eps_plus_g(log_g, 7)
    log_form = t * (log_x[0] + log_x[1]).mean() / 2 + 2.0 * t
    expected = torch.autograd.grad(log_form, (e1, e2, t), retain_graph=True)
    held = tuple(x.detach() for x in log_x)
    loss = global_contrastive_loss(e1, e2, held, GlobalBatch(e1, e2), t, objective, log_g)
    for a, b in zip(torch.autograd.grad(loss, (e1, e2, t)), expected, strict=True):
        assert (a - b).abs().max() < 1e-12 * b.abs().max()
    off = tuple(x - n for x, n in zip(held, noise, strict=True))
    worse = global_contrastive_loss(e1, e2, off, GlobalBatch(e1, e2), t, objective, log_g)
    assert (worse - loss).item() == pytest.approx((t * psi(noise).sum() / 14).item(), abs=1e-12)
    assert objective.value(off, log_g, t, 7).item() == pytest.approx(worse.item(), abs=1e-12)


def test_only_the_changed_anchor_changes_its_gradient_in_alpha():
    e1, e2, noise = draw(5, 4)
    t = torch.tensor(0.07, dtype=torch.float64)
    batch, objective = GlobalBatch(e1, e2), Objective(1e-6, "tau")
    log_g = log_mean_exp_over_negatives(e1, e2, batch, t)

    def slopes(a1):
        a1 = a1.clone().requires_grad_()
        loss = global_contrastive_loss(e1, e2, (a1, log_g[1]), batch, t, objective, log_g)
        return torch.autograd.grad(loss, a1)[0]

    moved = noise[0].clone()
    moved[3] += 1
    assert (slopes(noise[0]) != slopes(moved)).tolist() == [False, False, False, True, False]


def test_matrix_products_of_a_step_are_three():
    """Counted by the profiler: similarities, and the two products of the gradient."""
    e1, e2, _ = draw(16, 8)
    e1.requires_grad_(), e2.requires_grad_()
    t = torch.tensor(0.07, dtype=torch.float64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        batch, objective = GlobalBatch(e1, e2), Objective(None, "one")
        log_g = log_mean_exp_over_negatives(e1, e2, batch, t)
        exact = objective.log_eps_plus_g(tuple(x.detach() for x in log_g), 16)
        global_contrastive_loss(e1, e2, exact, batch, t, objective, log_g).backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("aten::mm", 0) + counts.get("aten::addmm_", 0) == 3
    assert counts.get("aten::bmm", 0) == 0


def test_log_eps_is_written_for_any_batch():
    assert Objective(None, "one").log_eps(128) == pytest.approx(-math.log(127))
    assert Objective(0.0, "one").log_eps(4) == -math.inf
    assert Objective(1e-6, "tau").log_eps(4) == pytest.approx(math.log(1e-6))
