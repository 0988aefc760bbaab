import importlib.metadata
import json
import sys

import numpy as np
import pytest

from neuclip_lib import data
from neuclip_lib.data import cache
from neuclip_lib.data.building import build_set, ready
from neuclip_lib.data.spec import RawSet, SetSpec

BUILDS = []


def produce():
    """Sample i is grey i."""
    BUILDS.append(1)
    n = 20
    names = [f"name {i}" for i in range(n)]
    grey = np.arange(n, dtype=np.uint8)[:, None, None, None]
    return RawSet(
        np.broadcast_to(grey, (n, 3, 4, 4)), names, names, names, names, {"even": [i % 2 == 0 for i in range(n)]}
    )


def specification(**changes):
    fields = {"name": "toy", "image_size": 4, "packages": ("numpy",), "produce": produce}
    return SetSpec(**fields | dict.fromkeys(("title", "origin", "licence", "attribution", "task"), "") | changes)


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path))
    BUILDS.clear()
    return specification()


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


def test_a_set_is_built_once_and_read_back_as_it_was_made(spec, capsys):
    first = ready(spec)
    assert "toy: building once into" in capsys.readouterr().err
    second = ready(spec)
    assert capsys.readouterr().err == ""
    assert len(BUILDS) == 1
    raw = produce()
    for cached in (first, second):
        assert np.array_equal(cached.images, raw.images)
        assert cached.images.dtype == np.uint8
        assert cached.columns == {
            "captions": raw.captions,
            "group": raw.group,
            "split_key": raw.split_key,
            "key": raw.key,
            "fields": raw.fields,
        }


def test_the_manifest_says_what_the_set_came_from(spec):
    folder = build_set(spec, quiet=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["made_from"] == {"numpy": importlib.metadata.version("numpy")}
    assert sum(manifest["counts"].values()) == 20
    assert {path.name for path in folder.iterdir()} == {"images.npy", "columns.json", "manifest.json"}


@pytest.mark.parametrize("harm", [flip_bit, cut, empty, remove])
@pytest.mark.parametrize("name", ["images.npy", "columns.json", "manifest.json"])
def test_a_damaged_file_is_found_and_the_set_is_built_again(spec, capsys, name, harm):
    folder = build_set(spec, quiet=True)
    harm(folder / name)
    assert cache.inspect_cache(spec).state == "damaged"
    again = ready(spec)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "toy: building again" in said
    assert "damaged" in said
    assert len(BUILDS) == 2
    assert np.array_equal(again.images, produce().images)


def test_a_manifest_changed_by_hand_is_found(spec):
    path = build_set(spec, quiet=True) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["counts"]["test"] += 1
    path.write_text(json.dumps(manifest))
    assert cache.inspect_cache(spec).state == "damaged"


def test_another_package_version_makes_the_set_stale(spec, capsys, monkeypatch):
    build_set(spec, quiet=True)
    before = importlib.metadata.version("numpy")
    monkeypatch.setattr(cache, "_version", lambda package: "99.0")
    ready(spec)
    assert f"stale: numpy {before} -> 99.0" in capsys.readouterr().err
    assert len(BUILDS) == 2
    ready(spec)
    assert len(BUILDS) == 2


def test_another_builder_makes_the_set_stale(spec, capsys, monkeypatch):
    build_set(spec, quiet=True)
    monkeypatch.setattr(cache, "builder_hash", lambda spec: "other")
    ready(spec)
    assert "stale: its builder has changed" in capsys.readouterr().err
    assert len(BUILDS) == 2


def test_the_builder_hash_covers_the_builder_and_its_helpers(spec, tmp_path, monkeypatch):
    helper = tmp_path / "some_helper.py"
    monkeypatch.syspath_prepend(tmp_path)
    helper.write_text("x = 1\n")
    with_helper = specification(helpers=("some_helper",))
    first = cache.builder_hash(with_helper)
    helper.write_text("x = 2\n")
    second = cache.builder_hash(with_helper)
    assert len({cache.builder_hash(spec), first, second}) == 3
    helper.write_bytes(b"x = 2\r\n")  # a checkout with other line ends is the same source
    assert cache.builder_hash(with_helper) == second


def test_a_source_outside_pip_enters_the_key(spec, capsys):
    build_set(specification(system=lambda: {"font": "1"}), quiet=True)
    ready(specification(system=lambda: {"font": "2"}))
    assert "stale: font 1 -> 2" in capsys.readouterr().err


def test_a_missing_package_is_named_with_how_to_get_it(spec, monkeypatch):
    monkeypatch.setattr(cache, "_version", lambda package: None)
    with pytest.raises(
        RuntimeError, match=r"'toy' needs the package numpy.*pip install 'neuclip-course\[data\]'.*numpy"
    ):
        ready(spec)
    assert not BUILDS


def test_a_whole_set_stays_good_without_the_package_it_came_from(spec, monkeypatch):
    build_set(spec, quiet=True)
    monkeypatch.setattr(cache, "_version", lambda package: None)
    assert len(ready(spec).images) == 20
    assert len(BUILDS) == 1


def test_a_damaged_set_that_cannot_be_built_again_is_not_used(spec, monkeypatch):
    flip_bit(build_set(spec, quiet=True) / "images.npy")
    monkeypatch.setattr(cache, "_version", lambda package: None)
    with pytest.raises(RuntimeError, match=r"damaged \(images.npy .*cannot be built again.*pip install"):
        ready(spec)


def test_a_builder_that_fails_leaves_the_old_set(spec):
    folder = build_set(spec, quiet=True)
    kept = (folder / "images.npy").read_bytes()

    def fails():
        raise RuntimeError("picture 'x' does not decode")

    with pytest.raises(RuntimeError, match="'x'"):
        ready(specification(produce=fails), force=True, quiet=True)
    assert (folder / "images.npy").read_bytes() == kept
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["toy"]


def test_quiet_prints_nothing_and_force_builds_again(spec, capsys):
    def talks():
        print("1/20", file=sys.stderr)
        return produce()

    build_set(specification(produce=talks), quiet=True)
    build_set(specification(produce=talks), force=True, quiet=True)
    assert len(BUILDS) == 2
    assert capsys.readouterr() == ("", "")
    build_set(spec, force=True)
    assert "asked for" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(spec, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEUCLIP_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(RuntimeError, match=r"cannot write in .*file.*NEUCLIP_HOME"):
        ready(spec, quiet=True)
    assert not BUILDS


@pytest.fixture
def toy(spec, monkeypatch):
    """Make the toy set one of those that ``load`` knows."""
    monkeypatch.setattr(data, "spec_of", lambda name: spec)
    return spec


def test_splits_are_disjoint_cover_the_set_and_follow_the_hash(toy):
    loaded = {split: data.load("toy", split) for split in data.SPLITS}
    for split in ("train", "validation", "test"):
        assert all(data.part_of(caption) == split for caption in loaded[split].captions)
        for place, caption, picture in zip(
            loaded[split].index.tolist(), loaded[split].captions, loaded[split].images, strict=True
        ):
            assert caption == f"name {place}"
            assert picture.unique().tolist() == [place]
    parts = [set(loaded[split].index.tolist()) for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20
    assert set(loaded["train+validation"].index.tolist()) == parts[0] | parts[1]
    assert loaded["all"].index.tolist() == list(range(20))


def test_words_never_come_from_the_test_part(toy):
    train, validation = (set(data.load("toy", split).captions) for split in ("train", "validation"))
    for split, expected in {
        "train": train,
        "validation": train,
        "test": train,
        "train+validation": train | validation,
        "all": train | validation,
    }.items():
        assert set(data.load("toy", split).vocabulary_texts()) == expected


def test_options_choose_by_field(toy):
    kept = data.load("toy", "all", even=True)
    assert kept.index.tolist() == list(range(0, 20, 2))
    assert set(data.load("toy", "train", even=True).index.tolist()) == set(
        data.load("toy", "train").index.tolist()
    ) & set(range(0, 20, 2))
    with pytest.raises(ValueError, match="no field 'odd'; its fields: even"):
        data.load("toy", "train", odd=True)


def test_an_unknown_split_is_refused_before_anything_is_built(toy):
    with pytest.raises(ValueError, match="known: train, validation, test, train"):
        data.load("toy", "dev")
    assert not BUILDS
