"""The methods as parts of one family: whole gradients against autograd of each method's definition."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses import dhel_loss, info_nce, siglip_loss
from neuclip_lib.methods import Settings, get_method, method_names
from neuclip_lib.normalizers import MovingAverageOptions, PrototypeOptions
from neuclip_lib.temperature import TemperatureOptions

pytestmark = pytest.mark.quick
F64 = torch.float64


def draw(size=7, dim=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [normalize(torch.randn(size, dim, generator=g, dtype=F64), dim=1).requires_grad_() for _ in range(2)]


def parts(name, learned=True, rho=2.0, **options):
    settings = Settings(
        dim=5,
        batch_size=7,
        temperature=TemperatureOptions(learned=learned, rho=rho),
        prototypes=PrototypeOptions(m=9, updates=2, **options),
        moving_average=MovingAverageOptions(gamma=0.4, log_step=0.0),
        n=20,
        steps_per_epoch=2,
        epochs=5,
        dtype=F64,
    )
    return get_method(name).build(settings)


def step(method, e1, e2, tau, index=None):
    """The training step's loss."""
    return method.loss(e1, e2, GlobalBatch(e1, e2, index), tau).loss


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


@pytest.mark.parametrize(("share", "cap"), [(0.2, None), (0.6, 1.5), (1.0, None), (0.0, 5.0)])
def test_neuclip_mixed_equals_autograd_with_both_parts_differentiated(share, cap):
    e1, e2 = draw(seed=4)
    tau = torch.tensor(0.07, dtype=F64, requires_grad=True)
    method = parts("neuclip-mixed", batch_share=share, weight_cap=cap)
    loss = step(method, e1, e2, tau)
    w, eps = method.normalizer.prototypes, torch.tensor(math.log(1e-6), dtype=F64)
    total = 0.0
    for e, side, log_g in zip((e1, e2), (0, 1), dense(e1, e2, tau), strict=True):
        log_x = torch.logaddexp(eps, log_g)
        raw = torch.logsumexp((e @ w[side].T - (e1 * e2).sum(1, keepdim=True)) / tau, 1) - math.log(w.shape[1])
        alpha = torch.logaddexp(eps, raw)
        if cap is not None:
            alpha = torch.maximum(alpha, log_x - math.log(cap))
        alpha = torch.log((1 - share) * alpha.exp() + share * log_x.exp())
        total = total + (torch.exp(log_x - alpha) + alpha - 1).sum()
    expected = tau * total / 14 + 2.0 * tau
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_equal(gradients(loss, (e1, e2, tau)), gradients(expected, (e1, e2, tau)))


def test_a_whole_share_is_the_decoupled_batch_loss_and_none_is_neuclip():
    e1, e2 = draw(seed=4)
    tau = torch.tensor(0.07, dtype=F64, requires_grad=True)
    batch_alone = gradients(step(parts("neuclip-mixed", batch_share=1.0), e1, e2, tau), (e1, e2, tau))
    log_g = dense(e1, e2, tau)
    exact = tau * torch.logaddexp(torch.tensor(math.log(1e-6), dtype=F64), torch.stack(log_g)).mean() + 2.0 * tau
    assert_equal(batch_alone, gradients(exact, (e1, e2, tau)))
    plain = gradients(step(parts("neuclip"), e1, e2, tau), (e1, e2, tau))
    assert_equal(gradients(step(parts("neuclip-mixed", batch_share=0.0), e1, e2, tau), (e1, e2, tau)), plain)


def test_the_share_falls_from_one_by_a_cosine_over_its_epochs():
    """Two steps an epoch: lambda is 1, 1, then by the cosine, then the floor; the batch's part of alpha shows it."""
    e1, e2 = draw(seed=4)
    tau = torch.tensor(0.5, dtype=F64)
    method = parts("neuclip-mixed", batch_share=0.25, share_decay_epochs=2)
    seen = []
    for _ in range(6):
        batch = GlobalBatch(e1, e2)
        method.loss(e1, e2, batch, tau)
        log_g = tuple(side.detach() for side in dense(e1, e2, tau))
        used, raw = method.alpha(e1, e2, log_g, batch, tau), method.normalizer(e1, e2, log_g, batch, tau)
        x = torch.logaddexp(torch.tensor(math.log(1e-6), dtype=F64), log_g[0])
        share = (used.alpha[0].exp() - raw[0].exp()) / (x.exp() - raw[0].exp())
        assert share.std() < 1e-9
        seen.append(share.mean().item())
    assert seen == pytest.approx([1, 1, 0.625, 0.625, 0.25, 0.25], abs=1e-9)


AVERAGES = ("sogclr", "fastclip-v0", "fastclip-v1", "fastclip-v3", "scent")


@pytest.mark.parametrize("name", AVERAGES)
def test_a_moving_averages_gradient_is_that_of_its_objective_with_alpha_held(name):
    """Third step: u is neither the batch's g nor nothing. Its tau gradient too, with h in front."""
    e1, e2 = draw(seed=6)
    index = torch.arange(7) + 3
    tau = torch.tensor(0.2, dtype=F64, requires_grad=True)
    method = parts(name)
    for seed in (7, 8):
        step(method, *draw(seed=seed), tau, index)
    loss = step(method, e1, e2, tau, index)
    u = method.normalizer.table.look_up(index)
    log_g = dense(e1, e2, tau)
    assert (u[0] - log_g[0]).abs().max() > 0.05
    total = 0.0
    for side in (0, 1):
        alpha = torch.log(1e-14 + u[side].exp())
        total = total + (torch.exp(-alpha) * (1e-14 + log_g[side].exp()) + alpha - 1).sum()
    with_tau, with_rho = name != "fastclip-v0", name in ("fastclip-v3", "scent")
    expected = (tau if with_tau else 1) * total / 14 + (2.0 * tau if with_rho else 0.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_equal(gradients(loss, (e1, e2, tau)), gradients(expected, (e1, e2, tau)))


@pytest.mark.parametrize("name", ["isogclr", "fastclip-v2"])
def test_a_temperature_per_sample_has_the_gradient_of_its_own_term(name):
    e1, e2 = draw(seed=6)
    index = torch.arange(7) + 3
    taus = 0.1 + 0.2 * torch.rand(2, 7, dtype=F64, generator=torch.Generator().manual_seed(1))
    taus.requires_grad_()
    method = parts(name)
    for seed in (7, 8):
        step(method, *draw(seed=seed), taus, index)
    loss = step(method, e1, e2, taus, index)
    u = method.normalizer.table.look_up(index)
    s, mask = e1 @ e2.T, torch.eye(7, dtype=torch.bool)
    expected = 0.0
    for side, matrix in ((0, s), (1, s.T)):
        x = ((matrix - s.diagonal()[:, None]) / taus[side][:, None]).masked_fill(mask, -math.inf)
        log_g = torch.logsumexp(x, 1) - math.log(6)
        alpha = torch.log(1e-14 + u[side].exp())
        h = torch.exp(-alpha) * (1e-14 + log_g.exp()) + alpha - 1
        expected = expected + (taus[side] * (h + 2.0)).sum() / 14
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_equal(gradients(loss, (e1, e2, taus)), gradients(expected, (e1, e2, taus)))


def test_published_v3_doubles_the_middle_term_and_has_the_mean_of_log_u_in_front():
    e1, e2 = draw(seed=6)
    index = torch.arange(7)
    tau = torch.tensor(0.2, dtype=F64, requires_grad=True)
    exact, published = parts("fastclip-v3"), parts("fastclip-v3-published")
    for method in (exact, published):
        for seed in (7, 8):
            step(method, *draw(seed=seed), tau, index)
    *encoders, d_tau = gradients(step(exact, e1, e2, tau, index), (e1, e2, tau))
    *same, d_published = gradients(step(published, e1, e2, tau, index), (e1, e2, tau))
    assert_equal(same, encoders)
    alpha = torch.log(1e-14 + exact.normalizer.table.look_up(index).exp())
    x = 1e-14 + torch.stack(dense(e1, e2, tau)).exp()
    h = (torch.exp(-alpha) * x + alpha - 1).mean()
    middle = torch.autograd.grad((tau.detach() * torch.exp(-alpha) * x).mean(), tau)[0]
    assert d_tau.item() == pytest.approx((h + middle + 2.0).item(), abs=1e-12)
    assert d_published.item() == pytest.approx((alpha.mean() + 2 * middle + 2.0).item(), abs=1e-12)


def test_published_v2_leaves_tau_out_of_the_encoders_gradient_alone():
    e1, e2 = draw(seed=6)
    index = torch.arange(7)
    taus = (0.1 + 0.2 * torch.rand(2, 7, dtype=F64, generator=torch.Generator().manual_seed(1))).requires_grad_()
    published = parts("fastclip-v2-published")
    for seed in (7, 8):
        step(published, *draw(seed=seed), taus, index)
    *encoders, d_tau = gradients(step(published, e1, e2, taus, index), (e1, e2, taus))
    alpha = torch.log(1e-14 + published.normalizer.table.look_up(index).exp())
    s, mask = e1 @ e2.T, torch.eye(7, dtype=torch.bool)
    weighted, tau_term = 0.0, 0.0
    for side, matrix in ((0, s), (1, s.T)):
        for temperatures, is_encoder in ((taus[side].detach(), True), (taus[side], False)):
            x = ((matrix - s.diagonal()[:, None]) / temperatures[:, None]).masked_fill(mask, -math.inf)
            ratio = torch.exp(torch.logsumexp(x, 1) - math.log(6) - alpha[side])
            if is_encoder:
                weighted = weighted + ratio.sum() / 14
            else:
                tau_term = tau_term + (temperatures.detach() * ratio).sum()
    assert_equal(encoders, gradients(weighted, (e1, e2)))
    per_anchor = torch.autograd.grad(tau_term, taus)[0] + alpha + 2.0
    assert (d_tau * 14 - per_anchor).abs().max() < 1e-12


def test_amorlip_is_info_nce_where_its_network_is_right():
    e1, e2 = draw(seed=2)
    tau = torch.tensor(0.3, dtype=F64)
    method = parts("amorlip")
    log_g = dense(e1, e2, tau)
    step(method, e1, e2, tau)
    exact = [torch.logaddexp(torch.tensor(-math.log(6), dtype=F64), side).detach() for side in log_g]
    shift = (e1 * e2).sum(1) / tau
    method.normalizer = lambda *_: (exact[0] + shift.detach() - shift, exact[1] + shift.detach() - shift)
    batch = GlobalBatch(e1, e2)
    method.normalizer.update = lambda *_: None
    got = gradients(method.loss(e1, e2, batch, tau).loss, (e1, e2))
    assert_equal(got, gradients(tau * info_nce(e1, e2, tau), (e1, e2)))


def test_losses_without_a_normalizer_are_the_plain_functions():
    e1, e2 = draw(seed=2)
    tau = torch.tensor(0.1, dtype=F64, requires_grad=True)
    siglip, dhel = parts("siglip"), parts("dhel")
    assert siglip.normalizer is None and siglip.learned.bias.item() == -10
    batch = GlobalBatch(e1, e2)
    expected = siglip_loss(e1, e2, batch, tau, siglip.learned.bias)
    inputs = (e1, e2, tau, siglip.learned.bias)
    assert_equal(gradients(siglip.loss(e1, e2, batch, tau).loss, inputs), gradients(expected, inputs))
    assert dhel.loss(e1, e2, batch, tau).loss.item() == dhel_loss(e1, e2, batch, tau).item()
    assert dhel.loss(e1, e2, batch, tau).log_g is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sogclr", {"learned": True}, "sogclr holds the temperature fixed"),
        ("kcl", {"learned": True}, "kcl does not use the temperature"),
        ("fastclip-v2", {"anneal": "log"}, "one temperature per sample, which cannot be annealed"),
    ],
)
def test_a_temperature_that_a_method_cannot_follow_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        get_method(name).check(TemperatureOptions(**options))


@pytest.mark.parametrize("name", [*AVERAGES, "isogclr", "fastclip-v2"])
def test_methods_with_numbers_per_sample_ask_for_an_index(name):
    assert get_method(name).needs_index
    with pytest.raises(ValueError, match="stable index"):
        get_method(name).build(Settings(dim=4, batch_size=4))
    e1, e2 = draw()
    with pytest.raises(ValueError, match="index"):
        step(parts(name), e1, e2, torch.tensor(0.1, dtype=F64))


def test_names_and_the_error_for_an_unknown_one():
    names = "openclip gcl-batch sogclr isogclr fastclip-v0 fastclip-v1 fastclip-v2 fastclip-v3 scent amorlip neuclip"
    names += " neuclip-mixed siglip dhel kcl fastclip-v2-published fastclip-v3-published"
    assert method_names() == names.split()
    with pytest.raises(ValueError, match="did you mean 'neuclip'"):
        get_method("neuklip")


@pytest.mark.parametrize("name", ["amorlip", "neuclip", "openclip"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_temperature_per_anchor_has_its_exact_gradient_on_its_owner(name, size, on_ranks):
    """Whatever alpha does with tau: summed over ranks the gradient is that of one process."""
    e1, e2 = (e.detach() for e in draw(8, 5, seed=3))

    def gradient(ranks):
        taus = (0.1 + 0.2 * torch.rand(2, 8, dtype=F64, generator=torch.Generator().manual_seed(1))).requires_grad_()
        method = get_method(name).build(
            Settings(dim=5, batch_size=8, prototypes=PrototypeOptions(m=9, updates=2), dtype=F64, ranks=ranks)
        )
        rows = slice(ranks.rank * 8 // ranks.size, (ranks.rank + 1) * 8 // ranks.size)
        batch = GlobalBatch(e1, e2, ranks=ranks, rows=rows)
        own = e1[rows].clone().requires_grad_(), e2[rows].clone().requires_grad_()
        return torch.autograd.grad(method.loss(*own, batch, taus).loss, taus)[0]

    alone = on_ranks(1, gradient)[0]
    assert (sum(on_ranks(size, gradient)) - alone).abs().max() <= 1e-12 * alone.abs().max()
