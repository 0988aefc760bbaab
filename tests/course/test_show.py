import base64

import matplotlib
import numpy as np
import pytest
from PIL import Image

matplotlib.use("agg")
import io

import matplotlib.pyplot as plt

from neuclip_lib.course import show
from neuclip_lib.course.figures import png_of


@pytest.fixture
def displayed(monkeypatch):
    calls = []
    monkeypatch.setattr("IPython.display.display", lambda *args, **kwargs: calls.append((args, kwargs)))
    return calls


def _line():
    fig, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, 1], [0, 1])
    return fig


def test_a_picture_is_displayed_once_with_its_sentence_and_closed(displayed, capsys):
    fig = _line()
    show(fig, "The loss falls\n   from 3 to 1.")
    ((args, kwargs),) = displayed
    assert kwargs == {"metadata": {"image/png": {"alt": "The loss falls from 3 to 1."}}, "raw": True}
    assert args[0]["text/plain"] == "The loss falls from 3 to 1."
    assert capsys.readouterr().out == "The loss falls from 3 to 1.\n"
    assert not plt.fignum_exists(fig.number)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(args[0]["image/png"]))).convert("L"))
    assert pixels.shape[0] > 150 and pixels.min() < 120 and pixels[0, 0] == 255


@pytest.mark.parametrize("alt", ["", "  \n", None])
def test_an_empty_sentence_is_refused(displayed, alt):
    with pytest.raises(ValueError, match="one sentence"):
        show(_line(), alt)
    assert not displayed
    plt.close("all")


def test_axes_are_refused_with_what_to_pass():
    fig, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"expected a matplotlib Figure, got Axes.*pass fig"):
        show(ax, "A line.")
    plt.close(fig)


def test_equal_pictures_are_equal_bytes_without_a_software_version():
    first, second = png_of(_line()), png_of(_line())
    assert first == second
    assert b"Software" not in first and b"atplotlib" not in first
