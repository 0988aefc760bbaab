import hashlib
from collections import Counter

import pytest

from neuclip_lib.data.splits import SPLITS, part_of, parts_in


def test_the_part_is_md5_modulo_seven():
    for key in ["account", "alpha i circle", "7", "", "café", "\U0001f600"]:
        bucket = int(hashlib.md5(key.encode()).hexdigest(), 16) % 7
        assert part_of(key) == ("test" if bucket == 0 else "validation" if bucket == 1 else "train")


def test_test_and_validation_hold_about_a_seventh_each():
    counts = Counter(part_of(str(i)) for i in range(14_000))
    assert abs(counts["test"] - 2000) < 5 * (14_000 * 6 / 49) ** 0.5
    assert abs(counts["validation"] - 2000) < 5 * (14_000 * 6 / 49) ** 0.5


def test_splits_are_made_of_parts():
    assert set(SPLITS) == {"train", "validation", "test", "train+validation", "all"}
    assert parts_in("train+validation") == ("train", "validation")
    assert parts_in("all") == ("train", "validation", "test")


def test_an_unknown_split_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'tests' \(did you mean 'test'\?\); known: train, validation, test, train\+"):
        parts_in("tests")
