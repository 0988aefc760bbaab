import os
from pathlib import Path

import pytest

from neuclip_lib import data
from neuclip_lib.data.cards import readme
from neuclip_lib.data.registry import spec_of

ROOT = Path(__file__).parents[2]


def test_every_module_of_sets_is_a_data_set_with_a_whole_card():
    modules = {path.stem for path in (ROOT / "neuclip_lib" / "data" / "sets").glob("[!_]*.py")}
    assert set(data.names()) == modules >= {"digits", "icons"}
    for name in data.names():
        spec = spec_of(name)
        assert spec.name == name
        assert all((spec.title, spec.origin, spec.licence, spec.task))
        assert spec.image_size > 0


@pytest.mark.parametrize("name", [name for name in data.names() if spec_of(name).produce is not None])
def test_the_card_counts_what_is_built(name):
    spec, card = spec_of(name), data.card(name)
    if spec.optional and card.lacking and card.state != "ready":
        assert not os.environ.get("NEUCLIP_REQUIRE_ALL"), card.lacking
        pytest.skip(card.lacking)
    built = {split: len(data.load(name, split)) for split in ("train", "validation", "test")}
    assert built == dict(data.card(name).counts)
    assert spec.system is not None or built == dict(spec.counts)  # sources outside pip are not pinned
    assert data.card(name).state == "ready"


def test_the_committed_cards_are_those_of_the_builders():
    assert (ROOT / "datasets" / "README.md").read_text(encoding="utf-8") == readme(map(spec_of, data.names()))


def test_an_unknown_set_gives_the_closest_name_and_all_of_them():
    with pytest.raises(ValueError, match=r"no data set 'icon' \(did you mean 'icons'\?\); known: .*digits.*icons"):
        data.load("icon", "test")
    for call in (data.card, data.build, data.zero_shot_tasks):
        with pytest.raises(ValueError, match="no data set 'zzz'; known"):
            call("zzz")
