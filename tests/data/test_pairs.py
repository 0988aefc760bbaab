import pytest
import torch

from neuclip_lib.data.pairs import PairSet


@pytest.fixture
def pairs():
    n = 6
    images = torch.arange(n, dtype=torch.uint8).reshape(n, 1, 1, 1).expand(n, 3, 4, 4).clone()
    return PairSet(
        name="toy",
        split="train",
        images=images,
        captions=[f"text {i}" for i in range(n)],
        index=torch.arange(10, 10 + n),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        keys=[f"k{i}" for i in range(n)],
        content_hash="abc",
        fields={"vendor": ["a", "b"] * 3, "tone": [0, 0, 1, 1, 2, 2]},
        vocabulary=["words of train"],
    )


def test_pictures_and_texts_come_in_the_order_asked_for(pairs):
    wanted = torch.tensor([4, 0, 4])
    assert pairs.images_at(wanted)[:, 0, 0, 0].tolist() == [4, 0, 4]
    assert pairs.captions_at(wanted) == ["text 4", "text 0", "text 4"]
    assert pairs.captions_at() == [f"text {i}" for i in range(6)]
    assert len(pairs) == 6
    assert pairs.image_size == 4


def test_a_filter_keeps_rows_of_every_column_together(pairs):
    kept = pairs.where(vendor="b", tone=[1, 2])
    assert kept.index.tolist() == [13, 15]
    assert kept.group.tolist() == [1, 2]
    assert kept.captions == ["text 3", "text 5"]
    assert kept.keys == ["k3", "k5"]
    assert kept.fields == {"vendor": ["b", "b"], "tone": [1, 2]}
    assert kept.images[:, 0, 0, 0].tolist() == [3, 5]
    assert kept.content_hash == "abc"


def test_an_unknown_field_or_value_lists_what_there_is(pairs):
    with pytest.raises(ValueError, match="no field 'seller'; its fields: vendor, tone"):
        pairs.where(seller="a")
    with pytest.raises(ValueError, match="no pair with vendor='c'; there is vendor in 'a', 'b'"):
        pairs.where(vendor="c")
