"""Zero-shot tasks on pictures drawn for them: one thing, a count, or a relation, with all else left to chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from neuclip_lib.data.procedural import drawing
from neuclip_lib.data.procedural.grammar import COLOURS, COUNTS, PLACES, RELATIONS, SHAPES, SIZES, plural
from neuclip_lib.data.procedural.pairs import ProceduralPairs
from neuclip_lib.data.procedural.scenes import ALONE, HELD_OUT, RELATED, SEVERAL, Draws, Table, sample
from neuclip_lib.data.spec import ZeroShotTask

COMBINATIONS = [(colour, shape) for colour in range(len(COLOURS)) for shape in range(len(SHAPES))]
SEEN = [(colour, shape) for colour, shape in COMBINATIONS if HELD_OUT[colour] != shape]
NEW = [(colour, shape) for colour, shape in COMBINATIONS if HELD_OUT[colour] == shape]
_NAMES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]  # in the order of COMBINATIONS
_RELATED = ("red circle", "blue square")  # the pair of the relation task; neither is held out


def zero_shot(pairs: ProceduralPairs) -> list[ZeroShotTask]:
    """The tasks of a split; combinations held out of training are shown only where the test part is."""
    tasks = [combination_task(pairs, "seen combinations", SEEN, 20), count_task(pairs, 80), relation_task(pairs, 100)]
    return [combination_task(pairs, "new combinations", NEW, 50), *tasks] if "test" in pairs.parts else tasks


def combination_task(pairs: ProceduralPairs, title: str, shown: list[tuple[int, int]], each: int) -> ZeroShotTask:
    """Name colour and shape of one thing among all 64 combinations, seen or not; ``each`` pictures of those shown."""
    labels = np.repeat([COMBINATIONS.index(pair) for pair in shown], each)
    colour, shape = np.array(COMBINATIONS)[labels].T
    templates = [f"a {size} {{}} {place}" for size in SIZES for place in PLACES]
    given = {"kind": ALONE, "count": (1, 0), "colour": (colour, 0), "shape": (shape, 0)}
    return _task(pairs, title, given, labels, _NAMES, templates)


def count_task(pairs: ProceduralPairs, each: int) -> ZeroShotTask:
    """Name how many equal things there are, two to six; colour, shape and size as in training."""
    labels = np.repeat(np.arange(len(COUNTS) - 1), each)
    nouns = [plural(_NAMES[COMBINATIONS.index(pair)]) for pair in SEEN]
    templates = [f"{{}} {size} {noun}" for size in SIZES for noun in nouns]
    return _task(pairs, "count", {"kind": SEVERAL, "count": (labels + 2, 0)}, labels, list(COUNTS[1:]), templates)


def relation_task(pairs: ProceduralPairs, each: int) -> ZeroShotTask:
    """Say how a red circle lies to a blue square, one of four; chance is 25 %.

    A bag of words can expect 50 %: the words of "A left of B" are those of "B left of A", which shows the opposite,
    so they tell the line and not the order.
    """
    labels = np.repeat(np.arange(len(RELATIONS)), each)
    colours, shapes = np.array([COMBINATIONS[_NAMES.index(name)] for name in _RELATED]).T
    given = {"kind": RELATED, "count": (1, 1), "colour": tuple(colours), "shape": tuple(shapes), "relation": labels}
    templates = [f"a {one} {_RELATED[0]} {{}} a {two} {_RELATED[1]}" for one in SIZES for two in SIZES]
    return _task(pairs, "relation", given, labels, list(RELATIONS), templates)


def _task(
    pairs: ProceduralPairs,
    title: str,
    given: dict[str, Any],
    labels: np.ndarray,
    classes: list[str],
    templates: list[str],
) -> ZeroShotTask:
    """Pictures of chance scenes with some columns given: a value or int64 [b], for things a pair (first, second)."""
    rows = np.arange(len(labels))
    chance = sample(Draws(pairs.seed, f"scenes of {title}", rows), np.zeros(len(rows), bool))
    table = replace(chance, **{name: _column(chance, name, value) for name, value in given.items()})
    images = drawing.draw(table, pairs.seed, f"pictures of {title}", rows, pairs.image_size)
    return ZeroShotTask(title, torch.from_numpy(images), torch.from_numpy(labels), classes, templates)


def _column(table: Table, name: str, value: Any) -> np.ndarray:
    column = np.empty_like(getattr(table, name))
    if isinstance(value, tuple):
        column[:, 0], column[:, 1] = value
    else:
        column[:] = value
    return column
