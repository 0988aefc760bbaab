"""rho as the mean KL of the negatives' weights from uniform: brute force, and the tau it makes stationary."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.rho import kl_from_uniform, suggest_rho

pytestmark = pytest.mark.quick

F64 = torch.float64


def pairs(n, d, seed=0, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    return tuple(normalize(torch.randn(n, d, generator=g, dtype=dtype), dim=1) for _ in range(2))


def brute_force(e1, e2, tau):
    """Loops over anchors and negatives; the weights from their definition."""
    n, sides = len(e1), []
    s = e1 @ e2.T
    for matrix in (s, s.T):
        row = []
        for i in range(n):
            weights = [math.exp(matrix[i, j].item() / tau) for j in range(n) if j != i]
            p = [weight / sum(weights) for weight in weights]
            row.append(sum(one * math.log(one * (n - 1)) for one in p if one > 0))
        sides.append(row)
    return torch.tensor(sides, dtype=F64)


@pytest.mark.parametrize("block", [None, 1, 4, 100])
@pytest.mark.parametrize(("n", "d", "tau"), [(2, 3, 0.1), (9, 4, 0.07), (11, 20, 1.0), (6, 3, 0.01)])
def test_kl_equals_brute_force_in_blocks_of_any_size(n, d, tau, block):
    e1, e2 = pairs(n, d)
    expected = brute_force(e1, e2, tau)
    got = kl_from_uniform(e1, e2, tau, block)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert suggest_rho(e1, e2, tau, block) == pytest.approx(expected.mean().item(), rel=1e-12, abs=1e-14)


def test_float32_embeddings_are_summed_in_float64():
    e1, e2 = pairs(40, 8, dtype=torch.float32)
    got = kl_from_uniform(e1, e2, 0.05)
    assert got.dtype == F64
    torch.testing.assert_close(got, kl_from_uniform(e1.double(), e2.double(), 0.05), rtol=1e-14, atol=0)


def test_it_lies_between_0_and_the_log_of_the_number_of_negatives():
    e1, e2 = pairs(30, 5)
    assert suggest_rho(e1, e2, 1e-6) == pytest.approx(math.log(29), rel=1e-9)
    assert suggest_rho(e1, e2, 1e-4) <= math.log(29)
    assert 0 <= suggest_rho(e1, e2, 1e3) < 1e-6
    values = [suggest_rho(e1, e2, tau) for tau in (0.01, 0.03, 0.1, 0.3, 1.0)]
    assert values == sorted(values, reverse=True)


def test_equal_negatives_have_uniform_weights():
    e1 = normalize(torch.eye(4, 4, dtype=F64) + 1, dim=1)
    e2 = normalize(torch.ones(4, 4, dtype=F64), dim=1)
    torch.testing.assert_close(kl_from_uniform(e1, e2, 0.01), torch.zeros(2, 4, dtype=F64), rtol=0, atol=1e-12)


def anchor_terms(e1, e2, tau, rho):
    """``tau_i (log g_i + rho)`` of both sides ``[2, n]``, written out from the definition of g."""
    n = len(e1)
    s, apart = e1 @ e2.T, torch.eye(n, dtype=torch.bool)
    sides = []
    for side, matrix in enumerate((s, s.T)):
        d = (matrix - matrix.diagonal()[:, None]) / tau[side, :, None]
        log_g = d.masked_fill(apart, -math.inf).logsumexp(1) - math.log(n - 1)
        sides.append(tau[side] * (log_g + rho[side]))
    return torch.stack(sides)


def minimise(function, low, high, like):
    """Golden-section search on every entry of ``like`` at once; ``function`` is convex in each."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = torch.full_like(like, low), torch.full_like(like, high)
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        goes_left = function(left) < function(right)
        low, high = torch.where(goes_left, low, left), torch.where(goes_left, right, high)
    return (low + high) / 2


@pytest.mark.parametrize("tau", [0.05, 0.2])
def test_one_tau_comes_to_rest_where_rho_was_measured(tau):
    e1, e2 = pairs(25, 6, seed=3)
    rho = torch.full((2, 25), suggest_rho(e1, e2, tau), dtype=F64)
    loss = lambda t: anchor_terms(e1, e2, t.expand(2, 25), rho).mean()
    found = minimise(loss, 0.01, 1.0, torch.zeros((), dtype=F64))
    assert found.item() == pytest.approx(tau, abs=1e-6)


def test_the_tau_of_each_sample_comes_to_rest_where_its_own_kl_is_rho():
    e1, e2 = pairs(25, 6, seed=4)
    wanted = torch.linspace(0.04, 0.3, 50, dtype=F64).view(2, 25)
    rho = kl_from_uniform(e1, e2, wanted)
    found = minimise(lambda t: anchor_terms(e1, e2, t, rho), 0.01, 1.0, wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_larger_rho_lowers_tau():
    e1, e2 = pairs(25, 6, seed=3)
    rho = suggest_rho(e1, e2, 0.1)
    slopes = []
    for factor in (0.9, 1.0, 1.1):
        tau = torch.full((2, 25), 0.1, dtype=F64, requires_grad=True)
        anchor_terms(e1, e2, tau, torch.full((2, 25), factor * rho, dtype=F64)).mean().backward()
        slopes.append(tau.grad.sum().item())
    assert slopes[0] < 0 < slopes[2] and slopes[1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"e2": pairs(4, 3)[1]}, r"paired rows \[n, d\]; got \[5, 3\] and \[4, 3\]"),
        ({"e1": pairs(1, 3)[0], "e2": pairs(1, 3)[1]}, "at least 2 pairs are needed, got 1"),
        ({"tau": 0.0}, "tau must be positive, got 0.0"),
        ({"tau": math.nan}, "tau must be positive, got nan"),
        ({"tau": torch.ones(5)}, r"tau must be one number or \[2, 5\]; got \[5\]"),
        ({"block": 0}, "block is the number of anchors"),
        ({"e1": pairs(5, 3)[0] * math.nan}, "not finite"),
    ],
)
def test_what_cannot_be_measured_is_named(change, words):
    e1, e2 = pairs(5, 3)
    arguments = {"e1": e1, "e2": e2, "tau": 0.1, "block": None} | change
    with pytest.raises(ValueError, match=words):
        suggest_rho(**arguments)
