"""Progress: a bar for a person, few plain lines for a log, the time left in both."""

import io
import re

import pytest

from neuclip_lib import progress

pytestmark = pytest.mark.quick


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def lines_of(monkeypatch: pytest.MonkeyPatch, n: int, seconds: float, start: int = 0) -> list[str]:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    stream = io.StringIO()
    for _ in progress.track(range(n), "train", start=start, describe=lambda: "loss 1.25", stream=stream):
        clock.now += seconds
    return stream.getvalue().splitlines()


def test_every_item_comes_once_and_in_order() -> None:
    assert list(progress.track([3, 1, 2], "count", stream=io.StringIO())) == [3, 1, 2]
    assert list(progress.track(iter("abc"), "count", total=3, stream=io.StringIO())) == ["a", "b", "c"]
    assert list(progress.track([], "count", stream=io.StringIO())) == []


def test_lines_are_ten_seconds_apart_and_say_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, n=100, seconds=1.0)
    assert len(lines) == 10
    for k, line in enumerate(lines, 1):
        assert line == f"train: {10 * k}/100, {100 - 10 * k} s left  loss 1.25"


def test_a_resumed_run_counts_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, n=40, seconds=2.0, start=60)
    # 65 of 100 after 10 s: 2 s a step, 35 steps left
    assert lines[0].startswith("train: 65/100, 70 s left")
    assert lines[-1].startswith("train: 100/100, 0 s left")


def test_short_work_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, n=20, seconds=0.1) == []


def test_work_of_five_seconds_says_that_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, n=6, seconds=1.0) == ["train: 6/6, 0 s left  loss 1.25"]


def test_figures_are_asked_for_only_when_a_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), []
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    for _ in progress.track(range(30), "x", describe=lambda: str(asked.append(1)), stream=io.StringIO()):
        clock.now += 1
    assert len(asked) == 3


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    assert list(progress.track(range(5), "train", start=5, describe=lambda: "loss 2", stream=stream)) == list(range(5))
    text = stream.getvalue()
    assert "\r" in text
    assert re.search(r"train: .*10/10", text), text
