"""Retrieval between images and texts: recall at k and median rank, both ways, with exact chance levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neuclip_lib.evaluation.ranks import Ranks, double, fixed_point, ranks


def retrieval(
    e1: Tensor,
    e2: Tensor,
    group1: Tensor | None = None,
    group2: Tensor | None = None,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = 1024,
) -> dict[str, Any]:
    """Recall at k in percent (hit rate of the best correct candidate; ties and NaN count against) and median rank.

    ``chance`` is the exact recall of a random order: of image to text, and of each direction inside it. The two differ
    when groups have more texts than images. ``r@k`` is None where there are fewer than k candidates.

    Args:
        e1: [n1, d] image embeddings, unit rows.
        e2: [n2, d] text embeddings, unit rows.
        group1: [n1] integers; a text is correct for an image when their groups are equal. None: row i matches row i.
        group2: [n2] integers.
        ks: the k of recall at k.
        chunk: at most this many queries at a time; it changes memory and speed, never a result.

    Raises:
        ValueError: on shapes that do not fit, one group missing, a k below 1, or a query without a correct candidate.
    """
    if not ks or any(int(k) != k or k < 1 for k in ks):
        raise ValueError(f"ks must be whole numbers from 1; got {list(ks)}")
    group1, group2 = _groups(e1, e2, group1, group2)
    image_to_text = _direction(ranks(e1, e2, group1, group2, chunk), ks)
    text_to_image = _direction(ranks(e2, e1, group2, group1, chunk), ks)
    return {"image_to_text": image_to_text, "chance": image_to_text["chance"], "text_to_image": text_to_image}


def top_matches(queries: Tensor, candidates: Tensor, k: int = 5) -> Tensor:
    """Indices [q, min(k, c)] of the best candidates of a few queries, best first; equal scores in order of index.

    Args:
        queries: [q, d] rows.
        candidates: [c, d] rows.
    """
    scores = fixed_point(double(queries).nan_to_num(0, 0, 0)) @ fixed_point(double(candidates).nan_to_num(0, 0, 0)).T
    return scores.argsort(dim=1, descending=True, stable=True)[:, :k]


def _groups(e1: Tensor, e2: Tensor, group1: Tensor | None, group2: Tensor | None) -> tuple[Tensor, Tensor]:
    if group1 is not None and group2 is not None:
        return group1, group2
    if group1 is not None or group2 is not None:
        raise ValueError("give both group1 and group2, or neither (row i of e1 then matches row i of e2)")
    if len(e1) != len(e2):
        raise ValueError(f"without groups e1 and e2 must have equal lengths; got {len(e1)} and {len(e2)}")
    return torch.arange(len(e1)), torch.arange(len(e2))


def _direction(result: Ranks, ks: Sequence[int]) -> dict[str, Any]:
    return {
        **{f"r@{k}": result.recall(k) for k in ks},
        "median_rank": result.median(),
        "n": len(result.rank),
        "candidates": result.candidates,
        "nan": result.nan,
        "chance": {f"r@{k}": result.chance(k) for k in ks},
    }
