import hashlib
import itertools
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch

from neuclip_lib import data
from neuclip_lib.data.procedural import ProceduralPairs, Scene, Things, describe, parse
from neuclip_lib.data.procedural.drawing import INSIDE, sprites
from neuclip_lib.data.procedural.grammar import COLOURS, COUNTS, PLACES, SHAPES, SIZES, vocabulary
from neuclip_lib.data.procedural.scenes import HELD_OUT, Draws

HELD = {(colour, SHAPES[HELD_OUT[k]]) for k, colour in enumerate(COLOURS)}


@pytest.fixture(scope="module")
def test_pairs():
    return data.load("captions", "test", n=20_000)


def kinds(scene):
    return [scene.first] if scene.second is None else [scene.first, scene.second]


def test_captions_parse_into_what_the_pairs_say(test_pairs):
    some = torch.arange(500)
    assert [parse(text) for text in test_pairs.captions_at(some)] == test_pairs.scenes_at(some)


def test_the_vocabulary_is_the_words_of_captions(test_pairs):
    words = {word for text in vocabulary() for word in text.split()}
    assert {word for text in test_pairs.captions_at() for word in text.split()} == words


def test_parts_share_nothing_and_stay_when_n_grows():
    small = {part: ProceduralPairs(part, n=5_000, seed=1, size=32).index for part in ("train", "validation", "test")}
    whole = torch.cat(list(small.values()))
    assert torch.equal(whole.sort().values, torch.arange(5_000))
    assert abs(len(small["test"]) - 5_000 / 7) < 4 * (5_000 * 6 / 49) ** 0.5
    assert abs(len(small["validation"]) - 5_000 / 7) < 4 * (5_000 * 6 / 49) ** 0.5
    large = ProceduralPairs("test", n=50_000, seed=2, size=32).index
    assert torch.equal(large[large < 5_000], small["test"])
    assert torch.equal(ProceduralPairs("all", n=5_000, seed=1, size=32).index, torch.arange(5_000))
    both = ProceduralPairs("train+validation", n=5_000, seed=1, size=32).index
    assert torch.equal(both, torch.cat([small["train"], small["validation"]]).sort().values)


def test_a_sample_depends_on_seed_and_index_alone(test_pairs):
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(600, generator=generator)
    whole, texts = test_pairs.images_at(torch.arange(600)), test_pairs.captions_at(torch.arange(600))
    assert torch.equal(test_pairs.images_at(order), whole[order])
    assert test_pairs.captions_at(order) == [texts[k] for k in order.tolist()]
    for size in (1, 7, 257):
        pieces = [test_pairs.images_at(piece) for piece in torch.arange(600).split(size)]
        assert torch.equal(torch.cat(pieces), whole)
    larger = data.load("captions", "all", n=200_000)
    assert torch.equal(larger.images_at(test_pairs.index[:600]), whole)
    assert larger.captions_at(test_pairs.index[:600]) == texts
    assert torch.equal(larger.group[test_pairs.index], test_pairs.group)
    other = data.load("captions", "test", n=20_000, seed=1)
    assert sum(a != b for a, b in zip(other.captions_at(torch.arange(600)), texts, strict=True)) > 590


def test_another_process_makes_the_same_pairs(test_pairs):
    code = (
        "import hashlib, torch; from neuclip_lib import data; p = data.load('captions', 'test', n=20_000); "
        "i = torch.arange(50); x = p.images_at(i).numpy(); "
        "print(hashlib.sha256(x.tobytes()).hexdigest(), p.content_hash, p.captions_at(i))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    some = torch.arange(50)
    pixels = hashlib.sha256(test_pairs.images_at(some).numpy().tobytes()).hexdigest()
    assert out == f"{pixels} {test_pairs.content_hash} {test_pairs.captions_at(some)}"


def test_the_draws_are_even_and_independent():
    index = np.arange(70_000)
    draws = Draws(3, "scene", index)
    first, second, unit = draws.below(7), draws.below(5), draws.unit()
    table = np.zeros((7, 5))
    np.add.at(table, (first, second), 1)
    chi2 = ((table - 2_000) ** 2 / 2_000).sum()
    assert 13 < chi2 < 67  # 34 degrees of freedom, both tails at 1 in 2000
    assert unit.min() >= 0 and unit.max() < 1
    assert abs(np.corrcoef(unit[:-1], unit[1:])[0, 1]) < 0.02
    assert abs(unit.mean() - 0.5) < 5 / (12 * len(index)) ** 0.5
    again = Draws(3, "scene", index[::-1])
    assert np.array_equal(again.below(7)[::-1], first)
    assert (Draws(3, "picture", index).below(7) == first).mean() == pytest.approx(1 / 7, abs=0.01)


def test_held_out_combinations_are_in_the_test_part_alone(test_pairs):
    assert len({colour for colour, _ in HELD}) == len({shape for _, shape in HELD}) == 8

    def combinations(pairs):
        return [(k.colour, k.shape) for s in pairs.scenes_at(torch.arange(len(pairs))) for k in kinds(s)]

    for split in ("train", "validation"):
        found = combinations(data.load("captions", split, n=20_000))
        assert set(found) == set(itertools.product(COLOURS, SHAPES)) - HELD
    found = combinations(test_pairs)
    share = sum(pair in HELD for pair in found) / len(found)
    assert set(found) == set(itertools.product(COLOURS, SHAPES))
    assert abs(share - 1 / 8) < 0.02


def test_one_group_is_one_meaning(test_pairs):
    turn = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

    def meaning(scene):
        if scene.relation is None:
            return describe(scene)
        turned = Scene(scene.second, relation=turn[scene.relation], second=scene.first)
        return min(describe(scene), describe(turned))

    pairs = data.load("captions", "all", n=60_000)
    scenes = pairs.scenes_at(torch.arange(len(pairs)))
    seen, back, turned = {}, {}, 0
    for group, scene in zip(pairs.group.tolist(), scenes, strict=True):
        said = meaning(scene)
        assert seen.setdefault(group, said) == said
        assert back.setdefault(said, group) == group
        turned += said != describe(scene)
    assert len(seen) < len(scenes) and turned > 10_000


def blobs(mask):
    """Middles (y, x) and sizes of the connected parts of bool [H, W], neighbours at corners included."""
    left, found = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}, []
    while left:
        part, edge = [], [left.pop()]
        while edge:
            y, x = edge.pop()
            part.append((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        found.append((np.mean(part, 0), len(part)))
    return found


def solid(image, colour):
    """Pixels at least two thirds covered by a colour on this picture's ground."""
    ground = np.array([image.reshape(3, -1).max()] * 3, float)
    wanted = np.array(COLOURS[colour], float)
    share = ((image.transpose(1, 2, 0) - ground) @ (wanted - ground)) / ((wanted - ground) @ (wanted - ground))
    off = np.abs(image.transpose(1, 2, 0) - (ground + share[..., None] * (wanted - ground))).max(-1)
    return (share > 0.66) & (off < 4)


def test_pictures_show_what_captions_say(test_pairs):
    """Read back count, colour, place, relation and size from pixels of 64 pixel pictures, knowing only the palette."""
    pairs = data.load("captions", "test", n=4_000, size=64)
    chosen = torch.arange(300)
    checked = {"place": 0, "count": 0, "relation": 0}
    for image, text in zip(pairs.images_at(chosen).numpy(), pairs.captions_at(chosen), strict=True):
        scene = parse(text)
        middles = []
        for kind in kinds(scene):
            found = blobs(solid(image, kind.colour))
            assert len(found) == kind.count, text
            middles.append(np.array([middle for middle, _ in found]))
            extent = [np.ptp(np.nonzero(solid(image, kind.colour)), 1).max() + 1] if kind.count == 1 else []
            assert all(e <= 13 if kind.size == "small" else e >= 15 for e in extent), text
        if scene.place is not None:
            y, x = (middles[0][0] * 3 // 64).astype(int)
            assert PLACES[3 * y + x] == scene.place
            checked["place"] += 1
        elif scene.relation is None:
            checked["count"] += 1
        else:
            axis, sign = {"left of": (1, 1), "right of": (1, -1), "above": (0, 1), "below": (0, -1)}[scene.relation]
            assert (sign * middles[0][:, axis]).max() < (sign * middles[1][:, axis]).min(), text
            checked["relation"] += 1
    assert min(checked.values()) > 40


@pytest.mark.parametrize("size", [16, 32, 64])
def test_things_lie_whole_inside_and_are_as_large_as_they_should(size):
    """The ink of a sprite is the area of its shape by formula: nothing is cut off."""
    area = {
        "circle": np.pi,
        "ring": np.pi * 0.64,
        "square": 1.8**2,
        "diamond": 2,
        "triangle": 2 * 1.8 / 2,
        "cross": 4 * 0.6 - 0.36,
        "bar": 1.4,
    }
    stock = sprites(size)
    for shape, name in enumerate(SHAPES):
        for row, radii in enumerate(((2.5, 2.75, 3.0), (4.5, 4.75, 5.0))):
            for column, radius in enumerate(radii):
                ink = stock.cover[shape, row, column].sum((2, 3)) / (radius * size / 32) ** 2
                assert np.ptp(ink) < 0.06 * ink.max() + 16 / size**1.5  # the same at every half pixel
                if name in area:
                    assert ink.mean() == pytest.approx(area[name], rel=0.08 if size > 16 else 0.2)


def test_ink_adds_up(test_pairs):
    """Sum of covered pixels of a picture equals that of its sprites: none is cut by the edge and none overlaps."""
    stock = sprites(32).cover.sum((-2, -1))  # [shape, size, radius, half y, half x]
    images = test_pairs.images_at(torch.arange(400)).numpy().astype(float)
    for image, scene in zip(images, test_pairs.scenes_at(torch.arange(400)), strict=True):
        if scene.second is not None:
            continue
        ground = np.median(image[0])
        dark = np.array(COLOURS[scene.first.colour])
        channel = int(np.argmin(dark))
        ink = (ground - image[channel]).sum() / (ground - dark[channel]) / scene.first.count
        options = stock[SHAPES.index(scene.first.shape), SIZES.index(scene.first.size)]
        assert options.min() - 0.6 < ink < options.max() + 0.6, describe(scene)


def test_shapes_differ_at_the_smallest_size():
    """No two shapes look alike: sprites of one radius differ in more than a tenth of the larger one's ink."""
    stock = sprites(32).cover[:, 0, 0, 0, 0]
    for one, other in itertools.combinations(range(len(SHAPES)), 2):
        ink = max(stock[one].sum(), stock[other].sum())
        assert np.abs(stock[one] - stock[other]).sum() > 0.15 * ink, (SHAPES[one], SHAPES[other])
    assert set(INSIDE) == set(SHAPES)


def test_a_million_pairs_open_at_once_and_hold_no_picture():
    tracemalloc.start()
    begun = time.process_time()
    pairs = data.load("captions", "train", n=1_000_000)
    seconds = time.process_time() - begun
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2 and peak < 100e6
    pairs.images_at(torch.arange(300))
    pairs.captions_at(torch.arange(300))
    assert pairs.group.shape == (len(pairs),)
    held = [value for value in vars(pairs).values() if isinstance(value, torch.Tensor | np.ndarray)]
    assert [tuple(value.shape) for value in held] == [(len(pairs),)] * 2
    assert sum(value.element_size() * value.numel() for value in held) == 16 * len(pairs) < 200e6
    last = torch.tensor([len(pairs) - 1])
    assert pairs.images_at(last).shape == (1, 3, 32, 32)
    assert int(pairs.index[-1]) > 999_900


def test_drawing_is_fast():
    pairs = data.load("captions", "train", n=20_000)
    pairs.images_at(torch.arange(10))
    rates = []
    for start in range(0, 2_560, 512):
        begun = time.process_time()
        pairs.images_at(torch.arange(start, start + 512))
        rates.append(512 / (time.process_time() - begun))
    assert max(rates) > 3_000, rates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 10}, "n of the set 'captions' must be a whole number in 100.."),
        ({"n": 1e6}, "n of the set 'captions' must be a whole number"),
        ({"n": True}, "n of the set"),
        ({"seed": -1}, "seed of the set 'captions'"),
        ({"size": 8}, "size of the set 'captions' must be a whole number in 16..256, got 8"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        data.load("captions", "train", **options)


def test_the_hash_follows_every_option():
    base = {"split": "train", "n": 1_000, "seed": 0, "size": 32}
    hashes = {
        ProceduralPairs(**{**base, **change}).content_hash for change in ({}, {"n": 1_001}, {"seed": 1}, {"size": 64})
    }
    assert len(hashes) == 4
    assert ProceduralPairs(**{**base, "split": "test"}).content_hash in hashes


def test_tasks_show_new_combinations_only_where_the_test_part_is():
    names = {
        split: [task.name for task in data.zero_shot_tasks("captions", split)] for split in ("train", "test", "all")
    }
    assert names["train"] == ["seen combinations", "count", "relation"]
    assert names["test"] == names["all"] == ["new combinations", *names["train"]]


def test_task_labels_are_what_the_pixels_show():
    tasks = {task.name: task for task in data.zero_shot_tasks("captions", "test", size=64)}
    new, seen = tasks["new combinations"], tasks["seen combinations"]
    assert new.classes == seen.classes == [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    held = {f"{colour} {shape}" for colour, shape in HELD}
    assert {new.classes[k] for k in new.labels} == held
    assert {seen.classes[k] for k in seen.labels} == set(seen.classes) - held
    for task in (new, seen):
        for image, label in zip(task.images[::10].numpy(), task.labels[::10].tolist(), strict=True):
            colour, _ = task.classes[label].split()
            others = set(COLOURS) - {colour}
            assert solid(image, colour).sum() > 10 and not any(solid(image, other).sum() > 10 for other in others)
    count = tasks["count"]
    for image, label in zip(count.images[::8].numpy(), count.labels[::8].tolist(), strict=True):
        found = max((blobs(solid(image, colour)) for colour in COLOURS), key=lambda b: sum(size for _, size in b))
        assert COUNTS[len(found) - 1] == count.classes[label]
    relation = tasks["relation"]
    for image, label in zip(relation.images[::8].numpy(), relation.labels[::8].tolist(), strict=True):
        (red,), (blue,) = blobs(solid(image, "red")), blobs(solid(image, "blue"))
        axis, sign = {"left of": (1, 1), "right of": (1, -1), "above": (0, 1), "below": (0, -1)}[
            relation.classes[label]
        ]
        assert sign * red[0][axis] < sign * blue[0][axis]


def test_task_texts_are_sentences_of_the_grammar():
    for task in data.zero_shot_tasks("captions", "test"):
        for template in task.templates:
            assert all(describe(parse(text)) == text for text in task.texts(template))


def test_a_bag_of_words_cannot_tell_left_from_right():
    """What the relation task's docstring says: opposite pictures have sentences of equal words."""
    first, second = Things(1, "small", "red", "circle"), Things(1, "large", "blue", "square")
    for one, other in (("left of", "right of"), ("above", "below")):
        ahead = {
            describe(Scene(first, relation=one, second=second)),
            describe(Scene(second, relation=other, second=first)),
        }
        behind = {
            describe(Scene(second, relation=one, second=first)),
            describe(Scene(first, relation=other, second=second)),
        }
        assert {tuple(sorted(text.split())) for text in ahead} == {tuple(sorted(text.split())) for text in behind}
