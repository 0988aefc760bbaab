"""Pictures of scenes, many at once: small shapes drawn once with soft edges, then laid down with numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from neuclip_lib.data.procedural.grammar import COLOURS, MOST, RELATIONS, SHAPES
from neuclip_lib.data.procedural.scenes import ALONE, RELATED, Draws, Table

UNIT = 32  # lengths below are for a picture of 32 pixels and grow with it
RADII = ((2.5, 2.75, 3.0), (4.5, 4.75, 5.0))  # of small and of large things; two large ones fit side by side in thirds
GROUND = (224, 256)  # the light grey of the ground: a nuisance that no caption tells
FINE = 8  # samples a pixel and axis when a shape is drawn
HALVES = 2  # steps a pixel and axis at which a thing can lie

PALETTE = np.array(list(COLOURS.values()), np.float32)  # [8, 3]

Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _in_star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Five blunt points: the places within four of the five half-planes of a pentagram, cut to the circle."""
    angles = np.pi / 2 + 2 * np.pi / 5 * np.arange(5)
    near = sum((u * np.cos(a) + v * np.sin(a) <= 0.38).astype(int) for a in angles)
    return (near >= 4) & (u * u + v * v <= 1)


# Whether (u, v) lies in the shape of radius 1, with v downwards.
INSIDE: dict[str, Inside] = {
    "circle": lambda u, v: u * u + v * v <= 1,
    "ring": lambda u, v: (u * u + v * v <= 1) & (u * u + v * v >= 0.36),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) <= 0.9,
    "diamond": lambda u, v: abs(u) + abs(v) <= 1,
    "triangle": lambda u, v: (abs(u) <= (v + 1) / 1.8) & (v <= 0.8) & (v >= -1),
    "star": _in_star,
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) <= 0.3) & (np.maximum(abs(u), abs(v)) <= 1),
    "bar": lambda u, v: (abs(u) <= 1) & (abs(v) <= 0.35),
}


@dataclass(frozen=True)
class Sprites:
    """Every shape at every radius and sub-pixel step.

    Args:
        cover: float32 [shapes, sizes, radii, HALVES (y), HALVES (x), side, side], the share of a pixel that is covered.
        side: pixels a sprite.
    """

    cover: np.ndarray
    side: int


@lru_cache(maxsize=8)
def sprites(image_size: int) -> Sprites:
    """The sprites for pictures of ``image_size`` pixels."""
    scale = image_size / UNIT
    side = 2 * int(np.ceil(RADII[-1][-1] * scale)) + 2
    fine = (np.arange(side * FINE) + 0.5) / FINE - side / 2  # pixels from the middle
    cover = np.empty((len(SHAPES), len(RADII), len(RADII[0]), HALVES, HALVES, side, side), np.float32)
    for shape, name in enumerate(SHAPES):
        for place in np.ndindex(cover.shape[1:5]):
            radius = RADII[place[0]][place[1]] * scale
            u, v = np.meshgrid((fine - place[3] / HALVES) / radius, (fine - place[2] / HALVES) / radius)
            inside = INSIDE[name](u, v).reshape(side, FINE, side, FINE)
            cover[(shape, *place)] = inside.mean((1, 3))
    cover.setflags(write=False)
    return Sprites(cover, side)


def draw(table: Table, seed: int, stream: str, index: np.ndarray, image_size: int) -> np.ndarray:
    """Pictures of scenes: uint8 [b, 3, S, S]; where things lie is a pure function of (seed, stream, index)."""
    draws = Draws(seed, stream, index)
    ground = GROUND[0] + draws.below(GROUND[1] - GROUND[0])
    level = np.stack([draws.below(len(RADII[0])) for _ in range(2)], 1)  # [b, 2]: equal things are equally large
    radius = np.array(RADII)[table.size, level] * image_size / UNIT  # [b, 2]
    cover = _cover(table, level, lay_out(table, draws, radius, image_size), image_size)  # [2, b, S, S]
    pictures = np.repeat(ground.astype(np.float32)[:, None, None, None], 3, 1)  # [b, 3, 1, 1]
    for side in (0, 1):
        colour = PALETTE[table.colour[:, side]][:, :, None, None]  # [b, 3, 1, 1]
        pictures = pictures + cover[side][:, None] * (colour - ground[:, None, None, None])
    return np.rint(pictures).astype(np.uint8)


@dataclass(frozen=True)
class Layout:
    """Where up to MOST things of each picture lie.

    Args:
        centres: float64 [b, MOST, 2], (y, x) in pixels.
        side: int64 [b, MOST], 0 for the first kind of thing, 1 for the second.
        present: bool [b, MOST].
    """

    centres: np.ndarray
    side: np.ndarray
    present: np.ndarray


def lay_out(table: Table, draws: Draws, radius: np.ndarray, image_size: int) -> Layout:
    """Choose cells, one a thing, and a place within each; radius float64 [b, 2] in pixels."""
    number = np.arange(MOST)[None]  # [1, MOST]
    side = (number >= table.count[:, :1]).astype(np.int64)  # [b, MOST]
    related = (table.kind == RELATED)[:, None, None]
    cells, rooms = np.where(related, _halves(table, draws, side), _ninths(table, draws)), _rooms(table)
    own = np.take_along_axis(radius, side, 1)[:, :, None] / image_size  # [b, MOST, 1]
    slack = np.maximum(rooms[:, None] - own - 1 / (HALVES * image_size), 0)  # [b, MOST, 2]
    jitter = np.stack([2 * draws.unit() - 1 for _ in range(2 * MOST)], 1).reshape(-1, MOST, 2)
    return Layout((cells + jitter * slack) * image_size, side, number < table.count.sum(1)[:, None])


def _ninths(table: Table, draws: Draws) -> np.ndarray:
    """Middles of distinct cells of a 3 x 3 grid, as shares of the side: [b, MOST, 2]."""
    cell = _shuffled(draws, 9)[:, :MOST]
    cell[:, 0] = np.where(table.kind == ALONE, table.place, cell[:, 0])
    return (np.stack([cell // 3, cell % 3], 2) + 0.5) / 3


def _halves(table: Table, draws: Draws, side: np.ndarray) -> np.ndarray:
    """Middles for two kinds: each kind in its half, in distinct thirds along the border: [b, MOST, 2]."""
    thirds = np.concatenate([_shuffled(draws, 3), _shuffled(draws, 3)], 1)  # three for each kind
    place = np.arange(MOST)[None] - np.where(side == 1, table.count[:, :1] - 3, 0)
    along = (np.take_along_axis(thirds, np.minimum(place, MOST - 1), 1) + 0.5) / 3
    half = (np.where(table.relation[:, None] % 2 == 1, 1 - side, side) + 0.5) / 2  # "right of", "below": the far half
    return np.where(_beside(table)[:, None, None], np.stack([along, half], 2), np.stack([half, along], 2))


def _rooms(table: Table) -> np.ndarray:
    """Half the height and width of a cell, as shares of the side: [b, 2]."""
    beside, related = _beside(table), table.kind == RELATED
    height = np.where(related & ~beside, 1 / 4, 1 / 6)
    width = np.where(related & beside, 1 / 4, 1 / 6)
    return np.stack([height, width], 1)


def _beside(table: Table) -> np.ndarray:
    """Whether the relation is left of or right of, bool [b]."""
    return table.relation < RELATIONS.index("above")


def _shuffled(draws: Draws, n: int) -> np.ndarray:
    """A random order of 0..n-1 for each sample: [b, n]."""
    return np.argsort(np.stack([draws.unit() for _ in range(n)], 1), 1)


def _cover(table: Table, level: np.ndarray, layout: Layout, image_size: int) -> np.ndarray:
    """How much of each pixel the first and the second kind of thing covers: float32 [2, b, S, S]."""
    stock = sprites(image_size)
    margin = stock.side  # sprites reach over the picture's edge; what they hold there is empty
    wide = image_size + 2 * margin
    canvas = np.zeros((2, len(table), wide, wide), np.float32)
    steps = np.rint((layout.centres - stock.side / 2) * HALVES).astype(np.int64)  # top left corner, in half pixels
    corner, sub = steps // HALVES + margin, steps % HALVES
    patch = np.arange(stock.side)
    for number in range(MOST):
        rows = np.flatnonzero(layout.present[:, number])
        side = layout.side[rows, number]
        look = (table.shape[rows, side], table.size[rows, side], level[rows, side])
        sprite = stock.cover[(*look, sub[rows, number, 0], sub[rows, number, 1])]  # [r, side, side]
        y = corner[rows, number, 0][:, None, None] + patch[None, :, None]
        x = corner[rows, number, 1][:, None, None] + patch[None, None, :]
        canvas[side[:, None, None], rows[:, None, None], y, x] += sprite  # one sprite a picture: no place twice
    return canvas[:, :, margin:-margin, margin:-margin]
