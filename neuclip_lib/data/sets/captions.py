"""Shapes described by a grammar: any number of pairs, made when they are asked for."""

from __future__ import annotations

from neuclip_lib.data.pairs import Pairs
from neuclip_lib.data.procedural import ProceduralPairs, tasks
from neuclip_lib.data.spec import SetSpec, ZeroShotTask

SIZE = 32


def open_pairs(split: str, n: int = 50_000, seed: int = 0, size: int = SIZE) -> Pairs:
    """The part of samples 0..n-1 that falls in ``split``; see ``ProceduralPairs``."""
    return ProceduralPairs(split, n=n, seed=seed, size=size)


def zero_shot(pairs: Pairs) -> list[ZeroShotTask]:
    """Colour and shape (combinations seen and new, 64 classes), counts (5) and relations (4)."""
    assert isinstance(pairs, ProceduralPairs)
    return tasks.zero_shot(pairs)


SPEC = SetSpec(
    name="captions",
    title="shapes described by a grammar, any number of pairs (procedural)",
    origin="made on the fly by this project: scenes of coloured shapes, and the sentence that says each",
    licence="Apache-2.0 (ours)",
    attribution="",
    task="growth with n, compositional zero-shot, tests",
    image_size=SIZE,
    open=open_pairs,
    zero_shot=zero_shot,
    note=(
        "Options: n (pairs in all parts together, 50000 by default), seed, size. Sample i depends on the seed and i "
        "alone, and so does its part: a seventh each is test and validation, by a hash of i. Eight combinations of "
        "colour and shape are held out: they come up in the test part alone. Equal captions, and a relation said the "
        "other way round, are one concept. A sentence leaves out the lightness of the ground and the exact places."
    ),
)
