"""KCL against loops, autograd, pinned values and its known minimisers; its independence of the batch size."""

import math
from itertools import combinations

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib import contrast
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.losses import KclOptions, kcl_loss

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
    e2[2], e1[3] = e2[0], e2[3]
    return e1, e2


OPTIONS = {
    "gaussian": KclOptions(),
    "narrow gaussian": KclOptions(t=0.5, gamma=1),
    "log": KclOptions("log"),
    "imq": KclOptions("imq"),
    "narrow imq": KclOptions("imq", c=0.3),
    "riesz, s < 0": KclOptions("riesz", s=-1),
    "riesz": KclOptions("riesz"),
    "steep riesz": KclOptions("riesz", s=2.5, gamma=3),
    "gaussian riesz": KclOptions("gaussian_riesz"),
}
CASES = {
    "plain": draw(9, 6),
    "two pairs": draw(2, 3, 2),
    "identical embeddings": identical(5, 4),
    "duplicate captions": duplicate_captions(6, 7),
    "large dimension": draw(4, 2048, 3),
}


def naive_kernel(name, o, square):
    """The kernel of a squared distance; constant below ``closest`` where the kernel is singular."""
    if name == "gaussian":
        return torch.exp(-o.t * square)
    if name == "log":
        return -torch.log(o.t * square + 1)
    if name == "imq":
        return o.c / torch.sqrt(o.c**2 + square)
    r = torch.sqrt(square) if square.item() > o.closest**2 else 0 * square + o.closest
    return math.copysign(1, o.s) * r**-o.s


def naive(e1, e2, o):
    size = len(e1)
    align, repel = ("gaussian", "riesz") if o.kernel == "gaussian_riesz" else (o.kernel, o.kernel)
    distance = lambda x, y: ((x - y) ** 2).sum()
    value = sum(-2 / size * naive_kernel(align, o, distance(x, y)) for x, y in zip(e1, e2, strict=True))
    for view in (e1, e2):
        every = [naive_kernel(repel, o, distance(view[i], view[j])) for i, j in combinations(range(size), 2)]
        value = value + o.gamma * (0.5 if o.kernel == "log" else 1) * sum(every) / len(every)
    return value


def leaves(pair, dtype=torch.float64):
    return [x.to(dtype).clone().requires_grad_() for x in pair]


def value_and_gradients(loss, inputs, slope=1.0):
    value = loss(*inputs)
    return [value.detach(), *(g / slope for g in torch.autograd.grad(slope * value, inputs))]


def ours(options):
    return lambda e1, e2: kcl_loss(e1, e2, GlobalBatch(e1, e2), options)


def assert_equal(got, expected, room=1e-12):
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= room * max(b.abs().max().item(), 1.0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_value_and_both_gradients_equal_autograd(case, name):
    o = OPTIONS[name]
    expected = value_and_gradients(lambda *x: naive(*x, o), leaves(CASES[case]))
    assert all(x.isfinite().all() for x in expected)
    assert_equal(value_and_gradients(ours(o), leaves(CASES[case]), slope=3.0), expected)
    without = ours(o)(*CASES[case])
    assert not without.requires_grad
    assert without.item() == pytest.approx(expected[0].item(), rel=1e-12)


PINNED = [
    (KclOptions(), 0.003211633845),
    (KclOptions(t=0.5, gamma=1), -1.152725960869),
    (KclOptions("log"), -25.841731824965),
    (KclOptions("imq"), 23.818794829994),
    (KclOptions("riesz", s=-1), -46.192579347014),
    (KclOptions("riesz", s=1), 17.840357773901),
    (KclOptions("gaussian_riesz", s=1), 21.865646950961),
]


@pytest.mark.parametrize(("options", "expected"), PINNED, ids=str)
def test_pinned_values(options, expected):
    assert ours(options)(*pinned_pair()).item() == pytest.approx(expected, abs=1e-9)


def test_twice_the_gamma_gives_the_log_kernel_its_whole_energy():
    assert round(ours(KclOptions("log", gamma=32))(*pinned_pair()).item(), 2) == -52.18


MINIMA = [
    (simplex(4), KclOptions(), -1.845505600),
    (cross_polytope(3), KclOptions(), -1.528972684),
    (cross_polytope(3), KclOptions("log"), -27.631923927),
    (cross_polytope(3), KclOptions("imq"), 23.427795871),
]


@pytest.mark.parametrize(("e", "options", "expected"), MINIMA, ids=["simplex", "gaussian", "log", "imq"])
def test_known_minimisers(e, options, expected):
    value, *slopes = value_and_gradients(ours(options), leaves((e, e)))
    assert value.item() == pytest.approx(expected, abs=1e-8)
    for slope in slopes:  # on the sphere: what is along the vector itself does not move it
        assert (slope - (slope * e).sum(1, keepdim=True) * e).abs().max() < 1e-14
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        near = [normalize(e + 0.05 * torch.randn(e.shape, generator=g, dtype=torch.float64), dim=1) for _ in range(2)]
        assert ours(options)(*near).item() > expected + 1e-4


def test_closed_value_at_the_simplex():
    for size, t, gamma in ((2, 2.0, 16.0), (4, 2.0, 16.0), (7, 0.5, 3.0)):
        expected = -2 + 2 * gamma * math.exp(-2 * t * size / (size - 1))
        value = ours(KclOptions(t=t, gamma=gamma))(simplex(size), simplex(size)).item()
        assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("options", "expected"), [(KclOptions(), 0.808297), (KclOptions("log"), -25.729333)], ids=str)
def test_the_mean_over_all_batches_does_not_depend_on_their_size(options, expected):
    """Every subset of 8 pairs; only the spread depends on the size."""
    u = fixed(8, 4, 0.5)
    v = normalize(u + 0.5 * fixed(8, 4, 1.5), dim=1)
    spreads = []
    for size in (2, 3, 4, 6, 8):
        values = torch.stack([ours(options)(u[list(rows)], v[list(rows)]) for rows in combinations(range(8), size)])
        assert len(values) == math.comb(8, size)
        assert values.mean().item() == pytest.approx(expected, abs=1e-6)
        assert values.mean().item() == pytest.approx(ours(options)(u, v).item(), abs=1e-12)
        spreads.append(values.std(correction=0).item())
    assert spreads == sorted(spreads, reverse=True)
    if options.kernel == "gaussian":
        assert [round(x, 2) for x in spreads] == [6.07, 3.06, 1.84, 0.73, 0]


def test_close_pairs_in_float32():
    """Positives 1e-3 apart: 2 - 2 s_ii would keep one digit of the square."""
    u, _ = pinned_pair()
    near = normalize(u + 1e-3 * fixed(8, 5, 2), dim=1)
    for options in (KclOptions(), KclOptions("riesz", s=-1, closest=1e-4), KclOptions("log"), KclOptions("imq")):
        single = value_and_gradients(ours(options), leaves((u, near), torch.float32))
        double = value_and_gradients(ours(options), [x.double().detach().requires_grad_() for x in leaves((u, near))])
        assert_equal(single, double, room=1e-5)


@pytest.mark.parametrize("s", [-1.0, 1.0, 2.5])
def test_a_singular_kernel_is_constant_below_the_closest_distance(s):
    options, e1 = KclOptions("riesz", s=s, gamma=1e-30, closest=0.1), torch.eye(2, dtype=torch.float64)
    for r, kept, moves in ((0.0, 0.1, False), (0.0999, 0.1, False), (0.1001, 0.1001, True)):
        angle = 2 * math.asin(r / 2)
        e2 = torch.tensor([[math.cos(angle), math.sin(angle)], [0, 1]], dtype=torch.float64)
        value, d_e1, _ = value_and_gradients(ours(options), leaves((e1, e2)))
        assert value.item() == pytest.approx(-math.copysign(1, s) * (kept**-s + 0.1**-s), rel=1e-12)
        push = abs(s) * kept ** (-s - 1) if moves else 0
        gap = d_e1.norm(dim=1) - torch.tensor([push, 0], dtype=torch.float64)
        assert gap.abs().max() < 1e-12 * kept ** (-s - 1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rows_give_finite_gradients(name, dtype):
    for pair in (identical(5, 4), duplicate_captions(6, 7)):
        assert all(x.isfinite().all() for x in value_and_gradients(ours(OPTIONS[name]), leaves(pair, dtype)))


@pytest.mark.parametrize("rows", [12, 6, 5, 1, 20])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["gaussian", "gaussian riesz"])
def test_blocks_change_neither_value_nor_gradient(rows, size, name, monkeypatch, on_ranks):
    pair, options = draw(12, 5), OPTIONS[name]
    whole = value_and_gradients(ours(options), leaves(pair))
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", 12 * rows)
    assert_equal(together(on_ranks, pair, [12 // size] * size, options), whole, room=1e-13)


def together(on_ranks, pair, sizes, options):
    """Value and gradients of one process, put together from ranks of these sizes as averaging over ranks would."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def one(ranks):
        rows = slice(starts[ranks.rank], starts[ranks.rank] + sizes[ranks.rank])
        batch = GlobalBatch(*pair, ranks=ranks, rows=rows)
        own = [e[rows].clone().requires_grad_() for e in pair]
        return value_and_gradients(lambda e1, e2: kcl_loss(e1, e2, batch, options), own, slope=2.0)

    columns = list(zip(*on_ranks(len(sizes), one), strict=True))
    return [torch.stack(columns[0]).mean(0), *(torch.cat(parts) / len(sizes) for parts in columns[1:])]


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [3, 3, 3, 3], [7, 5], [5, 4, 3], [1] * 12])
@pytest.mark.parametrize("name", OPTIONS)
def test_several_ranks_equal_one_process(sizes, name, on_ranks):
    pair, options = draw(12, 5, 7), OPTIONS[name]
    assert_equal(together(on_ranks, pair, sizes, options), value_and_gradients(ours(options), leaves(pair)))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_is_linear_in_the_batch_and_the_host_never_waits(size, name, monkeypatch, recorder):
    block, dim = 1024, 4
    monkeypatch.setattr(contrast, "BLOCK_ELEMENTS", block)
    inputs = leaves(draw(size, dim))
    with recorder() as seen:
        ours(OPTIONS[name])(*inputs).backward()
    assert seen.largest <= max(block, size * dim)
    assert seen.peak <= 6 * block + 10 * size * dim
    assert not seen.waits


def test_wrong_shapes_and_options_are_refused():
    e1, e2 = draw(4, 3)
    batch = GlobalBatch(e1, e2)
    with pytest.raises(ValueError, match=r"e1 must be \[4, 3\].*got \(3, 3\)"):
        kcl_loss(e1[:3], e2, batch, KclOptions())
    with pytest.raises(ValueError, match=r"e2 must be \[4, 3\].*got \(4, 2\)"):
        kcl_loss(e1, e2[:, :2], batch, KclOptions())
    wrong = {"kernel": "cauchy", "t": 0.0, "gamma": -1.0, "c": math.nan, "s": 0.0, "closest": 2.0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"KCL's {name} .*{value}"):
            KclOptions(**{name: value})


def test_riesz_alone_is_refused_for_training():
    with pytest.raises(ValueError, match=r"s=1.0 > 0 diverges .* gaussian_riesz"):
        KclOptions("riesz", s=1.0).check()
    for options in (KclOptions(), KclOptions("riesz", s=-1), KclOptions("gaussian_riesz")):
        options.check()
