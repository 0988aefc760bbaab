"""recall_at_1(s): percent of images whose own caption scores strictly above all others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuclip_lib.course.exercise import Case, Exercise, Wrong
from neuclip_lib.evaluation.retrieval import retrieval


def recall_at_1(s: Tensor) -> float:
    """Image-to-text R@1 in percent from the similarities ``s`` ``[B, B]``; ties and NaN count as misses."""
    captions = torch.eye(len(s), dtype=s.dtype, device=s.device)  # rows s_i against unit axes: the similarities are s
    return float(retrieval(s, captions, ks=(1,))["image_to_text"]["r@1"])


def cases() -> list[Case]:
    """A plain case, one with ties, constant scores, NaN, and one where rows and columns disagree."""
    plain = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.4], [0.1, 0.2, 0.6]])
    ties = torch.tensor([[0.5, 0.5, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.3]])
    missing = torch.tensor([[math.nan, 0.1, 0.2], [0.1, 0.8, 0.3], [0.2, 0.1, math.nan]])
    random = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) + 0.4 * torch.eye(20)
    return [
        Case("s = [[0.9, 0.1, 0.2], [0.8, 0.3, 0.4], [0.1, 0.2, 0.6]]", (plain,)),
        Case("20 images, random scores", (random,)),
        Case("a tie: s = [[0.5, 0.5, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.3]]", (ties,)),
        Case("the same score everywhere, 5 images", (torch.full((5, 5), 0.25),)),
        Case("two images of three whose own score is NaN", (missing,)),
    ]


def _percent(hit: Tensor) -> float:
    return 100 * hit.double().mean().item()


def _ties_for(s: Tensor) -> float:
    return _percent((s.diagonal()[:, None] >= s).all(1))


def _argmax(s: Tensor) -> float:
    return _percent(s.argmax(1) == torch.arange(len(s)))


def _nan_as_hit(s: Tensor) -> float:
    others = s.masked_fill(torch.eye(len(s), dtype=torch.bool), -math.inf)
    return _percent(~(others >= s.diagonal()[:, None]).any(1))


def _columns(s: Tensor) -> float:
    return recall_at_1(s.T)


def _fraction(s: Tensor) -> float:
    return recall_at_1(s) / 100


def _count(s: Tensor) -> float:
    return recall_at_1(s) / 100 * len(s)


def _positive_as_rival(s: Tensor) -> float:
    return _percent((s.diagonal()[:, None] > s).all(1))


def _misses(s: Tensor) -> float:
    return 100 - recall_at_1(s)


EXERCISE = Exercise(
    name="recall_at_1",
    reference=recall_at_1,
    cases=cases,
    wrong={
        "fraction for percent": Wrong(_fraction, "this is a fraction; percent are asked for."),
        "count for percent": Wrong(_count, "this is the number of hits; percent of the images are asked for."),
        "columns for rows": Wrong(
            _columns, "you look down the columns, where images compete for a text; row i holds the captions of image i."
        ),
        "ties count as hits": Wrong(
            _ties_for,
            "an equal score counts as a hit here; it must count as a miss, or a model that gives "
            "every pair the same score has a recall of 100.",
        ),
        "argmax": Wrong(
            _argmax,
            "argmax breaks ties in favour of the first place and takes NaN for the largest number, so a broken model "
            "scores hits; compare the own score with the others instead.",
        ),
        "NaN counts as a hit": Wrong(
            _nan_as_hit,
            "you count what is not beaten, and nothing beats NaN; ask that the own score is above each other one.",
        ),
        "own caption as rival": Wrong(
            _positive_as_rival, "nothing is strictly above itself: leave j = i out before you ask for all others."
        ),
        "misses for hits": Wrong(_misses, "these are the misses; the hits are asked for."),
    },
)
