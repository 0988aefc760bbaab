"""The moving average over a run: against a naive loop, on several ranks, saved, taken back, refused."""

import math

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.normalizers import MovingAverageNormalizer, MovingAverageOptions
from neuclip_lib.ranks import ONE

pytestmark = pytest.mark.quick
F64 = torch.float64
RATES = ["constant", "cosine", "per sample"]
WORLDS = [1, 2, 3, 4]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit(*shape, seed=0):
    return normalize(random(*shape, seed=seed), dim=-1)


def scalar(value):
    return torch.tensor(value, dtype=F64)


def normalizer(n=20, steps=2, epochs=6, rate="constant", ranks=ONE, dtype=F64, **options):
    options = {"gamma": 0.3, "eps": 1e-3, "log_step": 0.5, **options}
    return MovingAverageNormalizer(n, steps, epochs, rate, MovingAverageOptions(**options), ranks, dtype=dtype)


def feed(average, index, log_g, update=True):
    """Shows one batch whose log_g ``[2, B]`` is given; gives alpha of this rank's anchors ``[2, b]``."""
    ranks, index = average.table.ranks, torch.as_tensor(index)
    own = len(index) // ranks.size
    rows = slice(ranks.rank * own, (ranks.rank + 1) * own)
    e = unit(len(index), 3).to(log_g)
    batch, mine = GlobalBatch(e, e, index, ranks=ranks, rows=rows), (log_g[0, rows], log_g[1, rows])
    if update:
        average.update(batch, mine, scalar(0.07))
    return torch.stack(average(e[rows], e[rows], mine, batch, scalar(0.07)))


def close(got, expected, bound=1e-14):
    """Within ``bound``, relative where the numbers are above 1."""
    got, expected = torch.as_tensor(got, dtype=F64), torch.as_tensor(expected, dtype=F64)
    return bool(((got - expected).abs() <= bound * expected.abs().clamp_min(1)).all())


# -- many steps -------------------------------------------------------------------------------------------------------


class Naive:
    """One sample and side at a time, in u itself, rates written out."""

    def __init__(self, average):
        self.average, self.u, self.step = average, {}, 0

    def gamma(self, u):
        options, epoch = self.average.options, self.step // self.average.steps_per_epoch
        if epoch == 0:
            return 1.0
        if self.average.rate == "constant":
            return options.gamma
        if self.average.rate == "cosine":
            part = min(epoch / (self.average.decay_epochs), 1)
            return 0.5 * (1 + math.cos(math.pi * part)) * (1 - options.gamma) + options.gamma
        a_times_u = math.exp(options.log_step) * (options.eps + u)
        return a_times_u / (1 + a_times_u)

    def feed(self, index, log_g):
        alpha = torch.zeros_like(log_g)
        for side in (0, 1):
            seen = {}
            for place, i in enumerate(index):
                seen.setdefault(i, []).append(math.exp(log_g[side, place].item()))
            for i, values in seen.items():
                g = sum(values) / len(values)
                if (side, i) in self.u:
                    u = self.u[side, i]
                    self.u[side, i] = (1 - self.gamma(u)) * u + self.gamma(u) * g
                else:
                    self.u[side, i] = g
            for place, i in enumerate(index):
                alpha[side, place] = math.log(self.average.options.eps + self.u[side, i])
        self.step += 1
        return alpha

    def table(self, n):
        return [[math.log(self.u[s, i]) if (s, i) in self.u else -math.inf for i in range(n)] for s in (0, 1)]


def batches(steps=12, n=20, size=12):
    """Indices with and without repeats (also across the halves, thirds and quarters that ranks hold), and log_g."""
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        index = torch.randint(n - 1, (size,), generator=generator)  # the last sample is never visited
        if step % 3 == 0:
            index = torch.randperm(n - 1, generator=generator)[:size]
        yield index.tolist(), 2 * random(2, size, seed=step)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rate", RATES)
def test_table_and_alpha_equal_the_naive_loop_at_every_world_size(on_ranks, world, rate):
    def run(ranks):
        average = normalizer(rate=rate, ranks=ranks)
        alphas = [feed(average, *batch) for batch in batches()]
        return torch.stack(alphas), average.state_dict()

    results = on_ranks(world, run)
    naive = Naive(normalizer(rate=rate))
    expected = torch.stack([naive.feed(*batch) for batch in batches()])
    assert close(torch.cat([alpha for alpha, _ in results], -1), expected)
    table = results[0][1]["log_u"]
    wanted = torch.tensor(naive.table(20), dtype=F64)
    assert torch.equal(table == -math.inf, wanted == -math.inf) and bool((table[:, 19] == -math.inf).all())
    assert close(table.nan_to_num(neginf=0), wanted.nan_to_num(neginf=0))
    assert [state["step"] for _, state in results] == [12] * world
    assert all(state["log_u"].shape == (2, 0) for _, state in results[1:])


@pytest.mark.parametrize("rate", RATES)
def test_every_world_size_gives_the_table_of_one_process_from_embeddings(on_ranks, rate):
    """log_g is the ranks' own here: rectangles instead of a square."""

    def run(ranks):
        average, own, alphas = normalizer(rate=rate, steps=1, ranks=ranks), 12 // ranks.size, []
        rows = slice(ranks.rank * own, (ranks.rank + 1) * own)
        for step, (index, _) in enumerate(batches(4)):
            e1, e2 = unit(12, 6, seed=100 + step), unit(12, 6, seed=200 + step)
            batch = GlobalBatch(e1, e2, torch.tensor(index), ranks=ranks, rows=rows)
            first, second = e1[rows].clone().requires_grad_(), e2[rows].clone().requires_grad_()
            log_g = log_mean_exp_over_negatives(first, second, batch, scalar(0.07))
            average.update(batch, log_g, scalar(0.07))
            alpha = average(first, second, log_g, batch, scalar(0.07))
            assert not alpha[0].requires_grad and not alpha[1].requires_grad
            alphas.append(torch.stack(alpha))
        return torch.stack(alphas), average.state_dict()["log_u"]

    ((alpha, table),) = on_ranks(1, run)
    assert bool(torch.isfinite(alpha).all())
    for world in (2, 3, 4):
        results = on_ranks(world, run)
        assert close(torch.cat([part for part, _ in results], -1), alpha)
        assert close(results[0][1].nan_to_num(neginf=0), table.nan_to_num(neginf=0))


# -- host reads --------------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name().split(".")[0])
        return function(*args, **(kwargs or {}))


HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


@pytest.mark.parametrize("rate", RATES)
def test_no_step_reads_on_the_host(rate):
    average, e = normalizer(rate=rate, steps=1), unit(4, 3)
    log_g = (random(4, seed=1), random(4, seed=2))
    batch = GlobalBatch(e, e, torch.tensor([3, 5, 3, 1]))
    for _ in range(3):
        with Calls() as calls:
            undo = average.remember(batch)
            average.update(batch, log_g, scalar(0.07))
            average(e, e, log_g, batch, scalar(0.07))
        assert "aten::logaddexp" in calls.names and not HOST_READS & set(calls.names)
    with Calls() as calls:
        undo()
    assert "aten::index_put_" in calls.names and not HOST_READS & set(calls.names)
    with Calls() as calls:
        average.check(batch.index)  # what the others must not do
    assert HOST_READS & set(calls.names)


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES)
def test_a_run_resumes_to_the_bit_on_other_numbers_of_ranks(on_ranks, rate):
    """Saved and loaded on 4, 1 and 3 ranks after every second step, against one run without a stop."""
    reference = normalizer(rate=rate)
    expected = torch.stack([feed(reference, *batch) for batch in batches()])
    state, alphas = None, []
    for stop, world in enumerate((4, 1, 3, 2, 1, 4)):

        def run(ranks, state=state, stop=stop):
            average = normalizer(rate=rate, ranks=ranks)
            if state is not None:
                average.load_state_dict(state)
            some = list(batches())[2 * stop : 2 * stop + 2]
            return torch.stack([feed(average, *batch) for batch in some]), average.state_dict()

        results = on_ranks(world, run)
        state = results[0][1]
        alphas.append(torch.cat([alpha for alpha, _ in results], -1))
    assert torch.equal(torch.cat(alphas), expected)
    assert torch.equal(state["log_u"], reference.state_dict()["log_u"]) and state["step"] == 12


def test_a_saved_state_does_not_change_with_the_run():
    average = normalizer()
    feed(average, range(4), random(2, 4))
    state = average.state_dict()
    kept = state["log_u"].clone()
    feed(average, range(4), random(2, 4, seed=1))
    assert torch.equal(state["log_u"], kept) and state["step"] == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, r"not the state of a moving average: it has \[\]"),
        ({"w": 1, "step": 0}, r"it has \['step', 'w'\]"),
        ({"log_u": torch.zeros(2, 19), "step": 0}, r"saved table is \[2, 19\], this run's is \[2, 20\]; the data set"),
        ({"log_u": torch.zeros(2, 20), "step": -1}, "must not be negative, got -1"),
    ],
)
def test_a_state_of_another_run_is_refused_and_nothing_changes(state, words):
    average = normalizer()
    feed(average, range(4), random(2, 4))
    before = average.table.values.clone()
    with pytest.raises(ValueError, match=words):
        average.load_state_dict(state)
    assert torch.equal(average.table.values, before) and average.step == 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rate", RATES)
def test_an_update_can_be_taken_back_to_the_bit(on_ranks, world, rate):
    """With repeats, first visits and an end of an epoch in the step that is taken back."""

    def run(ranks):
        average, own = normalizer(rate=rate, steps=1, ranks=ranks), 12 // ranks.size
        rows, e = slice(ranks.rank * own, (ranks.rank + 1) * own), unit(12, 3)
        (first, first_g), (second, second_g), (third, third_g) = list(batches(3))
        feed(average, first, first_g)
        before = average.table.values.clone()
        batch = GlobalBatch(e, e, torch.tensor(second), ranks=ranks, rows=rows)
        undo = average.remember(batch)
        feed(average, second, torch.full_like(second_g, torch.nan))
        changed = not torch.equal(average.table.values, before)
        undo()
        same = torch.equal(average.table.values, before) and average.step == 1
        return changed, same, feed(average, third, third_g)

    results = on_ranks(world, run)
    assert all(same for _, same, _ in results) and any(changed for changed, _, _ in results)
    naive = Naive(normalizer(rate=rate, steps=1))
    (first, first_g), _, (third, third_g) = list(batches(3))
    naive.feed(first, first_g)
    assert close(torch.cat([alpha for _, _, alpha in results], 1), naive.feed(third, third_g))


# -- sizes and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 8), (torch.float64, 16)])
def test_bytes(on_ranks, dtype, bytes_each):
    assert normalizer(dtype=dtype).bytes_for(1000) == 1000 * bytes_each
    for world in WORLDS:
        shares = on_ranks(world, lambda ranks: normalizer(ranks=ranks, dtype=dtype).table.values)
        assert sum(share.nbytes for share in shares) == 20 * bytes_each


def test_a_table_too_large_is_refused_with_its_size():
    """8 bytes for each of 10^12 samples: 7450.6 GiB."""
    with pytest.raises(RuntimeError, match=r"1,000,000,000,000 samples takes 7,450\.6 GiB"):
        normalizer(n=10**12, dtype=torch.float32)


@pytest.mark.parametrize("world", WORLDS)
def test_a_wrong_or_missing_index_is_named_and_changes_nothing(on_ranks, world):
    def run(ranks):
        average, own = normalizer(ranks=ranks), 12 // ranks.size
        rows, e = slice(ranks.rank * own, (ranks.rank + 1) * own), unit(12, 3)
        log_g = (random(own, seed=1), random(own, seed=2))
        for wrong in (20, 21, -1):
            index = torch.arange(12)
            index[5] = wrong
            batch = GlobalBatch(e, e, index, ranks=ranks, rows=rows)
            with pytest.raises(ValueError, match=f"sample index {wrong} is out of range"):
                average.update(batch, log_g, scalar(0.07))
            with pytest.raises(ValueError, match=f"sample index {wrong} is out of range"):
                average(e[rows], e[rows], log_g, batch, scalar(0.07))
            with pytest.raises(ValueError, match=f"sample index {wrong} is out of range"):
                average.check(index)
        batch = GlobalBatch(e, e, ranks=ranks, rows=rows)
        for use in (
            lambda: average.update(batch, log_g, scalar(0.07)),
            lambda: average(e[rows], e[rows], log_g, batch, scalar(0.07)),
            lambda: average.remember(batch),
            lambda: average.check(None),
        ):
            with pytest.raises(ValueError, match="needs the stable index"):
                use()
        average.check(torch.arange(20))
        return average.step, average.table.values

    for step, values in on_ranks(world, run):
        assert step == 0 and bool((values == -math.inf).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gamma": 0.0}, r"moving_average\.gamma must be above 0 and at most 1 .* got 0\.0"),
        ({"gamma": 1.01}, r"moving_average\.gamma .* got 1\.01"),
        ({"gamma": math.nan}, r"moving_average\.gamma .* got nan"),
        ({"decay_epochs": 0}, r"moving_average\.decay_epochs must be at least 1 or None, got 0"),
        ({"eps": -1e-14}, r"moving_average\.eps must be finite and not negative, got -1e-14"),
        ({"eps": math.inf}, r"moving_average\.eps"),
        ({"log_step": math.inf}, r"moving_average\.log_step must be finite, got inf"),
    ],
)
def test_options_without_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MovingAverageOptions(**options).check()
    with pytest.raises(ValueError, match=words):
        normalizer(**options)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"n": 0}, "at least 1 sample"),
        ({"steps": 0}, "at least 1 step, got steps_per_epoch=0"),
        ({"epochs": 0}, "at least 1 epoch, got 0"),
        ({"rate": "linear"}, "must be one of"),
    ],
)
def test_sizes_without_sense_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        normalizer(**sizes)


def test_it_says_what_it_needs():
    assert normalizer().needs_index and normalizer(eps=0.25).eps == 0.25
