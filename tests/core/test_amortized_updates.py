"""What AmorLIP's networks learn from batches: targets, averages, epochs, ranks, undoing, state."""

import io
import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.normalizers.amortized import AmortizedNormalizer, AmortizedOptions
from neuclip_lib.normalizers.amortized_network import ResidualNetwork, fit_loss

pytestmark = pytest.mark.quick
F64 = torch.float64
SIZE, DIM = 12, 6


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), dim=-1)


def scalar(value):
    return torch.tensor(value, dtype=F64)


def per_anchor(size=SIZE, seed=9):
    return 0.04 + 0.1 * torch.rand(2, size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pairs(step, size=SIZE, dim=DIM):
    """A batch that depends on the step alone."""
    return unit(size, dim, seed=100 + step), unit(size, dim, seed=200 + step)


def normalizer(size=SIZE, dim=DIM, steps_per_epoch=4, epochs=3, seed=0, **options):
    options = AmortizedOptions(**options)
    return AmortizedNormalizer(dim, size, steps_per_epoch, epochs, options, seed, dtype=F64)


def feed(amortized, step, tau=0.07):
    """One update; gives what a call needs after it."""
    e1, e2 = pairs(step)
    batch, tau = GlobalBatch(e1, e2), torch.as_tensor(tau, dtype=F64)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    amortized.update(batch, log_g, tau)
    return e1, e2, log_g, batch, tau


def state_of(amortized):
    return {name: part for name, part in amortized.state_dict().items() if name != "step"}


def naive_log_z(e1, e2, tau, pos_coef, bias, side):
    """The definition, a sum over pairs."""
    values = []
    for i in range(len(e1)):
        t = tau if tau.ndim == 0 else tau[side, i]
        total = 0.0
        for j in range(len(e1)):
            s = torch.dot(e1[i], e2[j]) if side == 0 else torch.dot(e1[j], e2[i])
            total = total + (pos_coef if i == j else 1) * torch.exp(s / t + bias)
        values.append(torch.log(total))
    return torch.stack(values)


def reference(steps, options, steps_per_epoch, epochs, tau=0.07):
    """Everything by hand: plain Adam made anew in every epoch, exponentials instead of logs, lists of copies."""
    network = ResidualNetwork(DIM, options.hidden or DIM)
    weights = network.initial(torch.Generator().manual_seed(0), "cpu", F64).requires_grad_()
    averaged = previous = weights.detach().clone()
    for step in range(steps):
        epoch = step // steps_per_epoch
        if step % steps_per_epoch == 0:
            previous = averaged.clone()
            adam = torch.optim.Adam([weights], lr=options.lr)
        e1, e2 = pairs(step)
        if step % options.every == 0:
            beta = options.prior_weight * (1 - math.cos(math.pi * min(1, epoch / epochs))) / 2
            lasts = network(previous, torch.stack((e1, e2))).exp()
            zs = [naive_log_z(e1, e2, scalar(tau), options.pos_coef, options.bias, side).exp() for side in (0, 1)]
            target = torch.stack([torch.log(beta * x + (1 - beta) * z) for x, z in zip(lasts, zs, strict=True)])
            for _ in range(options.updates):
                adam.zero_grad()
                fit_loss(target - network(weights, torch.stack((e1, e2))), options.loss).backward()
                adam.step()
        if step % options.average_every == 0:
            averaged = options.average * averaged + (1 - options.average) * weights.detach()
    return weights.detach(), averaged, previous


@pytest.mark.parametrize("options", [{}, {"every": 3, "loss": "js"}, {"hidden": 4, "average_every": 3, "loss": "kl"}])
def test_ten_steps_in_three_epochs_equal_the_definition(options):
    options = AmortizedOptions(lr=0.02, average=0.7, bias=-0.5, **options)
    amortized = AmortizedNormalizer(DIM, SIZE, 4, 3, options, dtype=F64)
    for step in range(10):
        feed(amortized, step)
    for got, expected in zip(
        (amortized.weights, amortized.averaged, amortized.previous), reference(10, options, 4, 3), strict=True
    ):
        assert (got - expected).abs().max() < 1e-9
    assert (amortized.weights - amortized.averaged).abs().max() > 1e-3
    assert (amortized.averaged - amortized.previous).abs().max() > 1e-3


def test_prior_rises_by_half_a_cosine_per_epoch_and_then_stays():
    amortized = normalizer(steps_per_epoch=2, epochs=9, prior_weight=0.8, prior_epochs=4)
    seen = []
    for step in range(14):
        feed(amortized, step)
        seen.append(amortized.prior)
    rise = [0.8 * (1 - math.cos(math.pi * t / 4)) / 2 for t in range(5)]
    assert seen == pytest.approx([b for b in (*rise, 0.8, 0.8) for _ in range(2)], abs=1e-15)
    assert rise[2] == pytest.approx(0.4) and rise[4] == pytest.approx(0.8)
    whole_run = normalizer(steps_per_epoch=1, epochs=3)
    feed(whole_run, 0), feed(whole_run, 1)
    assert whole_run.prior == pytest.approx(0.8 * (1 - math.cos(math.pi / 3)) / 2, abs=1e-15)


def test_adam_starts_anew_in_every_epoch():
    amortized = normalizer(steps_per_epoch=3, updates=2)
    counts = []
    for step in range(7):
        feed(amortized, step)
        counts.append(int(amortized.state_dict()["adam_step"]))
    assert counts == [2, 4, 6, 2, 4, 6, 2]


def test_steps_between_two_batches_to_learn_from_leave_the_networks_alone():
    amortized = normalizer(every=3, average_every=100)
    changed, last = [], amortized.weights.clone()
    for step in range(7):
        feed(amortized, step)
        changed.append(not torch.equal(last, amortized.weights))
        last = amortized.weights.clone()
    assert changed == [True, False, False, True, False, False, True]


def test_a_warm_start_begins_at_the_mean_of_log_z_and_averages_plainly_at_first():
    amortized = normalizer(warm_start=True, average=0.75, average_every=1, lr=1e-9)
    start = amortized.weights.clone()
    e1, e2, log_g, _, tau = feed(amortized, 0)
    mean = amortized._log_z(torch.stack((e1, e2)), log_g, tau).mean(1)
    assert torch.allclose(amortized.weights[:, -1], mean, atol=1e-7)
    assert (amortized.weights[:, :-1] - start[:, :-1]).abs().max() < 1e-7
    assert torch.allclose(amortized.averaged, amortized.weights, atol=1e-12)

    amortized = normalizer(warm_start=True, average=0.75, average_every=1, lr=0.05, steps_per_epoch=50)
    seen = []
    for step in range(6):
        feed(amortized, step)
        seen.append(amortized.weights.clone())
        if step < 4:
            assert torch.allclose(amortized.averaged, torch.stack(seen).mean(0), atol=1e-12)
    fourth = torch.stack(seen[:4]).mean(0)
    fifth = 0.75 * fourth + 0.25 * seen[4]
    assert torch.allclose(amortized.averaged, 0.75 * fifth + 0.25 * seen[5], atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"target": "combined", "loss": "kl", "every": 2, "warm_start": True}])
@pytest.mark.parametrize("tau", [0.07, "per anchor"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_several_ranks_give_the_state_and_the_alpha_of_one(size, tau, options, on_ranks):
    options = AmortizedOptions(average=0.7, **options)

    def train(ranks):
        amortized = AmortizedNormalizer(DIM, SIZE, 2, 3, options, 3, ranks, dtype=F64)
        b = SIZE // ranks.size
        rows = slice(ranks.rank * b, (ranks.rank + 1) * b)
        for step in range(5):
            e1, e2 = pairs(step)
            batch = GlobalBatch(e1, e2, ranks=ranks, rows=rows)
            t = per_anchor(seed=step) if tau == "per anchor" else scalar(tau)
            log_g = log_mean_exp_over_negatives(e1[rows], e2[rows], batch, t)
            amortized.update(batch, log_g, t)
        return state_of(amortized), torch.stack(amortized(e1[rows], e2[rows], log_g, batch, t))

    ((one, alpha),) = on_ranks(1, train)
    results = on_ranks(size, train)
    for state, _ in results:
        for name, part in one.items():
            assert (state[name] - part).abs().max() <= 1e-12 * max(1, part.abs().max())
            assert torch.equal(state[name], results[0][0][name])
    assert (torch.cat([own for _, own in results], 1) - alpha).abs().max() <= 1e-12


def fixed_problem(loss, steps, seed=0, **options):
    """Mean square error of log lambda on the pairs of one fixed data set, at the start and after ``steps``."""
    size, n, dim = 32, 128, 16
    e1 = unit(n, dim, seed=1)
    e2 = normalize(e1 + 0.5 * unit(n, dim, seed=2), dim=1)
    options = AmortizedOptions(loss=loss, prior_weight=0.0, **{"average": 0.9, **options})
    amortized = AmortizedNormalizer(dim, size, 50, 10, options, seed, dtype=F64)
    tau, draws = scalar(0.1), torch.Generator().manual_seed(3)

    def error():
        batch = GlobalBatch(e1, e2)
        log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
        target = amortized._log_z(torch.stack((e1, e2)), log_g, tau)
        return (amortized.network(amortized.averaged, torch.stack((e1, e2))) - target).square().mean().item()

    first = error()
    for _ in range(steps):
        rows = torch.randperm(n, generator=draws)[:size]
        batch = GlobalBatch(e1[rows], e2[rows])
        amortized.update(batch, log_mean_exp_over_negatives(e1[rows], e2[rows], batch, tau), tau)
    return first, error()


@pytest.mark.parametrize("loss", ["log", "js", "kl"])
def test_the_networks_learn_log_z(loss):
    first, last = fixed_problem(loss, 250)
    assert last < 0.01 * first


def test_a_warm_start_learns_in_a_fifth_of_the_steps_and_under_the_papers_average():
    first, cold = fixed_problem("log", 50, average=0.999)
    assert cold > 0.5 * first
    assert fixed_problem("log", 50, average=0.999, warm_start=True)[1] < 0.01 * first


@pytest.mark.parametrize("before", range(5))
def test_an_update_is_taken_back_to_the_bit(before):
    """At the start, inside an epoch, at an epoch's start, with and without averaging."""
    amortized, other = (normalizer(steps_per_epoch=3, average=0.5, warm_start=True) for _ in range(2))
    for step in range(before):
        feed(amortized, step), feed(other, step)
    saved = amortized.state_dict()
    undo = amortized.remember(GlobalBatch(*pairs(before)))
    feed(amortized, 77)
    assert not torch.equal(amortized.weights, saved["weights"])
    undo()
    for name, part in amortized.state_dict().items():
        assert torch.equal(torch.as_tensor(part), torch.as_tensor(saved[name])), name
    for step in (before, before + 1):
        feed(amortized, step), feed(other, step)
    for name, part in state_of(amortized).items():
        assert torch.equal(part, state_of(other)[name]), name


PARTS = ["weights", "averaged", "previous", "adam_step", "adam_exp_avg", "adam_exp_avg_sq", "step"]


@pytest.mark.parametrize("stop", [2, 4, 5])
@pytest.mark.parametrize("lost", [None, *PARTS])
def test_state_continues_bit_for_bit_and_no_part_is_idle(stop, lost):
    """Stopped inside an epoch (2, 5) and at its end (4), where Adam and the frozen network are replaced anyway."""
    first = normalizer(average=0.5)
    for step in range(stop):
        feed(first, step)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    second = normalizer(average=0.5, seed=77)
    assert sorted(state) == sorted(PARTS)
    if lost is not None:
        state[lost] = second.state_dict()[lost]
    second.load_state_dict(state)
    if lost is None:
        for name, part in state_of(first).items():
            assert torch.equal(part, state_of(second)[name]), name
    equal = []
    for step in range(stop, 10):
        feed(first, step), feed(second, step)
        equal += [torch.equal(first.weights, second.weights), torch.equal(first.averaged, second.averaged)]
    idle = lost is not None and stop == 4 and (lost == "previous" or lost.startswith("adam"))
    idle = idle or (lost == "previous" and stop == 2)  # beta is 0 in epoch 0
    assert all(equal) == (lost is None or idle)


def test_a_loaded_state_is_a_copy():
    first, second = normalizer(), normalizer(seed=1)
    feed(first, 0)
    state = first.state_dict()
    kept = state["averaged"].clone()
    second.load_state_dict(state)
    feed(first, 1), feed(second, 1), feed(second, 2)
    assert torch.equal(state["averaged"], kept)


def test_state_of_another_size_or_kind_is_refused_and_changes_nothing():
    amortized = normalizer()
    before = amortized.weights.clone()
    with pytest.raises(ValueError, match="hidden and the embedding dimension"):
        amortized.load_state_dict(normalizer(hidden=3).state_dict())
    with pytest.raises(ValueError, match="not the state of an amortized normalizer"):
        amortized.load_state_dict({"weights": torch.zeros(1)})
    assert torch.equal(amortized.weights, before)
