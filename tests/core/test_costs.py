"""What a step costs, counted: waits of the host, products, memory, bytes exchanged. Nothing here is timed."""

import shutil

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib import presets
from neuclip_lib.bench.exact import loss_memory, operators_an_update
from neuclip_lib.bench.memory import peak_bytes
from neuclip_lib.bench.two_ranks import CountingRanks, floats_of_a_step
from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.losses import Objective, global_contrastive_loss
from neuclip_lib.methods import get_method, method_names
from neuclip_lib.models import build_model
from neuclip_lib.normalizers import PrototypeNormalizer, PrototypeOptions
from neuclip_lib.ranks import ONE
from neuclip_lib.training.build import Samples, build_trainee
from neuclip_lib.training.feed import Batch
from neuclip_lib.training.step import Guard, train_step

CPU, F64 = torch.device("cpu"), torch.float64
# A copy to another type or device shows as _to_copy; between types it does not wait, and nothing leaves the CPU here.
WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "index by mask"}
WORDS = ["red", "green", "blue", "circle"]


def stepping(method, **options):
    config = presets.tiny(method, batch_size=16, m=40, **options)
    model = build_model("small", WORDS, 32, seed=0)
    trainee = build_trainee(config, model, CPU, Samples(n=64, steps_per_epoch=2))
    guard = Guard(CPU, trainee.optimizer, raises_at_once=False)
    g = torch.Generator().manual_seed(0)

    def step(number):
        tokens = model.tokenize([WORDS[k % 4] for k in range(16)])
        batch = Batch(torch.randn(16, 3, 32, 32, generator=g), tokens, torch.randperm(64, generator=g)[:16])
        return lambda: train_step(trainee, batch, guard, number, config.precision)

    return step


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_step_of_any_method_makes_the_host_wait(method, precision, recorder):
    """Learned temperature with step_thresh where that is possible; past the first epoch, where rates change."""
    options = {"precision": precision}
    if get_method(method).tau == "free":
        options |= {"temperature.learned": True, "temperature.lr_rule": "step_thresh", "temperature.rho": 1.0}
    step = stepping(method, **options)
    for number in range(4):
        call = step(number)
        with recorder() as seen:
            call()
        assert not seen.waits & WAITS, f"step {number}"


def test_a_wait_would_be_seen(recorder):
    x = torch.ones(3)
    with recorder() as seen:
        x.sum().item()
    assert seen.waits & WAITS == {"_local_scalar_dense"}
    with recorder() as seen:
        x[x > 0]
    assert seen.waits & WAITS == {"index by mask"}


def test_an_update_of_the_prototypes_is_few_operators_and_no_wait():
    operators, waits = operators_an_update()
    assert 15 < operators <= 68
    assert waits == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here (apt: g++)")
def test_a_compiled_update_is_few_kernels_and_the_same_prototypes():
    operators, waits = operators_an_update(compiled=True)
    assert 5 < operators <= 20
    assert waits == 0
    e1, e2 = (normalize(torch.randn(24, 8, generator=torch.Generator().manual_seed(k), dtype=F64)) for k in (0, 1))
    batch, tau = GlobalBatch(e1, e2), torch.tensor(0.05, dtype=F64)
    log_g = log_mean_exp_over_negatives(e1, e2, batch, tau)
    w = []
    for compiled in (False, True):
        options = PrototypeOptions(m=40, updates=3, restart_every=0, compiled=compiled)
        normalizer = PrototypeNormalizer(8, 24, options, dtype=F64)
        for _ in range(3):  # the second batch fills the prototypes
            normalizer.update(batch, log_g, tau)
        w.append(normalizer.w)
    assert not torch.equal(w[0], w[1])  # other rounding: it was another code
    assert torch.linalg.vector_norm(w[0] - w[1]) < 1e-10 * torch.linalg.vector_norm(w[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PrototypeOptions(m=4, compiled=True), "prototypes.compiled works in one process, not in 2"),
        (PrototypeOptions(m=1), "at least the number of processes 2, got 1"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(options, message):
    ranks = CountingRanks(ONE)
    ranks.size = 2
    with pytest.raises(ValueError, match=message):
        PrototypeNormalizer(8, 4, options, ranks=ranks)


@pytest.mark.parametrize(("keep", "most"), [(True, 2.2), (False, 0.5)])
def test_the_memory_of_the_loss_in_matrices_of_b_by_b(keep, most):
    found = loss_memory(2048, 64, keep)
    assert 0.01 < found <= most


def test_the_count_of_memory_is_right_where_it_is_known():
    x = torch.ones(100, 100)
    assert peak_bytes(lambda: (x + 1) * 2) == 2 * 40_000
    assert peak_bytes(lambda: x.add(1).mul_(2)) == 40_000
    assert peak_bytes(lambda: x[:50]) == 0

    def one_after_the_other():
        for _ in range(3):
            x.exp()

    assert peak_bytes(one_after_the_other) == 40_000


def products(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get("aten::mm", 0) + counts.get("aten::addmm_", 0)


@pytest.mark.parametrize(("size", "wanted"), [(1, 3), (2, 4)])
def test_the_loss_takes_three_products_alone_and_four_rectangles_on_a_rank_of_several(size, wanted, on_ranks):
    e = normalize(torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0), dtype=F64), dim=2)
    tau = torch.tensor(0.07, dtype=F64)

    def count(ranks):
        rows = slice(ranks.rank * 16 // ranks.size, (ranks.rank + 1) * 16 // ranks.size)
        batch = GlobalBatch(e[0], e[1], ranks=ranks, rows=rows)
        own, objective = [side[rows].clone().requires_grad_() for side in e], Objective(1e-6, "tau")

        def call():
            with torch.no_grad():
                log_g = log_mean_exp_over_negatives(*own, batch, tau)
            alpha = objective.log_eps_plus_g(log_g, 16)
            global_contrastive_loss(*own, alpha, batch, tau, objective, log_g).backward()

        if ranks.rank == 0:
            return products(call)
        return call()

    assert on_ranks(size, count)[0] == wanted


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("attached", [True, False])
def test_the_floats_that_prototypes_give_to_reductions_are_the_formula_and_the_prototypes_those_of_one_process(
    size, attached, on_ranks
):
    """B = 16, d = 6, T_u = 3 updates, then alpha: 4 B (T_u + 1), and 2 B d for the gradient through alpha."""
    e = normalize(torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(0), dtype=F64), dim=2)
    tau = torch.tensor(0.1, dtype=F64)

    def run(ranks):
        counting = CountingRanks(ranks)
        options = PrototypeOptions(m=13, updates=3, restart_every=0, detach_alpha=not attached)
        npn = PrototypeNormalizer(6, 16, options, dtype=F64, ranks=counting)
        rows = slice(ranks.rank * 16 // ranks.size, (ranks.rank + 1) * 16 // ranks.size)
        batch = GlobalBatch(e[0], e[1], ranks=counting, rows=rows)
        own = [side[rows].clone().requires_grad_() for side in e]
        with torch.no_grad():
            log_g = log_mean_exp_over_negatives(*own, batch, tau)
        counting.floats = 0
        npn.update(batch, log_g, tau)
        npn(*own, log_g, batch, tau)
        sent = counting.floats
        return sent, npn.state_dict()["w"]

    exact = on_ranks(1, run)[0][1]
    results = on_ranks(size, run)
    assert {sent for sent, _ in results} == {floats_of_a_step(16, 6, 3, attached)}
    assert (results[0][1] - exact).norm() <= 1e-12 * exact.norm()
