"""The grammar: what a scene can hold, and the one sentence that says it.

caption := things place | things | things relation things
things  := count size colour shape      "a small red circle", "three large blue stars"
place   := "at the top left" ...        only for one thing alone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COUNTS = ("a", "two", "three", "four", "five", "six")
SIZES = ("small", "large")
# Chosen so that every two, and each with the light ground, stay apart for people who see red, green or blue less
# (a test simulates all three).
COLOURS = {
    "black": (0, 0, 0),
    "blue": (0, 70, 200),
    "cyan": (70, 200, 235),
    "green": (0, 150, 90),
    "orange": (245, 150, 10),
    "purple": (150, 40, 160),
    "red": (215, 35, 20),
    "yellow": (245, 230, 50),
}
SHAPES = ("circle", "ring", "square", "diamond", "triangle", "star", "cross", "bar")
PLACES = (
    "at the top left",
    "at the top",
    "at the top right",
    "at the left",
    "in the centre",
    "at the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)  # row by row
RELATIONS = ("left of", "right of", "above", "below")
MOST_RELATED = 3  # things on either side of a relation
MOST = len(COUNTS)  # things alone


@dataclass(frozen=True)
class Things:
    """Equal things: how many (1 to 6), and their size, colour and shape by name."""

    count: int
    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """What a picture shows. One thing alone has a place; two kinds of things have a relation."""

    first: Things
    place: str | None = None
    relation: str | None = None
    second: Things | None = None


def describe(scene: Scene) -> str:
    """The sentence for a scene; ``parse`` undoes it."""
    if scene.relation is not None and scene.second is not None:
        return f"{_phrase(scene.first)} {scene.relation} {_phrase(scene.second)}"
    return _phrase(scene.first) if scene.place is None else f"{_phrase(scene.first)} {scene.place}"


def parse(text: str) -> Scene:
    """The scene that a sentence describes.

    Raises:
        ValueError: when the grammar has no such sentence.
    """
    words = text.split(" ")
    first, rest = _things(words[:4], text), " ".join(words[4:])
    if not rest and first.count > 1:
        return Scene(first)
    if rest in PLACES and first.count == 1:
        return Scene(first, place=rest)
    for relation in RELATIONS:
        if rest.startswith(f"{relation} ") and first.count <= MOST_RELATED:
            second = _things(rest.removeprefix(f"{relation} ").split(" "), text)
            if second.count <= MOST_RELATED and second.colour != first.colour:
                return Scene(first, relation=relation, second=second)
    raise ValueError(f"no such sentence in the grammar: {text!r}; one is {_EXAMPLE!r}")


def vocabulary() -> Iterator[str]:
    """Short texts that together hold every word of the grammar."""
    yield " ".join(COUNTS)
    yield " ".join(SIZES)
    yield " ".join(COLOURS)
    yield " ".join(SHAPES)
    yield " ".join(plural(shape) for shape in SHAPES)
    yield from PLACES
    yield from RELATIONS


def plural(noun: str) -> str:
    """The plural of a shape, or of a phrase that ends in one."""
    return f"{noun}es" if noun.endswith("ss") else f"{noun}s"


_EXAMPLE = "a small red circle left of two large blue stars"


def _phrase(things: Things) -> str:
    noun = things.shape if things.count == 1 else plural(things.shape)
    return f"{COUNTS[things.count - 1]} {things.size} {things.colour} {noun}"


def _things(words: list[str], text: str) -> Things:
    nouns = {shape: (shape, 1) for shape in SHAPES} | {plural(shape): (shape, 2) for shape in SHAPES}
    if len(words) == 4:
        count, size, colour, noun = words
        shape, least = nouns.get(noun, ("", 0))
        right = count in COUNTS and size in SIZES and colour in COLOURS and shape
        if right and min(COUNTS.index(count) + 1, 2) == least:
            return Things(COUNTS.index(count) + 1, size, colour, shape)
    raise ValueError(f"{' '.join(words)!r} in {text!r} is not: count size colour shape; one is {_EXAMPLE!r}")
