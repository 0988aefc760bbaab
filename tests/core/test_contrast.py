"""log_g against a naive loop, autograd and known answers; InfoNCE against open_clip."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib import contrast
from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import info_nce

pytestmark = pytest.mark.quick

CASES = [(2, 3, 0.07), (5, 4, 0.01), (9, 16, 1.0), (7, 300, 0.05)]


def pairs(size, dim, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda: normalize(torch.randn(size, dim, generator=g, dtype=dtype), dim=1)
    return draw(), draw()


def naive_log_g(e1, e2, tau):
    """One loop over anchors, differentiable by autograd."""
    s = e1 @ e2.T
    sides = []
    for matrix in (s, s.T):
        rows = []
        for i in range(len(s)):
            others = [(matrix[i, j] - matrix[i, i]) / tau for j in range(len(s)) if j != i]
            rows.append(torch.logsumexp(torch.stack(others), 0) - math.log(len(others)))
        sides.append(torch.stack(rows))
    return tuple(sides)


def largest_gap(a, b):
    """Largest difference over the largest entry of the reference."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item()


@pytest.mark.parametrize(("size", "dim", "tau"), CASES)
@pytest.mark.parametrize("keep", [True, False])
def test_log_g_and_its_gradients_equal_a_naive_loop(size, dim, tau, keep):
    e1, e2 = (e.requires_grad_() for e in pairs(size, dim))
    t = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    w1, w2 = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = naive_log_g(e1, e2, t)
    grads = torch.autograd.grad((w1 * expected[0]).sum() + (w2 * expected[1]).sum(), (e1, e2, t))
    got = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2, keep_similarities=keep), t)
    got_grads = torch.autograd.grad((w1 * got[0]).sum() + (w2 * got[1]).sum(), (e1, e2, t))
    for a, b in zip((*got, *got_grads), (*expected, *grads), strict=True):
        assert largest_gap(a, b) < 1e-12


@pytest.mark.parametrize("elements", [1, 7, 14, 30])
def test_blocks_of_rows_change_nothing(elements, monkeypatch):
    e1, e2 = (e.requires_grad_() for e in pairs(7, 5))
    tau = torch.tensor(0.1, dtype=torch.float64)
    whole = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), tau)
    whole_grad = torch.autograd.grad(sum(side.sum() for side in whole), (e1, e2))
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", elements)
    parts = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), tau)
    parts_grad = torch.autograd.grad(sum(side.sum() for side in parts), (e1, e2))
    for a, b in zip((*parts, *parts_grad), (*whole, *whole_grad), strict=True):
        assert largest_gap(a, b) < 1e-13


def test_known_answers_of_the_identity_similarities():
    e = torch.eye(2, dtype=torch.float64)
    tau = torch.tensor(1.0, dtype=torch.float64)
    log_g1, log_g2 = log_mean_exp_over_negatives(e, e, GlobalBatch(e, e), tau)
    assert log_g1.tolist() == pytest.approx([-1, -1], abs=1e-12)
    assert log_g2.tolist() == pytest.approx([-1, -1], abs=1e-12)
    assert info_nce(e, e, tau).item() == pytest.approx(0.31326, abs=1e-5)
    assert info_nce(e, e, tau / 2).item() == pytest.approx(math.log1p(math.exp(-2)), abs=1e-12)


def test_all_equal_embeddings_give_log_b():
    e = normalize(torch.ones(6, 4), dim=1)
    assert info_nce(e, e, torch.tensor(0.07)).item() == pytest.approx(math.log(6), abs=1e-6)


def value_and_gradients(loss, dtype, tau, size, dim):
    e1, e2 = (e.to(dtype).requires_grad_() for e in pairs(size, dim, seed=3, dtype=torch.float32))
    log_scale = torch.tensor(-math.log(tau), dtype=dtype, requires_grad=True)
    value = loss(e1, e2, log_scale)
    return value.detach(), *torch.autograd.grad(value, (e1, e2, log_scale))


def ours(e1, e2, log_scale):
    return info_nce(e1, e2, torch.exp(-log_scale))


def open_clips(e1, e2, log_scale):
    from open_clip.loss import ClipLoss

    return ClipLoss()(e1, e2, log_scale.exp())


@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
@pytest.mark.parametrize(("size", "dim"), [(2, 8), (64, 32), (33, 512)])
def test_info_nce_equals_open_clips_loss_in_value_and_gradient(size, dim, tau):
    exact = value_and_gradients(open_clips, torch.float64, tau, size, dim)
    for a, b in zip(value_and_gradients(ours, torch.float64, tau, size, dim), exact, strict=True):
        assert largest_gap(a, b) < 1e-12 or (a - b).abs().max() < 1e-14
    # In float32 a similarity is rounded by 6e-8, so at tau = .01 every weight by 6e-6, in open_clip's loss as in ours.
    room = 1e-6 if tau > 0.05 else 2e-5
    for a, b in zip(
        value_and_gradients(ours, torch.float32, tau, size, dim),
        value_and_gradients(open_clips, torch.float32, tau, size, dim),
        strict=True,
    ):
        assert (a - b).abs().max() <= room * max(1.0, b.abs().max().item())


def test_temperature_of_one_hundredth_does_not_overflow_in_float32():
    e1, e2 = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    log_g1, log_g2 = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), torch.tensor(0.01))
    assert log_g1.tolist() == pytest.approx([200, 200], rel=1e-6)
    assert log_g2.tolist() == pytest.approx([200, 200], rel=1e-6)


def test_a_batch_of_one_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="at least 2 pairs, got 1"):
        GlobalBatch(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(4, 2\)"):
        GlobalBatch(torch.ones(4, 3), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"index must be \[4\]"):
        GlobalBatch(torch.ones(4, 3), torch.ones(4, 3), index=torch.arange(3))


def test_losing_the_diagonal_mask_would_be_seen():
    """With the positive left in, the identity's log g would be log((1 + e^-1 (B-1))/(B-1)) instead of -1."""
    e = torch.eye(3, dtype=torch.float64)
    log_g1, _ = log_mean_exp_over_negatives(e, e, GlobalBatch(e, e), torch.tensor(1.0, dtype=torch.float64))
    assert log_g1[0].item() == pytest.approx(-1, abs=1e-12)
    assert abs(log_g1[0].item() - math.log((1 + 2 * math.exp(-1)) / 2)) > 0.8
