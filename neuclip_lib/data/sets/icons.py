"""Interface icons and their names: the main retrieval set."""

from __future__ import annotations

import numpy as np

from neuclip_lib.data.render import svg_to_rgb
from neuclip_lib.data.spec import RawSet, SetSpec
from neuclip_lib.progress import track

SIZE = 32


def produce() -> RawSet:
    """Draw every icon that is not marked as deprecated; the caption is its name in words."""
    icons = sorted(_icons().items())
    pictures = [svg_to_rgb(svg, SIZE, slug) for slug, svg in track(icons, "icons: drawing")]
    slugs = [slug for slug, _ in icons]
    words = [slug.replace("-", " ") for slug in slugs]
    return RawSet(images=np.stack(pictures), captions=words, group=words, split_key=words, key=slugs)


def _icons() -> dict[str, str]:
    """SVG text by slug. The package keeps its icons as constants and flags those that were withdrawn."""
    import material_design_icons_pack as pack

    constants = (getattr(pack, name) for name in dir(pack))
    return {icon.slug: icon.svg for icon in constants if isinstance(icon, pack.Icon) and not icon.deprecated}


SPEC = SetSpec(
    name="icons",
    title="interface icons with their names",
    origin="Material Design Icons by Pictogrammers and its contributors, redistributed by material-design-icons-pack; "
    "captions are the published names, not sentences",
    licence="Apache-2.0 (some icons show trademarks of their owners)",
    attribution="",
    task="main retrieval set",
    image_size=SIZE,
    packages=("material-design-icons-pack", "resvg-py"),
    produce=produce,
    helpers=("neuclip_lib.data.render",),
    counts={"train": 5138, "validation": 1010, "test": 1040},
    note="Names are compositional, and near neighbours (X and X outline) fall on both sides of the split. 50 icons "
    "look exactly like another with a different name (letter O and digit 0); retrieval counts that name as wrong.",
)
