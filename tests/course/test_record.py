"""record() and the numbers in prose that come from it."""

import json
import math

import numpy as np
import pytest
import torch

from neuclip_lib.course.prose import fill, names_in, refilled
from neuclip_lib.course.record import VARIABLE, Recorded, differences, read_records, record, recorded


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_values_go_to_the_file_and_nothing_is_printed(file, capsys):
    assert record(a=1, b=0.5) is None
    record(tol=0.25, c=torch.tensor(2.0), d=np.float32(0.5), e=np.array([3]))
    assert capsys.readouterr() == ("", "")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(row["name"], row["value"]) for row in rows] == [("a", 1), ("b", 0.5), ("c", 2.0), ("d", 0.5), ("e", 3)]
    assert [row["tol"] for row in rows] == [0.0, 0.0005, 0.25, 0.25, 0.25]
    assert read_records(file)["c"] == Recorded(2.0, 0.25) and recorded()["e"] == 3


def test_without_the_variable_values_stay_in_the_process(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    record(only_here=7)
    assert recorded()["only_here"] == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "got no value"),
        ({"a": math.nan}, "a=...*finite"),
        ({"a": torch.tensor(math.inf)}, "finite"),
        ({"a": torch.zeros(2)}, "several elements"),
        ({"a": np.zeros(2)}, "several elements"),
        ({"a": True}, "assert a truth value"),
        ({"a": "x"}, "expected a number"),
        ({"a": None}, "expected a number"),
        ({"a": 1, "tol": -1}, "tol is -1"),
        ({"a": 1, "tol": "x"}, "tol is 'x'"),
    ],
)
def test_what_is_no_number_is_refused_and_nothing_written(file, values, message):
    with pytest.raises(ValueError, match=message):
        record(**values)
    assert not file.exists()


def test_one_execution_with_two_values_for_a_name(file):
    record(a=1.0, tol=0.1)
    record(a=1.05, tol=0.1)
    assert read_records(file)["a"].value == 1.0
    record(a=1.2, tol=0.1)
    with pytest.raises(ValueError, match=r"record\(a=\.\.\.\) was called with 1.0 and with 1.2"):
        read_records(file)


def test_differences_name_value_stored_and_got():
    stored = {"a": Recorded(1.0, 0.25), "b": Recorded(2, 0.0), "c": Recorded(1.0, 0.25), "d": Recorded(1, 0.0)}
    got = {"a": Recorded(1.25, 0.0), "b": Recorded(3, 9.0), "c": Recorded(1.375, 9.0), "e": Recorded(1, 0.0)}
    assert differences(stored, got) == [
        "b: stored 2, got 3 (tolerance 0)",
        "c: stored 1.0, got 1.375 (tolerance 0.25)",
        "d: stored 1, this execution recorded nothing under that name",
        "e: recorded now, but not stored; build the lesson again",
    ]
    assert differences(stored, stored) == []


def test_fill_and_refill():
    template = r"$x_{value}$ {value:a:.2f}, {value:n}, {value:.2f}, {value: a}, \frac{value:a}{2}, {x}, {value:a:>6.1f}"
    records = {"a": Recorded(1.256, 0.01), "n": Recorded(12, 0.0)}
    text, used = fill(template, records)
    assert text == r"$x_{value}$ 1.26, 12, {value:.2f}, {value: a}, \frac1.256{2}, {x},    1.3"
    assert [row["name"] for row in used] == names_in(template) == ["a", "n", "a", "a"]
    assert used[0] == {"name": "a", "value": 1.256, "tol": 0.01, "format": ".2f"}
    assert refilled(template, used) == text
    assert refilled(template, [{**used[0], "value": 3.0}, *used[1:]]).startswith("$x_{value}$ 3.00")
    with pytest.raises(ValueError, match="not the ones that the source asks for"):
        refilled(template, used[1:])


@pytest.mark.parametrize(
    ("template", "message"),
    [("{value:b:.2f}", "nothing recorded 'b'; recorded: a"), ("{value:a:d}", "the format 'd' does not fit 1.5")],
)
def test_fill_refuses(template, message):
    with pytest.raises(ValueError, match=message):
        fill(template, {"a": Recorded(1.5, 0.0)})
