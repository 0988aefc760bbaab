"""show: one picture, its sentence, and nothing left open."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 110


def show(fig: Figure, alt: str) -> None:
    """Display a matplotlib figure once, print the sentence that says what it shows, and close it.

    Args:
        alt: one plain sentence for readers who do not see the picture; stored as the picture's alt text and printed,
            because JupyterLab does not read the stored one aloud.

    Raises:
        ValueError: when ``fig`` is not a figure or ``alt`` is empty.
    """
    check_figure(fig, "show")
    sentence = " ".join(alt.split()) if isinstance(alt, str) else ""
    if not sentence:
        raise ValueError(f"show got alt={alt!r}; give one sentence that says what the picture shows")
    display_png(png_of(fig), sentence)
    print(sentence)


def check_figure(fig: Any, asked_by: str) -> None:
    """Refuse what is not a matplotlib figure (an Axes, most often)."""
    from matplotlib.figure import Figure

    if not isinstance(fig, Figure):
        raise ValueError(
            f"{asked_by} expected a matplotlib Figure, got {type(fig).__name__}; "
            "make one with fig, ax = plt.subplots() and pass fig"
        )


def png_of(fig: Figure) -> bytes:
    """The figure as PNG, closed afterwards; no software version in it, so that equal pictures are equal files."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    try:
        fig.savefig(
            buffer, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight", facecolor="white", metadata={"Software": None}
        )
    finally:
        plt.close(fig)
    return buffer.getvalue()


def png_bundle(png: bytes, sentence: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A picture as (MIME bundle, metadata): the sentence is its text form and its alt text."""
    data = {"text/plain": sentence, "image/png": base64.b64encode(png).decode("ascii")}
    return data, {"image/png": {"alt": sentence}}


def display_png(png: bytes, sentence: str) -> None:
    """Send the picture to the notebook.

    Raises:
        RuntimeError: when IPython is not installed.
    """
    try:
        from IPython.display import display
    except ImportError as error:
        raise RuntimeError('pictures are shown by IPython; pip install "neuclip-course[course]" brings it') from error
    data, metadata = png_bundle(png, sentence)
    display(data, metadata=metadata, raw=True)
