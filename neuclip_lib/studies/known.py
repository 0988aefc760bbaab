"""The comparisons that have a name: ``python -m neuclip_lib compare NAME``."""

from __future__ import annotations

import difflib
from typing import Any

from neuclip_lib.studies import frozen, frozen_report, tracking, tracking_report
from neuclip_lib.studies.grid import Cell, Grid, Variant
from neuclip_lib.studies.oracle import Oracle

RATES = (1e-3, 2e-3, 4e-3)
SIX = ("gcl-batch", "openclip", "sogclr", "fastclip-v3", "neuclip", "neuclip-mixed")
RIDERS = ("sogclr", "neuclip")
"""Normalizers that ride along in the runs of ``gcl-batch``: there all see the same embeddings."""


NO_CAP = {"prototypes.weight_cap": None}


def _six(with_riders: bool = True) -> tuple[Variant, ...]:
    riders = {"shadows": RIDERS} if with_riders else {}
    return tuple(Variant(name, name, riders if name == SIX[0] else {}) for name in SIX)


def _mixed(name: str, **options: Any) -> Variant:
    return Variant(name, "neuclip-mixed", {f"prototypes.{key}": value for key, value in options.items()})


def _cell(batch_size: int, tau: float) -> Cell:
    return Cell(f"B={batch_size} tau={tau:g}", {"batch_size": batch_size, "temperature.init": tau})


GRIDS = {
    grid.study: grid
    for grid in (
        Grid(
            "map",
            "where does each normalizer win, on small data?",
            _six(),
            tuple(_cell(size, tau) for size in (128, 32) for tau in (0.05, 0.03)),
            seeds=(0, 1),
            passes=15,
            learning_rates=RATES,
        ),
        Grid(
            "long",
            "do those at the top of the map stay there, with more passes and one seed more?",
            tuple(Variant(name, name) for name in ("gcl-batch", "neuclip", "neuclip-mixed")),
            tuple(_cell(size, tau) for tau in (0.05, 0.03) for size in (32, 128)),
            seeds=(0, 1, 2),
            passes=40,
        ),
        Grid(
            "mixed",
            "which share of the batch, which prototypes and which cap suit neuclip-mixed?",
            (
                Variant("gcl-batch", "gcl-batch"),
                Variant("neuclip", "neuclip"),
                _mixed("share .2", batch_share=0.2),
                _mixed("share .5", batch_share=0.5),
                _mixed("share .8", batch_share=0.8),
                _mixed("share 1 to .2 in 8 passes", batch_share=0.2, share_decay_epochs=8),
                _mixed("share .2, m 1024", batch_share=0.2, m=1024),
                # The last m pairs themselves, of several batches, in the place of prototypes that learn.
                _mixed("share .2, recent pairs", batch_share=0.2, restart_every=1, updates=0),
                _mixed("share .5, recent pairs", batch_share=0.5, restart_every=1, updates=0),
                _mixed("share .2, recent pairs, 10 updates", batch_share=0.2, restart_every=1),
                _mixed("share .2, no cap", batch_share=0.2, weight_cap=None),
                _mixed("share .2, alpha held", batch_share=0.2, detach_alpha=True),
            ),
            (_cell(32, 0.05), _cell(128, 0.05)),
            seeds=(0, 1),
            passes=15,
            # What the preset had before this study chose; every candidate names its own.
            options={"prototypes.batch_share": 0.2},
            split="tune",
        ),
        Grid(
            "oracle",
            "how much of the distance from the best is the normalizer's error?",
            (
                Variant("gcl-batch", "gcl-batch"),
                Variant("neuclip", "neuclip"),
                Variant("neuclip-mixed", "neuclip-mixed"),
                Variant("oracle, held", "neuclip", oracle=Oracle(every=20, attached=False)),
                Variant("oracle, attached", "neuclip", oracle=Oracle(every=20, attached=True)),
                # NeuCLIP's cap hands few anchors to the batch's own normalizer, but the heaviest: once without it.
                Variant("oracle, held, no cap", "neuclip", NO_CAP, Oracle(every=20, attached=False)),
                Variant("oracle, attached, no cap", "neuclip", NO_CAP, Oracle(every=20, attached=True)),
            ),
            (_cell(128, 0.05), _cell(32, 0.05)),
            seeds=(0, 1, 2),
            passes=15,
        ),
        Grid(
            "noto",
            "which method names the emoji of a vendor that it has never seen?",
            _six(with_riders=False),
            (_cell(128, 0.05),),
            seeds=(0, 1, 2),
            passes=30,
            data="emoji",
            unseen=("noto",),
        ),
    )
}


OWN = {"tracking": (tracking.run, tracking_report.table, (0, 1)), "frozen": (frozen.run, frozen_report.table, (0,))}
"""Studies without an encoder: how each is measured and shown, and its seeds."""


def get_grid(name: str) -> Grid:
    """The comparison of that name.

    Raises:
        ValueError: for an unknown name, with the closest one and the list.
    """
    if name not in GRIDS:
        close = difflib.get_close_matches(name, [*GRIDS, *OWN], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no comparison {name!r}{hint}; there are {', '.join([*GRIDS, *OWN])}")
    return GRIDS[name]
