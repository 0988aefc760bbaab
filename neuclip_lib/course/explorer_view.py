"""The live view of an explorer: sliders, the picture as PNG bytes, its sentence, a place for errors.

No Output and no interact: what they print never agrees with a stored notebook. The browser keeps at most one change
on its way to the kernel and sends only the last of those that arrive meanwhile, so rapid moves need nothing here.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from neuclip_lib.course.controls import Control

_WIDE = {"description_width": "initial"}


def _widget(control: Control) -> Any:
    if not control.is_range:
        options = [(str(one), one) for one in control.settings]
        return ipywidgets.Dropdown(options=options, value=control.start, description=control.label, style=_WIDE)
    whole = isinstance(control.start, int)
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    low, high = control.settings[0], control.settings[-1]
    extra = {} if whole else {"readout_format": f".{_decimals(control)}f"}
    return kind(
        value=control.start, min=low, max=high, step=control.step, description=control.label, style=_WIDE, **extra
    )


def _decimals(control: Control) -> int:
    """Digits after the point that its settings need."""
    return max(len(f"{one:.10f}".rstrip("0").partition(".")[2]) for one in control.settings)


class View:
    """Widgets of one explorer.

    Args:
        moved: called with all values by name after each change.
    """

    def __init__(self, controls: list[Control], moved: Callable[[Mapping[str, Any]], None]) -> None:
        self._widgets = {one.name: _widget(one) for one in controls}
        self._image = ipywidgets.Image(format="png")
        self._image.layout = ipywidgets.Layout(max_width="100%", align_self="flex-start")  # not stretched
        self._text = ipywidgets.HTML()
        self._problem = ipywidgets.HTML()
        self._box = ipywidgets.VBox([*self._widgets.values(), self._image, self._text, self._problem])
        for widget in self._widgets.values():
            widget.observe(lambda _: moved({name: one.value for name, one in self._widgets.items()}), names="value")

    def set(self, name: str, value: Any) -> None:
        """Move one widget."""
        self._widgets[name].value = value

    def picture(self, png: bytes, sentence: str) -> None:
        """Show one state."""
        self._image.value = png
        self._text.value = html.escape(sentence)
        self._problem.value = ""

    def problem(self, message: str) -> None:
        """Show an error in place of the sentence; the last picture stays."""
        self._text.value = ""
        self._problem.value = f'<div role="alert"><b>This state could not be drawn.</b> {html.escape(message)}</div>'

    def mime(self) -> dict[str, Any]:
        """The part of a MIME bundle from which JupyterLab makes the live view."""
        key = "application/vnd.jupyter.widget-view+json"
        return {key: self._box._repr_mimebundle_()[key]}
