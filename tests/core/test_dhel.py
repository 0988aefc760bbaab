"""DHEL against loops, autograd, pinned values and its known minimisers; in blocks and on several ranks."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib import contrast
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses import dhel_loss

pytestmark = pytest.mark.quick


def fixed(size, dim, phase):
    """Rows without chance, for pinned values."""
    i, j = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(dim, dtype=torch.float64)
    return normalize(torch.sin(1 + 0.7 * i * (j + 1) + phase) + 0.3 * torch.cos(2 * i - j), dim=1)


def pinned_pair():
    u = fixed(8, 5, 0)
    return u, normalize(u + 0.4 * fixed(8, 5, 2), dim=1)


def draw(size, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(normalize(torch.randn(size, dim, generator=g, dtype=torch.float64), dim=1) for _ in range(2))


def simplex(size):
    """``size`` unit vectors with inner products -1/(size - 1)."""
    return normalize(torch.eye(size, dtype=torch.float64) - 1 / size, dim=1)


def cross_polytope(dim):
    e = torch.eye(dim, dtype=torch.float64)
    return torch.cat((e, -e))


def identical(size, dim):
    e = normalize(torch.ones(size, dim, dtype=torch.float64), dim=1)
    return e, e.clone()


def duplicate_captions(size, dim):
    e1, e2 = draw(size, dim, seed=5)
    e2[2] = e2[0]
    return e1, e2


CASES = {
    "plain": (*draw(9, 6), 0.3),
    "small temperature": (*draw(7, 5, 1), 0.01),
    "two pairs": (*draw(2, 3, 2), 0.5),
    "identical embeddings": (*identical(5, 4), 0.07),
    "duplicate captions": (*duplicate_captions(6, 7), 0.1),
    "large dimension": (*draw(4, 2048, 3), 0.1),
}


def naive(e1, e2, tau, both):
    size, total = len(e1), 0.0
    for i in range(size):
        total = total - e1[i] @ e2[i] / tau
        for view in (e1, e2) if both else (e1,):
            others = torch.stack([view[i] @ view[j] / tau for j in range(size) if j != i])
            total = total + torch.logsumexp(others, 0)
    return total / size


def leaves(case, dtype=torch.float64):
    return [torch.as_tensor(x, dtype=dtype).clone().requires_grad_() for x in case]


def value_and_gradients(loss, inputs, slope=1.0):
    value = loss(*inputs)
    return [value.detach(), *(g / slope for g in torch.autograd.grad(slope * value, inputs))]


def ours(both=True, keep=True):
    return lambda e1, e2, tau: dhel_loss(e1, e2, GlobalBatch(e1, e2, keep_similarities=keep), tau, both)


def assert_equal(got, expected, room=1e-12):
    """Differences against the largest entry, or against .1 where large parts cancel."""
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= room * max(b.abs().max().item(), 0.1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_value_and_three_gradients_equal_autograd(case, both, keep):
    expected = value_and_gradients(lambda *x: naive(*x, both), leaves(CASES[case]))
    assert_equal(value_and_gradients(ours(both, keep), leaves(CASES[case]), slope=3.0), expected)
    without = ours(both, keep)(*(torch.as_tensor(x, dtype=torch.float64) for x in CASES[case]))
    assert not without.requires_grad
    assert without.item() == pytest.approx(expected[0].item(), rel=1e-13)


PINNED = {
    0.1: (1.964737350222, -4.914497461337),
    0.3: (1.789658922220, -0.933202876579),
    0.5: (2.235772954943, 0.082521432288),
}


@pytest.mark.parametrize("tau", PINNED)
def test_pinned_values(tau):
    u, v = pinned_pair()
    t = torch.tensor(tau, dtype=torch.float64)
    got = (ours(True)(u, v, t).item(), ours(False)(u, v, t).item())
    assert got == pytest.approx(PINNED[tau], abs=1e-9)


def test_two_views_share_one_alignment_term():
    """The sum of the two one-sided losses aligns twice."""
    u, v = pinned_pair()
    t = torch.tensor(0.3, dtype=torch.float64)
    two = ours(False)(u, v, t) + ours(False)(v, u, t)
    assert (ours(True)(u, v, t) - two).item() == pytest.approx((u * v).sum(1).mean().item() / 0.3, abs=1e-12)


def test_a_positive_pulls_as_strongly_when_it_is_aligned():
    """The slope in s_ii is -1/(B tau) for every pair: the gradient in e2 of the one-sided loss is nothing else."""
    e1, e2 = draw(6, 4)
    e2[0] = e1[0]
    e1, e2, tau = leaves((e1, e2, 0.3))
    gradient = torch.autograd.grad(ours(False)(e1, e2, tau), e2)[0]
    assert (gradient + e1 / (6 * 0.3)).abs().max() < 1e-15


MINIMA = {
    "simplex": (simplex(4), 0.3, -3.358330978),
    "cross-polytope": (cross_polytope(3), 0.3, -0.542986684),
}


@pytest.mark.parametrize("name", MINIMA)
def test_known_minimisers(name):
    e, tau, expected = MINIMA[name]
    e1, e2, t = leaves((e, e, tau))
    value, *slopes = value_and_gradients(ours(), [e1, e2, t])
    assert value.item() == pytest.approx(expected, abs=1e-8)
    for slope in slopes[:2]:  # on the sphere: what is along the vector itself does not move it
        assert (slope - (slope * e).sum(1, keepdim=True) * e).abs().max() < 1e-14
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        near = [normalize(e + 0.05 * torch.randn(e.shape, generator=g, dtype=torch.float64), dim=1) for _ in range(2)]
        assert ours()(*near, t).item() > expected + 1e-3


def test_closed_value_at_the_simplex():
    for size, tau in ((2, 1.0), (4, 0.3), (7, 0.1)):
        expected = -1 / tau + 2 * math.log(size - 1) - 2 / ((size - 1) * tau)
        value = ours()(simplex(size), simplex(size), torch.tensor(tau, dtype=torch.float64)).item()
        assert value == pytest.approx(expected, abs=1e-12)


def test_small_temperature_stays_finite_in_float32():
    """Exponentials before the logarithm would overflow."""
    u, v = pinned_pair()
    got = value_and_gradients(ours(), leaves((u, v, 0.01), torch.float32))
    assert got[0].item() == pytest.approx(16.894, abs=1e-3)
    assert all(x.isfinite().all() for x in got)
    assert_equal(got, value_and_gradients(ours(), leaves((u, v, 0.01))), room=1e-4)
    close = (*duplicate_captions(6, 7), 0.01)  # 100 in the exponent, where float32 overflows above 88.7
    assert_equal(
        value_and_gradients(ours(), leaves(close, torch.float32)), value_and_gradients(ours(), leaves(close)), room=1e-4
    )


@pytest.mark.parametrize("rows", [12, 6, 5, 1, 20])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_change_neither_value_nor_gradient(rows, keep, size, monkeypatch, on_ranks):
    case = (*draw(12, 5), 0.1)
    whole = value_and_gradients(ours(), leaves(case))
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", 12 * rows)
    assert_equal(together(on_ranks, case, [12 // size] * size, keep=keep), whole, room=1e-13)


def together(on_ranks, case, sizes, both=True, keep=True):
    """Value and gradients of one process, put together from ranks of these sizes as averaging over ranks would."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def one(ranks):
        e1, e2, tau = leaves(case)
        rows = slice(starts[ranks.rank], starts[ranks.rank] + sizes[ranks.rank])
        batch = GlobalBatch(e1, e2, keep_similarities=keep, ranks=ranks, rows=rows)
        own = [e.detach()[rows].requires_grad_() for e in (e1, e2)]
        return value_and_gradients(lambda e1, e2, tau: dhel_loss(e1, e2, batch, tau, both), [*own, tau], slope=2.0)

    columns = list(zip(*on_ranks(len(sizes), one), strict=True))
    mean = lambda parts: torch.stack(parts).mean(0)
    return [mean(columns[0]), *(torch.cat(parts) / len(sizes) for parts in columns[1:3]), mean(columns[3])]


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [3, 3, 3, 3], [7, 5], [1] * 12])
@pytest.mark.parametrize("both", [True, False])
def test_several_ranks_equal_one_process(sizes, both, on_ranks):
    case = (*draw(12, 5, 7), 0.1)
    assert_equal(together(on_ranks, case, sizes, both), value_and_gradients(ours(both), leaves(case)))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("both", [True, False])
def test_memory_is_linear_in_the_batch_or_one_views_similarities_and_the_host_never_waits(
    size, both, monkeypatch, recorder
):
    block, dim = 1024, 4
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", block)
    inputs = leaves((*draw(size, dim), 0.1))
    for keep, similarities in ((False, 0), (True, size * size)):
        with recorder() as seen:
            ours(both, keep)(*inputs).backward()
        assert seen.largest <= max(block, size * dim)
        assert seen.peak <= similarities + 4 * block + 10 * size * dim
        assert not seen.waits


def test_wrong_shapes_are_refused():
    e1, e2 = draw(4, 3)
    batch, tau = GlobalBatch(e1, e2), torch.tensor(0.1)
    with pytest.raises(ValueError, match=r"e1 must be \[4, 3\].*got \(3, 3\)"):
        dhel_loss(e1[:3], e2, batch, tau)
    with pytest.raises(ValueError, match=r"e2 must be \[4, 3\].*got \(4, 2\)"):
        dhel_loss(e1, e2[:, :2], batch, tau)
    with pytest.raises(ValueError, match=r"tau must be one scalar.*\(2, 4\)"):
        dhel_loss(e1, e2, batch, tau.expand(2, 4))
