import base64
import builtins
import logging

import matplotlib
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from neuclip_lib.course import explore
from neuclip_lib.course.controls import control

VIEW = "application/vnd.jupyter.widget-view+json"


def bars(step, side):
    """Bars that grow with the step."""
    fig, ax = plt.subplots(figsize=(2, 1))
    height = step if side == "up" else -step
    ax.bar([0, 1], [height, 2 * height])
    return fig, {"height": height, "mean": torch.tensor(1.5 * height), "side": side}


class Counted:
    """Draws little, counts how often."""

    def __init__(self):
        self.calls = []

    def __call__(self, **values):
        """A dot."""
        self.calls.append(dict(values))
        return plt.figure(figsize=(1, 1)), {"sum": sum(values.values())}


def counted():
    draw = Counted()
    draw.__doc__ = "A dot."
    return draw


def test_moving_a_control_to_its_ends_changes_the_figures():
    explorer = explore(bars, step=(1, 9, 2, 3), side=["up", "down"])
    assert explorer.figures == {"height": 3, "mean": 4.5, "side": "up"}
    low, high = explorer.ends("step")
    assert (low, high) == (1, 9)
    assert explorer.move("step", low)["height"] == 1
    assert explorer.move("step", high)["height"] == 9
    assert explorer.move("side", explorer.ends("side")[1]) == {"height": -9, "mean": -13.5, "side": "down"}
    assert explorer.values == {"step": 9, "side": "down"}
    assert not plt.get_fignums()


def test_the_bundle_holds_the_live_view_the_first_picture_and_the_sentence():
    explorer = explore(bars, step=(1, 9, 2, 3), side=["up", "down"])
    explorer.move("step", 9)
    data, metadata = explorer._repr_mimebundle_()
    sentence = "Bars that grow with the step. At step 3, side up: height 3, mean 4.5, side up."
    assert data["text/plain"] == sentence == repr(explorer)
    assert metadata == {"image/png": {"alt": sentence}}
    assert data[VIEW]["model_id"]
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert set(data) == {"text/plain", "image/png", VIEW}


def test_the_live_picture_and_its_text_follow_the_slider():
    explorer = explore(bars, step=(1, 9, 2, 3), side=["up", "down"])
    view = explorer._view
    before = view._image.value
    view._widgets["step"].value = 9  # as the browser does it
    assert view._image.value != before
    assert "height 9, mean 13.5" in view._text.value
    view._widgets["step"].value = 3
    assert view._image.value == before


def test_frames_are_drawn_once():
    draw = counted()
    explorer = explore(draw, a=(0, 3, 1, 0), b=(0.0, 1.0, 0.1, 0.3))
    for value in (1, 0, 1, 0):
        explorer.move("a", value)
    assert len(draw.calls) == 2
    explorer.move("b", 0.1 + 0.2)  # 0.30000000000000004, as a browser sends it
    assert len(draw.calls) == 2


def test_an_error_in_the_first_draw_stops_the_cell_and_leaves_no_figure():
    def broken(a, b):
        """Nothing."""
        plt.figure()
        raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        explore(broken, a=(0, 1, 1, 0), b=[1, 2])
    assert not plt.get_fignums()


def test_a_later_error_is_shown_logged_and_raised_by_move(caplog):
    def fragile(a, b):
        """One over a."""
        return plt.figure(figsize=(1, 1)), {"inverse": 1 / a + b}

    explorer = explore(fragile, a=(0, 2, 1, 1), b=[0, 1])
    picture = explorer._view._image.value
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError):
        explorer.move("a", 0)
    assert "ZeroDivisionError: division by zero" in explorer._view._problem.value
    assert 'role="alert"' in explorer._view._problem.value
    assert "'a': 0" in caplog.text and "ZeroDivisionError" in caplog.text
    assert explorer._view._image.value == picture
    assert explorer.move("a", 2) == {"inverse": 0.5}
    assert explorer._view._problem.value == ""


def test_text_from_figures_is_escaped_in_the_live_view():
    def named(a, b):
        """A dot."""
        return plt.figure(figsize=(1, 1)), {"name": "<b>x</b>"}

    view = explore(named, a=[1, 2], b=[1, 2])._view
    assert "&lt;b&gt;x" in view._text.value and "<b>" not in view._text.value


@pytest.mark.parametrize("watched", [False, True])
def test_without_ipywidgets_the_picture_stands_alone(monkeypatch, capsys, watched):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(("ipywidgets", "neuclip_lib.course.explorer_view")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setenv("JPY_SESSION_NAME", "here.ipynb" if watched else "")
    explorer = explore(bars, step=(1, 9, 2, 3), side=["up", "down"])
    data, _ = explorer._repr_mimebundle_()
    assert set(data) == {"text/plain", "image/png"}
    assert explorer.move("step", 9)["height"] == 9
    # A stored notebook must not differ; only a reader who expects sliders is told.
    assert ("pip install" in capsys.readouterr().out) == watched


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({}, "at least two"),
        ({"a": (0, 1, 1, 0)}, "at least two"),
        ({"a": (0, 1, 1, 0), "b": (0, 1)}, "range .start, stop, step, value."),
        ({"a": (0, 1, 1, 0), "b": [1]}, "at least two"),
        ({"a": (0, 1, 1, 0), "b": [1, "1"]}, "read the same"),
        ({"a": (0, 1, 0.3, 0), "b": [1, 2]}, "whole number of steps"),
        ({"a": (0, 1, 0.25, 0.3), "b": [1, 2]}, "no setting 0.3; it takes 0.0 to 1.0 in steps of 0.25"),
        ({"a": (1, 0, 1, 0), "b": [1, 2]}, "start < stop"),
        ({"a": (0, float("inf"), 1, 0), "b": [1, 2]}, "start < stop"),
        ({"a": (False, 1, 1, 0), "b": [1, 2]}, "four numbers"),
    ],
)
def test_wrong_controls_are_refused(controls, message):
    with pytest.raises(ValueError, match=message):
        explore(counted(), **controls)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda: plt.figure(), "figure, printed figures"),
        (lambda: (plt.figure(), {}), "at least one printed figure"),
        (lambda: (plt.figure(), {"x": torch.zeros(2)}), "'x' must be one number"),
        (lambda: (plt.figure(), {"x": [1]}), "'x' must be a number or a text, got list"),
        (lambda: (plt.figure().add_subplot(), {"x": 1}), "explore expected a matplotlib Figure, got Axes"),
    ],
)
def test_wrong_results_of_draw_are_refused_and_closed(result, message):
    def draw(a, b):
        """A dot."""
        return result()

    with pytest.raises(ValueError, match=message):
        explore(draw, a=[1, 2], b=[1, 2])
    assert not plt.get_fignums()


def test_a_draw_without_a_docstring_is_refused():
    with pytest.raises(ValueError, match="docstring"):
        explore(lambda a, b: None, a=[1, 2], b=[1, 2])


def test_unknown_controls_and_settings_are_refused():
    explorer = explore(bars, step=(1, 9, 2, 3), side=["up", "down"])
    with pytest.raises(ValueError, match="no control 'stride'; the controls are step, side"):
        explorer.move("stride", 1)
    with pytest.raises(ValueError, match="no setting 4; it takes 1 to 9 in steps of 2"):
        explorer.move("step", 4)
    with pytest.raises(ValueError, match="no setting 'left'"):
        explorer.move("side", "left")


def test_settings_of_a_range_are_exact_decimals():
    made = control("tau", (0.01, 0.3, 0.01, 0.07))
    assert made.settings == tuple(np.round(np.arange(1, 31) / 100, 10))
    assert made.setting(0.06 + 0.01) == 0.07
    assert control("flag", [False, True]).setting(True) is True
    with pytest.raises(ValueError, match="no setting 1"):
        control("flag", [False, True]).setting(1)


def test_the_slider_reads_as_many_decimals_as_its_settings_need():
    explorer = explore(counted(), a=(0.0, 1.0, 0.25, 0.5), b=(0.01, 0.1, 0.001, 0.07))
    formats = [explorer._view._widgets[name].readout_format for name in "ab"]
    assert formats == [".2f", ".3f"]


def test_figures_in_the_sentence_have_three_digits():
    def draw(a, b):
        """A dot"""
        return plt.figure(figsize=(1, 1)), {"p": 0.123456, "q": 12345.678, "n": 10000, "r": np.float32(2.5)}

    sentence = repr(explore(draw, a=[0.0712345, 2], b=["x y", "z"]))
    assert sentence == "A dot. At a 0.0712, b x y: p 0.123, q 12346, n 10000, r 2.5."
