"""The prototype network: closed forms against autograd, filling, restarts, state."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.normalizers import PrototypeNormalizer, PrototypeOptions
from neuclip_lib.normalizers.prototype_math import prototype_alpha, prototype_gradient

pytestmark = pytest.mark.quick
F64 = torch.float64


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), dim=-1)


def scalar(value):
    return torch.tensor(value, dtype=F64)


def naive_alpha(e, partner, w, tau, eps):
    """The definition, one anchor at a time; ``w`` may be of any length."""
    values = []
    for i in range(len(e)):
        cosines = torch.stack([torch.dot(e[i], column) / column.norm() for column in w])
        log_mean = torch.logsumexp((cosines - torch.dot(e[i], partner[i])) / tau, 0) - math.log(len(w))
        values.append(torch.logaddexp(torch.tensor(math.log(eps), dtype=F64), log_mean) if eps else log_mean)
    return torch.stack(values)


def naive_loss(e1, e2, w, tau, eps, log_x):
    """The unified objective as a function of the prototypes."""
    a1, a2 = naive_alpha(e1, e2, w[0], tau, eps), naive_alpha(e2, e1, w[1], tau, eps)
    h = torch.exp(log_x[0] - a1) + a1 - 1 + torch.exp(log_x[1] - a2) + a2 - 1
    return tau * h.sum() / (2 * len(e1))


CASES = [(6, 5, 9, 0.07, 1e-6), (6, 5, 4, 0.01, 1e-6), (2, 3, 1, 0.05, 0.0), (4, 1024, 7, 0.03, 1e-3)]


@pytest.mark.parametrize(("size", "dim", "m", "tau", "eps"), CASES)
def test_alpha_and_its_gradients_equal_autograd(size, dim, m, tau, eps):
    e1, e2 = unit(size, dim, seed=1).requires_grad_(), unit(size, dim, seed=2).requires_grad_()
    w, t = 3 * unit(2, m, dim, seed=3), scalar(tau).requires_grad_()
    weights = torch.randn(2, size, dtype=F64, generator=torch.Generator().manual_seed(4))
    expected = naive_alpha(e1, e2, w[0], t, eps), naive_alpha(e2, e1, w[1], t, eps)
    total = (weights[0] * expected[0]).sum() + (weights[1] * expected[1]).sum()
    grads = torch.autograd.grad(total, (e1, e2, t))
    got = prototype_alpha(e1, e2, normalize(w, dim=2), t, eps, GlobalBatch(e1, e2))
    got_grads = torch.autograd.grad((weights[0] * got[0]).sum() + (weights[1] * got[1]).sum(), (e1, e2, t))
    for a, b in zip((*got, *got_grads), (*expected, *grads), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize(("size", "dim", "m", "tau", "eps"), CASES)
def test_prototype_gradient_equals_autograd_and_is_orthogonal_to_the_prototypes(size, dim, m, tau, eps):
    e1, e2 = unit(size, dim, seed=1), unit(size, dim, seed=2)
    w = (torch.rand(2, m, 1, dtype=F64) + 0.5) * unit(2, m, dim, seed=3)
    w.requires_grad_()
    log_x = torch.randn(2, size, dtype=F64, generator=torch.Generator().manual_seed(4))
    (expected,) = torch.autograd.grad(naive_loss(e1, e2, w, scalar(tau), eps, log_x), w)
    e, positive = torch.stack((e1, e2)), (e1 * e2).sum(1)
    got = prototype_gradient(e, positive, w.detach(), log_x, scalar(tau), eps)
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()
    along = (got * w.detach()).sum(2).abs()
    assert along.max() <= 1e-14 * got.norm(dim=2).max() * w.detach().norm(dim=2).max() + 1e-16


def test_all_other_texts_as_prototypes_are_exact():
    e1, e2 = unit(12, 6, seed=1), unit(12, 6, seed=2)
    t = scalar(0.07)
    log_g = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), t)
    for i in range(12):
        others = torch.arange(12) != i
        w = torch.stack((e2[others], e1[others]))
        alpha = prototype_alpha(e1, e2, w, t, 1e-6, GlobalBatch(e1, e2))
        for side in (0, 1):
            exact = torch.logaddexp(scalar(math.log(1e-6)), log_g[side][i])
            assert alpha[side][i].item() == pytest.approx(exact.item(), abs=1e-12)


def test_all_texts_as_prototypes_give_the_floor_of_the_own_positive():
    e1, e2 = unit(12, 6, seed=1), unit(12, 6, seed=2)
    t, eps = scalar(0.07), 1e-6
    log_g1 = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), t)[0]
    alpha = prototype_alpha(e1, e2, torch.stack((e2, e1)), t, eps, GlobalBatch(e1, e2))[0]
    expected = torch.log(eps + 1 / 12 + (1 - 1 / 12) * log_g1.exp())
    assert torch.allclose(alpha, expected, atol=1e-12)


def normalizer(m=20, batch_size=8, dim=6, seed=0, **options):
    options = PrototypeOptions(m=m, **{"updates": 3, "restart_every": 5, **options})
    return PrototypeNormalizer(dim, batch_size, options, seed, dtype=F64)


def feed(npn, step, size=8, dim=6, tau=0.07):
    """One batch that depends on the step alone."""
    e1, e2 = unit(size, dim, seed=100 + step), unit(size, dim, seed=200 + step)
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, scalar(tau))
    npn.update(batch, log_g, scalar(tau))
    return e1, e2, log_g


@pytest.mark.parametrize("tau", [0.07, 0.01])
def test_prototypes_after_ten_updates_equal_autograd_with_torchs_adagrad(tau):
    npn = normalizer(m=8, updates=10)
    e1, e2 = unit(8, 6, seed=100), unit(8, 6, seed=200)
    # The first filling is from this very batch: the same start for the reference, whatever the order of the draw.
    draw = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    w = torch.stack((e2[draw], e1[draw])).requires_grad_()
    reference = torch.optim.Adagrad([w], lr=1e-2, eps=1e-10)
    t = scalar(tau)
    log_g = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), t)
    log_x = torch.logaddexp(scalar(math.log(1e-6)), torch.stack(log_g))
    smallest = torch.full_like(w, math.inf)
    for _ in range(10):
        reference.zero_grad()
        naive_loss(e1, e2, w, t, 1e-6, log_x).backward()
        smallest = torch.minimum(smallest, w.grad.abs())
        reference.step()
    feed(npn, 0, tau=tau)
    clear = smallest > 1e-6 * 1e-10
    assert clear.float().mean() > 0.9
    gap = ((npn.w - w.detach()) * clear).norm() / w.detach().norm()
    assert gap <= 1e-12
    assert (npn.w - torch.stack((e2[draw], e1[draw]))).abs().max() > 1e-3


def test_prototypes_stay_where_the_gradient_is_zero_in_exact_arithmetic():
    """Identical embeddings: alpha is exact and every prototype is parallel to every anchor."""
    npn = normalizer(m=8)
    e = normalize(torch.ones(8, 6, dtype=F64), dim=1)
    batch = GlobalBatch(e, e)
    npn.update(batch, log_mean_exp_over_negatives(e, e, batch, scalar(0.07)), scalar(0.07))
    assert (npn.w - e).abs().max() < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("tau", [0.07, 0.01])
def test_prototypes_stay_when_only_rounding_is_left(dtype, tau):
    """All images equal, all texts equal, both different: alpha is exact, but no prototype is parallel to an anchor."""
    npn = PrototypeNormalizer(6, 8, PrototypeOptions(m=8, updates=10), dtype=dtype)
    e1, e2 = (unit(1, 6, seed=seed).to(dtype).expand(8, 6) for seed in (1, 2))
    batch, t = GlobalBatch(e1, e2), torch.tensor(tau, dtype=dtype)
    npn.update(batch, log_mean_exp_over_negatives(e1, e2, batch, t), t)
    assert torch.equal(npn.w[0], e2) and torch.equal(npn.w[1], e1)


@pytest.mark.parametrize("log_g", [36.0, 56.0, 76.0, 120.0])
def test_a_hard_batch_at_the_lowest_temperature_still_moves_float32_prototypes(log_g):
    """Without a bound the squares in AdaGrad overflow above a log weight of 44, and the weight itself above 88."""
    moved = {}
    for dtype in (torch.float32, F64):
        npn = PrototypeNormalizer(64, 32, PrototypeOptions(m=32, updates=0), dtype=dtype)
        t = torch.tensor(0.01, dtype=dtype)
        batch = GlobalBatch(unit(32, 64, seed=1).to(dtype), unit(32, 64, seed=2).to(dtype))
        npn.update(batch, (t.expand(32), t.expand(32)), t)
        e1, e2 = unit(32, 64, seed=3).to(dtype), unit(32, 64, seed=4).to(dtype)
        batch = GlobalBatch(e1, e2)
        before = npn.w.clone()
        npn.options = PrototypeOptions(m=32, updates=10)
        alpha = npn(e1, e2, (t, t), batch, t)
        npn.update(batch, (alpha[0] + log_g, alpha[1] + log_g), t)
        assert npn.w.isfinite().all() and npn.state_dict()["adagrad_sum"].isfinite().all()
        moved[dtype] = (npn.w - before).norm(dim=2).mean().item()
    # The bound acts as a clipped gradient: float32 may move more than float64, never by more than ten full steps.
    assert 0.9 * moved[F64] < moved[torch.float32] < 10 * 1e-2 * math.sqrt(64)
    assert moved[F64] > 0.05


def test_columns_are_distinct_and_the_mean_is_over_the_active_ones_while_filling():
    npn = normalizer(m=20, restart_every=50)
    for step in range(6):
        e1, e2, log_g = feed(npn, step)
        assert npn.active == min(20, 8 * (step + 1))
        assert not npn.w[:, npn.active :].any()
        expected = naive_alpha(e1, e2, npn.w[0, : npn.active], scalar(0.07), 1e-6)
        got = npn(e1, e2, log_g, GlobalBatch(e1, e2), scalar(0.07))[0]
        assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()
    for side in npn.w:
        assert len(torch.unique(side.round(decimals=9), dim=0)) == 20


def test_a_restart_takes_recent_pairs_once_each_and_forgets_adagrad():
    npn = normalizer(m=6, batch_size=8, restart_every=4, updates=2)
    seen = [feed(npn, step)[:2] for step in range(4)]
    before = npn.w.clone()
    npn.options = PrototypeOptions(m=6, restart_every=4, updates=0)
    seen.append(feed(npn, 4)[:2])
    # The queue holds max(m, B) = 8 pairs, so the draw is from the last batch; texts stand on side 0.
    for side, modality in ((0, 1), (1, 0)):
        last = seen[-1][modality]
        distance = torch.cdist(npn.w[side], last)
        assert distance.min(1).values.max() < 1e-12
        assert len(distance.argmin(1).unique()) == 6
    assert torch.equal(torch.cdist(npn.w[0], seen[-1][1]).argmin(1), torch.cdist(npn.w[1], seen[-1][0]).argmin(1))
    assert not npn.state_dict()["adagrad_sum"].any()
    assert (npn.w - before).abs().max() > 0.1


def test_a_restart_after_the_queue_has_wrapped_takes_exactly_the_last_pairs():
    npn = normalizer(m=10, batch_size=4, restart_every=4, updates=0)
    seen = [feed(npn, step, size=4)[1] for step in range(5)]
    last = torch.cat(seen)[-10:]
    distance = torch.cdist(npn.w[0], last)
    assert distance.min(1).values.max() < 1e-12
    assert sorted(distance.argmin(1).tolist()) == list(range(10))


def test_while_filling_the_new_columns_learn_from_their_first_batch():
    """Three steps with two updates each, against autograd and AdaGrad on columns appended before the updates."""
    npn = normalizer(m=24, batch_size=8, restart_every=50, updates=2)
    w, sums, t = None, None, scalar(0.07)
    for step in range(3):
        e1, e2 = unit(8, 6, seed=100 + step), unit(8, 6, seed=200 + step)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(0)) if step == 0 else torch.arange(8)
        fresh = torch.stack((e2[order], e1[order]))
        w = fresh if w is None else torch.cat((w, fresh), 1)
        sums = torch.zeros_like(fresh) if sums is None else torch.cat((sums, torch.zeros_like(fresh)), 1)
        log_g = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), t)
        log_x = torch.logaddexp(scalar(math.log(1e-6)), torch.stack(log_g))
        for _ in range(2):
            w = w.detach().requires_grad_()
            naive_loss(e1, e2, w, t, 1e-6, log_x).backward()
            sums = sums + w.grad**2
            w = w.detach() - 1e-2 * w.grad / (sums.sqrt() + 1e-10)
        feed(npn, step)
        assert (npn.w[:, : w.shape[1]] - w).abs().max() < 1e-9
        assert (npn.state_dict()["adagrad_sum"][:, : w.shape[1]] - sums).abs().max() <= 1e-9 * sums.max()


@pytest.mark.parametrize("size", [6, 4])
def test_an_embedding_of_zeros_leaves_the_prototypes_finite(size):
    """At the first filling (6 pairs for 6 columns), and while columns are still free."""
    npn = normalizer(m=6, updates=3)
    for seed in range(2):
        e = unit(2, size, 6, seed=seed).clone()
        e[1, 1] = 0.0
        batch = GlobalBatch(e[0], e[1])
        npn.update(batch, log_mean_exp_over_negatives(e[0], e[1], batch, scalar(0.07)), scalar(0.07))
    assert npn.w.isfinite().all() and npn.active == 6
    torch.testing.assert_close(npn.prototypes.norm(dim=2), torch.ones(2, 6, dtype=F64))


def test_without_restarts_the_prototypes_only_follow_their_updates():
    npn = normalizer(m=8, restart_every=0, updates=0)
    feed(npn, 0)
    first = npn.w.clone()
    for step in range(1, 6):
        feed(npn, step)
    assert torch.equal(npn.w, first)


def test_updates_bring_alpha_closer_to_the_batch_it_learns_from():
    npn = normalizer(m=8, updates=50, restart_every=0)
    e1, e2, log_g = feed(npn, 0)
    learned = npn(e1, e2, log_g, GlobalBatch(e1, e2), scalar(0.07))[0]
    still = normalizer(m=8, updates=0)
    feed(still, 0)
    filled = still(e1, e2, log_g, GlobalBatch(e1, e2), scalar(0.07))[0]
    assert (learned - log_g[0]).pow(2).mean() < 0.5 * (filled - log_g[0]).pow(2).mean()


@pytest.mark.parametrize("stop", [1, 2, 3, 7])
@pytest.mark.parametrize("lost", [None, "adagrad_sum", "queue", "generator", "counters"])
def test_state_continues_bit_for_bit_and_no_part_is_idle(stop, lost):
    """Stopped while filling (1, 2), after it (3) and after a restart (7); each part of the state is needed."""
    options = {"m": 20, "batch_size": 64, "updates": 2, "restart_every": 5}
    first = normalizer(**options)
    for step in range(stop):
        feed(first, step)
    state = first.state_dict()
    second = normalizer(**options, seed=77)
    if lost is not None:
        state[lost] = second.state_dict()[lost]
    second.load_state_dict(state)
    equal = []
    for step in range(stop, 6 if stop < 5 else 11):
        feed(first, step), feed(second, step)
        equal.append(torch.equal(first.w, second.w))
    assert all(equal) == (lost is None)


def test_state_of_another_size_or_kind_is_refused():
    with pytest.raises(ValueError, match="saved w is"):
        normalizer(m=8).load_state_dict(normalizer(m=9).state_dict())
    with pytest.raises(ValueError, match="not the state of a prototype normalizer"):
        normalizer().load_state_dict({"w": torch.zeros(1)})


def test_alpha_attached_and_detached():
    npn = normalizer(m=8)
    e1, e2, log_g = feed(npn, 0)
    batch = GlobalBatch(e1, e2)
    e1.requires_grad_()
    assert npn(e1, e2, log_g, batch, scalar(0.07))[0].requires_grad
    npn.options = PrototypeOptions(m=8, detach_alpha=True)
    assert not npn(e1, e2, log_g, batch, scalar(0.07))[0].requires_grad


def test_operators_of_an_update_are_few_and_nothing_waits_for_the_host():
    npn = normalizer(m=8, updates=1)
    feed(npn, 0)
    e, positive = unit(2, 8, 6, seed=9), unit(1, 8, seed=3)[0]
    log_x = torch.zeros(2, 8, dtype=F64)
    npn._descend(e, positive, log_x, scalar(0.07))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        npn._descend(e, positive, log_x, scalar(0.07))
    outside = [event for event in profile.events() if event.cpu_parent is None]
    names = [event.name for event in outside if event.name.startswith("aten::")]
    assert names.count("aten::_fused_adagrad_") == 1
    assert len(names) <= 55
    assert not {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"} & {*names}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"m": 0}, "m must be at least 1"),
        ({"updates": -1}, "must not be negative"),
        ({"lr": 0.0}, "must be positive"),
        ({"eps": -1.0}, "eps must be finite"),
        ({"batch_share": 1.5}, "batch_share must be from 0 to 1"),
        ({"share_decay_epochs": 0}, "share_decay_epochs must be at least 1"),
        ({"weight_cap": 0.5}, "weight_cap must be at least 1"),
        ({"weight_cap": float("nan")}, "weight_cap must be at least 1"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        PrototypeNormalizer(4, 8, PrototypeOptions(**options))


def test_asking_before_the_first_batch_and_too_large_a_batch_are_errors():
    npn = normalizer(m=4, batch_size=4)
    e1, e2 = unit(8, 6, seed=1), unit(8, 6, seed=2)
    batch = GlobalBatch(e1, e2)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, scalar(0.07))
    with pytest.raises(RuntimeError, match="empty"):
        npn(e1, e2, log_g, batch, scalar(0.07))
    with pytest.raises(ValueError, match="batch of 8 pairs does not fit"):
        npn.update(batch, log_g, scalar(0.07))
    assert npn.bytes_for(10**9) == 0
