import json
import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, features

from neuclip_lib import data
from neuclip_lib.data.sets import _noto_source as source
from neuclip_lib.data.sets._emoji_names import concepts


@pytest.fixture(scope="module")
def font():
    """The font file; without it such tests skip, or fail where everything is required."""
    try:
        path = source.find()
    except RuntimeError as error:
        assert not os.environ.get("NEUCLIP_REQUIRE_ALL"), error
        pytest.skip(f"fonts-noto-color-emoji: {error}")
    if path.is_dir():
        pytest.skip(f"{source.VARIABLE} names drawings, these tests look at the font")
    return path


@pytest.fixture(scope="module")
def noto(font):
    return data.load("noto", "all")


@pytest.fixture(scope="module")
def by_name():
    return {concept.name: concept for concept in concepts()}


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A machine without Noto."""
    monkeypatch.delenv(source.VARIABLE, raising=False)
    monkeypatch.setattr(source, "_font_folders", lambda: [tmp_path, tmp_path / "absent"])
    return tmp_path


def test_without_a_source_the_error_names_both_ways_to_get_one(nothing, monkeypatch):
    monkeypatch.setenv("NEUCLIP_HOME", str(nothing / "home"))
    with pytest.raises(
        RuntimeError, match=r"(?s)apt-get install fonts-noto-color-emoji.*@iconify-json/noto.*NEUCLIP_NOTO"
    ):
        data.load("noto", "test")
    assert "noto" in data.names()
    card = data.card("noto")
    assert card.optional and "fonts-noto-color-emoji" in card.lacking


def test_a_font_in_a_font_folder_is_found_below_it(nothing):
    (nothing / "deep" / "er").mkdir(parents=True)
    (nothing / "deep" / "er" / source.FONT_NAME).write_bytes(b"not a font")
    assert source.find() == nothing / "deep" / "er" / source.FONT_NAME
    with pytest.raises(RuntimeError, match="does not open at size 109"):
        source.open_source(source.find())


def test_the_variable_must_name_something_usable(nothing, monkeypatch):
    monkeypatch.setenv(source.VARIABLE, str(nothing))
    with pytest.raises(RuntimeError, match=r"is neither a folder with icons\.json and chars\.json nor a font file"):
        source.find()


def test_without_text_shaping_the_error_names_the_library(monkeypatch, nothing):
    monkeypatch.setattr(features, "check", lambda name: name != "fribidi")
    with pytest.raises(RuntimeError, match="install libfribidi0"):
        source.FontSource(nothing / source.FONT_NAME)


def test_drawings_of_the_npm_package_are_drawn(nothing, monkeypatch, by_name):
    body = '<rect x="32" y="16" width="64" height="96" fill="#ff0000"/>'
    (nothing / "icons.json").write_text(json.dumps({"prefix": "noto", "icons": {"grin": {"body": body}}}))
    (nothing / "chars.json").write_text(json.dumps({"1f600": "grin", "00a9": "grin"}))
    monkeypatch.setenv(source.VARIABLE, str(nothing))
    monkeypatch.setenv("NEUCLIP_HOME", str(nothing / "home"))
    pairs = data.load("noto", "all")
    assert pairs.captions == ["grinning face", "copyright"]
    assert pairs.keys == ["noto/1f600", "noto/a9"]
    red = (pairs.images[0, 0] > 250) & (pairs.images[0, 1] < 128)
    assert red.any(1).all() and red.any(0).sum() in (20, 21, 22)  # 64 of 96: two thirds as wide as high
    first = source.version(source.find())
    (nothing / "icons.json").write_text(json.dumps({"prefix": "noto", "icons": {"grin": {"body": body * 2}}}))
    assert list(first) == ["noto icons.json"] and source.version(source.find()) != first
    assert source.open_source(source.find()).draw(by_name["waving hand"]) is None


def test_noto_has_its_concepts_once_and_all_are_emoji_of_the_other_vendors(noto):
    assert len(noto) == len(set(noto.fields["codepoints"])) > 3500
    emoji = data.load("emoji", "all")
    assert set(noto.fields["codepoints"]) <= set(emoji.fields["codepoints"])
    assert set(noto.fields["vendor"]) == {"noto"}


def test_an_emoji_falls_in_the_same_part_as_in_the_other_set(noto):
    for part in ("train", "validation", "test"):
        other = set(data.load("emoji", part).fields["codepoints"])
        assert set(data.load("noto", part).fields["codepoints"]) <= other


def test_a_sequence_shown_as_several_glyphs_is_left_out(font, by_name):
    drawn = source.open_source(font)
    wide = [c for c in by_name.values() if (box := drawn.font.getbbox(c.characters))[2] - box[0] > 150]
    assert wide and all(drawn.draw(concept) is None for concept in wide)
    assert drawn.draw(by_name["flag of France"]).size == drawn.draw(by_name["man artist dark skin tone"]).size
    unknown = by_name["waving hand"].__class__("\U000fffff", "private", "fffff", "none", ())
    assert drawn.draw(unknown) is None


def test_edges_are_as_the_font_means_them(font, by_name):
    drawn = source.open_source(font)
    concept = by_name["artist medium skin tone"]
    ours = drawn.draw(concept)
    white = Image.new("RGB", ours.size, "white")
    ImageDraw.Draw(white).text((0, 0), concept.characters, font=drawn.font, embedded_color=True)
    ground = Image.new("RGBA", ours.size, "white")
    ground.alpha_composite(ours)
    difference = np.abs(np.asarray(ground.convert("RGB")).astype(int) - np.asarray(white).astype(int))
    assert difference.max() <= 2


def test_tasks_name_plain_emoji_and_tones(noto):
    tone, name = data.zero_shot_tasks("noto", "train")
    plain = data.load("noto", "train", tone="none")
    assert (tone.name, name.name) == ("noto skin tone", "noto name")
    assert [name.classes[k] for k in name.labels] == plain.captions and len(name.classes) == len(plain)
    assert len(tone.classes) == 5 and torch.bincount(tone.labels).min() > 100
