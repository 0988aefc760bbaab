"""The methods as parts of one family: whole gradients against autograd of each method's definition."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import global_contrastive_loss, info_nce
from neuclip_lib.methods import Settings, get_method, method_names
from neuclip_lib.normalizers import PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions

pytestmark = pytest.mark.quick
F64 = torch.float64


def draw(size=7, dim=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [normalize(torch.randn(size, dim, generator=g, dtype=F64), dim=1).requires_grad_() for _ in range(2)]


def parts(name, learned=True, **prototypes):
    settings = Settings(
        dim=5,
        batch_size=7,
        temperature=TemperatureOptions(learned=learned, rho=2.0),
        prototypes=PrototypeOptions(m=9, updates=2, **prototypes),
        dtype=F64,
    )
    return get_method(name).build(settings)


def step(method, e1, e2, tau):
    """The training step's lines."""
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    method.normalizer.update(batch, log_g, tau)
    alpha = method.alpha(e1, e2, log_g, batch, tau)
    return global_contrastive_loss(e1, e2, alpha, batch, tau, method.objective, log_g)


def dense(e1, e2, tau):
    """log g of both sides by plain autograd."""
    s = (e1 @ e2.T) / tau
    masked = s.masked_fill(torch.eye(len(s), dtype=torch.bool), -math.inf)
    positive = s.diagonal()
    n = math.log(len(s) - 1)
    return torch.logsumexp(masked, 1) - positive - n, torch.logsumexp(masked, 0) - positive - n


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def test_openclip_is_info_nce_less_a_constant():
    e1, e2 = draw()
    tau = torch.tensor(0.07, dtype=F64, requires_grad=True)
    logits = e1 @ e2.T / tau
    labels = torch.arange(7)
    cross = (
        torch.nn.functional.cross_entropy(logits, labels) + torch.nn.functional.cross_entropy(logits.T, labels)
    ) / 2
    loss = step(parts("openclip"), e1, e2, tau)
    assert (loss + math.log(6)).item() == pytest.approx(cross.item(), abs=1e-12)
    assert info_nce(e1, e2, tau).item() == pytest.approx(cross.item(), abs=1e-12)
    assert_equal(gradients(loss, (e1, e2, tau)), gradients(cross, (e1, e2, tau)))


@pytest.mark.parametrize("learned", [True, False])
def test_gcl_batch_is_the_log_of_the_mean_over_negatives(learned):
    e1, e2 = draw(seed=1)
    tau = torch.tensor(0.07, dtype=F64, requires_grad=True)
    log_g1, log_g2 = dense(e1, e2, tau)
    expected = (log_g1 + log_g2).mean() / 2
    if learned:
        expected = tau * expected + 2.0 * tau
    assert_equal(
        gradients(step(parts("gcl-batch", learned), e1, e2, tau), (e1, e2, tau)), gradients(expected, (e1, e2, tau))
    )


@pytest.mark.parametrize("cap", [None, 1.5, 1.0])
@pytest.mark.parametrize("detach", [False, True])
def test_neuclips_whole_gradient_equals_autograd(cap, detach):
    """With alpha from the prototypes attached or not, capped or not; both parts of the cap are differentiated."""
    e1, e2 = draw(seed=2)
    tau = torch.tensor(0.07, dtype=F64, requires_grad=True)
    method = parts("neuclip", weight_cap=cap, detach_alpha=detach)
    loss = step(method, e1, e2, tau)
    w, eps = method.normalizer.prototypes, torch.tensor(math.log(1e-6), dtype=F64)
    log_g1, log_g2 = dense(e1, e2, tau)
    total = 0.0
    for e, side, log_g in ((e1, 0, log_g1), (e2, 1, log_g2)):
        log_x = torch.logaddexp(eps, log_g)
        raw = torch.logsumexp((e @ w[side].T - (e1 * e2).sum(1, keepdim=True)) / tau, 1) - math.log(w.shape[1])
        alpha = torch.logaddexp(eps, raw)
        alpha = alpha.detach() if detach else alpha
        if cap is not None:
            alpha = torch.maximum(alpha, log_x - math.log(cap))
        total = total + (torch.exp(log_x - alpha) + alpha - 1).sum()
    expected = tau * total / 14 + 2.0 * tau
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_equal(gradients(loss, (e1, e2, tau)), gradients(expected, (e1, e2, tau)))


def test_the_gradient_through_alpha_is_really_there():
    e1, e2 = draw(seed=2)
    tau = torch.tensor(0.07, dtype=F64, requires_grad=True)
    attached = gradients(step(parts("neuclip"), e1, e2, tau), (e1, e2, tau))
    held = gradients(step(parts("neuclip", detach_alpha=True), e1, e2, tau), (e1, e2, tau))
    for a, b in zip(attached, held, strict=True):
        assert (a - b).abs().max() > 1e-3 * a.abs().max()


def test_names_and_the_error_for_an_unknown_one():
    assert {"openclip", "gcl-batch", "neuclip"} <= set(method_names())
    with pytest.raises(ValueError, match="did you mean 'neuclip'"):
        get_method("neuklip")
