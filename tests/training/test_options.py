"""Options: exact JSON, overrides by name, differences, types."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuclip_lib.training import options


@dataclass(frozen=True)
class Inner:
    lr: float = 0.1
    count: int = 3
    flag: bool = True


@dataclass(frozen=True)
class Other:
    lr: float | None = None
    m: int = 4


@dataclass(frozen=True)
class Outer:
    name: str = "a"
    lr_scale: float = 1.0
    kind: Literal["one", "two"] = "one"
    many: tuple[str, ...] = ()
    extra: dict[str, bool | int | float | str] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    other: Other = field(default_factory=Other)


finite = st.floats(allow_nan=False, allow_infinity=False)
some = st.builds(
    Outer,
    name=st.text(),
    lr_scale=finite,
    kind=st.sampled_from(["one", "two"]),
    many=st.lists(st.text()).map(tuple),
    extra=st.dictionaries(st.text(), st.booleans() | st.integers() | finite | st.text()),
    inner=st.builds(Inner, lr=finite, count=st.integers(), flag=st.booleans()),
    other=st.builds(Other, lr=st.none() | finite, m=st.integers()),
)


@given(some)
def test_json_there_and_back_gives_an_equal_config_to_the_bit(options_given: Outer) -> None:
    text = json.dumps(options.to_dict(options_given), allow_nan=False)
    again = options.from_dict(Outer, json.loads(text))
    assert again == options_given
    assert repr(again) == repr(options_given)  # tells 1 from 1.0 and True, and -0.0 from 0.0
    assert options.differences(again, options_given) == {}


def test_an_absent_field_takes_its_default_and_an_unknown_one_is_refused_with_the_closest() -> None:
    assert options.from_dict(Outer, {"inner": {"count": 7}}) == Outer(inner=Inner(count=7))
    with pytest.raises(ValueError, match=r"no option 'inner.cuont'; did you mean 'count'"):
        options.from_dict(Outer, {"inner": {"cuont": 7}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": 3}, "name must be str, got 3"),
        ({"inner": {"count": 2.5}}, "inner.count must be int, got 2.5"),
        ({"inner": {"count": True}}, "inner.count must be int, got True"),
        ({"inner": {"flag": 1}}, "inner.flag must be bool, got 1"),
        ({"inner": {"lr": "high"}}, "inner.lr must be float, got 'high'"),
        ({"inner": {"lr": float("nan")}}, "inner.lr must be a finite number"),
        ({"other": {"lr": "x"}}, "other.lr must be float or None, got 'x'"),
        ({"many": "abc"}, "many must be a list of str, got 'abc'"),
        ({"many": [1]}, r"many must be a list of str, got \[1\]"),
        ({"kind": "thee"}, "kind must be 'one' or 'two', got 'thee'"),
        ({"inner": 3}, "inner must be Inner, got 3"),
        ({"extra": {"n": [1]}}, r"extra must be a mapping .* got"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.from_dict(Outer, values)


def test_override_takes_full_names_and_unique_short_ones() -> None:
    changed = options.override(Outer(), {"inner.lr": 1, "m": 8, "name": "b", "many": ["x"]})
    assert changed == Outer(name="b", many=("x",), inner=Inner(lr=1.0), other=Other(m=8))
    assert type(changed.inner.lr) is float
    assert options.override(Outer(), {"inner": Inner(count=9)}).inner.count == 9
    assert options.override(Outer(inner=Inner(count=5)), {"inner.flag": False}).inner == Inner(count=5, flag=False)


def test_override_refuses_ambiguous_and_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"'lr' may mean inner.lr or other.lr"):
        options.override(Outer(), {"lr": 1.0})
    with pytest.raises(ValueError, match=r"no option 'inner.cont'; did you mean 'inner.count'"):
        options.override(Outer(), {"inner.cont": 1})
    with pytest.raises(ValueError, match=r"no option 'cuont'; did you mean 'count'"):
        options.override(Outer(), {"cuont": 1})
    with pytest.raises(ValueError, match="count must be int, got 'many'"):
        options.override(Outer(), {"count": "many"})


def test_differences_names_every_leaf_that_differs() -> None:
    left = Outer(extra={"n": 1, "k": 2})
    right = dataclasses.replace(left, name="b", extra={"n": 3}, inner=Inner(lr=0.2))
    assert options.differences(left, right) == {
        "extra.k": (2, None),
        "extra.n": (1, 3),
        "inner.lr": (0.1, 0.2),
        "name": ("a", "b"),
    }
    assert options.differences(left, left) == {}


def test_names_lists_groups_and_members() -> None:
    assert options.names(Outer())[-7:] == [
        "inner",
        "inner.lr",
        "inner.count",
        "inner.flag",
        "other",
        "other.lr",
        "other.m",
    ]
