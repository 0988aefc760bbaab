import numpy as np
import pytest
import torch

from neuclip_lib.data.spec import RawSet, SetSpec, ZeroShotTask


def raw(**changes):
    columns = {name: ["a", "b"] for name in ("captions", "group", "split_key", "key")}
    return RawSet(**({"images": np.zeros((2, 3, 4, 4), np.uint8)} | columns | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((2, 3, 4, 4), np.float32)}, "uint8.*float32"),
        ({"images": np.zeros((2, 4, 4), np.uint8)}, r"\[2, 4, 4\]"),
        ({"images": np.zeros((2, 3, 4, 5), np.uint8)}, r"\[2, 3, 4, 5\]"),
        ({"captions": ["a"]}, "'captions' has 1 rows for 2"),
        ({"captions": ["a", "  "]}, "1 captions are empty, the first one of 'b'"),
        ({"key": ["a", "a"]}, "'a' stands twice"),
        ({"fields": {"tone": [1, 2, 3]}}, "'tone' has 3 rows for 2"),
    ],
)
def test_a_set_whose_columns_do_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        raw(**changes)


def test_class_names_are_put_into_templates_as_they_are():
    images, labels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    task = ZeroShotTask("t", images, labels, ["{1} cup", "{}"], ["a {} here"])
    assert task.texts("a {} here") == ["a {1} cup here", "a {} here"]


@pytest.mark.parametrize(
    ("labels", "templates", "message"),
    [
        ([0, 2], ["{}"], r"0\.\.1"),
        ([-1, 0], ["{}"], r"0\.\.1"),
        ([0], ["{}"], "2 images and 1 labels"),
        ([0, 1], [], "no template"),
        ([0, 1], ["a photo"], "'a photo'"),
        ([0, 1], ["{} and {}"], "once"),
    ],
)
def test_a_task_whose_parts_do_not_fit_is_refused(labels, templates, message):
    with pytest.raises(ValueError, match=message):
        ZeroShotTask("t", torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor(labels), ["x", "y"], templates)


def test_a_specification_is_stored_or_made_on_the_fly_and_not_both():
    texts = dict.fromkeys(("title", "origin", "licence", "attribution", "task"), "")
    with pytest.raises(ValueError, match="exactly one"):
        SetSpec(name="x", image_size=4, **texts)
    with pytest.raises(ValueError, match="exactly one"):
        SetSpec(name="x", image_size=4, produce=lambda: None, open=lambda split: None, **texts)
