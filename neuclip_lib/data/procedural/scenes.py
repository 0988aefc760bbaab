"""Which scene sample i shows: a pure function of (seed, i), for many i at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from neuclip_lib.data.procedural.grammar import (
    COLOURS,
    MOST,
    MOST_RELATED,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Things,
)

ALONE, SEVERAL, RELATED = 0, 1, 2
_KINDS = np.array([ALONE, SEVERAL, RELATED, RELATED])  # a quarter, a quarter, a half
_TEST, _VALIDATION, _PARTS = 0, 1, 7

# One shape a colour never appears in training or validation, each shape once: colour c and shape HELD_OUT[c].
HELD_OUT = (3 * np.arange(len(COLOURS)) + 1) % len(SHAPES)


@dataclass(frozen=True)
class Table:
    """Scenes of b samples as numbers: places in the grammar's lists, int64 [b] or, for things, [b, 2] (first, second).

    Args:
        kind: one thing ALONE, SEVERAL equal things, or two kinds RELATED.
        count: how many things, 0 where there is no second kind.
        place: of one thing alone.
        relation: of two kinds.
    """

    kind: np.ndarray
    count: np.ndarray
    size: np.ndarray
    colour: np.ndarray
    shape: np.ndarray
    place: np.ndarray
    relation: np.ndarray

    def __len__(self) -> int:
        return len(self.kind)


class Draws:
    """Random numbers by address: the same (seed, stream, index, slot) gives the same number, in any order.

    Args:
        seed: of the whole set.
        stream: what the numbers are for; two uses never share one.
        index: int64 [b], addresses of samples.
    """

    def __init__(self, seed: int, stream: str, index: np.ndarray) -> None:
        start = hashlib.sha256(f"{seed} {stream}".encode()).digest()
        self._state = _mix(index.astype(np.uint64) * _GOLDEN ^ np.frombuffer(start, "<u8", 1))
        self._slot = 0

    def below(self, bound: int | np.ndarray) -> np.ndarray:
        """Whole numbers 0..bound-1, int64 [b]; every call takes a new slot."""
        return ((self._bits() >> np.uint64(32)) * np.asarray(bound, np.uint64) >> np.uint64(32)).astype(np.int64)

    def unit(self) -> np.ndarray:
        """Numbers in [0, 1), float64 [b]; every call takes a new slot."""
        return (self._bits() >> np.uint64(11)) * 2.0**-53

    def _bits(self) -> np.ndarray:
        self._slot += 1
        return _mix(self._state + np.array([self._slot], np.uint64) * _GOLDEN)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): uint64 [b] to uint64 [b], every bit stirred."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def parts(index: np.ndarray) -> np.ndarray:
    """The part of each index (int64 [b]): "test", "validation" or "train", the same for every seed and every n."""
    bucket = Draws(0, "part", index).below(_PARTS)
    return np.select([bucket == _TEST, bucket == _VALIDATION], ["test", "validation"], "train")


def scenes(seed: int, index: np.ndarray) -> Table:
    """The scenes of samples ``index`` (int64 [b]). Combinations of HELD_OUT come up in the test part alone."""
    return sample(Draws(seed, "scene", index), parts(index) == "test")


def sample(draws: Draws, held_out_too: np.ndarray) -> Table:
    """Scenes by chance; combinations of HELD_OUT only where ``held_out_too`` (bool [b])."""
    kind = _KINDS[draws.below(len(_KINDS))]
    related = kind == RELATED
    first_count = np.select([kind == ALONE, kind == SEVERAL], [1, 2 + draws.below(MOST - 1)], 0)
    one, two = 1 + draws.below(MOST_RELATED), 1 + draws.below(MOST_RELATED)
    first_colour = draws.below(len(COLOURS))
    # The second colour differs, so that "left of" never has the same things on both sides.
    second_colour = (first_colour + 1 + draws.below(len(COLOURS) - 1)) % len(COLOURS)
    colour = np.stack([first_colour, second_colour], 1)
    return Table(
        kind=kind,
        count=np.stack([np.where(related, one, first_count), np.where(related, two, 0)], 1),
        size=np.stack([draws.below(len(SIZES)), draws.below(len(SIZES))], 1),
        colour=colour,
        shape=np.stack([_shape(draws, colour[:, side], held_out_too) for side in (0, 1)], 1),
        place=draws.below(len(PLACES)),
        relation=draws.below(len(RELATIONS)),
    )


def _shape(draws: Draws, colour: np.ndarray, held_out_too: np.ndarray) -> np.ndarray:
    """A shape for each colour: any of 8 where held-out ones count, else one of the other 7."""
    steps = np.where(held_out_too, draws.below(len(SHAPES)), 1 + draws.below(len(SHAPES) - 1))
    return (HELD_OUT[colour] + steps) % len(SHAPES)


def scene_at(table: Table, row: int) -> Scene:
    """One row of a table as a scene of the grammar."""
    kind = table.kind[row]
    if kind == RELATED:
        return Scene(_things(table, row, 0), relation=RELATIONS[table.relation[row]], second=_things(table, row, 1))
    return Scene(_things(table, row, 0), place=PLACES[table.place[row]] if kind == ALONE else None)


def _things(table: Table, row: int, side: int) -> Things:
    return Things(
        count=int(table.count[row, side]),
        size=SIZES[table.size[row, side]],
        colour=_COLOUR_NAMES[table.colour[row, side]],
        shape=SHAPES[table.shape[row, side]],
    )


_COLOUR_NAMES = tuple(COLOURS)


def meanings(table: Table) -> np.ndarray:
    """A number for what each scene says, int64 [b]: equal for equal captions, and for a relation said the other way.

    "A right of B" and "B left of A" are true of the same pictures, so they share one.
    """
    turned = table.relation % 2 == 1  # right of, below
    look = (table.size * len(COLOURS) + table.colour) * len(SHAPES) + table.shape  # [b, 2]
    looks = len(SIZES) * len(COLOURS) * len(SHAPES)
    things = (table.count - 1) * looks + look
    near, far = np.where(turned, things[:, 1], things[:, 0]), np.where(turned, things[:, 0], things[:, 1])
    most = MOST_RELATED * looks
    alone = look[:, 0] * len(PLACES) + table.place
    several = looks * len(PLACES) + things[:, 0]
    related = looks * (len(PLACES) + MOST) + (near * most + far) * 2 + table.relation // 2
    return np.select([table.kind == ALONE, table.kind == SEVERAL], [alone, several], related)
