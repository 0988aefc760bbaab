"""The normalizer error against loops, against estimators of known error, and without touching their state."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.evaluation import normalizer_error as module
from neuclip_lib.evaluation.normalizer_error import exact_log_normalizers, normalizer_error
from neuclip_lib.normalizers import BatchNormalizer, PrototypeNormalizer, PrototypeOptions

TAU = 0.07


def pairs(n: int, dim: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Related unit rows: a text is its image with noise."""
    g = torch.Generator().manual_seed(seed)
    e1 = torch.randn(n, dim, generator=g, dtype=dtype)
    e2 = e1 + 0.8 * torch.randn(n, dim, generator=g, dtype=dtype)
    return torch.nn.functional.normalize(e1, dim=1), torch.nn.functional.normalize(e2, dim=1)


def loop_target(e1: Tensor, e2: Tensor, i: int, tau: float) -> tuple[float, float]:
    def dot(a: Tensor, b: Tensor) -> float:
        return math.fsum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))

    others = [j for j in range(len(e1)) if j != i]
    own = dot(e1[i], e2[i])
    g1 = math.fsum(math.exp((dot(e1[i], e2[j]) - own) / tau) for j in others) / len(others)
    g2 = math.fsum(math.exp((dot(e1[j], e2[i]) - own) / tau) for j in others) / len(others)
    return math.log(g1), math.log(g2)


class Known:
    """Alpha looked up by sample index, with a shift: an estimator whose error is known."""

    def __init__(self, truth: tuple[Tensor, Tensor], index: Tensor, shift: float = 0.0) -> None:
        self.place = {int(k): i for i, k in enumerate(index)}
        self.truth, self.shift = truth, shift

    def __call__(self, e1: Tensor, e2: Tensor, log_g: Any, batch: GlobalBatch, tau: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.tensor([self.place[int(k)] for k in batch.index])
        return self.truth[0][at] + self.shift, self.truth[1][at] + self.shift


@pytest.mark.parametrize("tau", [0.5, 0.07, 0.01])
@pytest.mark.parametrize("tile", [2**22, 50])
def test_target_equals_the_loop(tau: float, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE", tile)
    e1, e2 = pairs(23)
    rows = torch.tensor([0, 7, 11, 22])
    got = exact_log_normalizers(e1, e2, rows, tau)
    want = [loop_target(e1, e2, int(i), tau) for i in rows]
    assert got[0].tolist() == pytest.approx([w[0] for w in want], rel=1e-12, abs=1e-12)
    assert got[1].tolist() == pytest.approx([w[1] for w in want], rel=1e-12, abs=1e-12)


def test_target_equals_the_training_batch_of_everything() -> None:
    e1, e2 = pairs(40)
    batch = GlobalBatch(e1, e2)
    want = log_mean_exp_over_negatives(e1, e2, batch, torch.tensor(TAU, dtype=torch.float64))
    got = exact_log_normalizers(e1, e2, torch.arange(40), TAU)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_exact_estimator_has_no_error_and_a_shift_is_the_bias() -> None:
    e1, e2 = pairs(50)
    index = torch.arange(50) * 3 + 11
    truth = exact_log_normalizers(e1, e2, torch.arange(50), TAU)
    estimators = {"exact": Known(truth, index), "shifted": Known(truth, index, shift=0.25)}
    got = normalizer_error(e1, e2, index, estimators, TAU, batch_size=8, anchors=20, seed=3)
    for part in (got["exact"], got["exact"]["image"], got["exact"]["text"]):
        assert (part["mse"], part["bias"]) == pytest.approx((0, 0), abs=1e-14)
        assert part["correlation"] == pytest.approx(1, abs=1e-12)
    for part in (got["shifted"], got["shifted"]["image"], got["shifted"]["text"]):
        assert (part["mse"], part["bias"]) == pytest.approx((0.0625, 0.25), rel=1e-12)
        assert part["correlation"] == pytest.approx(1, abs=1e-12)
    assert (got["exact"]["n"], got["exact"]["not_finite"]) == (20, 0)


def test_a_draw_of_everything_is_exact_for_the_batch_estimate() -> None:
    e1, e2 = pairs(30)
    got = normalizer_error(e1, e2, None, {"batch": BatchNormalizer(0.0)}, TAU, batch_size=30)["batch"]
    assert got["n"] == 30
    assert (got["mse"], got["bias"]) == pytest.approx((0, 0), abs=1e-12)
    part = normalizer_error(e1, e2, None, {"batch": BatchNormalizer(0.0)}, TAU, batch_size=6)["batch"]
    assert part["mse"] > 0.05
    assert part["bias"] < 0  # the log of a mean over few is below the log of the mean (Jensen)


class Listening:
    """Keeps what it is shown; answers with the drawn log_g."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, tuple[Tensor, Tensor], GlobalBatch, Tensor]] = []

    def __call__(self, *shown: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(shown)  # type: ignore[arg-type]
        return shown[2]


def test_figures_equal_a_loop_over_what_the_estimator_saw() -> None:
    e1, e2 = pairs(60, dtype=torch.float32)
    index = torch.randperm(60, generator=torch.Generator().manual_seed(9))
    listening = Listening()
    got = normalizer_error(e1, e2, index, {"it": listening}, TAU, batch_size=5, anchors=25, seed=1)["it"]
    ((a1, a2, log_g, batch, tau),) = listening.seen
    assert a1.dtype == log_g[0].dtype == tau.dtype == torch.float32
    assert float(tau) == pytest.approx(TAU)
    place = [int((index == k).nonzero()) for k in batch.index]
    assert len(set(place)) == 25  # without replacement
    torch.testing.assert_close((a1, a2, batch.e1, batch.e2), (e1[place], e2[place], e1[place], e2[place]))
    target = [loop_target(e1, e2, i, TAU) for i in place]
    estimate = [g.double().tolist() for g in log_g]
    for name, sides in {"image": [0], "text": [1]}.items():
        check(got[name], [v for s in sides for v in estimate[s]], [t[s] for s in sides for t in target])
    check(got, estimate[0] + estimate[1], [t[0] for t in target] + [t[1] for t in target])


def check(figures: dict[str, Any], x: list[float], y: list[float]) -> None:
    n, mx, my = len(x), sum(x) / len(x), sum(y) / len(y)
    assert figures["mse"] == pytest.approx(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / n, rel=1e-9)
    assert figures["bias"] == pytest.approx(mx - my, rel=1e-9)
    covariance = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    spread = math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))
    assert figures["correlation"] == pytest.approx(covariance / spread, rel=1e-9)


@pytest.mark.parametrize("tile", [2**22, 40])
def test_each_anchor_draws_other_pairs_each_once(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text j adds 2^j to the sum, so log_g tells which pairs were drawn."""
    monkeypatch.setattr(module, "_TILE", tile)
    n, negatives = 12, 4
    e1 = torch.ones(n, 1, dtype=torch.float64)
    e2 = torch.arange(n, dtype=torch.float64)[:, None] * math.log(2)  # exp(s_ij) = 2^j: a sum is a set of bits
    rows = torch.arange(n)
    count = torch.zeros(n, n)
    for seed in range(50):
        drawn1, drawn2 = module._drawn_log_g(e1, e2, rows, 1.0, negatives + 1, seed)
        for i, g in enumerate(drawn1.tolist()):
            bits = round(negatives * math.exp(g) * 2**i)
            assert bits.bit_count() == negatives
            count[i] += torch.tensor([bits >> j & 1 for j in range(n)])
        # Text anchors: s_ji - s_ii = 0 whatever is drawn.
        assert drawn2.tolist() == pytest.approx([0.0] * n, abs=1e-12)
    assert count.diagonal().tolist() == [0.0] * n
    off = count[~torch.eye(n, dtype=torch.bool)]
    assert float(off.mean()) == pytest.approx(50 * negatives / (n - 1))
    assert int(off.min()) >= 5 and int(off.max()) <= 34  # 18 expected, standard deviation 3.4


def test_draws_are_uniform_and_follow_the_seed() -> None:
    e1, e2 = pairs(9)
    twice = [normalizer_error(e1, e2, None, {"b": BatchNormalizer(0)}, TAU, 3, seed=s) for s in (0, 0, 1)]
    assert twice[0] == twice[1]
    assert twice[0] != twice[2]
    # The mean of g over many draws is g: an unbiased sample (standard error about .01 here).
    sums = torch.zeros(2, 9, dtype=torch.float64)
    for seed in range(400):
        sums += torch.stack(module._drawn_log_g(e1, e2, torch.arange(9), 0.5, 3, seed)).exp()
    exact = torch.stack(exact_log_normalizers(e1, e2, torch.arange(9), 0.5)).exp()
    assert float((sums / 400 / exact - 1).abs().max()) < 0.12


def test_eps_is_part_of_the_estimate_and_can_be_left_out() -> None:
    e1, e2 = pairs(200, dim=3)
    tau, eps = 0.05, 0.05
    got = normalizer_error(e1, e2, None, {"floor": BatchNormalizer(eps)}, tau, batch_size=200)["floor"]
    target = torch.cat(exact_log_normalizers(e1, e2, torch.arange(200), tau))
    estimate = torch.logaddexp(torch.tensor(math.log(eps), dtype=torch.float64), target)
    assert got["bias"] == pytest.approx(float((estimate - target).mean()), rel=1e-9)
    above = target >= math.log(eps)
    assert 20 < int(above.sum()) < 380
    assert got["above_eps"]["values"] == int(above.sum())
    assert got["above_eps"]["mse"] == pytest.approx(float((estimate - target)[above].square().mean()), rel=1e-9)
    assert got["above_eps"]["mse"] < got["mse"]
    none = normalizer_error(e1, e2, None, {"huge": BatchNormalizer(1e30)}, tau, batch_size=20)["huge"]["above_eps"]
    assert (none["values"], none["mse"]) == (0, None)


def test_undefined_figures_are_none() -> None:
    e1, e2 = pairs(30)

    def constant(a1: Tensor, a2: Tensor, log_g: Any, batch: GlobalBatch, tau: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(log_g[0], -0.3), torch.full_like(log_g[1], -0.3)

    def broken(a1: Tensor, a2: Tensor, log_g: Any, batch: GlobalBatch, tau: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(log_g[0] > log_g[0].median(), math.nan, log_g[0]), log_g[1]

    got = normalizer_error(e1, e2, None, {"constant": constant, "broken": broken}, TAU, batch_size=5)
    assert got["constant"]["correlation"] is None
    assert got["constant"]["mse"] > 0
    assert got["broken"]["mse"] is got["broken"]["image"]["bias"] is None
    assert got["broken"]["text"]["mse"] > 0
    assert got["broken"]["not_finite"] == 15


def test_measuring_changes_no_state_and_no_generator() -> None:
    e1, e2 = pairs(300, dim=8, dtype=torch.float32)
    normalizer = PrototypeNormalizer(8, 32, PrototypeOptions(m=16, updates=2), seed=1)
    tau = torch.tensor(TAU)
    for start in range(0, 96, 32):
        batch = GlobalBatch(e1[start : start + 32], e2[start : start + 32])
        normalizer.update(batch, log_mean_exp_over_negatives(batch.e1, batch.e2, batch, tau), tau)
    before, random = copy.deepcopy(normalizer.state_dict()), torch.get_rng_state()
    estimators = {"npn": normalizer, "batch": BatchNormalizer(1 / 31)}
    got = normalizer_error(e1, e2, None, estimators, tau, batch_size=32, anchors=280)
    after = normalizer.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name
    assert torch.equal(random, torch.get_rng_state())
    # More anchors than one call takes: the same numbers as one estimator over all of them.
    alpha = normalizer(e1, e2, (e1[:, 0], e1[:, 0]), GlobalBatch(e1, e2), tau)
    rows = module._draw_anchors(300, 280, 0)
    target = exact_log_normalizers(e1, e2, rows, float(tau))
    error = torch.cat([alpha[0][rows] - target[0], alpha[1][rows] - target[1]])
    assert got["npn"]["mse"] == pytest.approx(float(error.square().mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e2": torch.ones(9, 2)}, "paired rows"),
        ({"index": torch.arange(9)}, r"index must be \[10\]"),
        ({"batch_size": 11}, "2 to the 10 training pairs; got 11"),
        ({"batch_size": 1}, "got 1"),
        ({"anchors": 1}, "at least 2 anchors"),
        ({"tau": 0.0}, "tau must be above 0"),
        ({"e1": torch.full((10, 2), math.nan)}, "not finite"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    good = {"e1": torch.ones(10, 2), "e2": torch.ones(10, 2), "index": None, "tau": 0.1, "batch_size": 4}
    with pytest.raises(ValueError, match=message):
        normalizer_error(**{**good, "estimators": {}, **change})
