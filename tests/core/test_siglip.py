"""The sigmoid loss against loops, autograd and open_clip; in blocks, on several ranks, and what memory it takes."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from neuclip_lib import contrast
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses import SiglipOptions, siglip_loss

pytestmark = pytest.mark.quick


def draw(size, dim, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return tuple(normalize(torch.randn(size, dim, generator=g, dtype=dtype), dim=1) for _ in range(2))


def identical(size, dim):
    e = normalize(torch.ones(size, dim, dtype=torch.float64), dim=1)
    return e, e.clone()


def duplicate_captions(size, dim):
    e1, e2 = draw(size, dim, seed=5)
    e2[2] = e2[0]
    return e1, e2


CASES = {
    "published start": (*draw(9, 6), 0.1, -10.0),
    "small temperature": (*draw(7, 5, 1), 0.01, 3.0),
    "two pairs": (*draw(2, 3, 2), 0.5, 0.0),
    "identical embeddings": (*identical(5, 4), 0.07, -10.0),
    "duplicate captions": (*duplicate_captions(6, 7), 0.1, -2.0),
    "large dimension": (*draw(4, 2048, 3), 0.1, -1.0),
}


def naive(e1, e2, tau, bias):
    total = 0.0
    for i in range(len(e1)):
        for j in range(len(e1)):
            z = 1 if i == j else -1
            total = total - logsigmoid(z * (e1[i] @ e2[j] / tau + bias))
    return total / len(e1)


def leaves(case, dtype=torch.float64):
    return [torch.as_tensor(x, dtype=dtype).clone().requires_grad_() for x in case]


def value_and_gradients(loss, inputs, slope=1.0):
    value = loss(*inputs)
    return [value.detach(), *(g / slope for g in torch.autograd.grad(slope * value, inputs))]


def ours(e1, e2, tau, bias):
    return siglip_loss(e1, e2, GlobalBatch(e1, e2), tau, bias)


def assert_equal(got, expected, room=1e-12):
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= room * max(b.abs().max().item(), 1e-3)


@pytest.mark.parametrize("case", CASES)
def test_value_and_four_gradients_equal_autograd(case):
    expected = value_and_gradients(naive, leaves(CASES[case]))
    assert_equal(value_and_gradients(ours, leaves(CASES[case]), slope=3.0), expected)
    assert ours(*(torch.as_tensor(x, dtype=torch.float64) for x in CASES[case])).item() == pytest.approx(
        expected[0].item(), rel=1e-14
    )  # without gradients the same


def test_untrained_value_is_over_images_not_over_pairs():
    """64 pairs whose similarities are all 0, t = 10, bias -10: the positives are wrong by 10, the negatives hardly."""
    e = torch.eye(128, dtype=torch.float64)
    value = ours(e[:64], e[64:], torch.tensor(0.1), torch.tensor(-10.0)).item()
    assert value == pytest.approx(math.log1p(math.exp(10)) + 63 * math.log1p(math.exp(-10)), abs=1e-12)
    assert value == pytest.approx(10.0000454 + 63 * 4.54e-5, abs=1e-6)
    assert round(value, 4) == 10.0029


@pytest.mark.parametrize(("size", "dim"), [(2, 8), (33, 64), (64, 32)])
@pytest.mark.parametrize(("tau", "bias"), [(0.1, -10.0), (0.02, 1.0)])
def test_value_and_gradients_equal_open_clips(size, dim, tau, bias):
    from open_clip.loss import SigLipLoss

    theirs = lambda e1, e2, tau, bias: SigLipLoss()(e1, e2, 1 / tau, bias)
    case = (*draw(size, dim), tau, bias)
    assert_equal(value_and_gradients(ours, leaves(case)), value_and_gradients(theirs, leaves(case)))
    single = [value_and_gradients(f, leaves(case, torch.float32)) for f in (ours, theirs)]
    assert_equal(*single, room=1e-5)


@pytest.mark.parametrize("chunk", [12, 6, 5, 1, 20])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_change_neither_value_nor_gradient(chunk, size, monkeypatch, on_ranks):
    case = (*draw(12, 5), 0.1, -2.0)
    whole = value_and_gradients(ours, leaves(case))
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", 12 * chunk)
    assert_equal(together(on_ranks, case, [12 // size] * size), whole, room=1e-13)


def together(on_ranks, case, sizes):
    """Value and gradients of one process, put together from ranks of these sizes as averaging over ranks would."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def one(ranks):
        e1, e2, tau, bias = leaves(case)
        rows = slice(starts[ranks.rank], starts[ranks.rank] + sizes[ranks.rank])
        batch = GlobalBatch(e1, e2, ranks=ranks, rows=rows)
        own = [e.detach()[rows].requires_grad_() for e in (e1, e2)]
        return value_and_gradients(
            lambda e1, e2, tau, bias: siglip_loss(e1, e2, batch, tau, bias), [*own, tau, bias], slope=2.0
        )

    columns = list(zip(*on_ranks(len(sizes), one), strict=True))
    mean = lambda parts: torch.stack(parts).mean(0)
    rows = [torch.cat(parts) / len(sizes) for parts in columns[1:3]]
    return [mean(columns[0]), *rows, mean(columns[3]), mean(columns[4])]


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [3, 3, 3, 3], [7, 5], [5, 4, 3], [1] * 12])
def test_several_ranks_equal_one_process(sizes, on_ranks):
    case = (*draw(12, 5, 7), 0.1, -3.0)
    assert_equal(together(on_ranks, case, sizes), value_and_gradients(ours, leaves(case)))


def test_small_temperature_stays_finite_in_float32():
    """Every answer wrong by 100: positives at -1, negatives at +1."""
    e1, e2 = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    got = value_and_gradients(ours, leaves((e1, e2, 0.01, 0.0), torch.float32))
    assert got[0].item() == pytest.approx(200, rel=1e-6)
    assert_equal(got, value_and_gradients(naive, leaves((e1, e2, 0.01, 0.0))), room=1e-5)


def test_good_answers_keep_all_digits():
    """Softplus that answers 0 or y beyond 20 would lose them: here the loss is two times two answers of e^-30."""
    e = torch.eye(2, dtype=torch.float64)
    value = ours(e, e, torch.tensor(1 / 60, dtype=torch.float64), torch.tensor(-30.0)).item()
    assert value == pytest.approx(2 * math.exp(-30), rel=1e-12)
    wrong = ours(e, e.flip(0), torch.tensor(1 / 60, dtype=torch.float64), torch.tensor(-30.0, dtype=torch.float64))
    assert wrong.item() - 60 == pytest.approx(2 * math.exp(-30), abs=2e-14)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_memory_is_linear_in_the_batch_and_the_host_never_waits(keep, size, monkeypatch, recorder):
    block, dim = 1024, 4
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", block)
    e1, e2, tau, bias = leaves((*draw(size, dim), 0.1, -10.0))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        for _ in range(3):
            batch = GlobalBatch(e1, e2, keep_similarities=keep)
            with recorder() as seen:
                loss = siglip_loss(e1, e2, batch, tau, bias)
                loss.backward()
            assert seen.largest <= max(block, size * dim)
            assert seen.peak <= 3 * block + 8 * size * dim
            assert not seen.waits
    assert sum(saved) == 3 * (2 * size * dim + 2)


def test_bias_that_starts_at_the_minimum():
    options = SiglipOptions(bias=None)
    assert options.start(64, 64, 0.1) == pytest.approx(-math.log(63) - 100 / 128, abs=1e-12)
    assert round(options.start(64, 64, 0.1), 2) == -4.92
    e1, e2, tau, bias = leaves((*draw(1024, 64), 0.1, options.start(1024, 64, 0.1)))
    slope = torch.autograd.grad(ours(e1, e2, tau, bias), bias)[0].item()
    far = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    slope_far = torch.autograd.grad(ours(e1, e2, tau, far), far)[0].item()
    assert abs(slope) < 0.05 < 0.8 < -slope_far


def test_the_bias_is_minus_ten_unless_said_otherwise():
    assert SiglipOptions().start(64, 64, 0.1) == -10.0
    assert SiglipOptions(bias=-3.5).start(64, 64, 0.1) == -3.5


def test_wrong_shapes_and_options_are_refused():
    e1, e2 = draw(4, 3)
    batch, one = GlobalBatch(e1, e2), torch.tensor(0.1)
    with pytest.raises(ValueError, match=r"e1 must be \[4, 3\].*got \(3, 3\)"):
        siglip_loss(e1[:3], e2, batch, one, one)
    with pytest.raises(ValueError, match=r"e2 must be \[4, 3\].*got \(4, 2\)"):
        siglip_loss(e1, e2[:, :2], batch, one, one)
    with pytest.raises(ValueError, match=r"tau must be one scalar.*\(2, 4\)"):
        siglip_loss(e1, e2, batch, one.expand(2, 4), one)
    with pytest.raises(ValueError, match=r"bias must be one scalar.*\(1,\)"):
        siglip_loss(e1, e2, batch, one, one[None])
    for bias in (math.nan, math.inf):
        with pytest.raises(ValueError, match="bias must be finite"):
            SiglipOptions(bias=bias).check()
    SiglipOptions().check(), SiglipOptions(bias=None).check()
    for wrong in ((1, 64, 0.1), (64, 0, 0.1), (64, 64, 0.0), (64, 64, math.nan)):
        with pytest.raises(ValueError, match="size="):
            SiglipOptions(bias=None).start(*wrong)
