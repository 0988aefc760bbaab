import colorsys
import itertools

import numpy as np
import pytest

from neuclip_lib.data.procedural import Scene, Things, describe, parse
from neuclip_lib.data.procedural.drawing import GROUND
from neuclip_lib.data.procedural.grammar import COLOURS, PLACES, RELATIONS, SHAPES, SIZES


def all_scenes():
    def things(counts):
        return [Things(*row) for row in itertools.product(counts, SIZES, COLOURS, SHAPES)]

    yield from (Scene(one, place=place) for one in things([1]) for place in PLACES)
    yield from (Scene(several) for several in things(range(2, 7)))
    few = things([1, 2, 3])
    for first, relation in itertools.product(few[::7], RELATIONS):
        yield from (
            Scene(first, relation=relation, second=second) for second in few[::5] if second.colour != first.colour
        )


def test_every_sentence_parses_back_into_its_scene():
    seen = set()
    for scene in all_scenes():
        text = describe(scene)
        assert parse(text) == scene
        assert text not in seen
        seen.add(text)
    assert len(seen) > 10_000


def test_sentences_are_english():
    cross, bar = Things(2, "small", "red", "cross"), Things(1, "large", "blue", "bar")
    assert describe(Scene(cross)) == "two small red crosses"
    assert describe(Scene(bar, place="in the centre")) == "a large blue bar in the centre"
    assert describe(Scene(cross, relation="below", second=bar)) == "two small red crosses below a large blue bar"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red circle",
        "a small red circle",  # one thing alone has a place
        "two small red circles at the top",
        "two small red circle",
        "a small red circles at the top",
        "a small pink circle at the top",
        "four small red circles left of a small blue bar",
        "a small red circle left of a small red bar",
        "a small red circle under a small blue bar",
        "a small red circle left of a small blue bar at the top",
    ],
)
def test_a_sentence_outside_the_grammar_is_refused(text):
    with pytest.raises(ValueError, match=r"no such sentence|is not: count size colour shape"):
        parse(text)


def test_colours_are_those_named():
    hues = {"red": (345, 15), "orange": (25, 45), "yellow": (48, 65), "green": (100, 165), "cyan": (170, 200)}
    hues |= {"blue": (205, 250), "purple": (270, 310)}
    for name, rgb in COLOURS.items():
        hue, saturation, value = colorsys.rgb_to_hsv(*(c / 255 for c in rgb))
        if name == "black":
            assert value < 0.1
            continue
        low, high = hues[name]
        assert saturation > 0.6 and value > 0.55
        assert (low <= hue * 360 <= high) if low < high else (hue * 360 >= low or hue * 360 <= high)


# Machado, Oliveira and Fernandes 2009: linear RGB as seen without one of the three kinds of cones.
SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(rgb, matrix):
    c = np.array(rgb) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(matrix) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("who", SEEN_BY)
def test_colours_stay_apart_for_colour_blind_eyes(who):
    grounds = [(level,) * 3 for level in (GROUND[0], GROUND[1] - 1)]
    for one, other in itertools.combinations([*COLOURS.values(), *grounds], 2):
        if not {one, other} <= set(grounds):
            assert np.linalg.norm(lab(one, SEEN_BY[who]) - lab(other, SEEN_BY[who])) > 12  # 2.3 is just seen
