"""What the ranks of a run exchange. One process for now: the local batch is the global one."""

from __future__ import annotations

import os

from torch import Tensor

from neuclip_lib.contrast import GlobalBatch

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_one_process() -> None:
    """Refuse to start as one of several processes: each would train alone and all would write the same folder.

    Raises:
        RuntimeError: when the environment speaks of more than one process, naming the variables.
    """
    if os.environ.get("WORLD_SIZE", "1").strip() in ("", "1"):
        return
    found = [name for name in VARIABLES if name in os.environ]
    described = ", ".join(f"{name}={os.environ[name]}" for name in found)
    raise RuntimeError(
        f"the environment asks for several processes ({described}), and this trainer runs in one; "
        f"start it without torchrun, or, if an earlier launch left these variables behind, run: unset {' '.join(found)}"
    )


def gather(e1: Tensor, e2: Tensor, index: Tensor | None = None) -> GlobalBatch:
    """All ranks' embeddings, detached, in the same order on every rank.

    Args:
        e1: this rank's image embeddings ``[b, d]``, unit rows.
        e2: its text embeddings ``[b, d]``, unit rows.
        index: stable sample index of each pair ``[b]``.

    Raises:
        RuntimeError: when the environment speaks of more than one process.
    """
    require_one_process()
    return GlobalBatch(e1, e2, index)
