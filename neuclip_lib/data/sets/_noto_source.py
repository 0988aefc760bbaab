"""Where Noto's emoji can be found on a machine, and how each source draws one of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, features

from neuclip_lib.data.render import svg_to_rgba
from neuclip_lib.data.sets._emoji_names import Concept, file_stems
from neuclip_lib.files import sha256_of

VARIABLE = "NEUCLIP_NOTO"
FONT_NAME = "NotoColorEmoji.ttf"
STRIKE = 109  # the one size of the bitmaps in the font; Pillow opens it at no other
DRAWN = 128  # the size of those bitmaps, and of the view box of the npm package's drawings

HOW_TO_GET = (
    "get the font with: sudo apt-get install fonts-noto-color-emoji libfribidi0   "
    "or the drawings with: npm install @iconify-json/noto   "
    f"and set {VARIABLE} to the folder with its icons.json (it may also name a {FONT_NAME})"
)


class FontSource:
    """Bitmaps of the Noto Color Emoji font.

    Args:
        path: of the font file.

    Raises:
        RuntimeError: when the font does not open at its size, or Pillow cannot join sequences of characters.
    """

    def __init__(self, path: Path) -> None:
        if not (features.check("raqm") and features.check("fribidi")):
            raise RuntimeError(
                "Pillow cannot join characters into one emoji here: its text shaping (raqm) lacks the FriBiDi library; "
                "install libfribidi0 (Debian: sudo apt-get install libfribidi0), or " + HOW_TO_GET
            )
        try:
            # Not ImageFont.truetype: where a file does not open, it takes another of that name without a word.
            self.font = ImageFont.FreeTypeFont(path, STRIKE, layout_engine=ImageFont.Layout.RAQM)
        except OSError as error:
            raise RuntimeError(
                f"{path} does not open at size {STRIKE} ({error}): it is not the bitmap form of the font; {HOW_TO_GET}"
            ) from error
        self.one_glyph = self.font.getlength("\U0001f600")

    def draw(self, concept: Concept) -> Image.Image | None:
        """RGBA picture; None when the font has no single picture for the sequence and would show several."""
        text = concept.characters
        left, top, right, bottom = self.font.getbbox(text)
        if abs(self.font.getlength(text) - self.one_glyph) > 1 or bottom <= top:  # an unknown character has no height
            return None
        canvas = Image.new("RGBA", (int(right - left), int(bottom - top)))
        ImageDraw.Draw(canvas).text((-left, -top), text, font=self.font, embedded_color=True)
        # Pillow blends colour and alpha alike onto the clear canvas, which leaves colours multiplied by alpha.
        return Image.frombytes("RGBa", canvas.size, canvas.tobytes()).convert("RGBA")


class DrawingSource:
    """SVG drawings of the npm package ``@iconify-json/noto``.

    Args:
        folder: with ``icons.json`` and ``chars.json``.
    """

    def __init__(self, folder: Path) -> None:
        self.icons = json.loads((folder / "icons.json").read_text(encoding="utf-8"))["icons"]
        self.names = json.loads((folder / "chars.json").read_text(encoding="utf-8"))

    def draw(self, concept: Concept) -> Image.Image | None:
        """RGBA picture, or None when the package lacks the emoji."""
        name = next((self.names[s] for s in file_stems(concept.characters, digits=4)[::-1] if s in self.names), None)
        if name is None:
            return None
        body = self.icons[name]["body"]
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {DRAWN} {DRAWN}">{body}</svg>'
        )
        return svg_to_rgba(svg, DRAWN, name)


Source = FontSource | DrawingSource


def find() -> Path:
    """The font file, or the folder of drawings, that Noto is taken from.

    Raises:
        RuntimeError: when there is neither, naming both ways to get one; or when the variable names nothing usable.
    """
    if wanted := os.environ.get(VARIABLE):
        path = Path(wanted).expanduser()
        if path.is_file() or all((path / name).is_file() for name in ("icons.json", "chars.json")):
            return path
        raise RuntimeError(
            f"{VARIABLE}={wanted} is neither a folder with icons.json and chars.json nor a font file; {HOW_TO_GET}"
        )
    for font in _fonts():
        return font
    raise RuntimeError(f"Noto's emoji are not on this machine: no {FONT_NAME} and no {VARIABLE}; {HOW_TO_GET}")


def open_source(path: Path) -> Source:
    """The source at a path that ``find`` gave."""
    return DrawingSource(path) if path.is_dir() else FontSource(path)


def version(path: Path) -> Mapping[str, str]:
    """The first digits of the SHA-256 of what pictures come from, by its name."""
    file = path / "icons.json" if path.is_dir() else path
    return {f"noto {file.name}": sha256_of(file)[:16]}


def _fonts() -> Iterator[Path]:
    for folder in _font_folders():
        if folder.is_dir():
            yield from sorted(folder.rglob(FONT_NAME))


def _font_folders() -> list[Path]:
    user = Path.home()
    if sys.platform == "win32":
        return [Path(os.environ.get("WINDIR", r"C:\Windows")) / "Fonts"]
    if sys.platform == "darwin":
        return [user / "Library" / "Fonts", Path("/Library/Fonts")]
    return [
        user / ".local" / "share" / "fonts",
        user / ".fonts",
        Path("/usr/local/share/fonts"),
        Path("/usr/share/fonts"),
    ]
