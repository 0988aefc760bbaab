"""Temperatures per sample: Adam against a loop over samples, one row alone, several ranks, undo, resume."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import Objective, global_contrastive_loss
from neuclip_lib.per_sample_temperature import PerSampleTemperature
from neuclip_lib.ranks import ONE
from neuclip_lib.temperature import AnyTemperature, TemperatureOptions

pytestmark = pytest.mark.quick

F64 = torch.float64
N, B, D, PER_EPOCH = 13, 12, 5, 2
OPTIONS = TemperatureOptions(init=0.1, low=0.05, high=0.2, per_sample_lr=0.02)


def make(ranks=ONE, options=OPTIONS, dtype=F64, n=N, **kwargs) -> PerSampleTemperature:
    return PerSampleTemperature(options, n, PER_EPOCH, ranks, dtype=dtype, **kwargs)


def unit(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, generator=g, dtype=F64), dim=-1)


def batch_of(index, ranks=ONE, seed=0):
    index = torch.as_tensor(index)
    e1, e2 = unit(2, len(index), D, seed=seed)
    b = len(index) // ranks.size
    return GlobalBatch(e1, e2, index, ranks=ranks, rows=slice(ranks.rank * b, (ranks.rank + 1) * b))


def finish(temperature, batch, slopes, step, skip=None):
    """A step whose gradient of each anchor's own term is ``slopes [2, B]``, of which this rank has its rows."""
    temperature.begin(step)
    tau = temperature(batch)
    tau.grad = torch.zeros_like(tau)
    tau.grad[:, batch.rows] = slopes[:, batch.rows].to(tau) / (2 * batch.size)
    temperature.finish(tau, batch, skip)
    return tau


def drawn(steps, seed=1, scale=4.0):
    """Indices with repeats, and slopes of which some are beyond the clamp."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(N, (B,), generator=g), scale * torch.randn(2, B, generator=g, dtype=F64)


class ByHand:
    """Plain Python, one sample and side after the other."""

    def __init__(self, options=OPTIONS, root=True):
        self.options, self.root = options, root
        self.tau = [[options.init] * N for _ in range(2)]
        self.first, self.second = ([[0.0] * N for _ in range(2)] for _ in range(2))

    def step(self, index, slopes, step):
        o, epoch = self.options, step // PER_EPOCH
        beta1, beta2 = (0.0, 0.0) if epoch == 0 else (o.per_sample_beta1, o.per_sample_beta2)
        for side in range(2):
            for sample in sorted(set(index)):
                seen = [slopes[side][k] for k in range(len(index)) if index[k] == sample]
                seen = [min(max(slope, -o.per_sample_clamp), o.per_sample_clamp) for slope in seen]
                slope = sum(seen) / len(seen)
                m = beta1 * self.first[side][sample] + (1 - beta1) * slope
                v = beta2 * self.second[side][sample] + (1 - beta2) * slope**2
                self.first[side][sample], self.second[side][sample] = m, v
                m, v = m / (1 - beta1 ** (epoch + 1)), v / (1 - beta2 ** (epoch + 1))
                moved = o.per_sample_lr * m / ((math.sqrt(v) if self.root else v) + o.per_sample_eps)
                self.tau[side][sample] = min(max(self.tau[side][sample] - moved, o.low), o.high)


@pytest.mark.parametrize("root", [True, False])
def test_steps_equal_a_loop_over_samples_and_epochs(root):
    options = TemperatureOptions(0.1, low=0.05, high=0.2, per_sample_lr=0.02, per_sample_beta1=0.8, per_sample_eps=1e-3)
    ours, plain = make(options=options, root=root), ByHand(options, root)
    for step, (index, slopes) in enumerate(drawn(9)):
        finish(ours, batch_of(index), slopes, step)
        plain.step(index.tolist(), slopes.tolist(), step)
        torch.testing.assert_close(ours.tau.whole(), torch.tensor(plain.tau, dtype=F64), rtol=1e-12, atol=1e-15)
    moments = torch.tensor([*plain.first, *plain.second], dtype=F64)
    torch.testing.assert_close(ours.moments.whole(), moments, rtol=1e-12, atol=1e-15)
    moved = ours.tau.whole()
    assert moved.unique().numel() > N, "many are strictly between the bounds"
    assert moved.min() >= 0.05 and moved.max() <= 0.2


def test_in_epoch_0_a_step_is_the_learning_rate_and_the_clamp_shows_without_the_root():
    slopes = torch.full((2, 3), 0.5, dtype=F64)
    slopes[0, 1], slopes[1, 2] = 40.0, -40.0
    batch = batch_of([4, 0, 9])
    ours = make()
    finish(ours, batch, slopes, 0)
    expected = torch.tensor([[0.08, 0.08, 0.08], [0.08, 0.08, 0.12]], dtype=F64)
    torch.testing.assert_close(ours.at(batch.index), expected, rtol=1e-6, atol=0)
    published = make(root=False)
    finish(published, batch, slopes, 0)
    expected = torch.tensor([[0.06, 0.096, 0.06], [0.06, 0.06, 0.104]], dtype=F64)
    torch.testing.assert_close(published.at(batch.index), expected, rtol=1e-6, atol=0)


def test_how_long_steps_are_after_epoch_0_is_what_the_module_says():
    def lengths(root):
        temperature = make(options=TemperatureOptions(0.5, high=1.0, per_sample_lr=1e-4), root=root)
        batch, slopes = batch_of([0, 1]), torch.ones(2, 2, dtype=F64)
        seen = []
        for epoch in range(37):
            before = temperature.typical()
            finish(temperature, batch, slopes, epoch * PER_EPOCH)
            seen.append((before - temperature.typical()).item() / 1e-4)
        return seen

    rooted, published = lengths(True), lengths(False)
    assert rooted[0] == pytest.approx(1, rel=1e-6) and published[0] == pytest.approx(1, rel=1e-6)
    assert f"{rooted[1]:.2f}" == "0.24"
    assert (f"{min(rooted[2:]):.2f}", f"{max(rooted[2:]):.2f}") == ("0.15", "0.20")
    assert (f"{published[1]:.3f}", f"{published[36]:.3f}") == ("0.011", "0.037")


@pytest.mark.parametrize("repeats", [(0, 1, 2, 3), (5, 5, 5, 5), (2, 7, 2, 7), (1, 3, 1, 1), (4, 4, 0, 4)])
def test_a_sample_that_is_several_times_in_a_batch_moves_once_by_the_mean_of_its_slopes(repeats):
    slopes = torch.tensor([[1.0, -2.0, 4.0, 9.0], [0.5, 0.25, -9.0, 3.0]], dtype=F64)
    ours, alone = make(root=False), make(root=False)
    finish(ours, batch_of(repeats), slopes, 0)
    means = []
    for sample in dict.fromkeys(repeats):
        places = [k for k, other in enumerate(repeats) if other == sample]
        means.append(slopes[:, places].clamp(-5, 5).mean(1))
    one_each = list(dict.fromkeys(repeats))
    if len(one_each) == 1:  # a batch has at least two pairs: one more sample, that does not move
        one_each, means = [*one_each, 12], [*means, torch.zeros(2, dtype=F64)]
    finish(alone, batch_of(one_each), torch.stack(means, 1), 0)
    torch.testing.assert_close(ours.tau.whole(), alone.tau.whole(), rtol=1e-13, atol=0)


def test_all_occurrences_of_a_sample_read_the_same_new_tau():
    temperature, index = make(dtype=torch.float32), torch.tensor([3, 8, 3, 3, 8, 3])
    finish(temperature, batch_of(index), torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), 0)
    tau = temperature(batch_of(index))
    for places in ([0, 2, 3, 5], [1, 4]):
        assert torch.equal(tau[:, places], tau[:, places[:1]].expand(-1, len(places)))


def test_a_slope_in_one_row_moves_that_sample_alone():
    temperature, slopes = make(), torch.zeros(2, 5, dtype=F64)
    slopes[0, 3] = 1.0
    index = torch.tensor([6, 2, 11, 4, 0])
    finish(temperature, batch_of(index), slopes, 0)
    moved = (temperature.tau.whole() != 0.1).nonzero().tolist()
    assert moved == [[0, 4]]
    moved = (temperature.moments.whole() != 0).nonzero().tolist()
    assert moved == [[0, 4], [2, 4]]


def test_a_tau_changed_in_row_3_changes_the_loss_of_row_3_alone():
    temperature, batch = make(), batch_of([6, 2, 11, 4, 0])
    before = temperature(batch)
    temperature.tau.write(torch.tensor([4]), torch.tensor([[0.15], [0.1]], dtype=F64))
    after = temperature(batch)
    log_g = [log_mean_exp_over_negatives(batch.e1, batch.e2, batch, tau) for tau in (before, after)]
    assert (log_g[0][0] != log_g[1][0]).nonzero().tolist() == [[3]]
    assert torch.equal(log_g[0][1], log_g[1][1])


def real_step(temperature, batch, step):
    """RGCL with the batch's own normalizer: the gradient of tau as a training step makes it."""
    temperature.begin(step)
    tau = temperature(batch)
    e1, e2 = (batch.own(e).clone().requires_grad_() for e in (batch.e1, batch.e2))
    objective = Objective(eps=0.0, factor="tau", rho=1.5)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    alpha = objective.log_eps_plus_g((log_g[0].detach(), log_g[1].detach()), batch.size)
    global_contrastive_loss(e1, e2, alpha, batch, tau, objective, log_g).backward()
    temperature.finish(tau, batch)
    return tau


def test_what_moves_tau_is_the_slope_of_the_anchors_own_term():
    batch, temperature = batch_of([6, 2, 11, 4, 0]), make(root=False)
    real_step(temperature, batch, 0)
    tau = torch.full((2, 5), 0.1, dtype=F64, requires_grad=True)
    s = batch.e1 @ batch.e2.T
    apart = torch.eye(5, dtype=torch.bool)
    terms = []
    for side, x in enumerate((s, s.T)):
        d = ((x - x.diagonal()[:, None]) / tau[side, :, None]).masked_fill(apart, -math.inf)
        terms.append(tau[side] * (d.logsumexp(1) - math.log(4) + 1.5))
    (slopes,) = torch.autograd.grad(torch.stack(terms).sum(), tau)
    expected = (0.1 - 0.02 * slopes / (slopes.square() + 1e-8)).clamp(0.05, 0.2)
    torch.testing.assert_close(temperature.at(batch.index), expected, rtol=1e-10, atol=0)
    assert slopes.abs().max() < 5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_ends_with_the_same_tables(size, on_ranks):
    def run(ranks):
        temperature = make(ranks)
        seen = []
        for step, (index, _) in enumerate(drawn(5)):
            batch = batch_of(index, ranks, seed=step)
            seen.append(real_step(temperature, batch, step).detach())
        probe = temperature.at(torch.tensor([0, 12, 5])), temperature.typical()
        return seen, probe, temperature.state_dict()

    (alone,), results = on_ranks(1, run), on_ranks(size, run)
    for seen, (some, mean), _ in results:
        for ours, expected in zip(seen, alone[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=0)
        torch.testing.assert_close(some, alone[1][0], rtol=1e-11, atol=0)
        torch.testing.assert_close(mean, alone[1][1], rtol=1e-11, atol=0)
    for name in ("tau", "moments"):
        torch.testing.assert_close(results[0][2][name], alone[2][name], rtol=1e-9, atol=1e-13)
        assert results[1][2][name].numel() == 0
    assert alone[2]["tau"].unique().numel() > N


def test_the_mean_is_over_the_samples_visited_and_both_sides():
    """Samples of another split keep their start for ever and must not count; before any visit it is the start."""
    temperature = make()
    assert temperature.typical().item() == pytest.approx(0.1, rel=1e-7)
    slopes = torch.ones(2, 3, dtype=F64)
    slopes[1, 2] = -1
    finish(temperature, batch_of([1, 2, 3]), slopes, 0)
    assert temperature.typical().item() == pytest.approx(
        temperature.at(torch.tensor([1, 2, 3])).mean().item(), rel=1e-12
    )
    assert temperature.typical().item() < 0.095
    assert temperature.typical().shape == () and not temperature.typical().requires_grad


def test_an_overflow_changes_nothing_and_is_decided_on_the_device():
    temperature = make(dtype=torch.float32)
    for step, (index, slopes) in enumerate(drawn(3)):
        finish(temperature, batch_of(index), slopes, step)
    before = {name: table.clone() for name, table in temperature.state_dict().items()}
    (index, slopes), *_ = drawn(1, seed=7)
    slopes[0, 2], slopes[1, 3] = math.nan, math.inf
    finish(temperature, batch_of(index), slopes, 3, skip=torch.tensor(True))
    assert all(torch.equal(table, before[name]) for name, table in temperature.state_dict().items())
    other = make(dtype=torch.float32)
    other.load_state_dict(before)
    (index, slopes), *_ = drawn(1, seed=8)
    finish(temperature, batch_of(index), slopes, 3, skip=torch.tensor(False))
    finish(other, batch_of(index), slopes, 3)
    assert all(torch.equal(table, other.state_dict()[name]) for name, table in temperature.state_dict().items())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_undo_takes_a_step_back_to_the_bit(size, dtype, on_ranks):
    def run(ranks):
        temperature = make(ranks, dtype=dtype)
        for step, (index, slopes) in enumerate(drawn(4)):
            finish(temperature, batch_of(index, ranks), slopes, step)
        before = {name: table.clone() for name, table in temperature.state_dict().items()}
        (index, slopes), *_ = drawn(1, seed=5)
        batch = batch_of(index, ranks)
        undo = temperature.remember(batch)
        finish(temperature, batch, slopes, 4)
        changed = temperature.state_dict()
        undo()
        return before, changed, temperature.state_dict()

    before, changed, after = on_ranks(size, run)[0]
    for name in ("tau", "moments"):
        assert torch.equal(after[name], before[name])
        assert not torch.equal(changed[name], before[name])


@pytest.mark.parametrize(("first", "second"), [(1, 3), (4, 1), (2, 3), (3, 4)])
def test_a_state_is_taken_up_on_another_number_of_ranks(first, second, on_ranks):
    def begin(ranks):
        temperature = make(ranks)
        for step, (index, slopes) in enumerate(drawn(3)):
            finish(temperature, batch_of(index, ranks), slopes, step)
        return temperature.state_dict()

    state = on_ranks(first, begin)[0]

    def go_on(ranks):
        temperature = make(ranks)
        temperature.load_state_dict(state)
        for step, (index, slopes) in enumerate(drawn(3, seed=4), start=3):
            finish(temperature, batch_of(index, ranks), slopes, step)
        return temperature.state_dict()

    def straight(ranks):
        temperature = make(ranks)
        for step, (index, slopes) in enumerate([*drawn(3), *drawn(3, seed=4)]):
            finish(temperature, batch_of(index, ranks), slopes, step)
        return temperature.state_dict()

    got, expected = on_ranks(second, go_on)[0], on_ranks(1, straight)[0]
    for name in ("tau", "moments"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_loaded_value_outside_is_bounded_in_the_first_forward_and_in_the_record(dtype):
    options = TemperatureOptions(init=0.01, low=0.01, high=0.7)
    temperature = make(options=options, dtype=dtype)
    assert temperature.tau.whole().min().item() >= 0.01, "the start, too, is on the right side of its rounding"
    state = temperature.state_dict()
    state["tau"][0], state["tau"][1] = 1e-3, 5.0
    state["moments"][2:] = 1.0
    temperature.load_state_dict(state)
    tau = temperature(batch_of([0, 1]))
    assert tau.min().item() >= 0.01 and tau.max().item() <= 0.7
    assert tau.tolist()[0] == pytest.approx([0.01] * 2) and tau.tolist()[1] == pytest.approx([0.7] * 2)
    assert temperature.typical().item() == pytest.approx(0.355)


def test_the_state_of_another_kind_or_size_is_refused():
    with pytest.raises(ValueError, match="it has log_inverse, expected moments, tau"):
        make().load_state_dict({"log_inverse": torch.tensor(3.0)})
    with pytest.raises(ValueError, match=r"saved table is \[2, 14\], this run's is \[2, 13\]"):
        make().load_state_dict(make(n=14).state_dict())


def test_nothing_waits_for_the_host():
    temperature, batch = make(dtype=torch.float32), batch_of([0, 3, 3, 5])
    slopes, skip = torch.ones(2, 4), torch.tensor(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        finish(temperature, batch, slopes, PER_EPOCH, skip)
    names = {event.name for event in profile.events()}
    assert "aten::sort" in names
    waits = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::_unique2"}
    assert not waits & names


def test_it_has_24_bytes_a_sample_and_no_parameter():
    temperature: AnyTemperature = make(dtype=torch.float32)
    assert list(temperature.parameters()) == []
    assert sum(table.numel() * table.element_size() for table in temperature.state_dict().values()) == 24 * N
    assert make(dtype=torch.float32).bytes_for(10**9) == 24 * 10**9


def test_what_it_cannot_do_without_is_named():
    temperature, batch = make(), batch_of([0, 1])
    nameless = GlobalBatch(batch.e1, batch.e2)
    for one in (None, nameless):
        with pytest.raises(ValueError, match="needs to know the samples"):
            temperature(one)
    with pytest.raises(RuntimeError, match="comes after loss"):
        temperature.finish(temperature(batch), batch)
    tau = torch.ones(2, 1, dtype=F64, requires_grad=True)
    tau.sum().backward()
    with pytest.raises(ValueError, match=r"tau must be \[2, 2\], one a side and anchor; got \[2, 1\]"):
        temperature.finish(tau, batch)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": TemperatureOptions(anneal="linear", anneal_steps=3)}, "cannot follow anneal='linear'"),
        ({"options": TemperatureOptions(init=3.0)}, "outside its bounds"),
        ({"n": 0}, "at least 1 sample"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(change, words):
    arguments = {"options": OPTIONS, "n": N, "steps_per_epoch": 2} | change
    with pytest.raises(ValueError, match=words):
        PerSampleTemperature(**arguments)
