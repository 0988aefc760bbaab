"""explore: a picture with controls, live in JupyterLab and still a picture with its figures everywhere else."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuclip_lib.course.controls import Control, control
from neuclip_lib.course.figures import check_figure, png_bundle, png_of
from neuclip_lib.course.watched import is_watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[..., "tuple[Figure, dict[str, Any]]"]

FRAMES_KEPT = 128
_log = logging.getLogger(__name__)


def explore(draw: Draw, **controls: Any) -> Explorer:
    """A picture that follows its controls; make it the last line of its cell.

    Args:
        draw: a pure function of the controls, by name, that gives (matplotlib figure, {name: printed figure}). The
            first line of its docstring says what the picture shows and becomes part of the alt text.
        controls: at least two, each a range ``(start, stop, step, value)`` or a list of choices (the first one is
            shown first).

    Raises:
        ValueError: for fewer than two controls, a control that is none, no docstring, or a wrong result of ``draw``.
    """
    if len(controls) < 2:
        raise ValueError(f"explore got {len(controls)} control(s) {list(controls)}; give at least two")
    shows = (draw.__doc__ or "").strip().split("\n")[0].strip()
    if not shows:
        raise ValueError("explore: give draw a docstring of one line that says what the picture shows")
    explorer = Explorer(draw, shows, [control(name, given) for name, given in controls.items()])
    explorer.attach()
    return explorer


@dataclass(frozen=True)
class Frame:
    """One drawn state: the picture and the figures printed with it."""

    png: bytes
    figures: dict[str, Any]


class Explorer:
    """What ``explore`` returns: the state, the frames drawn so far and, where ipywidgets is there, the live view."""

    def __init__(self, draw: Draw, shows: str, controls: list[Control]) -> None:
        self._draw, self._shows = draw, shows
        self._controls = {one.name: one for one in controls}
        self._frames: OrderedDict[tuple[Any, ...], Frame] = OrderedDict()
        self._view: Any = None
        self.values: dict[str, Any] = {one.name: one.start for one in controls}
        # Drawn here, in the cell: an error in draw stops the notebook in every runner.
        self._first = self._frame()
        self._first_sentence = self._sentence(self._first)

    # What a test uses.

    def ends(self, name: str) -> tuple[Any, Any]:
        """First and last setting of a control."""
        settings = self._control(name).settings
        return settings[0], settings[-1]

    @property
    def figures(self) -> dict[str, Any]:
        """The printed figures of the present state."""
        return dict(self._frame().figures)

    def move(self, name: str, value: Any) -> dict[str, Any]:
        """Set one control as a reader would, through the widget when there is one, and give the figures.

        Raises:
            ValueError: for an unknown control or setting; whatever ``draw`` raises.
        """
        setting = self._control(name).setting(value)
        if self._view is None:
            self.values[name] = setting
        else:
            self._view.set(name, setting)
        return self.figures  # a state that could not be drawn is no frame yet: drawn again here, it raises

    def _control(self, name: str) -> Control:
        if name not in self._controls:
            raise ValueError(f"there is no control {name!r}; the controls are {', '.join(self._controls)}")
        return self._controls[name]

    # Drawing.

    def _frame(self) -> Frame:
        key = tuple(self.values.values())
        if key not in self._frames:
            self._frames[key] = self._drawn()
            if len(self._frames) > FRAMES_KEPT:
                self._frames.popitem(last=False)
        self._frames.move_to_end(key)
        return self._frames[key]

    def _drawn(self) -> Frame:
        import matplotlib.pyplot as plt

        before = set(plt.get_fignums())
        try:
            result = self._draw(**self.values)
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError(f"draw must give (figure, printed figures), got {type(result).__name__}")
            fig, figures = result
            check_figure(fig, "explore")
            return Frame(png_of(fig), _checked(figures))
        finally:
            for number in set(plt.get_fignums()) - before:
                plt.close(number)  # an open figure would be shown a second time by the notebook

    def _sentence(self, frame: Frame) -> str:
        settings = ", ".join(f"{self._controls[name].label} {_short(value)}" for name, value in self.values.items())
        figures = ", ".join(f"{name} {_short(value)}" for name, value in frame.figures.items())
        return f"{self._shows.rstrip('.')}. At {settings}: {figures}."

    # The live view.

    def attach(self) -> None:
        """Make the live view; without ipywidgets the picture stands alone, and a watching reader is told."""
        try:
            from neuclip_lib.course.explorer_view import View
        except ImportError:
            if is_watched():
                print('No sliders without ipywidgets: pip install "neuclip-course[course]", then restart the kernel.')
            return
        self._view = View(list(self._controls.values()), self._moved)
        self._view.picture(self._first.png, self._first_sentence)

    def _moved(self, values: Mapping[str, Any]) -> None:
        """Called by the view. No runner reports an error raised in a callback, so it is shown and logged here."""
        try:
            self.values = {name: self._controls[name].setting(value) for name, value in values.items()}
            frame = self._frame()
            self._view.picture(frame.png, self._sentence(frame))
        except Exception as error:
            self._view.problem(f"{type(error).__name__}: {error}")
            _log.exception("explore: drawing at %s failed", dict(values))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = png_bundle(self._first.png, self._first_sentence)
        if self._view is not None:
            data |= self._view.mime()
        return data, metadata

    def __repr__(self) -> str:
        return self._first_sentence


def _checked(figures: Any) -> dict[str, Any]:
    """Printed figures as plain numbers and texts."""
    if not isinstance(figures, dict) or not figures:
        raise ValueError(f"draw must give at least one printed figure as {{name: value}}, got {figures!r}")
    return {str(name): _plain(name, value) for name, value in figures.items()}


def _plain(name: Any, value: Any) -> Any:
    if hasattr(value, "item"):  # a tensor, an array or a numpy number
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the printed figure {name!r} must be one number, got {value!r}") from error
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"the printed figure {name!r} must be a number or a text, got {type(value).__name__}")
    return value


def _short(value: Any) -> str:
    """A number at three digits, as it holds on any processor."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
