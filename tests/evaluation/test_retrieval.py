"""Retrieval against brute force, hand-made cases, enumeration of chance, and its limits."""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from neuclip_lib.evaluation import ranks as ranks_module
from neuclip_lib.evaluation.ranks import fixed_point, ranks
from neuclip_lib.evaluation.retrieval import retrieval, top_matches


def loop_ranks(scores: list[list[float]], group_q: list[int], group_c: list[int]) -> list[int]:
    """The definition in words, one comparison at a time."""
    out = []
    for row, group in zip(scores, group_q, strict=True):
        if any(math.isnan(s) for s in row):
            out.append(len(row) + 1)
            continue
        best = max(s for s, g in zip(row, group_c, strict=True) if g == group)
        out.append(1 + sum(1 for s, g in zip(row, group_c, strict=True) if g != group and not s < best))
    return out


def integers(rows: int, dim: int, seed: int, high: int = 3) -> Tensor:
    """Small whole numbers: their inner products are exact and tie often."""
    return torch.randint(-high, high + 1, (rows, dim), generator=torch.Generator().manual_seed(seed)).float()


def unit(rows: int, dim: int, seed: int) -> Tensor:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=1)


def random_groups(q: int, c: int, kinds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unsorted groups of unequal size with gaps between their numbers; every query has a candidate."""
    g = torch.Generator().manual_seed(seed)
    kinds = min(kinds, c)
    group_c = torch.cat([torch.arange(kinds), torch.randint(kinds, (c - kinds,), generator=g)])
    group_c = group_c[torch.randperm(c, generator=g)]
    return torch.randint(kinds, (q,), generator=g) * 7 - 20, group_c * 7 - 20


@pytest.mark.parametrize("seed", range(12))
def test_ranks_with_ties_equal_the_loop(seed: int) -> None:
    q, c, dim = 23 + seed, 40 - 2 * seed, 3
    a, b = integers(q, dim, seed), integers(c, dim, seed + 100)
    group_q, group_c = random_groups(q, c, 9, seed)
    scores = (a @ b.T).tolist()
    assert len({s for row in scores for s in row}) < 60  # ties are the point
    result = ranks(a, b, group_q, group_c, chunk=5)
    assert result.rank.tolist() == loop_ranks(scores, group_q.tolist(), group_c.tolist())
    assert result.correct.tolist() == [(group_c == g).sum().item() for g in group_q]


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_random_unit_rows_equal_a_float64_sort(seed: int) -> None:
    a, b = unit(60, 32, seed), unit(90, 32, seed + 50)
    group_q, group_c = random_groups(60, 90, 30, seed)
    scores = a.double() @ b.double().T
    assert ranks(a, b, group_q, group_c).rank.tolist() == loop_ranks(
        scores.tolist(), group_q.tolist(), group_c.tolist()
    )


def test_figures_follow_from_the_ranks() -> None:
    a, b = integers(31, 3, 1), integers(31, 3, 2)
    got = retrieval(a, b, ks=(1, 3, 10), chunk=7)
    for direction, x, y in (("image_to_text", a, b), ("text_to_image", b, a)):
        loop = loop_ranks((x @ y.T).tolist(), list(range(31)), list(range(31)))
        for k in (1, 3, 10):
            assert got[direction][f"r@{k}"] == pytest.approx(100 * sum(r <= k for r in loop) / 31, abs=1e-12)
        assert got[direction]["median_rank"] == statistics.median(loop)
        assert (got[direction]["n"], got[direction]["candidates"], got[direction]["nan"]) == (31, 31, 0)
    even = retrieval(a[:30], b[:30])["image_to_text"]["median_rank"]
    assert even == statistics.median(loop_ranks((a[:30] @ b[:30].T).tolist(), list(range(30)), list(range(30))))


def test_three_images_with_one_two_and_five_captions() -> None:
    # Scores by hand: image embeddings are the axes, so a caption's coordinates are its scores.
    images = torch.eye(3)
    captions = torch.tensor(
        [
            [0.9, 0.1, 0.2],  # of image 0: right for it
            [0.1, 0.3, 0.5],  # of image 1: image 2 is nearer
            [0.95, 0.2, 0.1],  # of image 1: image 0 is nearer, and it beats image 0's own caption there
            [0.0, 0.1, 0.6],  # of image 2, and the next four
            [0.2, 0.4, 0.3],
            [0.0, 0.0, 0.7],
            [0.3, 0.35, 0.1],
            [0.1, 0.2, 0.3],
        ]
    )
    of = torch.tensor([0, 1, 1, 2, 2, 2, 2, 2])
    got = retrieval(images, captions, torch.arange(3), of, ks=(1, 2, 3, 8, 9))
    # Image 0: its caption .9, another .95 above: rank 2. Image 1: best own .3; .4 and .35 above: rank 3.
    # Image 2: best own .7, nothing above: rank 1 (its four other captions never count against).
    i2t = got["image_to_text"]
    assert ranks(images, captions, torch.arange(3), of).rank.tolist() == [2, 3, 1]
    assert [i2t[f"r@{k}"] for k in (1, 2, 3)] == pytest.approx([100 / 3, 200 / 3, 100])
    assert i2t["r@8"] == 100
    assert i2t["r@9"] is None
    # Captions: ranks among the three images, in the order above.
    assert ranks(captions, images, of, torch.arange(3)).rank.tolist() == [1, 2, 2, 1, 2, 1, 3, 1]
    assert got["text_to_image"]["r@1"] == 50
    assert got["text_to_image"]["r@2"] == 87.5
    # One of 8, two of 8 and five of 8 correct: chance of the first place is 1/8, 2/8, 5/8; of the first two, by hand.
    assert i2t["chance"]["r@1"] == pytest.approx(100 * (1 + 2 + 5) / 8 / 3)
    assert i2t["chance"]["r@2"] == pytest.approx(100 * ((1 - 21 / 28) + (1 - 15 / 28) + (1 - 3 / 28)) / 3)
    assert got["text_to_image"]["chance"]["r@1"] == pytest.approx(100 / 3)
    assert got["chance"] == i2t["chance"]


def test_constant_features_have_recall_zero() -> None:
    ones = torch.ones(40, 8) / 8**0.5
    got = retrieval(ones, ones)
    for direction in ("image_to_text", "text_to_image"):
        assert [got[direction][f"r@{k}"] for k in (1, 5, 10)] == [0, 0, 0]
        assert got[direction]["median_rank"] == 40
    assert retrieval(ones[:1], ones[:1])["image_to_text"]["r@1"] == 100  # nothing to tie with


@pytest.mark.parametrize("dim", [3, 7, 64, 100, 511])
def test_equal_rows_tie_wherever_they_stand(dim: int) -> None:
    """Kernels sum edge columns in another order; two equal candidates must still tie."""
    query, wrong = unit(37, dim, 0), unit(300, dim, 1)
    candidates = torch.cat([query, wrong, query])  # each right one has an equal wrong one far away
    group_c = torch.arange(len(candidates))
    for chunk in (1, 4, 37):
        assert int(ranks(query, candidates, torch.arange(37), group_c, chunk).rank.min()) == 2


def test_nan_is_a_miss_and_is_counted() -> None:
    a, b = integers(12, 4, 0), integers(12, 4, 1)
    a[3, 2] = math.nan
    a[7] = math.inf
    got = retrieval(a, b, ks=(1, 12))
    scores = (a @ b.T).tolist()
    scores[7] = [math.nan] * 12  # a row that is not finite has no scores
    loop = loop_ranks(scores, list(range(12)), list(range(12)))
    assert loop[3] == loop[7] == 13
    assert got["image_to_text"]["nan"] == 2
    assert got["image_to_text"]["r@1"] == pytest.approx(100 * sum(r == 1 for r in loop) / 12)
    assert got["image_to_text"]["r@12"] == pytest.approx(100 * 10 / 12)  # a miss even where every rank would count
    # Seen from the texts every query meets the two broken images.
    assert got["text_to_image"]["nan"] == 12
    assert got["text_to_image"]["r@1"] == got["text_to_image"]["r@12"] == 0


@pytest.mark.parametrize("kind", ["integers", "random"])
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, c = 101, 173
    a, b = (integers(n, 5, 3), integers(c, 5, 4)) if kind == "integers" else (unit(n, 48, 3), unit(c, 48, 4))
    group_q, group_c = random_groups(n, c, 20, 5)
    whole = ranks(a, b, group_q, group_c, chunk=n).rank.tolist()
    for chunk in (1, 7, 50, n, 10 * n):
        assert ranks(a, b, group_q, group_c, chunk).rank.tolist() == whole
    monkeypatch.setattr(ranks_module, "_ROWS", 2000)
    monkeypatch.setattr(ranks_module, "_TILE", 64)  # tiles of a few columns, and of one
    for chunk in (1, 7, 1000):
        assert ranks(a, b, group_q, group_c, chunk).rank.tolist() == whole
    shuffle = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    assert ranks(a[shuffle], b, group_q[shuffle], group_c).rank.tolist() == torch.tensor(whole)[shuffle].tolist()


@pytest.mark.parametrize("scale", [1.0, 1e-6, 37.0, 1e8])
def test_fixed_point_products_are_exact_and_close(scale: float) -> None:
    a = unit(50, 512, 0) * scale
    q = fixed_point(a)
    unit_of_q = float((q[0] @ q[0]).sqrt() / a[0].double().norm())
    assert bool((q == q.round()).all())
    assert float((q @ q.T).abs().max()) < 2**53
    exact = [[sum(int(x) * int(y) for x, y in zip(r, s, strict=True)) for s in q[:4].tolist()] for r in q[:4].tolist()]
    assert (q[:4] @ q[:4].T).tolist() == exact
    assert float((q / unit_of_q - a.double()).abs().max()) < 2e-8 * scale


@pytest.mark.parametrize(("c", "k"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 4), (6, 2)])
def test_chance_equals_the_enumeration_of_all_orders(c: int, k: int) -> None:
    n = 6
    hits = [min(order.index(x) for x in range(c)) < k for order in itertools.permutations(range(n))]
    features = torch.zeros(n, 2)
    group_c = torch.tensor([0] * c + list(range(1, n - c + 1)))
    result = ranks(features[:1], features, torch.tensor([0]), group_c)
    assert result.chance(k) == pytest.approx(100 * sum(hits) / len(hits), rel=1e-12)


def test_chance_is_averaged_over_queries_and_large_sets_are_fine() -> None:
    group_c = torch.tensor([0, 0, 0, 1])
    result = ranks(torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 0, 1]), group_c)
    assert result.chance(1) == pytest.approx(100 * (0.75 + 0.75 + 0.25) / 3)
    got = retrieval(unit(1040, 4, 0), unit(1040, 4, 1))
    assert got["chance"] == pytest.approx({"r@1": 100 / 1040, "r@5": 500 / 1040, "r@10": 1000 / 1040})


def test_k_larger_than_the_candidates_is_not_available() -> None:
    got = retrieval(unit(6, 3, 0), unit(6, 3, 0))  # the classic: R@10 of six pairs
    for direction in ("image_to_text", "text_to_image"):
        assert (got[direction]["r@1"], got[direction]["r@5"], got[direction]["r@10"]) == (100, 100, None)
        assert got[direction]["chance"]["r@10"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"e2": torch.ones(5, 3)}, "queries and candidates must be"),
        ({"e2": torch.ones(4, 2)}, "equal lengths"),
        ({"e1": torch.ones(0, 2), "e2": torch.ones(0, 2)}, "nothing to rank: 0 queries"),
        ({"group1": torch.arange(5)}, "both group1 and group2"),
        ({"group1": torch.arange(5), "group2": torch.arange(4)}, "one group a row"),
        ({"group1": torch.tensor([0, 1, 2, 9, 9]), "group2": torch.arange(5)}, r"2 of 5 queries .*groups \[9\]"),
        ({"ks": (1, 0)}, "ks must be"),
        ({"ks": ()}, "ks must be"),
        ({"chunk": 0}, "chunk must be"),
    ],
)
def test_bad_input_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval(**{"e1": torch.ones(5, 2), "e2": torch.ones(5, 2), **arguments})


def test_fifty_thousand_pairs_in_bounded_memory() -> None:
    """N x N scores would take 20 GB in float64; a chunk larger than N must not ask for them."""
    code = (
        "import resource, torch, neuclip_lib\n"
        "torch.set_num_threads(1)\n"
        "g = torch.Generator().manual_seed(0)\n"
        "e1, e2 = torch.randn(50_000, 8, generator=g), torch.randn(50_000, 8, generator=g)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "some = torch.arange(0, 50_000, 100)\n"
        "from neuclip_lib.evaluation.ranks import ranks\n"
        "at = torch.arange(50_000)\n"
        "r = [ranks(e1[some], e2, some, at, chunk).rank for chunk in (7, 60_000)]\n"
        "assert bool((r[0] == r[1]).all())\n"
        "full = ranks(e1, e2, at, at, 60_000)\n"
        "assert bool((full.rank[some] == r[0]).all())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, full.median())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    grown, median = map(float, done.stdout.split())
    kibibyte = 1 if sys.platform == "darwin" else 1024
    assert grown * kibibyte < 400 * 2**20
    assert 24_000 < median < 26_000  # unrelated embeddings
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * kibibyte < 2 * 2**30


def test_top_matches_are_the_best_in_order() -> None:
    a, b = unit(4, 16, 0), unit(30, 16, 1)
    top = top_matches(a, b, 5)
    assert top.shape == (4, 5)
    for row, got in zip((a.double() @ b.double().T).tolist(), top.tolist(), strict=True):
        assert got == sorted(range(30), key=lambda j: -row[j])[:5]
    assert top_matches(a, torch.ones(3, 16), 5).tolist() == [[0, 1, 2]] * 4
    a[0, 0], a[1, 0] = math.inf, math.nan  # drawn as if the number were zero, never a crash
    zero = a.clone()
    zero[:2, 0] = 0
    assert torch.equal(top_matches(a, b), top_matches(zero, b))
