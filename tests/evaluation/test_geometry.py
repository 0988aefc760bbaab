"""Geometry figures against naive loops and cases with a known answer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuclip_lib.evaluation.geometry import alignment, effective_rank, geometry, modality_gap, uniformity


def unit(rows: int, dim: int, seed: int) -> Tensor:
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=1)


def distance2(x: list[float], y: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(x, y, strict=True))


def test_alignment_and_gap_equal_the_loop() -> None:
    a, b = unit(17, 5, 0), unit(17, 5, 1)
    rows = list(zip(a.double().tolist(), b.double().tolist(), strict=True))
    assert alignment(a, b) == pytest.approx(sum(distance2(x, y) for x, y in rows) / 17, rel=1e-13)
    means = [[sum(r[side][k] for r in rows) / 17 for k in range(5)] for side in (0, 1)]
    assert modality_gap(a, b) == pytest.approx(math.sqrt(distance2(*means)), rel=1e-13)
    assert alignment(a, a) == modality_gap(a, a) == 0


@pytest.mark.parametrize("chunk", [1, 4, 19, 1000])
def test_uniformity_equals_the_loop_at_every_chunk(chunk: int) -> None:
    x = unit(19, 3, 2)
    rows = x.double().tolist()
    terms = [math.exp(-2 * distance2(rows[i], rows[j])) for i in range(19) for j in range(19) if i != j]
    assert uniformity(x, chunk) == pytest.approx(math.log(sum(terms) / len(terms)), rel=1e-12)


def test_uniformity_at_its_ends() -> None:
    assert uniformity(torch.ones(7, 4) / 2) == pytest.approx(0, abs=1e-14)  # all in one point: the worst value
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(-8)  # two opposite points: distance 2
    assert uniformity(unit(1, 4, 0)) is None


@pytest.mark.parametrize("chunk", [1, 5, 64, 8192])
def test_effective_rank_equals_its_definition_at_every_chunk(chunk: int) -> None:
    x = unit(64, 6, 3) * torch.tensor([1, 0.5, 0.1, 1e-3, 1e-6, 0.7])
    values = torch.linalg.svdvals(x.double()).tolist()
    share = [v / sum(values) for v in values]
    want = math.exp(-sum(p * math.log(p) for p in share))
    assert effective_rank(x, chunk) == pytest.approx(want, rel=1e-11)


def test_effective_rank_at_its_ends() -> None:
    assert effective_rank(torch.eye(5).repeat(3, 1)) == pytest.approx(5, rel=1e-12)
    assert effective_rank(unit(1, 9, 0).repeat(50, 1)) == pytest.approx(1, abs=1e-6)
    assert effective_rank(torch.zeros(4, 3)) is None


def test_geometry_reports_both_modalities_and_broken_rows() -> None:
    a, b = unit(12, 4, 4), unit(12, 4, 5)
    got = geometry(a, b)
    assert got["uniformity"] == {"image": uniformity(a), "text": uniformity(b)}
    assert got["effective_rank"] == {"image": effective_rank(a), "text": effective_rank(b)}
    assert (got["alignment"], got["modality_gap"], got["n"], got["nan"]) == (alignment(a, b), modality_gap(a, b), 12, 0)
    a[3, 1] = math.nan
    broken = geometry(a, b)
    assert broken["nan"] == 1
    assert broken["alignment"] is broken["modality_gap"] is broken["uniformity"]["text"] is None
    with pytest.raises(ValueError, match=r"paired rows .*\[12, 4\] and \[11, 4\]"):
        geometry(a, b[:11])
