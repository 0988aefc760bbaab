import hashlib

import pytest
import torch

from neuclip_lib import data
from neuclip_lib.data.order import batch_indices


@pytest.fixture(scope="module")
def icons():
    return {split: data.load("icons", split) for split in ("train", "validation", "test", "all")}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits", "all")


def test_icons_are_counted_and_split_by_their_name(icons):
    assert {split: len(pairs) for split, pairs in icons.items()} == {
        "train": 5138,
        "validation": 1010,
        "test": 1040,
        "all": 7188,
    }
    names = icons["all"].captions
    bucket = {name: int(hashlib.md5(name.encode()).hexdigest(), 16) % 7 for name in names}
    assert icons["test"].captions == [name for name in names if bucket[name] == 0]
    assert icons["validation"].captions == [name for name in names if bucket[name] == 1]
    assert icons["train"].captions == [name for name in names if bucket[name] > 1]


def test_every_icon_is_a_concept_of_its_own(icons):
    assert icons["all"].group.unique().numel() == len(set(icons["all"].captions)) == 7188
    places = torch.cat([icons[split].index for split in ("train", "validation", "test")])
    assert torch.equal(places.sort().values, torch.arange(7188))


def test_icons_are_dark_on_white_and_none_is_empty(icons):
    images = icons["all"].images
    assert images.shape == (7188, 3, 32, 32)
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    assert (images.flatten(1).amin(1) < 64).all()
    without_white = (images.flatten(1).amax(1) < 255).nonzero()[:, 0]
    assert icons["all"].captions_at(without_white) == ["solid"]  # a full black square
    assert images.float().mean() > 128


def test_no_deprecated_icon_is_left_and_no_other_is_lost(icons):
    pack = pytest.importorskip("material_design_icons_pack")
    flags = {icon.slug: icon.deprecated for icon in map(vars(pack).get, pack.__all__) if isinstance(icon, pack.Icon)}
    assert len(flags) == 7447
    assert sum(flags.values()) == 259
    assert set(icons["all"].keys) == {slug for slug, deprecated in flags.items() if not deprecated}


def test_icons_that_look_alike_are_as_many_as_their_card_says(icons):
    seen = {}
    for name, image in zip(icons["all"].captions, icons["all"].images, strict=True):
        seen.setdefault(image.numpy().tobytes(), []).append(name)
    alike = [names for names in seen.values() if len(names) > 1]
    assert ["alpha o", "numeric 0"] in alike
    assert f"{sum(map(len, alike))} icons look exactly like another" in data.card("icons").note


def test_digits_are_the_scans_enlarged(digits):
    source = pytest.importorskip("sklearn.datasets").load_digits()
    assert digits.images.shape == (1797, 3, 32, 32)
    for i in range(0, 1797, 50):
        for y, x in ((0, 0), (3, 12), (13, 17), (31, 31)):
            expected = round(255 - 255 * source.images[i, y // 4, x // 4] / 16)
            assert digits.images[i, :, y, x].tolist() == [expected] * 3
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert digits.fields["digit"] == [words[label] for label in source.target]


def test_digits_are_split_by_their_place_and_grouped_by_class(digits):
    counts = {split: len(data.load("digits", split)) for split in ("train", "validation", "test")}
    assert counts == {"train": 1272, "validation": 279, "test": 246}
    expected = [i for i in range(1797) if int(hashlib.md5(str(i).encode()).hexdigest(), 16) % 7 == 0]
    assert data.load("digits", "test").index.tolist() == expected
    same = digits.group[:, None] == digits.group
    names = digits.fields["digit"]
    assert same[3].tolist() == [name == names[3] for name in names]
    assert digits.group.unique().numel() == 10
    assert all(caption.split()[-1] == name for caption, name in zip(digits.captions, names, strict=True))


def test_false_negatives_of_digits_are_as_many_as_their_card_says(digits):
    groups = data.load("digits", "train").group
    batches = [groups[batch_indices(len(groups), 128, 0, step)] for step in range(9)]
    false = torch.stack([(batch[:, None] == batch).sum(1).float().mean() - 1 for batch in batches]).mean()
    assert f"about {round(float(false))} of the negatives are false" in data.card("digits").note


def test_the_zero_shot_task_of_digits_names_the_ten_classes():
    (task,) = data.zero_shot_tasks("digits")
    test = data.load("digits", "test")
    assert torch.equal(task.images, test.images)
    assert [task.classes[label] for label in task.labels.tolist()] == test.fields["digit"]
    trained = set(data.load("digits", "train").captions)
    assert {text for template in task.templates for text in task.texts(template)} == trained
    assert data.zero_shot_tasks("icons") == []
